//! A map of RDMA traffic: for each process that uses RDMA, its paths, the class of each, and
//! whether Laxity orders it, somebody marked it, the daemon only measures it, or nobody sees it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::ErrorKind;

use laxity_wire::{ClientStatus, ControlError, Status};
use serde::Serialize;

use super::fabric::{self, NicPort};
use super::finding::Finding;
use super::paths::{DataPath, PathKind, data_paths};
use super::processes::{self, NicKind, Process, ProcessScan, QueuePairs};
use super::root::Root;
use crate::class_table::{Field, VARIABLES, Variable};
use crate::cluster::tables::clean;

#[derive(Clone, Copy)]
pub(crate) enum DaemonReply<'a> {
    Answers(&'a Status),
    /// The daemon does not run.
    Absent,
    /// This user may not ask the daemon, or the processes belong to another host.
    Unknown,
}

impl<'a> DaemonReply<'a> {
    pub(crate) fn of(answer: &'a Result<Status, ControlError>, root: &Root) -> Self {
        match answer {
            Ok(status) => Self::Answers(status),
            Err(ControlError::Connect { cause, .. })
                if root.is_real() && cause.kind() != ErrorKind::PermissionDenied =>
            {
                Self::Absent
            }
            Err(_) => Self::Unknown,
        }
    }
}

/// How much Laxity has to do with a path, the most first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Reach {
    Ordered,
    /// Nothing orders it. A variable or the driver sets its class.
    Marked,
    /// Nothing orders or marks it. The daemon counts its bytes as foreign.
    Measured,
    Unseen,
    Idle,
}

/// Returns the name that a kind has in JSON.
fn word(kind: impl Serialize) -> String {
    let json = serde_json::to_value(kind).unwrap_or_default();
    json.as_str().unwrap_or_default().to_owned()
}

/// A path of a process, as it is shown.
#[derive(Debug, Serialize)]
pub(crate) struct PathRow {
    pub(crate) path: PathKind,
    pub(crate) library: String,
    /// On RoCE. `None` if the library has no class, or if the network is no RoCE.
    pub(crate) traffic_class: Option<u8>,
    pub(crate) service_level: Option<u8>,
    /// What sets the class: a variable, `default` for the library itself, or `driver`.
    pub(crate) class_from: Option<String>,
    pub(crate) laxity: Reach,
    pub(crate) why: String,
}

#[derive(Debug, Default, Serialize)]
pub(crate) struct Row {
    pub(crate) pid: u32,
    pub(crate) name: String,
    /// Whether this user may look into the process. If not, only the fields above and the queue
    /// pairs are known.
    pub(crate) readable: bool,
    pub(crate) devices: Vec<String>,
    pub(crate) libraries: Vec<String>,
    /// How many queue pairs of each type it has, as far as the kernel knows them.
    pub(crate) queue_pairs: BTreeMap<String, usize>,
    pub(crate) paths: Vec<PathRow>,
    /// What to do to learn more. Empty if nothing is needed.
    pub(crate) next_step: &'static str,
}

const NEXT_STEP: &str = "run it as root, in the pid namespace of the host";

pub(crate) struct Sources<'a> {
    pub(crate) root: &'a Root,
    pub(crate) ports: &'a [NicPort],
    pub(crate) daemon: DaemonReply<'a>,
    pub(crate) queue_pairs: QueuePairs,
}

impl<'a> Sources<'a> {
    /// Asks the kernel for the queue pairs of this host's processes, too.
    pub(crate) fn new(root: &'a Root, ports: &'a [NicPort], daemon: DaemonReply<'a>) -> Self {
        let answer = root.ask("rdma", &["-j", "res", "show", "qp"]);
        let queue_pairs = answer.map(|json| processes::queue_pairs(&json)).unwrap_or_default();
        Self { root, ports, daemon, queue_pairs }
    }
}

/// Returns the map of this host, or of the host below `root`, with the answer of its daemon.
pub(crate) fn of_host(root: &Root, ports: &[NicPort], status: &Status) -> Vec<Row> {
    rows(&Sources::new(root, ports, DaemonReply::Answers(status)), &processes::scan(root))
}

/// Returns a row for each process that has a path, and for each that can't be read.
pub(crate) fn rows(sources: &Sources<'_>, seen: &ProcessScan) -> Vec<Row> {
    let queue_pairs = |pid| sources.queue_pairs.get(&pid).cloned().unwrap_or_default();
    let readable = seen.processes.iter().map(|process| Row {
        pid: process.pid,
        name: process.name.clone(),
        readable: true,
        devices: process.devices.clone(),
        libraries: process.libraries.iter().cloned().collect(),
        queue_pairs: queue_pairs(process.pid),
        paths: data_paths(process).iter().map(|path| flow(sources, process, path)).collect(),
        next_step: "",
    });
    let unreadable = seen.unreadable.iter().map(|(pid, name)| Row {
        pid: *pid,
        name: name.clone(),
        queue_pairs: queue_pairs(*pid),
        next_step: NEXT_STEP,
        ..Row::default()
    });
    readable.filter(|row| !row.paths.is_empty()).chain(unreadable).collect()
}

fn flow(sources: &Sources<'_>, process: &Process, path: &DataPath) -> PathRow {
    let ports: Vec<&NicPort> = ports_of(sources, process);
    let is_infiniband = ports.iter().any(|port| port.link_layer == "InfiniBand");
    let field = if is_infiniband { Field::ServiceLevel } else { Field::TrafficClass };
    // EFA carries no class, whatever a library sets.
    let has_class = |row: &&Variable| {
        row.library == path.library && row.sets == field && process.nic != NicKind::Efa
    };
    let row = VARIABLES.iter().find(has_class);
    let value = |name: &str| process.variables.get(name).cloned();
    let set = row.and_then(|row| row.set_by(value));
    // The driver's class counts on verbs queue pairs, whatever their program sets.
    let forced = || ports.iter().find_map(|port| fabric::forced(sources.root, port));
    let forced = (path.verbs && !is_infiniband).then(forced).flatten();
    let class = forced.or(set.map(|(_, class)| class)).or(row.map(|row| row.default));
    let from = match (forced, set) {
        (Some(_), _) => Some("driver"),
        (None, Some((name, _))) => Some(name),
        (None, None) => row.map(|_| "default"),
    };
    let chosen = class.filter(|&class| class != 0 && from != Some("default")).and(from);
    let (laxity, why) = reach(sources, process, path, chosen, &ports);
    PathRow {
        path: path.kind,
        library: path.library.clone(),
        traffic_class: class.filter(|_| !is_infiniband),
        service_level: class.filter(|_| is_infiniband),
        class_from: from.map(str::to_owned),
        laxity,
        why,
    }
}

/// Returns the ports of a process's devices, or all of the host's if none is known.
fn ports_of<'a>(sources: &Sources<'a>, process: &Process) -> Vec<&'a NicPort> {
    let is_open = |port: &&NicPort| process.devices.contains(&port.device);
    let open: Vec<&NicPort> = sources.ports.iter().filter(is_open).collect();
    if open.is_empty() { sources.ports.iter().collect() } else { open }
}

/// Returns whether a path is ordered, marked or measured, and why. `chosen` is what sets its class.
fn reach(
    sources: &Sources<'_>,
    process: &Process,
    path: &DataPath,
    chosen: Option<&str>,
    ports: &[&NicPort],
) -> (Reach, String) {
    // A library that asks for permits above libibverbs does so for other networks, too.
    if process.is_idle && path.asks.is_none() {
        return (Reach::Idle, "no RDMA device is open".to_owned());
    }
    let orders = orders(sources, process, path);
    if let Ok(Some(by)) = &orders {
        return (Reach::Ordered, format!("by {by}"));
    }
    let but = orders.err().map_or(String::new(), |why| format!("; {why}"));
    if let Some(by) = chosen {
        return (Reach::Marked, format!("class set by {by}{but}"));
    }
    if let Some(counters) = counters(sources, ports) {
        return (Reach::Measured, format!("counted by {counters}{but}"));
    }
    (Reach::Unseen, format!("no class chosen, no counters{but}"))
}

/// Returns what orders a path, if anything, or why a part of Laxity in the process does not.
fn orders(
    sources: &Sources<'_>,
    process: &Process,
    path: &DataPath,
) -> Result<Option<String>, String> {
    let preload = (path.verbs && process.preloaded).then_some("liblaxity.so");
    let Some(by) = preload.or(path.asks) else { return Ok(None) };
    let kinds = sources.queue_pairs.get(&process.pid);
    let is_ordered = |kinds: &BTreeMap<String, usize>| {
        kinds.contains_key("RC") || kinds.contains_key("UC") || kinds.is_empty()
    };
    if path.asks.is_none() && !kinds.is_none_or(is_ordered) {
        return Err(format!("{by} orders RC and UC queue pairs only"));
    }
    let status = match sources.daemon {
        DaemonReply::Unknown => return Ok(Some(format!("{by}, if the daemon does its part"))),
        DaemonReply::Absent => return Err(format!("{by} finds no daemon")),
        DaemonReply::Answers(status) => status,
    };
    let clients = || status.clients.iter().filter(|client| client.pid == process.pid);
    let is_in_force = |client: &ClientStatus| client.mode == "enforce" && !client.distrusted;
    match () {
        () if clients().next().is_none() => Err(format!("{by} is in it, but not attached")),
        () if status.bypass => Err(format!("{by} is bypassed")),
        () if clients().any(is_in_force) => Ok(Some(by.to_owned())),
        () => Err(format!("{by} delays nothing now")),
    }
}

/// Returns the source by which the daemon counts all that passes the ports.
fn counters(sources: &Sources<'_>, ports: &[&NicPort]) -> Option<String> {
    let of_port = |port: &&NicPort| match sources.daemon {
        DaemonReply::Absent => None,
        DaemonReply::Unknown => {
            let (root, driver) = (sources.root.path(), laxity_nic::NicDriver::NONE);
            let source = laxity_nic::counters_of(root, &port.device, driver)?;
            Some(source.name().to_owned())
        }
        DaemonReply::Answers(status) => {
            let is_its = |name: &str| port.is_called(name) || name == "default";
            let owner = |name: &str| Some(name) == port.owner.as_deref();
            let known = status.ports.iter();
            let mut own = known.filter(|known| is_its(&known.name) || owner(&known.name));
            own.find(|known| !known.counters_stale)?.counters.clone()
        }
    };
    let found: Option<Vec<String>> = ports.iter().map(of_port).collect();
    let mut found = found.filter(|found| !found.is_empty())?;
    found.sort();
    found.dedup();
    Some(found.join(", "))
}

pub(crate) fn bypasses(rows: &[Row]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (row, flow) in rows.iter().flat_map(|row| row.paths.iter().map(move |flow| (row, flow))) {
        let finding = match (flow.path, flow.library.as_str()) {
            _ if matches!(flow.laxity, Reach::Ordered | Reach::Idle) => continue,
            (PathKind::Devx, "UCX") => {
                Finding::warn("bypass-verbs", "UCX on mlx5 builds its work requests itself (DEVX)")
                    .because(
                        "liblaxity.so does not see such work requests, so they go out unscheduled",
                    )
                    .action("start it with UCX_TLS=rc_verbs,ud_verbs,self,sm,cuda")
            }
            (PathKind::Ibgda | PathKind::GinGdaki, library) => Finding::info(
                "bypass-verbs",
                format!("{library} is in it: GPUs may ring the NIC's doorbells themselves"),
            )
            .because(
                "such transfers pass no library on the host, so nothing can order them; their \
                 class can still be set",
            ),
            _ => continue,
        };
        findings.push(finding.about(format!("{} ({})", row.pid, row.name)));
    }
    findings
}

const UNREADABLE_SHOWN_MAX: usize = 5;

pub(crate) fn page(rows: &[Row]) -> String {
    let mut page = String::from("Processes that use RDMA:\n");
    // Writing to a `String` does not fail.
    for row in rows.iter().filter(|row| row.readable) {
        let _ = writeln!(page, "{}", clean(&heading(row)));
        let _ = writeln!(page, "    libraries: {}", clean(&row.libraries.join(" ")));
        for flow in &row.paths {
            let line = format!(
                "    {:<9}  {:<10}  {:<29}  {:<8}  {}",
                word(flow.path),
                flow.library,
                class_words(flow),
                word(flow.laxity),
                flow.why
            );
            let _ = writeln!(page, "{}", clean(&line));
        }
    }
    let mut unreadable: Vec<&Row> = rows.iter().filter(|row| !row.readable).collect();
    unreadable.sort_by_key(|row| row.queue_pairs.is_empty());
    match (unreadable.len(), rows.len()) {
        (0, 0) => page.push_str("    none\n"),
        (all, rows) if all == rows => page.push_str("    none that this user may look into\n"),
        _ => {}
    }
    if !unreadable.is_empty() {
        let named = unreadable.iter().take(UNREADABLE_SHOWN_MAX);
        let named: Vec<String> = named.map(|row| heading(row)).collect();
        let more = if unreadable.len() > named.len() { ", …" } else { "" };
        let line = format!("{} can't be read: {}{more}", unreadable.len(), named.join("; "));
        let _ = writeln!(page, "{}\n    {NEXT_STEP}", clean(&line));
    }
    page
}

/// Returns one line: how many processes and paths there are, by what Laxity has to do with them.
pub(crate) fn summary(rows: &[Row]) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for flow in rows.iter().flat_map(|row| &row.paths) {
        *counts.entry(word(flow.laxity)).or_default() += 1;
    }
    let unreadable = rows.iter().filter(|row| !row.readable).count();
    let mut words = vec![format!("{} RDMA processes", rows.len() - unreadable)];
    words.extend(counts.iter().map(|(name, count)| format!("{count} paths {name}")));
    words.extend((unreadable > 0).then(|| format!("{unreadable} processes unreadable")));
    format!("{}: laxity status --full", words.join(", "))
}

fn heading(row: &Row) -> String {
    let mut line = format!("{} ({})", row.pid, row.name);
    match row.devices.is_empty() {
        false => line.push_str(&format!(", {}", row.devices.join(" "))),
        true if row.readable => line.push_str(", no device open"),
        true => {}
    }
    let queue_pairs: Vec<String> =
        row.queue_pairs.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    if !queue_pairs.is_empty() {
        line.push_str(&format!(", queue pairs: {}", queue_pairs.join(" ")));
    }
    line
}

fn class_words(flow: &PathRow) -> String {
    let from = match flow.class_from.as_deref() {
        None => return "no class".to_owned(),
        Some("default") => "its default",
        Some("driver") => "forced",
        Some(_) => "set",
    };
    match (flow.traffic_class, flow.service_level) {
        (Some(class), _) => format!("class {class} (DSCP {}, {from})", class >> 2),
        (None, Some(level)) => format!("service level {level} ({from})"),
        (None, None) => "no class".to_owned(),
    }
}
