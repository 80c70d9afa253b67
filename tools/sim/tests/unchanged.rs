//! Points whose outcome is known to the last bit: what was added to the serving model and is off by
//! default leaves them alone.
//!
//! A change of the model itself changes these numbers, and says so here.

use laxity_policy::PolicyKind;
use laxity_sim::scenario::{Scenario, Source};
use laxity_sim::simulate;

/// FNV-1a.
fn fnv(text: &[u8]) -> u64 {
    text.iter().fold(0xcbf2_9ce4_8422_2325, |digest, &byte| {
        (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Of an outcome's JSON.
fn digest(scenario: &Scenario) -> u64 {
    let outcome = simulate(scenario).expect("a scenario that makes sense");
    fnv(&serde_json::to_vec(&outcome).expect("an outcome is JSON"))
}

fn point(kind: PolicyKind, change: impl FnOnce(&mut Scenario)) -> Scenario {
    let mut scenario = Scenario::default();
    scenario.cluster.servers = 8;
    scenario.cluster.nic_gbps = 50.0;
    scenario.model.ep = 8;
    scenario.workload.seconds = 4.0;
    scenario.workload.rate_per_gpu = 1.2;
    scenario.policy.kind = kind;
    scenario.seed = 7;
    change(&mut scenario);
    scenario
}

fn ring(scenario: &mut Scenario) {
    let model = &mut scenario.model;
    model.name = "llama-3-8b".into();
    (model.tp, model.ep, model.sp) = (4, 1, 4);
    scenario.serving.decode_tp = 4;
    scenario.workload.source = Source::LongAgent;
    scenario.workload.rate_per_gpu = 0.4;
    scenario.workload.seconds = 10.0;
}

#[test]
fn outcomes_are_what_they_were_before_requests_had_schedulers() {
    let found = [
        digest(&point(PolicyKind::Fair, |_| ())),
        digest(&point(PolicyKind::Mfs, |_| ())),
        digest(&point(PolicyKind::Laxity, |_| ())),
        digest(&point(PolicyKind::Laxity, |s| {
            s.serving.token_budget = 700;
            s.serving.requests_per_batch = 2;
        })),
        digest(&point(PolicyKind::TwoClass, |s| s.serving.chunked = false)),
        digest(&point(PolicyKind::Laxity, ring)),
        digest(&point(PolicyKind::Mfs, ring)),
    ];
    let known = [
        0x0c82_d0f8_a00b_9420,
        0x287b_6f05_0695_a696,
        0x58ec_9de4_2bdd_d5d4,
        0x077e_9c89_aadc_2c4f,
        0xce45_b4fa_e28f_26df,
        0x8793_e6f9_025e_dbc4,
        0x1581_5872_476a_e986,
    ];
    assert_eq!(found, known, "{found:#x?}");
}

/// A plan's kept results are found by this text.
#[test]
fn a_scenario_without_what_was_added_is_the_same_text() {
    let text = serde_json::to_vec(&Scenario::default()).expect("a scenario is JSON");
    assert_eq!(fnv(&text), 0x4438_f9c3_9ecb_681f);
}
