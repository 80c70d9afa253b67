//! Tests of the router against what units that run in step can do, and of requests that are spread
//! over the ranks of expert parallelism.

use super::simulate_with;
use super::tests::{inputs, run, small, world};
use crate::model::Model;
use crate::outcome::Outcome;
use crate::scenario::{Routing, Scenario, SloKind, Source};
use crate::simulate;

/// A cluster without contention, so that routing alone decides.
fn cluster(servers: u32, source: Source, rate: f64) -> Scenario {
    let mut scenario = Scenario::default();
    scenario.cluster.servers = servers;
    scenario.policy.no_contention = true;
    scenario.workload.source = source;
    scenario.workload.rate_per_gpu = rate;
    scenario.workload.seconds = 20.0;
    scenario
}

fn mean(scenario: &Scenario, of: impl Fn(&Outcome) -> f64) -> f64 {
    let seeds = 1..=3;
    let values = seeds.map(|seed| {
        let scenario = Scenario { seed, ..scenario.clone() };
        of(&simulate(&scenario).expect("a scenario that makes sense"))
    });
    values.sum::<f64>() / 3.0
}

const LOADS: [(Source, f64); 4] = [
    (Source::Conversation, 0.05),
    (Source::Conversation, 0.2),
    (Source::Agent, 0.1),
    (Source::Agent, 0.5),
];

/// Ranks of a unit run in step. A prompt on one of them holds up a request on any other.
#[test]
fn a_unit_with_one_busy_rank_is_not_as_good_as_an_idle_one() {
    for routing in [Routing::LeastLoaded, Routing::KvAware] {
        let mut scenario = small();
        scenario.serving.routing = routing;
        let inputs = inputs(&scenario, &[(0, 1_000, 0)]);
        let mut world = world(&scenario, &inputs);
        world.router.queued[0] = 60_000;
        for turn in 0..3 {
            let (layout, requests) = (&world.setup.layout, &world.setup.inputs.requests);
            let route = world.router.route(layout, &world.prefixes.caches, requests, 0);
            assert_eq!(layout.unit_of(route.rank), 1, "{routing:?}, turn {turn}: unit 0 is busy");
        }
    }
}

#[test]
fn routing_by_kv_is_not_below_taking_turns() {
    let mut scenarios: Vec<_> =
        LOADS.iter().map(|&(source, rate)| cluster(32, source, rate)).collect();
    // Units that are full, with steps of few tokens.
    for (source, rate) in [(Source::Conversation, 0.5), (Source::Agent, 1.0)] {
        let mut scenario = cluster(32, source, rate);
        scenario.slo.kind = SloKind::Mean;
        scenario.serving.token_budget = 512;
        scenario.workload.seconds = 6.0;
        scenarios.push(scenario);
    }
    for mut scenario in scenarios {
        let (source, rate) = (scenario.workload.source, scenario.workload.rate_per_gpu);
        let aware = mean(&scenario, |outcome| outcome.attainment);
        scenario.serving.routing = Routing::RoundRobin;
        let turns = mean(&scenario, |outcome| outcome.attainment);
        assert!(aware > turns - 0.01, "{source:?} at {rate}: {aware} by KV, {turns} in turn");
    }
}

#[test]
fn more_servers_at_the_same_rate_per_gpu_do_not_hurt() {
    for (source, rate) in LOADS {
        let few = mean(&cluster(16, source, rate), |outcome| outcome.attainment);
        let many = mean(&cluster(64, source, rate), |outcome| outcome.attainment);
        assert!(many > few - 0.02, "{source:?} at {rate}: {few} on 16 servers, {many} on 64");
    }
}

/// Agents share prefixes. A busy unit is worth a fetch.
#[test]
fn agents_fetch_blocks_from_other_units() {
    let scenario = cluster(32, Source::Agent, 0.5);
    let fetched = mean(&scenario, |outcome| outcome.fetched);
    assert!(fetched > 0.1, "{fetched} of the reused tokens come from other units");
    let scenario = Scenario { policy: Scenario::default().policy, ..scenario };
    let bytes = mean(&scenario, |outcome| outcome.bytes.kv_reuse as f64);
    assert!(bytes > 0.0, "no bytes of stage 1");
}

/// A unit of 16 GPUs on two servers whose ranks split experts and, with `spread`, requests.
fn experts(spread: bool) -> Scenario {
    let mut scenario = small();
    scenario.model.sp = if spread { scenario.model.ep } else { 1 };
    scenario.model.expert_skew = 0.0;
    scenario.serving.routing = Routing::RoundRobin;
    scenario
}

/// Dispatch and combine carry the same bytes in both placements. A spread request exchanges its KV
/// cache in a ring besides, which leaves both servers once per layer and rank.
#[test]
fn a_spread_request_moves_its_kv_cache_and_its_tokens_once() {
    let list = [(0, 1_600, 0), (5_000, 1_600, 0)];
    let (whole, spread) = (run(&experts(false), &list), run(&experts(true), &list));
    let model = Model::named("dbrx").expect("built in");
    let per_token: u64 = (0..model.layers).map(|l| model.kv_bytes_per_token(l)).sum();
    for outcome in [&whole, &spread] {
        assert_eq!(outcome.bytes.kv_reuse, 800 * per_token, "half of the second prompt");
        assert_eq!(outcome.bytes.p2d, 3_200 * per_token, "both prompts");
        assert!((outcome.fetched - 1.0).abs() < 1e-9, "{}", outcome.fetched);
    }
    let ring = (2 * 1_600 * per_token) as f64 * 2.0 * 7.0 / 8.0;
    let more = (spread.bytes.collective - whole.bytes.collective) as f64;
    assert!((more / ring - 1.0).abs() < 0.001, "{more} bytes more, and a ring of {ring}");
}

#[test]
fn a_lone_request_that_is_spread_is_computed_by_the_whole_unit() {
    let time = |spread| run(&experts(spread), &[(0, 8_000, 0)]).ttft_ms.mean;
    let (whole, spread) = (time(false), time(true));
    assert!(spread < 0.5 * whole, "{spread} ms spread, {whole} ms on one rank");
}

/// The objective by a request's own TTFT is counted under any other.
#[test]
fn own_objectives_are_counted_whatever_the_objective_is() {
    let list: Vec<_> = (0..40).map(|n| (n * 20, 500 + 400 * n as u32, n as u32)).collect();
    let mut scenario = small();
    let own = run(&scenario, &list);
    assert_eq!(own.attainment, own.attainment_own);
    scenario.policy.no_contention = true;
    let own = simulate_with(&scenario, &inputs(&scenario, &list)).expect("valid");
    scenario.slo.kind = SloKind::Fixed;
    scenario.slo.fixed_ms = 1e6;
    let fixed = run(&scenario, &list);
    assert_eq!(fixed.attainment, 1.0);
    assert_eq!(fixed.attainment_own, own.attainment);
    assert!(own.units_busy >= own.compute_busy && own.units_busy <= 1.0, "{}", own.units_busy);
}
