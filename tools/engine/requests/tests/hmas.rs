//! H-MAS on a replica: no request waits for perception, and short requests pass where they should.
//! `replica.rs` tests properties of every discipline.

mod driver;

use driver::Driver;
use laxity_requests::Span;
use laxity_requests::hmas::cognition::Cognition;
use laxity_requests::hmas::perception::{Perception, Tagger, Tags};
use laxity_requests::hmas::pool::Kind;
use laxity_requests::hmas::prediction::Prediction;
use laxity_requests::hmas::{Agent, Config};
use laxity_requests::learned::Learned;
use laxity_requests::request::{ApplicationId, Importance, RequestId, Slo, Spec};

const BLOCKS: u32 = 40;
const BLOCK_TOKENS: u32 = 4;
const TICK: Span = Span::from_millis(40);

struct Exact;

impl Tagger for Exact {
    fn tag(&mut self, spec: &Spec) -> Option<Tags> {
        let length = f64::from(spec.output_max - 3);
        Some(Tags { task: 0, length })
    }
}

fn cognition(service: Span) -> Cognition {
    let perception = Perception::new(Exact, service);
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

fn interactive() -> Slo {
    Slo::Interactive { ttft: 2_000_000_000, tbt: 200_000_000 }
}

/// Perception takes an hour for each request, and some clients go away before.
#[test]
fn nobody_waits_for_perception() {
    let agent = Agent::new(Kind::Sjf, Config::default(), cognition(Span::from_millis(3_600_000)));
    let mut driver = driver(agent);
    for number in 0..100 {
        arrive(&mut driver, 20, 5, interactive());
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
    let mut driver = driver(Agent::new(kind, config, cognition(Span::ZERO)));
    for _ in 0..9 {
        arrive(&mut driver, 40, 30, interactive());
    }
    arrive(&mut driver, 8, 3, interactive());
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
