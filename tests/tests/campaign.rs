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

#[test]
fn hundreds_of_faults_in_combination_lose_nothing_on_any_path() {
    let folder = folder();
    let said = campaign(folder.path(), &["--faults", "1500", "--seed", "1"]);
    if said.stderr.contains("left out") {
        skip(Need::Machine, &said.stderr);
    }
    let report = said.good().json();
    assert_eq!((report["faults"].as_u64(), report["violations"].as_u64()), (Some(1500), Some(0)));
    assert!(report["by_kind"].as_object().is_some_and(|kinds| kinds.len() == 15), "{report}");
    let looked = report["rounds_with_lanes"].as_u64();
    assert!(looked > Some(20), "lanes were seen in few of 30 rounds: {report}");
    for (path, counts) in report["by_path"].as_object().expect("paths") {
        let of = |name: &str| counts[name].as_u64().unwrap_or(0);
        assert!(of("transfers") > 1000 && of("bytes") > 1 << 20, "{path}: {counts}");
        // The plugin's workers count no bytes of the daemon.
        let scheduled = of("scheduled_bytes") > 1 << 20 && of("bypassed_bytes") > 0;
        assert!(
            path == "nccl" || scheduled,
            "{path} was not scheduled, or never lost it: {counts}"
        );
    }
}

/// Plays a campaign with a bug on a path, and its wrong round again. Returns the failure from the
/// report. It has one of these texts.
fn is_found(folder: &Path, [plant, path]: [&str; 2], texts: &[&str], shrink: &str) -> Value {
    let bug = ["--plant", plant, "--plant-on", path];
    let said = campaign(
        folder,
        &[&["--faults", "200", "--seed", "3", "--shrink", shrink], &bug[..]].concat(),
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
    let lacks = campaign(folder().path(), &["--faults", "0"]).stderr;
    for path in ["client", "c", "nccl"] {
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
fn a_client_or_a_lane_that_is_left_behind_is_found() {
    is_found(folder().path(), ["leak", "client"], &["the daemon has 1 clients"], "0");
    is_found(folder().path(), ["leak_lane", "client"], &["lanes, not at most 3"], "0");
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
