//! Scenarios whose outcomes are known to the last bit. New features of the serving model that are
//! off by default must not change them.
//!
//! A change of the model itself changes these outcomes. To accept them, run `INSTA_UPDATE=always
//! cargo test -p laxity-sim --test unchanged`, and explain the change in the commit.

use laxity_policy::PolicyKind;
use laxity_sim::report::metric::ALL;
use laxity_sim::scenario::{Scenario, Source};
use laxity_sim::simulate;

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
    let cases = [
        ("fair", point(PolicyKind::Fair, |_| ())),
        ("mfs", point(PolicyKind::Mfs, |_| ())),
        ("laxity", point(PolicyKind::Laxity, |_| ())),
        (
            "small batches",
            point(PolicyKind::Laxity, |s| {
                s.serving.token_budget = 700;
                s.serving.requests_per_batch = 2;
            }),
        ),
        ("whole prompts", point(PolicyKind::TwoClass, |s| s.serving.chunked = false)),
        ("laxity, ring", point(PolicyKind::Laxity, ring)),
        ("mfs, ring", point(PolicyKind::Mfs, ring)),
    ];
    let mut table = String::new();
    for (name, scenario) in cases {
        let outcome = simulate(&scenario).expect("a scenario that makes sense");
        table += &format!("{name}\n");
        for metric in ALL {
            table += &format!("    {:<24}{}\n", metric.key, (metric.of)(&outcome));
        }
    }
    insta::assert_snapshot!(table);
}

/// A plan's kept results are found by this text, so it must not change.
#[test]
fn a_scenario_without_what_was_added_is_the_same_text() {
    let text = serde_json::to_string_pretty(&Scenario::default()).expect("a scenario is JSON");
    insta::assert_snapshot!(text);
}
