//! What passes a NIC in each direction, by the counters of its driver.
//!
//! A hardware RDMA device counts RDMA only, and its network interface counts the rest, so both are
//! added. Software RDMA passes its network interface, which counts everything. Counters of the
//! kernel's sysfs are described in its Documentation/ABI/stable/sysfs-class-infiniband, those of a
//! driver in its source (`hw_stat_names` and the like).

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::dcbnl::DcbError;
use crate::ports::{RDMA_DEVICES, RdmaPort, is_called, rdma_ports};
use crate::rates::{is_active, nics};

/// The NIC name that stands for all devices.
const ANY: &str = "default";
/// Every interface in this process's own network namespace. `/sys` may show those of another.
const INTERFACES: &str = "proc/net/dev";
/// Fields of a row after the interface's name: received bytes, and sent bytes.
const RX_BYTES: usize = 0;
const TX_BYTES: usize = 8;
/// How often PFC frames are read at most.
const PAUSES_EVERY: Duration = Duration::from_secs(1);

/// The counters of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectionCounts {
    /// Bytes on the wire, so headers count too. The counter wraps.
    pub bytes: u64,
    /// Signals of congestion: CNPs and PFC frames that slowed this sender, or marked packets that
    /// it received.
    pub signals: u64,
}

/// The counters of a NIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NicCounts {
    /// What left the NIC for the network.
    pub egress: DirectionCounts,
    /// What came from the network into the NIC.
    pub ingress: DirectionCounts,
}

impl NicCounts {
    /// Combines each counter with the same one of `other`.
    pub(crate) fn with(self, other: Self, combine: impl Fn(u64, u64) -> u64) -> Self {
        let side = |one: DirectionCounts, other: DirectionCounts| DirectionCounts {
            bytes: combine(one.bytes, other.bytes),
            signals: combine(one.signals, other.signals),
        };
        Self { egress: side(self.egress, other.egress), ingress: side(self.ingress, other.ingress) }
    }
}

/// A source of counters of one device.
pub(crate) trait CounterSource: Send {
    /// Returns the name of the source in reports.
    fn name(&self) -> &'static str;

    /// Reads the counters, or returns `None` if they can't be read now.
    fn read(&mut self) -> Option<NicCounts>;
}

/// The files of one direction. Bytes and signals are sums over all that exist.
struct Files {
    bytes: &'static [&'static str],
    signals: &'static [&'static str],
}

/// The counters of a driver's devices.
struct Family {
    name: &'static str,
    /// Bytes in one unit of the byte counters.
    unit: u64,
    egress: Files,
    ingress: Files,
}

/// The families, in order. The first one with all its byte counters is taken.
const FAMILIES: [Family; 3] = [
    Family {
        name: "irdma",
        unit: 1,
        egress: Files {
            bytes: &["hw_counters/ip4OutOctets", "hw_counters/ip6OutOctets"],
            signals: &["hw_counters/cnpHandled"],
        },
        ingress: Files {
            bytes: &["hw_counters/ip4InOctets", "hw_counters/ip6InOctets"],
            signals: &["hw_counters/RxECNMrkd"],
        },
    },
    // bnxt_re, and EFA, which counts no congestion.
    Family {
        name: "hw_counters",
        unit: 1,
        egress: Files { bytes: &["hw_counters/tx_bytes"], signals: &["hw_counters/rx_cnp_pkts"] },
        ingress: Files {
            bytes: &["hw_counters/rx_bytes"],
            signals: &["hw_counters/rx_ecn_marked_pkts"],
        },
    },
    // PMA counters, which mlx5 has for RoCE and InfiniBand. They count words of four bytes.
    Family {
        name: "pma",
        unit: 4,
        egress: Files {
            bytes: &["counters/port_xmit_data"],
            signals: &["hw_counters/rp_cnp_handled"],
        },
        ingress: Files {
            bytes: &["counters/port_rcv_data"],
            signals: &["hw_counters/np_ecn_marked_roce_packets"],
        },
    },
];

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

struct NetInterface {
    table: PathBuf,
    name: String,
}

impl NetInterface {
    fn new(root: &Path, name: &str) -> Self {
        Self { table: root.join(INTERFACES), name: name.to_owned() }
    }
}

impl CounterSource for NetInterface {
    fn name(&self) -> &'static str {
        "netdev"
    }

    fn read(&mut self) -> Option<NicCounts> {
        let table = fs::read_to_string(&self.table).ok()?;
        let mut rows = table.lines().filter_map(|row| row.split_once(':'));
        let (_, row) = rows.find(|(name, _)| name.trim() == self.name)?;
        let field = |at| row.split_ascii_whitespace().nth(at)?.parse().ok();
        let passed = |bytes| DirectionCounts { bytes, signals: 0 };
        Some(NicCounts { egress: passed(field(TX_BYTES)?), ingress: passed(field(RX_BYTES)?) })
    }
}

struct DevicePort {
    /// The port's folder, then the device's.
    folders: [PathBuf; 2],
    family: &'static Family,
    interface: Option<NetInterface>,
    pauses: Pauses,
    /// PFC frames, and when they were read.
    paused: Option<(Instant, u64)>,
}

/// Returns the PFC frames that an interface received: [`crate::pauses`].
pub type Pauses = fn(&str) -> Result<u64, DcbError>;

impl DevicePort {
    /// Returns the PFC frames that were received, by a reading that is a second old at most. The
    /// kernel asks the driver for them under its lock of all interfaces.
    fn paused(&mut self) -> u64 {
        let Some(interface) = &self.interface else { return 0 };
        match self.paused {
            Some((at, frames)) if at.elapsed() < PAUSES_EVERY => frames,
            before => {
                let last = before.map_or(0, |(_, frames)| frames);
                let frames = (self.pauses)(&interface.name).unwrap_or(last);
                self.paused = Some((Instant::now(), frames));
                frames
            }
        }
    }

    fn file(&self, name: &str) -> Option<u64> {
        self.folders.iter().find_map(|folder| number(&folder.join(name)))
    }

    fn passed(&self, files: &Files) -> Option<DirectionCounts> {
        let mut each = files.bytes.iter().map(|name| self.file(name));
        let bytes = each.try_fold(0_u64, |sum, bytes| Some(sum.wrapping_add(bytes?)))?;
        let signals = files.signals.iter().filter_map(|name| self.file(name));
        let signals = signals.fold(0, u64::wrapping_add);
        Some(DirectionCounts { bytes: bytes.wrapping_mul(self.family.unit), signals })
    }

    fn has_all(&self) -> bool {
        let files = [&self.family.egress, &self.family.ingress];
        files.iter().flat_map(|files| files.bytes).all(|name| self.file(name).is_some())
    }
}

impl CounterSource for DevicePort {
    fn name(&self) -> &'static str {
        self.family.name
    }

    fn read(&mut self) -> Option<NicCounts> {
        let (mut egress, mut ingress) =
            (self.passed(&self.family.egress)?, self.passed(&self.family.ingress)?);
        egress.signals = egress.signals.wrapping_add(self.paused());
        if let Some(other) = self.interface.as_mut().and_then(CounterSource::read) {
            egress.bytes = egress.bytes.wrapping_add(other.egress.bytes);
            ingress.bytes = ingress.bytes.wrapping_add(other.ingress.bytes);
        }
        Some(NicCounts { egress, ingress })
    }
}

/// Returns the name of a NIC's device. That of `default` is the only NIC of the host, if there is
/// only one.
pub fn device_of(root: &Path, nic: &str) -> String {
    let only = (nic == ANY).then(|| nics(root)).filter(|nics| nics.len() == 1);
    only.and_then(|mut nics| nics.pop()).unwrap_or_else(|| nic.to_owned())
}

/// Returns the source of a NIC: its RDMA device and the network interface beside it, else its
/// interface.
pub(crate) fn source_of(root: &Path, nic: &str, pauses: Pauses) -> Option<Box<dyn CounterSource>> {
    let ports = rdma_ports(root);
    let nic = device_of(root, nic);
    let mut of_nic = ports.iter().filter(|port| is_called(&ports, &port.device, &nic));
    let active = of_nic.clone().find(|port| is_active(root, port));
    let port = active.or_else(|| of_nic.next());
    let Some(port) = port.filter(|port| !port.is_software) else {
        return interface(root, port.and_then(|port| port.interface.as_deref()).unwrap_or(&nic));
    };
    // IPoIB is RDMA, so an InfiniBand port has counted it.
    let beside = port.interface.as_deref().filter(|_| port.link_layer == "Ethernet");
    device(root, port, beside, pauses)
}

/// Returns the source of the RDMA device of this name without its interface, or of the interface of
/// this name.
pub(crate) fn source_alone(root: &Path, name: &str) -> Option<Box<dyn CounterSource>> {
    match rdma_ports(root).iter().find(|port| port.device == name) {
        // PFC frames are the port's, which its owner counts.
        Some(port) => device(root, port, None, |_| Err(DcbError::Unsupported)),
        None => interface(root, name),
    }
}

fn interface(root: &Path, name: &str) -> Option<Box<dyn CounterSource>> {
    let mut found = NetInterface::new(root, name);
    found.read().is_some().then(|| Box::new(found) as Box<dyn CounterSource>)
}

fn device(
    root: &Path,
    port: &RdmaPort,
    beside: Option<&str>,
    pauses: Pauses,
) -> Option<Box<dyn CounterSource>> {
    let device = root.join(RDMA_DEVICES).join(&port.device);
    let folders = [device.join("ports").join(&port.number), device];
    let mut devices = FAMILIES.iter().map(|family| DevicePort {
        folders: folders.clone(),
        family,
        interface: beside.map(|name| NetInterface::new(root, name)),
        pauses,
        paused: None,
    });
    devices.find(DevicePort::has_all).map(|it| Box::new(it) as Box<dyn CounterSource>)
}
