//! What a decision of QoServe costs: an iteration of a replica with 256 requests that decode and 10 000 in line, plan and its end.
//! The target is 20 µs. The predictor is a forest of the size that `laxity_sim::requests::predictor` makes.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use laxity_requests::baseline::{Fixed, Order};
use laxity_requests::discipline::Discipline;
use laxity_requests::iteration::{Event, Iteration as _};
use laxity_requests::kv::Pool;
use laxity_requests::latency::Composition;
use laxity_requests::qoserve::{FEATURES, Forest, Line, Node, Options, QoServe, features};
use laxity_requests::replica::Replica;
use laxity_requests::request::{ApplicationId, ClassId, Importance, RequestId, Slo, Spec};
use laxity_requests::{Span, Time};

const MS: u64 = 1_000_000;

type Make<'a> = dyn Fn() -> Box<dyn Discipline + Send> + 'a;

/// What the forest stands for: 8 ms, 50 µs a token, and the pairs.
fn true_ns(of: &Composition) -> f64 {
    8e6 + f64::from(of.prefill_tokens + of.decodes) * 5e4 + of.prefill_pairs as f64 * 2.0
}

/// A tree of so many levels that halves the ranges of its features in turn.
fn grow(depth: u32, bounds: [(f64, f64); FEATURES], shift: usize, into: &mut Vec<Node>) {
    if depth == 0 {
        let mean = |at: usize| f64::midpoint(bounds[at].0, bounds[at].1);
        let ns = 8e6 + mean(0) * 5e4 + mean(2) * 2.0;
        into.push(Node::Leaf(ns.ln() as f32));
        return;
    }
    let feature = [0, 2, 1, 4, 0, 5][(depth as usize + shift) % 6];
    let (low, high) = bounds[feature];
    let most = f64::midpoint(low, high);
    let at = into.len();
    into.push(Node::Leaf(0.0));
    let mut half = bounds;
    half[feature].1 = most;
    grow(depth - 1, half, shift, into);
    let above = into.len() as u32;
    let feature_index = u8::try_from(feature).expect("there are six");
    into[at] = Node::Split {
        feature: feature_index,
        most: most as f32,
        above,
    };
    half = bounds;
    half[feature].0 = most;
    grow(depth - 1, half, shift, into);
}

fn forest() -> Forest {
    let bounds = [
        (0.0, 4_096.0),
        (0.0, 4_096.0),
        (0.0, 3e7),
        (0.0, 16.0),
        (0.0, 512.0),
        (0.0, 1e6),
    ];
    let trees: Vec<Vec<Node>> = (0..16)
        .map(|shift| {
            let mut nodes = Vec::new();
            grow(12, bounds, shift, &mut nodes);
            nodes
        })
        .collect();
    Forest::new(Line::NONE, &trees).expect("a whole forest")
}

/// 256 decode, 10 000 wait.
fn loaded(discipline: Box<dyn Discipline + Send>) -> (Replica, Time) {
    let mut replica = Replica::new(Pool::new(1 << 20, 16), 0, discipline);
    let mut now = Time(1_000 * MS);
    for id in 0..10_256_u64 {
        let slo = match id % 3 {
            0 => Slo::Interactive {
                ttft: 60_000_000 * MS,
                tbt: 50 * MS,
            },
            1 => Slo::Batch {
                ttlt: 600_000_000 * MS,
            },
            _ => Slo::Batch {
                ttlt: 1_800_000_000 * MS,
            },
        };
        let running = id < 256;
        replica.handle(
            now,
            &Event::Arrived(Spec {
                id: RequestId(id),
                arrival: Time(id * 1_000),
                prompt: 500 + (id * 7_919 % 3_000) as u32,
                output_max: 8_000,
                ready: if running { 8_000 } else { 0 }.min(500 + (id * 7_919 % 3_000) as u32),
                generated: u32::from(running),
                class: ClassId((id % 3) as u16),
                application: ApplicationId((id % 3) as u32),
                importance: if id % 5 == 0 {
                    Importance::Low
                } else {
                    Importance::Important
                },
                slo,
            }),
        );
    }
    for _ in 0..20 {
        turn(&mut replica, &mut now);
    }
    (replica, now)
}

fn turn(replica: &mut Replica, now: &mut Time) -> usize {
    let plan = replica.plan(*now).expect("there is work");
    let took = Span(true_ns(&plan.composition()) as u64);
    *now = *now + took;
    let finished = plan.chunks.iter().filter(|chunk| chunk.last);
    let finished = finished.map(|chunk| chunk.request).collect();
    replica.handle(*now, &Event::Done { took, finished });
    plan.chunks.len()
}

fn decisions(c: &mut Criterion) {
    let of = Composition::default().with_chunk(512, 700);
    let forest = forest();
    c.bench_function("qoserve_forest_asked_once", |b| {
        b.iter(|| black_box(forest.predict(black_box(&features(&of)))));
    });
    let mut group = c.benchmark_group("iteration_256_running_10000_queued");
    let policies: [(&str, &Make<'_>); 2] = [
        ("qoserve", &|| {
            Box::new(QoServe::new(Options::default(), forest.clone()))
        }),
        ("sarathi_edf", &|| {
            Box::new(Fixed {
                order: Order::Edf,
                tokens: 512,
            })
        }),
    ];
    for (name, policy) in policies {
        group.bench_function(name, |b| {
            b.iter_custom(|times| {
                // 64 iterations of each state: prompts that end leave, so that the load stays near what it says.
                let mut left = 0;
                let (mut replica, mut now) = loaded(policy());
                let mut total = Duration::ZERO;
                for _ in 0..times {
                    if left == 0 {
                        left = 64;
                        (replica, now) = loaded(policy());
                    }
                    left -= 1;
                    let begun = Instant::now();
                    black_box(turn(&mut replica, &mut now));
                    total += begun.elapsed();
                }
                total
            });
        });
    }
    group.finish();
}

criterion_group!(benches, decisions);
criterion_main!(benches);
