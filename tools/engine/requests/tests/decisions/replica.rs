//! The plans of a replica under every discipline, with little and with much memory, and its load
//! after each event.

use std::collections::{BTreeMap, BTreeSet};

use laxity_requests::baseline::{Fixed, LineOrder, Relegating};
use laxity_requests::discipline::{Discipline, Rank, Start, View};
use laxity_requests::hmas::cognition::Cognition;
use laxity_requests::hmas::perception::{Paced, Tagger, Tags};
use laxity_requests::hmas::pool::Kind;
use laxity_requests::hmas::prediction::Measured;
use laxity_requests::hmas::{Agent, Config, statera};
use laxity_requests::iteration::{Event, Iteration as _, Load, Plan};
use laxity_requests::job::Job;
use laxity_requests::kv::Pool;
use laxity_requests::latency::{Composition, Latency};
use laxity_requests::qoserve::{Alpha, Chunking, Options, Preemption, QoServe, Relegation};
use laxity_requests::replica::Replica;
use laxity_requests::request::{ApplicationId, ClassId, Importance, RequestId, Slo, Spec};
use laxity_requests::{Span, Time};

use super::{Dice, Tally, table};

const MS: u64 = 1_000_000;

/// A latency model: 5 ms, 100 µs per token, 10 ns per pair and 16 ns per token of context.
struct Linear;

impl Latency for Linear {
    fn iteration(&self, of: &Composition) -> Span {
        let tokens = u64::from(of.prefill_tokens + of.decodes);
        Span(5 * MS + tokens * 100_000 + of.prefill_pairs * 10 + of.decode_context * 16)
    }
}

struct Even;

impl Tagger for Even {
    fn tag(&mut self, spec: &Spec) -> Option<Tags> {
        let length = 5.0 + (spec.id.0 * 53 % 90) as f64;
        let task = (spec.id.0 % 4) as u16;
        (!spec.id.0.is_multiple_of(7)).then_some(Tags { task, length })
    }
}

/// A discipline that no policy resembles but that a replica must handle: the latest job first, one
/// at a time, and prompts whose laxity shrinks.
struct Odd;

impl Discipline for Odd {
    fn name(&self) -> &'static str {
        "odd"
    }

    fn rank(&self, job: &Job) -> Rank {
        Rank(-i64::from(job.prefill_left()) - i64::from(job.generated % 3))
    }

    fn budget(&mut self, _: Time, _: &dyn View) -> u32 {
        24
    }

    fn start(&mut self, _: Time, job: &Job, view: &dyn View) -> Start {
        match job.id().0 % 5 {
            0 => Start::Later,
            1 if view.pool().used() > 8 => Start::Nobody,
            2 => Start::Skip(Rank(-20)),
            _ => Start::Now,
        }
    }

    fn begun_first(&self) -> bool {
        false
    }

    fn goes_on(&mut self, _: Time, job: &Job) -> bool {
        job.id().0.is_multiple_of(3)
    }

    fn relegate(&mut self, now: Time, view: &dyn View) -> Vec<RequestId> {
        let late = view.in_line().filter(|job| now > job.spec.first_deadline());
        late.map(Job::id).take(3).collect()
    }

    fn relegated_keep_blocks(&self) -> bool {
        true
    }

    fn decodes_max(&self) -> usize {
        7
    }
}

type Boxed = Box<dyn Discipline + Send>;
type Make = Box<dyn Fn() -> Boxed>;

fn agent(kind: Kind, config: Config) -> Boxed {
    let cognition = Cognition::new(
        Box::new(Paced::new(Even, Span::from_millis(3))),
        Box::new(Measured::default()),
    );
    Box::new(Agent::new(kind, config, cognition))
}

/// Returns options with limits of Statera that are small enough to have an effect.
fn tight() -> Config {
    Config {
        chunk: 64,
        chunk_min: 8,
        statera: Some(statera::Config {
            concurrency: 20,
            decodes: 12,
            ..statera::Config::default()
        }),
        ..Config::default()
    }
}

fn qoserve(options: Options) -> Boxed {
    Box::new(QoServe::new(options, Linear))
}

/// Returns all disciplines by name.
fn disciplines() -> Vec<(String, Make)> {
    let mut all: Vec<(String, Make)> = Vec::new();
    for order in [LineOrder::Fcfs, LineOrder::Edf, LineOrder::Srpf] {
        let inner = Fixed { order, tokens: 96 };
        let name = inner.name();
        all.push((name.to_owned(), Box::new(move || Box::new(inner))));
        let name = format!("{name}_relegating");
        let latency = || Linear;
        let make = move || -> Boxed { Box::new(Relegating { inner, latency: latency() }) };
        all.push((name, Box::new(make)));
    }
    let chunking = Chunking::Dynamic { least: 16, most: 300, step: 8 };
    let whole = Options { chunking, ..Options::default() };
    let with = |change: fn(&mut Options)| {
        let mut options = whole;
        change(&mut options);
        options
    };
    let options = [
        ("qoserve", whole),
        ("qoserve_dc", Options { chunking, ..Options::chunking_only() }),
        (
            "qoserve_adaptive",
            with(|o| {
                o.alpha = Alpha::Adaptive { low: MS, high: 8 * MS, busy: Span::from_millis(200) };
            }),
        ),
        ("qoserve_fixed", with(|o| o.chunking = Chunking::Fixed(96))),
        ("qoserve_strict", with(|o| (o.relegation, o.keep_blocks) = (Relegation::Strict, true))),
        ("qoserve_never", with(|o| (o.preemption, o.hints) = (Preemption::Never, None))),
        ("qoserve_always", with(|o| o.preemption = Preemption::Always)),
    ];
    for (name, options) in options {
        all.push((name.to_owned(), Box::new(move || qoserve(options))));
    }
    for kind in Kind::ALL {
        let make = move || agent(kind, tight());
        all.push((format!("hmas_{}", kind.name()), Box::new(make)));
    }
    all.push(("hmas_default".to_owned(), Box::new(|| agent(Kind::Sjf, Config::default()))));
    all.push(("odd".to_owned(), Box::new(|| Box::new(Odd))));
    all
}

struct Run {
    replica: Replica,
    dice: Dice,
    now: Time,
    outputs: BTreeMap<RequestId, u32>,
    live: BTreeSet<RequestId>,
    reserved: Vec<Spec>,
    next: u64,
    tally: Tally,
}

impl Run {
    fn new(discipline: Boxed, blocks: u32, seed: u64, tally: Tally) -> Self {
        Self {
            replica: Replica::new(Pool::new(blocks, 4), 1, discipline),
            dice: Dice(seed),
            now: Time(1_000 * MS),
            outputs: BTreeMap::new(),
            live: BTreeSet::new(),
            reserved: Vec::new(),
            next: 0,
            tally,
        }
    }

    fn spec(&mut self) -> Spec {
        let dice = &mut self.dice;
        let id = RequestId(self.next);
        self.next += 1;
        let prompt = 1 + dice.below(60) as u32;
        let output = 1 + dice.below(30) as u32;
        let scale = 1 + dice.below(60);
        let slo = if dice.one_in(2) {
            Slo::Interactive { ttft: scale * 20 * MS, tbt: scale * MS }
        } else {
            Slo::Batch { ttlt: scale * 100 * MS }
        };
        let ready = if dice.one_in(4) { dice.below(70) as u32 } else { 0 };
        self.outputs.insert(id, output);
        Spec {
            id,
            arrival: Time(self.now.0 - dice.below(50) * MS),
            prompt,
            output_max: output + 3,
            ready: ready.min(prompt),
            generated: 0,
            class: ClassId((prompt % 3) as u16),
            application: ApplicationId(output % 3),
            importance: if dice.one_in(3) { Importance::Low } else { Importance::Important },
            slo,
        }
    }

    fn tell(&mut self, event: &Event) {
        self.replica.handle(self.now, event);
        self.refusals();
        // The accepted tables are older than `relegated`, so the field isn't part of them.
        self.tally.add(&Load { relegated: 0, ..self.replica.load() });
    }

    fn refusals(&mut self) {
        while let Some(refusal) = self.replica.poll_refusal() {
            self.live.remove(&refusal.request);
            self.tally.add(&refusal);
            self.tally.count("refused", 1);
            // The reserved blocks aren't needed any more.
            self.replica.handle(self.now, &Event::Cancelled(refusal.request));
        }
    }

    fn arrive(&mut self) {
        let mut spec = self.spec();
        if self.dice.one_in(8) {
            // Another instance computed the prompt, and its KV is on its way.
            spec = Spec { ready: spec.prompt, generated: 1, ..spec };
            let kept = self.replica.reserve(spec.id, spec.prompt + 1).is_ok();
            self.tally.add(&kept);
            if kept && self.dice.one_in(2) {
                self.reserved.push(spec);
                return;
            }
        }
        self.live.insert(spec.id);
        self.tell(&Event::Arrived(spec));
    }

    fn finished(&mut self, plan: &Plan) -> Vec<RequestId> {
        let chunks = plan.chunks.iter().filter(|c| c.last).map(|c| c.request);
        let steps = plan.steps.iter().map(|step| step.request);
        let mut finished = Vec::new();
        for request in chunks.chain(steps) {
            let left = self.outputs.get_mut(&request).expect("it came");
            *left = left.saturating_sub(1);
            if *left == 0 {
                finished.push(request);
                self.live.remove(&request);
            }
        }
        finished
    }

    fn compute(&mut self) -> bool {
        let Some(plan) = self.replica.plan(self.now) else {
            return false;
        };
        self.tally.add(&plan);
        self.note(&plan);
        self.refusals();
        let took = Linear.iteration(&plan.composition());
        if self.dice.one_in(10) {
            self.cancel();
        }
        self.now = self.now + took;
        let finished = self.finished(&plan);
        self.tell(&Event::Done { took, finished });
        true
    }

    fn note(&mut self, plan: &Plan) {
        let composition = plan.composition();
        let tally = &mut self.tally;
        tally.count("plans", 1);
        tally.count("prompt tokens", composition.prefill_tokens as usize);
        tally.count("steps", plan.steps.len());
        tally.count("drops", plan.drops.len());
        tally.show(|| {
            let drops = plan.drops.iter().map(|drop| format!(" -{}", drop.request.0));
            let chunks = plan.chunks.iter();
            let chunks = chunks.map(|chunk| format!(" {}+{}", chunk.request.0, chunk.tokens));
            let steps = plan.steps.iter().map(|step| format!(" {}", step.request.0));
            let (drops, chunks) = (drops.collect::<String>(), chunks.collect::<String>());
            format!("drops{drops}; chunks{chunks}; steps{}", steps.collect::<String>())
        });
    }

    fn cancel(&mut self) {
        let at = self.dice.below(self.live.len() as u64) as usize;
        if let Some(request) = self.live.iter().nth(at).copied() {
            self.live.remove(&request);
            self.tell(&Event::Cancelled(request));
        }
    }

    fn step(&mut self, blocks: u32) {
        match self.dice.below(24) {
            0..9 => self.arrive(),
            9 => self.cancel(),
            10 => {
                let capacity = blocks / 2 + self.dice.below(u64::from(blocks / 2) + 1) as u32;
                self.tell(&Event::Capacity(capacity));
            }
            11 => {
                if let Some(spec) = self.reserved.pop() {
                    self.live.insert(spec.id);
                    self.tell(&Event::Arrived(spec));
                }
            }
            12 => self.now = self.now + Span(self.dice.below(40 * MS)),
            _ => {
                self.compute();
            }
        }
        assert!(self.replica.pool().is_balanced() && self.replica.is_balanced());
    }

    /// Runs all remaining work.
    fn end(mut self, blocks: u32) -> Tally {
        self.tell(&Event::Capacity(blocks));
        while let Some(spec) = self.reserved.pop() {
            self.live.insert(spec.id);
            self.tell(&Event::Arrived(spec));
        }
        let mut rounds = 0;
        while self.compute() {
            rounds += 1;
            assert!(rounds < 200_000, "no end in sight");
        }
        assert_eq!(self.replica.pool().used(), 0);
        self.tally.count("ms", (self.now.0 / MS) as usize);
        self.tally
    }
}

/// Records runs with little and much memory, with an exchange of the discipline, and with a long
/// queue.
fn decided(make: &dyn Fn() -> Boxed) -> String {
    let mut rows = Vec::new();
    for (name, blocks) in [("24 blocks", 24), ("90 blocks", 90), ("4000 blocks", 4_000)] {
        let mut tally = Tally::new();
        for seed in 0..12 {
            let mut run = Run::new(make(), blocks, seed * 3 + u64::from(blocks), tally);
            for step in 0..400 {
                run.step(blocks);
                if step == 200 && seed % 3 == 0 {
                    let other = Fixed { order: LineOrder::Srpf, tokens: 40 };
                    let own = run.replica.exchange(Box::new(other));
                    for _ in 0..20 {
                        run.step(blocks);
                    }
                    drop(own);
                    run.replica.exchange(make());
                }
            }
            tally = run.end(blocks);
        }
        rows.push((name, tally));
    }
    let mut run = Run::new(make(), 20_000, 77, Tally::new());
    for _ in 0..600 {
        run.arrive();
    }
    for _ in 0..300 {
        run.compute();
        run.arrive();
    }
    rows.push(("long line", run.end(20_000)));
    table(&rows)
}

#[test]
fn a_replica_decides_as_it_did_under_every_discipline() {
    for (name, make) in disciplines() {
        insta::assert_snapshot!(name, decided(&make));
    }
}
