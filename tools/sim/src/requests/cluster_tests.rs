//! Tests of the driver with baselines: properties that hold for any policy.

use laxity_requests::baseline::{Fixed, LeastWork, LineOrder};
use laxity_requests::hyperflexis::Linear;
use laxity_requests::kv::Pool;
use laxity_requests::request::Slo;
use laxity_requests::scaling::ScalingDecision;

use super::*;
use crate::compute::Gpu;
use crate::model::Model;
use crate::requests::latency::Roofline;
use crate::requests::workload::{Class, Lengths, Phase, Recipe};

const SECOND: u64 = 1_000_000_000;

fn roofline() -> Roofline {
    let gpu = Gpu::named("a100").expect("built in");
    let model = Model::named("llama-3-8b").expect("built in");
    Roofline::new(&gpu, &model, 1, Span::from_millis(2))
}

fn recipe(rate: f64) -> Recipe {
    Recipe {
        lengths: Lengths::like_azure_code(),
        phases: vec![Phase { lasts: Span(120 * SECOND), rate }],
        classes: vec![
            Class { slo: Slo::Interactive { ttft: 6 * SECOND, tbt: SECOND / 20 }, share: 1.0 },
            Class { slo: Slo::Batch { ttlt: 600 * SECOND }, share: 1.0 },
        ],
        applications: 1,
        low: 0.2,
        output_max: 1024,
    }
}

fn replica(order: LineOrder) -> Replica {
    Replica::new(Pool::new(4000, 16), 40, Box::new(Fixed { order, tokens: 512 }))
}

fn config<'a>(
    clock: &'a Roofline,
    make: &'a Make<'a>,
    roles: &[Role],
    dispatch: Box<dyn Dispatch>,
) -> Config<'a> {
    Config {
        roles: roles.to_vec(),
        dispatch,
        ..Config::single(make, clock, clock.kv_bytes_per_token)
    }
}

fn with(
    roles: &[Role],
    dispatch: Box<dyn Dispatch>,
    order: LineOrder,
    asked: &[Asked],
) -> ClusterOutcome {
    let make = |_: InstanceId, _: Role| replica(order);
    run(config(&roofline(), &make, roles, dispatch), asked)
}

/// Runs requests on one instance, to which a policy may add others.
fn scaled(scaler: Scaler<'_>, link: Link, asked: &[Asked]) -> ClusterOutcome {
    let make = |_: InstanceId, _: Role| replica(LineOrder::Fcfs);
    let clock = roofline();
    let alone = config(&clock, &make, &[Role::Whole], Box::new(RoundRobin::default()));
    run(Config { scaler: Some(scaler), link, ..alone }, asked)
}

#[test]
fn every_request_ends_with_all_its_tokens_whoever_decides() {
    let asked = recipe(6.0).requests(3);
    assert!(asked.len() > 600);
    let whole = [Role::Whole; 3];
    let split = [Role::Prefill, Role::Prefill, Role::Decode];
    const MODEL: Linear = Linear { prefill: [8e6, 60_000.0, 1.5], decode: [7e6, 12.0, 20_000.0] };
    let dispatchers: [fn() -> Box<dyn Dispatch>; 2] =
        [|| Box::new(RoundRobin::default()), || Box::new(LeastWork::new(MODEL))];
    for dispatch in dispatchers {
        for order in [LineOrder::Fcfs, LineOrder::Edf, LineOrder::Srpf] {
            for roles in [&whole[..], &split[..]] {
                let outcome = with(roles, dispatch(), order, &asked);
                assert!(outcome.records.iter().all(Record::complete));
                let again = with(roles, dispatch(), order, &asked);
                assert_eq!(outcome, again, "the same input gives the same outcome");
                let split_up = outcome
                    .records
                    .iter()
                    .filter(|r| r.output > 1)
                    .all(|r| r.instances[0] != r.instances[1]);
                assert_eq!(split_up, roles == split);
            }
        }
    }
}

#[test]
fn a_request_alone_takes_as_long_as_its_iterations() {
    let mut asked = recipe(1.0).requests(1);
    asked.truncate(1);
    asked[0].spec.prompt = 1000;
    asked[0].output = 3;
    let outcome = with(&[Role::Whole], Box::new(RoundRobin::default()), LineOrder::Fcfs, &asked);
    let clock = roofline();
    let empty = laxity_requests::latency::Composition::default;
    let first = clock.iteration(&empty().with_chunk(0, 512))
        + clock.iteration(&empty().with_chunk(512, 488));
    let rest =
        clock.iteration(&empty().with_decode(1000)) + clock.iteration(&empty().with_decode(1001));
    let record = outcome.records[0];
    assert_eq!(record.ttft(), Some(first));
    assert_eq!(record.ttlt(), Some(first + rest));
    assert_eq!(outcome.iterations, 4);
}

#[test]
fn deadlines_help_those_who_have_them() {
    // The rate is more than one replica can serve.
    let asked = recipe(7.0).requests(5);
    let met = |order| {
        let outcome = with(&[Role::Whole], Box::new(RoundRobin::default()), order, &asked);
        outcome.met(|record| record.spec.class.0 == 0).expect("some")
    };
    assert!(met(LineOrder::Edf) > met(LineOrder::Fcfs) + 20.0);
}

#[test]
fn what_is_too_long_is_refused_and_counts_as_late() {
    let mut asked = recipe(1.0).requests(1);
    asked[0].spec.prompt = 70_000;
    let outcome = with(&[Role::Whole], Box::new(RoundRobin::default()), LineOrder::Fcfs, &asked);
    assert!(outcome.records[0].refused && !outcome.records[0].met());
    assert_eq!(outcome.records.iter().filter(|r| r.refused).count(), 1);
    assert!(outcome.records[1..].iter().all(Record::complete));
}

/// A policy that starts an instance when many requests wait, and stops the last one when few do.
struct Eager {
    decisions: Vec<ScalingDecision>,
}

impl Scaling for Eager {
    fn handle(&mut self, _: Time, window: &ScalingWindow) {
        let backlog: u64 = window.instances.iter().map(|i| i.load.prefill_tokens).sum();
        if backlog > 20_000 && window.starting == 0 {
            self.decisions.push(ScalingDecision::Start {
                role: Role::Whole,
                from: Some(window.instances[0].instance),
            });
        } else if backlog == 0 && window.instances.len() > 1 {
            let last = window.instances[window.instances.len() - 1].instance;
            self.decisions.push(ScalingDecision::Stop(last));
        }
    }

    fn poll_decision(&mut self, _: Time) -> Option<ScalingDecision> {
        self.decisions.pop()
    }
}

#[test]
fn instances_come_and_go_and_no_request_is_lost() {
    let mut recipe = recipe(12.0);
    recipe.phases.push(Phase { lasts: Span(200 * SECOND), rate: 0.2 });
    let asked = recipe.requests(7);
    let scaler = Scaler {
        decides: Box::new(Eager { decisions: Vec::new() }),
        window: Span(5 * SECOND),
        startup: Startup {
            weights: roofline().weights_bytes,
            disk: 2_000_000_000,
            boot: Span(SECOND),
        },
        most: 4,
    };
    let outcome = scaled(scaler, Link::new(12_500_000_000, Span::ZERO), &asked);
    assert!(outcome.records.iter().all(Record::complete));
    let used: std::collections::BTreeSet<_> =
        outcome.records.iter().map(|r| r.instances[0]).collect();
    assert!(used.len() > 1, "nobody was started: {used:?}");
    let alone = outcome.ended.0;
    assert!(
        (alone..4 * alone).contains(&outcome.instance_time.0),
        "instances went again: {} of {alone}",
        outcome.instance_time
    );
}

struct Once(Option<ScalingDecision>);

impl Scaling for Once {
    fn handle(&mut self, _: Time, _: &ScalingWindow) {}

    fn poll_decision(&mut self, _: Time) -> Option<ScalingDecision> {
        self.0.take()
    }
}

/// Returns the time of the first token on an instance that was started after a second, in seconds.
fn first_token_of_a_started_one(from: Option<InstanceId>) -> f64 {
    let asked = recipe(12.0).requests(7);
    let start = ScalingDecision::Start { role: Role::Whole, from };
    let scaler = Scaler {
        decides: Box::new(Once(Some(start))),
        window: Span(SECOND),
        startup: Startup {
            // Weights take ten seconds from disk and one from a peer.
            weights: 10_000_000_000,
            disk: 1_000_000_000,
            boot: Span::ZERO,
        },
        most: 2,
    };
    let outcome = scaled(scaler, Link::new(10_000_000_000, Span::ZERO), &asked);
    assert!(outcome.records.iter().all(Record::complete));
    let firsts = outcome
        .records
        .iter()
        .filter(|record| record.instances[0] == Some(1))
        .filter_map(|record| record.first);
    let first = firsts.min().expect("it was started and used");
    first.0 as f64 / SECOND as f64
}

#[test]
fn weights_come_from_another_instance_or_from_disk() {
    // The decision is at one second.
    let peer = first_token_of_a_started_one(Some(InstanceId(0)));
    assert!((2.0..4.0).contains(&peer), "from a peer: {peer}");
    for absent in [None, Some(InstanceId(9))] {
        let disk = first_token_of_a_started_one(absent);
        assert!((11.0..13.0).contains(&disk), "from disk: {disk}");
    }
}
