//! The contention experiment on real verbs, with the criterion that it is for: under Laxity the
//! collective completes within 1.3 times of what it takes alone, where unscheduled it takes at least
//! twice as long, and no transfer misses a deadline that could be met.
//!
//! Without the usual test harness, since the guest runs this program as its first process. Skipped,
//! with the reason, where QEMU, the guest's kernel, or the programs cannot be had, and where the machine
//! is so busy that even the bulk alone misses its deadlines or the collective alone is no measure.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use laxity_rig::lab;
use laxity_rig::vm::image;
use laxity_rig::vm::verbs::contention::{Contention, ContentionConfig, Phase, Programs};
use laxity_rig::vm::{self, Input, Job, NetworkConfig, VmConfig};
use libtest_mimic::{Arguments, Failed, Trial};

fn main() -> ExitCode {
    if let Some(code) = lab::internal_call() {
        return code;
    }
    let name = "under_laxity_a_collective_does_not_feel_the_bulk_and_no_deadline_is_missed";
    let trials = vec![Trial::test(name, || match prepare() {
        Ok((config, programs)) => criterion(&config, programs),
        Err(reason) => {
            println!("skipped: {reason}");
            Ok(())
        }
    })];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn prepare() -> Result<(VmConfig, Programs), String> {
    let config = VmConfig {
        network: NetworkConfig {
            rate_mbit: Some(ContentionConfig::RATE_MBIT),
            ..NetworkConfig::default()
        },
        limit: Some(Duration::from_secs(900)),
        ..VmConfig::default()
    };
    let lacks = vm::lacks(&config);
    if !lacks.is_empty() {
        let lacks: Vec<String> = lacks.iter().map(ToString::to_string).collect();
        return Err(lacks.join("; "));
    }
    image::prepare(&config.cache, &|text| println!("{text}"))
        .map_err(|error| format!("{error:#}"))?;
    let executable = std::env::current_exe().map_err(|error| error.to_string())?;
    let folder = executable.parent().and_then(Path::parent);
    let programs = Programs::find(folder.ok_or("a test without a folder")?);
    Ok((config, programs.map_err(|error| format!("{error:#}"))?))
}

fn criterion(config: &VmConfig, programs: Programs) -> Result<(), Failed> {
    if programs.python.is_none() {
        println!("without Mooncake ($LAXITY_PYTHON): a test program writes in its place");
    }
    let mut play = ContentionConfig::new(programs);
    play.static_marks = false;
    let report = vm::run(config, &Job::Contention(play), Input::Empty, &mut |_, _| {
        Ok(())
    })?;
    let contention: Contention = serde_json::from_value(report.finished.details)?;
    println!("{contention}");
    for repetition in &contention.repetitions {
        let slowdown = |phase| repetition.slowdown(phase).ok_or("a phase is missing");
        let outcome = |phase| repetition.phases.get(&phase).ok_or("a phase is missing");
        let (alone, control) = (outcome(Phase::CollectiveAlone)?, outcome(Phase::BulkAlone)?);
        let missed = |phase| -> Result<u64, Failed> {
            let of = |load: Option<_>| {
                load.map_or(0, |load: vm::verbs::contention::Deadlines| load.missed())
            };
            let outcome = outcome(phase)?;
            Ok(of(outcome.p2d) + of(outcome.reads))
        };
        let rounds = alone.collective.ok_or("no rounds")?;
        if missed(Phase::BulkAlone)? > 0 || rounds.mean_us > 1.25 * rounds.p50_us {
            println!(
                "skipped: the machine is busy with other work ({}; {})",
                control.line(Phase::BulkAlone),
                alone.line(Phase::CollectiveAlone)
            );
            return Ok(());
        }
        let (mean, p50) = slowdown(Phase::Unscheduled)?;
        if mean < 2.0 || p50 < 2.0 {
            return Err(format!("no contention: {mean:.2} and {p50:.2} unscheduled").into());
        }
        let (mean, p50) = slowdown(Phase::Laxity)?;
        if mean > 1.3 || p50 > 1.3 {
            return Err(format!("under Laxity: mean {mean:.2}, median {p50:.2}").into());
        }
        if missed(Phase::Laxity)? > 0 {
            return Err(format!("{} deadlines missed", missed(Phase::Laxity)?).into());
        }
        let marks = &outcome(Phase::Laxity)?.bytes_by_dscp;
        if marks.contains_key(&0) || marks.len() < 2 {
            return Err(format!("unmarked bytes, or one class only: {marks:?}").into());
        }
    }
    Ok(())
}
