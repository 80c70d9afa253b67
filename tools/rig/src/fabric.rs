//! The network of the lab: a bridge, one veth pair per host, and strict priority by DSCP at the two
//! places with queues: the host's own port (its NIC) and the switch's port towards it.
//!
//! The fabric is the same for every policy. Only the marks of packets differ. A kernel without
//! `prio` uses HTB, which serves its classes in strict priority if each has a tiny assured rate and
//! may borrow everything (measured: 957/0 Mbit/s between two greedy classes). Three settings make
//! the fabric behave like a RoCE fabric:
//!
//! * `gso_max_size` bounds the unit that a queue sends at once, so priority acts within 16 KiB
//!   instead of 64 KiB (2.6 ms at 200 Mbit/s);
//! * queues are long enough not to drop, and the socket buffers of connections bound what is in
//!   them. So under `none`, all traffic shares one short lossless FIFO, which is a fair baseline;
//! * neighbours are static, so no ARP request waits behind data.
//!
//! Control messages between the lab's processes have a class above all others, under every policy.
//! In a real cluster they use another network.
//!
//! Unmarked traffic (`none` and unscheduled traffic) has the class just above the lowest level,
//! because best effort is neither urgent nor scavenger traffic.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::config::LabConfig;

/// MTU of every link, in bytes. RoCE fabrics use jumbo frames, too.
pub const MTU: u32 = 9000;
const GSO_BYTES_MAX: u32 = 16 << 10;

/// HTB's burst, in bytes. One GSO unit must fit.
pub const BURST_BYTES: u32 = 20 << 10;
pub const WORDS_DSCP: u8 = 48;
const MINOR_FIRST: u32 = 0x10;

/// Returns the DSCPs of the fabric's classes in strict order of priority: control messages, levels,
/// unmarked traffic (0) before the last level, scavenger. `None` if they cannot be ordered so.
pub fn classes(level_dscp: &[u8], scavenger_dscp: u8) -> Option<Vec<u8>> {
    let mut dscps: Vec<u8> = vec![WORDS_DSCP];
    for &dscp in level_dscp.iter().chain([&scavenger_dscp]) {
        if dscp == 0 || dscp == WORDS_DSCP || dscp > 63 {
            return None;
        }
        if dscps.last() != Some(&dscp) {
            if dscps.contains(&dscp) {
                return None;
            }
            dscps.push(dscp);
        }
    }
    let unmarked = dscps.len().saturating_sub(2);
    dscps.insert(unmarked, 0);
    // HTB has the priorities 0 to 7.
    (dscps.len() <= 8).then_some(dscps)
}

pub fn address(host: usize) -> std::net::Ipv4Addr {
    std::net::Ipv4Addr::new(10, 77, 0, host as u8 + 1)
}

/// Address of the coordinator, on a network of its own. In a real cluster its messages do not wait
/// behind KV caches either.
pub const COORDINATOR: std::net::SocketAddrV4 =
    std::net::SocketAddrV4::new(std::net::Ipv4Addr::new(10, 78, 0, 254), 7471);

pub fn management_address(host: usize) -> std::net::Ipv4Addr {
    std::net::Ipv4Addr::new(10, 78, 0, host as u8 + 1)
}

/// Returns the `ip -batch` input that makes the management network and connects every host to it.
/// The coordinator's address is in the lab's own namespace. The network is not shaped.
pub fn management_script(hosts: usize) -> String {
    let address = COORDINATOR.ip();
    let mut script = format!(
        "link add mg0 type bridge stp_state 0 mcast_snooping 0\n\
         link set mg0 addrgenmode none up\naddr add {address}/24 dev mg0\n"
    );
    for host in 0..hosts {
        let ns = namespace(host);
        script += &format!(
            "link add mgmt{host} type veth peer name mgmt netns {ns}\n\
             link set mgmt{host} addrgenmode none master mg0 up\n"
        );
    }
    script
}

pub fn management_host_script(host: usize) -> String {
    let address = management_address(host);
    format!("link set mgmt addrgenmode none up\naddr add {address}/24 dev mgmt\n")
}

pub fn namespace(host: usize) -> String {
    format!("host{host}")
}

pub fn switch_port(host: usize) -> String {
    format!("port{host}")
}

pub const HOST_PORT: &str = "eth0";

fn mac(host: usize) -> String {
    format!("02:4c:58:00:00:{:02x}", host + 1)
}

/// Returns the `ip -batch` input that connects every host's namespace to a new switch.
pub fn switch_script(hosts: usize) -> String {
    let mut script = format!(
        "link set lo up\nlink add sw0 mtu {MTU} type bridge stp_state 0 mcast_snooping 0\n\
         link set sw0 addrgenmode none up\n"
    );
    for host in 0..hosts {
        let (port, ns, mac) = (switch_port(host), namespace(host), mac(host));
        script += &format!(
            "link add {port} mtu {MTU} gso_max_size {GSO_BYTES_MAX} type veth peer name \
             {HOST_PORT} mtu {MTU} address {mac} netns {ns}\n\
             link set {port} addrgenmode none master sw0 gso_max_size {GSO_BYTES_MAX} up\n"
        );
    }
    script
}

/// Returns the `ip -batch` input for the inside of one host's namespace.
///
/// The route pins two settings. One is the congestion control, because BBR would pace below the
/// shaper. The other is the initial window, which also applies after an idle period. A collective
/// is a burst after a pause, so a window of ten packets would measure slow start.
pub fn host_script(host: usize, hosts: usize, congestion_control: &str) -> String {
    let address = address(host);
    let mut script = format!(
        "link set lo up\nlink set {HOST_PORT} addrgenmode none gso_max_size {GSO_BYTES_MAX} up\n\
         addr add {address}/24 dev {HOST_PORT}\n\
         route change 10.77.0.0/24 dev {HOST_PORT} src {address} initcwnd 32 initrwnd 32 \
         congctl {congestion_control}\n"
    );
    for peer in (0..hosts).filter(|&peer| peer != host) {
        let (address, mac) = (self::address(peer), mac(peer));
        script += &format!("neigh replace {address} lladdr {mac} dev {HOST_PORT} nud permanent\n");
    }
    script
}

/// Returns the `tc -batch` input that shapes a port and makes one strict-priority queue per class.
pub fn shaping_script(device: &str, config: &LabConfig, classes: &[u8]) -> String {
    let rate = format!("{}mbit", config.port_mbit);
    let bursts = format!("burst {BURST_BYTES} cburst {BURST_BYTES}");
    let unmarked = classes.iter().position(|dscp| *dscp == 0).unwrap_or(0);
    let unmarked = MINOR_FIRST as usize + unmarked;
    let mut script = format!(
        "qdisc add dev {device} root handle 1: htb default {unmarked:x} r2q 1000\n\
         class add dev {device} parent 1: classid 1:1 htb rate {rate} ceil {rate} {bursts}\n"
    );
    for (priority, dscp) in classes.iter().enumerate() {
        let minor = MINOR_FIRST as usize + priority;
        script += &format!(
            "class add dev {device} parent 1:1 classid 1:{minor:x} htb rate 8kbit ceil {rate} \
             prio {priority} quantum {GSO_BYTES_MAX} {bursts}\n\
             qdisc add dev {device} parent 1:{minor:x} handle {minor:x}: bfifo limit {}\n",
            config.queue_bytes,
        );
        if *dscp != 0 {
            script += &format!(
                "filter add dev {device} parent 1: protocol ip prio 1 u32 match ip dsfield \
                 {:#04x} 0xfc flowid 1:{minor:x}\n",
                dscp << 2,
            );
        }
    }
    // An unexpected ARP request must not wait behind data.
    script += &format!(
        "filter add dev {device} parent 1: protocol arp prio 2 u32 match u32 0 0 flowid \
         1:{MINOR_FIRST:x}\n"
    );
    script
}

/// Counters of one queue since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueCounters {
    pub bytes: u64,
    pub drops: u64,
}

pub type DscpCounters = BTreeMap<u8, QueueCounters>;

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct QdiscLine {
    pub kind: String,
    pub parent: String,
    pub handle: String,
    pub bytes: u64,
    pub packets: u64,
    pub drops: u64,
    pub backlog: u64,
}

pub fn parse_counters(json: &str, classes: &[u8]) -> Result<DscpCounters, serde_json::Error> {
    let lines: Vec<QdiscLine> = serde_json::from_str(json)?;
    let mut counters = DscpCounters::new();
    for line in lines {
        let handle = u32::from_str_radix(line.handle.trim_end_matches(':'), 16).unwrap_or(0);
        let dscp = handle.checked_sub(MINOR_FIRST).and_then(|i| classes.get(i as usize));
        if let Some(dscp) = dscp {
            counters.insert(*dscp, QueueCounters { bytes: line.bytes, drops: line.drops });
        }
    }
    Ok(counters)
}

pub fn since(before: &DscpCounters, after: &DscpCounters) -> DscpCounters {
    after
        .iter()
        .map(|(dscp, now)| {
            let then = before.get(dscp).copied().unwrap_or_default();
            let counters = QueueCounters {
                bytes: now.bytes.saturating_sub(then.bytes),
                drops: now.drops.saturating_sub(then.drops),
            };
            (*dscp, counters)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_that_share_a_dscp_share_a_class_and_unmarked_traffic_is_above_the_lowest() {
        assert_eq!(
            classes(&[46, 34, 26, 18, 18, 10, 10, 10], 8),
            Some(vec![48, 46, 34, 26, 18, 0, 10, 8])
        );
        assert_eq!(classes(&[46, 10], 8), Some(vec![48, 46, 0, 10, 8]));
    }

    #[test]
    fn an_order_of_levels_that_the_wire_cannot_keep_is_refused() {
        assert_eq!(classes(&[46, 34, 46], 8), None, "a DSCP comes back");
        assert_eq!(classes(&[46, 0], 8), None, "a level is unmarked");
        assert_eq!(classes(&[1, 2, 3, 4, 5, 6, 7], 8), None, "too many for HTB");
        assert_eq!(classes(&[64, 2], 8), None, "no such DSCP");
        assert_eq!(classes(&[48, 46], 8), None, "the DSCP of words");
    }

    #[test]
    fn the_shaping_script_gives_each_class_a_queue_and_each_mark_a_filter() {
        let config = LabConfig::default();
        let classes = classes(&config.level_dscp, config.scavenger_dscp).unwrap();
        let script = shaping_script("port3", &config, &classes);
        assert_eq!(script.matches("class add").count(), classes.len() + 1);
        assert_eq!(script.matches("bfifo").count(), classes.len());
        assert_eq!(script.matches("protocol ip ").count(), classes.len() - 1);
        assert!(script.contains("htb default 15 "), "unmarked is the sixth class: {script}");
        assert!(script.contains("match ip dsfield 0xb8 0xfc flowid 1:11\n"));
        assert!(script.contains("prio 7 quantum"));
        assert!(script.lines().all(|line| line.contains("dev port3")));
    }

    #[test]
    fn counters_are_read_per_dscp() {
        let classes = classes(&[46, 34], 8).unwrap();
        let json = r#"[{"kind":"htb","handle":"1:","root":true,"bytes":99},
            {"kind":"bfifo","handle":"11:","parent":"1:11","bytes":70,"packets":1,"drops":2},
            {"kind":"bfifo","handle":"13:","parent":"1:13","bytes":5,"drops":0}]"#;
        let counters = parse_counters(json, &classes).unwrap();
        assert_eq!(counters[&46], QueueCounters { bytes: 70, drops: 2 });
        assert_eq!(counters[&34], QueueCounters { bytes: 5, drops: 0 });
        assert_eq!(counters.len(), 2);
        let later = DscpCounters::from([(46, QueueCounters { bytes: 100, drops: 2 })]);
        assert_eq!(since(&counters, &later)[&46], QueueCounters { bytes: 30, drops: 0 });
    }
}
