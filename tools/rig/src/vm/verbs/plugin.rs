//! The NCCL plugin over RDMA: the harness of `tests/nccl`, which drives it as NCCL does, between
//! the guest's two devices; and its bandwidth beside perftest's in the same boot.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};

use super::daemon::COLLECTIVE;
use super::overhead::{self, Measured};
use super::pair::{ATTACH_MS, STALL_MS, tail};
use super::wire::Capture;
use super::{Matrix, Programs};
use crate::vm::guest::Guest;
use crate::vm::task::{Task, TaskReport};

/// The plugin, and the programs that drive it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nccl {
    /// `libnccl-net-laxity.so`.
    pub plugin: PathBuf,
    /// Folder with the programs of `tests/nccl`.
    pub checks: PathBuf,
}

/// What one of [`NAMES`] came to.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PluginReport {
    /// Its name.
    pub name: String,
    /// Whether every check held.
    pub passed: bool,
    /// Cases that passed, or pairs of measurements.
    pub cases: usize,
    /// What was seen, in words.
    pub seen: String,
    /// Seconds it took.
    pub seconds: f64,
    /// Which checks did not hold.
    pub failures: Vec<String>,
}

/// Cases of `nccl_check` that say something about a network, by what they are about; a version is
/// enough unless it says otherwise. What needs none of the guest (symbols, profilers) is tested
/// outside.
const GROUPS: [Group; 5] = [
    Group {
        name: "nccl_versions",
        versions: &["all"],
        cases: "properties sizes in_order connect_first accept_first",
        scheduled: false,
    },
    Group {
        name: "nccl_transfers",
        versions: &["12"],
        cases: "registration contexts reload forks no_leak storm foreign_handles strangers \
            thirty_two one_by_one \
                tested_in_any_order lopsided optional_completion refused close_after_done flush \
                duplex \
                register_and_send connect_and_send comms_by_thread ends_by_thread",
        scheduled: false,
    },
    Group {
        name: "nccl_collectives",
        versions: &["12"],
        cases: "all_reduce_2 all_reduce_4 all_reduce_8 all_reduce_refused all_to_all_2 \
            all_to_all_4 all_to_all_8",
        scheduled: false,
    },
    Group {
        name: "nccl_peer_death",
        versions: &["7", "12"],
        cases: "close_in_flight memory_after_close closed_by_sender closed_by_receiver \
            sender_killed receiver_killed \
                idle_sender_killed receiver_stopped",
        scheduled: false,
    },
    Group {
        name: "nccl_under_daemon",
        versions: &["8", "12"],
        cases: "sizes in_order thirty_two refused all_reduce_4 all_to_all_4 closed_by_receiver \
            sender_killed receiver_killed",
        scheduled: true,
    },
];

/// All that is run, by name, in order.
pub(super) const NAMES: [&str; 8] = [
    GROUPS[0].name,
    GROUPS[1].name,
    GROUPS[2].name,
    GROUPS[3].name,
    GROUPS[4].name,
    "nccl_scheduled",
    "nccl_preloaded",
    "nccl_bandwidth",
];

struct Group {
    name: &'static str,
    versions: &'static [&'static str],
    cases: &'static str,
    /// Under the daemon that enforces a rate.
    scheduled: bool,
}

/// An emulated machine under other load.
const SLOW: &str = "3";
/// The plugin lets a message go unscheduled after 200 ms without a permit, which here is no time.
const WAIT_MS: &str = "10000";
const LIMIT: Duration = Duration::from_secs(500);
/// In every line that the plugin writes of itself.
pub(super) const REPORTS: &str = "\"library\":\"nccl-net\"";
const REPORT: &str = scratch!("report.nccl");
const FOLDER: &str = scratch!("nccl");

/// Bandwidth: bytes of a message, messages outstanding, pairs of measurements, and the part of
/// perftest's that there has to be.
const BYTES: u64 = 1 << 20;
const WINDOW: u64 = 8;
const PAIRS: usize = 5;
const BANDWIDTH_MIN: f64 = 0.95;
const WRITE_BW: Measured = Measured {
    name: "ib_write_bw 1048576",
    line: "ib_write_bw -s 1048576 -n 160",
    column: 3,
    unit: "MB/s",
};

fn text(path: &Path) -> String {
    path.display().to_string()
}

/// A program of the harness, on RDMA.
pub(super) fn task(guest: &Guest, nccl: &Nccl, program: &str, line: &str, limit: Duration) -> Task {
    let mut argv = vec![
        text(&nccl.checks.join(program)),
        "--plugin".into(),
        text(&nccl.plugin),
    ];
    argv.extend(line.split_whitespace().map(str::to_owned));
    let mut task = guest.task(argv, limit);
    task.env.extend(settings("v"));
    let patience = [
        ("LAXITY_STALL_MS", STALL_MS),
        ("LAXITY_ATTACH_MS", ATTACH_MS),
    ];
    task.env
        .extend(patience.map(|(name, value)| (name.to_owned(), value.to_owned())));
    task
}

/// What the plugin has to know here; connections are agreed on at `interfaces`.
pub(super) fn settings(interfaces: &str) -> [(String, String); 3] {
    [
        ("LAXITY_NET", "verbs"),
        ("NCCL_SOCKET_IFNAME", interfaces),
        ("LAXITY_NCCL_WAIT_MS", WAIT_MS),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
}

/// Runs one of [`NAMES`].
pub(super) fn run(name: &str, guest: &Guest, programs: &Programs) -> anyhow::Result<PluginReport> {
    let Some(nccl) = &programs.nccl else {
        bail!("{name} needs the NCCL plugin");
    };
    let began = Instant::now();
    let mut report = PluginReport {
        name: name.into(),
        ..PluginReport::default()
    };
    let outcome = match GROUPS.iter().find(|group| group.name == name) {
        Some(group) => check(guest, nccl, group, &mut report),
        None if name == "nccl_scheduled" => rounds(guest, nccl, None, &mut report),
        None if name == "nccl_preloaded" => {
            rounds(guest, nccl, Some(&programs.library), &mut report)
        }
        None if name == "nccl_bandwidth" => bandwidth(guest, programs, nccl, &mut report),
        None => bail!("no case `{name}`"),
    };
    if let Err(error) = outcome {
        report.failures.push(format!("{error:#}"));
    }
    report.seconds = began.elapsed().as_secs_f64();
    report.passed = report.failures.is_empty();
    Ok(report)
}

/// Runs those of a matrix that are wanted; whether to go on.
pub(super) fn run_all(
    guest: &Guest,
    programs: &Programs,
    matrix: &Matrix,
    reports: &mut Vec<PluginReport>,
) -> anyhow::Result<bool> {
    let wanted = NAMES.iter().filter(|name| matrix.wants(name));
    for name in wanted.filter(|_| programs.nccl.is_some()) {
        let report = run(name, guest, programs)?;
        guest.say(&super::progress(name, report.passed, report.seconds))?;
        let passed = report.passed;
        reports.push(report);
        if !passed && !matrix.keep_going {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Cases of `nccl_check`: each has its line, and those that failed say why.
fn check(
    guest: &Guest,
    nccl: &Nccl,
    group: &Group,
    report: &mut PluginReport,
) -> anyhow::Result<()> {
    let versions: Vec<String> = group.versions.iter().map(|v| format!("-v {v}")).collect();
    let line = format!("-d 0 -e 1 -s {SLOW} {} {}", versions.join(" "), group.cases);
    let mut task = task(guest, nccl, "nccl_check", &line, LIMIT);
    if !group.scheduled {
        task.env.push(("LAXITY_MODE".into(), "off".into()));
    }
    let ended = task.start()?.wait();
    for line in ended.stdout.lines() {
        if line.starts_with("ok") {
            report.cases += 1;
        } else if line.starts_with("FAILED") {
            report.failures.push(line.trim_end().to_owned());
        }
    }
    let cases = group.cases.split_whitespace().count();
    let versions = if group.versions == ["all"] {
        6
    } else {
        group.versions.len()
    };
    if report.failures.is_empty() && (!ended.succeeded() || report.cases < cases) {
        bail!("{} of {cases} cases passed; {}", report.cases, said(&ended));
    }
    report.seen = format!("{} of {} cases", report.cases, cases * versions);
    Ok(())
}

fn said(ended: &TaskReport) -> String {
    let how = match (ended.timed_out, ended.code) {
        (true, _) => "it was killed at its time limit".into(),
        (_, Some(code)) => format!("it ended with {code}"),
        _ => format!("it was ended by signal {}", ended.signal.unwrap_or(0)),
    };
    format!(
        "{how} and said: {}{}",
        tail(&ended.stdout),
        tail(&ended.stderr)
    )
}

/// What the plugin counted of messages of a kind.
#[derive(Debug, Default, Deserialize)]
struct Sends {
    dscp: u8,
    messages: u64,
    bytes: u64,
    deferred: u64,
    bypassed: u64,
    overdue: u64,
}

/// A line of a report: the plugin's or the preload library's.
#[derive(Debug, Default, Deserialize)]
struct LibraryReport {
    #[serde(default)]
    library: String,
    #[serde(default)]
    network: String,
    #[serde(default)]
    received_bytes: u64,
    #[serde(default)]
    unscheduled_ns: u64,
    #[serde(default)]
    reattaches: u64,
    #[serde(default)]
    sends: Vec<Sends>,
    #[serde(default)]
    work_requests: u64,
    #[serde(default)]
    passed_work_requests: u64,
}

/// Starts the ranks of `nccl_rounds`, by turns on either device.
fn start_ranks(
    guest: &Guest,
    nccl: &Nccl,
    ranks: usize,
    line: &str,
    change: impl Fn(&mut Task),
) -> anyhow::Result<Vec<crate::vm::task::Running>> {
    let _ = fs::remove_dir_all(FOLDER);
    fs::create_dir_all(FOLDER).with_context(|| format!("creating {FOLDER}"))?;
    let start = |rank: usize| {
        let line = format!(
            "-s {SLOW} -r {rank} -n {ranks} -d {} -f {FOLDER} {line}",
            rank % 2
        );
        let mut task = task(guest, nccl, "nccl_rounds", &line, LIMIT);
        change(&mut task);
        Ok(task.start()?)
    };
    (0..ranks).map(start).collect()
}

/// An all-to-all under the daemon: every byte is under a permit, in the class of collectives, and
/// some had to wait. With the preload library in the same processes the same holds, and the library
/// sees none of the plugin's work requests.
fn rounds(
    guest: &Guest,
    nccl: &Nccl,
    preload: Option<&Path>,
    report: &mut PluginReport,
) -> anyhow::Result<()> {
    const RANKS: u64 = 4;
    const ROUNDS: u64 = 6;
    const BYTES: u64 = 768 << 10;
    let _ = fs::remove_file(REPORT);
    let mut capture = Capture::start(guest)?;
    let line = format!("--rounds {ROUNDS} --bytes {BYTES} --messages 3 --period-us 1000");
    let running = start_ranks(guest, nccl, RANKS as usize, &line, |task| {
        task.env.push(("LAXITY_REPORT".into(), REPORT.into()));
        if let Some(library) = preload {
            task.env.push(("LD_PRELOAD".into(), text(library)));
            task.env.push(("LAXITY_PROFILE".into(), "mooncake".into()));
        }
    })?;
    for (rank, running) in running.into_iter().enumerate() {
        let ended = running.wait();
        if !ended.succeeded() {
            let why = format!("rank {rank}: {}", said(&ended));
            report.failures.push(why);
        }
    }
    let crossed = capture.take()?;
    capture.finish();
    if !report.failures.is_empty() {
        return Ok(());
    }
    let text = fs::read_to_string(REPORT).context("nobody wrote a report")?;
    let reports = (text.lines())
        .map(|line| serde_json::from_str(line).with_context(|| format!("a report: {line}")))
        .collect::<anyhow::Result<Vec<LibraryReport>>>()?;
    let (plugin, shim): (Vec<_>, Vec<_>) = reports
        .into_iter()
        .partition(|line| line.library == "nccl-net");
    let bytes = RANKS * (RANKS - 1) * ROUNDS * BYTES;
    report.failures.extend(wrong_sends(&plugin, RANKS, bytes));
    let classes: Vec<u8> = crossed.connected.iter().copied().collect();
    if classes != [COLLECTIVE] {
        let why = format!("on the wire were DSCPs {classes:?}, not {COLLECTIVE} alone");
        report.failures.push(why);
    }
    if preload.is_some() {
        report.failures.extend(wrong_preload(&shim, RANKS));
    }
    report.cases = 1;
    report.seen = format!(
        "{} messages, {} waited, {} of them on the wire",
        sum(&plugin, |sends| sends.messages),
        sum(&plugin, |sends| sends.deferred),
        crossed.messages
    );
    Ok(())
}

fn sum(plugin: &[LibraryReport], of: fn(&Sends) -> u64) -> u64 {
    plugin.iter().flat_map(|line| &line.sends).map(of).sum()
}

/// What the plugin's own reports say that they should not, if `ranks` sent `total` bytes.
fn wrong_sends(plugin: &[LibraryReport], ranks: u64, total: u64) -> Vec<String> {
    let mut wrong = Vec::new();
    let by_verbs = plugin.iter().filter(|line| line.network == "verbs").count();
    if by_verbs as u64 != ranks {
        wrong.push(format!("{by_verbs} of {ranks} ranks used verbs"));
    }
    let sent = sum(plugin, |sends| sends.bytes);
    let received: u64 = plugin.iter().map(|line| line.received_bytes).sum();
    if sent != total || received != total {
        wrong.push(format!(
            "{total} bytes were sent; the plugin counted {sent} sent and {received} received"
        ));
    }
    let bypassed = sum(plugin, |sends| sends.bypassed);
    let overdue = sum(plugin, |sends| sends.overdue);
    if bypassed + overdue > 0 {
        wrong.push(format!(
            "{bypassed} messages went unscheduled, {overdue} of them because no permit came; \
             without a daemon for {} ms in all, found again {} times",
            plugin.iter().map(|line| line.unscheduled_ns).sum::<u64>() / 1_000_000,
            plugin.iter().map(|line| line.reattaches).sum::<u64>(),
        ));
    }
    if sum(plugin, |sends| sends.deferred) == 0 {
        wrong.push("no message waited for a permit".into());
    }
    let mut sends = plugin.iter().flat_map(|line| &line.sends);
    if sends.any(|sends| sends.dscp != COLLECTIVE) {
        wrong.push("messages were sent in another class than collectives'".into());
    }
    wrong
}

/// What the preload library's reports say that they should not, if it is in `ranks` processes
/// whose only work requests are the plugin's.
fn wrong_preload(shim: &[LibraryReport], ranks: u64) -> Vec<String> {
    let mut wrong = Vec::new();
    let present = shim.len();
    if present as u64 != ranks {
        wrong.push(format!(
            "the preload library was in {present} of {ranks} ranks"
        ));
    }
    let taken = |line: &LibraryReport| line.work_requests + line.passed_work_requests;
    let taken: u64 = shim.iter().map(taken).sum();
    if taken > 0 {
        wrong.push(format!(
            "the preload library took {taken} of the plugin's work requests for a program's"
        ));
    }
    wrong
}

/// MiB/s of `nccl_perf`, one connection.
fn measure(guest: &Guest, nccl: &Nccl) -> anyhow::Result<f64> {
    #[derive(Deserialize)]
    struct Said {
        gbit_per_s: f64,
    }
    let handle = Path::new(FOLDER).join("handle");
    let _ = fs::remove_file(&handle);
    fs::create_dir_all(FOLDER).with_context(|| format!("creating {FOLDER}"))?;
    let start = |device: usize, side: &str| {
        let line = format!(
            "-b {BYTES} -w {WINDOW} -i 0 -t 4 -R 1000 -d {device} {side} {}",
            text(&handle)
        );
        let mut task = task(guest, nccl, "nccl_perf", &line, Duration::from_secs(120));
        task.env.push(("LAXITY_MODE".into(), "off".into()));
        task.start()
    };
    let listening = start(0, "--listen")?;
    let ended = start(1, "--connect")?.wait();
    let peer = listening.wait();
    if !ended.succeeded() || !peer.succeeded() {
        bail!("nccl_perf: {}; its peer: {}", said(&ended), said(&peer));
    }
    let line = ended.stdout.lines().find(|line| line.starts_with('{'));
    let line = line.with_context(|| format!("nccl_perf says nothing: {}", said(&ended)))?;
    let said: Said = serde_json::from_str(line).with_context(|| format!("nccl_perf: {line}"))?;
    Ok(said.gbit_per_s * 1e9 / 8.0 / f64::from(1 << 20))
}

/// The plugin's bandwidth as a part of perftest's, which writes as large pieces without asking
/// anybody.
fn bandwidth(
    guest: &Guest,
    programs: &Programs,
    nccl: &Nccl,
    report: &mut PluginReport,
) -> anyhow::Result<()> {
    let mut ratios = Vec::new();
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for pair in 0..PAIRS {
        // Which comes first changes, so that what drifts hits both.
        for plugin in [pair % 2 == 0, pair % 2 != 0] {
            if plugin {
                ours.push(measure(guest, nccl)?);
            } else {
                theirs.push(overhead::measure(guest, programs, &WRITE_BW, false)?);
            }
        }
        ratios.push(ours[pair] / theirs[pair]);
    }
    let ratio = overhead::quantile(&ratios, 0.5);
    report.cases = PAIRS;
    report.seen = format!(
        "{:.1} MiB/s, ib_write_bw {:.1}: {:.1} % (pairs: {})",
        overhead::quantile(&ours, 0.5),
        overhead::quantile(&theirs, 0.5),
        ratio * 100.0,
        ratios
            .iter()
            .map(|r| format!("{:.0}", r * 100.0))
            .collect::<Vec<_>>()
            .join(" "),
    );
    if ratio < BANDWIDTH_MIN {
        report.failures.push(format!(
            "less than {:.0} % of ib_write_bw",
            BANDWIDTH_MIN * 100.0
        ));
    }
    Ok(())
}
