//! The rows of each view, from two answers of the daemon: numbers, rates, and why something waits.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::time::Duration;

use clap::ValueEnum;
use laxity_cli::table::bytes;
use laxity_quantity::Nanos;
use laxity_wire::{ClientStatus, PortStatus, Status};

/// What the rows stand for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum View {
    /// Jobs: all clients with the same name
    Jobs,
    /// Attached processes
    #[default]
    Clients,
    /// Stages, over all ports
    Stages,
    /// Levels of each port
    Levels,
    /// Directions of NICs
    Ports,
}

impl View {
    pub(super) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    pub(super) fn next(self) -> Self {
        let all = Self::value_variants();
        all[(self as usize + 1) % all.len()]
    }

    pub(super) const fn header(self) -> &'static [&'static str] {
        match self {
            Self::Jobs => {
                &["job", "processes", "flows", "waiting", "to permit", "permitted/s", "why"]
            }
            Self::Clients => {
                &["client", "pid", "flows", "waiting", "to permit", "permitted/s", "why"]
            }
            Self::Stages => {
                &["stage", "waiting", "to permit", "permitted/s", "wait p50", "wait p99", "missed"]
            }
            Self::Levels => {
                &["port", "level", "dscp", "waiting", "to permit", "permitted/s", "why"]
            }
            Self::Ports => {
                &["port", "used", "in flight", "waiting", "to permit", "permitted/s", "why"]
            }
        }
    }

    /// The column that is sorted by at first: bytes that wait.
    pub(super) fn first_sort(self) -> usize {
        self.header().iter().position(|name| *name == "to permit").unwrap_or(0)
    }
}

/// A cell: its text, and the number that it is sorted by.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Cell {
    pub(super) text: String,
    number: Option<u64>,
}

impl Cell {
    fn word(text: impl Into<String>) -> Self {
        Self { text: text.into(), number: None }
    }

    fn count(number: u64) -> Self {
        Self { text: number.to_string(), number: Some(number) }
    }

    fn bytes(number: u64) -> Self {
        Self { text: bytes(number), number: Some(number) }
    }

    fn time(ns: u64) -> Self {
        let text = if ns == 0 { "–".to_owned() } else { Nanos(ns).about() };
        Self { text, number: Some(ns) }
    }

    fn compare(&self, other: &Self) -> Ordering {
        self.number.cmp(&other.number).then_with(|| self.text.cmp(&other.text))
    }
}

/// A row and the key of what it stands for.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Line {
    pub(super) key: String,
    pub(super) cells: Vec<Cell>,
}

/// The earlier answer and the time since.
type EarlierStatus = (Status, Duration);

pub(super) fn rows(view: View, now: &Status, before: Option<&EarlierStatus>) -> Vec<Line> {
    match view {
        View::Jobs => jobs(now, before),
        View::Clients => clients(now, before),
        View::Stages => stages(now, before),
        View::Levels => levels(now, before),
        View::Ports => ports(now, before),
    }
}

/// Keeps the rows with `filter` in a cell, and sorts them. Equal rows stay in order.
pub(super) fn arrange(rows: &mut Vec<Line>, filter: &str, sort: usize, ascending: bool) {
    let filter = filter.to_lowercase();
    rows.retain(|row| row.cells.iter().any(|it| it.text.to_lowercase().contains(&filter)));
    rows.sort_by(|one, other| {
        let order = one.cells[sort].compare(&other.cells[sort]);
        if ascending { order } else { order.reverse() }
    });
}

/// Returns the bytes per second between two values of a counter.
fn rate(now: u64, before: Option<u64>, elapsed: Duration) -> Cell {
    match before {
        Some(before) if !elapsed.is_zero() => {
            Cell::bytes((now.saturating_sub(before) as f64 / elapsed.as_secs_f64()) as u64)
        }
        _ => Cell { text: "–".to_owned(), number: None },
    }
}

fn elapsed(before: Option<&EarlierStatus>) -> Duration {
    before.map_or(Duration::ZERO, |(_, elapsed)| *elapsed)
}

fn old_client(before: Option<&EarlierStatus>, id: u64) -> Option<&ClientStatus> {
    before?.0.clients.iter().find(|client| client.id == id)
}

fn old_port<'b>(before: Option<&'b EarlierStatus>, port: &PortStatus) -> Option<&'b PortStatus> {
    before?.0.ports.iter().find(|old| old.nic == port.nic && old.direction == port.direction)
}

fn to_permit(client: &ClientStatus) -> u64 {
    client.submitted_bytes.saturating_sub(sent(client) + client.bypassed_bytes)
}

/// Returns the bytes that a client was permitted to send, or sent while it was only observed.
fn sent(client: &ClientStatus) -> u64 {
    client.permitted_bytes + client.observed_bytes
}

fn clients(now: &Status, before: Option<&EarlierStatus>) -> Vec<Line> {
    let line = |client: &ClientStatus| {
        let old = old_client(before, client.id).map(sent);
        Line {
            key: client.id.to_string(),
            cells: vec![
                Cell::word(&client.name),
                Cell::count(client.pid.into()),
                Cell::count(client.flows),
                Cell::count(client.waiting_flows),
                Cell::bytes(if client.waiting_flows > 0 { to_permit(client) } else { 0 }),
                rate(sent(client), old, elapsed(before)),
                Cell::word(why_client(now, client)),
            ],
        }
    };
    now.clients.iter().map(line).collect()
}

fn jobs(now: &Status, before: Option<&EarlierStatus>) -> Vec<Line> {
    let mut by_name: BTreeMap<&str, Vec<&ClientStatus>> = BTreeMap::new();
    for client in &now.clients {
        by_name.entry(&client.name).or_default().push(client);
    }
    let line = |(name, clients): (&str, Vec<&ClientStatus>)| {
        let sum = |value: fn(&ClientStatus) -> u64| clients.iter().map(|it| value(it)).sum::<u64>();
        let old = |client: &&ClientStatus| old_client(before, client.id).map(sent);
        let old = before.map(|_| clients.iter().filter_map(old).sum::<u64>());
        let whys = clients.iter().map(|client| why_client(now, client));
        let why = whys.filter(|why| !why.is_empty()).max();
        Line {
            key: name.to_owned(),
            cells: vec![
                Cell::word(name),
                Cell::count(clients.len() as u64),
                Cell::count(sum(|client| client.flows)),
                Cell::count(sum(|client| client.waiting_flows)),
                Cell::bytes(sum(|it| if it.waiting_flows > 0 { to_permit(it) } else { 0 })),
                rate(sum(sent), old, elapsed(before)),
                Cell::word(why.unwrap_or_default()),
            ],
        }
    };
    by_name.into_iter().map(line).collect()
}

fn stages(now: &Status, before: Option<&EarlierStatus>) -> Vec<Line> {
    let names = now.ports.first().map(|port| &port.stages[..]).unwrap_or_default();
    let line = |(at, named): (usize, &laxity_wire::StageStatus)| {
        let all = || now.ports.iter().filter_map(|port| port.stages.get(at));
        let old = before.map(|(old, _)| {
            let stages = old.ports.iter().filter_map(|port| port.stages.get(at));
            stages.map(|stage| stage.permitted_bytes).sum()
        });
        // Distributions can't be added, so that of the port with the most flows is shown.
        let wait = all().map(|stage| stage.wait).max_by_key(|wait| wait.flows).unwrap_or_default();
        Line {
            key: named.stage.clone(),
            cells: vec![
                Cell::word(&named.stage),
                Cell::count(all().map(|stage| stage.waiting_flows).sum()),
                Cell::bytes(all().map(|stage| stage.waiting_bytes).sum()),
                rate(all().map(|stage| stage.permitted_bytes).sum(), old, elapsed(before)),
                Cell::time(wait.p50_ns),
                Cell::time(wait.p99_ns),
                Cell::count(all().map(|stage| stage.deadline_misses).sum()),
            ],
        }
    };
    names.iter().enumerate().map(line).collect()
}

fn name(port: &PortStatus) -> String {
    format!("{} {}", port.name, port.direction)
}

fn levels(now: &Status, before: Option<&EarlierStatus>) -> Vec<Line> {
    let mut lines = Vec::new();
    for port in &now.ports {
        let old = old_port(before, port);
        for (at, level) in port.levels.iter().enumerate() {
            let old = old.and_then(|old| Some(old.levels.get(at)?.permitted_bytes));
            let higher = port.levels[..at].iter().find(|level| level.waiting_flows > 0);
            let why = match (level.waiting_flows, higher) {
                (0, _) => String::new(),
                (_, Some(higher)) => format!("{} goes first", higher.level),
                (_, None) => why_port(port),
            };
            lines.push(Line {
                key: format!("{} {}", name(port), level.level),
                cells: vec![
                    Cell::word(name(port)),
                    Cell::word(&level.level),
                    Cell::count(level.dscp.into()),
                    Cell::count(level.waiting_flows),
                    Cell::bytes(level.waiting_bytes),
                    rate(level.permitted_bytes, old, elapsed(before)),
                    Cell::word(why),
                ],
            });
        }
    }
    lines
}

fn permitted(port: &PortStatus) -> u64 {
    port.levels.iter().map(|level| level.permitted_bytes).sum()
}

fn ports(now: &Status, before: Option<&EarlierStatus>) -> Vec<Line> {
    let line = |port: &PortStatus| {
        let permitted_s =
            rate(permitted(port), old_port(before, port).map(permitted), elapsed(before));
        let used = permitted_s.number.map(|rate| rate * 100 / port.rate_bytes_per_s.max(1));
        let used = used.map_or_else(
            || Cell::word("–"),
            |percent| Cell { text: format!("{percent} %"), number: Some(percent) },
        );
        Line {
            key: name(port),
            cells: vec![
                Cell::word(name(port)),
                used,
                Cell::bytes(port.in_flight_bytes),
                Cell::count(port.waiting_flows),
                Cell::bytes(port.waiting_bytes),
                permitted_s,
                Cell::word(why_port(port)),
            ],
        }
    };
    now.ports.iter().map(line).collect()
}

/// Says why flows of a port wait. Empty if none does.
fn why_port(port: &PortStatus) -> String {
    match () {
        () if port.waiting_flows == 0 && port.held_flows == 0 => String::new(),
        () if port.held_flows > 0 && port.held_flows >= port.waiting_flows => {
            format!("{} held: their client owes completions", port.held_flows)
        }
        () if port.in_flight_bytes > port.window_bytes => {
            format!("{} in flight, more than the window", bytes(port.in_flight_bytes))
        }
        // The next chunk may not fit into the room that is left. By default a window has four
        // chunks.
        () if port.in_flight_bytes >= port.window_bytes / 4 * 3 => {
            format!("window of {} is full", bytes(port.window_bytes))
        }
        () => "the policy's order".to_owned(),
    }
}

/// Says why flows of a client wait, or why it is not scheduled. Empty if there is nothing to say.
fn why_client(now: &Status, client: &ClientStatus) -> String {
    let owed = bytes(client.owed_bytes);
    match client.mode.as_str() {
        _ if now.bypass => return "bypassed: laxity bypass off".to_owned(),
        _ if client.distrusted => return "distrusted: unscheduled".to_owned(),
        _ if client.held => return format!("held: it owes {owed}"),
        _ if client.owed_bytes > 0 => return format!("silent: it owes {owed}"),
        "off" => return "mode off: unscheduled".to_owned(),
        "observe" => return "observed, never delayed".to_owned(),
        _ if client.waiting_flows == 0 => return String::new(),
        _ => {}
    }
    // The daemon does not say at which port a client waits.
    let mut busy = now.ports.iter().filter(|port| port.waiting_flows > 0);
    match (busy.next(), busy.next()) {
        (Some(port), None) => format!("{}: {}", name(port), why_port(port)),
        (Some(_), Some(_)) => "several ports are busy (5)".to_owned(),
        (None, _) => "a permit is on its way".to_owned(),
    }
}

/// Returns all about a client or a port, as names and values.
pub(super) fn details(view: View, now: &Status, key: &str) -> Vec<(String, String)> {
    let pair = |name: &str, value: String| (name.to_owned(), value);
    let client = now.clients.iter().find(|client| client.id.to_string() == key);
    if let (View::Clients, Some(client)) = (view, client) {
        return vec![
            pair("client", client.name.clone()),
            pair("container", client.pod.as_ref().map_or("none".into(), ToString::to_string)),
            pair(
                "process",
                format!("pid {}, uid {}, mode {}", client.pid, client.uid, client.mode),
            ),
            pair(
                "attached",
                format!("{} s ago, {} lanes", client.attached_ms / 1000, client.lanes),
            ),
            pair("flows", format!("{}, {} waiting", client.flows, client.waiting_flows)),
            pair("submitted", bytes(client.submitted_bytes)),
            pair("permitted", bytes(client.permitted_bytes)),
            pair("observed", bytes(client.observed_bytes)),
            pair("completed", bytes(client.completed_bytes)),
            pair("bypassed", bytes(client.bypassed_bytes)),
            pair("owed", bytes(client.owed_bytes)),
            pair("unknown NIC", format!("{} flows", client.unknown_nic_flows)),
            pair("why", why_client(now, client)),
        ];
    }
    let Some(port) = now.ports.iter().find(|port| view == View::Ports && name(port) == key) else {
        return vec![pair("gone", "this row is no longer there; Esc goes back".to_owned())];
    };
    let mut pairs = vec![
        pair("port", format!("{key}, {}/s", bytes(port.rate_bytes_per_s))),
        pair(
            "in flight",
            format!("{}, window {}", bytes(port.in_flight_bytes), bytes(port.window_bytes)),
        ),
        pair("load", format!("{:.0} %", port.load * 100.0)),
        pair("moved", format!("{} promotions, {} demotions", port.promotions, port.demotions)),
        pair("why", why_port(port)),
    ];
    for stage in &port.stages {
        let levels = port.permitted.iter().filter(|row| row.stage == stage.stage);
        let levels: Vec<String> =
            levels.map(|row| format!("{} {}", row.level, bytes(row.bytes))).collect();
        let said = format!(
            "{} waiting, {} missed; {}",
            stage.waiting_flows,
            stage.deadline_misses,
            if levels.is_empty() { "nothing permitted".to_owned() } else { levels.join(", ") }
        );
        pairs.push(pair(&stage.stage, said));
    }
    pairs
}
