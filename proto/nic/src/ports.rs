//! The RDMA ports of a host, and what their NICs do with each DSCP together.
//!
//! The kernel's Documentation/ABI/stable/sysfs-class-infiniband describes the folder. All functions
//! take the folder that stands for `/`, which tests replace.

use std::fs;
use std::path::Path;

use laxity_types::marking::Treatments;

use crate::dcbnl::DcbError;
use crate::map::{PriorityMap, Trust};

pub(crate) const RDMA_DEVICES: &str = "sys/class/infiniband";
pub(crate) const INTERFACES: &str = "sys/class/net";
/// The driver whose NICs trust PCP as long as no DSCP is mapped.
const MLX5: &str = "mlx5_core";

/// A port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaPort {
    /// The device's name, such as `mlx5_0`.
    pub device: String,
    /// The port's number, from 1.
    pub number: String,
    /// The network interface, if there is one in this network namespace.
    pub interface: Option<String>,
    /// The link layer: `Ethernet`, `InfiniBand`, or another one.
    pub link_layer: String,
    /// Whether software implements the device (rxe, siw), so that no packet of it relies on PFC.
    pub is_software: bool,
    /// The device that owns the port, if this one is a function: [`owner`].
    pub owner: Option<String>,
}

pub(crate) fn text(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// Returns the sorted names in a folder. There are none if it does not exist.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Returns the device that owns the port of a function: the RDMA device of an RDMA device, else the
/// network interface of an interface, or the bond that has it. A virtual function (SR-IOV) links to
/// its owner, and a subfunction lies in its owner's folder. Returns `None` for the owner itself,
/// and if this network namespace lacks the owner. Only folders are read, so no driver is asked.
pub fn owner(root: &Path, name: &str) -> Option<String> {
    [(RDMA_DEVICES, "infiniband"), (INTERFACES, "net")].into_iter().find_map(|(class, kind)| {
        let class = root.join(class);
        let above = ["physfn", ".."].map(|up| class.join(name).join("device").join(up).join(kind));
        let mut found = above.iter().flat_map(|folder| names(folder));
        let owner = found.find(|found| found != name && class.join(found).exists())?;
        let master = fs::read_link(class.join(&owner).join("master")).unwrap_or_default();
        let bond = master.file_name().filter(|bond| class.join(bond).join("bonding").exists());
        Some(bond.map_or(owner, |bond| bond.to_string_lossy().into_owned()))
    })
}

/// Reports whether a device has a NIC's name: its own, or that of its interface or RDMA device.
pub fn is_called(ports: &[RdmaPort], device: &str, nic: &str) -> bool {
    let is_pair = |port: &RdmaPort, device, interface| {
        port.device == device && port.interface.as_deref() == Some(interface)
    };
    let are_one = |port| is_pair(port, device, nic) || is_pair(port, nic, device);
    device == nic || ports.iter().any(are_one)
}

/// Returns the ports of all RDMA devices.
pub fn rdma_ports(root: &Path) -> Vec<RdmaPort> {
    let mut ports = Vec::new();
    let devices = root.join(RDMA_DEVICES);
    for device in names(&devices) {
        let folder = devices.join(&device);
        let parent = text(&folder.join("parent"));
        let place = fs::canonicalize(&folder).unwrap_or_default();
        let is_virtual = place.to_string_lossy().contains("/devices/virtual/");
        let is_software = parent.is_some() || is_virtual;
        let owner = owner(root, &device).filter(|_| !is_software);
        for number in names(&folder.join("ports")) {
            let port = folder.join("ports").join(&number);
            ports.push(RdmaPort {
                // A function's interface may be in a pod, and another interface may have its name
                // here.
                interface: text(&port.join("gid_attrs/ndevs/0"))
                    .filter(|_| owner.is_none())
                    .or_else(|| parent.clone())
                    .or_else(|| names(&folder.join("device/net")).pop()),
                link_layer: text(&port.join("link_layer")).unwrap_or_default(),
                is_software,
                owner: owner.clone(),
                device: device.clone(),
                number,
            });
        }
    }
    ports
}

/// Returns the priorities of an interface on which ECN holds for RoCE, as notification point and as
/// reaction point. Drivers of OFED say it, others don't.
pub fn ecn(root: &Path, interface: &str) -> Option<u8> {
    let side = |side: &str| {
        let folder = root.join(INTERFACES).join(interface).join("ecn").join(side).join("enable");
        let bit = |priority: u8| {
            let value = text(&folder.join(priority.to_string()))?;
            Some(u8::from(value == "1") << priority)
        };
        (0..8).map(bit).try_fold(0, |mask, bit| Some(mask | bit?))
    };
    Some(side("roce_np")? & side("roce_rp")?)
}

/// Returns the settings of the NICs behind an interface: its own, or those of the interfaces below
/// a bond or a VLAN. `query` is [`crate::query`].
///
/// # Errors
/// Returns the errors of `query`. The settings are then unknown.
pub fn map_of(
    root: &Path,
    interface: &str,
    query: &dyn Fn(&str) -> Result<PriorityMap, DcbError>,
) -> Result<Vec<PriorityMap>, DcbError> {
    let folder = root.join(INTERFACES).join(interface);
    let mut map = match query(interface) {
        Err(DcbError::Unsupported) => {
            let below = names(&folder);
            let below: Vec<&str> = below.iter().filter_map(|n| n.strip_prefix("lower_")).collect();
            if below.is_empty() {
                return Err(DcbError::Unsupported);
            }
            let maps = below.iter().map(|lower| map_of(root, lower, query));
            return Ok(maps.collect::<Result<Vec<_>, _>>()?.concat());
        }
        answer => answer?,
    };
    map.ecn = ecn(root, interface);
    if map.trust.is_none() {
        let driver = fs::read_link(folder.join("device/driver")).unwrap_or_default();
        map.trust = driver.ends_with(MLX5).then_some(Trust::Pcp);
    }
    Ok(vec![map])
}

/// Returns which DSCPs are alike for everything that leaves through the RoCE ports that `is_ours`
/// selects. Without any, nothing relies on a lossless priority, so all are alike.
///
/// A hardware port whose settings can't be read makes all unknown. Software RDMA needs no lossless
/// priority, so its port counts only if its interface has settings. Packets of a function leave by
/// the port of its owner, which knows the settings.
pub fn treatments(
    root: &Path,
    is_ours: impl Fn(&RdmaPort) -> bool,
    query: &dyn Fn(&str) -> Result<PriorityMap, DcbError>,
) -> Treatments {
    let mut ours = rdma_ports(root);
    ours.retain(is_ours);
    let has_owner =
        |port: &&RdmaPort| ours.iter().any(|it| Some(&it.device) == port.owner.as_ref());
    let roce = ours.iter().filter(|port| port.link_layer == "Ethernet" && !has_owner(port));
    roce.fold(Treatments::ALL_ALIKE, |all, port| {
        let maps = match &port.interface {
            Some(interface) => map_of(root, interface, query),
            None => Err(DcbError::NoDevice(port.device.clone())),
        };
        let of_port = match maps {
            Ok(maps) => maps
                .iter()
                .fold(Treatments::ALL_ALIKE, |together, map| together.and(&map.treatments())),
            Err(_) if port.is_software => Treatments::ALL_ALIKE,
            Err(_) => Treatments::UNKNOWN,
        };
        all.and(&of_port)
    })
}
