//! Runs one program of the matrix under the library. Checks its own output, the library's report
//! and the wire.

use std::fs;
use std::time::Duration;

use serde::Deserialize;

use super::Lab;
use super::case::{CaseReport, LibraryReport, read_report};
use super::daemon::{KV_REUSE, P2D};
use super::program::{Posted, Program, Ready, Side, await_ready, task};
use super::report::ProgramReport;
use super::wire::{Capture, Crossed};
use crate::error::LabError;
use crate::vm::task::TaskReport;

/// Maximum number of times that a client is run again because the device rejected it too early.
const REJECTED_MAX: usize = 3;
const SERVER_REPORT: &str = scratch!("report.server");
const CLIENT_REPORT: &str = scratch!("report.client");

struct PairReports {
    server: Option<TaskReport>,
    client: TaskReport,
}

fn run_both(lab: &Lab<'_>, program: &Program) -> Result<PairReports, LabError> {
    let start = |side: &Side, report: &str| task(lab, side, &program.launch, report).start();
    let _ = fs::remove_file(SERVER_REPORT);
    let mut server = None;
    if let Some((side, ready)) = &program.server {
        let mut running = start(side, SERVER_REPORT)?;
        await_ready(lab, &mut running, *ready)?;
        server = Some(running);
    }
    let client = start(&program.client, CLIENT_REPORT)?.wait();
    let server = server.map(|server| {
        if client.succeeded() {
            server.wait()
        } else {
            std::thread::sleep(Duration::from_secs(1));
            server.kill()
        }
    });
    Ok(PairReports { server, client })
}

/// Reports whether the device rejected the client because it did not listen yet, although it was
/// reported as listening. Nothing was sent then.
fn is_rejected(program: &Program, ended: &PairReports) -> bool {
    let managed = matches!(program.server, Some((_, Ready::Management)));
    let client = &ended.client;
    let mut said = [&client.stdout, &client.stderr].into_iter();
    managed && !client.succeeded() && said.any(|text| text.contains("RDMA_CM_EVENT_REJECTED"))
}

pub(super) fn run(
    lab: &Lab<'_>,
    program: &Program,
    capture: &mut Capture,
) -> Result<ProgramReport, LabError> {
    let mut crossed = Crossed::default();
    let case = CaseReport::of(&program.name, lab.guest, |case| {
        capture.take()?;
        let mut ended = run_both(lab, program);
        for _ in 0..REJECTED_MAX {
            if !ended.as_ref().is_ok_and(|ended| is_rejected(program, ended)) {
                break;
            }
            capture.take()?;
            ended = run_both(lab, program);
        }
        crossed = capture.take()?;
        judge(program, &ended?, &crossed, case)
    })?;
    Ok(ProgramReport {
        case,
        command: program.client.argv.join(" "),
        profile: program.launch.profile.clone(),
        wire_messages: crossed.messages,
        wire_bytes: crossed.bytes,
        wire_repeats: crossed.repeats,
        dscp: &crossed.connected | &crossed.datagram,
    })
}

fn judge(
    program: &Program,
    ended: &PairReports,
    crossed: &Crossed,
    case: &mut CaseReport,
) -> Result<(), LabError> {
    let server = program.server.as_ref().zip(ended.server.as_ref());
    let sides = [
        server.map(|((side, _), task)| ("the server", side, task, SERVER_REPORT)),
        Some(("the client", &program.client, &ended.client, CLIENT_REPORT)),
    ];
    for (who, side, task, path) in sides.into_iter().flatten() {
        case.check_ended(who, task);
        match read_report(path)? {
            None => case.fail(format!("the library in {who} wrote no report")),
            Some(line) => {
                check_posted(who, side.posted, &line, task, case);
                case.library += line;
            }
        }
    }
    check_totals(program, crossed, case);
    Ok(())
}

fn check_posted(
    who: &str,
    posted: Posted,
    line: &LibraryReport,
    task: &TaskReport,
    case: &mut CaseReport,
) {
    // The library accepted dropped work requests from the program too, so they count.
    let counted = line.work_requests + line.passed_work_requests + line.dropped + line.failed_late;
    let counted_bytes = line.bytes + line.passed_bytes;
    let (wanted, wanted_bytes) = match posted {
        Posted::Exactly { work_requests, bytes } => (work_requests, Some(bytes)),
        Posted::Stated => {
            let (mut sum, mut bytes) = (0, 0);
            for result in stated(&task.stdout) {
                if !UNCOUNTED.contains(&&*result.test) {
                    sum += result.work_requests;
                    bytes += result.bytes;
                }
                let (test, detail) = (&result.test, &result.detail);
                case.check(result.passed, format!("{test}: {detail}"));
            }
            let lost = line.dropped + line.failed_late > 0;
            (sum, (!lost).then_some(bytes))
        }
        Posted::Wire => return,
    };
    let why = format!("{who} posted {wanted} work requests, and the library counted {counted}");
    case.check(counted == wanted, why);
    if let Some(wanted) = wanted_bytes {
        let why = format!("{who} posted {wanted} bytes, and the library counted {counted_bytes}");
        case.check(counted_bytes == wanted, why);
    }
}

fn check_totals(program: &Program, crossed: &Crossed, case: &mut CaseReport) {
    let total = case.library;
    let any = total.work_requests + total.passed_work_requests > 0;
    case.check(any, "no work request passed through the library");
    let deferred = !program.must_defer || total.deferred > 0;
    case.check(deferred, "no work request waited");
    let bypassed = total.bypassed_bytes;
    case.check(bypassed == 0, format!("{bypassed} bytes were bypassed"));
    if program.all_cross {
        for (what, crossed, counted) in [
            ("work requests", crossed.messages, total.work_requests),
            ("bytes", crossed.bytes, total.bytes),
        ] {
            let why =
                format!("{crossed} {what} crossed the wire, and the library counted {counted}");
            case.check(crossed == counted, why);
        }
    }
    if program.all_cross || program.siblings {
        let late = total.failed_late;
        case.check(late == 0, format!("{late} work requests failed late"));
    }
    for (what, wanted, seen) in [
        ("connected queue pairs", program.dscp, &crossed.connected),
        ("datagrams", program.datagram_dscp, &crossed.datagram),
    ] {
        if let Some(wanted) = wanted {
            let right = seen.iter().all(|dscp| *dscp == wanted);
            let why = format!("{what} were to have DSCP {wanted} and had {seen:?}");
            case.check(right, why);
        }
    }
    if program.siblings {
        check_siblings(&total, crossed, case);
    }
    let absent = program.dscp.is_some() && total.work_requests > 0 && crossed.connected.is_empty();
    case.check(!absent, "nothing of it crossed the router");
}

/// Checks a program whose queue pairs get bundles: all is in the class of P2D or of KV reuse, and
/// messages on the wire are the work requests and few barriers.
fn check_siblings(total: &LibraryReport, crossed: &Crossed, case: &mut CaseReport) {
    let (all, wire) = (total.work_requests, crossed.messages);
    case.seen = format!(
        "{} bundles, {} of {all} work requests by siblings, {wire} messages, DSCPs {:?}",
        total.bundles, total.by_siblings, crossed.connected
    );
    let classes = crossed.connected == [P2D, KV_REUSE].into();
    let carried = total.by_siblings > 0 && (all..=all + all / 8).contains(&wire);
    case.check(classes && carried, format!("not as with bundles: {}", case.seen));
}

/// Subtests whose work requests the library does not see. Datagrams that are built with `ibv_wr_*`
/// go directly to the provider.
const UNCOUNTED: [&str; 1] = ["wr_ud"];

/// A line of a check program about one of its subtests.
#[derive(Debug, Deserialize)]
pub(super) struct Stated {
    #[serde(default)]
    test: String,
    passed: bool,
    #[serde(default)]
    work_requests: u64,
    #[serde(default)]
    pub(super) bytes: u64,
    #[serde(default)]
    detail: String,
}

pub(super) fn stated(stdout: &str) -> impl Iterator<Item = Stated> {
    let lines = stdout.lines().filter(|line| line.starts_with('{'));
    lines.filter_map(|line| serde_json::from_str(line).ok())
}
