//! The Prometheus endpoint. Names, units and labels are documented in `docs/metrics.md`, and a
//! test holds the two together.
//!
//! Each [`Snapshot`] of the scheduler is turned into absolute values. Waits are handed to the
//! exporter sample by sample, which is what its interface takes, so they are thinned above
//! [`WAITS_PER_SNAPSHOT_MAX`] flows per snapshot: the shape of the distribution stays right, and
//! the exact number of flows is `laxity_flows_total`.

use std::collections::BTreeMap;
use std::time::Duration;

use laxity_listen::http::{Limits, Listener, rendered};
use laxity_policy::{Level, Stage, Time};
use laxity_shm::sleep::now_ns;
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Label, Metadata, Recorder, Unit};
use metrics_exporter_prometheus::{
    BuildError, Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};

use crate::coordinator::exchange::CoordinatorExchange;
use crate::stats::{Snapshot, WAIT_BUCKETS, WaitHistogram};

/// Wait samples handed to the exporter per snapshot, over all ports and stages.
const WAITS_PER_SNAPSHOT_MAX: u64 = 20_000;

/// Upper edges of `laxity_wait_seconds`: 250 ns (a permit without waiting) to 4 s, by fours.
const WAIT_EDGES_S: [f64; 13] = [
    250e-9, 1e-6, 4e-6, 16e-6, 64e-6, 256e-6, 1e-3, 4e-3, 16e-3, 64e-3, 256e-3, 1.0, 4.0,
];

/// Every metric with its kind, unit and meaning. The labels are in `docs/metrics.md`.
pub const METRICS: &[(&str, Kind, &str)] = &[
    (
        "laxity_queued_bytes",
        Kind::Gauge,
        "Bytes submitted and not yet permitted, by stage",
    ),
    (
        "laxity_queued_flows",
        Kind::Gauge,
        "Flows with bytes not yet permitted, by stage",
    ),
    (
        "laxity_held_bytes",
        Kind::Gauge,
        "Bytes of flows that are held back because others that read from the same host come first",
    ),
    ("laxity_held_flows", Kind::Gauge, "Flows that are held back"),
    (
        "laxity_queued_level_bytes",
        Kind::Gauge,
        "Bytes submitted and not yet permitted, by level",
    ),
    (
        "laxity_queued_level_flows",
        Kind::Gauge,
        "Flows with bytes not yet permitted, by level",
    ),
    (
        "laxity_in_flight_bytes",
        Kind::Gauge,
        "Bytes permitted and not yet completed",
    ),
    (
        "laxity_port_rate_bytes_per_second",
        Kind::Gauge,
        "Configured rate of the port",
    ),
    (
        "laxity_port_load_ratio",
        Kind::Gauge,
        "Load that precedes the lowest level (rho), 0 to 1",
    ),
    ("laxity_flows_total", Kind::Counter, "Flows submitted"),
    (
        "laxity_submitted_bytes_total",
        Kind::Counter,
        "Bytes submitted",
    ),
    (
        "laxity_credited_bytes_total",
        Kind::Counter,
        "Bytes sent on credit or only observed",
    ),
    (
        "laxity_permits_total",
        Kind::Counter,
        "Permits given, credit included",
    ),
    (
        "laxity_permitted_bytes_total",
        Kind::Counter,
        "Bytes permitted, credit included",
    ),
    (
        "laxity_completed_flows_total",
        Kind::Counter,
        "Flows that completed all their bytes",
    ),
    (
        "laxity_completed_bytes_total",
        Kind::Counter,
        "Bytes reported as completed",
    ),
    (
        "laxity_deadline_misses_total",
        Kind::Counter,
        "Flows completed after their deadline",
    ),
    (
        "laxity_promotions_total",
        Kind::Counter,
        "Times a waiting flow climbed a level",
    ),
    (
        "laxity_demotions_total",
        Kind::Counter,
        "Times a waiting flow fell into the scavenger",
    ),
    (
        "laxity_wait_seconds",
        Kind::Histogram,
        "Time from submit to first permit",
    ),
    (
        "laxity_pruned_requests",
        Kind::Gauge,
        "Requests that admission holds for infeasible",
    ),
    (
        "laxity_orders_total",
        Kind::Counter,
        "Orders between batches that admission issued",
    ),
    (
        "laxity_cluster_connected",
        Kind::Gauge,
        "Whether there is a stream to the coordinator",
    ),
    (
        "laxity_cluster_order_in_force",
        Kind::Gauge,
        "Whether the links have the coordinator's order, not the daemon's own",
    ),
    (
        "laxity_cluster_order_age_seconds",
        Kind::Gauge,
        "Time since the coordinator's order was last confirmed",
    ),
    (
        "laxity_cluster_order_term",
        Kind::Gauge,
        "Term of the coordinator's newest order",
    ),
    (
        "laxity_cluster_order_sequence",
        Kind::Gauge,
        "Sequence of the coordinator's newest order",
    ),
    (
        "laxity_cluster_orders_total",
        Kind::Counter,
        "Orders of the coordinator that were applied",
    ),
    (
        "laxity_cluster_stale_orders_total",
        Kind::Counter,
        "Orders refused because they were overtaken",
    ),
    (
        "laxity_cluster_broken_orders_total",
        Kind::Counter,
        "Orders dropped because a part was missing or made no sense",
    ),
    (
        "laxity_cluster_connects_total",
        Kind::Counter,
        "Streams that a coordinator welcomed",
    ),
    (
        "laxity_cluster_failures_total",
        Kind::Counter,
        "Attempts to reach a coordinator that failed, and streams that ended",
    ),
    (
        "laxity_cluster_reports_total",
        Kind::Counter,
        "Reports sent to the coordinator",
    ),
    (
        "laxity_cluster_refused_events_total",
        Kind::Counter,
        "Reported events that the coordinator refused",
    ),
    (
        "laxity_cluster_fetches_total",
        Kind::Counter,
        "Fetches from other hosts that the coordinator could order",
    ),
    (
        "laxity_cluster_fetches_held_total",
        Kind::Counter,
        "Times that the coordinator had a fetch wait",
    ),
    (
        "laxity_cluster_fetches_ahead_total",
        Kind::Counter,
        "Fetches that waited for as long as they may, and went ahead",
    ),
    ("laxity_attached_clients", Kind::Gauge, "Processes attached"),
    (
        "laxity_attachments_total",
        Kind::Counter,
        "Processes that have attached so far",
    ),
    (
        "laxity_refused_clients_total",
        Kind::Counter,
        "Registrations refused",
    ),
    (
        "laxity_cancelled_flows_total",
        Kind::Counter,
        "Flows cancelled, by death of a client too",
    ),
    (
        "laxity_overflowed_flows_total",
        Kind::Counter,
        "Flows beyond a client's limit, permitted unscheduled",
    ),
    (
        "laxity_written_off_bytes_total",
        Kind::Counter,
        "Permitted bytes whose completion never came",
    ),
    (
        "laxity_set_aside_bytes_total",
        Kind::Counter,
        "Permitted bytes that a client did not complete while others waited",
    ),
    (
        "laxity_owed_bytes",
        Kind::Gauge,
        "Such bytes that are not completed yet, over all clients",
    ),
    (
        "laxity_distrusted_owners",
        Kind::Gauge,
        "Owners whose new clients go unscheduled, because others lost permitted bytes",
    ),
    (
        "laxity_bypassed_bytes_total",
        Kind::Counter,
        "Bytes known to have gone out unscheduled",
    ),
    (
        "laxity_unknown_nic_flows_total",
        Kind::Counter,
        "Flows of NICs that the configuration does not have, permitted unscheduled",
    ),
    (
        "laxity_garbage_records_total",
        Kind::Counter,
        "Records of clients that made no sense",
    ),
    (
        "laxity_quarantined_lanes",
        Kind::Gauge,
        "Lanes no longer read because of such records",
    ),
    (
        "laxity_bypass",
        Kind::Gauge,
        "1 while an operator has everything bypassed",
    ),
    (
        "laxity_ring_depth",
        Kind::Gauge,
        "Most records found in one lane at once, since the last snapshot",
    ),
    (
        "laxity_scheduler_rounds_total",
        Kind::Counter,
        "Rounds of the scheduler over the lanes",
    ),
    (
        "laxity_scheduler_records_total",
        Kind::Counter,
        "Records consumed",
    ),
    (
        "laxity_scheduler_sleeps_total",
        Kind::Counter,
        "Times the scheduler slept",
    ),
    (
        "laxity_scheduler_client_wakes_total",
        Kind::Counter,
        "Sleeping clients woken",
    ),
];

/// Kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// A distribution.
    Histogram,
}

static METADATA: Metadata<'static> =
    Metadata::new("laxity", metrics::Level::INFO, Some(module_path!()));

/// The recorder behind the endpoint and the handles made so far. Not global: a process may run
/// several daemons (tests do).
pub struct Exporter {
    recorder: PrometheusRecorder,
    counters: BTreeMap<Key, Counter>,
    gauges: BTreeMap<Key, Gauge>,
    waits: BTreeMap<Key, (Histogram, WaitHistogram)>,
}

impl std::fmt::Debug for Exporter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exporter")
            .field("counters", &self.counters.len())
            .finish_non_exhaustive()
    }
}

/// Samples of waits are assembled up this often, whether or not somebody asks for them.
const UPKEEP_EVERY: Duration = Duration::from_secs(5);

async fn keep_up(handle: PrometheusHandle) {
    let mut ticks = tokio::time::interval(UPKEEP_EVERY);
    loop {
        ticks.tick().await;
        handle.run_upkeep();
    }
}

impl Exporter {
    /// An exporter that knows every metric, and has no values.
    ///
    /// # Errors
    /// The buckets of a histogram make no sense.
    pub fn new() -> Result<Self, BuildError> {
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Full("laxity_wait_seconds".into()), &WAIT_EDGES_S)?
            .build_recorder();
        for &(name, kind, text) in METRICS {
            let name = KeyName::from_const_str(name);
            let none: Option<Unit> = None;
            match kind {
                Kind::Counter => recorder.describe_counter(name, none, text.into()),
                Kind::Gauge => recorder.describe_gauge(name, none, text.into()),
                Kind::Histogram => recorder.describe_histogram(name, none, text.into()),
            }
        }
        Ok(Self {
            recorder,
            counters: BTreeMap::new(),
            gauges: BTreeMap::new(),
            waits: BTreeMap::new(),
        })
    }

    /// A future that serves what is published at `listener`, for as long as it is polled.
    pub fn serve(&self, listener: Listener) -> impl Future<Output = ()> + Send + 'static {
        let handle = self.recorder.handle();
        let render = handle.clone();
        let answer = rendered(move || render.render());
        async move {
            tokio::select! {
                () = listener.serve("the metrics endpoint", Limits::METRICS, answer) => {}
                () = keep_up(handle) => {}
            }
        }
    }

    /// Makes the endpoint show how many registrations were refused. The scheduler never hears of
    /// them, so they may come without any snapshot.
    pub fn publish_refusals(&mut self, refused: u64) {
        self.counter("laxity_refused_clients_total", Vec::new(), refused);
    }

    /// Makes the endpoint show what the stream to the coordinator does; zeros without one.
    pub fn publish_cluster(&mut self, exchange: Option<&CoordinatorExchange>) {
        let view = exchange.map(CoordinatorExchange::view).unwrap_or_default();
        let now = Time(now_ns());
        let (in_force, age) = exchange.map_or((false, None), |exchange| exchange.in_force(now));
        let epoch = view.epoch.unwrap_or_default();
        for (name, value) in [
            (
                "laxity_cluster_connected",
                f64::from(u8::from(view.connected)),
            ),
            (
                "laxity_cluster_order_in_force",
                f64::from(u8::from(in_force)),
            ),
            (
                "laxity_cluster_order_age_seconds",
                age.map_or(0.0, |age| age.0 as f64 / 1e9),
            ),
            ("laxity_cluster_order_term", epoch.term as f64),
            ("laxity_cluster_order_sequence", epoch.sequence as f64),
        ] {
            self.gauge(name, Vec::new(), value);
        }
        for (name, value) in [
            ("laxity_cluster_orders_total", view.orders),
            ("laxity_cluster_stale_orders_total", view.stale_orders),
            ("laxity_cluster_broken_orders_total", view.broken_orders),
            ("laxity_cluster_connects_total", view.connects),
            ("laxity_cluster_failures_total", view.failures),
            ("laxity_cluster_reports_total", view.reports),
            ("laxity_cluster_refused_events_total", view.refused_events),
        ] {
            self.counter(name, Vec::new(), value);
        }
    }

    /// Makes the endpoint show `snapshot`; `refused` counts the registrations that were refused.
    pub fn publish(&mut self, snapshot: &Snapshot, refused: u64) {
        self.publish_refusals(refused);
        for port in &snapshot.ports {
            let at = [
                Label::new("nic", port.name.to_string()),
                Label::from_static_parts("direction", port.direction),
            ];
            self.publish_port(port, &at);
        }
        self.publish_waits(snapshot);
        let all = &snapshot.all_clients;
        let scheduler = &snapshot.scheduler;
        for (name, value) in [
            ("laxity_orders_total", scheduler.orders),
            ("laxity_cluster_fetches_total", snapshot.fetches.fetches),
            ("laxity_cluster_fetches_held_total", snapshot.fetches.held),
            ("laxity_cluster_fetches_ahead_total", snapshot.fetches.ahead),
            ("laxity_attachments_total", scheduler.attachments),
            ("laxity_cancelled_flows_total", all.cancelled_flows),
            ("laxity_overflowed_flows_total", all.overflowed_flows),
            ("laxity_written_off_bytes_total", all.written_off_bytes),
            ("laxity_set_aside_bytes_total", all.set_aside_bytes),
            ("laxity_bypassed_bytes_total", all.bypassed_bytes),
            ("laxity_unknown_nic_flows_total", all.unknown_nic_flows),
            ("laxity_garbage_records_total", all.garbage_records),
            ("laxity_scheduler_rounds_total", scheduler.rounds),
            ("laxity_scheduler_records_total", scheduler.records),
            ("laxity_scheduler_sleeps_total", scheduler.sleeps),
            (
                "laxity_scheduler_client_wakes_total",
                scheduler.client_wakes,
            ),
        ] {
            self.counter(name, Vec::new(), value);
        }
        let quarantined: u32 = snapshot.clients.iter().map(|c| c.quarantined_lanes).sum();
        for (name, value) in [
            ("laxity_pruned_requests", scheduler.pruned_requests),
            ("laxity_attached_clients", snapshot.clients.len() as u64),
            ("laxity_quarantined_lanes", u64::from(quarantined)),
            ("laxity_bypass", u64::from(snapshot.bypass)),
            (
                "laxity_owed_bytes",
                snapshot.clients.iter().map(|c| c.owed_bytes).sum(),
            ),
            ("laxity_distrusted_owners", snapshot.distrusted.len() as u64),
            ("laxity_ring_depth", scheduler.ring_depth),
        ] {
            self.gauge(name, Vec::new(), value as f64);
        }
    }

    fn publish_port(&mut self, port: &crate::stats::PortSnapshot, at: &[Label; 2]) {
        let link = &port.link;
        self.gauge(
            "laxity_in_flight_bytes",
            at.to_vec(),
            link.in_flight_bytes as f64,
        );
        self.gauge("laxity_port_load_ratio", at.to_vec(), link.rho);
        self.gauge("laxity_held_bytes", at.to_vec(), link.held.bytes as f64);
        self.gauge("laxity_held_flows", at.to_vec(), link.held.flows as f64);
        self.gauge(
            "laxity_port_rate_bytes_per_second",
            at.to_vec(),
            port.rate as f64,
        );
        self.counter("laxity_promotions_total", at.to_vec(), link.promotions);
        self.counter("laxity_demotions_total", at.to_vec(), link.demotions);

        for row in rows(port.levels) {
            let labels = with(at, "level", level_name(row));
            let waiting = link.waiting_by_level[row];
            self.gauge(
                "laxity_queued_level_bytes",
                labels.clone(),
                waiting.bytes as f64,
            );
            self.gauge("laxity_queued_level_flows", labels, waiting.flows as f64);
        }
        for stage in Stage::ALL {
            let labels = with(at, "stage", stage.name().to_owned());
            let waiting = link.waiting_by_stage[stage.index()];
            self.gauge("laxity_queued_bytes", labels.clone(), waiting.bytes as f64);
            self.gauge("laxity_queued_flows", labels.clone(), waiting.flows as f64);
            let counted = &port.counters.stages[stage.index()];
            for (name, value) in [
                ("laxity_flows_total", counted.submitted_flows),
                ("laxity_submitted_bytes_total", counted.submitted_bytes),
                ("laxity_credited_bytes_total", counted.credited_bytes),
                ("laxity_completed_flows_total", counted.completed_flows),
                ("laxity_completed_bytes_total", counted.completed_bytes),
                ("laxity_deadline_misses_total", counted.deadline_misses),
            ] {
                self.counter(name, labels.clone(), value);
            }
            for row in rows(port.levels) {
                let mut labels = labels.clone();
                labels.push(Label::new("level", level_name(row)));
                self.counter("laxity_permits_total", labels.clone(), counted.permits[row]);
                self.counter(
                    "laxity_permitted_bytes_total",
                    labels,
                    counted.permitted_bytes[row],
                );
            }
        }
    }

    /// Hands the waits since the last snapshot to the exporter, each with its bucket's mean.
    fn publish_waits(&mut self, snapshot: &Snapshot) {
        let mut new = 0;
        for pass in 0..2 {
            let mut fresh = 0;
            for port in &snapshot.ports {
                for stage in Stage::ALL {
                    let labels = vec![
                        Label::new("nic", port.name.to_string()),
                        Label::from_static_parts("direction", port.direction),
                        Label::from_static_parts("stage", stage.name()),
                    ];
                    let key = Key::from_parts("laxity_wait_seconds", labels);
                    let recorder = &self.recorder;
                    let (histogram, seen) = self.waits.entry(key.clone()).or_insert_with(|| {
                        (
                            recorder.register_histogram(&key, &METADATA),
                            WaitHistogram::default(),
                        )
                    });
                    let now = &port.counters.stages[stage.index()].wait;
                    if pass == 0 {
                        fresh += now.count() - seen.count();
                        continue;
                    }
                    for bucket in 0..WAIT_BUCKETS {
                        let count = now.counts[bucket] - seen.counts[bucket];
                        if count > 0 {
                            let sum = now.sums_ns[bucket] - seen.sums_ns[bucket];
                            let mean_s = sum as f64 / count as f64 / 1e9;
                            let kept = thinned(count, new);
                            histogram.record_many(mean_s, kept as usize);
                        }
                    }
                    *seen = now.clone();
                }
            }
            if pass == 0 {
                new = fresh;
            }
        }
    }

    fn counter(&mut self, name: &'static str, labels: Vec<Label>, value: u64) {
        let key = Key::from_parts(name, labels);
        let recorder = &self.recorder;
        self.counters
            .entry(key.clone())
            .or_insert_with(|| recorder.register_counter(&key, &METADATA))
            .absolute(value);
    }

    fn gauge(&mut self, name: &'static str, labels: Vec<Label>, value: f64) {
        let key = Key::from_parts(name, labels);
        let recorder = &self.recorder;
        self.gauges
            .entry(key.clone())
            .or_insert_with(|| recorder.register_gauge(&key, &METADATA))
            .set(value);
    }
}

/// How many of `count` samples are kept when there are `total` in this snapshot; never none.
fn thinned(count: u64, total: u64) -> u64 {
    if total <= WAITS_PER_SNAPSHOT_MAX {
        return count;
    }
    (u128::from(count) * u128::from(WAITS_PER_SNAPSHOT_MAX)).div_ceil(u128::from(total)) as u64
}

/// Rows of tables by level that a port with `levels` levels uses.
pub(crate) fn rows(levels: u8) -> impl Iterator<Item = usize> {
    (0..usize::from(levels)).chain([Level::ROWS - 1])
}

/// Name of the level of `row`.
pub(crate) fn level_name(row: usize) -> String {
    if row == Level::ROWS - 1 {
        Level::SCAVENGER.to_string()
    } else {
        Level(row as u8 + 1).to_string()
    }
}

fn with(at: &[Label; 2], name: &'static str, value: String) -> Vec<Label> {
    let mut labels = at.to_vec();
    labels.push(Label::new(name, value));
    labels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_documented_and_every_documented_metric_exists() {
        let page = include_str!("../../docs/metrics.md");
        let documented: Vec<&str> = page
            .lines()
            .filter_map(|line| line.strip_prefix("| `laxity_"))
            .filter_map(|rest| rest.split_once('`'))
            .map(|(name, _)| name)
            .collect();
        for (name, ..) in METRICS {
            let bare = name.trim_start_matches("laxity_");
            assert!(
                documented.contains(&bare),
                "{name} is not in docs/metrics.md"
            );
        }
        assert_eq!(
            documented.len(),
            METRICS.len(),
            "docs/metrics.md lists what does not exist"
        );
    }

    #[test]
    fn waits_are_thinned_only_above_the_limit_and_never_to_nothing() {
        assert_eq!(thinned(5, 100), 5);
        assert_eq!(thinned(1, 1_000_000_000), 1);
        let half = 2 * WAITS_PER_SNAPSHOT_MAX;
        assert_eq!(thinned(half / 2, half), half / 4);
    }
}
