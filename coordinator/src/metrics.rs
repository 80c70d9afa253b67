//! The Prometheus endpoint. Names and meanings are in `docs/coordinator.md`, and a test holds the two together.

use std::net::SocketAddr;
use std::time::Duration;

use laxity_policy::admission::AdmissionCounters;
use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use metrics_exporter_prometheus::{BuildError, ExporterFuture, Matcher, PrometheusBuilder};

use crate::cluster::ClusterCounters;

/// Upper edges of `laxity_coordinator_run_seconds`.
const RUN_EDGES_S: [f64; 8] = [100e-6, 300e-6, 1e-3, 2e-3, 5e-3, 10e-3, 30e-3, 100e-3];

const GAUGES: [(&str, &str); 5] = [
    ("laxity_coordinator_hosts", "Hosts known"),
    ("laxity_coordinator_hosts_connected", "Hosts with a stream"),
    ("laxity_coordinator_batches", "Active batches"),
    ("laxity_coordinator_requests", "Requests of active batches"),
    (
        "laxity_coordinator_pruned_requests",
        "Requests that are pruned",
    ),
];

const COUNTERS: [(&str, &str); 6] = [
    ("laxity_coordinator_reports_total", "Reports taken"),
    ("laxity_coordinator_events_total", "Events in them"),
    ("laxity_coordinator_refused_events_total", "Events refused"),
    (
        "laxity_coordinator_orders_total",
        "Orders handed to streams",
    ),
    (
        "laxity_coordinator_coalesced_orders_total",
        "Orders merged into a later one because the host had not read",
    ),
    ("laxity_coordinator_runs_total", "Runs of Algorithm 1"),
];

const RUN_SECONDS: (&str, &str) = ("laxity_coordinator_run_seconds", "Duration of a run");

/// Makes the endpoint; poll the future to serve it.
pub(crate) fn exporter(address: SocketAddr) -> Result<ExporterFuture, BuildError> {
    let builder = PrometheusBuilder::new()
        .with_http_listener(address)
        .set_buckets_for_metric(Matcher::Full(RUN_SECONDS.0.into()), &RUN_EDGES_S)?;
    let (recorder, exporter) = builder.build()?;
    // A second coordinator in the same process (tests) keeps the first one's.
    let _ = metrics::set_global_recorder(recorder);
    for (name, meaning) in GAUGES {
        describe_gauge!(name, meaning);
    }
    for (name, meaning) in COUNTERS {
        describe_counter!(name, meaning);
    }
    describe_histogram!(RUN_SECONDS.0, RUN_SECONDS.1);
    Ok(exporter)
}

pub(crate) fn publish((cluster, admission): (ClusterCounters, AdmissionCounters)) {
    let gauges = [
        cluster.hosts,
        cluster.connected,
        cluster.batches,
        cluster.requests,
        cluster.pruned,
    ];
    for ((name, _), value) in GAUGES.into_iter().zip(gauges) {
        gauge!(name).set(value as f64);
    }
    let counters = [
        cluster.reports,
        cluster.events,
        cluster.refused_events,
        cluster.orders,
        cluster.coalesced_orders,
        admission.runs,
    ];
    for ((name, _), value) in COUNTERS.into_iter().zip(counters) {
        counter!(name).absolute(value);
    }
}

pub(crate) fn ran(took: Duration) {
    histogram!(RUN_SECONDS.0).record(took.as_secs_f64());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_documented() {
        let page = include_str!("../../docs/coordinator.md");
        let names = GAUGES.into_iter().chain(COUNTERS).chain([RUN_SECONDS]);
        for (name, _) in names {
            assert!(page.contains(&format!("| `{name}`")), "{name}");
        }
    }
}
