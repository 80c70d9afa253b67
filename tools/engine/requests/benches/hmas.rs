//! What a decision of H-MAS costs: an iteration (what happened, and the next plan) at 256 that run and 10 000 in line, under each structure; a look of the guards
//! at the same load; what perception by a forest costs a request.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use laxity_requests::hmas::cognition::Cognition;
use laxity_requests::hmas::meta::Rules;
use laxity_requests::hmas::perception::{Paced, Tagger, Tags, Trained};
use laxity_requests::hmas::pool::Kind;
use laxity_requests::hmas::prediction::Measured;
use laxity_requests::hmas::{Agent, Config};
use laxity_requests::iteration::{Event, Iteration as _};
use laxity_requests::kv::Pool;
use laxity_requests::replica::Replica;
use laxity_requests::request::{ApplicationId, ClassId, Importance, RequestId, Slo, Spec};
use laxity_requests::{Span, Time};

const RUNNING: u64 = 256;
const QUEUED: u64 = 10_000;
const TICK: Span = Span::from_millis(20);

fn spec(id: u64, now: Time) -> Spec {
    Spec {
        id: RequestId(id),
        arrival: now,
        prompt: 200 + (id * 37 % 800) as u32,
        output_max: 100_000,
        ready: 0,
        generated: 0,
        class: ClassId((id % 13) as u16),
        application: ApplicationId((id % 8) as u32),
        importance: Importance::Important,
        slo: Slo::Interactive {
            ttft: 4_000_000_000,
            tbt: 70_000_000,
        },
    }
}

struct Even;

impl Tagger for Even {
    fn tag(&mut self, spec: &Spec) -> Option<Tags> {
        let length = 50.0 + (spec.id.0 * 53 % 900) as f64;
        Some(Tags { task: 0, length })
    }
}

/// A replica at the load that is measured.
fn loaded(agent: Agent) -> (Replica, Time) {
    let mut replica = Replica::new(Pool::new(4_000_000, 16), 0, Box::new(agent));
    let mut now = Time(1);
    for id in 0..RUNNING {
        replica.handle(now, &Event::Arrived(spec(id, now)));
    }
    while u64::from(replica.load().decoding) < RUNNING {
        turn(&mut replica, &mut now);
    }
    for id in RUNNING..RUNNING + QUEUED {
        now = now + Span(1000);
        replica.handle(now, &Event::Arrived(spec(id, now)));
    }
    (replica, now)
}

fn turn(replica: &mut Replica, now: &mut Time) {
    let plan = replica.plan(*now);
    *now = *now + TICK;
    black_box(plan);
    let done = Event::Done {
        took: TICK,
        finished: Vec::new(),
    };
    replica.handle(*now, &done);
}

fn cognition() -> Cognition {
    let perception = Paced::new(Even, Span::ZERO);
    Cognition::new(Box::new(perception), Box::new(Measured::default()))
}

fn benches(c: &mut Criterion) {
    let mut group = c.benchmark_group("iteration");
    let kinds = Kind::ALL.into_iter().map(Some).chain([None]);
    for kind in kinds {
        let agent = || match kind {
            Some(kind) => Agent::fixed(kind, Config::default(), cognition()),
            None => Agent::new(Config::default(), cognition(), Box::new(Rules::default())),
        };
        let (mut replica, mut now) = loaded(agent());
        group.bench_function(kind.map_or("rules", Kind::name), |b| {
            b.iter_custom(|times| {
                let mut spent = Duration::ZERO;
                for _ in 0..times {
                    let began = Instant::now();
                    turn(&mut replica, &mut now);
                    spent += began.elapsed();
                }
                spent
            });
        });
    }
    group.finish();
    let examples: Vec<(Spec, u32)> = (0..4000)
        .map(|id| (spec(id, Time::ZERO), 50 + (id * 53 % 900) as u32))
        .collect();
    let forest = Trained::fit(&examples, 1).expect("examples");
    let asked = spec(77, Time::ZERO);
    c.bench_function("perception/forest", |b| {
        b.iter(|| black_box(forest.length(black_box(&asked))));
    });
}

criterion_group!(all, benches);
criterion_main!(all);
