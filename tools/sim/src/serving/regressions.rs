//! Regression tests of the serving model: queues of striped units, inputs of the policy, loads of
//! ports, and times of phases.

use laxity_policy::{Granularity, PolicyKind};

use super::simulate_with;
use super::tests::{inputs, run, small, small_of, world};
use crate::scenario::{Mode, Routing, Scenario};

fn long() -> Scenario {
    let mut scenario = small_of("llama-3-8b", 4, 1, 4);
    scenario.serving.decode_tp = 4;
    scenario
}

/// A striped unit (sp > 1) computes one request after the other on all ranks, so its queue is that
/// of all ranks. Three prompts with 1 000 tokens of prefix at unit 0 must not queue there behind 60
/// 000 tokens while unit 1 is idle.
#[test]
fn a_small_prefix_does_not_outweigh_a_long_queue() {
    let mut scenario = long();
    scenario.policy.no_contention = true;
    let mut list = vec![(0, 2_000, 0), (1, 2_000, 9)];
    list.push((5_000, 60_000, 0));
    list.extend((1..4).map(|n| (5_000 + n, 2_000, 0)));
    let inputs = inputs(&scenario, &list);
    let mut world = world(&scenario, &inputs);
    world.run();
    let unit = |number: usize| world.setup.layout.unit_of(world.requests[number].rank);
    let home = unit(0);
    assert_eq!(unit(2), home, "the prefix is there");
    let behind = (3..6).filter(|&number| unit(number) == home).count();
    assert!(behind < 3, "{behind} of 3 prompts wait behind 60 000 tokens for the sake of 1 000");
}

/// One striped unit has three long prompts queued and the other is idle. The router must choose the
/// idle one, whatever the turn.
#[test]
fn a_busy_striped_unit_is_not_as_good_as_an_idle_one() {
    let mut scenario = long();
    scenario.serving.routing = Routing::LeastLoaded;
    let list = [(0, 1_000, 0)];
    let inputs = inputs(&scenario, &list);
    for turn in 0..2 {
        let mut world = world(&scenario, &inputs);
        assert_eq!((world.setup.layout.units, world.setup.layout.ranks_per_unit), (2, 4));
        // Records three prompts of 60 000 tokens as queued at unit 0, as `arrive` does.
        for rank in 0..3 {
            world.router.queued[rank] += 60_000;
        }
        let mut route = || {
            let (setup, caches) = (&world.setup, &world.prefixes.caches);
            world.router.route(&setup.layout, caches, &setup.inputs.requests, 0)
        };
        for _ in 0..turn {
            route();
        }
        let route = route();
        let unit = world.setup.layout.unit_of(route.rank);
        assert_eq!(unit, 1, "180 000 tokens wait at unit 0 and none at unit 1 (turn {turn})");
    }
}

/// Experts compute the tokens of all ranks. The layer time of hints, RLI, laxity and RED must
/// include that.
#[test]
fn layer_time_that_the_policy_is_told_is_what_a_layer_takes() {
    let mut scenario = small();
    scenario.model.expert_skew = 0.0;
    scenario.policy.no_contention = true;
    scenario.serving.routing = Routing::RoundRobin;
    let list: Vec<_> =
        (0..17).map(|n| (u64::from(n > 0), if n == 0 { 16 } else { 8_000 }, n)).collect();
    let inputs = inputs(&scenario, &list);
    let mut world = world(&scenario, &inputs);
    world.run();
    // All requests except the first were in one batch per unit, which is examined here.
    for batch in world.batches.iter() {
        let ranks = batch.tokens.iter().filter(|&&tokens| tokens > 0).count();
        if ranks < 8 || batch.layer_ns == 0 {
            continue;
        }
        let told = batch.layer_ns as f64 * f64::from(world.setup.layers);
        let took = (batch.computed_ns + batch.collective_ns) as f64;
        let ratio = told / took;
        assert!(
            ratio > 0.8,
            "the policy was told {ratio:.2} of what the batch takes ({ranks} ranks)"
        );
        return;
    }
    panic!("no batch with eight ranks");
}

/// An expert-parallel unit inside one server exchanges over NVLink only.
#[test]
fn coordinator_is_told_only_of_bytes_on_the_network() {
    let scenario = small_of("mixtral-8x7b", 1, 8, 1);
    let inputs = inputs(&scenario, &[(0, 4_000, 0)]);
    let mut world = world(&scenario, &inputs);
    let told = world.setup.collective_bytes_per_token * 4_000;
    world.run();
    assert_eq!(world.measure.bytes.collective, 0, "the unit is one server");
    assert_eq!(
        told, 0,
        "bytes of collectives in the load of the egress port; none of them is sent"
    );
}

/// An expert-parallel unit over several servers reports only bytes that leave a server.
#[test]
fn coordinator_is_told_of_what_leaves_a_server() {
    let mut scenario = small();
    scenario.model.expert_skew = 0.0;
    let inputs = inputs(&scenario, &[(0, 4_000, 0)]);
    let mut world = world(&scenario, &inputs);
    let told = (world.setup.collective_bytes_per_token * 4_000) as f64;
    world.run();
    let ratio = told / world.measure.bytes.collective as f64;
    assert!(ratio < 1.05, "told {ratio:.2} times what all ranks of the unit sent");
}

/// `fetched` counts tokens that come over the network. A striped unit on the holder's server gets
/// them over NVLink.
#[test]
fn blocks_over_nvlink_are_not_counted_as_fetched_by_striped_units() {
    let mut scenario = small_of("llama-3-8b", 2, 1, 2);
    scenario.cluster.servers = 2;
    scenario.serving.routing = Routing::RoundRobin;
    let outcome = run(&scenario, &[(0, 1600, 0), (5_000, 1600, 0)]);
    assert_eq!(outcome.bytes.kv_reuse, 0, "one server: NVLink");
    assert!(outcome.fetched == 0.0, "fetched {} over a network that carried none", outcome.fetched);
}

/// Each rank of a sequence-parallel unit computes the shared expert for its own tokens.
#[test]
fn shared_experts_of_striped_units_are_shared_out() {
    let mut scenario = small_of("grok-2", 2, 1, 4);
    scenario.policy.no_contention = true;
    scenario.model.expert_skew = 0.0;
    scenario.slo.factor = 1.0;
    scenario.serving.token_budget = 1 << 20;
    let over = run(&scenario, &[(0, 20_000, 0)]).ttft_over_slo.mean;
    assert!((0.98..1.02).contains(&over), "alone, it takes {over} times what it takes alone");
}

/// With coflow granularity, the flows of a coflow on a port have weight one together.
#[test]
fn a_coflow_weighs_one_at_each_port() {
    let mut scenario = small();
    scenario.policy.kind = PolicyKind::Fair;
    scenario.policy.granularity = Granularity::Coflow;
    scenario.serving.routing = Routing::RoundRobin;
    let list: Vec<_> =
        (0..9).map(|n| (u64::from(n > 0), if n == 0 { 16 } else { 4_000 }, n)).collect();
    let inputs = inputs(&scenario, &list);
    let mut world = world(&scenario, &inputs);
    let mut coflows = 0;
    world.run_observed(|world| {
        let mut weights = std::collections::BTreeMap::<(u32, u32, u16), f64>::new();
        for flow in world.flows.iter() {
            if flow.stage == laxity_policy::Stage::P2d {
                *weights.entry((flow.batch, flow.from, flow.layer)).or_default() +=
                    f64::from(flow.weight);
            }
        }
        coflows += weights.len();
        for (key, weight) in weights {
            // All flows exist only just after the layer was sent. A coflow with one flow on the
            // port must have weight one.
            assert!(
                weight > 0.99,
                "coflow (batch, rank, layer) {key:?} weighs {weight} at its egress"
            );
        }
    });
    assert!(coflows > 0, "nothing was sent");
}

/// Blocks that a request will fetch are not evicted before.
#[test]
fn fetched_blocks_are_there() {
    let mut scenario = small();
    scenario.serving.routing = Routing::RoundRobin;
    scenario.serving.cache_tokens = 1_600;
    scenario.policy.kind = PolicyKind::Fair;
    // Unit 1 computes family 0 (800 tokens of it are shared). Then both units get long prompts. The
    // third request of family 0 waits at unit 0 behind a long prompt, and unit 1 holds its prefix.
    let list = [
        (0, 1_600, 0),
        (3_000, 100_000, 1),
        (3_001, 3_000, 2),
        (3_002, 1_600, 0),
        (3_003, 3_000, 3),
    ];
    let inputs = inputs(&scenario, &list);
    let mut world = world(&scenario, &inputs);
    let (mut fetched, mut missing) = (0, 0);
    world.run_observed(|world| {
        for flow in world.flows.iter() {
            if flow.stage != laxity_policy::Stage::KvReuse {
                continue;
            }
            fetched += 1;
            let requests = &world.setup.inputs.requests;
            let first = requests.blocks_of(&requests.list[flow.request as usize])[0];
            let there = world.prefixes.caches.holders(first).any(|rank| rank == flow.from);
            missing += u32::from(!there);
        }
    });
    assert!(fetched > 0, "nothing was fetched");
    assert_eq!(
        missing, 0,
        "of {fetched} observations of a fetch, its source lacks the block in {missing}"
    );
}

/// `latency_us` counts from the last byte on the wire to completion, also if a layer begins in
/// between.
#[test]
fn a_fetch_is_complete_latency_after_its_last_byte() {
    let mut scenario = small_of("llama-3-8b", 2, 1, 1);
    scenario.serving.routing = Routing::RoundRobin;
    scenario.slo.factor = 1.0;
    scenario.policy.kind = PolicyKind::TwoClass;
    scenario.network.latency_us = 100_000.0;
    let list = [(0, 20_000, 0), (60_000, 20_000, 0)];
    scenario.serving.lookahead_layers = 4;
    let ttft = run(&scenario, &list).ttft_ms.percentile(0);
    // The fetch for layer l is issued when layer l - 3 begins and takes at least 100 ms. The 28
    // layers behind the first four need at least 28 / 3 times that.
    assert!(ttft > 1_000.0, "TTFT {ttft} ms");
}

/// A rack that is not full has fewer uplinks than a full one.
#[test]
fn a_partial_rack_is_oversubscribed_too() {
    use crate::network::Network;
    let mut scenario = small();
    scenario.cluster.servers = 20;
    scenario.cluster.prefill_share = 0.8; // the 4 decode servers are the last rack
    scenario.cluster.servers_per_rack = 16;
    scenario.cluster.oversubscription = 4.0;
    scenario.validate().expect("valid");
    let mut network = Network::default();
    let layout = super::layout::Layout::new(&scenario, 1e12, &mut network);
    let (path, count) = layout.to_decode(0, 0);
    assert_eq!(count, 4);
    let below = 4.0 * 8.0 * 200e9 / 8.0;
    let ratio = below / network.capacity(path[3]);
    assert!(
        (ratio - 4.0).abs() < 0.1,
        "the rack of the decode servers is oversubscribed {ratio}:1"
    );
}

/// Extreme scenarios neither panic nor hang: one layer, one token, every policy, both modes, tiny
/// and large values.
#[test]
fn odd_scenarios_end() {
    for kind in PolicyKind::ALL {
        for mode in [Mode::Fast, Mode::Exact] {
            for (cache, budget, lookahead, per_batch, decode_tp) in
                [(0, 1, 0, 1, 1), (16, 7, 1, 2, 8), (1 << 40, u32::MAX, u16::MAX, u32::MAX, 4)]
            {
                let mut scenario = small();
                scenario.policy.kind = kind;
                scenario.network.mode = mode;
                scenario.serving.cache_tokens = cache;
                scenario.serving.token_budget = budget;
                scenario.serving.lookahead_layers = lookahead;
                scenario.serving.requests_per_batch = per_batch;
                scenario.serving.decode_tp = decode_tp;
                let mut inputs =
                    inputs(&scenario, &[(0, 1, 0), (0, 1, 0), (0, 40, 1), (0, 33, 1), (7, 100, 0)]);
                inputs.model.layers = 1;
                let outcome = simulate_with(&scenario, &inputs).expect("valid");
                assert_eq!(outcome.requests_in_all, 5);
            }
        }
    }
}

/// A striped unit sends a request's KV cache from all of its ranks.
#[test]
fn coordinator_is_told_of_all_ports_of_a_striped_unit() {
    let scenario = long();
    let inputs = inputs(&scenario, &[(0, 8_000, 0)]);
    let mut world = world(&scenario, &inputs);
    let (mut told, mut used) =
        (std::collections::BTreeSet::new(), std::collections::BTreeSet::new());
    world.run_observed(|world| {
        for flow in world.flows.iter() {
            used.insert(world.setup.layout.egress(flow.from).0);
        }
        for batch in world.batches.iter() {
            told.extend(
                batch
                    .loads
                    .iter()
                    .map(|load| load.1.0)
                    .filter(|&port| port < 2 * world.setup.layout.ranks),
            );
        }
    });
    assert_eq!(told, used, "egress ports told, and used");
}

/// With coflow granularity, a batch's KV reuse for one layer has weight one at its reader. Its four
/// members come one by one, and each shares with those before: 1 + 1/2 + 1/3 + 1/4, not 4.
#[test]
fn a_coflow_of_reuse_weighs_one_at_its_reader() {
    let mut scenario = small_of("llama-3-8b", 8, 1, 1);
    scenario.policy.kind = PolicyKind::Fair;
    scenario.policy.granularity = Granularity::Coflow;
    scenario.cluster.nic_gbps = 10.0;
    scenario.serving.routing = Routing::RoundRobin;
    // Four units have one rank each. Families 1 to 3 are computed once, then a batch at one unit
    // reuses all of them.
    let mut list: Vec<_> = (0..4).map(|n| (0, 2_000, n)).collect();
    list.push((5_000, 2_000, 9));
    for n in 0..16 {
        list.push((5_001, 2_000, n % 4));
    }
    let inputs = inputs(&scenario, &list);
    let mut world = world(&scenario, &inputs);
    let mut most = 0.0_f64;
    world.run_observed(|world| {
        let mut weights = std::collections::BTreeMap::<(u32, u32, u16), f64>::new();
        for flow in world.flows.iter() {
            if let (laxity_policy::Stage::KvReuse, super::flow::To::Rank(to)) =
                (flow.stage, flow.to)
            {
                *weights.entry((flow.batch, to, flow.layer)).or_default() += f64::from(flow.weight);
            }
        }
        most = weights.values().copied().fold(most, f64::max);
    });
    assert!(most > 0.0 && most < 2.09, "a coflow weighs {most} at the port of its reader");
}

/// The phases of a TTFT add up to no more than the TTFT, although a ring computes meanwhile.
#[test]
fn parts_of_a_ttft_are_no_more_than_the_ttft() {
    let mut scenario = long();
    scenario.policy.no_contention = true;
    let outcome = run(&scenario, &[(0, 60_000, 0)]);
    let w = &outcome.waiting_ms;
    let sum = w.queue + w.kv_reuse + w.collective + w.compute + w.p2d;
    assert!(sum <= outcome.ttft_ms.mean * 1.001, "{sum} ms of {} ms: {w:?}", outcome.ttft_ms.mean);
}
