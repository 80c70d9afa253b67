//! The cost of one run of Algorithm 1 (architecture §6: at most 5 ms over 10 000 active batches).
//!
//! Each batch has 4 requests, each of which loads 8 of 4096 ports. A measured run is the poll that
//! follows the departure of one batch and the arrival of another. There are three situations:
//!
//! * `feasible`: no batch is late, and the run only sorts and sums;
//! * `overload`: most batches are late, and each run spends the whole drop budget;
//! * `hot_port`: the same, and every request also loads one shared port (a block that all requests
//!   reuse), so that all requests are candidates of this port.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use laxity_policy::admission::{
    Admission, AdmissionAction, AdmissionConfig, AdmissionEvent, RequestLoad,
};
use laxity_policy::{BatchId, PortId, RequestId, Span, Time};

const REQUESTS_PER_BATCH: u64 = 4;
const PORTS_PER_REQUEST: u64 = 8;
const PORTS: u64 = 4096;
const NOW: Time = Time(1_000_000_000_000);

#[derive(Clone, Copy)]
enum Situation {
    Feasible,
    Overload,
    HotPort,
}

/// Returns a well-mixed function of its argument (the finalizer of SplitMix64).
fn mix(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn request(id: u64, situation: Situation) -> RequestLoad {
    let mut ports: Vec<(PortId, u64)> = (0..PORTS_PER_REQUEST)
        .map(|nth| mix(id * PORTS_PER_REQUEST + nth))
        .map(|bits| (PortId((bits % PORTS) as u32), (8 << 20) + (bits >> 32) % (64 << 20)))
        .collect();
    if matches!(situation, Situation::HotPort) {
        ports[0] = (PortId(0), (8 << 20) + mix(!id) % (64 << 20));
    }
    // All batches together take 250 ms at a port, and minutes at the hot one; see `time_runs`.
    let slack_ns = match situation {
        Situation::Feasible => 600_000_000_000,
        Situation::Overload | Situation::HotPort => 60_000_000,
    };
    RequestLoad {
        request: RequestId(id),
        deadline: Time(NOW.0 + slack_ns + mix(id) % 60_000_000),
        ports,
        started: false,
    }
}

fn batch(id: u64, situation: Situation) -> AdmissionEvent {
    let first = id * REQUESTS_PER_BATCH;
    AdmissionEvent::BatchArrived {
        batch: BatchId(id),
        requests: (0..REQUESTS_PER_BATCH).map(|n| request(first + n, situation)).collect(),
        compute: Span::from_millis(50),
    }
}

/// Returns the time of `runs` runs over `batches` batches.
fn time_runs(runs: u64, batches: u64, drop_budget: usize, situation: Situation) -> Duration {
    let config = AdmissionConfig {
        drop_budget,
        default_rate: 1_250_000 * batches,
        ..AdmissionConfig::default()
    };
    let mut admission = Admission::new(config).expect("the defaults are valid");
    for id in 1..=batches {
        admission.handle(NOW, batch(id, situation));
    }
    let mut spent = Duration::ZERO;
    // The first run has a cold cache and does not count.
    for next in (batches + 1..).take(runs as usize + 1) {
        let start = Instant::now();
        let action = black_box(admission.poll_action(NOW));
        if next > batches + 1 {
            spent += start.elapsed();
        }
        let Some(AdmissionAction::OrderChanged(order)) = action else {
            panic!("an arrival changes the order");
        };
        assert!(matches!(situation, Situation::Feasible) || order.pruned.len() == drop_budget);
        // The pruned requests end and similar ones join, so that the next run has to prune again.
        for &request_id in &order.pruned {
            admission.handle(NOW, AdmissionEvent::RequestEnded { request: request_id });
            let home = BatchId(request_id.0 / REQUESTS_PER_BATCH);
            let load = request(request_id.0, situation);
            admission.handle(NOW, AdmissionEvent::RequestJoined { batch: home, load });
        }
        let oldest = BatchId(next - batches);
        admission.handle(NOW, AdmissionEvent::BatchDeparted { batch: oldest });
        admission.handle(NOW, batch(next, situation));
    }
    spent
}

fn run(c: &mut Criterion) {
    let mut group = c.benchmark_group("admission_run");
    group.sample_size(20).measurement_time(Duration::from_secs(3));
    for batches in [1_000, 10_000] {
        for (name, budget, situation) in [
            ("feasible", 64, Situation::Feasible),
            ("overload_64", 64, Situation::Overload),
            ("overload_1024", 1024, Situation::Overload),
            ("hot_port_64", 64, Situation::HotPort),
            ("hot_port_1024", 1024, Situation::HotPort),
        ] {
            group.bench_function(BenchmarkId::new(name, batches), |b| {
                b.iter_custom(|runs| time_runs(runs, batches, budget, situation));
            });
        }
    }
    group.finish();
}

/// Measures the handling of an arrival and a departure, without the run.
fn events(c: &mut Criterion) {
    let mut group = c.benchmark_group("admission_arrival_and_departure");
    for batches in [1_000_u64, 10_000] {
        group.bench_function(BenchmarkId::from_parameter(batches), |b| {
            let mut admission =
                Admission::new(AdmissionConfig::default()).expect("the defaults are valid");
            for id in 1..=batches {
                admission.handle(NOW, batch(id, Situation::Feasible));
            }
            let mut next = batches + 1;
            b.iter_batched(
                || {
                    next += 1;
                    (batch(next - 1, Situation::Feasible), BatchId(next - 1 - batches))
                },
                |(arrival, batch)| {
                    admission.handle(NOW, AdmissionEvent::BatchDeparted { batch });
                    admission.handle(NOW, arrival);
                },
                criterion::BatchSize::SmallInput,
            );
        });
    }
    group.finish();
}

criterion_group!(benches, run, events);
criterion_main!(benches);
