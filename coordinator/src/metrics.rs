//! The Prometheus endpoint. `docs/coordinator.md` lists names and meanings, and a test compares the
//! two.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use laxity_listen::http::{HttpEndpoint, HttpLimits, rendered};
use laxity_policy::admission::AdmissionCounters;
use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

use crate::cluster::ClusterCounters;

/// Upper bounds of the buckets of `laxity_coordinator_run_seconds`.
const RUN_EDGES_S: [f64; 8] = [100e-6, 300e-6, 1e-3, 2e-3, 5e-3, 10e-3, 30e-3, 100e-3];

const GAUGES: [(&str, &str); 5] = [
    ("laxity_coordinator_hosts", "Hosts known"),
    ("laxity_coordinator_hosts_connected", "Hosts with a stream"),
    ("laxity_coordinator_batches", "Active batches"),
    ("laxity_coordinator_requests", "Requests of active batches"),
    ("laxity_coordinator_pruned_requests", "Requests that are pruned"),
];

const COUNTERS: [(&str, &str); 8] = [
    ("laxity_coordinator_reports_total", "Reports processed"),
    ("laxity_coordinator_events_total", "Events in processed reports"),
    ("laxity_coordinator_refused_events_total", "Events refused"),
    ("laxity_coordinator_orders_total", "Orders handed to streams"),
    (
        "laxity_coordinator_coalesced_orders_total",
        "Orders merged into a later one because the host had not read",
    ),
    ("laxity_coordinator_refused_hellos_total", "Hellos refused because their host sent too many"),
    ("laxity_coordinator_runs_total", "Runs of Algorithm 1"),
    (
        "laxity_coordinator_late_pruned_requests_total",
        "Requests that ended late and were pruned at that time",
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

/// Interval at which old samples are compacted, so that memory is bounded while nobody scrapes.
const UPKEEP_EVERY: Duration = Duration::from_secs(5);

/// The HTTP endpoint of the metrics, bound and not yet served.
pub(crate) struct MetricsEndpoint {
    endpoint: HttpEndpoint,
    page: PrometheusHandle,
}

impl MetricsEndpoint {
    pub(crate) fn bind(address: SocketAddr) -> io::Result<Self> {
        let endpoint = HttpEndpoint::bind("metrics", "metrics", address);
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Full(RUN_SECONDS.0.into()), &RUN_EDGES_S)
            .map_err(io::Error::other)?
            .build_recorder();
        let page = recorder.handle();
        // A second coordinator in the same process, as in tests, keeps the first recorder.
        let _ = metrics::set_global_recorder(recorder);
        describe();
        Ok(Self { endpoint, page })
    }

    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.endpoint.local_addr()
    }

    /// Serves until the task is aborted.
    pub(crate) async fn serve(self) {
        let page = self.page.clone();
        let rendered = rendered(move || page.render());
        let serving = async {
            self.endpoint.listener().await.serve("metrics", HttpLimits::METRICS, rendered).await;
        };
        let upkeep = async {
            loop {
                tokio::time::sleep(UPKEEP_EVERY).await;
                self.page.run_upkeep();
            }
        };
        tokio::join!(serving, upkeep);
    }
}

fn describe() {
    for (name, meaning) in GAUGES {
        describe_gauge!(name, meaning);
    }
    for (name, meaning) in COUNTERS.into_iter().chain([ENDED]) {
        describe_counter!(name, meaning);
    }
    describe_histogram!(RUN_SECONDS.0, RUN_SECONDS.1);
}

pub(crate) fn publish((cluster, admission): (ClusterCounters, AdmissionCounters)) {
    let gauges =
        [cluster.hosts, cluster.connected, cluster.batches, cluster.requests, cluster.pruned];
    for ((name, _), value) in GAUGES.into_iter().zip(gauges) {
        gauge!(name).set(value as f64);
    }
    let messages = &cluster.messages;
    let counters = [
        messages.reports, messages.events, messages.refused_events, messages.orders,
        messages.coalesced_orders, messages.refused_hellos, admission.runs,
        cluster.ended.late_pruned,
    ];
    for ((name, _), value) in COUNTERS.into_iter().zip(counters) {
        counter!(name).absolute(value);
    }
    for (outcome, value) in [
        ("in_time", cluster.ended.in_time),
        ("late", cluster.ended.late),
        ("undated", cluster.ended.undated),
    ] {
        counter!(ENDED.0, "outcome" => outcome).absolute(value);
    }
}

pub(crate) fn ran(took: Duration) {
    histogram!(RUN_SECONDS.0).record(took.as_secs_f64());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = (&'static str, &'static str)> {
        GAUGES.into_iter().chain(COUNTERS).chain([ENDED, RUN_SECONDS])
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
        let recorder = PrometheusBuilder::new().build_recorder();
        let page = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            describe();
            publish((ClusterCounters::default(), AdmissionCounters::default()));
            ran(Duration::from_millis(1));
        });
        let page = page.render();
        for (name, meaning) in all() {
            assert!(page.contains(&format!("# HELP {name} {meaning}")), "{name}: {page}");
            let kind = page
                .lines()
                .find_map(|line| line.strip_prefix(&format!("# TYPE {name} ")))
                .unwrap_or_else(|| panic!("{name} has no type"));
            assert_eq!(kind == "counter", name.ends_with("_total"), "{name}: {kind}");
        }
        assert!(page.contains("requests_ended_total{outcome=\"late\"} 0"), "{page}");
    }
}
