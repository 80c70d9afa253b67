//! Checks of RDMA devices and their network: ports, GIDs, and forced traffic classes.
//!
//! The kernel's Documentation/ABI/stable/sysfs-class-infiniband describes `/sys/class/infiniband`.

use laxity_nic::{RdmaPort, rdma_ports};
use laxity_wire::{LevelStatus, PortStatus, Status};

use super::finding::Finding;
use super::root::Root;
use crate::class_table::Layers;

const CLASS: &str = "/sys/class/infiniband";

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct NicPort {
    /// The device's name, such as `mlx5_0`.
    pub(crate) device: String,
    /// The port's number, from 1.
    pub(crate) number: String,
    /// The network interface, if there is one.
    pub(crate) netdev: Option<String>,
    /// The device that owns the port, if this one is a function.
    pub(crate) owner: Option<String>,
    /// Whether the port is RoCE, rather than InfiniBand or EFA.
    pub(crate) ethernet: bool,
    pub(crate) link_layer: String,
    pub(crate) active: bool,
    state: String,
    rate_gbit: Option<f64>,
}

impl NicPort {
    fn subject(&self) -> String {
        format!("{}/{}", self.device, self.number)
    }

    /// Reports whether a NIC of the daemon has the name of this device or of its interface.
    pub(crate) fn is_called(&self, nic: &str) -> bool {
        nic == self.device || Some(nic) == self.netdev.as_deref()
    }

    fn path(&self, rest: &str) -> String {
        format!("{CLASS}/{}/ports/{}/{rest}", self.device, self.number)
    }
}

/// Runs a tool with arguments. Returns its output, if it is installed and succeeds.
pub(crate) type Tool<'a> = &'a dyn Fn(&str, &[&str]) -> Option<String>;

pub(crate) fn ports(root: &Root) -> Vec<NicPort> {
    let port = |port: RdmaPort| {
        let folder = format!("{CLASS}/{}/ports/{}", port.device, port.number);
        let state = root.text(&format!("{folder}/state")).unwrap_or_else(|| "unknown".to_owned());
        NicPort {
            netdev: port.interface,
            owner: port.owner,
            ethernet: port.link_layer == "Ethernet",
            link_layer: port.link_layer,
            active: state.contains("ACTIVE"),
            rate_gbit: root.text(&format!("{folder}/rate")).and_then(|rate| gbit(&rate)),
            state,
            device: port.device,
            number: port.number,
        }
    };
    rdma_ports(root.path()).into_iter().map(port).collect()
}

/// Returns the link layers of a host's ports. A host without RDMA ports may start containers for
/// other hosts, whose ports are more often RoCE.
pub(crate) fn layers(ports: &[NicPort]) -> Layers {
    let infiniband = ports.iter().any(|port| port.link_layer == "InfiniBand");
    Layers { roce: ports.is_empty() || ports.iter().any(|port| port.ethernet), infiniband }
}

/// Parses the rate of a port, such as `"100 Gb/sec (4X EDR)"`.
fn gbit(rate: &str) -> Option<f64> {
    let (number, unit) = rate.split_once(' ')?;
    unit.starts_with("Gb/sec").then(|| number.parse().ok())?
}

/// Returns how the levels are told apart on a port that is not Ethernet.
pub(crate) fn marking(port: &NicPort, status: Option<&Status>) -> String {
    if port.link_layer != "InfiniBand" {
        return "software order only: Laxity sets no class on EFA".to_owned();
    }
    let levels = status.and_then(|status| status.ports.first()).map_or(&[][..], |p| &p.levels);
    let run = |run: &[LevelStatus]| {
        let (first, last) = (run.first()?, run.last()?);
        let to = if run.len() > 1 { format!("-{}", last.level) } else { String::new() };
        Some(format!("{}{to} SL {}", first.level, first.sl?))
    };
    let named: Vec<String> =
        levels.chunk_by(|one, other| one.sl == other.sl).filter_map(run).collect();
    match named.is_empty() {
        true => "software order only: no service levels are configured".to_owned(),
        false => format!("InfiniBand: {}", named.join(", ")),
    }
}

fn service_levels(port: &NicPort, status: Option<&Status>) -> Finding {
    let finding = Finding::info("marking", marking(port, status));
    if port.link_layer != "InfiniBand" {
        return finding
            .because("Laxity knows no way to set a DSCP on EFA, and sets no service level there");
    }
    finding
        .because("levels are not ordered where their service levels share a virtual lane")
        .action(format!(
            "smpquery -C {} sl2vl LID, and vlarb LID; ask who runs the subnet manager before you \
             set sl of [levels] in laxityd.toml",
            port.device
        ))
}

/// Checks the state of each port, and whether the daemon has a NIC for it with its rate.
pub(crate) fn devices(ports: &[NicPort], status: Option<&Status>) -> Vec<Finding> {
    let mut findings = absent(status);
    if ports.is_empty() {
        let why = "the preload library has nothing to do here; clients of laxity.h send over \
            whatever they like";
        let action = "rdma link; modprobe the NIC's driver, or rdma link add rxe0 type rxe netdev \
            eth0 to try it in software";
        findings.push(Finding::info("device", "no RDMA device").because(why).action(action));
        return findings;
    }
    for port in ports {
        let layer = if port.ethernet { "RoCE" } else { &port.link_layer };
        let rate = port.rate_gbit.map_or("rate unknown".to_owned(), |r| format!("{r} Gbit/s"));
        let netdev = port.netdev.as_deref().unwrap_or("no network interface");
        let found = format!("{}, {layer}, {rate}, {netdev}", port.state);
        findings.push(if port.active {
            Finding::ok("device", found).about(port.subject())
        } else {
            Finding::warn("device", found)
                .about(port.subject())
                .because("no traffic passes through a port that is not active")
                .action(format!("rdma link show {}; check cable and switch", port.subject()))
        });
        if !port.ethernet {
            findings.push(service_levels(port, status).about(port.subject()));
        }
    }
    if let Some(status) = status {
        findings.extend(configured(ports, status));
    }
    findings
}

/// Names the NICs that the daemon had found and the host no longer has.
fn absent(status: Option<&Status>) -> Vec<Finding> {
    let ports = status.into_iter().flat_map(|status| &status.ports);
    let absent = ports.filter(|port| port.absent && port.direction == "egress");
    let finding = |port: &PortStatus| {
        Finding::warn("nic", "the daemon had found this NIC, and it is gone")
            .about(&port.name)
            .because("its flows go out unscheduled until it returns, which the daemon notices")
            .action("rdma link; ip link; dmesg; restart laxityd if the NIC was removed for good")
    };
    absent.map(finding).collect()
}

fn configured(ports: &[NicPort], status: &Status) -> Vec<Finding> {
    let nics: Vec<_> = status.ports.iter().filter(|p| p.direction == "egress").collect();
    let is_nic = |port: &&NicPort| nics.iter().any(|nic| port.is_called(&nic.name));
    let shares = |port: &&NicPort| port.owner.is_some() && !is_nic(port);
    let active: Vec<_> = ports.iter().filter(|port| port.active && !shares(port)).collect();
    let mut findings = Vec::new();
    for port in &active {
        let named = nics.iter().find(|nic| port.is_called(&nic.name));
        // With one NIC and one port, they belong together whatever their names are.
        let only = nics.first().filter(|_| nics.len() == 1 && active.len() == 1);
        let Some(nic) = named.or(only) else {
            let missing = "the daemon has no NIC of this device's or interface's name";
            let why =
                "its traffic counts on another NIC's port, whose rate and queue are not its own";
            let action = format!(
                "add [[nic]] name = \"{}\" with its rate to /etc/laxity/laxityd.toml; systemctl \
                 restart laxityd",
                port.device
            );
            let finding = Finding::warn("nic", missing).about(port.subject());
            findings.push(finding.because(why).action(action));
            continue;
        };
        let Some(real) = port.rate_gbit else { continue };
        let believed = nic.rate_bytes_per_s as f64 * 8.0 / 1e9;
        if (believed - real).abs() > 0.05 * real {
            let wrong = format!(
                "the daemon takes it for {believed} Gbit/s, the port runs at {real} Gbit/s"
            );
            let action = format!(
                "set rate = \"{real}Gbit\" of [[nic]] \"{}\" in /etc/laxity/laxityd.toml; \
                 systemctl reload laxityd",
                nic.name
            );
            let why = "deadlines are judged, and bytes in flight bounded, by the wrong rate";
            let finding = Finding::warn("nic", wrong).about(port.subject());
            findings.push(finding.because(why).action(action));
        } else {
            let functions = ports.iter().filter(shares);
            let functions = functions.filter(|it| it.owner.as_ref() == Some(&port.device)).count();
            let shared = match functions {
                0 => String::new(),
                1 => ", shared by 1 function".to_owned(),
                _ => format!(", shared by {functions} functions"),
            };
            let right = format!("NIC {} of the daemon, {believed} Gbit/s{shared}", nic.nic);
            findings.push(Finding::ok("nic", right).about(port.subject()));
        }
    }
    findings
}

/// Checks whether each RoCE port has an address whose packets carry a DSCP.
pub(crate) fn gids(root: &Root, ports: &[NicPort]) -> Vec<Finding> {
    let roce = ports.iter().filter(|port| port.ethernet);
    roce.map(|port| gid(root, port).about(port.subject())).collect()
}

fn gid(root: &Root, port: &NicPort) -> Finding {
    let (mut mapped, mut other_v2, mut v1) = (Vec::new(), Vec::new(), Vec::new());
    for index in root.names(&port.path("gids")) {
        let Some(gid) = root.text(&port.path(&format!("gids/{index}"))) else { continue };
        let kind = root.text(&port.path(&format!("gid_attrs/types/{index}")));
        if gid.bytes().all(|b| b == b'0' || b == b':') {
            continue;
        }
        let is_mapped = gid.starts_with("0000:0000:0000:0000:0000:ffff:");
        match kind.as_deref() {
            Some("RoCE v2") if is_mapped => mapped.push(index),
            Some("RoCE v2") => other_v2.push(index),
            _ => v1.push(index),
        }
    }
    let address = format!("ip address add … dev {}", port.netdev.as_deref().unwrap_or("…"));
    if !mapped.is_empty() {
        Finding::ok("gid", format!("RoCEv2 over IPv4 at index {}", mapped.join(", ")))
    } else if !other_v2.is_empty() {
        Finding::info("gid", format!("RoCEv2 over IPv6 only, at index {}", other_v2.join(", ")))
            .because("packets carry a DSCP; libraries that pick a GID by IPv4 find none")
            .action(address)
    } else if !v1.is_empty() {
        Finding::warn("gid", "RoCE v1 only")
            .because(
                "its packets have no IP header, so no DSCP: switches can't tell Laxity's \
                levels apart",
            )
            .action(format!("{address}; the kernel adds a RoCEv2 GID for each address"))
    } else {
        Finding::warn("gid", "no GID")
            .because("no queue pair can be connected through this port")
            .action(address)
    }
}

fn forced_file(port: &NicPort) -> String {
    format!("{CLASS}/{}/tc/{}/traffic_class", port.device, port.number)
}

/// Returns the class that the driver forces on every verbs queue pair of a port. MLNX_OFED writes
/// "Global tclass=106", or nothing if no class is forced.
pub(crate) fn forced(root: &Root, port: &NicPort) -> Option<u8> {
    root.text(&forced_file(port)).and_then(|text| number_in(&text))
}

pub(crate) fn forced_class(root: &Root, ports: &[NicPort]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for port in ports {
        let file = forced_file(port);
        if let Some(class) = forced(root, port) {
            let found = format!("{file} forces class {class} on every queue pair");
            let finding = Finding::error("forced-class", found)
                .about(port.subject())
                .because("neither Laxity's classes nor a job's own reach the wire")
                .action(format!("echo -1 > {file}"));
            findings.push(finding);
        }
        let cm = format!(
            "/sys/kernel/config/rdma_cm/{}/ports/{}/default_roce_tos",
            port.device, port.number
        );
        if let Some(tos) = root.text(&cm).and_then(|text| number_in(&text)).filter(|tos| *tos != 0)
        {
            let found = format!("connections of librdmacm begin with ToS {tos}");
            let why = "a program that connects through rdma_cm and sets nothing has this class; a \
                profile whose default_traffic_class differs takes it for a pin";
            let action =
                format!("echo 0 > {cm}, or set default_traffic_class = {tos} in the job's profile");
            let finding = Finding::info("default-tos", found).about(port.subject());
            findings.push(finding.because(why).action(action));
        }
    }
    findings
}

/// Returns the last number of `text`, if it is not negative.
fn number_in(text: &str) -> Option<u8> {
    let digits = text.rsplit(|c: char| !c.is_ascii_digit()).find(|d| !d.is_empty())?;
    let negative = text.contains(&format!("-{digits}"));
    digits.parse().ok().filter(|_| !negative)
}
