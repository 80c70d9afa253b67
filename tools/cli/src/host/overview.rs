//! The text of `laxity status`. On a host of eight NICs it fits a screen of 80 by 24: what is wrong
//! comes first, then a row for each NIC, the jobs, and the processes that use RDMA.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use laxity_cli::table::{bytes, table, without_rules};
use laxity_wire::{
    ClientStatus, ClusterStatus, DistrustedOwner, OperatorChange, PortStatus, RefusalStatus, Status,
};

use crate::cluster::tables::span;
use crate::doctor::fabric::{self, NicPort};
use crate::doctor::map::{self, Row};

const COLUMNS: usize = 80;
/// Rows of the screen without that of the prompt.
const ROWS: usize = 23;
/// Rows for problems, however many NICs there are.
const PROBLEM_ROWS_MIN: usize = 3;
/// Levels of a port that are told apart. The others are summed up.
const LEVELS_SHOWN_MAX: usize = 2;
/// Most refused users that are shown. `--json` shows all that the daemon keeps.
const REFUSED_SHOWN_MAX: usize = 3;

/// Returns the page. `is_full` shows everything, however long it gets.
pub(super) fn page(status: &Status, host: &[NicPort], processes: &[Row], is_full: bool) -> String {
    let room = if is_full { usize::MAX } else { ROWS };
    let nics = [vec![nics(status)], fabrics(status, host.iter())].concat().join("\n");
    let mut above = headline(status);
    // The NICs, and at least a line for jobs and one for processes, follow blank lines.
    let below = rows(&nics) + 1 + 2 + 2 * usize::from(!processes.is_empty());
    let left = room.saturating_sub(rows(&above.join("\n")) + below);
    above.extend(fitting(&problems(status), left.max(PROBLEM_ROWS_MIN)));
    let mut parts = vec![above.join("\n")];
    if status.clients.is_empty() {
        parts.push("No client is attached.".to_owned());
    }
    parts.push(nics);
    if is_full {
        parts.extend(status.ports.iter().map(levels));
        parts.extend(changes(status));
    }
    let taken = |parts: &[String]| parts.iter().map(|part| rows(part) + 1).sum::<usize>();
    if !status.clients.is_empty() {
        let others = taken(&parts) + 2 * usize::from(!processes.is_empty());
        parts.push(jobs(status, room.saturating_sub(others)));
    }
    if !processes.is_empty() {
        let map = map::page(processes).trim_end().to_owned();
        let fits = taken(&parts) + rows(&map) <= room;
        parts.push(if fits { map } else { map::summary(processes) });
    }
    parts.join("\n\n")
}

/// Returns the lines that fit, and one that counts the others.
fn fitting(lines: &[String], room: usize) -> Vec<String> {
    let mut shown = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let is_last = at + 1 == lines.len();
        let taken = shown.iter().chain([line]).map(|line| rows(line)).sum::<usize>();
        if taken + usize::from(!is_last) > room {
            shown.push(format!("… and {} more: laxity status --full", lines.len() - at));
            break;
        }
        shown.push(line.clone());
    }
    shown
}

/// Returns the levels of both directions of a NIC, or `None` if the daemon has none of this name.
pub(super) fn nic(status: &Status, host: &[NicPort], name: &str) -> Option<String> {
    let is_its = |port: &&NicPort| {
        [Some(&*port.device), port.netdev.as_deref(), Some("default")].contains(&Some(name))
    };
    let mut parts = fabrics(status, host.iter().filter(is_its));
    parts.extend(status.ports.iter().filter(|port| port.name == name).map(levels));
    nic_names(status).contains(name).then(|| parts.join("\n\n"))
}

pub(super) fn nic_names(status: &Status) -> BTreeSet<&str> {
    status.ports.iter().map(|port| port.name.as_str()).collect()
}

/// Returns the rows that a text takes on the screen.
fn rows(text: &str) -> usize {
    text.lines().map(|line| line.chars().count().div_ceil(COLUMNS).max(1)).sum()
}

/// Returns what matters, the most important line first.
pub(crate) fn summary(status: &Status) -> Vec<String> {
    headline(status).into_iter().chain(problems(status)).collect()
}

fn headline(status: &Status) -> Vec<String> {
    let totals = &status.totals;
    let state = match status.mode.as_str() {
        _ if status.bypass => "BYPASSED: nothing is scheduled until `laxity bypass off`",
        "off" => "mode off: nothing is scheduled",
        "observe" => "observe: nothing is delayed until `laxity enforce on`",
        mode => mode,
    };
    let configured = match status.configured_mode.as_str() {
        "" => String::new(),
        mode => format!(" (by command; the configuration has {mode})"),
    };
    // Clients do not submit what they bypass, so it can't be counted.
    let bypassed = if status.bypass || status.mode == "off" {
        format!("{} bypassed before (not counted now)", bytes(totals.bypassed_bytes))
    } else {
        format!("{} bypassed", bytes(totals.bypassed_bytes))
    };
    let observed = match totals.observed_bytes {
        0 => String::new(),
        observed => format!("{} observed, ", bytes(observed)),
    };
    let mut lines = vec![
        format!(
            "laxityd {} (pid {}), up {}, policy {}, {state}{configured}",
            status.version,
            status.pid,
            span_ms(status.uptime_ms),
            status.policy,
        ),
        format!(
            "{} flows, {} permitted, {observed}{bypassed}, {} deadlines missed, {} pruned",
            totals.flows,
            bytes(totals.permitted_bytes),
            totals.deadline_misses,
            totals.pruned_requests,
        ),
    ];
    lines.extend(status.cluster.as_ref().map(cluster_line));
    lines
}

/// Returns a line with the order that is in force and its age.
fn cluster_line(cluster: &ClusterStatus) -> String {
    let link = if cluster.connected {
        format!("attends {} as {}", cluster.endpoint, cluster.host)
    } else if cluster.problem.is_empty() {
        format!("connects to {}", cluster.endpoint)
    } else {
        format!("no coordinator at {}: {}", cluster.endpoint, cluster.problem)
    };
    let epoch = match (cluster.term, cluster.sequence, cluster.age_ms) {
        (Some(term), Some(sequence), age) => {
            let age = age.map_or(String::new(), |ms| format!(", confirmed {ms} ms ago"));
            format!("{term}.{sequence}{age}")
        }
        _ => "none yet".to_owned(),
    };
    let order = match cluster.order.as_str() {
        "cluster" => format!("the coordinator's order is in force ({epoch})"),
        _ if cluster.drained => "drained: this daemon's own order is in force".to_owned(),
        _ => format!("this daemon's own order is in force (last of the coordinator: {epoch})"),
    };
    let mut line = format!("{link}; {order}");
    let refused = cluster.stale_orders + cluster.broken_orders;
    if refused > 0 {
        line.push_str(&format!(", {refused} orders refused"));
    }
    line
}

/// Returns what is wrong, the worst first.
fn problems(status: &Status) -> Vec<String> {
    let totals = &status.totals;
    let mut problems = status.problems.clone();
    problems.extend(refused(status));
    if totals.unknown_nic_flows > 0 {
        problems.push(format!(
            "{} flows named a NIC that the daemon doesn't have and went out unscheduled; add its \
             [[nic]] unless the NIC was gone",
            totals.unknown_nic_flows
        ));
    }
    problems.extend(assumed(status));
    problems.extend(absent(status));
    problems.extend(taken_by_others(status));
    problems.extend(misbehaviour(status));
    if totals.garbage_records > 0 {
        let records = totals.garbage_records;
        problems.push(format!("{records} records made no sense; journalctl -u laxityd says whose"));
    }
    if totals.written_off_bytes > 0 {
        problems.push(format!(
            "{} permitted and never reported as completed; journalctl -u laxityd says whose",
            bytes(totals.written_off_bytes)
        ));
    }
    let older: Vec<String> = older_clients(status).collect();
    if !older.is_empty() {
        problems.push(format!(
            "older library than laxityd: {}; scheduled, but restart them before the next upgrade",
            older.join(", ")
        ));
    }
    problems
}

/// Returns a line for each refused user, and the lines of the configuration that would admit them.
fn refused(status: &Status) -> Vec<String> {
    let shown = &status.refused[..status.refused.len().min(REFUSED_SHOWN_MAX)];
    let settings: BTreeSet<&str> = shown.iter().map(|user| user.setting.as_str()).collect();
    let line = |user: &RefusalStatus| {
        // The line to paste replaces the advice.
        let why = if user.setting.is_empty() { None } else { user.why.split(';').next() };
        let (why, ago) = (why.unwrap_or(&user.why), span_ms(user.last_ms));
        format!("refused {} of user {} (pid {}, {ago} ago): {why}", user.count, user.uid, user.pid)
    };
    let settings = settings.into_iter().filter(|setting| !setting.is_empty());
    shown.iter().map(line).chain(settings.map(|setting| format!("    {setting}"))).collect()
}

/// Returns a line for each distrusted owner, and for each client that is distrusted, silent or
/// limited.
fn misbehaviour(status: &Status) -> Vec<String> {
    let owner = |owner: &DistrustedOwner| {
        let cgroup = match owner.cgroup.as_str() {
            "" => String::new(),
            cgroup => format!(" in {cgroup}"),
        };
        let left = span_ms(owner.for_ms);
        format!(
            "uid {}{cgroup} is distrusted: what attaches of it is unscheduled for {left}; restart \
             what hangs",
            owner.uid
        )
    };
    let client = |client: &ClientStatus| {
        let owed = bytes(client.owed_bytes);
        let what = match client.owed_bytes {
            _ if client.distrusted => "is distrusted: it goes unscheduled; restart it".to_owned(),
            1.. if client.held => format!("is silent: owes {owed}, no permits; does it hang?"),
            1.. => format!("is silent: owes {owed} while others wait; does it hang?"),
            0 if client.limited => {
                "is limited to its part, since others use the port (nothing to do)".to_owned()
            }
            0 => return None,
        };
        Some(format!("{} (pid {}, uid {}) {what}", client.name, client.pid, client.uid))
    };
    let clients = status.clients.iter().filter_map(client);
    status.distrusted.iter().map(owner).chain(clients).collect()
}

/// Returns the name, process id and release of each client whose library is older than the daemon.
pub(crate) fn older_clients(status: &Status) -> impl Iterator<Item = String> {
    let older = status.clients.iter().filter(|client| client.library_is_older);
    older.map(|client| format!("{} (pid {}, {})", client.name, client.pid, client.library))
}

/// Returns a line about the NICs whose rate nobody knows, if there are any.
fn assumed(status: &Status) -> Option<String> {
    let assumed = |port: &&PortStatus| port.rate_assumed && port.direction == "egress";
    let mut ports = status.ports.iter().filter(assumed).peekable();
    let rate = bytes(ports.peek()?.rate_bytes_per_s);
    let names: Vec<&str> = ports.map(|port| port.name.as_str()).collect();
    Some(format!(
        "{}: the kernel knows no rate, {rate}/s is assumed; set `rate` in its [[nic]]",
        names.join(", ")
    ))
}

/// Returns a line about the NICs that are gone, if there are any.
fn absent(status: &Status) -> Option<String> {
    let absent = status.ports.iter().filter(|port| port.absent && port.direction == "egress");
    let names: Vec<&str> = absent.map(|port| port.name.as_str()).collect();
    let what = "gone; its flows go out unscheduled until it returns; see dmesg";
    (!names.is_empty()).then(|| format!("{}: {what}", names.join(", ")))
}

/// Returns a line about the port of which others take the most, if there is one.
fn taken_by_others(status: &Status) -> Option<String> {
    let short = || status.ports.iter().filter(|port| !left_by_others(port).is_empty());
    let port = short().max_by_key(|it| it.foreign_bytes_per_s + it.congestion_bytes_per_s)?;
    let (rate, left) = (bytes(port.rate_bytes_per_s), left_by_others(port));
    let others = match short().count() - 1 {
        0 => String::new(),
        others => format!("; {others} more ports are short"),
    };
    Some(format!("{} {}: {rate}/s{left}{others}: laxity doctor", port.name, port.direction))
}

/// Returns what is left of a port for scheduled traffic, and why, if that is less than all.
fn left_by_others(port: &PortStatus) -> String {
    let mut why = Vec::new();
    if port.counters_stale {
        why.push("its counters stand still: see laxity doctor".to_owned());
    }
    // Less than a hundredth is nothing to act on.
    for (taken, who) in
        [(port.foreign_bytes_per_s, "others"), (port.congestion_bytes_per_s, "congestion")]
    {
        if taken > port.rate_bytes_per_s / 100 {
            why.push(format!("{who} {}/s", bytes(taken)));
        }
    }
    let left = match port.rate_in_force_bytes_per_s {
        0 => String::new(),
        all if all >= port.rate_bytes_per_s => String::new(),
        left => format!(", {}/s left", bytes(left)),
    };
    match why.is_empty() {
        true => left,
        false => format!("{left} ({})", why.join(", ")),
    }
}

/// Returns a number of bytes in five characters or fewer, such as `46.6G`.
fn short(count: u64) -> String {
    bytes(count).replace(' ', "").replace("iB", "").replace('B', "")
}

/// Returns a row for each NIC. Values are those of egress and of ingress.
fn nics(status: &Status) -> String {
    let mut table =
        table(&["NIC", "rate/s", "in flight", "waiting", "flows by level, egress/ingress"]);
    for ports in status.ports.chunk_by(|one, other| one.nic == other.nic) {
        let both = |value: &dyn Fn(&PortStatus) -> String| {
            ports.iter().map(value).collect::<Vec<_>>().join("/")
        };
        let rate = |port: &PortStatus| match port.rate_in_force_bytes_per_s {
            _ if port.absent => "–".to_owned(),
            0 => short(port.rate_bytes_per_s),
            left => short(left),
        };
        table.add_row([
            ports[0].name.clone(),
            both(&rate),
            both(&|port| short(port.in_flight_bytes)),
            both(&|port| short(port.waiting_bytes)),
            both(&waiting_by_level),
        ]);
    }
    without_rules(table, 0..0)
}

/// Returns the highest levels with waiting flows, and a sum of the others, as `P2:3 P3:5 +12`.
fn waiting_by_level(port: &PortStatus) -> String {
    let waiting = || port.levels.iter().filter(|level| level.waiting_flows > 0);
    let first = waiting().take(LEVELS_SHOWN_MAX);
    let first =
        first.map(|it| format!("{}:{}", it.level.replace("scavenger", "scav"), it.waiting_flows));
    let others: u64 = waiting().skip(LEVELS_SHOWN_MAX).map(|level| level.waiting_flows).sum();
    let others = (others > 0).then(|| format!("+{others}"));
    let words: Vec<String> = first.chain(others).collect();
    if words.is_empty() { "–".to_owned() } else { words.join(" ") }
}

/// Returns a line for each kind of network without DSCPs: how the levels are told apart there.
fn fabrics<'p>(status: &Status, host: impl Iterator<Item = &'p NicPort>) -> Vec<String> {
    let mut devices: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for port in host.filter(|port| !port.ethernet) {
        devices.entry(fabric::marking(port, Some(status))).or_default().push(&port.device);
    }
    devices.into_iter().map(|(how, devices)| format!("{}: {how}", devices.join(" "))).collect()
}

/// Returns a row for each job, or for each pod of it, in `room` rows, those with the most waiting
/// flows first.
fn jobs(status: &Status, room: usize) -> String {
    let mut by_name: BTreeMap<(&str, Option<String>), Vec<&ClientStatus>> = BTreeMap::new();
    for client in &status.clients {
        let pod = client.pod.as_ref().map(ToString::to_string);
        by_name.entry((&client.name, pod)).or_default().push(client);
    }
    type Count = fn(&ClientStatus) -> u64;
    let sum =
        |of: &[&ClientStatus], count: Count| of.iter().map(|client| count(client)).sum::<u64>();
    let mut jobs: Vec<_> = by_name.into_iter().collect();
    jobs.sort_by_key(|(_, clients)| Reverse(sum(clients, |client| client.waiting_flows)));
    let is_observed = status.clients.iter().any(|client| client.observed_bytes > 0);
    let mut header = vec!["job", "processes", "flows", "waiting", "permitted", "bypassed", "where"];
    if is_observed {
        header.insert(5, "observed");
    }
    let mut table = table(&header);
    for ((name, pod), clients) in &jobs {
        let is_counted = !status.bypass && clients.iter().all(|client| client.mode != "off");
        let bypassed = short(sum(clients, |client| client.bypassed_bytes));
        let others = if clients.len() > 1 { " …" } else { "" };
        let mut place = pod.clone().unwrap_or_else(|| format!("pid {}{others}", clients[0].pid));
        if let Some(other) = clients.iter().find(|client| client.mode != status.mode) {
            place.push_str(&format!(", mode {}", other.mode));
        }
        let mut row = vec![
            (*name).to_owned(),
            clients.len().to_string(),
            sum(clients, |client| client.flows).to_string(),
            sum(clients, |client| client.waiting_flows).to_string(),
            short(sum(clients, |client| client.permitted_bytes)),
            if is_counted { bypassed } else { "not counted".to_owned() },
            place,
        ];
        if is_observed {
            row.insert(5, short(sum(clients, |client| client.observed_bytes)));
        }
        table.add_row(row);
    }
    let lines: Vec<String> =
        without_rules(table, 1..header.len() - 1).lines().map(str::to_owned).collect();
    match room {
        0..3 => format!("{} jobs: laxity status --full", jobs.len()),
        _ => fitting(&lines, room).join("\n"),
    }
}

/// Returns what operators changed, the latest first, if anything.
fn changes(status: &Status) -> Option<String> {
    let line = |change: &OperatorChange| {
        let who = change.uid.map_or("a signal".to_owned(), |uid| format!("user {uid}"));
        format!("{} ago, {who}: {}", span_ms(change.ago_ms), change.what)
    };
    let lines: Vec<String> = status.changes.iter().map(line).collect();
    (!lines.is_empty()).then(|| format!("changes by operators\n{}", lines.join("\n")))
}

fn levels(port: &PortStatus) -> String {
    let mut table = table(&["level", "dscp", "waiting flows", "waiting bytes", "permitted"]);
    for level in &port.levels {
        table.add_row([
            level.level.clone(),
            level.dscp.to_string(),
            level.waiting_flows.to_string(),
            bytes(level.waiting_bytes),
            bytes(level.permitted_bytes),
        ]);
    }
    let table = without_rules(table, 1..5);
    let held = match port.held_flows {
        0 => String::new(),
        flows => format!(", {flows} flows ({}) held back", bytes(port.held_bytes)),
    };
    format!(
        "{} {}: {}/s{}, load {:.0} %, {} in flight, window {}{held}, {} promotions, {} demotions\n\
         {table}",
        port.name,
        port.direction,
        bytes(port.rate_bytes_per_s),
        left_by_others(port),
        port.load * 100.0,
        bytes(port.in_flight_bytes),
        bytes(port.window_bytes),
        port.promotions,
        port.demotions,
    )
}

fn span_ms(ms: u64) -> String {
    span(ms.saturating_mul(1_000_000))
}
