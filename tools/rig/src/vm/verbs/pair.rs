//! Runs one program of the matrix under the library, and judges it by its own word, by the
//! library's report and by the wire.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Deserialize;

use super::Programs;
use super::program::{Posted, Program, Ready, Side, Through};
use super::report::ProgramReport;
use super::wire::{Capture, Crossed};
use crate::vm::guest::Guest;
use crate::vm::task::{Running, Task, TaskReport};

const READY_WITHIN: Duration = Duration::from_secs(30);
const LISTENS_AFTER: Duration = Duration::from_millis(300);
/// The guest is emulated and shares its processors: a daemon that is not heard of for 100 ms, the
/// library's default, is not dead there. `faults.rs` keeps the default.
pub(super) const STALL_MS: &str = "5000";
/// For the daemon's answer when a program starts.
pub(super) const ATTACH_MS: &str = "5000";

/// One line of the library's report.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct LibraryReport {
    pub(super) work_requests: u64,
    pub(super) bytes: u64,
    pub(super) deferred: u64,
    pub(super) passed_work_requests: u64,
    pub(super) passed_bytes: u64,
    pub(super) failed_late: u64,
    pub(super) dropped: u64,
    pub(super) scheduled_bytes: u64,
    pub(super) bypassed_bytes: u64,
    pub(super) reattaches: u64,
}

/// The sum of a report's lines; `None` if there is no report.
pub(super) fn read_report(path: &str) -> anyhow::Result<Option<LibraryReport>> {
    let Ok(text) = fs::read_to_string(path) else {
        return Ok(None);
    };
    let mut sum = LibraryReport::default();
    for line in text.lines() {
        let line: LibraryReport =
            serde_json::from_str(line).with_context(|| format!("{path}: {line}"))?;
        sum.work_requests += line.work_requests;
        sum.bytes += line.bytes;
        sum.deferred += line.deferred;
        sum.passed_work_requests += line.passed_work_requests;
        sum.passed_bytes += line.passed_bytes;
        sum.failed_late += line.failed_late;
        sum.dropped += line.dropped;
        sum.scheduled_bytes += line.scheduled_bytes;
        sum.bypassed_bytes += line.bypassed_bytes;
        sum.reattaches += line.reattaches;
    }
    Ok(Some(sum))
}

/// A side's task, with the library in it, reporting to a file.
pub(super) fn task(
    guest: &Guest,
    programs: &Programs,
    side: &Side,
    through: Through,
    profile: &str,
    report: &str,
    limit: Duration,
) -> Task {
    let _ = fs::remove_file(report);
    let text = |path: &Path| path.display().to_string();
    let mut argv = Vec::new();
    let mut env = side.env.clone();
    let mut set = |name: &str, value: &str| env.push((name.into(), value.into()));
    match through {
        Through::Run => {
            argv.extend([text(&programs.laxity), "run".into(), "--require".into()]);
            argv.extend(["--library".into(), text(&programs.library)]);
            argv.extend(["--profile", profile, "--report", report, "--"].map(String::from));
        }
        Through::Preload => {
            let library = text(&programs.library);
            let before = side.env.iter().find(|(name, _)| name == "LD_PRELOAD");
            match before {
                Some((_, first)) => set("LD_PRELOAD", &format!("{first}:{library}")),
                None => set("LD_PRELOAD", &library),
            }
            set("LAXITY_PROFILE", profile);
            set("LAXITY_REPORT", report);
        }
    }
    if side.env.iter().all(|(name, _)| name != "LAXITY_STALL_MS") {
        set("LAXITY_STALL_MS", STALL_MS);
    }
    // A queue pair keeps for life the class that it gets when it connects, so a busy emulator must
    // not let it connect before the daemon has answered.
    set("LAXITY_ATTACH_MS", ATTACH_MS);
    argv.extend(side.argv.iter().cloned());
    let mut task = guest.task(argv, limit);
    for (name, value) in env {
        task.env.retain(|(other, _)| *other != name);
        task.env.push((name, value));
    }
    task
}

/// Whether something listens at a TCP port.
fn listens(port: u16) -> bool {
    let wanted = format!(":{port:04X}");
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
        let text = fs::read_to_string(table).unwrap_or_default();
        text.lines().any(|line| {
            let mut words = line.split_whitespace().skip(1);
            let (local, state) = (words.next(), words.nth(1));
            local.is_some_and(|local| local.ends_with(&wanted)) && state == Some("0A")
        })
    })
}

/// Times that a client which was turned away too early is run again.
const REJECTED_MAX: usize = 3;

/// Waits until a server can be connected to.
pub(super) fn await_ready(guest: &Guest, server: &mut Running, ready: Ready) -> Result<(), String> {
    let give_up = Instant::now() + READY_WITHIN;
    loop {
        let up = match ready {
            Ready::Port(port) => listens(port),
            Ready::Management => guest
                .task(["rdma", "resource", "show", "cm_id"], READY_WITHIN)
                .start()
                .map(|task| task.wait().stdout.contains("LISTEN"))
                .unwrap_or(false),
        };
        if up {
            if ready == Ready::Management {
                // It is said to listen a moment before the device does, which until then rejects.
                std::thread::sleep(LISTENS_AFTER);
            }
            return Ok(());
        }
        if !server.is_running() || Instant::now() > give_up {
            return Err(format!(
                "the server is not ready; it said: {}{}",
                server.stdout(),
                server.stderr()
            ));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

const SERVER_REPORT: &str = scratch!("report.server");
const CLIENT_REPORT: &str = scratch!("report.client");

/// Both sides have ended; or why they could not be run.
struct Ended {
    server: Option<TaskReport>,
    client: TaskReport,
}

fn run_both(guest: &Guest, programs: &Programs, program: &Program) -> Result<Ended, String> {
    let task = |side: &Side, report: &str| {
        let (through, profile, limit) = (program.through, program.profile, program.limit);
        task(guest, programs, side, through, profile, report, limit).start()
    };
    let _ = fs::remove_file(SERVER_REPORT);
    let mut server = None;
    if let Some((side, ready)) = &program.server {
        let mut running = task(side, SERVER_REPORT).map_err(|error| error.to_string())?;
        await_ready(guest, &mut running, *ready)?;
        server = Some(running);
    }
    let client = task(&program.client, CLIENT_REPORT).map_err(|error| error.to_string())?;
    let client = client.wait();
    let server = server.map(|server| {
        if client.succeeded() {
            server.wait()
        } else {
            std::thread::sleep(Duration::from_secs(1));
            server.kill()
        }
    });
    Ok(Ended { server, client })
}

/// Whether the device turned the client away because it did not listen yet, although it was said
/// to. Nothing was sent then.
fn is_rejected(program: &Program, ended: Option<&Ended>) -> bool {
    let managed = matches!(program.server, Some((_, Ready::Management)));
    let rejected = |text: &str| text.contains("RDMA_CM_EVENT_REJECTED");
    managed
        && ended.is_some_and(|ended| {
            !ended.client.succeeded()
                && (rejected(&ended.client.stdout) || rejected(&ended.client.stderr))
        })
}

/// Runs a program and judges it.
pub(super) fn run(
    guest: &Guest,
    programs: &Programs,
    program: &Program,
    capture: &mut Capture,
) -> anyhow::Result<ProgramReport> {
    capture.take()?;
    let began = Instant::now();
    let mut ended = run_both(guest, programs, program);
    for _ in 0..REJECTED_MAX {
        if !is_rejected(program, ended.as_ref().ok()) {
            break;
        }
        capture.take()?;
        ended = run_both(guest, programs, program);
    }
    let mut report = ProgramReport {
        name: program.name.clone(),
        command: program.client.argv.join(" "),
        profile: program.profile.into(),
        seconds: began.elapsed().as_secs_f64(),
        ..ProgramReport::default()
    };
    let crossed = capture.take()?;
    report.wire_messages = crossed.messages;
    report.wire_bytes = crossed.bytes;
    report.wire_repeats = crossed.repeats;
    report.dscp = &crossed.connected | &crossed.datagram;
    match ended {
        Err(why) => report.failures.push(why),
        Ok(ended) => judge(program, &ended, &crossed, &mut report)?,
    }
    report.passed = report.failures.is_empty();
    Ok(report)
}

/// The last lines of what a program said.
pub(super) fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.trim_end().lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}

fn judge(
    program: &Program,
    ended: &Ended,
    crossed: &Crossed,
    report: &mut ProgramReport,
) -> anyhow::Result<()> {
    let mut total = LibraryReport::default();
    let sides = [
        program
            .server
            .as_ref()
            .zip(ended.server.as_ref())
            .map(|((side, _), task)| ("server", side, task, SERVER_REPORT)),
        Some(("client", &program.client, &ended.client, CLIENT_REPORT)),
    ];
    for (who, side, task, path) in sides.into_iter().flatten() {
        if !task.succeeded() {
            let said = tail(&(task.stdout.clone() + "\n" + &task.stderr));
            let how = match (task.timed_out, task.code, task.signal) {
                (true, _, _) => "was killed at its time limit".into(),
                (_, Some(code), _) => format!("ended with {code}"),
                (_, _, signal) => format!("was ended by signal {}", signal.unwrap_or(0)),
            };
            report
                .failures
                .push(format!("the {who} {how} and said: {said}"));
        }
        let Some(line) = read_report(path)? else {
            report
                .failures
                .push(format!("the library in the {who} wrote no report"));
            continue;
        };
        check_posted(who, side.posted, &line, task, report);
        total.work_requests += line.work_requests;
        total.bytes += line.bytes;
        total.deferred += line.deferred;
        total.passed_work_requests += line.passed_work_requests;
        total.scheduled_bytes += line.scheduled_bytes;
        total.bypassed_bytes += line.bypassed_bytes;
        total.failed_late += line.failed_late;
    }
    report.work_requests = total.work_requests;
    report.bytes = total.bytes;
    report.deferred = total.deferred;
    report.passed_work_requests = total.passed_work_requests;
    report.scheduled_bytes = total.scheduled_bytes;
    report.bypassed_bytes = total.bypassed_bytes;
    check_totals(program, &total, crossed, report);
    Ok(())
}

/// What a side posted, as known or stated, against what the library counted.
fn check_posted(
    who: &str,
    posted: Posted,
    line: &LibraryReport,
    task: &TaskReport,
    report: &mut ProgramReport,
) {
    // Those that were dropped were taken from the program, and owed to nobody.
    let counted = line.work_requests + line.passed_work_requests + line.dropped + line.failed_late;
    let counted_bytes = line.bytes + line.passed_bytes;
    let (wanted, wanted_bytes) = match posted {
        Posted::Exactly {
            work_requests,
            bytes,
        } => (work_requests, Some(bytes)),
        Posted::Stated => {
            let mut sum = 0;
            let mut bytes = 0;
            for result in results(&task.stdout) {
                if !UNCOUNTED.contains(&&*result.test) {
                    sum += result.work_requests;
                    bytes += result.bytes;
                }
                if !result.passed {
                    let detail = format!("{}: {}", result.test, result.detail);
                    report.failures.push(detail);
                }
            }
            let lost = line.dropped + line.failed_late > 0;
            (sum, (!lost).then_some(bytes))
        }
        Posted::Wire => return,
    };
    if counted != wanted {
        report.failures.push(format!(
            "the {who} posted {wanted} work requests, and the library counted {counted}"
        ));
    }
    if wanted_bytes.is_some_and(|wanted| wanted != counted_bytes) {
        report.failures.push(format!(
            "the {who} posted {} bytes, and the library counted {counted_bytes}",
            wanted_bytes.unwrap_or_default()
        ));
    }
}

/// What holds for both sides together.
fn check_totals(
    program: &Program,
    total: &LibraryReport,
    crossed: &Crossed,
    report: &mut ProgramReport,
) {
    let mut fail = |why: String| report.failures.push(why);
    if total.work_requests + total.passed_work_requests == 0 {
        fail("no work request passed through the library".into());
    }
    if program.must_defer && total.deferred == 0 {
        fail("no work request waited".into());
    }
    if total.bypassed_bytes > 0 {
        fail(format!("{} bytes were bypassed", total.bypassed_bytes));
    }
    if program.all_cross {
        if crossed.messages != total.work_requests {
            fail(format!(
                "{} messages crossed the wire, and the library counted {} work requests",
                crossed.messages, total.work_requests
            ));
        }
        if crossed.bytes != total.bytes {
            fail(format!(
                "{} bytes crossed the wire, and the library counted {}",
                crossed.bytes, total.bytes
            ));
        }
        if total.failed_late > 0 {
            fail(format!("{} work requests failed late", total.failed_late));
        }
    }
    let classes = [
        ("connected queue pairs", program.dscp, &crossed.connected),
        ("datagrams", program.datagram_dscp, &crossed.datagram),
    ];
    for (what, wanted, seen) in classes {
        let wrong = match wanted {
            Some(wanted) => seen.iter().any(|dscp| *dscp != wanted),
            None => false,
        };
        if wrong {
            let wanted = wanted.unwrap_or_default();
            fail(format!(
                "{what} were to have DSCP {wanted} and had {seen:?}"
            ));
        }
    }
    if program.dscp.is_some() && total.work_requests > 0 && crossed.connected.is_empty() {
        fail("nothing of it crossed the router".into());
    }
}

/// Subtests whose work requests the library does not see: datagrams that are built with `ibv_wr_*`
/// go straight to the provider.
const UNCOUNTED: [&str; 1] = ["wr_ud"];

/// What a check program says of one of its subtests.
#[derive(Debug, Deserialize)]
struct Stated {
    #[serde(default)]
    test: String,
    passed: bool,
    #[serde(default)]
    work_requests: u64,
    #[serde(default)]
    bytes: u64,
    #[serde(default)]
    detail: String,
}

fn results(stdout: &str) -> Vec<Stated> {
    let lines = stdout.lines().filter(|line| line.starts_with('{'));
    lines
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect()
}
