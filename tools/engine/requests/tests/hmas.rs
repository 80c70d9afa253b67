//! Properties of H-MAS under random events: no request is lost, sums of blocks agree, memory is
//! never exceeded, and no request waits for perception.

mod driver;

use driver::Driver;
use laxity_requests::Span;
use laxity_requests::hmas::cognition::Cognition;
use laxity_requests::hmas::perception::{Perception, Tagger, Tags};
use laxity_requests::hmas::pool::Kind;
use laxity_requests::hmas::prediction::Prediction;
use laxity_requests::hmas::statera::StateraConfig;
use laxity_requests::hmas::{Agent, Config};
use laxity_requests::iteration::Event;
use laxity_requests::learned::Learned;
use laxity_requests::request::{ApplicationId, Importance, RequestId, Slo, Spec};
use proptest::prelude::*;

const BLOCKS: u32 = 40;
const BLOCK_TOKENS: u32 = 4;
const TICK: Span = Span::from_millis(40);

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

fn cognition(service: Span) -> Cognition {
    let perception = Perception::new(Unreliable, service);
    Cognition::new(perception, Prediction::new(Learned::default(), 256))
}

fn driver(agent: Agent) -> Driver {
    Driver::new(Box::new(agent), (BLOCKS, BLOCK_TOKENS), TICK)
}

fn arrive(driver: &mut Driver, prompt: u32, output: u32, slo: Slo) -> RequestId {
    driver.arrive(output, |id, arrival| Spec {
        id,
        arrival,
        prompt,
        output_max: output + 3,
        application: ApplicationId((id.0 % 3) as u32),
        importance: if id.0.is_multiple_of(2) { Importance::Low } else { Importance::Important },
        slo,
        ..Spec::default()
    })
}

#[derive(Clone, Debug)]
enum Step {
    Arrive { prompt: u32, output: u32, slo: u64, interactive: bool },
    Cancel(usize),
    Compute(u8),
    Idle,
    Capacity(u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (1..90_u32, 1..40_u32, 1..100_u64, any::<bool>())
            .prop_map(|(prompt, output, slo, interactive)| {
                Step::Arrive { prompt, output, slo, interactive }
            }),
        1 => any::<usize>().prop_map(Step::Cancel),
        8 => (1..12_u8).prop_map(Step::Compute),
        1 => Just(Step::Idle),
        1 => (BLOCKS / 2..=BLOCKS).prop_map(Step::Capacity),
    ]
}

fn agent() -> impl Strategy<Value = (Kind, Config, Span)> {
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
            (kind, config, Span::from_millis(service))
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn nobody_is_lost_under_any_structure(
        (kind, config, service) in agent(), steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut driver = driver(Agent::new(kind, config, cognition(service)));
        let mut capacity = BLOCKS;
        for step in steps {
            match step {
                Step::Arrive { prompt, output, slo, interactive } => {
                    let ns = slo * 20_000_000;
                    let slo = if interactive {
                        Slo::Interactive { ttft: ns * 7, tbt: ns }
                    } else {
                        Slo::Batch { ttlt: ns * 90 }
                    };
                    arrive(&mut driver, prompt, output, slo);
                }
                Step::Cancel(at) => driver.cancel(at),
                Step::Compute(times) => {
                    for _ in 0..times {
                        driver.compute(capacity);
                    }
                }
                Step::Idle => driver.now = driver.now + Span::from_millis(1_500),
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

fn interactive() -> Slo {
    Slo::Interactive { ttft: 2_000_000_000, tbt: 200_000_000 }
}

/// Perception takes an hour for each request.
#[test]
fn nobody_waits_for_perception() {
    let agent = Agent::new(Kind::Sjf, Config::default(), cognition(Span::from_millis(3_600_000)));
    let mut driver = driver(agent);
    for _ in 0..100 {
        arrive(&mut driver, 20, 5, interactive());
        driver.compute(BLOCKS);
    }
    driver.finish();
}

struct Exact;

impl Tagger for Exact {
    fn tag(&mut self, spec: &Spec) -> Option<Tags> {
        let length = f64::from(spec.output_max - 3);
        Some(Tags { task: 0, length })
    }
}

fn exact() -> Cognition {
    let perception = Perception::new(Exact, Span::ZERO);
    Cognition::new(perception, Prediction::new(Learned::default(), 256))
}

/// Returns the order of first tokens of ten requests that arrive at once: nine long ones, then a
/// short one.
fn order(kind: Kind) -> Vec<RequestId> {
    let config = Config { statera: None, chunk: 20, chunk_min: 1 };
    let mut driver = driver(Agent::new(kind, config, exact()));
    for _ in 0..9 {
        arrive(&mut driver, 40, 30, interactive());
    }
    arrive(&mut driver, 8, 3, interactive());
    let mut first = Vec::new();
    while let Some(tokens) = driver.compute(BLOCKS) {
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
