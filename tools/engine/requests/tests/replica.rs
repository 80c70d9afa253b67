//! Properties of a replica under random events, with every discipline: no request is lost, sums of
//! blocks agree, memory is never exceeded, and each request that isn't refused ends. Under H-MAS no
//! request waits for perception, and short requests pass where they should.

use std::collections::{HashMap, HashSet};

use laxity_requests::baseline::{Fixed, LineOrder, Relegating};
use laxity_requests::discipline::{Discipline, Rank, View};
use laxity_requests::hmas::cognition::Cognition;
use laxity_requests::hmas::perception::{Perception, Tagger, Tags};
use laxity_requests::hmas::pool::Kind;
use laxity_requests::hmas::prediction::Prediction;
use laxity_requests::hmas::statera::StateraConfig;
use laxity_requests::hmas::{Agent, Config};
use laxity_requests::iteration::{Event, Plan};
use laxity_requests::job::Job;
use laxity_requests::kv::Pool;
use laxity_requests::latency::{Composition, Latency};
use laxity_requests::learned::Learned;
use laxity_requests::qoserve::{Chunking, QoServe, QoServeOptions, Relegation};
use laxity_requests::replica::Replica;
use laxity_requests::request::{ApplicationId, Importance, RequestId, Slo, Spec};
use laxity_requests::{Span, Time};
use proptest::prelude::*;

const BLOCKS: u32 = 32;
const BLOCK_TOKENS: u32 = 4;

/// Drives a replica, with its own account of all tokens. Checks that no request is computed twice
/// at once or beyond its blocks, that memory is never exceeded, and that refused requests exist.
struct Driver {
    replica: Replica,
    now: Time,
    live: HashSet<RequestId>,
    drops: usize,
    tick: Span,
    blocks: u32,
    outputs: HashMap<RequestId, u32>,
    given: HashMap<RequestId, u32>,
    next: u64,
}

impl Driver {
    fn new(discipline: Box<dyn Discipline + Send>, blocks: u32, tick: Span) -> Self {
        Self {
            replica: Replica::new(Pool::new(blocks, BLOCK_TOKENS), 1, discipline),
            now: Time::ZERO,
            live: HashSet::new(),
            drops: 0,
            tick,
            blocks,
            outputs: HashMap::new(),
            given: HashMap::new(),
            next: 0,
        }
    }

    /// Adds a request that generates `output` tokens.
    fn arrive(&mut self, prompt: u32, output: u32, ready: u32, slo: Slo, important: bool) {
        let spec = Spec {
            id: RequestId(self.next),
            arrival: self.now,
            prompt,
            output_max: output + 3,
            ready: ready.min(prompt),
            application: ApplicationId(prompt % 3),
            importance: if important { Importance::Important } else { Importance::Low },
            slo,
            ..Spec::default()
        };
        self.next += 1;
        self.outputs.insert(spec.id, output);
        self.live.insert(spec.id);
        self.replica.handle(self.now, &Event::Arrived(spec));
        self.refusals();
    }

    fn cancel(&mut self, at: usize) {
        let mut live: Vec<_> = self.live.iter().copied().collect();
        live.sort();
        if !live.is_empty() {
            let request = live[at % live.len()];
            self.live.remove(&request);
            self.replica.handle(self.now, &Event::Cancelled(request));
        }
    }

    fn refusals(&mut self) {
        while let Some(refusal) = self.replica.poll_refusal() {
            assert!(self.live.remove(&refusal.request), "{refusal:?} of nobody");
        }
    }

    /// Runs an iteration. Returns the requests that got a token, or `None` if there was no plan.
    fn compute(&mut self) -> Option<Vec<RequestId>> {
        let plan = self.replica.plan(self.now)?;
        self.drops += plan.drops.len();
        self.refusals();
        self.check_plan(&plan);
        self.now = self.now + self.tick;
        let chunks = plan.chunks.iter().filter(|c| c.last).map(|c| c.request);
        let tokens: Vec<_> = chunks.chain(plan.steps.iter().map(|s| s.request)).collect();
        let mut finished = Vec::new();
        for request in &tokens {
            let given = self.given.entry(*request).or_default();
            *given += 1;
            if *given >= self.outputs[request] {
                finished.push(*request);
                self.live.remove(request);
            }
        }
        let took = self.tick;
        self.replica.handle(self.now, &Event::Done { took, finished });
        Some(tokens)
    }

    fn check_plan(&self, plan: &Plan) {
        let pool = self.replica.pool();
        assert!(pool.used() <= self.blocks);
        let mut seen = HashSet::new();
        let chunks = plan.chunks.iter().map(|c| (c.request, c.prefix + c.tokens));
        let steps = plan.steps.iter().map(|s| (s.request, s.context + 1));
        for (request, tokens) in chunks.chain(steps) {
            assert!(seen.insert(request), "{request:?} is computed twice at once");
            let held = pool.held(request) * BLOCK_TOKENS;
            assert!(held >= tokens, "{request:?} computes {tokens} and holds {held}");
        }
        assert!(plan.chunks.iter().all(|chunk| chunk.tokens > 0));
    }

    /// Checks that the replica has every live request and that its sums agree.
    fn check(&self) {
        assert!(self.replica.pool().is_balanced() && self.replica.is_balanced());
        for request in &self.live {
            assert!(self.replica.job(*request).is_some(), "{request:?} was lost");
        }
    }

    /// Runs iterations until there is no plan. All requests have ended and all blocks are free
    /// then.
    fn finish(&mut self) {
        let mut rounds = 0;
        while self.compute().is_some() {
            self.check();
            rounds += 1;
            assert!(rounds < 40_000, "no end in sight: {:?}", self.replica);
        }
        assert!(self.live.is_empty(), "never ended: {:?}", self.live);
        assert_eq!(self.replica.pool().used(), 0);
    }
}

#[derive(Clone, Debug)]
enum Step {
    Arrive { prompt: u32, output: u32, ready: u32, slo: u64, interactive: bool, important: bool },
    Cancel(usize),
    // A number of iterations.
    Compute(u8),
    Idle,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (1..90_u32, 1..40_u32, 0..70_u32, 1..100_u64, any::<bool>(), any::<bool>()).prop_map(
            |(prompt, output, ready, slo, interactive, important)| {
                Step::Arrive { prompt, output, ready, slo, interactive, important }
            }
        ),
        1 => any::<usize>().prop_map(Step::Cancel),
        7 => (1..12_u8).prop_map(Step::Compute),
        1 => Just(Step::Idle),
    ]
}

/// A discipline that a failed test prints with its options.
struct Chosen {
    options: String,
    discipline: Box<dyn Discipline + Send>,
    /// Time of an iteration.
    tick: Span,
}

impl std::fmt::Debug for Chosen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.options)
    }
}

fn chosen(settings: impl std::fmt::Debug, discipline: impl Discipline + Send + 'static) -> Chosen {
    let options = format!("{settings:?}");
    Chosen { options, discipline: Box::new(discipline), tick: Span(10) }
}

fn fixed() -> impl Strategy<Value = Fixed> {
    let order = prop_oneof![Just(LineOrder::Fcfs), Just(LineOrder::Edf), Just(LineOrder::Srpf)];
    (order, 1..40_u32).prop_map(|(order, tokens)| Fixed { order, tokens })
}

/// A latency model for deadlines of tens to thousands of nanoseconds.
struct Linear;

impl Latency for Linear {
    fn iteration(&self, of: &Composition) -> Span {
        Span(3 + u64::from(of.prefill_tokens + of.decodes) / 2 + of.decode_context / 64)
    }
}

fn qoserve() -> impl Strategy<Value = Chosen> {
    let chunking = prop_oneof![
        (1..40_u32).prop_map(Chunking::Fixed),
        (1..10_u32, 0..60_u32, 1..8_u32).prop_map(|(least, more, step)| Chunking::Dynamic {
            least,
            most: least + more,
            step
        }),
    ];
    let relegation =
        prop_oneof![Just(Relegation::Off), Just(Relegation::Strict), Just(Relegation::LookAhead)];
    let rest = (prop::option::of(0.0..1.0), 0.0..0.2);
    (chunking, 0..50_u64, relegation, rest).prop_map(
        |(chunking, alpha, relegation, (hints, margin))| {
            let options = QoServeOptions { chunking, alpha, relegation, hints, margin };
            chosen(options, QoServe::new(options, Linear))
        },
    )
}

/// A tagger with invalid tags for every third request and none for every fifth.
struct Unreliable;

impl Tagger for Unreliable {
    fn tag(&mut self, spec: &Spec) -> Option<Tags> {
        let length = match spec.id.0 % 3 {
            0 => [f64::NAN, -4.0, 1e12][spec.id.0 as usize / 3 % 3],
            _ => f64::from(spec.output_max / 2 + 1),
        };
        let task = (spec.id.0 % 4) as u16;
        (!spec.id.0.is_multiple_of(5)).then_some(Tags { task, length })
    }
}

fn agent(kind: Kind, config: Config, tagger: impl Tagger + 'static, service: Span) -> Agent {
    let prediction = Prediction::new(Learned::default(), 256);
    Agent::new(kind, config, Cognition::new(Perception::new(tagger, service), prediction))
}

/// H-MAS under every structure, with tags that cannot be relied on.
fn hmas() -> impl Strategy<Value = Chosen> {
    let statera = (any::<bool>(), 0.01..0.9_f64, 1..20_u32, 1..20_u32).prop_map(
        |(frozen, epsilon, concurrency, decodes)| StateraConfig {
            frozen,
            epsilon,
            concurrency,
            decodes,
            ..StateraConfig::default()
        },
    );
    let kind = prop::sample::select(&Kind::ALL);
    (prop::option::of(statera), kind, 1..60_u32, 0..300_u64).prop_map(
        |(statera, kind, chunk, service)| {
            let config = Config { statera, chunk, chunk_min: 1 };
            let agent = agent(kind, config, Unreliable, Span::from_millis(service));
            Chosen { tick: Span::from_millis(40), ..chosen((kind, config, service), agent) }
        },
    )
}

fn discipline() -> impl Strategy<Value = Chosen> {
    let relegating = |inner| chosen(("relegating", inner), Relegating { inner, latency: Linear });
    prop_oneof![
        fixed().prop_map(|fixed| chosen(fixed, fixed)),
        fixed().prop_map(relegating),
        qoserve(),
        hmas()
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(800))]

    #[test]
    fn nobody_is_lost_and_blocks_are_balanced(
        discipline in discipline(), steps in prop::collection::vec(step(), 1..120),
    ) {
        let tick = discipline.tick;
        let mut driver = Driver::new(discipline.discipline, BLOCKS, tick);
        for step in steps {
            match step {
                Step::Arrive { prompt, output, ready, slo, interactive, important } => {
                    let ns = slo * tick.0 / 10;
                    let slo = if interactive {
                        Slo::Interactive { ttft: ns * 7, tbt: ns }
                    } else {
                        Slo::Batch { ttlt: ns * 90 }
                    };
                    driver.arrive(prompt, output, ready, slo, important);
                }
                Step::Cancel(at) => driver.cancel(at),
                Step::Compute(times) => {
                    for _ in 0..times {
                        driver.compute();
                    }
                }
                Step::Idle => driver.now = driver.now + tick.times(40),
            }
            driver.check();
        }
        driver.finish();
    }
}

/// A discipline that serves the latest arrival first and starts it only alone, with `chunk` tokens
/// per iteration.
struct Alone {
    chunk: u32,
}

impl Discipline for Alone {
    fn rank(&self, job: &Job) -> Rank {
        Rank(-(job.id().0 as i64))
    }

    fn budget(&mut self, _: Time, _: &dyn View) -> u32 {
        self.chunk
    }

    fn may_start(&mut self, _: Time, _: &Job, view: &dyn View) -> bool {
        view.pool().used() == 0
    }

    fn begun_first(&self) -> bool {
        false
    }
}

/// Least laxity first, where each computed token moves a job back.
struct Laxity;

impl Discipline for Laxity {
    fn rank(&self, job: &Job) -> Rank {
        Rank(-i64::from(job.prefill_left()))
    }

    fn budget(&mut self, _: Time, _: &dyn View) -> u32 {
        8
    }

    fn begun_first(&self) -> bool {
        false
    }
}

/// Runs prompts, each of which arrives when the one before has begun. Returns how often blocks were
/// taken.
fn prompts(discipline: Box<dyn Discipline + Send>, lengths: &[u32]) -> usize {
    let mut driver = Driver::new(discipline, BLOCKS, Span(10));
    for prompt in lengths {
        driver.arrive(*prompt, 1, 0, Slo::Batch { ttlt: 1 }, true);
        driver.compute();
    }
    driver.finish();
    driver.drops
}

#[test]
fn who_may_not_start_keeps_nobody_who_has_begun_from_going_on() {
    let drops = prompts(Box::new(Alone { chunk: 8 }), &[40, 40, 40]);
    assert_eq!(drops, 0, "nobody needed the blocks");
}

#[test]
fn two_that_do_not_fit_together_do_not_take_each_others_blocks_for_ever() {
    // Each would hold more than half of the 128 tokens.
    let drops = prompts(Box::new(Laxity), &[80, 79, 78]);
    assert!((1..12).contains(&drops), "{drops}");
}

struct Exact;

impl Tagger for Exact {
    fn tag(&mut self, spec: &Spec) -> Option<Tags> {
        let length = f64::from(spec.output_max - 3);
        Some(Tags { task: 0, length })
    }
}

const CHAT: Slo = Slo::Interactive { ttft: 2_000_000_000, tbt: 200_000_000 };

fn with_agent(kind: Kind, config: Config, service: Span) -> Driver {
    let agent = agent(kind, config, Exact, service);
    Driver::new(Box::new(agent), 40, Span::from_millis(40))
}

/// Perception takes an hour for each request, and some clients go away before.
#[test]
fn nobody_waits_for_perception() {
    let mut driver = with_agent(Kind::Sjf, Config::default(), Span::from_millis(3_600_000));
    for number in 0..100 {
        driver.arrive(20, 5, 0, CHAT, true);
        if number % 7 == 6 {
            driver.cancel(number);
        }
        driver.compute();
    }
    driver.finish();
}

/// Returns the order of first tokens of ten requests that arrive at once: nine long ones, then a
/// short one.
fn order(kind: Kind) -> Vec<RequestId> {
    let config = Config { statera: None, chunk: 20, chunk_min: 1 };
    let mut driver = with_agent(kind, config, Span::ZERO);
    for _ in 0..9 {
        driver.arrive(40, 30, 0, CHAT, true);
    }
    driver.arrive(8, 3, 0, CHAT, true);
    let mut first = Vec::new();
    while let Some(tokens) = driver.compute() {
        for request in tokens {
            if !first.contains(&request) {
                first.push(request);
            }
        }
    }
    first
}

#[test]
fn a_short_request_passes_long_ones_where_the_structure_says_so() {
    let short = RequestId(9);
    let at = |kind| order(kind).iter().position(|request| *request == short);
    assert_eq!(at(Kind::Fcfs), Some(9));
    for kind in [Kind::Sjf, Kind::Srtf, Kind::Edf] {
        assert_eq!(at(kind), Some(0), "{kind:?}");
    }
}
