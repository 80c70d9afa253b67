//! Checks what NICs do with the DSCPs of the daemon's levels: trust, priority, queue, PFC and ECN.
//!
//! A level that leaves the lossless priority loses packets, and two levels in one queue of the NIC
//! are not ordered there. Switches have maps of their own, which a host can't see.

use laxity_nic::{PriorityMap, Selection, Trust};
use laxity_wire::Status;

use super::fabric::{NicPort, Tool};
use super::finding::{Finding, Severity};
use super::qos::{self, NicQos, Query};
use super::root::Root;
use crate::levels::{NamedLevel, SCAVENGER, of_status};

pub(crate) fn priorities(
    root: &Root,
    ports: &[NicPort],
    status: Option<&Status>,
    query: Query<'_>,
    tool: Tool<'_>,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    // Packets of a function leave by its owner, which knows the settings of the port.
    for port in ports.iter().filter(|port| port.ethernet && port.owner.is_none()) {
        let Some(interface) = port.netdev.as_deref() else { continue };
        let settings = qos::settings(root, interface, query, tool);
        findings.push(trust(interface, &settings).about(interface));
        let unknown = [PriorityMap::default()];
        let maps = if settings.maps.is_empty() { &unknown[..] } else { &settings.maps };
        for map in maps {
            findings.push(lossless(map).about(interface));
            let of_map = levels(map, &of_status(status), marking(status));
            findings.extend(of_map.into_iter().map(|finding| finding.about(interface)));
        }
    }
    findings
}

fn marking(status: Option<&Status>) -> &str {
    status.map_or("preserve", |status| status.marking.as_str())
}

fn trust(interface: &str, settings: &NicQos) -> Finding {
    let source = settings.source;
    let all = |trust| settings.maps.iter().all(|map| map.trust == Some(trust));
    if settings.maps.is_empty() || settings.maps.iter().any(|map| map.trust.is_none()) {
        return Finding::info("trust", "unknown: neither the kernel, mlnx_qos nor dcb says")
            .because(
                "the NIC's queues and buffers follow DSCP only if the NIC trusts it; the trust of \
                 switches is set there",
            )
            .action(format!("mlnx_qos -i {interface} (mlx5), or the vendor's tool"));
    }
    if all(Trust::Dscp) {
        return Finding::ok("trust", format!("DSCP ({source})"));
    }
    Finding::warn("trust", format!("not DSCP ({source})"))
        .because("the NIC does not choose its queues by DSCP, so it ignores Laxity's classes")
        .action(format!(
            "mlnx_qos -i {interface} --trust dscp, or dcb apptrust set dev {interface} order dscp \
             pcp"
        ))
}

fn lossless(map: &PriorityMap) -> Finding {
    let list = |mask: u8| {
        let on: Vec<String> =
            (0..8).filter(|at| mask >> at & 1 == 1).map(|at: u8| at.to_string()).collect();
        if on.is_empty() { "none".to_owned() } else { on.join(",") }
    };
    let words = |what: &str, mask: Option<u8>| match mask {
        Some(mask) => format!("{what} on priorities {}", list(mask)),
        None => format!("{what} unreadable here"),
    };
    let found = format!("{}; {}", words("PFC", map.pfc), words("ECN", map.ecn));
    Finding::info("lossless", found).because(
        "levels that share a lossless priority pause together; the switches' own settings can't \
         be seen from here",
    )
}

fn levels(map: &PriorityMap, levels: &[NamedLevel], marking: &str) -> Vec<Finding> {
    let is_known = map.trust == Some(Trust::Pcp) || map.priority(0).is_some();
    if !is_known || levels.is_empty() {
        return Vec::new();
    }
    if marking == "off" {
        return vec![Finding::info(
            "levels",
            "the daemon's marking is off, so no level has a class",
        )];
    }
    let mut findings = leaving(map, levels, marking).into_iter().collect::<Vec<_>>();
    findings.extend(sharing(map, levels));
    let way = levels.iter().map(|(level, dscp)| format!("{level}: {}", way(map, *dscp)));
    let found = way.collect::<Vec<_>>().join("; ");
    if findings.is_empty() {
        findings.push(Finding::ok("levels", found));
    } else {
        findings.push(Finding::info("levels", found));
    }
    findings
}

fn way(map: &PriorityMap, dscp: u8) -> String {
    let mut words = format!("DSCP {dscp}");
    if let Some(priority) = map.priority(dscp) {
        words.push_str(&format!(", priority {priority}"));
    }
    if let Some(class) = map.class(dscp) {
        words.push_str(&format!(", queue {class}"));
        match map.selection.map(|selection| selection[usize::from(class) % selection.len()]) {
            Some(Selection::Strict) => words.push_str(" (strict)"),
            Some(Selection::Ets(share)) => words.push_str(&format!(" (ETS {share} %)")),
            Some(Selection::CreditBased) => words.push_str(" (credit-based)"),
            Some(Selection::Vendor) | None => {}
        }
    }
    match map.is_lossless(dscp) {
        Some(true) => words.push_str(", lossless"),
        Some(false) => words.push_str(", lossy"),
        None => {}
    }
    words
}

/// Reports levels outside of the lossless priorities, if there are any such priorities.
fn leaving(map: &PriorityMap, levels: &[NamedLevel], marking: &str) -> Option<Finding> {
    if map.pfc? == 0 {
        return None;
    }
    let is_lossy = |(_, dscp): &&NamedLevel| map.is_lossless(*dscp) == Some(false);
    let lossy: Vec<String> = levels
        .iter()
        .filter(is_lossy)
        .map(|(level, dscp)| format!("{level} (DSCP {dscp})"))
        .collect();
    if lossy.is_empty() {
        return None;
    }
    let why = if marking == "preserve" {
        "traffic in a lossless priority keeps its class there, so the network does not see these \
         levels; only traffic in a lossy priority gets them"
    } else {
        "traffic of these levels leaves the lossless priority and loses packets under congestion"
    };
    let found = format!("not in a lossless priority: {}", lossy.join(", "));
    let finding = Finding::error("levels", found).because(why).action(
        "give the levels DSCPs of lossless priorities ([levels] of /etc/laxity/laxityd.toml), or \
         turn PFC on for their priorities in NICs and switches",
    );
    Some(finding)
}

/// Reports levels of different DSCPs that share a queue of the NIC.
fn sharing(map: &PriorityMap, levels: &[NamedLevel]) -> Option<Finding> {
    // Without the queues, a shared priority is what can be known. Under PCP the DSCP selects none.
    let is_pcp = map.trust == Some(Trust::Pcp);
    let queue = |dscp: u8| match is_pcp {
        true => Some(0),
        false => map.class(dscp).or_else(|| map.priority(dscp)),
    };
    let mut pairs = Vec::new();
    let mut severity = Severity::Warn;
    for (at, (level, dscp)) in levels.iter().enumerate() {
        let before = &levels[..at];
        let shares = |other: &&NamedLevel| other.1 != *dscp && queue(other.1) == queue(*dscp);
        let is_known = before.iter().any(|(_, other)| other == dscp);
        let Some((other, other_dscp)) = before.iter().rev().find(shares) else { continue };
        if is_known || queue(*dscp).is_none() {
            continue;
        }
        pairs.push(format!("{other} (DSCP {other_dscp}) and {level} (DSCP {dscp})"));
        // The scavenger may share the queue of the lowest level, as it may share its DSCP.
        if level != SCAVENGER || at == 0 || *other != levels[at - 1].0 {
            severity = Severity::Error;
        }
    }
    if pairs.is_empty() {
        return None;
    }
    let finding = Finding::new("levels", severity, format!("share a queue: {}", pairs.join("; ")))
        .because("the NIC sends packets of one queue in the order of posting, not of levels")
        .action(
            "let the NIC trust DSCP, and map the DSCPs to priorities of different queues (mlnx_qos \
             --trust, --dscp2prio, --prio_tc; dcb apptrust, app, ets), or give the levels one DSCP \
             in [levels]",
        );
    Some(finding)
}
