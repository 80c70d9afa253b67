//! A made-up record of two requests, whose report can be worked out by hand.

use super::*;
use crate::fabric::QueueCounters;
use crate::message::{BatchRecord, ClientRecord, Traffic, WorkerReport};
use crate::workload::Request;

fn request(id: u64, arrival_ms: u64) -> PlannedRequest {
    PlannedRequest {
        id,
        arrival_ns: arrival_ms * 1_000_000,
        new_tokens: 100,
        reused: 100,
        unit: 0,
        holder: 0,
        decode: 0,
        ideal_ns: 100_000_000,
        slo_ns: 300_000_000,
    }
}

pub(crate) fn example() -> LabReport {
    let config = LabConfig {
        units: 1,
        ranks: 2,
        decodes: 1,
        ..LabConfig::default()
    };
    let begin_ns = 5_000_000_000;
    let counters = |bytes| [(46, QueueCounters { bytes, drops: 0 })].into();
    let worker = |host| WorkerReport {
        host,
        collective_ns: vec![10_000_000, 30_000_000],
        batches: vec![BatchRecord {
            requests: vec![1],
            begun_ns: begin_ns + 10_000_000,
            computed_ns: begin_ns + 110_000_000,
            kv_stall_ns: 20_000_000,
            collective_ns: 40_000_000,
        }],
        traffic: Traffic {
            sent: [("p2d".to_owned(), [(46, 1000)].into())].into(),
            received: [("p2d".to_owned(), 1000)].into(),
            ..Traffic::default()
        },
        client: ClientRecord {
            bypassed_bytes: 7,
            unscheduled_ns: 2_000_000,
            ..Default::default()
        },
        carrier: None,
    };
    let record = RunRecord {
        policy: "mfs".into(),
        begin_ns,
        end_ns: begin_ns + 1_000_000_000,
        // The first has 150 ms, in time; the second is never finished.
        finished: vec![(1, begin_ns + 150_000_000)],
        workers: (0..3).map(worker).collect(),
        links: vec![
            LinkRecord {
                egress: counters(12_500_000),
                ingress: counters(5_000_000)
            };
            3
        ],
        ..RunRecord::default()
    };
    let requests = vec![
        Request {
            arrival_s: 0.0,
            tokens: 200,
            reused: 100,
            prefix: 1,
        },
        Request {
            arrival_s: 0.5,
            tokens: 200,
            reused: 100,
            prefix: 1,
        },
    ];
    let plan = vec![request(1, 0), request(2, 500)];
    let arrivals = Arrivals {
        requests,
        plan,
        fitting: None,
    };
    report(&config, &arrivals, &[record], None, Machine::default())
}

#[test]
fn numbers_are_what_the_definitions_say() {
    let report = example();
    let run = &report.runs[0];
    assert_eq!((run.requests, run.completed), (2, 1));
    assert_eq!(run.ttft_slo_attainment, 0.5);
    assert_eq!(run.ttft_ms.p50, 150.0);
    assert_eq!(run.ttft_ms.p99, 500.0, "given up after 500 ms");
    assert_eq!(run.collective_ms.mean, 20.0);
    assert_eq!(run.earliness, 0.25, "half of its SLO early, and one late");
    assert!(
        (run.link_utilisation - 0.35).abs() < 1e-9,
        "12.5 and 5 of 25 MB"
    );
    assert_eq!(run.fabric_bytes[&46], 15_000_000);
    assert_eq!((run.bytes_sent, run.bytes_received), (3000, 3000));
    assert_eq!((run.bypassed_bytes, run.unscheduled_ms), (21, 2.0));
    let stages = run.stages_ms;
    assert_eq!(
        [
            stages.queued,
            stages.kv_reuse_stall,
            stages.collective,
            stages.compute,
            stages.p2d_tail
        ],
        [10.0, 20.0, 40.0, 40.0, 40.0]
    );
}

#[test]
fn the_json_has_the_fields_that_others_read() {
    let json = serde_json::to_value(example()).unwrap();
    let run = &json["runs"][0];
    for field in [
        "requests",
        "ttft_slo_attainment",
        "earliness",
        "link_utilisation",
    ] {
        assert!(run[field].is_number(), "{field}");
    }
    assert_eq!(run["policy"], "mfs");
    assert!(run["ttft_ms"]["mean"].is_number() && run["ttft_ms"]["p99"].is_number());
    assert!(run["collective_ms"]["mean"].is_number() && run["collective_ms"]["p99"].is_number());
    assert_eq!(run["fabric_bytes"]["46"], 15_000_000);
    assert_eq!(
        json["workload"]["arrivals_digest"].as_str().unwrap().len(),
        16
    );
    assert!(json["machine"].is_object() && json["scaling"]["layers"].is_number());
}
