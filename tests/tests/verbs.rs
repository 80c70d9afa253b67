//! Runs the matrix of unmodified RDMA programs on real verbs in one boot of the SoftRoCE lab, and
//! checks its report. Skipped if a guest or its programs are missing.

use std::process::Command;

use laxity_tests::{Need, skip};

use crate::process::{Said, binary};
use crate::sources::root;

fn lab(arguments: &[&str]) -> Said {
    let mut laxity = Command::new(binary("laxity"));
    Said::of(laxity.arg("lab").args(arguments).current_dir(root()))
}

fn number(value: &serde_json::Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("no `{key}` in {value}"))
}

/// Cases that only run by hand with `laxity lab verbs` (`make verbs`), because they take minutes of
/// emulation: pyverbs' suite, cases of the NCCL plugin that sockets cover as well, valgrind (the
/// address sanitizer runs anyway), and campaigns of faults.
const BY_HAND: [&str; 9] = [
    "pyverbs", "valgrind", "campaign", "campaign_of_bundles", "nccl_versions", "nccl_transfers",
    "nccl_collectives", "nccl_peer_death", "nccl_under_daemon",
];

#[test]
fn unmodified_rdma_programs_run_under_the_scheduler_and_every_byte_is_accounted_for() {
    for step in [&["probe", "--verbs"][..], &["verbs", "--prepare"][..]] {
        let output = lab(step);
        if !output.status.success() {
            return skip(Need::Machine, output.all());
        }
    }
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("report.json");
    let path = file.to_str().expect("a path");
    let listed = lab(&["verbs", "--list"]).stdout;
    let names = listed.lines().filter_map(|line| line.split_whitespace().next());
    let wanted: Vec<&str> = names.filter(|name| !BY_HAND.contains(name)).collect();
    let only = wanted.join(",");
    let output = lab(&["verbs", "--keep-going", "--json", path, "--only", &only]);
    let text = output.all();
    println!("{text}");
    assert_eq!(output.status.code(), Some(0), "{text}");
    let json = std::fs::read_to_string(&file).expect("a report");
    let report: serde_json::Value = serde_json::from_str(&json).expect("JSON");

    let programs = report["programs"].as_array().expect("programs");
    let faults = report["faults"].as_array().expect("faults");
    let plugin = report["plugin"].as_array().expect("cases of the NCCL plugin");
    assert_eq!(
        wanted.len(),
        programs.len() + plugin.len() + faults.len(),
        "all that is listed was run:\n{listed}"
    );
    for program in programs {
        let name = program["name"].as_str().expect("a name");
        assert_eq!(program["passed"].as_bool(), Some(true), "{program}");
        assert_eq!(number(program, "bypassed_bytes"), 0, "{name}");
        let posted = number(program, "work_requests") + number(program, "passed_work_requests");
        assert!(posted > 0, "{name} posted nothing");
        let classes = program["dscp"].as_array().expect("DSCPs");
        assert!(!classes.is_empty(), "{name} was not seen on the wire");
    }
    // Nearly all work requests of those with bundles wait, which would hide the others.
    let is_plain =
        |p: &&serde_json::Value| p["name"].as_str().is_some_and(|n| !n.starts_with("bundle"));
    let deferred: u64 = programs.iter().filter(is_plain).map(|p| number(p, "deferred")).sum();
    // Each program is checked on its own. This checks that many work requests waited (usually about
    // 4000).
    assert!(deferred > 1500, "work requests waited: {deferred}");
    for case in plugin {
        assert_eq!(case["passed"].as_bool(), Some(true), "{case}");
        assert!(number(case, "cases") > 0, "{case}");
    }
    for fault in faults {
        assert_eq!(fault["passed"].as_bool(), Some(true), "{fault}");
        let name = fault["name"].as_str().expect("a name");
        let bypassed = number(fault, "bypassed_bytes");
        assert_eq!(name.starts_with("daemon_killed"), bypassed > 0, "{fault}");
    }
}
