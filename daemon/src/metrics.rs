//! The metrics in Prometheus' text format. `docs/metrics.md` documents names, units and labels, and
//! `tests/operating.rs` compares the two.
//!
//! Each scrape shows the latest [`Snapshot`] of the scheduler.

mod clients;
mod jobs;
mod table;

use std::fmt::Write;

use laxity_policy::{Level, Span, Stage, Tally, Time};
use laxity_shm::sleep::now_ns;
use laxity_wire::ClusterStatus;

use self::table::{escaped, metrics, table};
use crate::coordinator::exchange::CoordinatorExchange;
use crate::stats::{PortSnapshot, Snapshot, StageCounters, WaitHistogram};

/// Upper edges of `laxity_wait_seconds`, in seconds: from 250 ns (a permit without waiting) to 4 s,
/// each four times the last.
const WAIT_EDGES_S: [f64; 13] =
    [250e-9, 1e-6, 4e-6, 16e-6, 64e-6, 256e-6, 1e-3, 4e-3, 16e-3, 64e-3, 256e-3, 1.0, 4.0];

/// The bucket of a [`WaitHistogram`] that ends at about the first edge, at 256 ns. Each edge is two
/// powers of two above the last.
const WAIT_EDGE_BUCKET: usize = 8;

metrics! {
    /// Metrics of each port.
    PORT: PortSnapshot {
        Gauge laxity_in_flight_bytes "Bytes permitted and not yet completed"
            |p| p.link.in_flight_bytes;
        Gauge laxity_port_load_ratio "Recent share of the rate that early stages used (rho), 0 to 1"
            |p| p.link.rho;
        Gauge laxity_port_present "1, or 0 while the host does not have the NIC"
            |p| u64::from(!p.is_absent);
        Gauge laxity_port_rate_assumed
            "1 while the rate is assumed: neither the configuration nor the kernel has it"
            |p| u64::from(p.is_rate_assumed);
        Gauge laxity_port_rate_bytes_per_second "Configured rate of the port" |p| p.rate;
        Gauge laxity_port_rate_in_force_bytes_per_second
            "Rate that is left for scheduled traffic" |p| p.rate_in_force;
        Counter laxity_foreign_bytes_total "Bytes that passed the port without a permit"
            |p| p.counters.foreign_bytes;
        Counter laxity_congestion_signals_total "CNPs, marked packets and PFC pauses"
            |p| p.counters.signals;
        Gauge laxity_held_bytes
            "Bytes of held flows"
            |p| p.link.held.bytes;
        Gauge laxity_held_flows "Flows that are held, because their client owes bytes"
            |p| p.link.held.flows;
        Counter laxity_promotions_total "Times a waiting flow rose by a level"
            |p| p.counters.promotions;
        Counter laxity_demotions_total "Times a waiting flow fell into the scavenger"
            |p| p.counters.demotions;
    }
}

metrics! {
    /// Metrics of each port and level.
    WAITING_BY_LEVEL: Tally {
        Gauge laxity_queued_level_bytes "Bytes submitted and not yet permitted, by level"
            |t| t.bytes;
        Gauge laxity_queued_level_flows "Flows with bytes not yet permitted, by level" |t| t.flows;
    }
}

metrics! {
    /// Waiting flows of each port and stage.
    WAITING_BY_STAGE: Tally {
        Gauge laxity_queued_bytes "Bytes submitted and not yet permitted, by stage" |t| t.bytes;
        Gauge laxity_queued_flows "Flows with bytes not yet permitted, by stage" |t| t.flows;
    }
}

metrics! {
    /// Counters of each port and stage.
    STAGE: StageCounters {
        Counter laxity_flows_total "Flows submitted" |s| s.submitted_flows;
        Counter laxity_submitted_bytes_total "Bytes submitted" |s| s.submitted_bytes;
        Counter laxity_credited_bytes_total "Bytes sent on credit or only observed"
            |s| s.credited_bytes;
        Counter laxity_completed_flows_total "Flows that completed all their bytes"
            |s| s.completed_flows;
        Counter laxity_completed_bytes_total "Bytes reported as completed" |s| s.completed_bytes;
        Counter laxity_deadline_misses_total "Flows completed after their deadline"
            |s| s.deadline_misses;
    }
}

/// Permits of one stage at one level.
struct Permits {
    count: u64,
    bytes: u64,
}

metrics! {
    /// Permits of each port, stage and level.
    PERMITS: Permits {
        Counter laxity_permits_total "Permits given, credit included" |p| p.count;
        Counter laxity_permitted_bytes_total "Bytes permitted, credit included" |p| p.bytes;
    }
}

metrics! {
    /// The release, by its label.
    BUILD: u64 {
        Gauge laxity_build_info "1, with the release of the daemon" |one| *one;
    }
}

metrics! {
    /// Metrics of what the scheduler thread does not see.
    OUTSIDE: Outside {
        Gauge laxity_start_time_seconds "Unix time at which the daemon began to serve"
            |o| o.began_s;
        Counter laxity_refused_clients_total "Registrations refused" |o| o.refused;
        Gauge laxity_cluster_connected "Whether there is a stream to the coordinator"
            |o| u64::from(o.cluster.connected);
        Gauge laxity_cluster_order_in_force
            "Whether the links have the coordinator's order, not the daemon's own"
            |o| u64::from(o.in_force);
        Gauge laxity_cluster_order_age_seconds
            "Time since the coordinator's order was last confirmed"
            |o| o.age.map_or(0.0, |age| age.0 as f64 / 1e9);
        Gauge laxity_cluster_order_term "Term of the coordinator's newest order"
            |o| o.cluster.term.unwrap_or_default();
        Gauge laxity_cluster_order_sequence "Sequence of the coordinator's newest order"
            |o| o.cluster.sequence.unwrap_or_default();
        Counter laxity_cluster_orders_total "Orders of the coordinator that were applied"
            |o| o.cluster.orders;
        Counter laxity_cluster_stale_orders_total "Orders refused because a newer one was seen"
            |o| o.cluster.stale_orders;
        Counter laxity_cluster_broken_orders_total
            "Orders dropped because a part was missing or invalid" |o| o.cluster.broken_orders;
        Counter laxity_cluster_connects_total "Streams that a coordinator welcomed"
            |o| o.cluster.connects;
        Counter laxity_cluster_failures_total
            "Attempts to reach a coordinator that failed, and streams that ended"
            |o| o.cluster.failures;
        Counter laxity_cluster_reports_total "Reports sent to the coordinator"
            |o| o.cluster.reports;
        Counter laxity_cluster_refused_events_total "Reported events that the coordinator refused"
            |o| o.cluster.refused_events;
    }
}

metrics! {
    /// Metrics of the whole daemon.
    DAEMON: Snapshot {
        Gauge laxity_pruned_requests "Requests that are pruned"
            |s| s.scheduler.pruned_requests;
        Counter laxity_orders_total "Orders between batches that admission issued"
            |s| s.scheduler.orders;
        Counter laxity_cluster_fetches_total
            "Fetches from other hosts that name batch and peer, as the coordinator needs"
            |s| s.fetches;
        Gauge laxity_attached_clients "Processes attached" |s| s.clients.len();
        Counter laxity_attachments_total "Processes that have attached so far"
            |s| s.scheduler.attachments;
        Counter laxity_cancelled_flows_total
            "Flows withdrawn, ended with their client, or written off"
            |s| s.all_clients.cancelled_flows;
        Counter laxity_overflowed_flows_total
            "Unscheduled flows: beyond a client's limit, or of one that is off or distrusted"
            |s| s.all_clients.overflowed_flows;
        Counter laxity_written_off_bytes_total "Permitted bytes not completed in time"
            |s| s.all_clients.written_off_bytes;
        Counter laxity_set_aside_bytes_total
            "Permitted bytes that a client did not complete while others waited"
            |s| s.all_clients.set_aside_bytes;
        Gauge laxity_owed_bytes "Owed bytes that are not completed yet, over all clients"
            |s| s.clients.iter().map(|c| c.owed_bytes).sum::<u64>();
        Gauge laxity_distrusted_owners
            "Owners whose new clients go unscheduled, because their clients lost permitted bytes"
            |s| s.distrusted.len();
        Counter laxity_bypassed_bytes_total "Bytes known to have gone out unscheduled"
            |s| s.all_clients.bypassed_bytes;
        Counter laxity_withdrawn_bytes_total "Bytes of cancelled flows that had no permit"
            |s| s.all_clients.withdrawn_bytes;
        Counter laxity_unknown_nic_flows_total
            "Flows of NICs that the daemon does not have, permitted unscheduled"
            |s| s.all_clients.unknown_nic_flows;
        Counter laxity_garbage_records_total "Garbage records of clients"
            |s| s.all_clients.garbage_records;
        Gauge laxity_quarantined_lanes "Lanes no longer read because of garbage records"
            |s| s.clients.iter().map(|c| u64::from(c.quarantined_lanes)).sum::<u64>();
        Gauge laxity_bypass "1 while the bypass is on" |s| u64::from(s.bypass);
        Gauge laxity_unlike_levels
            "Levels whose DSCP the NICs treat unlike that of the highest level"
            |s| s.unlike_levels;
        Gauge laxity_ring_depth "Most records found in one lane at once, since the last snapshot"
            |s| s.scheduler.ring_depth;
        Counter laxity_scheduler_rounds_total "Rounds of the scheduler over the lanes"
            |s| s.scheduler.status.rounds;
        Counter laxity_scheduler_records_total "Records consumed" |s| s.scheduler.status.records;
        Counter laxity_scheduler_sleeps_total "Times the scheduler slept"
            |s| s.scheduler.status.sleeps;
        Counter laxity_scheduler_client_wakes_total "Sleeping clients woken"
            |s| s.scheduler.status.client_wakes;
    }
}

/// What the scheduler thread does not see. Without a coordinator, the values of the stream to it
/// are zero.
struct Outside {
    /// When the daemon began to serve, which for one in standby is the end of its wait.
    began_s: f64,
    refused: u64,
    cluster: ClusterStatus,
    in_force: bool,
    age: Option<Span>,
}

/// Returns the metrics of a daemon that began to serve at the Unix time `began_s` and refused
/// `refused` registrations. Before the first snapshot, those of the scheduler are missing.
pub fn text(
    began_s: f64,
    snapshot: Option<&Snapshot>,
    refused: u64,
    exchange: Option<&CoordinatorExchange>,
) -> String {
    let (in_force, age) =
        exchange.map_or((false, None), |exchange| exchange.in_force(Time(now_ns())));
    let cluster = exchange.map(CoordinatorExchange::view).unwrap_or_default();
    let outside = Outside { began_s, refused, cluster, in_force, age };
    let release = format!("version=\"{}\"", env!("CARGO_PKG_VERSION"));
    let mut text = table(BUILD, &[(release, 1)]) + &table(OUTSIDE, &[(String::new(), outside)]);
    if let Some(snapshot) = snapshot {
        text += &ports(&snapshot.ports);
        text += &table(DAEMON, &[(String::new(), snapshot)]);
        text += &clients::rendered(&snapshot.clients);
        text += &jobs::rendered(&snapshot.jobs, &snapshot.clients);
    }
    text
}

fn ports(ports: &[PortSnapshot]) -> String {
    let (mut each, mut stages, mut waits) = (Vec::new(), Vec::new(), Vec::new());
    let (mut by_level, mut by_stage, mut permits) = (Vec::new(), Vec::new(), Vec::new());
    for port in ports {
        let at = format!("nic=\"{}\",direction=\"{}\"", escaped(&port.name), port.direction);
        for row in rows(port.levels) {
            let labels = format!("{at},level=\"{}\"", level_name(row));
            by_level.push((labels, &port.link.waiting_by_level[row]));
        }
        for stage in Stage::ALL {
            let at = format!("{at},stage=\"{}\"", stage.name());
            let counted = &port.counters.stages[stage.index()];
            for row in rows(port.levels) {
                let (count, bytes) = (counted.permits[row], counted.permitted_bytes[row]);
                let labels = format!("{at},level=\"{}\"", level_name(row));
                permits.push((labels, Permits { count, bytes }));
            }
            by_stage.push((at.clone(), &port.link.waiting_by_stage[stage.index()]));
            waits.push((at.clone(), &counted.wait));
            stages.push((at, counted));
        }
        each.push((at, port));
    }
    let tables = table(PORT, &each) + &table(WAITING_BY_LEVEL, &by_level);
    let tables = tables + &table(WAITING_BY_STAGE, &by_stage) + &table(STAGE, &stages);
    tables + &table(PERMITS, &permits) + &wait_seconds(&waits)
}

/// Returns the lines of the only histogram.
fn wait_seconds(rows: &[(String, &WaitHistogram)]) -> String {
    let name = "laxity_wait_seconds";
    let mut text =
        format!("# HELP {name} Time from submit to first permit\n# TYPE {name} histogram\n");
    for (labels, waits) in rows {
        let count = waits.count();
        for (index, edge) in WAIT_EDGES_S.iter().enumerate() {
            let below: u64 = waits.counts[..=WAIT_EDGE_BUCKET + 2 * index].iter().sum();
            let _ = writeln!(text, "{name}_bucket{{{labels},le=\"{edge}\"}} {below}");
        }
        let sum_s = waits.sums_ns.iter().sum::<u64>() as f64 / 1e9;
        let _ = writeln!(text, "{name}_bucket{{{labels},le=\"+Inf\"}} {count}");
        let _ = writeln!(text, "{name}_sum{{{labels}}} {sum_s}\n{name}_count{{{labels}}} {count}");
    }
    text.push('\n');
    text
}

/// Returns the level rows that a port with `levels` levels uses.
pub(crate) fn rows(levels: u8) -> impl Iterator<Item = usize> {
    (0..usize::from(levels)).chain([Level::ROWS - 1])
}

/// Returns the name of the level of `row`.
pub(crate) fn level_name(row: usize) -> String {
    if row == Level::ROWS - 1 {
        Level::SCAVENGER.to_string()
    } else {
        Level(row as u8 + 1).to_string()
    }
}

#[cfg(test)]
mod tests {
    use laxity_policy::residual::Capacity;
    use laxity_policy::{DomainId, Event, FlowId, FlowSpec, Order, RequestId};

    use super::*;
    use crate::config::{Config, NicConfig};
    use crate::driver::ports::{DriverPort, configure};
    use crate::stats::PortResidual;

    const NOW: Time = Time(1_000_000_000);

    /// Puts a waiting flow of a port into the scavenger, as one more pruned request.
    fn demote(port: &mut DriverPort, request: u64) {
        let spec = |id, bytes| FlowSpec::anonymous(FlowId(id), Stage::P2d, bytes);
        let own = DomainId::default();
        let waits = FlowSpec { request: RequestId(request), ..spec(2 * request, 1 << 30) };
        for spec in [spec(2 * request + 1, 1 << 30), waits] {
            port.link.handle(NOW, own, Event::FlowArrived(spec));
            while port.link.poll_action(NOW).is_some() {}
        }
        let pruned = vec![RequestId(request)];
        let order = Order { epoch: request, sigma: Vec::new(), pruned };
        port.link.handle(NOW, own, Event::OrderChanged(order));
        while port.link.poll_action(NOW).is_some() {}
    }

    fn told(foreign_bytes: u64) -> Option<PortResidual> {
        let capacity =
            Capacity { foreign_bytes, signals: foreign_bytes / 10, ..Capacity::default() };
        Some(PortResidual { source: "test", capacity })
    }

    #[test]
    fn what_grew_under_default_stays_its_own_when_the_nic_gets_its_own_name() {
        let shown = |all: &mut Vec<DriverPort>, nic: &str| {
            let snapshots: Vec<_> = all.iter_mut().map(|port| port.snapshot(NOW)).collect();
            let text = ports(&snapshots);
            ["demotions", "foreign_bytes", "congestion_signals"].map(|name| {
                let labels = format!("laxity_{name}_total{{nic=\"{nic}\",direction=\"egress\"}} ");
                let line = text.lines().find_map(|line| line.strip_prefix(&labels));
                line.expect("the metric").parse::<u64>().expect("a number")
            })
        };
        let mut config = Config::default();
        let mut ports = Vec::new();
        configure(&mut ports, NOW, &config).expect("valid");
        demote(&mut ports[0], 1);
        ports[0].residual = told(100);
        assert_eq!(shown(&mut ports, "default"), [1, 100, 10]);
        demote(&mut ports[0], 2);
        ports[0].residual = told(200);

        let named = NicConfig { name: "mlx5_0".to_owned(), ..config.nic[0].clone() };
        config.nic.insert(0, named);
        configure(&mut ports, NOW, &config).expect("valid");
        assert_eq!(ports[0].name(), "mlx5_0");
        assert_eq!(shown(&mut ports, "default"), [2, 200, 20], "nothing is lost");
        assert_eq!(shown(&mut ports, "mlx5_0"), [0, 0, 0], "nothing counts twice");
        // The thread that reads counters may have told of `default` just before it began anew.
        ports[0].residual = told(210);
        shown(&mut ports, "mlx5_0");
        for foreign_bytes in [0, 30] {
            (ports[0].residual, ports[2].residual) = (told(foreign_bytes), told(2 * foreign_bytes));
            shown(&mut ports, "mlx5_0");
        }
        demote(&mut ports[0], 3);
        demote(&mut ports[2], 4);
        demote(&mut ports[2], 5);
        assert_eq!(shown(&mut ports, "mlx5_0"), [1, 40, 4]);
        assert_eq!(shown(&mut ports, "default"), [4, 260, 26]);
    }

    #[test]
    fn a_wait_counts_from_the_edge_above_it_on() {
        let mut waits = WaitHistogram::default();
        for wait in [0, 255, 256, 1_000_000, 5_000_000_000, u64::MAX >> 20] {
            waits.record(Span(wait));
        }
        let text = wait_seconds(&[("of=\"it\"".to_owned(), &waits)]);
        let value = |edge: &str| {
            let start = format!("laxity_wait_seconds_bucket{{of=\"it\",le=\"{edge}\"}} ");
            text.lines().find_map(|line| line.strip_prefix(&start)).expect("the edge").to_owned()
        };
        let edges = ["0.00000025", "0.000001", "0.000256", "0.001", "1", "4", "+Inf"];
        assert_eq!(edges.map(value), ["2", "3", "3", "4", "4", "4", "6"]);
        assert!(text.contains("laxity_wait_seconds_count{of=\"it\"} 6\n"), "{text}");
    }
}
