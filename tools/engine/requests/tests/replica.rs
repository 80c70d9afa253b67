//! Properties of a replica under random events: no request is lost, sums of blocks agree, memory is
//! never exceeded, and each request that isn't refused ends.

mod driver;

use driver::Driver;
use laxity_requests::baseline::{Fixed, LineOrder, Relegating};
use laxity_requests::discipline::{Discipline, Rank, View};
use laxity_requests::iteration::Event;
use laxity_requests::job::Job;
use laxity_requests::latency::{Composition, Latency};
use laxity_requests::qoserve::{Chunking, QoServe, QoServeOptions, Relegation};
use laxity_requests::request::{ApplicationId, Importance, Slo, Spec};
use laxity_requests::{Span, Time};
use proptest::prelude::*;

const BLOCKS: u32 = 24;
const BLOCK_TOKENS: u32 = 4;

#[derive(Clone, Debug)]
enum Step {
    Arrive { prompt: u32, output: u32, ready: u32, slo: u64, interactive: bool, important: bool },
    Cancel(usize),
    Compute,
    Capacity(u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1..60_u32, 1..30_u32, 0..70_u32, 1..100_u64, any::<bool>(), any::<bool>()).prop_map(
            |(prompt, output, ready, slo, interactive, important)| {
                Step::Arrive { prompt, output, ready, slo, interactive, important }
            }
        ),
        1 => any::<usize>().prop_map(Step::Cancel),
        6 => Just(Step::Compute),
        1 => (BLOCKS / 2..=BLOCKS).prop_map(Step::Capacity),
    ]
}

/// A discipline that a failed test prints with its options.
struct Chosen(String, Box<dyn Discipline + Send>);

impl std::fmt::Debug for Chosen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

fn chosen(settings: impl std::fmt::Debug, discipline: impl Discipline + Send + 'static) -> Chosen {
    Chosen(format!("{settings:?}"), Box::new(discipline))
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

fn discipline() -> impl Strategy<Value = Chosen> {
    prop_oneof![fixed(), relegating(), qoserve()]
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
        let mut driver = driver(discipline.1);
        let mut capacity = BLOCKS;
        for step in steps {
            match step {
                Step::Arrive { prompt, output, ready, slo, interactive, important } => {
                    let slo = if interactive {
                        Slo::Interactive { ttft: slo * 7, tbt: slo }
                    } else {
                        Slo::Batch { ttlt: slo * 90 }
                    };
                    arrive(&mut driver, prompt, output, ready, slo, important);
                }
                Step::Cancel(at) => driver.cancel(at),
                Step::Compute => {
                    driver.compute(capacity);
                }
                Step::Capacity(blocks) => {
                    capacity = blocks;
                    driver.replica.handle(driver.now, &Event::Capacity(blocks));
                }
            }
            driver.check();
        }
        driver.replica.handle(driver.now, &Event::Capacity(BLOCKS));
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
        driver.compute(BLOCKS);
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
    // Each would hold more than half of the 96 tokens.
    let drops = prompts(Box::new(Laxity), &[80, 79, 78]);
    assert!((1..12).contains(&drops), "{drops}");
}
