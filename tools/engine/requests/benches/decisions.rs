//! The costs of decisions. A replica's iteration (its events and the next plan) with 256 decoding
//! requests and 10 000 queued ones may take 20 µs. A dispatch over 64 instances may take 10 µs.
//!
//! `cargo bench -p laxity-requests` prints the table. `-- NAME` selects rows by a part of the name.
//! With `-- --strict` the exit status is 1 if a median is above its limit. Times are of single
//! decisions. The fastest shows the cost of the code, and the median includes the machine. If they
//! differ much, other programs were running.

use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use laxity_requests::baseline::{CentralEdf, Fixed, LeastLoaded, LeastWork, LineOrder};
use laxity_requests::discipline::Discipline;
use laxity_requests::dispatch::{self, Dispatch, Role};
use laxity_requests::hmas::cognition::Cognition;
use laxity_requests::hmas::perception::{Perception, Tagger, Tags};
use laxity_requests::hmas::pool::Kind;
use laxity_requests::hmas::prediction::Prediction;
use laxity_requests::hmas::{self, Agent};
use laxity_requests::hyperflexis::{self, HyperFlexis, Linear};
use laxity_requests::iteration::{self, Load, Plan};
use laxity_requests::kv::Pool;
use laxity_requests::latency::{Composition, Latency};
use laxity_requests::learned::Learned;
use laxity_requests::qoserve::{self, QoServe};
use laxity_requests::replica::Replica;
use laxity_requests::request::{
    ApplicationId, ClassId, Importance, InstanceId, RequestId, Slo, Spec,
};
use laxity_requests::{Span, Time};

const MS: u64 = 1_000_000;
const RUNNING: u64 = 256;
const QUEUED: u64 = 10_000;
const WIDTH: u32 = 64;

trait Subject {
    fn prepare(&mut self) {}
    fn decide(&mut self);
}

struct Row {
    name: String,
    limit_us: f64,
    make: Box<dyn Fn() -> Box<dyn Subject>>,
}

fn row<S: Subject + 'static>(name: String, limit_us: f64, make: impl Fn() -> S + 'static) -> Row {
    Row { name, limit_us, make: Box::new(move || Box::new(make())) }
}

/// A request. Those below [`RUNNING`] have computed their prompt.
fn spec(id: u64, arrival: Time, running: bool) -> Spec {
    let prompt = 500 + (id * 7_919 % 3_000) as u32;
    let slo = match id % 3 {
        0 => Slo::Interactive { ttft: 60_000 * MS, tbt: 50 * MS },
        1 => Slo::Batch { ttlt: 600_000 * MS },
        _ => Slo::Batch { ttlt: 1_800_000 * MS },
    };
    Spec {
        id: RequestId(id),
        arrival,
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

/// A machine's latency: 8 ms, 50 µs per token, and 2 ns per pair.
fn machine(of: &Composition) -> Span {
    let tokens = u64::from(of.prefill_tokens + of.decodes);
    Span(8 * MS + tokens * 50_000 + of.prefill_pairs * 2)
}

/// A latency model as the engine's, which has learned the machine.
fn learned() -> Arc<dyn Latency + Send + Sync> {
    let learned = Learned::default();
    for number in 1..200 {
        let of = Composition::default().with_chunk(number * 37 % 900, 16 + number * 61 % 900);
        let of = (0..number % 64).fold(of, |of, at| of.with_decode(50 + at * 101 % 700));
        learned.ran(&of, machine(&of));
    }
    Arc::new(learned)
}

struct Even;

impl Tagger for Even {
    fn tag(&mut self, spec: &Spec) -> Option<Tags> {
        Some(Tags { task: 0, length: 50.0 + (spec.id.0 * 53 % 900) as f64 })
    }
}

/// A full replica. Its driver ends each request with its prompt, so that as many decode as before.
struct Loaded {
    replica: Replica,
    now: Time,
    under_way: Option<Plan>,
}

impl Loaded {
    fn new(discipline: Box<dyn Discipline + Send>) -> Self {
        let replica = Replica::new(Pool::new(1 << 20, 16), 0, discipline);
        let mut loaded = Self { replica, now: Time(1_000 * MS), under_way: None };
        for id in 0..RUNNING + QUEUED {
            let spec = spec(id, Time(id * 1_000), id < RUNNING);
            loaded.replica.handle(loaded.now, &iteration::Event::Arrived(spec));
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
    fn decide(&mut self) {
        if let Some(plan) = self.under_way.take() {
            let took = machine(&plan.composition());
            self.now = self.now + took;
            let finished = plan.chunks.iter().filter(|chunk| chunk.last);
            let finished = finished.map(|chunk| chunk.request).collect();
            self.replica.handle(self.now, &iteration::Event::Done { took, finished });
            // A dispatcher reads the load after each iteration.
            black_box(self.replica.load());
        }
        self.under_way = self.replica.plan(self.now);
    }
}

fn iterations() -> Vec<Row> {
    type Make = fn() -> Box<dyn Discipline + Send>;
    fn agent(kind: Kind) -> Box<dyn Discipline + Send> {
        let perception = Perception::new(Even, Span::ZERO);
        let prediction = Prediction::new(learned(), 512);
        let cognition = Cognition::new(perception, prediction);
        Box::new(Agent::new(kind, hmas::Config::default(), cognition))
    }
    let policies: [(&str, Make); 6] = [
        ("fcfs", || Box::new(Fixed { order: LineOrder::Fcfs, tokens: 512 })),
        ("edf", || Box::new(Fixed { order: LineOrder::Edf, tokens: 512 })),
        ("srpf", || Box::new(Fixed { order: LineOrder::Srpf, tokens: 512 })),
        ("qoserve", || Box::new(QoServe::new(qoserve::Options::default(), learned()))),
        ("hmas sjf", || agent(Kind::Sjf)),
        ("hmas two_lane", || agent(Kind::TwoLane)),
    ];
    let row = |(name, make): (&str, Make)| {
        row(format!("iteration: {name}"), 20.0, move || Loaded::new(make()))
    };
    policies.into_iter().map(row).collect()
}

#[derive(Clone, Copy)]
enum Situation {
    /// A request arrives while all instances are full, and each is asked about it.
    Arrives,
    /// An instance without room reports.
    Full,
    /// An instance reports room for one request and more.
    Takes,
}

/// A dispatcher whose instances are full, before which requests wait.
struct Waiting {
    dispatch: Box<dyn Dispatch>,
    situation: Situation,
    now: Time,
    next: u64,
    event: dispatch::Event,
}

fn report(at: u32, blocks_free: u32) -> dispatch::Event {
    let load = Load {
        running: WIDTH,
        decoding: WIDTH,
        decode_context: 32_000,
        blocks: 8_192,
        blocks_free,
        ..Load::default()
    };
    dispatch::Event::Load { instance: InstanceId(at), load, took: 20 * MS }
}

impl Waiting {
    fn new(dispatch: Box<dyn Dispatch>, situation: Situation) -> Self {
        let now = Time(1_000_000 * MS);
        let mut waiting = Self { dispatch, situation, now, next: 0, event: report(0, 0) };
        for at in 0..WIDTH {
            let up = dispatch::Event::Up { instance: InstanceId(at), role: Role::Whole };
            waiting.dispatch.handle(now, &up);
            waiting.dispatch.handle(now, &report(at, 0));
        }
        for _ in 0..QUEUED {
            let event = waiting.arrival();
            waiting.dispatch.handle(now, &event);
        }
        waiting.drain();
        waiting
    }

    fn arrival(&mut self) -> dispatch::Event {
        self.next += 1;
        dispatch::Event::Arrived(spec(self.next, self.now, false))
    }

    fn drain(&mut self) {
        while self.dispatch.poll_decision(self.now).is_some() {}
    }
}

impl Subject for Waiting {
    fn prepare(&mut self) {
        self.now = self.now + Span(10_000);
        self.drain();
        let at = 7 + (self.next % 50) as u32;
        self.event = match self.situation {
            Situation::Arrives => self.arrival(),
            Situation::Full => report(at, 0),
            Situation::Takes => report(at, 200),
        };
    }

    fn decide(&mut self) {
        self.dispatch.handle(self.now, &self.event);
        self.drain();
        black_box(self.dispatch.next_deadline());
    }
}

fn dispatches() -> Vec<Row> {
    type Make = fn() -> Box<dyn Dispatch>;
    const MODEL: Linear = Linear { prefill: [8e6, 60_000.0, 1.5], decode: [7e6, 12.0, 20_000.0] };
    let policies: [(&str, Make); 4] = [
        ("least loaded", || Box::new(LeastLoaded::default())),
        ("least work", || Box::new(LeastWork::new(MODEL))),
        ("edf with admission", || Box::new(CentralEdf::new(MODEL, true, 2_048, 16))),
        ("hyperflexis", || Box::new(HyperFlexis::new(hyperflexis::Options::new(MODEL, 16)))),
    ];
    let situations = [
        ("a request arrives", Situation::Arrives),
        ("a full instance reports", Situation::Full),
        ("an instance takes", Situation::Takes),
    ];
    let each = |(name, make): (&'static str, Make)| {
        situations.map(move |(what, situation)| {
            row(format!("dispatch: {name}, {what}"), 10.0, move || Waiting::new(make(), situation))
        })
    };
    policies.into_iter().flat_map(each).collect()
}

/// Returns the times of a row's decisions in µs, in rising order.
fn time(row: &Row) -> Vec<f64> {
    let mut samples = Vec::new();
    // A subject is made again after 64 decisions, so that ended requests don't change the load.
    for _ in 0..12 {
        let mut subject = (row.make)();
        for turn in 0..64 {
            subject.prepare();
            let begun = Instant::now();
            subject.decide();
            let took = begun.elapsed();
            // The first decisions fill caches and don't count.
            if turn >= 4 {
                samples.push(took.as_secs_f64() * 1e6);
            }
        }
    }
    samples.sort_by(f64::total_cmp);
    samples
}

fn main() -> ExitCode {
    // Cargo passes `--bench`.
    let (flags, names): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|argument| argument.starts_with("--"));
    let mut missed = 0;
    println!("{:58} {:>9} {:>9} {:>9} {:>7}", "µs", "fastest", "median", "99 %", "limit");
    for row in iterations().into_iter().chain(dispatches()) {
        if !names.is_empty() && !names.iter().any(|part| row.name.contains(part.as_str())) {
            continue;
        }
        let samples = time(&row);
        let at = |share: f64| samples[(share * (samples.len() - 1) as f64) as usize];
        let (median, limit) = (at(0.5), row.limit_us);
        let verdict = if median > limit { "MISSED" } else { "ok" };
        missed += usize::from(median > limit);
        println!(
            "{:58} {:>9.2} {:>9.2} {:>9.2} {limit:>7} {verdict}",
            row.name,
            at(0.0),
            median,
            at(0.99)
        );
    }
    println!("{missed} missed");
    let strict = flags.iter().any(|flag| flag == "--strict");
    if strict && missed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
