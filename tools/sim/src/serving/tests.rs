//! Tests of the serving model against hand-computed values and its own invariants.

use laxity_policy::{PolicyKind, Time};
use proptest::prelude::*;

use super::world::World;
use super::{Inputs, simulate_with};
use crate::compute::{Compute, Gpu};
use crate::model::Model;
use crate::outcome::Outcome;
use crate::scenario::{Mode, Placement, RequestOrder, Routing, Scenario};
use crate::workload::{Request, Requests};

/// Returns a scenario of two prefill units of 16 GPUs and as many decode GPUs.
pub(super) fn small() -> Scenario {
    let mut scenario = Scenario::default();
    scenario.cluster.servers = 8;
    scenario.model.ep = 8;
    scenario.workload.warm_up = 0.0;
    scenario
}

/// Returns the scenario of [`small`] with a model and its tensor, expert and sequence parallelism.
pub(super) fn small_of(model: &str, tp: u32, ep: u32, sp: u32) -> Scenario {
    let mut scenario = small();
    scenario.model.name = model.into();
    (scenario.model.tp, scenario.model.ep, scenario.model.sp) = (tp, ep, sp);
    scenario
}

/// Returns requests for `(arrival in ms, tokens, family)`. Families share their first half.
fn requests(list: &[(u64, u32, u32)]) -> Requests {
    const BLOCK: u32 = 16;
    let families = list.iter().map(|request| request.2).max().unwrap_or(0) + 1;
    // Shared blocks come first, then those of a single request.
    let longest = list.iter().map(|request| request.1.div_ceil(BLOCK)).max().unwrap_or(1);
    let mut requests = Requests {
        list: Vec::new(),
        blocks: Vec::new(),
        distinct_blocks: families * longest,
        block_tokens: BLOCK,
    };
    for &(ms, tokens, family) in list {
        let count = tokens.div_ceil(BLOCK);
        let first_block = requests.blocks.len() as u32;
        for n in 0..count {
            if n < count / 2 {
                requests.blocks.push(family * longest + n);
            } else {
                requests.blocks.push(requests.distinct_blocks);
                requests.distinct_blocks += 1;
            }
        }
        requests.list.push(Request {
            arrival: Time(ms * 1_000_000),
            prompt_tokens: tokens,
            output_tokens: 1,
            first_block,
            blocks: count,
        });
    }
    requests
}

pub(super) fn inputs(scenario: &Scenario, list: &[(u64, u32, u32)]) -> Inputs {
    Inputs {
        model: Model::named(&scenario.model.name).expect("built in"),
        gpu: Gpu::named(&scenario.cluster.gpu).expect("built in"),
        requests: requests(list),
    }
}

pub(super) fn world<'a>(scenario: &'a Scenario, inputs: &'a Inputs) -> World<'a> {
    let compute = Compute::new(&inputs.gpu, &inputs.model, scenario.model.tp);
    World::new(scenario, inputs, compute).expect("makes sense")
}

pub(super) fn run(scenario: &Scenario, list: &[(u64, u32, u32)]) -> Outcome {
    simulate_with(scenario, &inputs(scenario, list)).expect("a scenario that makes sense")
}

fn policies() -> impl Iterator<Item = PolicyKind> {
    PolicyKind::ALL.into_iter()
}

#[test]
fn a_request_that_is_alone_takes_what_its_objective_is_measured_by() {
    // A request's layers go to its decode rank while it exchanges tokens. Only a policy that defers
    // them keeps the collectives undisturbed.
    for kind in policies() {
        for (model, tp, ep, sp) in [("dbrx", 2, 8, 1), ("dbrx", 2, 8, 8), ("llama-3-8b", 4, 1, 4)] {
            for tokens in [300, 5_000, 20_000] {
                let mut scenario = small_of(model, tp, ep, sp);
                scenario.policy.kind = kind;
                scenario.model.expert_skew = 0.0;
                scenario.slo.factor = 1.0;
                let outcome = run(&scenario, &[(0, tokens, 0)]);
                let over = outcome.ttft_over_slo.mean;
                let protects = matches!(
                    kind,
                    PolicyKind::TwoClass
                        | PolicyKind::Mfs
                        | PolicyKind::Laxity
                        | PolicyKind::EdfLow
                );
                let bound = if protects { 1.02 } else { 1.35 };
                assert!(
                    (0.98..bound).contains(&over),
                    "{kind}, {model}, {tokens} tokens: {over} of the objective"
                );
            }
        }
    }
}

#[test]
fn reused_blocks_of_another_unit_are_fetched_once_and_those_at_hand_not_at_all() {
    let mut scenario = small();
    scenario.serving.routing = Routing::RoundRobin;
    let far = run(&scenario, &[(0, 1600, 0), (5_000, 1600, 0)]);
    let model = Model::named("dbrx").expect("built in");
    let per_token: u64 = (0..model.layers).map(|l| model.kv_bytes_per_token(l)).sum();
    assert_eq!(far.bytes.kv_reuse, 800 * per_token);
    assert_eq!(far.bytes.p2d, 3200 * per_token);
    assert!((far.reused - 0.25).abs() < 1e-9, "{}", far.reused);
    assert!((far.fetched - 1.0).abs() < 1e-9, "{}", far.fetched);
    scenario.serving.routing = Routing::KvAware;
    let near = run(&scenario, &[(0, 1600, 0), (5_000, 1600, 0)]);
    assert_eq!(near.bytes.kv_reuse, 0);
    assert!((near.reused - 0.25).abs() < 1e-9, "{}", near.reused);
}

#[test]
fn copies_spare_later_readers_the_way() {
    let mut scenario = small();
    scenario.serving.routing = Routing::RoundRobin;
    let list: Vec<_> = (0..8).map(|n| (n * 2_000, 1600, 0)).collect();
    let without = run(&scenario, &list);
    scenario.serving.copy_on_fetch = true;
    let with = run(&scenario, &list);
    assert!(with.bytes.kv_reuse < without.bytes.kv_reuse / 2, "{:?}", with.bytes);
}

#[test]
fn a_long_prompt_is_cut_only_if_it_may_be() {
    let mut scenario = small();
    scenario.serving.token_budget = 1000;
    // The unit is busy, so that the second request waits, whole or in parts.
    let list = [(0, 900, 0), (1, 900, 1), (1, 3_000, 2), (2, 100, 3)];
    let cut = run(&scenario, &list);
    scenario.serving.chunked = false;
    let whole = run(&scenario, &list);
    assert_eq!((cut.requests, whole.requests), (4, 4));
    assert_eq!(cut.bytes.p2d, whole.bytes.p2d);
    assert!(cut.batch_size > 0.0 && whole.batch_size > 0.0);
}

#[test]
fn no_policy_passes_the_bound_without_contention() {
    let mut scenario = small();
    scenario.cluster.nic_gbps = 50.0;
    // The load is low, because near saturation a delay can by chance form a better batch.
    let list: Vec<_> =
        (0..120).map(|n| (n * 150, 400 + 97 * (n as u32 % 23), n as u32 % 5)).collect();
    scenario.policy.no_contention = true;
    let bound = run(&scenario, &list);
    scenario.policy.no_contention = false;
    for kind in policies() {
        scenario.policy.kind = kind;
        let outcome = run(&scenario, &list);
        assert_eq!(outcome.requests, 120, "{kind}");
        assert!(
            outcome.ttft_ms.mean >= bound.ttft_ms.mean * 0.998,
            "{kind}: {} ms, bound {} ms",
            outcome.ttft_ms.mean,
            bound.ttft_ms.mean
        );
        assert!(outcome.collective_stretch.mean >= 0.999, "{kind}");
    }
}

#[test]
fn aggregates_agree_with_pairs() {
    // docs/notes/simulator.md says how far both may differ, and why fair sharing differs most.
    let list: Vec<_> =
        (0..80).map(|n| (n * 12, 500 + 131 * (n as u32 % 17), n as u32 % 4)).collect();
    for kind in policies() {
        let mut scenario = small();
        scenario.cluster.nic_gbps = 100.0;
        scenario.policy.kind = kind;
        let fast = run(&scenario, &list);
        scenario.network.mode = Mode::Exact;
        let exact = run(&scenario, &list);
        let apart = fast.ttft_ms.mean / exact.ttft_ms.mean - 1.0;
        let most = if kind == PolicyKind::Fair { 0.10 } else { 0.05 };
        assert!(apart.abs() < most, "{kind}: TTFT {:.1} % apart", 100.0 * apart);
        let apart = fast.collective_ms.mean / exact.collective_ms.mean - 1.0;
        assert!(apart.abs() < 2.0 * most, "{kind}: collectives {:.1} % apart", 100.0 * apart);
    }
}

#[test]
fn collectives_that_weigh_more_are_shorter_under_fair_sharing() {
    let mut scenario = small();
    scenario.policy.kind = PolicyKind::Fair;
    scenario.cluster.nic_gbps = 25.0;
    let list: Vec<_> = (0..12).map(|n| (n * 20, 6_000, n as u32)).collect();
    let alike = run(&scenario, &list).collective_stretch.mean;
    scenario.network.collective_weight = 16.0;
    let heavy = run(&scenario, &list).collective_stretch.mean;
    assert!(heavy < alike && alike > 1.01, "{heavy} {alike}");
    scenario.network.collective_weight = 1.0;
    scenario.network.p2d_weight = 1.0 / 16.0;
    let light = run(&scenario, &list).collective_stretch.mean;
    assert!(light < alike, "{light} {alike}");
}

/// A policy that depends on the order of a hash table would differ between machines.
#[test]
fn the_same_twice_is_the_same() {
    let list: Vec<_> = (0..60).map(|n| (n * 9, 300 + 53 * (n as u32 % 31), n as u32 % 3)).collect();
    for kind in policies() {
        let mut scenario = small();
        scenario.policy.kind = kind;
        scenario.serving.placement = Placement::Random;
        assert_eq!(run(&scenario, &list), run(&scenario, &list), "{kind}");
    }
}

/// Half of each prompt is shared, and three quarters of that fit. The tail of a prefix is evicted
/// first, or the rest would be useless.
#[test]
fn reuse_survives_a_cache_that_is_a_little_too_small() {
    let mut scenario = small();
    scenario.cluster.servers = 4;
    scenario.serving.cache_tokens = 1_200;
    let list: Vec<_> = (0..10).map(|n| (n * 3_000, 1_600, 0)).collect();
    let outcome = run(&scenario, &list);
    assert!(outcome.reused > 0.2, "reused {}", outcome.reused);
}

/// Each rank of a data-parallel unit computes its own tokens, so four prompts on four ranks take as
/// long as one.
#[test]
fn data_parallel_ranks_do_not_compute_each_others_experts() {
    let mut scenario = small_of("mixtral-8x7b", 2, 1, 1);
    scenario.model.dp = 4;
    scenario.cluster.servers = 2;
    scenario.serving.routing = Routing::RoundRobin;
    scenario.policy.no_contention = true;
    let one = run(&scenario, &[(0, 4_000, 0)]);
    // The first request occupies the unit for a moment, and the other four form one batch.
    let list = [(0, 16, 9), (1, 4_000, 0), (1, 4_000, 1), (1, 4_000, 2), (1, 4_000, 3)];
    let four = run(&scenario, &list);
    let ratio = four.ttft_ms.percentile(100) / one.ttft_ms.mean;
    assert!(ratio < 1.5, "four ranks side by side take {ratio} times as long as one");
}

/// With a ring inside a server, on NVLink, a TTFT alone equals its objective at factor 1.
#[test]
fn objectives_know_that_a_ring_inside_a_server_is_on_nvlink() {
    let mut scenario = small_of("llama-3-8b", 2, 1, 4);
    scenario.cluster.nic_gbps = 50.0;
    scenario.policy.no_contention = true;
    scenario.slo.factor = 1.0;
    for tokens in [5_000, 20_000] {
        let over = run(&scenario, &[(0, tokens, 0)]).ttft_over_slo.mean;
        assert!((0.95..1.05).contains(&over), "{tokens} tokens: {over}");
    }
}

/// `lookahead_layers` may be the largest value of its type.
#[test]
fn lookahead_may_be_as_large_as_its_type() {
    let mut scenario = small();
    scenario.serving.lookahead_layers = u16::MAX;
    scenario.serving.routing = Routing::RoundRobin;
    let outcome = run(&scenario, &[(0, 1600, 0), (2_000, 1600, 0)]);
    assert_eq!(outcome.requests, 2);
}

/// Equal ranks get requests in turn. A turn shared with the units would choose the same rank of an
/// idle unit each time.
#[test]
fn idle_ranks_take_turns() {
    let mut scenario = small();
    scenario.cluster.servers = 16; // four units of eight ranks
    let list: Vec<_> = (0..64).map(|n| (n * 2_000, 700, n as u32)).collect();
    let inputs = inputs(&scenario, &list);
    for routing in [Routing::KvAware, Routing::LeastLoaded, Routing::RoundRobin] {
        scenario.serving.routing = routing;
        let mut world = world(&scenario, &inputs);
        world.run();
        let ranks: std::collections::BTreeSet<u32> =
            world.requests.iter().map(|request| request.rank).collect();
        assert!(ranks.len() >= 16, "{routing:?}: 64 requests on {} of 32 ranks", ranks.len());
    }
}

/// A pair of ranks may exchange less than a byte while a rank's aggregate has some. Nothing is put
/// on the network then, and nothing ends.
#[test]
fn exact_mode_survives_experts_that_nobody_uses() {
    for skew in [3.0, 5.0, 8.0] {
        for kind in PolicyKind::ALL {
            let mut scenario = small_of("qwen3-coder-next", 1, 16, 1);
            scenario.model.expert_skew = skew;
            scenario.network.mode = Mode::Exact;
            scenario.cluster.nic_gbps = 50.0;
            scenario.policy.kind = kind;
            let list: Vec<_> =
                (0..40).map(|n| (n * 7, 20 + 531 * (n as u32 % 7), n as u32 % 3)).collect();
            assert_eq!(run(&scenario, &list).requests_in_all, 40, "{kind} {skew}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Every request is served in random scenarios. Debug builds also check that bytes are
    /// conserved and that no port exceeds its rate.
    #[test]
    fn all_are_served_and_bytes_are_conserved(
        list in proptest::collection::vec((0_u64..300, 1_u32..9_000, 0_u32..4), 1..40),
        kind in proptest::sample::select(PolicyKind::ALL.to_vec()),
        (exact, chunked, copies, homes) in any::<(bool, bool, bool, bool)>(),
        shape in proptest::sample::select(vec![
            ("dbrx", 2, 8, 1, 1), ("mixtral-8x7b", 1, 8, 1, 1), ("llama-3-8b", 4, 1, 4, 1),
            ("llama-3-8b", 2, 1, 1, 4), ("qwen3-coder-next", 1, 16, 1, 1),
        ]),
        (gbps, oversubscription, decode_tp) in (
            proptest::sample::select(vec![10.0, 50.0, 400.0]),
            proptest::sample::select(vec![1.0, 4.0]),
            proptest::sample::select(vec![1_u32, 8]),
        ),
        (on_wire, lookahead, budget) in (2_u8..9, 0_u16..60, 64_u32..9_000),
        order in proptest::sample::select(vec![
            RequestOrder::Fcfs,
            RequestOrder::Srpf,
            RequestOrder::Edf,
            RequestOrder::EdfRelegate,
            RequestOrder::Qoserve,
        ]),
    ) {
        let mut list = list;
        list.sort_unstable();
        let mut scenario = small_of(shape.0, shape.1, shape.2, shape.3);
        scenario.policy.kind = kind;
        scenario.cluster.nic_gbps = gbps;
        scenario.cluster.oversubscription = oversubscription;
        scenario.cluster.servers_per_rack = 2;
        scenario.serving.decode_tp = decode_tp;
        scenario.serving.chunked = chunked;
        scenario.serving.copy_on_fetch = copies;
        scenario.serving.cache_tokens = 20_000;
        scenario.serving.lookahead_layers = lookahead;
        scenario.serving.token_budget = budget;
        scenario.network.levels_on_wire = on_wire;
        scenario.serving.requests = order;
        if homes {
            scenario.serving.routing = Routing::StaticHomes;
        }
        if exact {
            scenario.network.mode = Mode::Exact;
        }
        scenario.model.dp = shape.4;
        let outcome = run(&scenario, &list);
        prop_assert_eq!(outcome.requests_in_all, list.len() as u64);
    }
}
