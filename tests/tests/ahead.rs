//! Tests of the flows that the preload library submits for small work requests. A verbs provider
//! that does nothing stands for a device, so every count is exact.

use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use laxity_wire::Status;
use tempfile::TempDir;

use crate::process::{Daemon, binary, eventually, shell, wait_bounded};

const POSTS: u64 = 20_000;
const BYTES: u64 = 64;

fn built() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/verbs/cost");
    let script = format!(
        "cc -O2 -shared -fPIC -o libibverbs.so.1 {sources}/null_provider.c \
           -Wl,-soname,libibverbs.so.1 -Wl,--version-script={sources}/null_provider.map && \
         cc -O2 -o post_cost {sources}/post_cost.c -L. -l:libibverbs.so.1 -Wl,-rpath,$PWD"
    );
    shell(&script, folder.path()).expect("the stand-in builds");
    folder
}

fn start(folder: &Path, arguments: &[u64], environment: &[(&str, &str)]) -> Child {
    Command::new(folder.join("post_cost"))
        .args(arguments.iter().map(u64::to_string))
        .env("LD_PRELOAD", binary("liblaxity.so"))
        .env("LAXITY_SOCKET", folder.join("laxityd.sock"))
        .env("LAXITY_PROFILE", "perftest")
        .env("LAXITY_REPORT", folder.join("report"))
        .env("LAXITY_STALL_MS", "60000")
        .envs(environment.iter().copied())
        .spawn()
        .expect("the program starts")
}

fn end(mut child: Child) {
    child.kill().expect("SIGKILL");
    child.wait().expect("wait");
}

/// Posts. Returns the library's report, and the daemon's status after the program has ended.
fn post(arguments: &[u64], environment: &[(&str, &str)]) -> (serde_json::Value, Status) {
    post_under("", arguments, environment)
}

fn post_under(
    config: &str,
    arguments: &[u64],
    environment: &[(&str, &str)],
) -> (serde_json::Value, Status) {
    let folder = built();
    let folder = folder.path();
    let daemon = Daemon::start(folder, config);
    let (status, _) = wait_bounded(start(folder, arguments, environment));
    assert!(status.success(), "{status}");
    eventually("the daemon has read all that the program told", || {
        let totals = daemon.status().totals;
        totals.attachments == 1 && totals.attached_clients == 0
    });
    let line = fs::read_to_string(folder.join("report")).expect("a report");
    (serde_json::from_str(&line).expect("JSON"), daemon.status())
}

fn count(report: &serde_json::Value, name: &str) -> u64 {
    report[name].as_u64().expect("a number")
}

/// Checks that the library and the daemon account for all posted bytes, and for no others.
fn check(report: &serde_json::Value, status: &Status, posts: u64) {
    assert_eq!(count(report, "work_requests"), posts);
    assert_eq!(count(report, "bytes"), posts * BYTES);
    assert_eq!(count(report, "completions"), posts);
    assert_eq!(count(report, "bypassed_bytes"), 0);
    assert_eq!(count(report, "scheduled_bytes"), posts * BYTES);
    assert_eq!(status.totals.permitted_bytes, posts * BYTES, "permitted");
    assert_eq!(status.totals.completed_bytes, posts * BYTES, "completed");
}

/// Checks that there are far fewer flows than work requests.
fn together(status: &Status, posts: u64) {
    let flows = status.totals.flows;
    assert!((posts / 256..=posts / 16).contains(&flows), "{flows} flows for {posts} work requests");
}

#[test]
fn small_work_requests_on_an_idle_port_are_told_of_together_and_none_is_forgotten() {
    let (report, status) = post(&[POSTS, BYTES, 1], &[]);
    check(&report, &status, POSTS);
    together(&status, POSTS);
    assert_eq!(report["dscp"], serde_json::json!([10]), "as its stage is");
}

/// The provider changes `wr_complete` when a queue pair is ready to send, as mlx5 does.
#[test]
fn work_requests_that_are_built_go_out_though_the_provider_takes_its_function_back() {
    let (report, status) = post(&[POSTS, BYTES, 1], &[("POST_BUILDS", "1")]);
    check(&report, &status, POSTS);
}

/// The provider puts the queue pair into error in a poll, and holds the lock that a post needs.
#[test]
fn a_provider_that_breaks_a_queue_pair_in_a_poll_does_not_wait_for_itself() {
    const LARGE: u64 = 4 << 20;
    let environment = [("NULL_BREAKS", "1"), ("POST_POLLS_NOT", "1"), ("POST_POLLS_LAST", "1")];
    let (report, status) = post(&[64, LARGE, 1], &environment);
    assert_eq!(count(&report, "work_requests"), 64);
    assert_eq!(count(&report, "completions"), 64);
    assert!(count(&report, "deferred") > 0, "some waited: {report}");
    assert_eq!(status.totals.submitted_bytes, 64 * LARGE);
}

#[test]
fn work_requests_without_bytes_wait_behind_those_with_some() {
    const LARGE: u64 = 4 << 20;
    let environment =
        [("POST_INVALIDATES", "1"), ("POST_POLLS_NOT", "1"), ("POST_POLLS_LAST", "1")];
    let (report, status) = post(&[64, LARGE, 1], &environment);
    assert!(count(&report, "deferred") > 0, "{report}");
    // One that goes on credit pulls those before it. If each LOCAL_INV did so, all would go.
    let pulled = count(&report, "pulled");
    assert!(pulled < 32, "{pulled} went without a permit");
    assert_eq!(count(&report, "scheduled_bytes"), (64 - pulled) * LARGE);
    assert_eq!(status.totals.cancelled_flows, pulled);
}

#[test]
fn a_queue_pair_that_falls_silent_tells_what_it_has_sent_ahead() {
    let folder = built();
    let daemon = Daemon::start(folder.path(), "");
    let child = start(folder.path(), &[1000, BYTES, 1], &[("POST_WAITS_US", "60000000")]);
    eventually("the daemon is told of all", || {
        daemon.status().totals.permitted_bytes == 1000 * BYTES
    });
    end(child);
}

#[test]
fn a_process_that_ends_tells_what_it_has_not_told() {
    let (report, status) = post(&[1000, BYTES, 1], &[("NULL_KEEP", "1")]);
    check(&report, &status, 1000);
}

#[test]
fn others_before_them_do_not_keep_them_apart() {
    // These have another stage than what follows, and some of them are reported later.
    let profile = ("LAXITY_PROFILE", "default");
    let (report, status) = post(&[POSTS, BYTES, 1, 3], &[profile]);
    check(&report, &status, POSTS + 3);
    together(&status, POSTS);
    let stages = status.ports.iter().flat_map(|port| &port.stages);
    let submitted = |name: &str| -> u64 {
        let of_it = stages.clone().filter(|stage| stage.stage == name);
        of_it.map(|stage| stage.submitted_bytes).sum()
    };
    assert_eq!(submitted("p2d"), POSTS * BYTES);
    assert_eq!(submitted("background"), 3 * BYTES);
}

#[test]
fn what_the_provider_refuses_and_gets_again_counts_once() {
    let (report, status) = post(&[POSTS, BYTES, 1], &[("NULL_REFUSES", "7")]);
    assert_eq!(count(&report, "work_requests"), POSTS);
    assert_eq!(count(&report, "bytes"), POSTS * BYTES);
    // A flow that was permitted, refused and withdrawn counts as permitted and is submitted again.
    let again = status.totals.cancelled_flows * BYTES;
    assert_eq!(status.totals.permitted_bytes, POSTS * BYTES + again);
    assert_eq!(status.totals.completed_bytes, POSTS * BYTES);
    together(&status, POSTS);
}

#[test]
fn a_daemon_that_observes_is_told_of_each() {
    let (report, status) = post(&[POSTS, BYTES, 1], &[("LAXITY_MODE", "observe")]);
    assert_eq!(count(&report, "observed_bytes"), POSTS * BYTES);
    assert_eq!(status.totals.flows, POSTS);
    assert_eq!(report["dscp"], serde_json::json!([0]), "nothing is marked");
}

#[test]
fn a_process_that_is_told_of_rarely_finds_the_next_daemon_soon() {
    let folder = built();
    let folder = folder.path();
    let mut daemon = Daemon::start(folder, "");
    // The program posts 8 bytes at a time for half a minute. Few of these posts become flows.
    let mut child = start(folder, &[30_000, 8, 1, 0, 1000], &[]);
    eventually("it is attached", || daemon.status().totals.flows > 0);
    daemon.kill();
    daemon.launch();
    eventually("it is attached to the next", || daemon.status().totals.attached_clients == 1);
    assert!(child.try_wait().expect("wait").is_none(), "it still posts");
    end(child);
}

#[test]
fn a_daemon_that_comes_later_finds_no_garbage() {
    let folder = built();
    let folder = folder.path();
    let child = start(folder, &[30_000, 8, 1, 0, 1000], &[]);
    std::thread::sleep(Duration::from_millis(100));
    let daemon = Daemon::start(folder, "");
    eventually("flows are told of", || daemon.status().totals.flows > 2);
    assert_eq!(daemon.status().totals.garbage_records, 0);
    end(child);
}

#[test]
fn a_daemon_that_answers_late_finds_no_garbage() {
    // The library doesn't wait for the answer, so the first thread that posts finds the daemon.
    let environment = [("LAXITY_ATTACH_MS", "0"), ("POST_AFTER_US", "200000")];
    let (report, status) = post(&[1000, BYTES, 1], &environment);
    assert_eq!(count(&report, "work_requests"), 1000);
    assert_eq!(status.totals.garbage_records, 0);
    assert_eq!(status.totals.unknown_nic_flows, 0);
}

#[test]
fn a_nic_that_the_daemon_does_not_know_is_no_garbage() {
    let config = "[[nic]]\nname = \"another\"\nrate = \"100Gbit\"";
    let (report, status) = post_under(config, &[100, BYTES, 1], &[]);
    assert_eq!(count(&report, "work_requests"), 100);
    assert_eq!(status.totals.garbage_records, 0);
    assert_eq!(status.totals.unknown_nic_flows, 100);
}

#[test]
fn a_bypass_that_is_switched_on_and_off_releases_nobody() {
    let folder = built();
    let folder = folder.path();
    let daemon = Daemon::start(folder, "");
    let jobs: Vec<_> = (0..3).map(|_| start(folder, &[40_000, 65536, 1, 0, 10], &[])).collect();
    eventually("all are attached", || daemon.status().totals.attached_clients == 3);
    let mut operator = daemon.operator();
    for _ in 0..200 {
        operator.bypass(true).expect("bypass on");
        operator.bypass(false).expect("bypass off");
    }
    for job in jobs {
        let (status, _) = wait_bounded(job);
        assert!(status.success(), "{status}");
    }
    eventually("all have left", || daemon.status().totals.attached_clients == 0);
    let totals = daemon.status().totals;
    assert_eq!((totals.garbage_records, totals.unknown_nic_flows), (0, 0));
    let reports = fs::read_to_string(folder.join("report")).expect("reports");
    for line in reports.lines() {
        let report: serde_json::Value = serde_json::from_str(line).expect("JSON");
        assert_eq!(count(&report, "work_requests"), 40_000);
        assert_eq!(count(&report, "observed_bytes"), 0);
    }
}

#[test]
fn a_pinned_class_is_kept_exactly() {
    // The class of collectives is above the pinned one.
    let environment = [("LAXITY_PROFILE", "nccl"), ("POST_TCLASS", "106")];
    let (report, _) = post(&[10, BYTES, 1], &environment);
    assert_eq!(report["dscp"], serde_json::json!([26]));
    let (report, _) = post(&[10, BYTES, 1], &environment[..1]);
    assert_eq!(report["dscp"], serde_json::json!([34]));
}

#[test]
fn work_that_nobody_polls_for_counts_as_complete_while_nothing_else_happens() {
    let folder = built();
    let folder = folder.path();
    let daemon = Daemon::start(folder, "[tuning]\ncompletion_timeout = \"5min\"");
    // Each work request is a flow. The process then does nothing for half a minute.
    let environment = [("POST_POLLS_NOT", "1"), ("POST_WAITS_US", "30000000")];
    let mut child = start(folder, &[8, 65536, 1], &environment);
    eventually("all of it is permitted", || daemon.status().totals.permitted_bytes == 8 * 65536);
    eventually("all of it counts as complete", || {
        daemon.status().totals.completed_bytes == 8 * 65536
    });
    assert!(child.try_wait().expect("wait").is_none(), "it is still there");
    end(child);
    assert_eq!(daemon.status().totals.written_off_bytes, 0);
}

#[test]
fn the_lower_of_the_modes_holds() {
    let profiles = tempfile::tempdir().expect("a folder");
    let text = "mode = \"observe\"\n";
    fs::write(profiles.path().join("mine.toml"), text).expect("written");
    let folder = profiles.path().to_str().expect("a path");
    let environment =
        [("LAXITY_PROFILE_DIR", folder), ("LAXITY_PROFILE", "mine"), ("LAXITY_MODE", "enforce")];
    let (report, _) = post(&[100, BYTES, 1], &environment);
    assert_eq!(count(&report, "observed_bytes"), 100 * BYTES);
}
