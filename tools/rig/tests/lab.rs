//! Short real runs of the lab in namespaces: what it reports, and that nothing is left behind.
//!
//! Without the usual test harness, since the lab runs this program again for its parts. Skipped,
//! with the reason, where the machine allows no namespaces.

use std::collections::BTreeSet;
use std::fs;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use laxity_rig::lab::{self, LabConfig};
use laxity_rig::plan::asking;
use laxity_rig::report;
use laxity_tests::{Need, skip};
use libtest_mimic::{Arguments, Trial};

/// Argument with which this program only runs a lab, to be killed.
const VICTIM: &str = "victim-of-the-kill-test";

fn short() -> LabConfig {
    // Cargo puts this program into `deps`, one folder below the others.
    let own = std::env::current_exe().expect("this program");
    let engine = own.ancestors().nth(2).map(|all| all.join("laxity-engine"));
    LabConfig {
        laxity_engine: engine,
        policies: vec!["none".into()],
        units: 2,
        ranks: 2,
        decodes: 1,
        duration_s: 2.0,
        drain_s: 20.0,
        load: 0.3,
        validate_ideal: false,
        ..LabConfig::default()
    }
}

fn main() -> ExitCode {
    if let Some(code) = lab::internal_call() {
        return code;
    }
    if std::env::args().nth(1).as_deref() == Some(VICTIM) {
        // It is killed before this ends.
        let _ = lab::run(&LabConfig { duration_s: 60.0, ..short() }, false);
        return ExitCode::SUCCESS;
    }
    // Speaks the test harness's protocol, so that nextest can list and pick.
    let trial = |name: &str, test: fn()| {
        Trial::test(name, move || {
            let findings = lab::probe(&short());
            if findings.can_run() {
                test();
            } else {
                skip(Need::Machine, findings);
            }
            Ok(())
        })
    };
    let trials = vec![
        trial("a_run_moves_every_byte_once_and_reports_it", a_run_moves_every_byte_once),
        trial("a_killed_lab_leaves_nothing_behind", a_killed_lab_leaves_nothing_behind),
        trial("an_impossible_run_is_refused_with_a_reason", an_impossible_run_is_refused),
    ];
    let mut arguments = Arguments::from_args();
    // Each run loads the machine, and the kill test looks at all processes.
    arguments.test_threads = Some(1);
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn a_run_moves_every_byte_once() {
    let config = short();
    let report = lab::run(&config, false).expect("the lab runs");
    let run = &report.runs[0];
    assert!(run.requests > 0 && run.completed == run.requests, "{run:?}");
    assert_eq!((run.batches_failed, run.prefilled_after_all), (0, 0));
    assert_eq!(run.fabric_drops, 0, "the fabric is lossless");
    let (words, unmarked) = (run.fabric_bytes[&48], run.fabric_bytes[&0]);
    assert_eq!(run.fabric_bytes.values().sum::<u64>(), words + unmarked);
    assert!(unmarked >= run.bypassed_bytes, "unmarked, and headers come on top");
    let asked = asking(&config).expect("arrivals").asked;
    let tokens: usize = asked.iter().map(|one| one.tokens as usize).sum();
    let serving = config.serving();
    let expected = tokens * serving.kv_bytes() * serving.layers;
    assert_eq!(
        run.stage_bytes["p2d"][&0], expected as u64,
        "all KV of all layers went to decode, once"
    );
    assert!(run.ttft_ms.mean > 0.0 && run.exchange_ms > 0.0);
    let json = serde_json::to_value(&report).expect("JSON");
    assert_eq!(json["runs"][0]["policy"], "none");
    assert!(report::table(&report).contains("none"));
    let left = descendants(std::process::id());
    assert!(left.is_empty(), "processes of the sandbox are left: {left:?}");
}

fn processes() -> Vec<u32> {
    let entries = fs::read_dir("/proc").expect("/proc");
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Parent and start time of a process: together with its number they name it for ever.
fn parent_and_start(pid: u32) -> Option<(u32, u64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain anything.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    if fields.first() == Some(&"Z") {
        return None;
    }
    Some((fields.get(1)?.parse().ok()?, fields.get(19)?.parse().ok()?))
}

fn descendants(root: u32) -> BTreeSet<(u32, u64)> {
    let mut found = BTreeSet::new();
    let mut known = BTreeSet::from([root]);
    loop {
        let before = known.len();
        for pid in processes() {
            if let Some((parent, start)) = parent_and_start(pid)
                && known.contains(&parent)
                && known.insert(pid)
            {
                found.insert((pid, start));
            }
        }
        if known.len() == before {
            return found;
        }
    }
}

fn a_killed_lab_leaves_nothing_behind() {
    let this = std::env::current_exe().expect("this program");
    let mut victim = Command::new(this).arg(VICTIM).stdout(Stdio::null()).spawn().expect("starts");
    // The sandbox's two processes and an engine per host.
    let whole = 2 + short().hosts();
    let give_up = Instant::now() + Duration::from_secs(30);
    let parts = loop {
        let parts = descendants(victim.id());
        if parts.len() >= whole {
            break parts;
        }
        assert!(Instant::now() < give_up, "the lab does not start: {parts:?}");
        std::thread::sleep(Duration::from_millis(20));
    };
    victim.kill().expect("SIGKILL");
    victim.wait().expect("reaped");
    let give_up = Instant::now() + Duration::from_secs(10);
    loop {
        let left: Vec<_> = parts
            .iter()
            .filter(|(pid, start)| parent_and_start(*pid).is_some_and(|(_, s)| s == *start))
            .collect();
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < give_up, "still there: {left:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn an_impossible_run_is_refused() {
    let refused =
        |config: LabConfig| format!("{:#}", lab::run(&config, false).expect_err("refused"));
    let message = refused(LabConfig { ranks: 1, ..short() });
    assert!(message.starts_with("ranks"), "{message}");
    let message = refused(LabConfig { policies: vec!["best".into()], ..short() });
    assert!(message.contains("laxity") && message.contains("best"), "{message}");
    let file = lab::WorkloadSource::File("/nowhere/requests.jsonl".into());
    let message = refused(LabConfig { workload: file, ..short() });
    assert!(message.contains("/nowhere/requests.jsonl"), "{message}");
}
