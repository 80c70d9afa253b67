//! The lab with released vLLM, which computes on the processors. vLLM takes 6 GB, so these tests
//! run only where `make setup-vllm` was run before.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use laxity_tests::{Need, skip};
use serde_json::Value;

use crate::process::{Said, binary};
use crate::python;
use crate::sources::root;

fn vllm_python() -> Option<PathBuf> {
    let laxityd = binary("laxityd");
    let target = laxityd.ancestors().nth(2).expect("a target folder");
    let python = target.join("vllm/bin/python");
    if python.is_file() {
        return Some(python);
    }
    skip(Need::Vllm, format!("{} is not there: run `make setup-vllm`", python.display()));
    None
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Release {
    Newest,
    Older,
}

/// Runs the lab with vLLM and this build's package, and returns its report. Returns `None` where
/// vLLM is missing.
fn lab(release: Release, arguments: &[&str]) -> Option<Value> {
    let vllm = vllm_python()?;
    let builder = match python::builder() {
        Ok(builder) => builder,
        Err(reason) => {
            skip(Need::Machine, reason);
            return None;
        }
    };
    let folder = tempfile::tempdir().expect("a folder");
    let wheel = python::wheel(&builder, &folder.path().join("wheels"));
    let package = folder.path().join("package");
    let mut install = Command::new(&vllm);
    install.args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"]);
    Said::of(install.arg(&package).arg(&wheel)).good();

    // What stands here comes before the environment's own packages.
    let mut path = vec![package];
    if release == Release::Older {
        path.push(vllm.ancestors().nth(2).expect("an environment").join("older"));
        assert!(path[1].is_dir(), "{} is not there: run `make setup-vllm`", path[1].display());
    }
    let output = Command::new(binary("laxity-lab"))
        .args(["lab", "run", "--engine", "vllm", "--quiet", "--json", "-"])
        .args(["--duration", "6", "--requests-per-second", "1.5"])
        .args(arguments)
        .env("LAXITY_VLLM_PYTHON", &vllm)
        .env("PYTHONPATH", std::env::join_paths(path).expect("a path"))
        .stdin(Stdio::null())
        .output()
        .expect("laxity-lab runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
    assert_eq!(report["engine"], "vllm");
    Some(report)
}

/// Runs the newest vLLM in the lab without a policy and with Laxity. `keys` are its configuration.
fn configured_lab(keys: &str, units: &str) -> Option<Value> {
    let folder = tempfile::tempdir().expect("a folder");
    let config = folder.path().join("lab.toml");
    fs::write(&config, keys).expect("written");
    let config = config.to_str().expect("UTF-8");
    let arguments = ["--units", units, "--policies", "none,laxity", "--config", config];
    lab(Release::Newest, &arguments)
}

/// Checks that each request of a run was answered as it was alone, and that no byte of KV was lost
/// or had no permit. Returns the bytes that moved.
fn check_answers_and_bytes(run: &Value) -> u64 {
    assert_eq!(run["completed"], run["requests"], "{run}");
    assert_eq!(run["answers_compared"], run["requests"], "{run}");
    assert_eq!((&run["wrong_answers"], &run["bytes_lost"]), (&0.into(), &0.into()), "{run}");
    let kv = |field: &str| run["kv"][field].as_u64().expect(field);
    assert!(kv("moved_bytes") > 0, "KV moved: {run}");
    let of_engine = kv("moved_bytes") + kv("reused_bytes") + kv("stored_bytes");
    let completed = if run["policy"] == "none" { 0 } else { of_engine };
    assert_eq!(kv("completed_bytes"), completed, "{run}");
    assert_eq!(kv("bypassed_bytes"), 0, "{run}");
    kv("moved_bytes")
}

/// Checks all runs, which move the same bytes.
fn check_same_bytes(report: &Value, runs: usize) {
    let moved = report["runs"].as_array().expect("runs").iter().map(check_answers_and_bytes);
    let moved: Vec<u64> = moved.collect();
    assert_eq!(moved, vec![moved[0]; runs], "{report}");
}

#[test]
fn vllm_answers_alike_under_every_policy_and_no_byte_of_kv_is_lost() {
    let policies = ["--units", "1", "--policies", "none,laxity_no_hints,laxity"];
    let Some(report) = lab(Release::Newest, &policies) else { return };
    for run in report["runs"].as_array().expect("runs") {
        check_answers_and_bytes(run);
        // Without hints a read counts as KV reuse. The connector's hints say that it is P2D.
        let stages: Vec<&String> = run["stage_bytes"].as_object().expect("stages").keys().collect();
        match run["policy"].as_str() {
            Some("laxity") => assert_eq!(stages, ["p2d"], "{run}"),
            Some("laxity_no_hints") => assert_eq!(stages, ["kv_reuse"], "{run}"),
            _ => assert!(stages.is_empty(), "{run}"),
        }
    }
}

/// Each process of a host then moves the KV of its own heads, and asks for its own permits.
#[test]
fn vllm_with_tensor_parallelism_answers_alike_and_loses_no_byte_of_kv() {
    const PARALLEL: &str =
        "vllm.arguments = ['--tensor-parallel-size=2', '--distributed-executor-backend=mp']\n";
    let Some(report) = configured_lab(PARALLEL, "1") else { return };
    check_same_bytes(&report, 2);
}

/// Without a daemon the engine reads, too. With one, the store's reads and puts need permits.
#[test]
fn prefill_hosts_reuse_each_others_kv_over_the_network_and_only_with_permits() {
    let keys = "[vllm]\nstore = true\nprefixes = 2\n";
    let Some(report) = configured_lab(keys, "2") else { return };
    let port_mbit = report["config"]["port_mbit"].as_f64().expect("a rate");
    for run in report["runs"].as_array().expect("runs") {
        check_answers_and_bytes(run);
        let kv = |field: &str| run["kv"][field].as_u64().expect(field);
        assert!(kv("reused_bytes") > 0, "{run}");
        // Prefill hosts receive nothing else: decode hosts read from them.
        let hosts = &run["hosts"].as_array().expect("hosts")[..2];
        let ingress = hosts.iter().map(|host| host["ingress"].as_f64().expect("a share"));
        let port_bytes = port_mbit * 1e6 / 8.0 * run["wall_s"].as_f64().expect("a time");
        assert!(ingress.sum::<f64>() * port_bytes >= kv("reused_bytes") as f64, "{run}");
        let permitted = ["kv_reuse", "background", "p2d"]
            .map(|stage| run["stage_bytes"][stage]["0"].as_u64().unwrap_or(0));
        let moved = match run["policy"].as_str() {
            Some("laxity") => ["reused_bytes", "stored_bytes", "moved_bytes"].map(kv),
            _ => [0; 3],
        };
        assert_eq!(permitted, moved, "{run}");
    }
}

/// Each layer of each batch then exchanges rows with the other prefill host, and waits for them.
#[test]
fn layers_of_prefill_hosts_wait_for_collectives_that_the_nccl_plugin_carries() {
    let Some(report) = configured_lab("vllm.collectives = true\n", "2") else { return };
    let number = |value: &Value| value.as_f64().expect("a number");
    let config = &report["config"];
    let [layers, token_bytes] =
        ["layers", "collective_token_bytes"].map(|field| number(&config["vllm"][field]));
    for run in report["runs"].as_array().expect("runs") {
        check_answers_and_bytes(run);
        let count = |field: &str| number(&run["collectives"][field]);
        assert_eq!(count("exchanges") % layers, 0.0, "one for each layer of a batch: {run}");
        assert!(number(&run["exchanges"]) >= layers, "{run}");
        let due = count("due_bytes");
        assert!(due >= 2.0 * token_bytes * count("exchanges"), "{run}");
        for field in ["sent_bytes", "received_bytes", "plugin_bytes"] {
            assert_eq!(count(field), due, "{field}: {run}");
        }
        let scheduled = run["policy"] == "laxity";
        let [permitted, completed] = ["permitted_bytes", "completed_bytes"].map(count);
        let known = if scheduled { due } else { 0.0 };
        assert_eq!(completed + count("bypassed_bytes"), known, "{run}");
        assert!(permitted + count("bypassed_bytes") >= known, "{run}");
        // Rows go there and then back, so no layer can wait less than the port takes for both.
        let port_bytes_per_ms = number(&config["port_mbit"]) * 1e6 / 8.0 / 1e3;
        let wire_ms = due / count("exchanges") / port_bytes_per_ms;
        assert!(number(&run["exchange_ms"]) > 0.8 * wire_ms, "{wire_ms} ms: {run}");
        assert!(number(&run["stages_ms"]["collective"]) > 0.0, "{run}");
        // Only the plugin's sockets are marked, and only with a daemon.
        let sent = run["plugin"]["sent_bytes"]["collective"].as_object().expect("by DSCP");
        let unmarked = sent.get("0").map_or(0.0, &number);
        if scheduled {
            assert!(permitted > 0.5 * due && unmarked < 0.05 * due, "{run}");
        } else {
            assert_eq!(unmarked, due, "{run}");
        }
        assert!(run["stage_bytes"]["collective"].is_null(), "{run}");
    }
}

/// Runs a lab in which a process dies, and checks that only requests of its host failed, that these
/// were answered when they were asked again, and that nothing is left of it. Returns the runs.
fn death(units: &str, keys: &str, host: &str) -> Option<Vec<Value>> {
    // The command fails if a request of another host fails, or one that is asked again, and if
    // blocks of KV, a client or bytes in flight are left.
    let report = configured_lab(keys, units)?;
    let runs = report["runs"].as_array().expect("runs");
    for run in runs {
        let count = |field: &str| run["restart"][field].as_u64().expect(field);
        assert_eq!(run["restart"]["host"], host, "{run}");
        // It takes longer to start than requests arrive.
        assert!(count("failed") >= 1, "{run}");
        assert_eq!((count("failed_elsewhere"), count("wrong_again")), (0, 0), "{run}");
        assert_eq!(count("right_again"), count("failed"), "{run}");
        assert_eq!(run["restart"]["left"], Value::Array(Vec::new()), "{run}");
        assert_eq!((&run["wrong_answers"], &run["bytes_lost"]), (&0.into(), &0.into()), "{run}");
        assert_eq!(run["kv"]["checked"], true, "{run}");
        let kv = |field: &str| run["kv"][field].as_u64().expect(field);
        assert!(kv("moved_bytes") >= kv("alone_bytes"), "{run}");
        assert_eq!(kv("bypassed_bytes"), 0, "{run}");
    }
    Some(runs.clone())
}

/// Requests that have no part in a death are answered as alone. Those of the dead process are, too,
/// when another is in its place.
#[test]
fn a_prefill_process_that_dies_takes_only_its_own_requests_with_it() {
    let keys = "vllm.kill_prefill_at = 2.0\nvllm.collectives = true\n";
    for run in death("2", keys, "unit1.0").into_iter().flatten() {
        assert_eq!(run["collectives"]["open"], 0, "{run}");
        let kv = |field: &str| run["kv"][field].as_u64().expect(field);
        let moved = if run["policy"] == "laxity" { kv("moved_bytes") } else { 0 };
        // Laxity completes a transfer that the death ended, and vLLM's connector does not count it.
        let ended = kv("completed_bytes").checked_sub(moved).expect("every byte has a permit");
        assert!(ended == 0 || kv("failed_transfers") > 0, "{run}");
    }
}

/// The same for a decode process, whose transfers end with it. KV that it did not fetch expires.
#[test]
fn a_decode_process_that_dies_takes_only_its_own_requests_with_it() {
    let keys = "decodes = 2\nvllm.kill_decode_at = 2.0\n";
    for run in death("1", keys, "decode1").into_iter().flatten() {
        let kv = |field: &str| run["kv"][field].as_u64().expect(field);
        // A prompt was computed while nobody was there to fetch its KV.
        assert!(kv("expired") >= 1, "{run}");
        let moved = if run["policy"] == "laxity" { kv("moved_bytes") } else { 0 };
        assert!(kv("completed_bytes") >= moved, "every byte has a permit: {run}");
    }
}

#[test]
fn an_older_vllm_answers_alike_under_every_policy_and_no_byte_of_kv_is_lost() {
    let policies = ["--units", "1", "--policies", "none,laxity_no_hints,laxity"];
    let Some(report) = lab(Release::Older, &policies) else { return };
    check_same_bytes(&report, 3);
}

#[test]
fn the_labs_changes_to_vllm_and_nixl_work_on_stand_ins() {
    let tests = root().join("tools/rig/src/vllm/test_sitecustomize.py");
    // Without `-B`, Python would write into the sources.
    Said::of(Command::new("python3").arg("-B").arg(tests)).good();
}
