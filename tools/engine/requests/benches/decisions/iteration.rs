//! Benchmarks of iterations under every discipline: the end of one and the plan of the next, with
//! 256 decoding jobs and 10 000 queued ones.
//!
//! The driver ends each request with its prompt, so that as many requests decode as before.

use std::hint::black_box;

use laxity_requests::baseline::{Fixed, LineOrder, Relegating};
use laxity_requests::discipline::Discipline;
use laxity_requests::hmas::cognition::Cognition;
use laxity_requests::hmas::perception::{Paced, Tagger, Tags};
use laxity_requests::hmas::pool::Kind;
use laxity_requests::hmas::prediction::Measured;
use laxity_requests::hmas::{Agent, Config};
use laxity_requests::iteration::{Event, Iteration as _, Plan};
use laxity_requests::kv::Pool;
use laxity_requests::latency::{Composition, Latency};
use laxity_requests::qoserve::{FEATURES, Forest, LinearTerms, Node, Options, QoServe, features};
use laxity_requests::replica::Replica;
use laxity_requests::request::{ApplicationId, ClassId, Importance, RequestId, Slo, Spec};
use laxity_requests::{Span, Time};

use crate::{Row, Subject};

const MS: u64 = 1_000_000;
const RUNNING: u64 = 256;
const QUEUED: u64 = 10_000;
const KIND: &str = "iteration";
const LIMIT_US: f64 = 20.0;

/// The machine's latency: 8 ms, 50 µs per token, and 2 ns per pair.
#[derive(Clone, Copy, Debug)]
struct Truth;

impl Latency for Truth {
    fn iteration(&self, of: &Composition) -> Span {
        let tokens = u64::from(of.prefill_tokens + of.decodes);
        Span(8 * MS + tokens * 50_000 + of.prefill_pairs * 2)
    }
}

/// Adds a tree of `depth` levels that halves the ranges of its features in turn.
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
    into[at] = Node::Split {
        feature: u8::try_from(feature).expect("there are six"),
        most: most as f32,
        above,
    };
    half = bounds;
    half[feature].0 = most;
    grow(depth - 1, half, shift, into);
}

/// Returns a forest of the size that `laxity_sim::requests::predictor` creates.
fn forest() -> Forest {
    let bounds =
        [(0.0, 4_096.0), (0.0, 4_096.0), (0.0, 3e7), (0.0, 16.0), (0.0, 512.0), (0.0, 1e6)];
    let trees: Vec<Vec<Node>> = (0..16)
        .map(|shift| {
            let mut nodes = Vec::new();
            grow(12, bounds, shift, &mut nodes);
            nodes
        })
        .collect();
    Forest::new(LinearTerms::NONE, &trees).expect("a whole forest")
}

struct Even;

impl Tagger for Even {
    fn tag(&mut self, spec: &Spec) -> Option<Tags> {
        let length = 50.0 + (spec.id.0 * 53 % 900) as f64;
        Some(Tags { task: 0, length })
    }
}

fn spec(id: u64) -> Spec {
    let prompt = 500 + (id * 7_919 % 3_000) as u32;
    let running = id < RUNNING;
    let slo = match id % 3 {
        0 => Slo::Interactive { ttft: 60_000_000 * MS, tbt: 50 * MS },
        1 => Slo::Batch { ttlt: 600_000_000 * MS },
        _ => Slo::Batch { ttlt: 1_800_000_000 * MS },
    };
    Spec {
        id: RequestId(id),
        arrival: Time(id * 1_000),
        prompt,
        output_max: 8_000,
        ready: if running { prompt } else { 0 },
        generated: u32::from(running),
        class: ClassId((id % 3) as u16),
        application: ApplicationId((id % 3) as u32),
        importance: if id.is_multiple_of(5) { Importance::Low } else { Importance::Important },
        slo,
    }
}

struct Loaded {
    replica: Replica,
    now: Time,
    /// The plan that isn't done yet.
    under_way: Option<Plan>,
}

impl Loaded {
    fn new(discipline: Box<dyn Discipline + Send>) -> Self {
        let mut loaded = Self {
            replica: Replica::new(Pool::new(1 << 20, 16), 0, discipline),
            now: Time(1_000 * MS),
            under_way: None,
        };
        for id in 0..RUNNING + QUEUED {
            loaded.replica.handle(loaded.now, &Event::Arrived(spec(id)));
        }
        for _ in 0..20 {
            loaded.decide();
        }
        let load = loaded.replica.load();
        assert!(u64::from(load.decoding) >= RUNNING - 8 && load.waiting >= 9_900, "{load:?}");
        loaded
    }
}

impl Subject for Loaded {
    fn decide(&mut self) -> usize {
        if let Some(plan) = self.under_way.take() {
            let took = Truth.iteration(&plan.composition());
            self.now = self.now + took;
            let finished = plan.chunks.iter().filter(|chunk| chunk.last);
            let finished = finished.map(|chunk| chunk.request).collect();
            self.replica.handle(self.now, &Event::Done { took, finished });
            // A dispatcher reads the load after each iteration.
            black_box(self.replica.load());
        }
        self.under_way = self.replica.plan(self.now);
        usize::from(self.under_way.is_some())
    }
}

/// A forest that is asked for different chunk sizes, as in a search. Repeated sizes would measure
/// only warm caches and branch predictors.
struct Asked(Forest, u32);

impl Subject for Asked {
    fn decide(&mut self) -> usize {
        for _ in 0..8 {
            self.1 = (self.1 * 7 + 501) % 2_500;
            let of = Composition::default().with_chunk(512 + self.1 / 2, 1 + self.1);
            black_box(self.0.predict(black_box(&features(&of))));
        }
        8
    }
}

fn row(name: String, make: impl Fn() -> Box<dyn Discipline + Send> + 'static) -> Row {
    Row {
        name,
        kind: KIND,
        limit_us: Some(LIMIT_US),
        make: Box::new(move || Box::new(Loaded::new(make()))),
    }
}

fn agent(kind: Kind) -> Agent {
    let perception = Paced::new(Even, Span::ZERO);
    let cognition = Cognition::new(Box::new(perception), Box::new(Measured::default()));
    Agent::new(kind, Config::default(), cognition)
}

pub(crate) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for order in [LineOrder::Fcfs, LineOrder::Edf, LineOrder::Srpf] {
        let fixed = Fixed { order, tokens: 512 };
        rows.push(row(format!("iteration: {}", fixed.name()), move || Box::new(fixed)));
    }
    for order in [LineOrder::Fcfs, LineOrder::Edf, LineOrder::Srpf] {
        let inner = Fixed { order, tokens: 512 };
        let name = format!("iteration: {}, relegating", inner.name());
        rows.push(Row {
            // This policy reads the whole queue. It is for comparison only and has no limit.
            limit_us: None,
            ..row(name, move || Box::new(Relegating { inner, latency: Truth }))
        });
    }
    let options = [
        ("qoserve", Options::default()),
        ("qoserve, chunking only", Options::chunking_only()),
        ("qoserve, adaptive α", Options::adaptive()),
    ];
    for (name, options) in options {
        let forest = std::sync::Arc::new(forest());
        rows.push(row(format!("iteration: {name}"), move || {
            Box::new(QoServe::new(options, forest.clone()))
        }));
    }
    for kind in Kind::ALL {
        rows.push(row(format!("iteration: hmas {}", kind.name()), move || Box::new(agent(kind))));
    }
    rows.push(Row {
        name: "qoserve's forest, asked once".to_owned(),
        kind: KIND,
        limit_us: None,
        make: Box::new(|| Box::new(Asked(forest(), 1))),
    });
    rows
}
