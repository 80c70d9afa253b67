//! The Prometheus endpoint. `docs/metrics.md` documents names, units and labels, and
//! `tests/operating.rs` compares the two.
//!
//! Each [`Snapshot`] of the scheduler gives absolute values. The exporter takes waits sample by
//! sample. So above [`WAITS_PER_SNAPSHOT_MAX`] flows per snapshot, only a part of the waits is
//! exported. The shape of the distribution stays right, and `laxity_flows_total` has the exact
//! number.

mod clients;
mod jobs;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use laxity_listen::http::{HttpLimits, HttpListener, rendered};
use laxity_policy::{Level, Span, Stage, Tally, Time};
use laxity_shm::sleep::now_ns;
use laxity_wire::ClusterStatus;
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Label, Metadata, Recorder};
use metrics_exporter_prometheus::{
    BuildError, Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use parking_lot::Mutex;

use crate::coordinator::exchange::CoordinatorExchange;
use crate::stats::{PortSnapshot, Snapshot, StageCounters, WAIT_BUCKETS, WaitHistogram};

/// Wait samples per snapshot, over all ports and stages.
const WAITS_PER_SNAPSHOT_MAX: u64 = 20_000;

/// Upper edges of `laxity_wait_seconds`, in seconds: from 250 ns (a permit without waiting) to 4 s,
/// each four times the last.
const WAIT_EDGES_S: [f64; 13] =
    [250e-9, 1e-6, 4e-6, 16e-6, 64e-6, 256e-6, 1e-3, 4e-3, 16e-3, 64e-3, 256e-3, 1.0, 4.0];

/// How a metric's value is read from a `T`. The variant is the kind of the metric.
enum Value<T: 'static> {
    /// A value that only grows.
    Counter(fn(&T) -> u64),
    /// A value that grows and shrinks.
    Gauge(fn(&T) -> f64),
}

/// A metric: its name, its help text and its value. The labels are in `docs/metrics.md`.
struct Metric<T: 'static> {
    name: &'static str,
    help: &'static str,
    value: Value<T>,
}

/// A table of metrics that are read from the same type and have the same labels.
macro_rules! metrics {
    ($(#[$doc:meta])* $table:ident: $type:ty { $(
        $kind:ident $name:ident $help:literal |$from:ident| $value:expr;
    )* }) => {
        $(#[$doc])*
        const $table: &[Metric<$type>] = &[$(Metric {
            name: stringify!($name),
            help: $help,
            value: Value::$kind(|$from| $value as _),
        }),*];
    };
}

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
    /// Metrics of the stream to the coordinator.
    CLUSTER: ClusterView {
        Gauge laxity_cluster_connected "Whether there is a stream to the coordinator"
            |c| u64::from(c.view.connected);
        Gauge laxity_cluster_order_in_force
            "Whether the links have the coordinator's order, not the daemon's own"
            |c| u64::from(c.in_force);
        Gauge laxity_cluster_order_age_seconds
            "Time since the coordinator's order was last confirmed"
            |c| c.age.map_or(0.0, |age| age.0 as f64 / 1e9);
        Gauge laxity_cluster_order_term "Term of the coordinator's newest order"
            |c| c.view.term.unwrap_or_default();
        Gauge laxity_cluster_order_sequence "Sequence of the coordinator's newest order"
            |c| c.view.sequence.unwrap_or_default();
        Counter laxity_cluster_orders_total "Orders of the coordinator that were applied"
            |c| c.view.orders;
        Counter laxity_cluster_stale_orders_total "Orders refused because a newer one was seen"
            |c| c.view.stale_orders;
        Counter laxity_cluster_broken_orders_total
            "Orders dropped because a part was missing or invalid" |c| c.view.broken_orders;
        Counter laxity_cluster_connects_total "Streams that a coordinator welcomed"
            |c| c.view.connects;
        Counter laxity_cluster_failures_total
            "Attempts to reach a coordinator that failed, and streams that ended"
            |c| c.view.failures;
        Counter laxity_cluster_reports_total "Reports sent to the coordinator" |c| c.view.reports;
        Counter laxity_cluster_refused_events_total "Reported events that the coordinator refused"
            |c| c.view.refused_events;
    }
}

metrics! {
    /// The release, by its label.
    BUILD: u64 {
        Gauge laxity_build_info "1, with the release of the daemon" |one| *one;
    }
}

metrics! {
    /// When the daemon began to serve, which for one in standby is the end of its wait.
    START: f64 {
        Gauge laxity_start_time_seconds "Unix time at which the daemon began to serve" |at_s| *at_s;
    }
}

metrics! {
    /// Refused registrations, which the scheduler thread does not see.
    REFUSED: u64 {
        Counter laxity_refused_clients_total "Registrations refused" |count| *count;
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

/// The state of the stream to the coordinator. Without a coordinator, all values are zero.
#[derive(Default)]
struct ClusterView {
    view: ClusterStatus,
    in_force: bool,
    age: Option<Span>,
}

/// The only histogram: time from submit to first permit.
const WAIT: &str = "laxity_wait_seconds";

static METADATA: Metadata<'static> =
    Metadata::new("laxity", metrics::Level::INFO, Some(module_path!()));

/// The recorder of the endpoint, with the handles made so far. It is not global, because a test
/// process runs several daemons.
pub struct Exporter {
    recorder: PrometheusRecorder,
    counters: BTreeMap<Key, Counter>,
    gauges: BTreeMap<Key, Gauge>,
    waits: BTreeMap<Key, (Histogram, WaitHistogram)>,
    /// The lines of attached clients and of jobs, as of the last snapshot.
    clients: Arc<Mutex<String>>,
}

impl std::fmt::Debug for Exporter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exporter").field("counters", &self.counters.len()).finish_non_exhaustive()
    }
}

/// The time between two runs of the exporter's upkeep, which sorts wait samples into buckets.
const UPKEEP_EVERY: Duration = Duration::from_secs(5);

async fn keep_up(handle: PrometheusHandle) {
    let mut ticks = tokio::time::interval(UPKEEP_EVERY);
    loop {
        ticks.tick().await;
        handle.run_upkeep();
    }
}

fn describe<T>(recorder: &PrometheusRecorder, table: &[Metric<T>]) {
    for metric in table {
        let (name, help) = (KeyName::from_const_str(metric.name), metric.help.into());
        match metric.value {
            Value::Counter(_) => recorder.describe_counter(name, None, help),
            Value::Gauge(_) => recorder.describe_gauge(name, None, help),
        }
    }
}

impl Exporter {
    /// Makes an exporter with all metrics and no values.
    ///
    /// # Errors
    /// The buckets of a histogram are invalid.
    pub fn new() -> Result<Self, BuildError> {
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Full(WAIT.into()), &WAIT_EDGES_S)?
            .build_recorder();
        describe(&recorder, PORT);
        describe(&recorder, WAITING_BY_LEVEL);
        describe(&recorder, WAITING_BY_STAGE);
        describe(&recorder, STAGE);
        describe(&recorder, PERMITS);
        describe(&recorder, CLUSTER);
        describe(&recorder, BUILD);
        describe(&recorder, START);
        describe(&recorder, REFUSED);
        describe(&recorder, DAEMON);
        let help = "Time from submit to first permit".into();
        recorder.describe_histogram(KeyName::from_const_str(WAIT), None, help);
        let mut exporter = Self {
            recorder,
            counters: BTreeMap::new(),
            gauges: BTreeMap::new(),
            waits: BTreeMap::new(),
            clients: Arc::new(Mutex::new(clients::rendered(&[]) + &jobs::rendered(&[], &[]))),
        };
        let version = Label::from_static_parts("version", env!("CARGO_PKG_VERSION"));
        exporter.set(BUILD, &[version], &1);
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        exporter.set(START, &[], &at.as_secs_f64());
        Ok(exporter)
    }

    /// Returns a future that serves the published metrics at `listener`, once there is one, while
    /// it is polled.
    pub fn serve(
        &self,
        listener: impl Future<Output = HttpListener> + Send + 'static,
    ) -> impl Future<Output = ()> + Send + 'static {
        let handle = self.recorder.handle();
        let render = handle.clone();
        let clients = Arc::clone(&self.clients);
        let answer = rendered(move || render.render() + &clients.lock());
        async move {
            let serve = async {
                listener.await.serve("the metrics endpoint", HttpLimits::METRICS, answer).await;
            };
            tokio::select! {
                () = serve => {}
                () = keep_up(handle) => {}
            }
        }
    }

    /// Exports the number of refused registrations, which may change without a snapshot.
    pub fn publish_refusals(&mut self, refused: u64) {
        self.set(REFUSED, &[], &refused);
    }

    /// Exports the state of the stream to the coordinator.
    pub fn publish_cluster(&mut self, exchange: Option<&CoordinatorExchange>) {
        let seen = exchange.map(|exchange| {
            let (in_force, age) = exchange.in_force(Time(now_ns()));
            let view = exchange.view();
            ClusterView { view, in_force, age }
        });
        self.set(CLUSTER, &[], &seen.unwrap_or_default());
    }

    /// Exports `snapshot` and the number of refused registrations.
    pub fn publish(&mut self, snapshot: &Snapshot, refused: u64) {
        self.publish_refusals(refused);
        for port in &snapshot.ports {
            self.publish_port(port);
        }
        self.publish_waits(snapshot);
        let text = clients::rendered(&snapshot.clients)
            + &jobs::rendered(&snapshot.jobs, &snapshot.clients);
        *self.clients.lock() = text;
        self.set(DAEMON, &[], snapshot);
    }

    fn publish_port(&mut self, port: &PortSnapshot) {
        let at = labels(port);
        self.set(PORT, &at, port);
        for row in rows(port.levels) {
            let labels = with(&at, Label::new("level", level_name(row)));
            self.set(WAITING_BY_LEVEL, &labels, &port.link.waiting_by_level[row]);
        }
        for stage in Stage::ALL {
            let labels = with(&at, Label::from_static_parts("stage", stage.name()));
            self.set(WAITING_BY_STAGE, &labels, &port.link.waiting_by_stage[stage.index()]);
            let counted = &port.counters.stages[stage.index()];
            self.set(STAGE, &labels, counted);
            for row in rows(port.levels) {
                let labels = with(&labels, Label::new("level", level_name(row)));
                let (count, bytes) = (counted.permits[row], counted.permitted_bytes[row]);
                self.set(PERMITS, &labels, &Permits { count, bytes });
            }
        }
    }

    /// Exports the waits since the last snapshot, each as the mean of its bucket.
    fn publish_waits(&mut self, snapshot: &Snapshot) {
        let mut waits = Vec::new();
        let mut new = 0;
        for port in &snapshot.ports {
            for stage in Stage::ALL {
                let stage_label = Label::from_static_parts("stage", stage.name());
                let key = Key::from_parts(WAIT, with(&labels(port), stage_label));
                let now = &port.counters.stages[stage.index()].wait;
                new += now.count() - self.waits.get(&key).map_or(0, |(_, seen)| seen.count());
                waits.push((key, now));
            }
        }
        let recorder = &self.recorder;
        for (key, now) in waits {
            let (histogram, seen) = self.waits.entry(key.clone()).or_insert_with(|| {
                (recorder.register_histogram(&key, &METADATA), WaitHistogram::default())
            });
            for bucket in 0..WAIT_BUCKETS {
                let count = now.counts[bucket] - seen.counts[bucket];
                if count > 0 {
                    let sum = now.sums_ns[bucket] - seen.sums_ns[bucket];
                    let mean_s = sum as f64 / count as f64 / 1e9;
                    histogram.record_many(mean_s, thinned(count, new) as usize);
                }
            }
            *seen = now.clone();
        }
    }

    /// Sets all metrics of `table`, with these labels, to the values in `from`.
    fn set<T>(&mut self, table: &[Metric<T>], labels: &[Label], from: &T) {
        let recorder = &self.recorder;
        for metric in table {
            let key = Key::from_parts(metric.name, labels.to_vec());
            match metric.value {
                Value::Counter(value) => (self.counters.entry(key.clone()))
                    .or_insert_with(|| recorder.register_counter(&key, &METADATA))
                    .absolute(value(from)),
                Value::Gauge(value) => (self.gauges.entry(key.clone()))
                    .or_insert_with(|| recorder.register_gauge(&key, &METADATA))
                    .set(value(from)),
            }
        }
    }
}

/// Returns how many of `count` samples are exported if the snapshot has `total`. It is at least
/// one.
fn thinned(count: u64, total: u64) -> u64 {
    if total <= WAITS_PER_SNAPSHOT_MAX {
        return count;
    }
    (u128::from(count) * u128::from(WAITS_PER_SNAPSHOT_MAX)).div_ceil(u128::from(total)) as u64
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

fn labels(port: &PortSnapshot) -> Vec<Label> {
    let nic = Label::new("nic", port.name.to_string());
    vec![nic, Label::from_static_parts("direction", port.direction)]
}

fn with(labels: &[Label], more: Label) -> Vec<Label> {
    let mut labels = labels.to_vec();
    labels.push(more);
    labels
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
        let mut exporter = Exporter::new().expect("valid");
        let mut shown = |ports: &mut Vec<DriverPort>, nic: &str| {
            for port in ports {
                exporter.publish_port(&port.snapshot(NOW));
            }
            let text = exporter.recorder.handle().render();
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
    fn waits_are_thinned_only_above_the_limit_and_never_to_nothing() {
        assert_eq!(thinned(5, 100), 5);
        assert_eq!(thinned(1, 1_000_000_000), 1);
        let half = 2 * WAITS_PER_SNAPSHOT_MAX;
        assert_eq!(thinned(half / 2, half), half / 4);
    }
}
