//! The NCCL plugin over RDMA. The harness of `tests/nccl` drives it like NCCL between the guest's
//! two devices.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Lab;
use super::case::CaseReport;
use super::daemon::COLLECTIVE;
use super::paths;
use super::program::patience;
use super::wire::Capture;
use crate::carriage::{ReportLine, Sends};
use crate::error::LabError;
use crate::vm::task::GuestTask;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nccl {
    pub plugin: PathBuf,
    pub checks: PathBuf,
}

/// The cases of `nccl_check` that concern a network, by topic.
const CASES: &str = include_str!("nccl_cases.toml");
const ONE_SIDED_UNDER_DAEMON: &str = "nccl_one_sided_under_daemon";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    name: String,
    versions: Vec<String>,
    cases: String,
    #[serde(default)]
    scheduled: bool,
}

/// Returns the groups of cases.
///
/// # Panics
/// Never: the file is a part of this program, and a test reads it.
fn groups() -> Vec<Group> {
    let mut file: BTreeMap<String, Vec<Group>> = toml::from_str(CASES).expect("it has groups");
    file.remove("group").unwrap_or_default()
}

pub(super) fn names() -> Vec<String> {
    let others = ["nccl_scheduled", "nccl_preloaded", paths::NAME].map(str::to_owned);
    groups().into_iter().map(|group| group.name).chain(others).collect()
}

/// Factor on the harness's time limits, because the emulated machine may have other load.
const SLOW: &str = "3";
/// Longest wait of the plugin for a permit, in ms. The default of 200 ms is too short in the guest.
const WAIT_MS: &str = "10000";
const LIMIT: Duration = Duration::from_secs(500);
const REPORT: &str = scratch!("report.nccl");
const FOLDER: &str = scratch!("nccl");

fn text(path: &Path) -> String {
    path.display().to_string()
}

pub(super) fn task(lab: &Lab<'_>, nccl: &Nccl, program: &str, line: &str) -> GuestTask {
    let mut argv = vec![text(&nccl.checks.join(program)), "--plugin".into(), text(&nccl.plugin)];
    argv.extend(line.split_whitespace().map(str::to_owned));
    let mut task = lab.guest.task(argv, LIMIT);
    task.env.extend(SETTINGS.map(|(name, value)| (name.to_owned(), value.to_owned())));
    task.env.extend(patience());
    task
}

/// Settings of the plugin. It exchanges connection data over the devices' interfaces.
pub(crate) const SETTINGS: [(&str, &str); 3] =
    [("LAXITY_NET", "verbs"), ("NCCL_SOCKET_IFNAME", "v"), ("LAXITY_NCCL_WAIT_MS", WAIT_MS)];

pub(super) fn run(name: &str, lab: &Lab<'_>, case: &mut CaseReport) -> Result<(), LabError> {
    let missing = || LabError::missing("the NCCL plugin", "name it with --nccl-plugin");
    let nccl = lab.programs.nccl.as_ref().ok_or_else(missing)?;
    if let Some(group) = groups().iter().find(|group| group.name == name) {
        return check(lab, nccl, group, case);
    }
    match name {
        "nccl_scheduled" => rounds(lab, nccl, None, case),
        "nccl_preloaded" => rounds(lab, nccl, Some(&lab.programs.library), case),
        paths::NAME => paths::run(lab, nccl, case),
        _ => Err(LabError::Plan(format!("no case `{name}`"))),
    }
}

/// Runs cases of `nccl_check`. Each case prints a line, with the reason if it failed.
fn check(lab: &Lab<'_>, nccl: &Nccl, group: &Group, case: &mut CaseReport) -> Result<(), LabError> {
    let versions: Vec<String> = group.versions.iter().map(|v| format!("-v {v}")).collect();
    let line = format!("-d 0 -e 1 -s {SLOW} {} {}", versions.join(" "), group.cases);
    let mut task = task(lab, nccl, "nccl_check", &line);
    let _ = fs::remove_file(REPORT);
    task.env.push(match group.scheduled {
        true => ("LAXITY_REPORT".into(), REPORT.into()),
        false => ("LAXITY_MODE".into(), "off".into()),
    });
    let report = task.start()?.wait();
    for line in report.stdout.lines() {
        if line.starts_with("ok") {
            case.cases += 1;
        } else if line.starts_with("FAILED") {
            case.fail(line.trim_end());
        }
    }
    let cases = group.cases.split_whitespace().count();
    let versions = if group.versions == ["all"] { 6 } else { group.versions.len() };
    if case.failures.is_empty() && (!report.succeeded() || case.cases < cases) {
        let how = format!("{report}; {} of {cases} cases passed", case.cases);
        return Err(LabError::program("nccl_check", how));
    }
    case.seen = format!("{} of {} cases", case.cases, cases * versions);
    if group.name == ONE_SIDED_UNDER_DAEMON {
        let held: u64 = reports()?.iter().map(|line| line.rma_held).sum();
        case.check(held > 0, "no one-sided operation waited for a permit");
        case.seen += &format!(", {held} operations waited");
    }
    Ok(())
}

/// Returns the lines that the processes of a case left in [`REPORT`].
fn reports() -> Result<Vec<ReportLine>, LabError> {
    let text = fs::read_to_string(REPORT).map_err(LabError::file("reading the report", REPORT))?;
    let line = |line: &str| {
        serde_json::from_str(line)
            .map_err(|error| LabError::unreadable(format!("a report: {line}"), error))
    };
    text.lines().map(line).collect()
}

/// Runs an all-to-all under the daemon. Every byte must be under a permit and in the class of
/// collectives, and some must have waited. The same must hold with the preload library in the same
/// processes, and the library must see none of the plugin's work requests.
fn rounds(
    lab: &Lab<'_>,
    nccl: &Nccl,
    preload: Option<&Path>,
    case: &mut CaseReport,
) -> Result<(), LabError> {
    const RANKS: u64 = 4;
    const ROUNDS: u64 = 6;
    const BYTES: u64 = 768 << 10;
    let _ = fs::remove_file(REPORT);
    let _ = fs::remove_dir_all(FOLDER);
    fs::create_dir_all(FOLDER).map_err(LabError::file("creating", &FOLDER))?;
    let mut capture = Capture::start(lab.guest)?;
    let start = |rank: u64| {
        let line = format!(
            "-s {SLOW} -r {rank} -n {RANKS} -d {} -f {FOLDER} --rounds {ROUNDS} --bytes {BYTES} \
             --messages 3 --period-us 1000",
            rank % 2
        );
        let mut task = task(lab, nccl, "nccl_rounds", &line);
        task.env.push(("LAXITY_REPORT".into(), REPORT.into()));
        if let Some(library) = preload {
            task.env.push(("LD_PRELOAD".into(), text(library)));
            task.env.push(("LAXITY_PROFILE".into(), "mooncake".into()));
        }
        task.start()
    };
    let running = (0..RANKS).map(start).collect::<Result<Vec<_>, _>>()?;
    for (rank, running) in running.into_iter().enumerate() {
        case.check_ended(&format!("rank {rank}"), &running.wait());
    }
    let crossed = capture.take()?;
    capture.finish();
    if !case.failures.is_empty() {
        return Ok(());
    }
    let (plugin, shim): (Vec<_>, Vec<_>) =
        reports()?.into_iter().partition(|line| line.library == "nccl-net");
    check_sends(&plugin, RANKS, RANKS * (RANKS - 1) * ROUNDS * BYTES, case);
    let classes: Vec<u8> = crossed.connected.iter().copied().collect();
    let why = format!("on the wire were DSCPs {classes:?}, not {COLLECTIVE} alone");
    case.check(classes == [COLLECTIVE], why);
    if preload.is_some() {
        check_preload(&shim, RANKS, case);
    }
    case.cases = 1;
    case.seen = format!(
        "{} messages, {} waited, {} of them on the wire",
        sum(&plugin, |sends| sends.messages),
        sum(&plugin, |sends| sends.deferred),
        crossed.messages
    );
    Ok(())
}

fn sum(plugin: &[ReportLine], of: fn(&Sends) -> u64) -> u64 {
    plugin.iter().flat_map(|line| &line.sends).map(of).sum()
}

fn check_sends(plugin: &[ReportLine], ranks: u64, total: u64, case: &mut CaseReport) {
    let by_verbs = plugin.iter().filter(|line| line.network == "verbs").count() as u64;
    let why = format!("{by_verbs} of {ranks} ranks used verbs");
    case.check(by_verbs == ranks, why);
    let of = |of: fn(&ReportLine) -> u64| plugin.iter().map(of).sum::<u64>();
    let sent = sum(plugin, |sends| sends.bytes);
    let received = of(|line| line.received_bytes);
    let why =
        format!("{total} bytes were sent; the plugin counted {sent} sent and {received} received");
    case.check(sent == total && received == total, why);
    let bypassed = sum(plugin, |sends| sends.bypassed);
    let overdue = sum(plugin, |sends| sends.overdue);
    let why = format!(
        "{bypassed} messages went unscheduled, {overdue} of them because no permit came; without a \
         daemon for {} ms in all, found again {} times",
        of(|line| line.unscheduled_ns) / 1_000_000,
        of(|line| line.reattaches),
    );
    case.check(bypassed + overdue == 0, why);
    let deferred = sum(plugin, |sends| sends.deferred) > 0;
    case.check(deferred, "no message waited for a permit");
    let mut sends = plugin.iter().flat_map(|line| &line.sends);
    let marked = sends.all(|sends| sends.dscp == COLLECTIVE);
    case.check(marked, "messages were sent in another class than collectives'");
}

/// Checks the preload library's reports, for `ranks` processes whose only work requests are the
/// plugin's.
fn check_preload(shim: &[ReportLine], ranks: u64, case: &mut CaseReport) {
    let present = shim.len() as u64;
    let why = format!("the preload library was in {present} of {ranks} ranks");
    case.check(present == ranks, why);
    let taken = |line: &ReportLine| line.work_requests + line.passed_work_requests;
    let taken: u64 = shim.iter().map(taken).sum();
    let why =
        format!("the preload library took {taken} of the plugin's work requests for a program's");
    case.check(taken == 0, why);
}
