//! `laxity verify`: follows bytes from their stage to the wire, and names what contradicts.
//!
//! It reads the daemon's and the NIC's counters twice. Between the two, bytes that the daemon
//! permitted at a level have to leave at the priorities to which the NIC maps the levels' DSCPs. A
//! queue pair keeps one class, so bytes are compared over all levels together and not level by
//! level. Counters that a driver does not have are reported as not measured.
//!
//! Names of counters: mlx5 (the kernel's Documentation/networking/device_drivers/ethernet/mellanox/
//! mlx5/counters.rst), bnxt and ice; CNPs are in the hw_counters of an RDMA port.

mod engines;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use laxity_cli::output::{OutputError, json, say};
use laxity_cli::table::{align_numbers, bytes, table};
use laxity_nic::{DcbError, PRIORITIES, PriorityMap};
use laxity_wire::{ControlError, PermittedBytes, PortStatus, Status};
use serde::Serialize;
use thiserror::Error;

use crate::doctor::finding::{self, Finding, Severity};
use crate::doctor::root::Root;
use crate::doctor::{fabric, levels, qos};
use crate::host::Endpoint;

pub(crate) const HELP: &str = "\
Compares, while traffic flows: bytes that the daemon permitted by stage and level, the DSCP of the \
level, the NIC's priority and queue for it, the bytes that this priority sent, pauses (PFC) and \
congestion notifications (CNP). Each contradiction is a sentence with a next step. What the NIC \
does not count is `not measured`.

With --engine, the first line shows the parts of the time to first token, from the metrics that \
vLLM exports with laxity.vllm. They show whether the network or the engine is slow. Name the API \
server of each prefill and decode instance.

Run the command as root, and while jobs send. Without traffic, only settings are compared.

Exit status: 0 if nothing contradicts, 1 if something does or the daemon does not answer.";

/// Fewest permitted bytes for a comparison. Below this, other traffic is as large.
const BYTES_MIN: u64 = 1 << 20;

#[derive(Args)]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    endpoint: Endpoint,
    /// How long to watch, in seconds
    #[arg(long, value_name = "N", default_value_t = 5)]
    seconds: u64,
    /// Address of a vLLM API server, to show the parts of the time to first token. May be repeated
    #[arg(long = "engine", value_name = "HOST:PORT")]
    engines: Vec<String>,
    /// Print the comparison as JSON
    #[arg(long)]
    json: bool,
    /// Look at another host's /sys, copied below this folder
    #[arg(long, value_name = "FOLDER", default_value = "/", hide = true)]
    root: PathBuf,
}

#[derive(Debug, Error)]
pub(crate) enum VerifyError {
    #[error(transparent)]
    Daemon(#[from] ControlError),
    #[error("laxityd restarted during the measurement; run `laxity verify` again")]
    Restarted,
    #[error(transparent)]
    Output(#[from] OutputError),
}

type Counters = BTreeMap<String, u64>;

/// A NIC of the daemon and what the kernel says of it.
struct DaemonNic {
    name: String,
    interface: Option<String>,
    device: Option<(String, String)>,
    map: PriorityMap,
}

/// The daemon's and the NICs' counters at one moment.
struct Observed {
    status: Status,
    counters: BTreeMap<String, Counters>,
}

/// The output of `--json`. Fields may be added.
#[derive(Debug, Serialize)]
struct VerifyReport {
    seconds: u64,
    /// How the time to the first token divides. `None` without `--engine` and without requests.
    ttft: Option<engines::Division>,
    nics: Vec<NicReport>,
    findings: Vec<Finding>,
}

#[derive(Debug, Serialize)]
struct NicReport {
    nic: String,
    interface: Option<String>,
    levels: Vec<LevelRow>,
    priorities: Vec<PriorityRow>,
    /// CNPs that this NIC sent, because what it received was marked.
    cnp_sent: Option<u64>,
    cnp_handled: Option<u64>,
}

/// Bytes of one stage that were permitted at one level.
#[derive(Debug, Serialize)]
struct LevelRow {
    stage: String,
    level: String,
    dscp: u8,
    priority: Option<u8>,
    queue: Option<u8>,
    permitted_bytes: u64,
}

/// What the NIC counted for one priority. `None`: not measured.
#[derive(Debug, Serialize)]
struct PriorityRow {
    priority: u8,
    of_level: bool,
    pfc: Option<bool>,
    ecn: Option<bool>,
    permitted_bytes: u64,
    sent_bytes: Option<u64>,
    pauses_received: Option<u64>,
    pauses_sent: Option<u64>,
    discarded: Option<u64>,
}

/// Watches the host and prints what was compared. Returns failure if something contradicts.
pub(crate) fn verify(args: &VerifyArgs) -> Result<ExitCode, VerifyError> {
    let root = Root::new(&args.root);
    let tool = |program: &str, arguments: &[&str]| root.ask(program, arguments);
    let query = |interface: &str| match root.is_real() {
        true => laxity_nic::query(interface),
        false => Err(DcbError::Unsupported),
    };
    let mut daemon = args.endpoint.connect()?;
    let ports = fabric::ports(&root);
    let nics = nics(&root, &ports, &daemon.status()?, &query, &tool);
    let mut look = || -> Result<Observed, ControlError> {
        let status = daemon.status()?;
        let of = |nic: &DaemonNic| (nic.name.clone(), counters(&root, nic, &tool));
        Ok(Observed { status, counters: nics.iter().map(of).collect() })
    };
    let before = look()?;
    let engines_before = engines::look(&args.engines);
    std::thread::sleep(Duration::from_secs(args.seconds));
    let after = look()?;
    if before.status.pid != after.status.pid {
        return Err(VerifyError::Restarted);
    }
    let mut report = compare(&nics, &before, &after, args.seconds);
    match engines::since(engines_before, &args.engines, args.seconds) {
        Ok(division) => report.ttft = division,
        Err(finding) => report.findings.push(finding),
    }
    let settings = levels::priorities(&root, &ports, Some(&after.status), &query, &tool);
    // Under `preserve` lossless traffic keeps its class, so lossy levels contradict nothing.
    let keeps = |f: &Finding| after.status.marking == "preserve" && f.found.contains("lossless");
    let settings = settings.into_iter().filter(|f| f.severity == Severity::Error && !keeps(f));
    report.findings.extend(settings);
    let failed = report.findings.iter().any(|finding| finding.severity == Severity::Error);
    say(if args.json { json(&report)? } else { page(&report) })?;
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Finds the devices of the daemon's NICs, which have the name of an RDMA device or an interface.
fn nics(
    root: &Root,
    ports: &[fabric::NicPort],
    status: &Status,
    query: qos::Query<'_>,
    tool: fabric::Tool<'_>,
) -> Vec<DaemonNic> {
    let egress: Vec<_> = status.ports.iter().filter(|p| p.direction == "egress").collect();
    let nic = |name: &str| {
        let device = laxity_nic::device_of(root.path(), name);
        let named = ports.iter().filter(|p| p.is_called(&device)).max_by_key(|port| port.active);
        // With one NIC and one port, they belong together whatever their names are.
        let mut owners = ports.iter().filter(|port| port.owner.is_none());
        let only = owners.next().filter(|_| egress.len() == 1 && owners.next().is_none());
        let port = named.or(only);
        let own = root.has(&format!("/sys/class/net/{device}")).then_some(device);
        let interface = port.and_then(|port| port.netdev.clone()).or(own);
        let settings = interface.as_deref().map(|i| qos::settings(root, i, query, tool));
        let maps = settings.map(|settings| settings.maps).unwrap_or_default();
        DaemonNic {
            name: name.to_owned(),
            interface,
            device: port.map(|port| (port.device.clone(), port.number.clone())),
            map: maps.into_iter().next().unwrap_or_default(),
        }
    };
    egress.iter().map(|port| nic(&port.name)).collect()
}

/// Reads the counters of a NIC: those of `ethtool -S`, and the hw_counters of its RDMA port.
fn counters(root: &Root, nic: &DaemonNic, tool: fabric::Tool<'_>) -> Counters {
    let text = nic.interface.as_deref().and_then(|interface| tool("ethtool", &["-S", interface]));
    let mut counters = ethtool(&text.unwrap_or_default());
    if let Some((device, port)) = &nic.device {
        let folder = format!("/sys/class/infiniband/{device}/ports/{port}/hw_counters");
        for name in root.names(&folder) {
            let value = root.text(&format!("{folder}/{name}")).and_then(|text| text.parse().ok());
            counters.extend(value.map(|value| (name, value)));
        }
    }
    counters
}

/// Parses `ethtool -S INTERFACE`: a heading, then `NAME: VALUE` in each line.
fn ethtool(text: &str) -> Counters {
    let pairs = text.lines().filter_map(|line| line.trim().rsplit_once(": "));
    pairs.filter_map(|(name, value)| Some((name.to_owned(), value.trim().parse().ok()?))).collect()
}

// The names of a priority's counters by driver.
const SENT: [&str; 2] = ["tx_prio#_bytes", "tx_bytes_pri#"];
const PAUSES_RECEIVED: [&str; 3] =
    ["rx_prio#_pause", "rx_pfc_ena_frames_pri#", "rx_priority_#_xoff.nic"];
const PAUSES_SENT: [&str; 3] =
    ["tx_prio#_pause", "tx_pfc_ena_frames_pri#", "tx_priority_#_xoff.nic"];
const DISCARDED: [&str; 2] = ["rx_prio#_discards", "rx_prio#_buf_discard"];

/// Returns the growth of a priority's counter, which has one of these names. `#` stands for the
/// number.
fn growth(before: &Counters, after: &Counters, names: &[&str], priority: u8) -> Option<u64> {
    names.iter().find_map(|name| {
        let name = name.replace('#', &priority.to_string());
        Some(after.get(&name)?.saturating_sub(*before.get(&name)?))
    })
}

fn compare(nics: &[DaemonNic], before: &Observed, after: &Observed, seconds: u64) -> VerifyReport {
    let mut report = VerifyReport { seconds, ttft: None, nics: Vec::new(), findings: Vec::new() };
    report.findings.extend(unmarked(&after.status));
    let is_marked = report.findings.is_empty();
    let is_kept = after.status.marking == "preserve";
    for nic in nics {
        let seen = nic_report(nic, before, after);
        report.findings.extend(judge(nic, &seen, is_marked, is_kept));
        report.nics.push(seen);
    }
    report
}

/// Says why the levels' DSCPs are not on the wire, if they are not meant to be.
fn unmarked(status: &Status) -> Option<Finding> {
    let (why, action) = match () {
        () if status.bypass => ("the host is bypassed", "laxity bypass off"),
        () if status.mode != "enforce" => {
            ("the mode is not enforce", "laxity enforce on, when you want it to")
        }
        () if status.marking == "off" => ("marking is off", "set marking = \"preserve\""),
        () => return None,
    };
    let found = format!("{why}, so Laxity sets no DSCP; bytes and priorities are not compared");
    Some(Finding::info("marking", found).action(action))
}

fn nic_report(nic: &DaemonNic, before: &Observed, after: &Observed) -> NicReport {
    let counters = |seen: &Observed| seen.counters.get(&nic.name).cloned().unwrap_or_default();
    let (old, new) = (counters(before), counters(after));
    let levels = level_rows(nic, &before.status, &after.status);
    let dscps = after.status.ports.first().map(|port| &port.levels[..]).unwrap_or_default();
    let of_level: BTreeSet<u8> =
        dscps.iter().filter_map(|level| nic.map.priority(level.dscp)).collect();
    let row = |priority: u8| PriorityRow {
        priority,
        of_level: of_level.contains(&priority),
        pfc: nic.map.pfc.map(|mask| mask >> priority & 1 == 1),
        ecn: nic.map.ecn.map(|mask| mask >> priority & 1 == 1),
        permitted_bytes: (levels.iter().filter(|row| row.priority == Some(priority)))
            .map(|row| row.permitted_bytes)
            .sum(),
        sent_bytes: growth(&old, &new, &SENT, priority),
        pauses_received: growth(&old, &new, &PAUSES_RECEIVED, priority),
        pauses_sent: growth(&old, &new, &PAUSES_SENT, priority),
        discarded: growth(&old, &new, &DISCARDED, priority),
    };
    let priorities = (0..PRIORITIES as u8).map(row);
    let is_shown = |row: &PriorityRow| {
        row.of_level
            || [row.sent_bytes, row.pauses_received, row.discarded].iter().any(|v| *v > Some(0))
    };
    NicReport {
        nic: nic.name.clone(),
        interface: nic.interface.clone(),
        priorities: priorities.filter(is_shown).collect(),
        levels,
        cnp_sent: growth(&old, &new, &["np_cnp_sent"], 0),
        cnp_handled: growth(&old, &new, &["rp_cnp_handled"], 0),
    }
}

fn level_rows(nic: &DaemonNic, before: &Status, after: &Status) -> Vec<LevelRow> {
    let port = |status: &Status| {
        let is_it = |port: &&PortStatus| port.direction == "egress" && port.name == nic.name;
        status.ports.iter().find(is_it).cloned().unwrap_or_default()
    };
    let (old, new) = (port(before), port(after));
    let row = |now: &PermittedBytes| {
        let is_same = |was: &&PermittedBytes| was.stage == now.stage && was.level == now.level;
        let earlier = old.permitted.iter().find(is_same).map_or(0, |was| was.bytes);
        let level = new.levels.iter().find(|level| level.level == now.level);
        let dscp = level.map_or(0, |level| level.dscp);
        LevelRow {
            stage: now.stage.clone(),
            level: now.level.clone(),
            dscp,
            priority: nic.map.priority(dscp),
            queue: nic.map.class(dscp),
            permitted_bytes: now.bytes.saturating_sub(earlier),
        }
    };
    new.permitted.iter().map(row).filter(|row| row.permitted_bytes > 0).collect()
}

/// Returns what contradicts on one NIC, and what could not be compared.
fn judge(nic: &DaemonNic, report: &NicReport, is_marked: bool, is_kept: bool) -> Vec<Finding> {
    let name = report.interface.as_deref().unwrap_or(&report.nic);
    let mut findings = Vec::new();
    let rows = || report.priorities.iter();
    if let Some(why) = not_measured(nic, report) {
        findings.push(Finding::info("bytes", format!("not measured: {why}")));
    } else if is_marked {
        findings.extend(missing_bytes(report, is_kept));
    }
    for row in rows() {
        let PriorityRow { priority, pfc, .. } = row;
        if *pfc == Some(false) && row.pauses_received > Some(0) {
            let found = format!(
                "the switch paused priority {priority} {} times, and this NIC has no PFC for it",
                row.pauses_received.unwrap_or(0)
            );
            findings.push(Finding::error("pause", found).because(
                "the NIC ignores these pauses, so the switch loses packets that it means to keep",
            ).action(format!(
                "mlnx_qos -i {name} --pfc …, or turn PFC off for the priority at the switch"
            )));
        }
        if *pfc == Some(true) && row.discarded > Some(0) {
            let found = format!(
                "priority {priority} is lossless, and this NIC discarded {} packets of it",
                row.discarded.unwrap_or(0)
            );
            findings.push(Finding::error("pause", found).because(
                "its pauses came too late or the peer ignored them",
            ).action(format!(
                "check PFC of this priority at the switch, and the buffer and cable length of \
                 {name} (mlnx_qos -i {name})"
            )));
        }
    }
    let cnps = report.cnp_sent.unwrap_or(0) + report.cnp_handled.unwrap_or(0);
    if nic.map.ecn == Some(0) && cnps > 0 && report.cnp_handled.unwrap_or(0) == 0 {
        let found = format!("{cnps} CNPs came or went, and ECN for RoCE is off on every priority");
        findings.push(Finding::error("cnp", found).because(
            "the switch marks congestion, and this NIC does not slow down",
        ).action(format!(
            "echo 1 > /sys/class/net/{name}/ecn/roce_rp/enable/PRIORITY, and likewise roce_np"
        )));
    }
    findings.into_iter().map(|finding| finding.about(name)).collect()
}

/// Says why the bytes of a NIC can't be compared, if they can't.
fn not_measured(nic: &DaemonNic, report: &NicReport) -> Option<String> {
    let name = &nic.name;
    if nic.interface.is_none() {
        return Some(format!(
            "no interface and no RDMA device is called {name}; give the [[nic]] the name of one"
        ));
    }
    if nic.map.priority_of_dscp.is_none() {
        return Some("it is unknown which priority the NIC gives a DSCP".to_owned());
    }
    let counts = report.priorities.iter().any(|row| row.of_level && row.sent_bytes.is_some());
    let why = "the driver has no byte counters by priority, or ethtool is not installed";
    (!counts).then(|| why.to_owned())
}

/// Compares permitted bytes with those that left at the levels' priorities.
///
/// With `marking = "preserve"` (`is_kept`), bytes may keep the class that a program chose, or that
/// the NIC treats differently from the level's. So that is no contradiction then.
fn missing_bytes(report: &NicReport, is_kept: bool) -> Option<Finding> {
    let permitted: u64 = report.levels.iter().map(|row| row.permitted_bytes).sum();
    let sum = |of_level: bool| -> u64 {
        let rows = report.priorities.iter().filter(|row| row.of_level == of_level);
        rows.filter_map(|row| row.sent_bytes).sum()
    };
    let (sent, elsewhere) = (sum(true), sum(false));
    if permitted < BYTES_MIN {
        let found = format!("only {} were permitted; run it while jobs send", bytes(permitted));
        return Some(Finding::info("bytes", found));
    }
    let list: Vec<String> = (report.priorities.iter().filter(|row| row.of_level))
        .map(|row| row.priority.to_string())
        .collect();
    let found = format!(
        "{} were permitted; the levels' priorities ({}) sent {}, the others {}",
        bytes(permitted),
        list.join(", "),
        bytes(sent),
        bytes(elsewhere)
    );
    if sent >= permitted / 2 {
        return Some(Finding::ok("bytes", found));
    }
    if is_kept {
        let why = "marking is preserve: a class stays if somebody chose it, or if the NIC treats \
                   the level's differently (PFC, ECN)";
        return Some(Finding::warn("bytes", found).because(why).action(
            "laxity doctor shows both; marking = \"levels\" sets the levels' classes regardless",
        ));
    }
    Some(Finding::error("bytes", found).because(
        "permitted bytes leave without the DSCP of their level, so NIC and switches do not order \
         them",
    ).action(
        "laxity doctor names processes with a class of their own; then look for a rule that \
         rewrites DSCP (tc, nftables, cma_roce_tos)",
    ))
}

fn page(report: &VerifyReport) -> String {
    let count = |value: Option<u64>| value.map_or("not measured".to_owned(), |v| v.to_string());
    let size = |value: Option<u64>| value.map_or("not measured".to_owned(), bytes);
    let small = |value: Option<u8>| value.map_or("unknown".to_owned(), |v| v.to_string());
    let word = |value: Option<bool>| match value {
        Some(true) => "on",
        Some(false) => "off",
        None => "unknown",
    };
    let mut parts = Vec::from_iter(report.ttft.as_ref().map(engines::Division::line));
    for nic in &report.nics {
        let interface = nic.interface.as_deref().unwrap_or("no interface");
        let (sent, handled) = (count(nic.cnp_sent), count(nic.cnp_handled));
        let seconds = report.seconds;
        parts.push(format!(
            "{} ({interface}), {seconds} s; CNPs sent: {sent}, received: {handled}",
            nic.nic
        ));
        let mut levels = table(&["stage", "level", "dscp", "priority", "queue", "permitted"]);
        for row in &nic.levels {
            levels.add_row(vec![
                row.stage.clone(),
                row.level.clone(),
                row.dscp.to_string(),
                small(row.priority),
                small(row.queue),
                bytes(row.permitted_bytes),
            ]);
        }
        align_numbers(&mut levels, 2);
        let header =
            ["priority", "PFC", "ECN", "permitted", "sent", "paused by peer", "pauses sent"];
        let mut priorities = table(&header);
        for row in &nic.priorities {
            priorities.add_row(vec![
                row.priority.to_string(),
                word(row.pfc).to_owned(),
                word(row.ecn).to_owned(),
                bytes(row.permitted_bytes),
                size(row.sent_bytes),
                count(row.pauses_received),
                count(row.pauses_sent),
            ]);
        }
        align_numbers(&mut priorities, 3);
        parts.extend((!nic.levels.is_empty()).then(|| levels.to_string()));
        parts.extend((!nic.priorities.is_empty()).then(|| priorities.to_string()));
    }
    parts.push(finding::page(&report.findings, false));
    parts.join("\n\n")
}

#[cfg(test)]
mod tests;
