//! Tests of request schedulers together with flows: decisions of disciplines, and their effect on
//! links.

use std::collections::BTreeSet;

use laxity_policy::{Level, PolicyKind, Stage, Time};

use super::tests::{inputs, run, small_of, world};
use crate::scenario::{RequestOrder, Scenario};

/// Returns a scenario of one unit that computes single prompts in chunks of 2 000 tokens.
fn queue(order: RequestOrder, kind: PolicyKind) -> Scenario {
    let mut scenario = small_of("llama-3-8b", 4, 1, 2);
    scenario.cluster.servers = 4;
    scenario.cluster.prefill_share = 0.25;
    scenario.serving.decode_tp = 4;
    scenario.serving.token_budget = 2_000;
    scenario.serving.requests = order;
    scenario.policy.kind = kind;
    scenario
}

fn order_of(scenario: &Scenario, list: &[(u64, u32, u32)]) -> Vec<usize> {
    let inputs = inputs(scenario, list);
    let mut world = world(scenario, &inputs);
    world.run();
    let mut ended: Vec<(Time, usize)> = world
        .requests
        .iter()
        .enumerate()
        .map(|(number, request)| (request.prefilled.expect("served"), number))
        .collect();
    ended.sort_unstable();
    ended.into_iter().map(|(_, number)| number).collect()
}

#[test]
fn the_discipline_says_who_computes_first() {
    // The first request computes and the second is in the next batch when the others arrive.
    let list = [(0, 6_000, 0), (1, 6_000, 1), (2, 20_000, 2), (3, 10_000, 3), (4, 4_000, 4)];
    let of = |order| order_of(&queue(order, PolicyKind::Laxity), &list);
    assert_eq!(of(RequestOrder::Fcfs), [0, 1, 2, 3, 4]);
    // Objectives are three times the request's time alone, so short requests are due first.
    let shortest = of(RequestOrder::Srpf);
    assert_eq!(shortest[3..], [3, 2], "{shortest:?}");
    let earliest = of(RequestOrder::Edf);
    assert_eq!(earliest[3..], [3, 2], "{earliest:?}");
}

fn overload() -> Vec<(u64, u32, u32)> {
    (0..30).map(|n| (n * 60, 8_000, n as u32)).collect()
}

#[test]
fn what_is_given_up_computes_last_and_is_all_served() {
    let scenario = queue(RequestOrder::EdfRelegate, PolicyKind::Laxity);
    let outcome = run(&scenario, &overload());
    assert_eq!(outcome.requests_in_all, 30);
    assert!(outcome.relegated > 3, "{}", outcome.relegated);
    let without = run(&queue(RequestOrder::Edf, PolicyKind::Laxity), &overload());
    assert!(
        outcome.attainment > without.attainment,
        "{} in time, and {} where nobody is given up",
        outcome.attainment,
        without.attainment
    );
}

#[test]
fn flows_of_what_is_given_up_are_the_scavengers() {
    for kind in [PolicyKind::Mfs, PolicyKind::Laxity] {
        let mut scenario = queue(RequestOrder::EdfRelegate, kind);
        // Disables pruning, so that only relegation moves flows to the scavenger.
        scenario.policy.without = vec![crate::scenario::Part::Pruning];
        // A slow network makes flows wait.
        scenario.cluster.nic_gbps = 10.0;
        let inputs = inputs(&scenario, &overload());
        let mut world = world(&scenario, &inputs);
        let mut before = BTreeSet::new();
        let (mut scavenged, mut others) = (0, 0);
        world.run_observed(|world| {
            let mut now = BTreeSet::new();
            for (slot, flow) in world.flows.enumerate() {
                if flow.stage != Stage::P2d {
                    continue;
                }
                let request = world.requests[flow.request as usize];
                // Collects flows that began after the relegation of their request. Earlier flows
                // keep their level.
                now.insert((slot, flow.generation));
                if before.contains(&(slot, flow.generation)) || flow.sending == 0 {
                    continue;
                }
                if !request.relegated {
                    others += 1;
                } else if flow.level == Level::SCAVENGER {
                    scavenged += 1;
                } else {
                    panic!("{kind}: {flow:?} of a request that was given up");
                }
            }
            before = now;
        });
        assert!(scavenged > 0 && others > 0, "{kind}: {scavenged} {others}");
    }
}
