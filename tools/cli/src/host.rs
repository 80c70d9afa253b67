//! Commands for the daemon of this host: `status`, `bypass` and `reload`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use laxity_cli::output::{OutputError, json, say};
use laxity_cli::table::{align_numbers, bytes, table};
use laxity_wire::{ClusterStatus, ControlClient, ControlError, PortStatus, Status};
use serde::Serialize;
use thiserror::Error;

use crate::doctor::map::{self, Row};
use crate::doctor::root::Root;

/// The reason why a command for the daemon failed.
#[derive(Debug, Error)]
pub(crate) enum HostError {
    /// The daemon did not do it.
    #[error(transparent)]
    Daemon(#[from] ControlError),
    /// The answer could not be printed.
    #[error(transparent)]
    Output(#[from] OutputError),
}

/// Where the daemon's control socket is.
#[derive(Args)]
pub(crate) struct Endpoint {
    /// Control socket of the daemon
    #[arg(long, value_name = "PATH", env = laxity_wire::control::SOCKET_ENV,
          default_value = laxity_wire::control::SOCKET_DEFAULT)]
    control: PathBuf,
    /// How long to wait for an answer, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 2000)]
    timeout_ms: u64,
}

impl Endpoint {
    pub(crate) const fn new(control: PathBuf, timeout_ms: u64) -> Self {
        Self { control, timeout_ms }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.control
    }

    pub(crate) fn connect(&self) -> Result<ControlClient, ControlError> {
        ControlClient::connect(&self.control, Duration::from_millis(self.timeout_ms))
    }
}

/// Arguments of `laxity status`.
#[derive(Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    endpoint: Endpoint,
    /// Print all that the daemon reports and the map of processes, as JSON
    #[arg(long)]
    json: bool,
    /// Ask the daemon only, without a look at the host's processes: for probes
    #[arg(long)]
    brief: bool,
    /// Look at another host's /sys and /proc, copied below this folder
    #[arg(long, value_name = "FOLDER", default_value = "/", hide = true)]
    root: PathBuf,
}

#[derive(Serialize)]
struct Overview<'a> {
    #[serde(flatten)]
    status: &'a Status,
    processes: &'a [Row],
}

/// Arguments of `laxity bypass`.
#[derive(Args)]
pub(crate) struct BypassArgs {
    /// `on` sends all traffic unscheduled from now on; `off` schedules it again
    state: Switch,
    #[command(flatten)]
    endpoint: Endpoint,
}

/// Arguments of `laxity enforce`.
#[derive(Args)]
pub(crate) struct EnforceArgs {
    /// `on` makes clients wait for permits from now on; `off` only observes them
    state: Switch,
    #[command(flatten)]
    endpoint: Endpoint,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Switch {
    On,
    Off,
}

pub(crate) fn status(args: &StatusArgs) -> Result<(), HostError> {
    let status = &args.endpoint.connect()?.status()?;
    let processes =
        if args.brief { Vec::new() } else { map::of_host(&Root::new(&args.root), status) };
    let text = match (args.json, processes.is_empty()) {
        (true, _) => json(&Overview { status, processes: &processes })?,
        (false, true) => overview(status),
        (false, false) => format!("{}\n\n{}", overview(status), map::page(&processes).trim_end()),
    };
    Ok(say(text)?)
}

pub(crate) fn bypass(args: &BypassArgs) -> Result<(), HostError> {
    let words = args.endpoint.connect()?.bypass(args.state == Switch::On)?;
    Ok(say(words)?)
}

pub(crate) fn enforce(args: &EnforceArgs) -> Result<(), HostError> {
    let mode = if args.state == Switch::On { "enforce" } else { "observe" };
    let words = args.endpoint.connect()?.set_mode(mode)?;
    Ok(say(format!("{words}; to keep it, set mode = \"{mode}\" in the configuration of laxityd"))?)
}

pub(crate) fn reload(endpoint: &Endpoint) -> Result<(), HostError> {
    let words = endpoint.connect()?.reload()?;
    Ok(say(words)?)
}

/// Returns an overview that fits a screen: the mode, the clients, and what waits on which port.
fn overview(status: &Status) -> String {
    let mut parts = vec![headline(status)];
    if status.clients.is_empty() {
        parts.push("No client is attached.".to_owned());
    } else {
        parts.push(clients(status));
    }
    for port in &status.ports {
        parts.push(port_lines(port));
    }
    parts.join("\n\n")
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

/// Maximum number of refused users in the headline. `--json` shows all that the daemon keeps.
const REFUSED_SHOWN_MAX: usize = 3;

pub(crate) fn headline(status: &Status) -> String {
    let totals = &status.totals;
    let state = match status.mode.as_str() {
        _ if status.bypass => "BYPASSED: nothing is scheduled until `laxity bypass off`",
        "off" => "mode off: nothing is scheduled",
        "observe" => "observe: nothing is delayed",
        mode => mode,
    };
    // Clients do not submit what they bypass, so it can't be counted.
    let bypassed = if status.bypass || status.mode == "off" {
        format!("{} bypassed before (not counted now)", bytes(totals.bypassed_bytes))
    } else {
        format!("{} bypassed", bytes(totals.bypassed_bytes))
    };
    let mut line = format!(
        "laxityd {} (pid {}), up {}, policy {}, {state}",
        status.version,
        status.pid,
        duration(status.uptime_ms),
        status.policy,
    );
    line.push_str(&format!(
        "\n{} flows, {} permitted ({} on credit), {bypassed}, {} deadlines missed, {} requests \
         pruned",
        totals.flows,
        bytes(totals.permitted_bytes),
        bytes(totals.credited_bytes),
        totals.deadline_misses,
        totals.pruned_requests,
    ));
    if let Some(cluster) = &status.cluster {
        line.push_str(&format!("\n{}", cluster_line(cluster)));
    }
    if totals.unknown_nic_flows > 0 {
        line.push_str(&format!(
            "\n{} flows named a NIC that the configuration doesn't have and went out unscheduled; \
             add its [[nic]]",
            totals.unknown_nic_flows
        ));
    }
    if totals.garbage_records > 0 {
        line.push_str(&format!(
            "\n{} records made no sense; see the daemon's log",
            totals.garbage_records
        ));
    }
    line.push_str(&older_libraries(status));
    line.push_str(&misbehaviour(status));
    for user in status.refused.iter().take(REFUSED_SHOWN_MAX) {
        line.push_str(&format!(
            "\nrefused {} of user {}, the last (pid {}) {} ago: {}",
            user.count,
            user.uid,
            user.pid,
            duration(user.last_ms),
            user.why
        ));
    }
    line
}

/// Returns a line about the clients whose library is older than the daemon, if there are any.
fn older_libraries(status: &Status) -> String {
    let older: Vec<String> = older_clients(status).collect();
    if older.is_empty() {
        return String::new();
    }
    format!(
        "\nolder library than laxityd: {}; scheduled, but restart them before the next upgrade",
        older.join(", ")
    )
}

/// Returns the name, process id and release of each client whose library is older than the daemon.
pub(crate) fn older_clients(status: &Status) -> impl Iterator<Item = String> {
    let older = status.clients.iter().filter(|client| client.library_is_older);
    older.map(|client| format!("{} (pid {}, {})", client.name, client.pid, client.library))
}

/// Returns a line for each client or owner that withholds permitted bytes from others.
fn misbehaviour(status: &Status) -> String {
    let mut lines = String::new();
    for client in &status.clients {
        let who = format!("\n{} (pid {}, uid {})", client.name, client.pid, client.uid);
        if client.owed_bytes > 0 {
            let held = match client.held {
                true => "; it gets no permits until it does",
                false => "",
            };
            let owed = bytes(client.owed_bytes);
            lines.push_str(&format!(
                "{who} is silent: it has not completed {owed} while others waited{held}"
            ));
        }
        if client.limited {
            lines.push_str(&format!(
                "{who} is limited: its flows wait, since others use the port and it has its part"
            ));
        }
        if client.distrusted {
            lines.push_str(&format!("{who} is distrusted: it goes unscheduled"));
        }
    }
    for owner in &status.distrusted {
        let cgroup = match owner.cgroup.as_str() {
            "" => String::new(),
            cgroup => format!(" in {cgroup}"),
        };
        lines.push_str(&format!(
            "\nuid {}{cgroup} is distrusted: its clients lost permitted bytes, and what attaches \
             of \
             it goes unscheduled for {}",
            owner.uid,
            duration(owner.for_ms),
        ));
    }
    lines
}

fn clients(status: &Status) -> String {
    let mut table = table(&[
        "client", "pid", "mode", "lanes", "flows", "waiting", "submitted", "permitted", "bypassed",
    ]);
    for client in &status.clients {
        table.add_row(vec![
            client.name.clone(),
            client.pid.to_string(),
            client.mode.clone(),
            client.lanes.to_string(),
            client.flows.to_string(),
            client.waiting_flows.to_string(),
            bytes(client.submitted_bytes),
            bytes(client.permitted_bytes),
            if status.bypass || client.mode == "off" {
                "not counted".to_owned()
            } else {
                bytes(client.bypassed_bytes)
            },
        ]);
    }
    align_numbers(&mut table, 3);
    let mut text = table.to_string();
    for client in &status.clients {
        if let Some(pod) = &client.pod {
            text.push_str(&format!("\n{} (pid {}) is in {pod}", client.name, client.pid));
        }
    }
    text
}

fn port_lines(port: &PortStatus) -> String {
    let mut table = table(&["level", "dscp", "waiting flows", "waiting bytes", "permitted"]);
    for level in &port.levels {
        table.add_row(vec![
            level.level.clone(),
            level.dscp.to_string(),
            level.waiting_flows.to_string(),
            bytes(level.waiting_bytes),
            bytes(level.permitted_bytes),
        ]);
    }
    align_numbers(&mut table, 1);
    let held = match port.held_flows {
        0 => String::new(),
        flows => format!(", {flows} flows ({}) held back", bytes(port.held_bytes)),
    };
    format!(
        "{} {}: {}/s{}, load {:.0} %, {} of {} in flight{held}, {} promotions, {} demotions\n\
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

/// Returns what is left of a port for scheduled traffic, and why, if that is less than all.
fn left_by_others(port: &PortStatus) -> String {
    let mut why = Vec::new();
    if port.counters_stale {
        why.push("its counters stand still".to_owned());
    }
    // Less than a hundredth is nothing to act on.
    for (taken, who) in [
        (port.foreign_bytes_per_s, "others send"),
        (port.congestion_bytes_per_s, "congestion takes"),
    ] {
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

fn duration(ms: u64) -> String {
    match ms / 1000 {
        s @ 0..=119 => format!("{s} s"),
        s @ 120..=7199 => format!("{} min", s / 60),
        s @ 7200..=172_799 => format!("{} h", s / 3600),
        s => format!("{} days", s / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use laxity_wire::ClientStatus;

    use super::*;

    #[test]
    fn the_overview_says_first_whether_anything_is_scheduled() {
        let status = Status { bypass: true, version: "1".into(), ..Status::default() };
        assert!(overview(&status).lines().next().is_some_and(|line| line.contains("BYPASSED")));
        assert!(overview(&status).contains("No client is attached."));
        let refusal = laxity_wire::RefusalStatus {
            uid: 1001,
            pid: 77,
            count: 9,
            last_ms: 1500,
            why: "user 1001 has 128 clients attached, its share".into(),
        };
        let refused = Status { refused: vec![refusal], ..Status::default() };
        let shown = overview(&refused);
        assert!(shown.contains("refused 9 of user 1001") && shown.contains("its share"));
        let off = Status { mode: "off".into(), ..Status::default() };
        assert!(overview(&off).contains("nothing is scheduled"));
    }

    #[test]
    fn a_port_says_what_others_leave_and_nothing_beside_none() {
        let mut port = PortStatus { rate_bytes_per_s: 1000 << 20, ..PortStatus::default() };
        assert_eq!(left_by_others(&port), "", "from a daemon that does not know");
        port.rate_in_force_bytes_per_s = 1000 << 20;
        assert_eq!(left_by_others(&port), "");
        port.rate_in_force_bytes_per_s = 500 << 20;
        port.foreign_bytes_per_s = 480 << 20;
        assert_eq!(left_by_others(&port), ", 500 MiB/s left (others send 480 MiB/s)");
        port.counters_stale = true;
        assert!(left_by_others(&port).contains("stand still"));
    }

    #[test]
    fn clients_with_an_older_library_are_named_and_others_are_not() {
        let client = |name: &str, library: &str, library_is_older| ClientStatus {
            name: name.into(),
            library: library.into(),
            library_is_older,
            ..ClientStatus::default()
        };
        let clients = vec![client("old", "unknown", true), client("new", "0.1.0", false)];
        let line = headline(&Status { clients, ..Status::default() });
        assert!(line.contains("older library than laxityd: old (pid 0, unknown);"), "{line}");
        assert!(!line.contains("new (pid"), "{line}");
    }

    #[test]
    fn what_is_bypassed_is_not_shown_as_nothing() {
        let client = ClientStatus { mode: "enforce".into(), ..ClientStatus::default() };
        let mut status =
            Status { mode: "enforce".into(), clients: vec![client], ..Status::default() };
        let says = |status: &Status| overview(status).contains("not counted");
        assert!(!says(&status) && overview(&status).contains("0 B bypassed"));
        status.bypass = true;
        assert!(says(&status) && !overview(&status).contains("0 B bypassed,"));
        status.bypass = false;
        // This client asked for it. The others are scheduled.
        status.clients[0].mode = "off".into();
        assert!(says(&status));
    }
}
