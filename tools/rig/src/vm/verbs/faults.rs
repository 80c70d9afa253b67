//! The faults of the matrix. A daemon is killed under traffic, and applications while their work
//! requests wait. Other cases run the library in programs without RDMA traffic, under valgrind and
//! with the address sanitizer.

use std::fmt::Write as _;
use std::fs;
use std::time::Duration;

use super::Lab;
use super::campaign;
use super::case::{CaseReport, LibraryReport, read_report};
use super::catalogue;
use super::daemon::{GuestDaemon, status};
use super::pair::stated;
use super::program::{Launch, Posted, Program, Side, Through, await_ready, task};
use crate::child::poll;
use crate::error::LabError;
use crate::vm::network::DEVICES;
use crate::vm::task::{LOOK_LATER, PATIENCE, Running, TaskReport};

pub(super) const NAMES: [&str; 9] = [
    "daemon_killed_under_perftest",
    "daemon_killed_under_a_bundle",
    WITH_MOONCAKE,
    "applications_killed",
    campaign::NAME,
    campaign::OF_BUNDLES,
    "nothing_to_do",
    "valgrind",
    "address_sanitizer",
];

pub(super) const WITH_MOONCAKE: &str = "daemon_killed_under_mooncake";
const POSTS_AGAIN: &str = "Process failed for slice";
const REPORT: &str = scratch!("report.fault");
const SERVER_REPORT: &str = scratch!("report.fault.server");

/// Runs the fault with a name of [`NAMES`]. Starts a new daemon if the fault killed it.
pub(super) fn run(
    name: &str,
    lab: &Lab<'_>,
    daemon: &mut Option<GuestDaemon>,
    case: &mut CaseReport,
) -> Result<(), LabError> {
    if [campaign::NAME, campaign::OF_BUNDLES].contains(&name) {
        // A campaign has its own daemons. This daemon would see their traffic as foreign.
        if let Some(daemon) = daemon.take() {
            daemon.kill();
        }
        return campaign::run(name, lab, case);
    }
    let running = match daemon.take() {
        Some(daemon) => daemon,
        None => GuestDaemon::start(lab)?,
    };
    let killed = match name {
        "daemon_killed_under_perftest" => Some(catalogue::LONG_WRITE),
        "daemon_killed_under_a_bundle" => Some(catalogue::LONG_BUNDLE),
        WITH_MOONCAKE => Some(name),
        _ => None,
    };
    if let Some(program) = killed {
        *daemon = daemon_killed(lab, running, &catalogue::find(program, lab)?, case)?;
        return Ok(());
    }
    let running = daemon.insert(running);
    match name {
        "applications_killed" => applications_killed(lab, running, case),
        "nothing_to_do" => nothing_to_do(lab, case),
        "valgrind" => {
            let tool = "valgrind -q --error-exitcode=99 --fair-sched=yes";
            let program = lab.programs.checks.display();
            let side = subtests(lab, &format!("{tool} {program}"), UNDER_VALGRIND);
            checked(lab, &side.with("VERBS_SLOW", "30"), case)
        }
        "address_sanitizer" => {
            let side = subtests(lab, &lab.matrix.checks_asan.display().to_string(), SUBTESTS);
            let libasan = lab.matrix.libasan.display().to_string();
            let side = side.with("VERBS_SLOW", "8").with("LD_PRELOAD", &libasan);
            checked(lab, &side, case)
        }
        _ => Err(LabError::Plan(format!("no fault `{name}`"))),
    }
}

fn preloaded(lab: &Lab<'_>, side: &Side, limit_s: u64) -> Result<TaskReport, LabError> {
    let launch = Launch {
        through: Through::Preload,
        profile: "default".to_owned(),
        limit: Duration::from_secs(limit_s),
    };
    Ok(task(lab, side, &launch, REPORT).start()?.wait())
}

/// A program under way, and the bytes that had a permit before it began.
struct UnderWay {
    server: Running,
    client: Running,
    at_first: u64,
}

/// Starts a program and returns when some bytes of it had a permit.
fn under_way(lab: &Lab<'_>, program: &Program) -> Result<UnderWay, LabError> {
    const UNDER_WAY: u64 = 4 << 20;
    /// Siblings carry some of it by then.
    const WITH_SIBLINGS: u64 = 160 << 20;
    let (server, ready) = program.server.as_ref().ok_or_else(|| {
        LabError::Plan(format!("`{}` has no server for the daemon's end", program.name))
    })?;
    let start = |side: &Side, report: &str| {
        // The empty value restores the library's default stall timeout.
        let side = side.clone().with("LAXITY_STALL_MS", "");
        task(lab, &side, &program.launch, report).start()
    };
    let mut server = start(server, SERVER_REPORT)?;
    await_ready(lab, &mut server, *ready)?;
    let at_first = status()?.totals.permitted_bytes;
    let enough = at_first + if program.siblings { WITH_SIBLINGS } else { UNDER_WAY };
    let mut client = start(&program.client, REPORT)?;
    let begun = client.until(|| match status() {
        Ok(status) if status.totals.permitted_bytes < enough => None,
        begun => Some(begun.map(drop)),
    });
    begun.unwrap_or_else(|| {
        let how = format!("has nothing under way; it said {}", client.said());
        Err(LabError::program("the client", how))
    })?;
    Ok(UnderWay { server, client, at_first })
}

/// Kills the daemon with SIGKILL in the middle of a transfer. Starts another half a second later
/// and returns it.
fn daemon_killed(
    lab: &Lab<'_>,
    daemon: GuestDaemon,
    program: &Program,
    case: &mut CaseReport,
) -> Result<Option<GuestDaemon>, LabError> {
    let UnderWay { server, mut client, at_first } = under_way(lab, program)?;
    let before = status()?.totals.permitted_bytes - at_first;
    daemon.kill();
    let was_running = client.is_running();
    std::thread::sleep(Duration::from_millis(500));
    let next = GuestDaemon::start(lab)?;
    let client = client.wait();
    case.check_ended("the client", &client);
    case.check_ended("the server", &server.wait());
    let after = status()?.totals.permitted_bytes;
    case.check(was_running, "it had ended before the daemon was killed");
    let Some(line) = read_report(REPORT)? else {
        case.fail("the library wrote no report");
        return Ok(Some(next));
    };
    case.library = line;
    case.seen = format!(
        "{} bytes posted, {} bypassed; {before} permitted by the first daemon, {after} by the \
         second",
        line.bytes, line.bypassed_bytes
    );
    if program.siblings {
        let (siblings, all) = (line.by_siblings, line.work_requests);
        let _ = write!(case.seen, "; {siblings} of {all} work requests by siblings");
        case.check(siblings > 0, "no sibling carried anything");
    }
    let found = line.reattaches > 0 && after > 0;
    case.check(found, "the new daemon was not found");
    check_bytes_over_a_restart(program, &client, &line, case);
    Ok(Some(next))
}

/// Checks that each byte that the program posted went out once, and some without a daemon.
fn check_bytes_over_a_restart(
    program: &Program,
    client: &TaskReport,
    line: &LibraryReport,
    case: &mut CaseReport,
) {
    let posted = match program.client.posted {
        Posted::Exactly { bytes, .. } => bytes,
        _ => stated(&client.stdout).map(|line| line.bytes).sum(),
    };
    // If the transport gives up under the burst, Mooncake posts the same slices again and logs
    // that.
    let again = line.bytes.saturating_sub(posted);
    if again > 0 && client.stderr.contains(POSTS_AGAIN) {
        let _ = write!(case.seen, "; {again} bytes posted again by the program");
    } else if line.bytes != posted {
        let counted = line.bytes;
        case.fail(format!("it posted {posted} bytes, and the library counted {counted}; {client}"));
    }
    let bypassed = line.bypassed_bytes > 0;
    case.check(bypassed, "no byte was bypassed while there was no daemon");
    // Work requests that were posted ahead of their permits count as neither.
    let either = i128::from(line.bypassed_bytes + line.scheduled_bytes);
    let neither = i128::from(line.bytes) - either;
    if neither != 0 {
        let _ = write!(case.seen, "; {neither} neither");
    }
}

fn wait_for_no_client() -> Result<(), LabError> {
    let gone = poll(PATIENCE, LOOK_LATER, || match status() {
        Ok(status) if !status.clients.is_empty() => None,
        gone => Some(gone.map(drop)),
    });
    gone.unwrap_or_else(|| {
        let what = format!("{} clients are still attached", status()?.clients.len());
        Err(LabError::Timeout { what, within: PATIENCE, said: String::new() })
    })
}

/// Kills applications with SIGKILL many times while their work requests wait.
fn applications_killed(
    lab: &Lab<'_>,
    daemon: &GuestDaemon,
    case: &mut CaseReport,
) -> Result<(), LabError> {
    const WARM_UP: u32 = 10;
    /// Maximum growth of the daemon's memory, in KiB. A leak of each of 100 clients exceeds it.
    const GROWTH_KIB_MAX: u64 = 2048;
    let cycle = |cycles: u32| {
        let line = format!("{}/orphans -n {cycles}", lab.programs.checks.display());
        preloaded(lab, &Side::new(&line, Posted::Wire), 60 + 2 * u64::from(cycles))
    };
    case.check_ended("the warm-up", &cycle(WARM_UP)?);
    wait_for_no_client()?;
    let (descriptors, resident) = daemon.footprint()?;
    let before = status()?.totals;
    let cycles = lab.matrix.cycles;
    let report = cycle(cycles)?;
    case.check_ended("the application", &report);
    wait_for_no_client()?;
    // The daemon may not have closed the connection of the last `status` yet. A leaked connection
    // stays open.
    let is_closed = |(open, _): &(usize, u64)| *open <= descriptors;
    poll(PATIENCE, LOOK_LATER, || daemon.footprint().ok().filter(is_closed));
    let (descriptors_after, resident_after) = daemon.footprint()?;
    let after = status()?.totals;
    let cancelled = after.cancelled_flows - before.cancelled_flows;
    let attached = after.attachments - before.attachments;
    case.seen = format!(
        "{cycles} cycles, {attached} attachments, {cancelled} flows ended with their process; fds \
         {descriptors} → {descriptors_after}, RSS {resident} → {resident_after} KiB; {}",
        report.stdout.trim(),
    );
    let killed = u64::from(cycles);
    for (holds, otherwise) in [
        (attached >= killed, "not every application attached"),
        (cancelled >= killed, "not every application had work requests that waited"),
        (descriptors_after <= descriptors, "the daemon has more file descriptors than before"),
        (resident_after <= resident + GROWTH_KIB_MAX, "the daemon's memory has grown"),
    ] {
        case.check(holds, otherwise);
    }
    Ok(())
}

/// Runs programs without libibverbs, and one that opens a device and never posts.
fn nothing_to_do(lab: &Lab<'_>, case: &mut CaseReport) -> Result<(), LabError> {
    let attachments = || Ok::<_, LabError>(status()?.totals.attachments);
    let run = |argv: &[&str]| {
        let mut side = Side::new("", Posted::Wire);
        side.argv = argv.iter().map(ToString::to_string).collect();
        preloaded(lab, &side, 30)
    };
    let before = attachments()?;
    let own = "import os\nprint(len(os.listdir('/proc/self/task')))\n\
               maps = open('/proc/self/maps').read()\nprint('liblaxity' in maps, 'ibverbs' in \
               maps)";
    let programs: [(&[&str], Option<&str>); 3] = [
        (&["/bin/ls", "/"], None),
        (&["/usr/bin/python3", "-c", "pass"], Some("")),
        (&["/usr/bin/python3", "-c", own], Some("1\nTrue False\n")),
    ];
    for (argv, expected) in programs {
        let report = run(argv)?;
        case.check_ended(argv[0], &report);
        let as_expected = expected.is_none_or(|expected| report.stdout == expected);
        let quiet = as_expected && report.stderr.is_empty();
        case.check(quiet, format!("one thread and nothing said: {report}"));
        let silent = !fs::exists(REPORT).unwrap_or(true);
        case.check(silent, format!("{} wrote a report", argv[0]));
    }
    let none = attachments()? == before;
    case.check(none, "a program without libibverbs attached to the daemon");
    let info = run(&["/usr/bin/ibv_devinfo", "-d", DEVICES[0]])?;
    case.check_ended("ibv_devinfo", &info);
    let line = read_report(REPORT)?;
    let none = line.is_some_and(|line| line.work_requests + line.passed_work_requests == 0);
    case.check(none, "ibv_devinfo posts nothing, and its report says otherwise");
    let none = attachments()? == before;
    case.check(none, "a program that never posts attached to the daemon");
    case.seen = "ls, python3: no thread, no report, not attached; ibv_devinfo: not attached".into();
    Ok(())
}

const SUBTESTS: &str = "post_list reuse_freed unsignaled wr_batch wr_inline wr_abort cq_events \
                        qp_error destroy_pending";

/// The subtests that depend most on when memory may be reused. Together they take a minute of
/// emulation.
const UNDER_VALGRIND: &str = "post_list reuse_freed wr_inline destroy_pending";

fn subtests(lab: &Lab<'_>, folder: &str, which: &str) -> Side {
    let gid = lab.guest.facts.gid_index;
    let line = format!("{folder}/verbs_check -g {gid} {which}");
    Side::new(&line, Posted::Stated).with("VERBS_NO_RSS", "1")
}

fn checked(lab: &Lab<'_>, side: &Side, case: &mut CaseReport) -> Result<(), LabError> {
    let report = preloaded(lab, side, 240)?;
    case.check_ended(&side.argv.join(" "), &report);
    let line =
        read_report(REPORT)?.ok_or_else(|| LabError::program("the library", "wrote no report"))?;
    let any = line.work_requests > 0;
    case.check(any, "no work request passed through the library");
    case.library = line;
    case.seen = format!("{} work requests, {} deferred", line.work_requests, line.deferred);
    Ok(())
}
