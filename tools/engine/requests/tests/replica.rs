//! Properties of a replica under random events, with every discipline: no request is lost, sums of
//! blocks agree, memory is never exceeded, and each request that isn't refused ends.

mod driver;

use driver::Driver;
use laxity_requests::baseline::{Fixed, LineOrder, Relegating};
use laxity_requests::discipline::{Discipline, Rank, View};
use laxity_requests::hmas::cognition::Cognition;
use laxity_requests::hmas::perception::{Perception, Tagger, Tags};
use laxity_requests::hmas::pool::Kind;
use laxity_requests::hmas::prediction::Prediction;
use laxity_requests::hmas::statera::StateraConfig;
use laxity_requests::hmas::{Agent, Config};
use laxity_requests::job::Job;
use laxity_requests::latency::{Composition, Latency};
use laxity_requests::learned::Learned;
use laxity_requests::qoserve::{Chunking, QoServe, QoServeOptions, Relegation};
use laxity_requests::request::{ApplicationId, Importance, Slo, Spec};
use laxity_requests::{Span, Time};
use proptest::prelude::*;

const BLOCKS: u32 = 32;
const BLOCK_TOKENS: u32 = 4;

#[derive(Clone, Debug)]
enum Step {
    Arrive {
        prompt: u32,
        output: u32,
        ready: u32,
        slo: u64,
        interactive: bool,
        important: bool,
    },
    Cancel(usize),
    /// A number of iterations.
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

fn fixed() -> impl Strategy<Value = Chosen> {
    let order = prop_oneof![Just(LineOrder::Fcfs), Just(LineOrder::Edf), Just(LineOrder::Srpf)];
    (order, 1..40_u32).prop_map(|(order, tokens)| {
        let fixed = Fixed { order, tokens };
        chosen(fixed, fixed)
    })
}

/// A latency model for deadlines of tens to thousands of nanoseconds.
struct Linear;

impl Latency for Linear {
    fn iteration(&self, of: &Composition) -> Span {
        Span(3 + u64::from(of.prefill_tokens + of.decodes) / 2 + of.decode_context / 64)
    }
}

fn relegating() -> impl Strategy<Value = Chosen> {
    let order = prop_oneof![Just(LineOrder::Fcfs), Just(LineOrder::Edf), Just(LineOrder::Srpf)];
    (order, 1..40_u32).prop_map(|(order, tokens)| {
        let inner = Fixed { order, tokens };
        let latency = Linear;
        chosen(("relegating", inner), Relegating { inner, latency })
    })
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
            let perception = Perception::new(Unreliable, Span::from_millis(service));
            let cognition = Cognition::new(perception, Prediction::new(Learned::default(), 256));
            let agent = Agent::new(kind, config, cognition);
            Chosen { tick: Span::from_millis(40), ..chosen((kind, config, service), agent) }
        },
    )
}

fn discipline() -> impl Strategy<Value = Chosen> {
    prop_oneof![fixed(), relegating(), qoserve(), hmas()]
}

fn driver(discipline: Box<dyn Discipline + Send>) -> Driver {
    Driver::new(discipline, (BLOCKS, BLOCK_TOKENS), Span(10))
}

fn arrive(driver: &mut Driver, prompt: u32, output: u32, ready: u32, slo: Slo, important: bool) {
    driver.arrive(output, |id, arrival| Spec {
        id,
        arrival,
        prompt,
        output_max: output + 3,
        ready: ready.min(prompt),
        application: ApplicationId(prompt % 3),
        importance: if important { Importance::Important } else { Importance::Low },
        slo,
        ..Spec::default()
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(800))]

    #[test]
    fn nobody_is_lost_and_blocks_are_balanced(
        discipline in discipline(), steps in prop::collection::vec(step(), 1..120),
    ) {
        let tick = discipline.tick;
        let mut driver = Driver::new(discipline.discipline, (BLOCKS, BLOCK_TOKENS), tick);
        for step in steps {
            match step {
                Step::Arrive { prompt, output, ready, slo, interactive, important } => {
                    let ns = slo * tick.0 / 10;
                    let slo = if interactive {
                        Slo::Interactive { ttft: ns * 7, tbt: ns }
                    } else {
                        Slo::Batch { ttlt: ns * 90 }
                    };
                    arrive(&mut driver, prompt, output, ready, slo, important);
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
    let mut driver = driver(discipline);
    for prompt in lengths {
        arrive(&mut driver, *prompt, 1, 0, Slo::Batch { ttlt: 1 }, true);
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
