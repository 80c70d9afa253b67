//! The costs of decisions. A replica's iteration (its events and the next plan) with 256 decoding
//! requests and 10 000 queued ones may take 20 µs.
//!
//! `cargo bench -p laxity-requests` prints the table. `-- NAME` selects rows by a part of the name.
//! With `-- --strict` the exit status is 1 if a median is above its limit. Times are of single
//! decisions. The fastest shows the cost of the code, and the median includes the machine. If they
//! differ much, other programs were running.

use std::hint::black_box;
use std::process::ExitCode;
use std::time::Instant;

use laxity_requests::baseline::{Fixed, LineOrder};
use laxity_requests::discipline::Discipline;
use laxity_requests::hmas::cognition::Cognition;
use laxity_requests::hmas::perception::{Perception, Tagger, Tags};
use laxity_requests::hmas::pool::Kind;
use laxity_requests::hmas::prediction::Prediction;
use laxity_requests::hmas::{self, Agent};
use laxity_requests::iteration::{Event, Plan};
use laxity_requests::kv::Pool;
use laxity_requests::latency::Composition;
use laxity_requests::learned::Learned;
use laxity_requests::qoserve::{QoServe, QoServeOptions};
use laxity_requests::replica::Replica;
use laxity_requests::request::{ApplicationId, ClassId, Importance, RequestId, Slo, Spec};
use laxity_requests::{Span, Time};

const MS: u64 = 1_000_000;
const RUNNING: u64 = 256;
const QUEUED: u64 = 10_000;
/// Highest allowed median of the time of a decision, in µs.
const LIMIT: f64 = 20.0;

type Make = fn() -> Box<dyn Discipline + Send>;

/// Returns a request. If it is `running`, its prompt is computed.
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
fn learned() -> Learned {
    let learned = Learned::default();
    for number in 1..200 {
        let of = Composition::default().with_chunk(number * 37 % 900, 16 + number * 61 % 900);
        let of = (0..number % 64).fold(of, |of, at| of.with_decode(50 + at * 101 % 700));
        learned.ran(&of, machine(&of));
    }
    learned
}

struct Even;

impl Tagger for Even {
    fn tag(&mut self, spec: &Spec) -> Option<Tags> {
        Some(Tags { task: 0, length: 50.0 + (spec.id.0 * 53 % 900) as f64 })
    }
}

/// A replica with [`RUNNING`] and [`QUEUED`] requests. Its driver ends a request as soon as its
/// prompt is computed, so that the number of decoding requests stays the same.
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
            loaded.replica.handle(loaded.now, &Event::Arrived(spec));
        }
        for _ in 0..20 {
            loaded.decide();
        }
        let load = loaded.replica.load();
        assert!(u64::from(load.decoding) >= RUNNING - 8 && load.waiting >= 9_900, "{load:?}");
        loaded
    }

    fn decide(&mut self) {
        if let Some(plan) = self.under_way.take() {
            let took = machine(&plan.composition());
            self.now = self.now + took;
            let finished = plan.chunks.iter().filter(|chunk| chunk.last);
            let finished = finished.map(|chunk| chunk.request).collect();
            self.replica.handle(self.now, &Event::Done { took, finished });
            // A dispatcher reads the load after each iteration.
            black_box(self.replica.load());
        }
        self.under_way = self.replica.plan(self.now);
    }
}

fn policies() -> [(&'static str, Make); 6] {
    fn agent(kind: Kind) -> Box<dyn Discipline + Send> {
        let perception = Perception::new(Even, Span::ZERO);
        let prediction = Prediction::new(learned(), 512);
        let cognition = Cognition::new(perception, prediction);
        Box::new(Agent::new(kind, hmas::Config::default(), cognition))
    }
    [
        ("fcfs", || Box::new(Fixed { order: LineOrder::Fcfs, tokens: 512 })),
        ("edf", || Box::new(Fixed { order: LineOrder::Edf, tokens: 512 })),
        ("srpf", || Box::new(Fixed { order: LineOrder::Srpf, tokens: 512 })),
        ("qoserve", || Box::new(QoServe::new(QoServeOptions::default(), learned()))),
        ("hmas sjf", || agent(Kind::Sjf)),
        ("hmas srtf", || agent(Kind::Srtf)),
    ]
}

/// Returns the times of a policy's decisions in µs, in rising order.
fn time(make: Make) -> Vec<f64> {
    let mut samples = Vec::new();
    // A replica is made again after 64 decisions, so that ended requests don't change the load.
    for _ in 0..12 {
        let mut loaded = Loaded::new(make());
        for turn in 0..64 {
            let begun = Instant::now();
            loaded.decide();
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
    for (name, make) in policies() {
        if !names.is_empty() && !names.iter().any(|part| name.contains(part.as_str())) {
            continue;
        }
        let samples = time(make);
        let at = |share: f64| samples[(share * (samples.len() - 1) as f64) as usize];
        let median = at(0.5);
        let verdict = if median > LIMIT { "MISSED" } else { "ok" };
        missed += usize::from(median > LIMIT);
        let (fastest, most) = (at(0.0), at(0.99));
        println!("{name:58} {fastest:>9.2} {median:>9.2} {most:>9.2} {LIMIT:>7} {verdict}");
    }
    println!("{missed} missed");
    let strict = flags.iter().any(|flag| flag == "--strict");
    if strict && missed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
