//! Tests of fault campaigns: a slice of one, and that the oracle finds a bug that was planted.

use std::path::Path;
use std::process::Command;

use laxity_tests::{Need, skip};
use serde_json::Value;

use crate::process::{Said, binary};

fn campaign(folder: &Path, arguments: &[&str]) -> Said {
    let mut command = Command::new(binary("laxity"));
    command.args(["lab", "faults", "--quiet", "--json", "-", "--failures"]).arg(folder);
    Said::of(command.args(arguments))
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

/// Gets Mooncake from PyPI, and builds a library with its C interface. If that fails, campaigns
/// leave its paths out, and say why.
fn prepare() {
    Said::of(Command::new(binary("laxity")).args(["lab", "faults", "--prepare"]));
}

#[test]
fn rounds_take_turns_over_all_paths() {
    prepare();
    let folder = folder();
    let said = campaign(folder.path(), &["--faults", "250", "--seed", "5"]);
    if said.stderr.contains(": needs") {
        return skip(Need::Machine, &said.stderr);
    }
    let report = said.good().json();
    assert_eq!((report["faults"].as_u64(), report["violations"].as_u64()), (Some(250), Some(0)));
    let paths = report["by_path"].as_object().map(|paths| paths.keys().cloned().collect());
    let all = ["c", "client", "engine", "mooncake", "mooncake_c", "nccl"].map(str::to_owned);
    assert_eq!(paths, Some(all.to_vec()), "{report}");
}

/// Plays a campaign on some paths. Checks that each path moved more than `transfers`, was
/// scheduled, and lost its daemon at times. Returns the report, or `None` where a path can't run.
fn loses_nothing(paths: &str, faults: u64, seed: &str, transfers: u64) -> Option<Value> {
    let (folder, number) = (folder(), faults.to_string());
    let arguments = ["--faults", &number, "--seed", seed, "--paths", paths];
    let said = campaign(folder.path(), &arguments);
    if said.stderr.contains(": needs") {
        skip(Need::Machine, &said.stderr);
        return None;
    }
    let report = said.good().json();
    assert_eq!((report["faults"].as_u64(), report["violations"].as_u64()), (Some(faults), Some(0)));
    for (path, counts) in report["by_path"].as_object().expect("paths") {
        let of = |name: &str| counts[name].as_u64().unwrap_or(0);
        // The bytes of an engine are its answers, which are short.
        let is_much = of("bytes") > 1 << 20 || path == "engine";
        assert!(of("transfers") > transfers && is_much, "{path}: {counts}");
        // Much of Mooncake's traffic is without a daemon while Python starts.
        let scheduled_min = match path.starts_with("mooncake") {
            true => (of("bytes") / 8).max(1 << 18),
            false => 1 << 20,
        };
        let scheduled = of("scheduled_bytes") > scheduled_min && of("bypassed_bytes") > 0;
        assert!(scheduled, "{path} was not scheduled, or never lost it: {counts}");
    }
    Some(report)
}

/// Does the same on a path whose peers have to die in the middle of transfers.
fn loses_nothing_of(path: &str, faults: u64, seed: &str, transfers: u64) {
    let Some(report) = loses_nothing(path, faults, seed, transfers) else { return };
    let counts = &report["by_path"][path];
    assert!(counts["ended_by_fault"].as_u64() > Some(0), "no peer was killed: {counts}");
}

#[test]
fn hundreds_of_faults_in_combination_lose_nothing_on_any_path() {
    let Some(report) = loses_nothing("client,c,nccl", 1500, "1", 1000) else { return };
    assert_eq!(report["by_path"].as_object().map(serde_json::Map::len), Some(3), "{report}");
    assert!(report["by_kind"].as_object().is_some_and(|kinds| kinds.len() == 20), "{report}");
    let looked = report["rounds_with_lanes"].as_u64();
    assert!(looked > Some(20), "lanes were seen in few of 30 rounds: {report}");
}

#[test]
fn hundreds_of_faults_in_combination_change_no_answer_of_engines() {
    loses_nothing_of("engine", 250, "2", 50);
}

// Python and Mooncake would take so much of the machine that other paths wait for them.
#[test]
fn hundreds_of_faults_in_combination_lose_nothing_of_mooncake() {
    prepare();
    loses_nothing_of("mooncake", 250, "1", 250);
}

#[test]
fn hundreds_of_faults_in_combination_lose_nothing_of_mooncakes_c_interface() {
    prepare();
    loses_nothing_of("mooncake_c", 100, "7", 100);
}

/// Plays a campaign with a bug on a path, and its wrong round again. Returns the failure from the
/// report. It has one of these texts.
fn is_found(folder: &Path, [plant, path]: [&str; 2], texts: &[&str], shrink: &str) -> Value {
    let bug = ["--plant", plant, "--plant-on", path];
    let said = campaign(
        folder,
        &[&["--faults", "200", "--seed", "3", "--shrink", shrink, "--paths", path], &bug[..]]
            .concat(),
    );
    assert_eq!(said.status.code(), Some(1), "{bug:?}: {}", said.all());
    let failure = said.json()["failures"][0].clone();
    let violations = failure[1]["violations"].to_string();
    assert!(texts.iter().any(|text| violations.contains(text)), "{bug:?}: {violations}");
    let file = failure[0].as_str().expect("a path");
    let again = campaign(folder, &[&["--replay", file], &bug[..]].concat());
    assert_eq!(again.status.code(), Some(1), "{bug:?} again: {}", again.all());
    failure
}

#[test]
fn a_transfer_that_completes_twice_is_found_and_shrunk() {
    let folder = folder();
    let failure = is_found(folder.path(), ["twice", "client"], &["after it was complete"], "12");
    let left = failure[1]["schedule"]["faults"].as_array().map_or(usize::MAX, Vec::len);
    assert!(left <= 5, "{left} faults are left: {failure}");
    let file = failure[0].as_str().expect("a path");
    let honest = campaign(folder.path(), &["--replay", file]).good().json();
    assert_eq!(honest["failures"], Value::Array(Vec::new()), "without the bug nothing is wrong");
}

#[test]
fn a_transfer_that_is_lost_or_changes_places_or_completes_twice_is_found_on_each_path() {
    prepare();
    let lacks = campaign(folder().path(), &["--faults", "0"]).stderr;
    for path in ["client", "c", "nccl", "mooncake", "mooncake_c", "engine"] {
        if lacks.contains(&format!("left out: {path}:")) {
            skip(Need::Machine, &lacks);
            continue;
        }
        for (plant, texts) in [
            // Whether a transfer comes after the lost one is a matter of time.
            ("drop", &["before transfer", "never completed"][..]),
            ("swap", &["before transfer"]),
            ("twice", &["after it was complete"]),
        ] {
            is_found(folder().path(), [plant, path], texts, "0");
        }
    }
}

#[test]
fn a_path_that_is_asked_for_and_cannot_run_is_an_error() {
    // This copy has no libraries beside it, and no folder of programs is searched.
    let folder = folder();
    for name in ["laxity", "laxity-lab", "laxityd"] {
        std::fs::copy(binary(name), folder.path().join(name)).expect("a copy");
    }
    let mut lab = Command::new(folder.path().join("laxity"));
    let paths = ["--paths", "client,mooncake,mooncake_c"];
    let said = Said::of(lab.args(["lab", "faults", "--faults", "50"]).args(paths));
    assert_eq!(said.status.code(), Some(1), "{}", said.all());
    for path in ["mooncake", "mooncake_c"] {
        assert!(said.stderr.contains(&format!("{path}: needs")), "{}", said.all());
    }
}

#[test]
fn a_client_or_a_lane_that_is_left_behind_is_found() {
    is_found(folder().path(), ["leak", "client"], &["the daemon has 1 clients"], "0");
    is_found(folder().path(), ["leak_lane", "client"], &["lanes, not at most 3"], "0");
}

#[test]
fn a_soak_finds_what_grows_and_nothing_grows_without_a_bug() {
    let soak = |length: &str, bug: &[&str]| {
        let mut command = Command::new(binary("laxity"));
        command.args(["lab", "faults", "--quiet", "--json", "-", "--soak", length]).args(bug);
        // Python's memory grows for longer than this test takes.
        command.args(["--paths", "client,c,nccl"]);
        Said::of(&mut command)
    };
    let said = soak("10s", &[]);
    if said.stderr.contains(": needs") {
        return skip(Need::Machine, &said.stderr);
    }
    let report = said.good().json();
    assert!(report["workers_counted"].as_u64() > Some(2), "{report}");
    assert!(report["changes"]["left"].as_u64() > Some(0), "{report}");
    let counted = |name: &str| report["counters"][name].as_u64().unwrap_or(0);
    let whole = ["permitted_bytes", "bypassed_bytes", "withdrawn_bytes"].map(counted);
    assert_eq!(whole.iter().sum::<u64>(), counted("submitted_bytes"), "{report}");
    assert!(counted("permitted_bytes") > counted("bypassed_bytes").max(1 << 20), "{report}");
    for (plant, what) in [("leak_memory", "memory in KiB"), ("leak_descriptor", "descriptors")] {
        let said = soak("6s", &["--plant", plant]);
        assert_eq!(said.status.code(), Some(1), "{plant}: {}", said.all());
        let violations = said.json()["violations"].to_string();
        assert!(violations.contains(&format!(": {what}: ")), "{plant}: {violations}");
        assert!(!violations.contains("laxityd"), "{plant}: {violations}");
    }
}

#[test]
fn in_virtual_time_a_seed_gives_the_same_report_and_a_failure_its_replay() {
    let folder = folder();
    let arguments = ["--virtual", "--faults", "200", "--seed", "3"];
    let [first, second] = [0; 2].map(|_| {
        let report = campaign(folder.path(), &arguments).good().json();
        ["events", "faults", "longest_stall_ms", "bytes_checked"].map(|name| report[name].clone())
    });
    assert_eq!(first, second);
    let bug = ["--plant", "swap"];
    let said = campaign(folder.path(), &[&arguments[..], &bug].concat());
    assert_eq!(said.status.code(), Some(1), "{}", said.all());
    let failure = said.json()["failures"][0].clone();
    let file = failure[0].as_str().expect("a path");
    let again = campaign(folder.path(), &[&["--replay", file], &bug[..]].concat());
    assert_eq!(again.json()["failures"][0][1]["violations"], failure[1]["violations"]);
    let honest = campaign(folder.path(), &["--replay", file]).good().json();
    assert_eq!(honest["failures"], Value::Array(Vec::new()), "without the bug nothing is wrong");
}
