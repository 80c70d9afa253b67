//! The counters of the router: bytes and packets by DSCP, for each direction.
//!
//! A filter per DSCP in front of a port counts the traffic that is offered to the port. The queues
//! of a shaped port count the traffic that left them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::network::{NetworkConfig, PORTS, ROUTER, call};
use crate::error::LabError;
use crate::fabric::QdiscLine;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Passed {
    pub bytes: u64,
    pub packets: u64,
}

/// Counters of one queue of a shaped port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queue {
    pub sent: Passed,
    pub drops: u64,
    pub backlog_bytes: u64,
}

/// Counters of one of the router's ports, by DSCP.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortCounters {
    /// Traffic that arrived at the port, before its queues. DSCPs without traffic are left out.
    pub offered: BTreeMap<u8, Passed>,
    /// The port's used queues, by the DSCP that they serve. 0 also serves DSCPs without a queue.
    /// Empty if the port is not shaped, because then all offered traffic is sent.
    pub queues: BTreeMap<u8, Queue>,
}

/// Counters of the router's ports, which are named after the host that they lead to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouterCounters {
    /// Traffic to 10.77.0.1.
    pub to_host0: PortCounters,
    /// Traffic to 10.77.1.1.
    pub to_host1: PortCounters,
}

pub fn read(config: &NetworkConfig) -> Result<RouterCounters, LabError> {
    let port = |name: &str| -> Result<PortCounters, LabError> {
        let show = |what: &[&str]| {
            let args = [&["-n", ROUTER, "-s", "-j"], what].concat();
            call("tc", &args, "")
        };
        let filters = show(&["filter", "show", "dev", name, "egress"])?;
        let queues = match config.rate_mbit {
            Some(_) => show(&["qdisc", "show", "dev", name])?,
            None => "[]".into(),
        };
        Ok(PortCounters {
            offered: offered(&filters)?,
            queues: queues_of(&queues, &config.dscp_order)?,
        })
    };
    Ok(RouterCounters { to_host0: port(PORTS[0])?, to_host1: port(PORTS[1])? })
}

#[derive(Deserialize)]
struct FilterLine {
    options: Option<FilterOptions>,
}

#[derive(Deserialize)]
struct FilterOptions {
    handle: u32,
    #[serde(default)]
    actions: Vec<Action>,
}

#[derive(Deserialize)]
struct Action {
    stats: Passed,
}

/// Parses the counting filters in the output of `tc -s -j`. Their handle is the DSCP plus one.
fn offered(json: &str) -> Result<BTreeMap<u8, Passed>, LabError> {
    let lines: Vec<FilterLine> = serde_json::from_str(json)?;
    Ok(lines
        .into_iter()
        .filter_map(|line| line.options)
        .filter_map(|options| {
            let dscp = u8::try_from(options.handle.checked_sub(1)?).ok()?;
            Some((dscp, options.actions.first()?.stats))
        })
        .filter(|(_, passed)| passed.packets > 0)
        .collect())
}

/// Parses the queues below `prio` in the output of `tc -s -j`. A class's number is its band plus 1.
fn queues_of(json: &str, dscp_order: &[u8]) -> Result<BTreeMap<u8, Queue>, LabError> {
    let lines: Vec<QdiscLine> = serde_json::from_str(json)?;
    let queue = |line: QdiscLine| {
        let class = line.parent.strip_prefix("2:")?;
        let class = usize::from_str_radix(class, 16).ok()?;
        let dscp = *dscp_order.get(class.checked_sub(1)?)?;
        let sent = Passed { bytes: line.bytes, packets: line.packets };
        let queue = Queue { sent, drops: line.drops, backlog_bytes: line.backlog };
        (line.kind == "pfifo").then_some((dscp, queue))
    };
    Ok(lines
        .into_iter()
        .filter_map(queue)
        .filter(|(_, queue)| *queue != Queue::default())
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read_by_dscp_and_what_is_unused_is_left_out() {
        let filters = r#"[{"protocol":"ip","pref":1,"kind":"flower","chain":0},
            {"kind":"flower","options":{"handle":47,"keys":{"ip_tos":"0xb8/0xfc"},"actions":
             [{"order":1,"kind":"gact","stats":{"bytes":13296000,"packets":3200,"drops":0}}]}},
            {"kind":"flower","options":{"handle":1,"actions":
             [{"stats":{"bytes":0,"packets":0}}]}}]"#;
        let passed = Passed { bytes: 13_296_000, packets: 3200 };
        assert_eq!(offered(filters).expect("JSON"), BTreeMap::from([(46, passed)]));
        let qdiscs = r#"[{"kind":"tbf","handle":"1:","root":true,"bytes":9,"packets":1},
            {"kind":"prio","handle":"2:","parent":"1:1","bytes":9,"packets":1},
            {"kind":"pfifo","handle":"12:","parent":"2:2","bytes":9,"packets":1,"drops":3,
             "backlog":7},
            {"kind":"pfifo","handle":"11:","parent":"2:1","bytes":0,"packets":0}]"#;
        let queue = Queue { sent: Passed { bytes: 9, packets: 1 }, drops: 3, backlog_bytes: 7 };
        assert_eq!(queues_of(qdiscs, &[46, 0]).expect("JSON"), BTreeMap::from([(0, queue)]));
    }
}
