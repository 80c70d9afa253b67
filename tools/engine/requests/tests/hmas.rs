//! What holds for H-MAS whatever happens: no request is lost, blocks are balanced, nothing is
//! admitted above memory, structures change once in `ΔT` at most, and nobody waits for perception.

mod driver;

use driver::Driver;
use laxity_requests::hmas::cognition::Cognition;
use laxity_requests::hmas::meta::{
    Answer, Bandit, Bypass, ChangePoint, External, Guards, Rules, Selector, Table, Why,
};
use laxity_requests::hmas::perception::{self, Paced, Perception, Tagger, Tags};
use laxity_requests::hmas::pool::{Hints, Kind};
use laxity_requests::hmas::prediction::Measured;
use laxity_requests::hmas::qos::Long;
use laxity_requests::hmas::statera::{self, Frozen, Loop, Reading, Signal, control};
use laxity_requests::hmas::{Agent, Config, Journal};
use laxity_requests::iteration::{Event, Iteration as _};
use laxity_requests::request::{ApplicationId, ClassId, Importance, RequestId, Slo, Spec};
use laxity_requests::{Span, Time};
use proptest::prelude::*;

const BLOCKS: u32 = 40;
const BLOCK_TOKENS: u32 = 4;
/// An iteration of this file's machine.
const TICK: Span = Span::from_millis(40);

/// Says of every third request something senseless and of every fifth nothing.
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

/// Another structure at each decision.
struct Restless(usize);

impl Selector for Restless {
    fn name(&self) -> &'static str {
        "restless"
    }

    fn select(&mut self, _: Time, _: &Long, _: Kind) -> Answer {
        self.0 += 1;
        if self.0.is_multiple_of(4) {
            return Answer::Invalid("nonsense".to_owned());
        }
        Answer::Decided(Kind::ALL[self.0 % Kind::ALL.len()].into())
    }
}

fn cognition(service: Span) -> Cognition {
    let perception = Paced::new(Unreliable, service);
    Cognition::new(Box::new(perception), Box::new(Measured::default()))
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
        ready: 0,
        generated: 0,
        class: ClassId(0),
        application: ApplicationId((id.0 % 3) as u32),
        importance: if id.0.is_multiple_of(2) {
            Importance::Low
        } else {
            Importance::Important
        },
        slo,
    })
}

fn guards(bypass: bool) -> Guards {
    Guards {
        every: Span::from_millis(2_000),
        least: 5,
        bypass: bypass.then_some(Bypass {
            queue: 3,
            violations: 0.5,
            drops_per_s: 1.0,
            clear: 0.4,
        }),
        ..Guards::default()
    }
}

#[derive(Clone, Debug)]
enum Step {
    Arrive {
        prompt: u32,
        output: u32,
        slo: u64,
        interactive: bool,
    },
    Cancel(usize),
    Compute(u8),
    Idle,
    Capacity(u32),
    Exchange(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (1..90_u32, 1..40_u32, 1..100_u64, any::<bool>())
            .prop_map(|(prompt, output, slo, interactive)| Step::Arrive { prompt, output, slo, interactive }),
        1 => any::<usize>().prop_map(Step::Cancel),
        8 => (1..12_u8).prop_map(Step::Compute),
        1 => Just(Step::Idle),
        1 => (BLOCKS / 2..=BLOCKS).prop_map(Step::Capacity),
        1 => any::<usize>().prop_map(Step::Exchange),
    ]
}

fn control() -> impl Strategy<Value = control::Config> {
    let signal = prop_oneof![
        Just(Signal::Occupancy),
        Just(Signal::StepTime { target_ms: 30.0 })
    ];
    let inner = prop_oneof![Just(Loop::Proportional), Just(Loop::Accumulating)];
    let reading = prop_oneof![Just(Reading::Decodes), Just(Reading::Iteration)];
    let seek = prop::option::of(0.01..0.2);
    (signal, inner, reading, seek, 1..5_u32, 1..20_u32).prop_map(
        |(signal, inner, reading, seek, least, most)| control::Config {
            signal,
            inner,
            reading,
            seek,
            tokens: (least, least + most),
            concurrency: (least, least + most),
            ..control::Config::default()
        },
    )
}

fn agent() -> impl Strategy<Value = Agent> {
    let frozen =
        (any::<bool>(), any::<bool>()).prop_map(|(bound, limits)| Frozen { bound, limits });
    let settings =
        (control(), frozen, 0.01..0.9_f64).prop_map(|(control, frozen, epsilon)| statera::Config {
            control,
            frozen,
            epsilon,
            ..statera::Config::default()
        });
    let statera = prop::option::of(settings);
    (statera, 0..14_usize, 1..60_u32, any::<bool>(), 0..300_u64).prop_map(
        |(statera, who, chunk, bypass, service)| {
            let config = Config {
                statera,
                chunk,
                chunk_min: 1,
                guards: guards(bypass),
                hints: Hints {
                    lane_split: Span::from_millis(400),
                    fast_weight: 2,
                },
                ..Config::default()
            };
            let cognition = cognition(Span::from_millis(service));
            let selector: Box<dyn Selector> = match who {
                0 => Box::new(Rules::default()),
                1 => Box::new(Restless(0)),
                2 => Box::new(Bandit::new(&Kind::ALL, 1.0)),
                3 => Box::new(ChangePoint::new(Table::default())),
                n => return Agent::fixed(Kind::ALL[n - 4], config, cognition),
            };
            Agent::new(config, cognition, selector)
        },
    )
}

/// No two decided switches or rollbacks are closer than `ΔT`.
fn check_switches(journal: &Journal, every: Span) {
    let log = journal.read();
    let own: Vec<_> = log
        .switches
        .iter()
        .filter(|switch| matches!(switch.why, Why::Decided | Why::Rollback))
        .collect();
    for pair in own.windows(2) {
        assert!(pair[1].at >= pair[0].at + every, "{pair:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn nobody_is_lost_under_any_structure_or_controller(agent in agent(), steps in prop::collection::vec(step(), 1..120)) {
        let journal = agent.journal();
        let mut driver = driver(agent);
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
                Step::Exchange(at) => {
                    let kind = Kind::ALL[at % Kind::ALL.len()];
                    let config = Config { chunk: 16, ..Config::default() };
                    let other = Agent::fixed(kind, config, cognition(Span::ZERO));
                    driver.replica.exchange(Box::new(other));
                }
            }
            driver.check();
        }
        driver.replica.handle(driver.now, &Event::Capacity(BLOCKS));
        driver.finish();
        check_switches(&journal, Span::from_millis(2_000));
    }
}

fn interactive() -> Slo {
    Slo::Interactive {
        ttft: 2_000_000_000,
        tbt: 200_000_000,
    }
}

#[test]
fn a_controller_that_never_rests_switches_once_in_delta_t() {
    let config = Config {
        guards: guards(false),
        ..Config::default()
    };
    let agent = Agent::new(config, cognition(Span::ZERO), Box::new(Restless(0)));
    let journal = agent.journal();
    let mut driver = driver(agent);
    for _ in 0..400 {
        arrive(&mut driver, 20, 5, interactive());
        driver.compute(BLOCKS);
        driver.compute(BLOCKS);
    }
    driver.finish();
    check_switches(&journal, Span::from_millis(2_000));
    let log = journal.read();
    assert!(log.switches.len() > 5, "{:?}", log.switches);
    assert!(!log.rejected.is_empty(), "nonsense was taken");
}

#[test]
fn nobody_waits_for_perception_or_for_a_decision_that_never_come() {
    let perception = perception::External::default();
    let exchange = perception.exchange();
    let cognition = Cognition::new(Box::new(perception), Box::new(Measured::default()));
    let selector = External::new(&Kind::ALL);
    let mailbox = selector.mailbox();
    let config = Config {
        guards: guards(false),
        ..Config::default()
    };
    let agent = Agent::new(config, cognition, Box::new(selector));
    let journal = agent.journal();
    let mut driver = driver(agent);
    for _ in 0..100 {
        arrive(&mut driver, 20, 5, interactive());
        driver.compute(BLOCKS);
    }
    driver.finish();
    assert_eq!(exchange.lock().expect("not poisoned").questions.len(), 100);
    assert!(mailbox.take().is_some(), "it was asked");
    let log = journal.read();
    assert!(log.asked > 1 && !log.rejected.is_empty(), "{log:?}");
}

#[test]
fn an_answer_of_perception_that_is_no_answer_leaves_a_request_unknown() {
    let mut external = perception::External::default();
    let exchange = external.exchange();
    for text in [
        "",
        "{}",
        r#"{"task": 3}"#,
        r#"{"task": -3, "length": 7}"#,
        r#"{"task": 3, "length": 7, "why": 1}"#,
    ] {
        let answer = (RequestId(1), text.to_owned());
        exchange
            .lock()
            .expect("not poisoned")
            .answers
            .push_back(answer);
        assert_eq!(
            external.poll(Time::ZERO),
            Some((RequestId(1), None)),
            "{text}"
        );
    }
}

/// Knows lengths.
struct Exact;

impl Tagger for Exact {
    fn tag(&mut self, spec: &Spec) -> Option<Tags> {
        let length = f64::from(spec.output_max - 3);
        Some(Tags { task: 0, length })
    }
}

fn exact() -> Cognition {
    let perception = Paced::new(Exact, Span::ZERO);
    Cognition::new(Box::new(perception), Box::new(Measured::default()))
}

/// Orders of first tokens of ten requests that came at once, the first nine long, the last short.
fn order(kind: Kind) -> Vec<RequestId> {
    let config = Config {
        statera: None,
        chunk: 20,
        chunk_min: 1,
        hints: Hints {
            lane_split: Span::from_millis(300),
            fast_weight: 4,
        },
        ..Config::default()
    };
    let mut driver = driver(Agent::fixed(kind, config, exact()));
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
    for kind in [Kind::Sjf, Kind::Srtf, Kind::TwoLane, Kind::Edf] {
        assert_eq!(at(kind), Some(0), "{kind:?}");
    }
}

#[test]
fn the_slow_lane_gets_its_share_while_short_requests_keep_coming() {
    let config = Config {
        statera: None,
        chunk: 16,
        chunk_min: 1,
        hints: Hints {
            lane_split: Span::from_millis(300),
            fast_weight: 2,
        },
        ..Config::default()
    };
    let mut driver = driver(Agent::fixed(Kind::TwoLane, config, exact()));
    let slow = arrive(&mut driver, 40, 30, interactive());
    let mut after = None;
    for round in 0..200 {
        // Twice as many prompt tokens as the machine computes.
        for _ in 0..4 {
            arrive(&mut driver, 8, 1, interactive());
        }
        let tokens = driver.compute(BLOCKS).unwrap_or_default();
        if after.is_none() && tokens.contains(&slow) {
            after = Some(round);
        }
    }
    assert!(after.is_some_and(|round| round < 20), "{after:?}");
}
