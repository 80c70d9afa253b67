//! Tests of the NCCL net plugin with a harness in C (`tests/nccl`), which drives it as NCCL does:
//! in every version of the interface, over loopback and between network namespaces, with and
//! without a daemon. The harness is tested with a plugin whose faults it has to notice.
//!
//! `LAXITY_NCCL_PLUGIN` names another plugin to test. No test here measures time.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use laxity_tests::{Need, skip};
use nix::sys::signal::Signal;

use crate::process::{Daemon, Said, binary, eventually, words};

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/nccl");

const SYMBOLS: [&str; 13] = [
    "ncclNetPlugin_v10", "ncclNetPlugin_v11", "ncclNetPlugin_v12", "ncclNetPlugin_v7",
    "ncclNetPlugin_v8", "ncclNetPlugin_v9", "ncclProfiler_v3", "ncclProfiler_v4",
    "ncclProfiler_v5", "ncclProfiler_v6", "ncclRmaPlugin_v14", "ncclRmaPlugin_v15",
    "ncclRmaPlugin_v16",
];

/// Builds the harness once for all tests and processes, and returns its folder.
fn harness() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nccl-harness");
    fs::create_dir_all(&folder).expect("a folder");
    let lock = File::create(folder.join("lock")).expect("a lock");
    lock.lock().expect("locked");
    let changed = |path: &Path| fs::metadata(path).and_then(|data| data.modified()).ok();
    let newest = fs::read_dir(SOURCES)
        .expect("sources")
        .flatten()
        .filter_map(|entry| changed(&entry.path()))
        .max();
    let stamp = folder.join("built");
    if changed(&stamp) < newest {
        Said::of(Command::new(Path::new(SOURCES).join("build.sh")).arg(&folder)).good();
        fs::write(&stamp, "").expect("a stamp");
    }
    folder
}

pub(crate) fn plugin() -> PathBuf {
    let named = std::env::var_os("LAXITY_NCCL_PLUGIN");
    named.map_or_else(|| binary("libnccl_net_laxity.so"), PathBuf::from)
}

/// Returns a command without inherited variables that change what a plugin does.
fn clean(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let name_bytes = name.as_encoded_bytes();
        if [&b"LAXITY_"[..], b"NCCL_", b"REFERENCE_PLUGIN_"]
            .iter()
            .any(|prefix| name_bytes.starts_with(prefix))
        {
            command.env_remove(name);
        }
    }
    command
        .env("NCCL_SOCKET_IFNAME", "lo")
        .env("LAXITY_SOCKET", "/nonexistent/laxityd.sock")
        .stdin(Stdio::null());
    command
}

fn check(plugin: &Path, versions: &[&str], cases: &[&str]) -> Command {
    let mut command = clean(&harness().join("nccl_check"));
    command.arg("--plugin").arg(plugin);
    for version in versions {
        command.args(["--version", version]);
    }
    command.args(cases);
    command
}

/// Runs `command` and checks that every case passed and that there were `lines` of them.
fn passes(mut command: Command, lines: usize) {
    let text = Said::of(&mut command).good().all();
    println!("{text}");
    assert_eq!(passed(&text), lines, "{text}");
}

fn passed(text: &str) -> usize {
    text.lines().filter(|line| line.starts_with("ok ")).count()
}

/// Returns the output of a command that must succeed. Returns `None`, and skips the test, if the
/// machine can't run it.
fn unless_skipped(command: &mut Command) -> Option<String> {
    let output = Said::of(command);
    let text = output.all();
    println!("{text}");
    if output.status.code() == Some(75) || text.starts_with("skipped") {
        skip(Need::Machine, text);
        return None;
    }
    output.good();
    Some(text)
}

const ALL: [&str; 1] = ["all"];
const NEWEST: &str = "12";
/// Versions for cases that take seconds and do not depend on the version.
const ENDS: [&str; 2] = ["7", NEWEST];
const VERSIONS: usize = 6;
/// Cases of one-sided operations. Each names the version of its own table.
const ONE_SIDED: [&str; 4] = ["one_sided_14", "one_sided_15", "one_sided_16", "one_sided_killed"];

fn every_version(cases: &[&str]) {
    passes(check(&plugin(), &ALL, cases), VERSIONS * cases.len());
}

fn both_ends(cases: &[&str]) {
    passes(check(&plugin(), &ENDS, cases), 2 * cases.len());
}

#[test]
fn the_nccl_plugin_exports_what_nccl_looks_for_and_nothing_else() {
    let mut nm = Command::new("nm");
    nm.args(["-D", "--defined-only", "--format=posix"]).arg(plugin());
    let text = Said::of(&mut nm).good().stdout;
    let lines = text.lines();
    let mut names: Vec<&str> = lines.filter_map(|line| line.split(' ').next()).collect();
    names.sort_unstable();
    assert_eq!(names, SYMBOLS);
    passes(check(&plugin(), &[NEWEST], &["symbols"]), 1);
}

#[test]
fn the_nccl_plugin_loads_reloads_and_survives_forks_in_every_version() {
    every_version(&["properties", "handle_size", "registration", "contexts"]);
    every_version(&["reload", "no_leak", "forks"]);
}

#[test]
fn the_nccl_plugin_passes_traffic_without_a_daemon_and_names_an_interface_it_lacks() {
    every_version(&["no_daemon", "mode_off", "bad_interface"]);
}

#[test]
fn nccl_connections_do_not_block_and_strangers_do_not_get_in() {
    every_version(&["connect_first", "accept_first", "listener_closed"]);
    every_version(&["storm", "foreign_handles", "strangers", "no_files"]);
}

#[test]
fn nccl_messages_arrive_whole_and_in_order_in_every_version() {
    every_version(&["sizes", "in_order", "one_by_one", "grouped", "flush"]);
    every_version(&["close_after_done", "tested_in_any_order", "lopsided"]);
    every_version(&["independent", "too_long"]);
}

#[test]
fn nccl_messages_arrive_when_there_are_many_big_or_refused_ones() {
    both_ends(&["big", "thirty_two", "refused", "many_messages", "duplex"]);
    passes(check(&plugin(), &["9", NEWEST], &["optional_completion"]), 2);
}

#[test]
fn a_gigabyte_is_one_nccl_message() {
    unless_skipped(&mut check(&plugin(), &[NEWEST], &["gigabyte"]));
}

#[test]
fn nccls_one_sided_operations_work_between_processes_in_every_version() {
    passes(check(&plugin(), &[NEWEST], &ONE_SIDED), ONE_SIDED.len());
}

#[test]
fn nccl_comms_close_with_requests_in_flight_and_dead_peers_are_errors_of_test() {
    every_version(&["close_in_flight", "memory_after_close", "closed_by_sender"]);
    every_version(&["closed_by_receiver", "sender_killed", "receiver_killed"]);
    every_version(&["idle_sender_killed", "receiver_stopped"]);
}

#[test]
fn two_threads_share_nccl_comms() {
    both_ends(&["register_and_send", "connect_and_send"]);
    both_ends(&["comms_by_thread", "ends_by_thread", "interrupted"]);
}

#[test]
fn nccl_collectives_of_two_to_eight_processes_have_the_right_sums() {
    every_version(&["all_reduce_2", "all_to_all_4"]);
    both_ends(&["all_reduce_4", "all_to_all_2", "all_reduce_refused"]);
    passes(check(&plugin(), &[NEWEST], &["all_reduce_8", "all_to_all_8"]), 2);
}

#[test]
fn the_profiler_half_of_the_nccl_plugin_keeps_nothing_and_follows_no_foreign_pointer() {
    let cases = ["profiler_v3", "profiler_v4", "profiler_v5", "profiler_v6"];
    passes(check(&plugin(), &["10", NEWEST], &cases), 8);
    let cases = ["profiler_threads", "profiler_foreign"];
    passes(check(&plugin(), &["10", "11", NEWEST], &cases), 6);
}

#[test]
fn the_nccl_plugin_learns_from_the_profiler_which_collective_each_send_belongs_to() {
    let folder = tempfile::tempdir().expect("a folder");
    let report = folder.path().join("report");
    for (net, case) in [("10", "profiler_v3"), ("11", "profiler_v5"), (NEWEST, "profiler_v6")] {
        let mut command = check(&plugin(), &[net], &[case]);
        command.env("LAXITY_REPORT", &report);
        passes(command, 1);
        let text = fs::read_to_string(&report).expect("a report");
        fs::remove_file(&report).expect("it is there");
        let mut functions = Vec::new();
        let mut known = 0;
        for line in text.lines() {
            let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
            known += line["origins_known"].as_u64().expect("a number");
            for send in line["sends"].as_array().expect("sends") {
                assert_eq!(send["stage"], "collective", "{send}");
                functions.push(send["function"].as_str().expect("a name").to_owned());
            }
        }
        assert!(known > 0, "{net} {case}: {text}");
        assert!(functions.iter().any(|name| name == "all_reduce"), "{net} {case}: {text}");
    }
}

fn sum(report: &Path, name: &str) -> u64 {
    let text = fs::read_to_string(report).expect("a report");
    let of = |line| serde_json::from_str::<serde_json::Value>(line).expect("JSON")[name].as_u64();
    text.lines().filter_map(of).sum()
}

#[test]
fn nccl_collectives_run_under_a_daemon_that_permits_their_bytes() {
    let (_folder, daemon) = Daemon::alone("");
    let cases =
        ["all_reduce_4", "all_to_all_4", "in_order", "forks", "sender_killed", "one_sided_16"];
    let mut command = check(&plugin(), &ENDS, &cases);
    command.env("LAXITY_SOCKET", daemon.socket());
    passes(command, 2 * cases.len());
    eventually("all processes are gone", || daemon.status().totals.attached_clients == 0);
    let totals = daemon.status().totals;
    // 4 ranks, 3 channels and 3 rounds of 100003 floats, of which a ring sends 6/4.
    let reduced = 2 * 4 * 3 * 3 * 100_003 * 4 * 6 / 4;
    assert!(totals.attachments >= 16, "{totals:?}");
    assert!(totals.permitted_bytes > reduced, "{totals:?}");
}

#[test]
fn nccls_one_sided_operations_wait_for_permits_also_where_a_rank_dies() {
    let (folder, daemon) = Daemon::alone("");
    let report = folder.path().join("report");
    let mut command = check(&plugin(), &[NEWEST], &ONE_SIDED);
    command.env("LAXITY_SOCKET", daemon.socket()).env("LAXITY_REPORT", &report);
    passes(command, ONE_SIDED.len());
    let sum = |name| sum(&report, name);
    assert!(sum("rma_operations") > 0 && sum("rma_held") > sum("rma_overdue"));
    eventually("all processes are gone", || daemon.status().totals.attached_clients == 0);
}

#[test]
fn the_nccl_plugin_applies_the_mode_of_the_profile() {
    let (folder, daemon) = Daemon::alone("");
    let (profile, report) = (folder.path().join("mine.toml"), folder.path().join("report"));
    fs::write(&profile, "mode = \"observe\"\n").expect("a profile");
    let mut command = check(&plugin(), &[NEWEST], &["in_order"]);
    command
        .env("LAXITY_SOCKET", daemon.socket())
        .env("LAXITY_PROFILE", &profile)
        .env("LAXITY_MODE", "enforce")
        .env("LAXITY_REPORT", &report);
    passes(command, 1);
    let sum = |name| sum(&report, name);
    assert_eq!(sum("scheduled_bytes"), 0);
    assert!(sum("observed_bytes") > 0);
}

#[test]
fn nccl_collectives_go_on_when_their_daemon_stops_answering_or_dies() {
    let two_sided = ["all_reduce_4", "all_to_all_4", "thirty_two", "many_messages"];
    for (signal, versions, cases) in [Signal::SIGSTOP, Signal::SIGKILL]
        .into_iter()
        .flat_map(|signal| [(signal, &ENDS[..], two_sided), (signal, &[NEWEST][..], ONE_SIDED)])
    {
        let (_folder, mut daemon) = Daemon::alone("");
        let mut command = check(&plugin(), versions, &cases);
        command.env("LAXITY_SOCKET", daemon.socket());
        let mut child = command.stdout(Stdio::piped()).spawn().expect("nccl_check starts");
        eventually("ranks have attached and send", || daemon.status().totals.permitted_bytes > 0);
        daemon.signal(signal);
        let mut text = String::new();
        let output = child.stdout.as_mut().expect("piped");
        output.read_to_string(&mut text).expect("text");
        println!("{text}");
        assert!(child.wait().expect("it ends").success(), "{signal}: {text}");
        assert_eq!(passed(&text), versions.len() * cases.len(), "{text}");
        daemon.kill();
    }
}

#[test]
fn nccl_collectives_run_between_network_namespaces() {
    for (ranks, cases) in [
        ("2", &["all_reduce_2", "all_to_all_2", "duplex"][..]),
        ("4", &["all_reduce_4", "all_to_all_4"]),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let shared = folder.path().to_str().expect("a path");
        let mut command = clean(&Path::new(SOURCES).join("namespaces.sh"));
        command.arg(ranks).arg(harness().join("nccl_check"));
        command.arg("--plugin").arg(plugin()).args(["-f", shared]);
        command.args(["-v", NEWEST, "-r", "{rank}", "-n", "{ranks}"]);
        command.args(cases);
        let Some(text) = unless_skipped(&mut command) else { return };
        let ranks: usize = ranks.parse().expect("a number");
        assert_eq!(passed(&text), cases.len() * ranks);
    }
}

#[test]
fn the_nccl_plugin_takes_the_interfaces_that_nccl_would_take() {
    let mut command = clean(&Path::new(SOURCES).join("interfaces.sh"));
    unless_skipped(command.arg(harness().join("nccl_check")).arg(plugin()));
}

#[test]
fn the_bandwidth_program_counts_what_it_moves_at_every_version() {
    for version in ENDS {
        let mut command = clean(&harness().join("nccl_perf"));
        let of_few = words("--bytes 65536 --window 4 --streams 3 --seconds 1 --pings 100");
        command.arg("--plugin").arg(plugin()).args(["--version", version]);
        let line = Said::of(command.args(of_few)).good().json();
        let moved = line["moved"].as_u64().expect("bytes");
        assert!(moved > 0 && moved.is_multiple_of(65536), "{line}");
        assert!(line["latency_us"]["p50"].as_f64() > Some(0.0), "{line}");
    }
}

/// Faults of the reference plugin, each with a case that must notice it.
const FAULTS: [(&str, &str); 27] = [
    ("reorders", "in_order"),
    ("truncates", "sizes"),
    ("corrupts", "sizes"),
    ("early", "big"),
    ("keeps", "sizes"),
    ("oversizes", "in_order"),
    ("flush", "flush"),
    ("grows", "many_messages"),
    ("loses", "close_after_done"),
    ("deaf", "sender_killed"),
    ("deaf", "idle_sender_killed"),
    ("raises", "receiver_killed"),
    ("sigpipe", "closed_by_receiver"),
    ("hangs", "close_in_flight"),
    ("late_write", "memory_after_close"),
    ("leaks", "no_leak"),
    ("leaks", "reload"),
    ("exits", "forks"),
    ("finalizes", "contexts"),
    ("blocks", "accept_first"),
    ("trusts", "strangers"),
    ("any_handle", "foreign_handles"),
    ("scribbles", "properties"),
    ("device", "properties"),
    ("interface", "bad_interface"),
    ("follows", "profiler_foreign"),
    ("hoards", "profiler_v6"),
];

#[test]
fn the_nccl_harness_passes_a_plugin_without_faults() {
    let reference_plugin = harness().join("libnccl-net-reference_plugin.so");
    // This runs every case with the newest version.
    passes(check(&reference_plugin, &[NEWEST], &[]), 61);
    passes(
        check(&reference_plugin, &["7", "8", "9", "10", "11"], &["sizes", "storm", "contexts"]),
        15,
    );
}

#[test]
fn the_nccl_harness_notices_each_fault_of_a_plugin() {
    let reference_plugin = harness().join("libnccl-net-reference_plugin.so");
    for (fault, case) in FAULTS {
        let mut command = check(&reference_plugin, &[NEWEST], &[case]);
        // Some faults show as a hang. A fifth of the usual time limit is enough here.
        command.args(["--slow", "0.2"]).env("REFERENCE_PLUGIN_FAULT", fault);
        let output = Said::of(&mut command);
        let text = output.all();
        print!("{fault}: {text}");
        assert_eq!(output.status.code(), Some(1), "{fault} passed {case}: {text}");
        assert!(text.starts_with("FAILED"), "{fault}: {text}");
        assert!(text.contains(case), "{fault}: {text}");
    }
    let extra = harness().join("libnccl-net-reference_plugin-extra.so");
    let text = Said::of(&mut check(&extra, &[NEWEST], &["symbols"])).all();
    assert!(text.contains("exports reference_plugin_extra"), "{text}");
}

#[test]
fn the_nccl_harness_says_what_is_wrong_with_its_arguments() {
    let program = harness().join("nccl_check");
    let plugin = harness().join("libnccl-net-reference_plugin.so");
    let plugin = plugin.to_str().expect("a path");
    for (arguments, expected) in [
        (&["-p", "/nonexistent.so"][..], "No such file"),
        (&["-p", plugin, "-v", "6"], "no version 6"),
        (&["-p", plugin, "nonsense"], "no case nonsense"),
        (&["-p", plugin, "-n", "2", "-f", "/tmp", "sizes"], "has no ranks"),
        (&["-p", plugin, "-n", "2", "duplex"], "needs --rank"),
        (&["duplex"], "usage"),
    ] {
        let output = Said::of(clean(&program).args(arguments));
        let text = output.all();
        assert_eq!(output.status.code(), Some(3), "{arguments:?}: {text}");
        assert!(text.contains(expected), "{arguments:?}: {text}");
    }
}
