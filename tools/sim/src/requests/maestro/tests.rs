//! Tests of the properties that Maestro's figures depend on.

use std::sync::Arc;

use laxity_requests::maestro::queue::Boundary;

use super::super::reproduction::Options;
use super::apps::JobSource;
use super::catalogue::{self, node};
use super::machine::{Came, NodeState, Running};
use super::trial::{Kit, Trial, TrialPolicy};
use super::*;
use laxity_requests::workflow::{ModelId, StageId};

fn trial(policy: TrialPolicy, rate: f64, seed: u64) -> Trial {
    Trial {
        policy,
        rate,
        batch: 0.6,
        seconds: 60.0,
        nodes: Arc::new(vec![node(0); 2]),
        rtt: Arc::new(Vec::new()),
        seed,
        rounds: 1,
        variants: 1,
    }
}

fn running(model: u16, output: u32) -> Running {
    Running {
        model: ModelId(model),
        prompt: 10,
        output,
        promised: u64::MAX / 2,
        delay: 0.0,
        prefill: 0.0,
        generated: 0.0,
        stopped: false,
    }
}

fn end(machine: &mut NodeState, models: &[catalogue::ServedModel]) -> (f64, Vec<Came>) {
    let at = machine.next(models).expect("something runs");
    machine.advance(at, models);
    (at, machine.came(models))
}

#[test]
fn models_share_a_gpu_in_time_and_stages_of_one_model_decode_together() {
    let models = catalogue::models().expect("built in");
    let time = |stages: &[(u16, u32)]| {
        let mut machine = NodeState::default();
        for (id, (model, output)) in stages.iter().enumerate() {
            machine.running.insert(StageId(id as u64), running(*model, *output));
        }
        end(&mut machine, &models).0
    };
    let alone = time(&[(2, 100)]);
    assert!((alone - 100.0 * models[2].decode(1)).abs() < 1.0);
    let together = time(&[(2, 100), (2, 100)]);
    assert!((together - 100.0 * models[2].decode(2)).abs() < 1.0);
    let beside = time(&[(2, 100), (3, 1000)]);
    assert!((beside - 2.0 * alone).abs() < 1.0);
}

#[test]
fn a_stage_that_has_filled_what_it_was_promised_stops_and_asks() {
    let models = catalogue::models().expect("built in");
    let kv = models[2].spec.kv_per_token;
    let mut machine = NodeState::default();
    let stage = Running { promised: 30 * kv, ..running(2, 100) };
    machine.running.insert(StageId(7), stage);
    let (_, came) = end(&mut machine, &models);
    assert_eq!(came, [Came::Outgrew(StageId(7), 46 * kv)]);
    assert_eq!(machine.next(&models), None);
    assert!(machine.kv(&models) <= 30 * kv);
}

#[test]
fn every_job_ends_and_memory_holds_under_every_policy() {
    let kit = Kit::new(true).expect("kit");
    for policy in TrialPolicy::all() {
        let of = trial(policy.clone(), 3.0, 5).run(&kit);
        let name = &policy.options.name;
        assert_eq!((of.ran.lost, of.ran.overflows), (0, 0), "{name}");
        assert!(of.ran.fullest <= 1.0 && of.ran.fullest > 0.5, "{name}: {}", of.ran.fullest);
        assert!((0.0..=100.0).contains(&of.met));
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let kit = Kit::new(true).expect("kit");
    let run = || format!("{:?}", trial(TrialPolicy::maestro(), 2.0, 9).run(&kit));
    assert_eq!(run(), run());
}

#[test]
fn alone_nobody_waits_but_for_weights() {
    let kit = Kit::new(true).expect("kit");
    let of = trial(TrialPolicy::maestro(), 0.05, 3).run(&kit);
    assert!(of.delay < 40.0 && of.ran.swapped == 0 && of.ran.aborted == 0);
}

#[test]
fn without_preemption_interactive_jobs_wait_longer() {
    let kit = Kit::new(true).expect("kit");
    let with = trial(TrialPolicy::maestro(), 4.0, 2).run(&kit);
    let without = trial(TrialPolicy::turned("w/o", Boundary::Hold), 4.0, 2).run(&kit);
    assert!(with.ran.preempted > 0 && without.ran.preempted == 0);
    assert!(with.delay < without.delay, "{} against {}", with.delay, without.delay);
}

#[test]
fn a_quick_reproduction_has_all_tables_and_claims() {
    let found = reproduce(&Options::quick(1)).expect("built in");
    assert_eq!(found.sections.len(), 12);
    assert!(found.claims.len() >= 9 && found.quick);
    found.assert_whole();
    let safe = found.claims.iter().find(|claim| claim.says == "no KV overflow");
    assert!(safe.expect("there").holds);
}

#[test]
fn applications_have_the_shares_of_table_i() {
    let jobs = JobSource::new(11).mixed(6000);
    for (index, app) in apps::APPS.iter().enumerate() {
        let here = jobs.iter().filter(|job| usize::from(job.job.template.0) == index).count();
        let share = here as f64 / 6000.0 - app.share();
        assert!(share.abs() < 0.02, "{}: {share:+}", app.name);
    }
}
