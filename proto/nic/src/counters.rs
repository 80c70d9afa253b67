//! What passes a NIC in each direction, by the counters of its driver.
//!
//! A hardware RDMA device counts RDMA only, and its network interface counts the rest, so both are
//! added. Software RDMA passes its network interface, which counts everything. Counters of the
//! kernel's sysfs are described in its Documentation/ABI/stable/sysfs-class-infiniband, those of a
//! driver in its source (`hw_stat_names` and the like).

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io};

use crate::dcbnl::{DcbError, pauses, query};
use crate::ethtool::sent_by_priority;
use crate::map::{PRIORITIES, PriorityMap};
use crate::ports::{RDMA_DEVICES, RdmaPort, is_called, rdma_ports};
use crate::rates::{is_active, nics};

/// The NIC name that stands for all devices.
const ANY: &str = "default";
/// Every interface in this process's own network namespace. `/sys` may show those of another.
const INTERFACES: &str = "proc/net/dev";
/// Fields of a row after the interface's name: received bytes, and sent bytes.
const RX_BYTES: usize = 0;
const TX_BYTES: usize = 8;
/// Minimum time between two requests to the driver.
const DRIVER_EVERY: Duration = Duration::from_secs(1);

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
    /// Bytes sent with priorities that the NIC serves only after those of the caller's DSCPs
    /// ([`PriorityMap::yields_to`]), as of at most a second ago. 0 if the NIC does not count bytes
    /// by priority.
    pub yielding_bytes: u64,
}

impl NicCounts {
    /// Combines each counter with the same one of `other`.
    pub(crate) fn with(self, other: Self, combine: impl Fn(u64, u64) -> u64) -> Self {
        let side = |one: DirectionCounts, other: DirectionCounts| DirectionCounts {
            bytes: combine(one.bytes, other.bytes),
            signals: combine(one.signals, other.signals),
        };
        Self {
            egress: side(self.egress, other.egress),
            ingress: side(self.ingress, other.ingress),
            yielding_bytes: combine(self.yielding_bytes, other.yielding_bytes),
        }
    }
}

/// A source of counters of one device.
pub(crate) trait CounterSource: Send {
    /// Returns the name of the source in reports.
    fn name(&self) -> &'static str;

    /// Reads the counters, or returns `None` if they can't be read now. `ours` are the DSCPs of the
    /// traffic to which bytes yield ([`NicCounts::yielding_bytes`]).
    fn read(&mut self, ours: &[u8]) -> Option<NicCounts>;
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

    fn read(&mut self, _: &[u8]) -> Option<NicCounts> {
        let table = fs::read_to_string(&self.table).ok()?;
        let mut rows = table.lines().filter_map(|row| row.split_once(':'));
        let (_, row) = rows.find(|(name, _)| name.trim() == self.name)?;
        let field = |at| row.split_ascii_whitespace().nth(at)?.parse().ok();
        let passed = |bytes| DirectionCounts { bytes, signals: 0 };
        let (egress, ingress) = (passed(field(TX_BYTES)?), passed(field(RX_BYTES)?));
        Some(NicCounts { egress, ingress, yielding_bytes: 0 })
    }
}

/// How a driver is asked for what sysfs does not have.
#[derive(Clone, Copy)]
pub struct NicDriver {
    /// Returns the settings of an interface: [`crate::query`].
    pub map: fn(&str) -> Result<PriorityMap, DcbError>,
    /// Returns the PFC frames that an interface received.
    pub pauses: fn(&str) -> Result<u64, DcbError>,
    /// Returns the bytes that an interface's port sent by priority.
    pub sent_by_priority: fn(&str) -> io::Result<[u64; PRIORITIES]>,
}

impl NicDriver {
    /// Asks the kernel.
    pub const KERNEL: Self = Self { map: query, pauses, sent_by_priority };
    /// Knows nothing.
    pub const NONE: Self = Self {
        map: |_| Err(DcbError::Unsupported),
        pauses: |_| Err(DcbError::Unsupported),
        sent_by_priority: |_| Err(io::ErrorKind::Unsupported.into()),
    };
}

/// What a driver said last.
#[derive(Clone, Copy, Default)]
struct Answers {
    asked: Option<Instant>,
    /// PFC frames.
    paused: u64,
    /// Bytes by priority, if they were read before.
    sent: Option<[u64; PRIORITIES]>,
    yielding_bytes: u64,
}

struct DevicePort {
    /// The port's folder, then the device's.
    folders: [PathBuf; 2],
    family: &'static Family,
    interface: Option<NetInterface>,
    driver: NicDriver,
    answers: Answers,
}

impl DevicePort {
    /// Returns the driver's answers, which are at most a second old, because the kernel asks the
    /// driver under the RTNL lock, which all interfaces share. An answer that can't be had keeps
    /// its last value.
    fn answers(&mut self, ours: &[u8]) -> Answers {
        let Some(interface) = &self.interface else { return self.answers };
        let last = &mut self.answers;
        if last.asked.is_some_and(|at| at.elapsed() < DRIVER_EVERY) {
            return *last;
        }
        let NicDriver { map, pauses, sent_by_priority } = self.driver;
        last.paused = pauses(&interface.name).unwrap_or(last.paused);
        let yields = map(&interface.name).map_or(0, |map| map.yields_to(ours));
        if yields != 0
            && let Ok(sent) = sent_by_priority(&interface.name)
        {
            // The sum of what each counter moved by, because `yields` may change.
            let before = last.sent.replace(sent).unwrap_or(sent);
            let each = sent.iter().zip(before).enumerate().filter(|(at, _)| yields >> at & 1 == 1);
            let moved = each.map(|(_, (now, before))| now.saturating_sub(before));
            last.yielding_bytes = moved.fold(last.yielding_bytes, u64::wrapping_add);
        }
        last.asked = Some(Instant::now());
        *last
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

    fn read(&mut self, ours: &[u8]) -> Option<NicCounts> {
        let (mut egress, mut ingress) =
            (self.passed(&self.family.egress)?, self.passed(&self.family.ingress)?);
        let answers = self.answers(ours);
        egress.signals = egress.signals.wrapping_add(answers.paused);
        if let Some(other) = self.interface.as_mut().and_then(|it| it.read(ours)) {
            egress.bytes = egress.bytes.wrapping_add(other.egress.bytes);
            ingress.bytes = ingress.bytes.wrapping_add(other.ingress.bytes);
        }
        Some(NicCounts { egress, ingress, yielding_bytes: answers.yielding_bytes })
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
pub(crate) fn source_of(
    root: &Path,
    nic: &str,
    driver: NicDriver,
) -> Option<Box<dyn CounterSource>> {
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
    device(root, port, beside, driver)
}

/// Returns the source of the RDMA device of this name without its interface, or of the interface of
/// this name.
pub(crate) fn source_alone(root: &Path, name: &str) -> Option<Box<dyn CounterSource>> {
    match rdma_ports(root).iter().find(|port| port.device == name) {
        // What a driver says is of the whole port, which its owner counts.
        Some(port) => device(root, port, None, NicDriver::NONE),
        None => interface(root, name),
    }
}

fn interface(root: &Path, name: &str) -> Option<Box<dyn CounterSource>> {
    let mut found = NetInterface::new(root, name);
    found.read(&[]).is_some().then(|| Box::new(found) as Box<dyn CounterSource>)
}

fn device(
    root: &Path,
    port: &RdmaPort,
    beside: Option<&str>,
    driver: NicDriver,
) -> Option<Box<dyn CounterSource>> {
    let device = root.join(RDMA_DEVICES).join(&port.device);
    let folders = [device.join("ports").join(&port.number), device];
    let mut devices = FAMILIES.iter().map(|family| DevicePort {
        folders: folders.clone(),
        family,
        interface: beside.map(|name| NetInterface::new(root, name)),
        driver,
        answers: Answers::default(),
    });
    devices.find(DevicePort::has_all).map(|it| Box::new(it) as Box<dyn CounterSource>)
}
