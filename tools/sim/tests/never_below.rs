//! What levels cost and save, on the smallest clusters that show it, and that no other policy meets
//! more deadlines. The plan `never-below` and docs/notes/never-below.md have the measurements for
//! the levels of KV reuse.

use laxity_policy::PolicyKind;
use laxity_sim::outcome::Outcome;
use laxity_sim::scenario::{Routing, Scenario, SloKind, Source};
use laxity_sim::simulate;

/// Returns the outcome of agents past the knee at 50 Gb/s.
fn outcome(kind: PolicyKind, seed: u64, change: impl FnOnce(&mut Scenario)) -> Outcome {
    let mut scenario = Scenario::default();
    scenario.cluster.servers = 16;
    scenario.cluster.nic_gbps = 50.0;
    scenario.serving.token_budget = 512;
    scenario.serving.routing = Routing::RoundRobin;
    scenario.slo.kind = SloKind::Mean;
    scenario.workload.source = Source::Agent;
    scenario.workload.rate_per_gpu = 1.5;
    scenario.workload.seconds = 6.0;
    scenario.policy.kind = kind;
    scenario.seed = seed;
    change(&mut scenario);
    simulate(&scenario).expect("a scenario that makes sense")
}

fn ring(scenario: &mut Scenario) {
    let model = &mut scenario.model;
    model.name = "llama-3-8b".into();
    (model.tp, model.ep, model.sp) = (4, 1, 4);
    scenario.serving.decode_tp = 4;
    scenario.serving.token_budget = 8192;
    scenario.workload.source = Source::LongAgent;
    scenario.workload.rate_per_gpu = 0.5;
    scenario.workload.seconds = 10.0;
}

/// KV reuse in the class of all-to-alls made them 0.3 to 3 % longer.
#[test]
fn all_to_alls_take_no_longer_under_laxity_than_with_a_class_of_their_own() {
    for seed in [1, 2] {
        let alone = outcome(PolicyKind::TwoClass, seed, |_| ());
        let ours = outcome(PolicyKind::Laxity, seed, |_| ());
        let ratio = ours.collective_ms.mean / alone.collective_ms.mean;
        assert!(ratio < 1.001, "seed {seed}: {ratio}");
        assert!(ours.attainment >= alone.attainment, "seed {seed}");
    }
}

/// Without `link/late.rs`, batches stall for a fifth of the time that they stall under `two_class`.
#[test]
fn blocks_that_a_ring_holds_up_are_late_only_until_the_port_notices() {
    let below = outcome(PolicyKind::TwoClass, 1, ring);
    let ours = outcome(PolicyKind::Laxity, 1, ring);
    let ratio = ours.waiting_ms.kv_reuse / below.waiting_ms.kv_reuse;
    assert!(ratio < 0.1, "{ratio}");
    assert!(ours.attainment > below.attainment);
}

/// Without `link/held_up.rs`, P2D waits as long as under `two_class`.
#[test]
fn p2d_that_a_ring_holds_up_waits_only_until_the_port_notices() {
    let waits = |kind| {
        let of_seed = |seed| outcome(kind, seed, ring).waiting_ms.p2d;
        of_seed(1) + of_seed(2)
    };
    let ratio = waits(PolicyKind::Laxity) / waits(PolicyKind::TwoClass);
    assert!(ratio < 0.75, "{ratio}");
}

/// Units have two servers here, so collectives cross slow links.
#[test]
fn scheduling_pays_where_links_are_contended() {
    let [fair, laxity] = [PolicyKind::Fair, PolicyKind::Laxity].map(|kind| {
        [1, 2, 3].map(|seed| {
            let mut scenario = Scenario { seed, ..Scenario::default() };
            scenario.cluster.servers = 8;
            scenario.cluster.nic_gbps = 25.0;
            scenario.model.name = "mixtral-8x7b".into();
            (scenario.model.tp, scenario.model.ep) = (2, 8);
            scenario.workload.source = Source::Agent;
            scenario.workload.rate_per_gpu = 1.0;
            scenario.workload.seconds = 6.0;
            scenario.policy.kind = kind;
            simulate(&scenario).expect("a scenario that makes sense")
        })
    });
    let mean =
        |of: &[Outcome; 3], value: fn(&Outcome) -> f64| of.iter().map(value).sum::<f64>() / 3.0;
    let gain = mean(&laxity, |it| it.ttft_ms.mean) / mean(&fair, |it| it.ttft_ms.mean);
    assert!(gain < 0.93, "mean TTFT: {gain}");
    let stretch = |of| mean(of, |it| it.collective_stretch.mean);
    assert!(stretch(&fair) > 1.1 && stretch(&laxity) < 1.02);
    assert!(mean(&laxity, |it| it.attainment) > mean(&fair, |it| it.attainment));
}

/// Each policy in turn, on a ring and on all-to-alls. The plans have other clusters, rates and
/// deadlines.
#[test]
fn no_policy_meets_more_deadlines_than_laxity_and_its_collectives_are_short() {
    // With the time of collectives in parts of that under `fair` and under `two_class`. On a ring
    // `laxity` lets P2D share their level (`link/held_up.rs`).
    let all_to_alls = |_: &mut Scenario| ();
    let on_ring = ("ring", ring as fn(&mut Scenario), 0.95, 1.06);
    for (name, change, of_fair, of_two_class) in
        [on_ring, ("all-to-alls", all_to_alls, 0.98, 1.001)]
    {
        let sums = |kind| {
            let of_seeds = [1, 2, 3].map(|seed| outcome(kind, seed, change));
            let attained: f64 = of_seeds.iter().map(|outcome| outcome.attainment).sum();
            let collective_ms: f64 =
                of_seeds.iter().map(|outcome| outcome.collective_ms.mean).sum();
            (attained, collective_ms)
        };
        let (attained, collective_ms) = sums(PolicyKind::Laxity);
        for other in PolicyKind::ALL {
            assert!(attained >= sums(other).0, "{other} is above laxity, {name}");
        }
        let (fair, fair_ms) = sums(PolicyKind::Fair);
        let (mfs, mfs_ms) = sums(PolicyKind::Mfs);
        assert!(attained > fair && mfs > fair, "{name}: {attained}, {mfs}, {fair}");
        assert!(collective_ms.max(mfs_ms) < of_fair * fair_ms, "{name}: {mfs_ms}, {fair_ms}");
        let two_class_ms = sums(PolicyKind::TwoClass).1;
        assert!(collective_ms < of_two_class * two_class_ms, "{name}: {two_class_ms}");
    }
}
