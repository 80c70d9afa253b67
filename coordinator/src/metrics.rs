//! The Prometheus endpoint. `docs/coordinator.md` lists names and meanings, and a test compares the
//! two.

use std::fmt::Write as _;
use std::time::Duration;

use laxity_listen::http::{HttpEndpoint, HttpLimits, rendered};
use laxity_policy::admission::AdmissionCounters;

use crate::cluster::ClusterCounters;

/// Upper bounds of the buckets of `laxity_coordinator_run_seconds`.
const RUN_EDGES_S: [f64; 8] = [100e-6, 300e-6, 1e-3, 2e-3, 5e-3, 10e-3, 30e-3, 100e-3];

type ServedCounters = (ClusterCounters, AdmissionCounters);

/// A metric that is one number: its name, its meaning, and where its value is.
type ServedMetric = (&'static str, &'static str, fn(&ServedCounters) -> u64);

const GAUGES: [ServedMetric; 5] = [
    ("laxity_coordinator_hosts", "Hosts known", |(it, _)| it.hosts as u64),
    ("laxity_coordinator_hosts_connected", "Hosts with a stream", |(it, _)| it.connected as u64),
    ("laxity_coordinator_batches", "Active batches", |(it, _)| it.batches as u64),
    ("laxity_coordinator_requests", "Requests of active batches", |(it, _)| it.requests as u64),
    ("laxity_coordinator_pruned_requests", "Requests that are pruned", |(it, _)| it.pruned as u64),
];

const COUNTERS: [ServedMetric; 8] = [
    ("laxity_coordinator_reports_total", "Reports processed", |(it, _)| it.messages.reports),
    ("laxity_coordinator_events_total", "Events in processed reports", |(it, _)| {
        it.messages.events
    }),
    ("laxity_coordinator_refused_events_total", "Events refused", |(it, _)| {
        it.messages.refused_events
    }),
    ("laxity_coordinator_orders_total", "Orders handed to streams", |(it, _)| it.messages.orders),
    (
        "laxity_coordinator_coalesced_orders_total",
        "Orders merged into a later one because the host had not read",
        |(it, _)| it.messages.coalesced_orders,
    ),
    (
        "laxity_coordinator_refused_hellos_total",
        "Hellos refused because their host sent too many",
        |(it, _)| it.messages.refused_hellos,
    ),
    ("laxity_coordinator_runs_total", "Runs of Algorithm 1", |(_, admission)| admission.runs),
    (
        "laxity_coordinator_late_pruned_requests_total",
        "Requests that ended late and were pruned at that time",
        |(it, _)| it.ended.late_pruned,
    ),
];

/// Requests that ended, by `outcome`: `in_time`, `late` or `undated`.
const ENDED: (&str, &str) = (
    "laxity_coordinator_requests_ended_total",
    "Requests whose end was reported, by outcome: in_time, late, or undated (no deadline)",
);

const RUN_SECONDS: (&str, &str) = (
    "laxity_coordinator_run_seconds",
    "Duration of a run of admission, with the messages to daemons, in seconds",
);

/// The durations of all runs of admission.
#[derive(Debug, Default)]
pub(crate) struct RunTimes {
    /// The number of runs up to each of [`RUN_EDGES_S`] and above the one before. The last count is
    /// that of runs longer than all of them.
    counts: [u64; RUN_EDGES_S.len() + 1],
    sum: Duration,
}

impl RunTimes {
    pub(crate) fn add(&mut self, took: Duration) {
        let bucket = RUN_EDGES_S.iter().position(|&edge_s| took.as_secs_f64() <= edge_s);
        self.counts[bucket.unwrap_or(RUN_EDGES_S.len())] += 1;
        self.sum += took;
    }
}

fn head(name: &str, kind: &str, meaning: &str) -> String {
    format!("# HELP {name} {meaning}\n# TYPE {name} {kind}\n")
}

/// Returns all metrics in the text format of Prometheus.
pub(crate) fn page(counters: &ServedCounters, runs: &RunTimes) -> String {
    let number = |kind, (name, meaning, value): ServedMetric| {
        head(name, kind, meaning) + &format!("{name} {}\n", value(counters))
    };
    let gauges = GAUGES.into_iter().map(|metric| number("gauge", metric));
    let numbers = gauges.chain(COUNTERS.into_iter().map(|metric| number("counter", metric)));
    let mut page: String = numbers.collect();

    // Writing to a string does not fail.
    let (name, meaning) = ENDED;
    page += &head(name, "counter", meaning);
    let ended = &counters.0.ended;
    for (outcome, value) in
        [("in_time", ended.in_time), ("late", ended.late), ("undated", ended.undated)]
    {
        let _ = writeln!(page, "{name}{{outcome=\"{outcome}\"}} {value}");
    }

    let (name, meaning) = RUN_SECONDS;
    page += &head(name, "histogram", meaning);
    let edges = RUN_EDGES_S.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
    let mut count = 0;
    for (edge, more) in edges.zip(runs.counts) {
        count += more;
        let _ = writeln!(page, "{name}_bucket{{le=\"{edge}\"}} {count}");
    }
    let _ = writeln!(page, "{name}_sum {}\n{name}_count {count}", runs.sum.as_secs_f64());
    page
}

/// Serves what `render` returns until the task is aborted.
pub(crate) async fn serve(
    endpoint: HttpEndpoint,
    render: impl Fn() -> String + Send + Sync + 'static,
) {
    let listener = endpoint.listener().await;
    listener.serve("metrics", HttpLimits::METRICS, rendered(render)).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = (&'static str, &'static str)> {
        let numbers = GAUGES.into_iter().chain(COUNTERS);
        numbers.map(|(name, meaning, _)| (name, meaning)).chain([ENDED, RUN_SECONDS])
    }

    #[test]
    fn every_metric_is_documented_and_every_documented_metric_exists() {
        let page = include_str!("../../docs/coordinator.md");
        for (name, _) in all() {
            assert!(page.contains(&format!("| `{name}`")), "{name}");
        }
        let rows = page.lines().filter(|line| line.starts_with("| `laxity_coordinator_"));
        assert_eq!(rows.count(), all().count(), "a row for what does not exist");
    }

    #[test]
    fn every_metric_is_served_with_help_and_a_name_that_says_its_unit() {
        let mut runs = RunTimes::default();
        for took_ms in [1, 2, 500] {
            runs.add(Duration::from_millis(took_ms));
        }
        let page = page(&(ClusterCounters::default(), AdmissionCounters::default()), &runs);
        for (name, meaning) in all() {
            assert!(page.contains(&format!("# HELP {name} {meaning}")), "{name}: {page}");
            let kind = page
                .lines()
                .find_map(|line| line.strip_prefix(&format!("# TYPE {name} ")))
                .unwrap_or_else(|| panic!("{name} has no type"));
            assert_eq!(kind == "counter", name.ends_with("_total"), "{name}: {kind}");
        }
        for line in [
            "requests_ended_total{outcome=\"late\"} 0",
            "run_seconds_bucket{le=\"0.0003\"} 0",
            "run_seconds_bucket{le=\"0.001\"} 1",
            "run_seconds_bucket{le=\"0.1\"} 2",
            "run_seconds_bucket{le=\"+Inf\"} 3",
            "run_seconds_sum 0.503",
            "run_seconds_count 3",
        ] {
            assert!(page.contains(&format!("{line}\n")), "{line}: {page}");
        }
    }
}
