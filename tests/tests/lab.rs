//! Tests of the lab with real namespaces, TCP and daemons. Runs are short. The tests compare counts
//! that differ by orders of magnitude, and never speeds.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use laxity_tests::{Need, recorded_data, skip};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::nccl::plugin;
use crate::process::{Said, binary, eventually, laxity, signal};

/// Makes tests of this process run one at a time, because the lab loads the whole machine. nextest
/// has a process for each test, and `.config/nextest.toml` has the same rule for it.
fn alone() -> MutexGuard<'static, ()> {
    static LAB: Mutex<()> = Mutex::new(());
    LAB.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a command for `laxity lab run` with the engine that was built here.
fn lab() -> Command {
    let mut command = Command::new(binary("laxity"));
    command.args(["lab", "run"]).env("LAXITY_ENGINE", binary("laxity-engine"));
    command
}

/// Returns the report of a run. If the machine can't run the lab, the test is skipped.
fn run(arguments: &[&str]) -> Option<Value> {
    let mut probe = Command::new(binary("laxity"));
    probe.args(["lab", "probe"]).env("LAXITY_ENGINE", binary("laxity-engine"));
    let probe = Said::of(&mut probe);
    if !probe.status.success() {
        skip(Need::Machine, probe.stderr);
        return None;
    }
    Some(run_with(arguments, &[]))
}

/// Does the same as [`run`] with an environment, on a machine that can run the lab.
fn run_with(arguments: &[&str], environment: &[(&str, &str)]) -> Value {
    let mut lab = lab();
    lab.args(["--quiet", "--json", "-"]).args(arguments).envs(environment.iter().copied());
    Said::of(lab.stdin(Stdio::null())).good().json()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// Checks that every request has its whole answer. An answer depends on every byte, so it also
/// shows that no byte was lost, damaged or misplaced.
fn nothing_lost(run: &Value) {
    assert_eq!(run["completed"], run["requests"], "{run}");
    assert_eq!(run["answers_compared"], run["requests"], "{run}");
    assert_eq!(run["answers_different"], serde_json::json!([]), "{run}");
    for fault in ["batches_failed", "prefilled_after_all"] {
        assert_eq!(number(&run[fault]), 0.0, "{fault}: {run}");
    }
}

fn dscp_bytes(run: &Value, stage: &str, dscp: &[&str]) -> f64 {
    dscp.iter().filter_map(|d| run["stage_bytes"][stage][d].as_f64()).sum()
}

#[test]
fn a_scheduled_run_marks_each_stage_and_loses_no_byte() {
    let _alone = alone();
    let arguments = ["--policies", "none,two_class,mfs,laxity", "--duration", "3", "--seed", "5"];
    let Some(report) = run(&arguments) else { return };
    let runs = report["runs"].as_array().expect("runs");
    let names: Vec<_> = runs.iter().map(|run| run["policy"].as_str().expect("name")).collect();
    assert_eq!(names, ["none", "two_class", "mfs", "laxity"]);
    for run in runs {
        nothing_lost(run);
        for field in ["ttft_slo_attainment", "earliness", "link_utilisation"] {
            assert!((-1.0..=1.0).contains(&number(&run[field])), "{field}: {run}");
        }
        for field in ["mean", "p50", "p99"] {
            assert!(number(&run["ttft_ms"][field]) > 0.0);
        }
        assert!(number(&run["exchange_ms"]) > 0.0);
        for part in ["queued", "collective", "compute", "p2d_tail"] {
            assert!(number(&run["stages_ms"][part]) > 0.0, "{part}: {run}");
        }
        // Requests go to the same hosts under every policy. A rank without tokens sends a few bytes
        // of collectives in each layer. How often it does depends on the policy.
        for (stage, tolerance) in [("kv_reuse", 0.0), ("collective", 1e-3), ("p2d", 0.0)] {
            let all = |run: &Value| sum(&run["stage_bytes"][stage]);
            let difference = (all(run) / all(&runs[0]) - 1.0).abs();
            assert!(difference <= tolerance, "{stage}: {difference}");
        }
    }
    assert!(number(&report["alone"]["ideal_check"]["requests"]) > 0.0);

    let unmarked = |run: &Value| {
        let by_dscp = run["fabric_bytes"].as_object().expect("bytes by DSCP");
        // Control messages have the same DSCP under every policy.
        let payload = by_dscp.iter().filter(|(dscp, _)| *dscp != "48");
        let all: f64 = payload.map(|(_, bytes)| number(bytes)).sum();
        number(&run["fabric_bytes"]["0"]) / all
    };
    assert!(unmarked(&runs[0]) > 0.99, "`none` marks nothing: {}", runs[0]["fabric_bytes"]);
    for run in &runs[1..] {
        assert!(unmarked(run) < 0.01, "the fabric saw unmarked bytes: {}", run["fabric_bytes"]);
        assert_eq!(number(&run["bypassed_bytes"]), 0.0, "{run}");
        // All collectives are in the two highest classes, above KV that can wait.
        let collectives = dscp_bytes(run, "collective", &["46", "34"]);
        let all = dscp_bytes(run, "collective", &["46", "34", "26", "18", "10", "8"]);
        assert_eq!(collectives, all, "{}", run["stage_bytes"]);
    }
    let laxity = &runs[3];
    // P2D is never in the collectives' class.
    let p2d = |dscp: &[&str]| dscp_bytes(laxity, "p2d", dscp);
    assert_eq!(p2d(&["34"]), 0.0, "{}", laxity["stage_bytes"]);
    assert!(p2d(&["26", "18", "10", "8"]) > 0.9 * p2d(&["46", "26", "18", "10", "8"]));
    // KV that is needed soon is in the collectives' class.
    assert!(dscp_bytes(laxity, "kv_reuse", &["34"]) > 0.0);
}

#[test]
fn a_daemon_killed_in_the_middle_costs_no_byte_and_is_reported() {
    let _alone = alone();
    let arguments = ["--policies", "laxity", "--duration", "4", "--kill-daemon-at", "1.5"];
    let Some(report) = run(&arguments) else { return };
    let run = &report["runs"][0];
    nothing_lost(run);
    assert!(number(&run["unscheduled_ms"]) > 0.0, "{run}");
    assert_eq!(number(&run["daemon_restarts"]), 1.0, "{run}");
    assert!(number(&run["scheduled_bytes"]) > 0.0, "{run}");
}

#[test]
fn daemons_measure_a_foreign_sender_leave_it_room_and_have_the_full_rate_after_it() {
    let _alone = alone();
    let arguments = "--policies laxity --duration 4 --load 0.3 --foreign 0.4 --residual on";
    let Some(report) = run(&arguments.split(' ').collect::<Vec<_>>()) else { return };
    let (run, foreign) = (&report["runs"][0], &report["runs"][0]["foreign"]);
    nothing_lost(run);
    let measured = number(&foreign["measured_bytes_per_s"]);
    let of_asked = measured / number(&foreign["asked_bytes_per_s"]);
    assert!((0.3..2.0).contains(&of_asked), "{foreign}");
    assert!((0.25..0.9).contains(&number(&foreign["rate_in_force"])), "{foreign}");
    assert!(number(&foreign["full_rate_after_s"]) < 20.0, "{foreign}");
}

/// All hosts read from one victim, and the requests have little time.
const READS: [&str; 14] = [
    "--reads", "--coordinator", "--policies", "laxity", "--workload", "agent", "--duration", "4",
    "--units", "4", "--victim-share", "1", "--load", "1.2",
];

#[test]
fn the_coordinator_learns_of_what_is_read_from_a_victim() {
    let _alone = alone();
    let Some(report) = run(&READS) else { return };
    let run = &report["runs"][0];
    nothing_lost(run);
    let said = &run["coordinator"];
    assert_eq!(number(&said["following"]), 10.0, "{said}");
    assert_eq!(number(&said["refused_orders"]), 0.0, "{said}");
    assert!(number(&said["fetches"]) > 50.0, "{said}");
    // The holders send blocks that are read, and their daemons do not permit these.
    assert!(sum(&run["stage_bytes"]["kv_reuse"]) > 0.0, "{run}");
}

#[test]
fn a_coordinator_killed_in_the_middle_costs_no_byte() {
    let _alone = alone();
    let Some(report) = run(&[&READS[..], &["--kill-coordinator-at", "2"]].concat()) else { return };
    let run = &report["runs"][0];
    nothing_lost(run);
    assert_eq!(run["coordinator"]["killed"], true);
    assert!(number(&run["coordinator"]["orders"]) > 0.0, "{run}");
    assert_eq!(number(&run["bypassed_bytes"]), 0.0, "daemons went on");
}

#[test]
fn what_the_caller_has_set_for_a_daemon_of_its_own_does_not_reach_those_of_the_lab() {
    let _alone = alone();
    let arguments = ["--policies", "laxity", "--duration", "1", "--load", "0.2"];
    if run(&arguments).is_none() {
        return;
    }
    let environment = [
        ("LAXITY_SOCKET", "/run/nowhere/laxityd.sock"),
        ("LAXITY_CONTROL", "/run/nowhere/control.sock"),
        ("LAXITY_CONFIG", "/nonexistent/laxityd.toml"),
        ("LAXITY_LOG", "inof"),
        ("LAXITY_MODE", "off"),
        ("LAXITY_NAME", "mine"),
        ("LAXITY_STALL_MS", "0"),
    ];
    let report = run_with(&arguments, &environment);
    let run = &report["runs"][0];
    nothing_lost(run);
    assert!(number(&run["scheduled_bytes"]) > 0.0, "{run}");
}

fn network_namespaces() -> std::collections::BTreeSet<PathBuf> {
    fs::read_dir("/proc")
        .expect("/proc")
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path().join("ns/net")).ok())
        .collect()
}

fn processes_with(word: &str) -> usize {
    fs::read_dir("/proc")
        .expect("/proc")
        .flatten()
        .filter_map(|entry| fs::read(entry.path().join("cmdline")).ok())
        .filter(|line| String::from_utf8_lossy(line).contains(word))
        .count()
}

#[test]
fn a_lab_that_is_killed_leaves_neither_namespace_nor_process() {
    let _alone = alone();
    if run(&["--policies", "none", "--duration", "1", "--load", "0.2"]).is_none() {
        return;
    }
    for ending in [Signal::SIGINT, Signal::SIGKILL] {
        let before = network_namespaces();
        let mut lab = lab()
            .args(["--quiet", "--policies", "laxity", "--duration", "30"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("laxity runs");
        eventually("the lab's daemons run", || processes_with("/run/lab/") > 8);
        std::thread::sleep(Duration::from_millis(300));
        signal(lab.id(), ending);
        lab.wait().expect("it ends");
        eventually("every process of the lab is gone", || processes_with("/run/lab/") == 0);
        eventually("every namespace of the lab is gone", || {
            network_namespaces().is_subset(&before)
        });
    }
}

#[test]
fn recorded_requests_are_replayed() {
    let _alone = alone();
    let Some(folder) = recorded_data() else { return };
    for trace in ["mooncake_conversation.jsonl.gz", "azure_llm_2023_code.csv.gz"] {
        let trace = folder.join("traces").join(trace).display().to_string();
        let arguments = ["--policies", "laxity", "--duration", "2", "--workload", &trace];
        let Some(report) = run(&arguments) else { return };
        nothing_lost(&report["runs"][0]);
    }
}

fn sum(by_dscp: &Value) -> f64 {
    let by_dscp = by_dscp.as_object();
    by_dscp.into_iter().flat_map(|map| map.values()).map(number).sum()
}

#[test]
fn the_nccl_plugin_carries_collectives_and_the_daemons_schedule_it() {
    let _alone = alone();
    let path = plugin();
    let path = path.to_str().expect("a path");
    let arguments = [
        "--collectives", "nccl-plugin", "--nccl-plugin", path, "--policies", "none,laxity",
        "--duration", "3", "--seed", "5",
    ];
    let Some(report) = run(&arguments) else { return };
    assert_eq!(report["config"]["collectives"], "nccl-plugin");
    for run in report["runs"].as_array().expect("runs") {
        nothing_lost(run);
        let (plugin, stages) = (&run["plugin"], &run["stage_bytes"]);
        // The engine's own connections carried the other stages, and no collectives.
        assert!(stages["collective"].is_null(), "{stages}");
        let carried = number(&plugin["payload_bytes"]);
        assert!(carried > 1e6, "{plugin}");
        // The plugin reports these bytes, and those that engines sent to warm up.
        let sent = sum(&plugin["sent_bytes"]["collective"]);
        assert!((carried..carried * 1.1).contains(&sent), "{plugin}");
        // If the kernel has its own buffer limits, queues may overflow, and TCP sends again.
        if run["buffers_unbounded"] == false {
            assert_eq!(number(&run["fabric_drops"]), 0.0, "{run}");
        }
    }
    let (none, laxity) = (&report["runs"][0], &report["runs"][1]);
    let unmarked = &none["plugin"]["sent_bytes"]["collective"]["0"];
    assert_eq!(number(unmarked), sum(&none["plugin"]["sent_bytes"]["collective"]));
    assert_eq!(number(&none["plugin"]["clients"]), 0.0, "no daemon, no client of it");

    let plugin = &laxity["plugin"];
    let sent = &plugin["sent_bytes"]["collective"];
    assert_eq!(number(&plugin["clients"]), 6.0, "one on each prefill host: {plugin}");
    assert!(number(&plugin["submitted_bytes"]) > 0.95 * sum(sent), "{plugin}");
    // With the plugin, too, collectives are in the two highest classes, above KV that can wait.
    let high = |by_dscp: &Value| -> f64 {
        ["46", "34"].iter().filter_map(|dscp| by_dscp[dscp].as_f64()).sum()
    };
    assert!(high(sent) > 0.95 * sum(sent), "{plugin}");
    assert!(high(&plugin["permitted_bytes"]) > 0.95 * sum(sent), "{plugin}");
    // The fabric is counted after the warm-up, as the payload is. A part of it may be marked lower,
    // as above.
    let carried = number(&plugin["payload_bytes"]);
    assert!(high(&laxity["fabric_bytes"]) > 0.95 * carried, "{plugin} {}", laxity["fabric_bytes"]);
}

#[test]
fn a_plugin_that_is_not_there_is_named_with_the_next_step() {
    let mut lab = lab();
    lab.args(["--collectives", "nccl-plugin", "--policies", "none"]);
    let output = Said::of(lab.args(["--nccl-plugin", "/nowhere/libnccl-net-laxity.so"]));
    let errors = &output.stderr;
    assert!(!output.status.success(), "{errors}");
    assert!(errors.contains("/nowhere/libnccl-net-laxity.so is not there"), "{errors}");
    assert!(errors.contains("--nccl-plugin"), "{errors}");
}

/// A model that a debug build computes quickly, and whose transfers take seconds on a slow link.
const SMALL_ENGINE: &str = r#"
engine = "real"
policies = ["none", "laxity"]
duration_s = 4.0
requests_per_second = 2.5
tokens_max = 256
port_mbit = 20

[real]
layers = 2
hidden = 64
heads = 4
kv_heads = 2
head_dim = 32
ffn = 64
vocab = 300
experts = 4
tokens_mean = 120.0
prefixes = 4
kv_blocks = 512
output_tokens = 3
"#;

#[test]
fn the_real_engine_answers_the_same_under_every_policy_and_all_that_it_sends_is_scheduled() {
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let config = folder.path().join("lab.toml");
    fs::write(&config, SMALL_ENGINE).expect("a file");
    let page = folder.path().join("page.html");
    let engine = binary("laxity-engine");
    let [config, page, engine] =
        [&config, &page, &engine].map(|path| path.to_str().expect("a path"));
    let arguments = ["--config", config, "--laxity-engine", engine, "--html", page, "--seed", "5"];
    let Some(report) = run(&arguments) else { return };
    assert_eq!(report["engine"], "real");
    assert!(number(&report["alone"]["ttft_ms"]["p50"]) > 0.0, "{report}");
    assert!(number(&report["workload"]["prefix_tokens"]) > 0.0, "{report}");
    let runs = report["runs"].as_array().expect("runs");
    let names: Vec<_> = runs.iter().map(|run| run["policy"].as_str()).collect();
    assert_eq!(names, [Some("none"), Some("laxity")]);
    for run in runs {
        // The command itself compares the tokens. This checks that it compared any.
        nothing_lost(run);
        assert!(number(&run["tokens_fetched"]) > 0.0, "{run}");
        assert!(number(&run["exchange_ms"]) > 0.0, "{run}");
        assert!((0.0..=1.0).contains(&number(&run["ttft_slo_attainment"])));
        for field in ["mean", "p50", "p95"] {
            assert!(number(&run["ttft_ms"][field]) > 0.0, "{run}");
        }
        for stage in ["kv_reuse", "collective", "p2d"] {
            assert!(sum(&run["stage_bytes"][stage]) > 1e4, "{stage}: {run}");
        }
        assert_eq!(run["hosts"].as_array().map(Vec::len), Some(4));
    }
    let (none, laxity) = (&runs[0], &runs[1]);
    let all = |run: &Value| -> f64 {
        let stages = run["stage_bytes"].as_object().expect("stages");
        stages.values().map(sum).sum()
    };
    // Without a daemon no byte is permitted, and none is marked.
    assert_eq!(number(&none["scheduled_bytes"]), 0.0, "{none}");
    assert_eq!(number(&none["bypassed_bytes"]), all(none), "{none}");
    assert_eq!(number(&none["stage_bytes"]["p2d"]["0"]), sum(&none["stage_bytes"]["p2d"]));
    // With a daemon every byte is permitted, and experts' tokens outrank waiting KV.
    assert_eq!(number(&laxity["bypassed_bytes"]), 0.0, "{laxity}");
    assert_eq!(number(&laxity["scheduled_bytes"]), all(laxity), "{laxity}");
    assert_eq!(
        dscp_bytes(laxity, "collective", &["46", "34"]),
        sum(&laxity["stage_bytes"]["collective"]),
        "{laxity}"
    );
    assert!(number(&laxity["fabric_bytes"]["34"]) > 0.0, "{laxity}");
    let page = fs::read_to_string(page).expect("a page");
    assert!(page.contains("real engine") && page.contains("<svg"));
}

#[test]
fn what_means_nothing_to_the_real_engine_is_refused_with_the_reason() {
    let refused = |arguments: &[&str]| {
        let output = laxity(&[&["lab", "run", "--engine", "real"], arguments].concat());
        assert!(!output.status.success(), "{arguments:?}");
        output.stderr
    };
    for (arguments, said) in [
        (&["--load", "0.5"][..], "requests_per_second"),
        (&["--victim-share", "1"], "where the engine computed them"),
        (&["--collectives", "nccl-plugin"], "Laxity's client"),
        (&["--nccl-plugin", "/x"], "Laxity's client"),
    ] {
        let errors = refused(arguments);
        assert!(errors.contains(arguments[0]) && errors.contains(said), "{errors}");
    }
    let errors = refused(&["--laxity-engine", "/nowhere/laxity-engine"]);
    assert!(errors.contains("laxity-engine: /nowhere/laxity-engine is not there"), "{errors}");
}
