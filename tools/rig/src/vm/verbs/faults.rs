//! What is killed, and what must come of it: a daemon under traffic, applications with work
//! requests that wait; and the library where there is nothing for it to do, or a tool that looks at
//! every access.

use std::fmt::Write as _;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};

use super::catalogue;
use super::daemon::{Daemon, status};
use super::pair::{LibraryReport, await_ready, read_report, task};
use super::program::{Posted, Program, Ready, Side, Through};
use super::{Matrix, Programs};
use crate::vm::guest::Guest;
use crate::vm::network::{ADDRESSES, DEVICES};
use crate::vm::task::{Task, TaskReport};

/// What a fault came to.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Fault {
    /// Its name.
    pub name: String,
    /// Whether every check held.
    pub passed: bool,
    /// Bytes that went out unscheduled meanwhile.
    pub bypassed_bytes: u64,
    /// Bytes under permits, before and after.
    pub scheduled_bytes: u64,
    /// What was seen, in words.
    pub seen: String,
    /// Seconds it took.
    pub seconds: f64,
    /// Which checks did not hold.
    pub failures: Vec<String>,
}

/// The faults, by name, in the order in which they run.
pub(super) const NAMES: [&str; 6] = [
    "daemon_killed_under_perftest",
    WITH_MOONCAKE,
    "applications_killed",
    "nothing_to_do",
    "valgrind",
    "address_sanitizer",
];

/// The one that needs the Mooncake Transfer Engine.
pub(super) const WITH_MOONCAKE: &str = "daemon_killed_under_mooncake";

/// What Mooncake says of a slice that failed.
const POSTS_AGAIN: &str = "Process failed for slice";

const REPORT: &str = scratch!("report.fault");
const SERVER_REPORT: &str = scratch!("report.fault.server");

/// Runs one of [`NAMES`].
pub(super) fn run(
    name: &str,
    guest: &Guest,
    programs: &Programs,
    matrix: &Matrix,
    daemon: &mut Option<Daemon>,
) -> anyhow::Result<Fault> {
    let began = Instant::now();
    let mut fault = Fault {
        name: name.into(),
        ..Fault::default()
    };
    let outcome = match name {
        "daemon_killed_under_perftest" => {
            let program = perftest(guest);
            daemon_killed(guest, programs, daemon, &program, &mut fault)
        }
        WITH_MOONCAKE => match catalogue::mooncake(programs, name, "long") {
            Some(program) => daemon_killed(guest, programs, daemon, &program, &mut fault),
            None => bail!("{name} needs the Mooncake Transfer Engine"),
        },
        "applications_killed" => {
            applications_killed(guest, programs, matrix.cycles, daemon, &mut fault)
        }
        "nothing_to_do" => nothing_to_do(guest, programs, &mut fault),
        "valgrind" => valgrind(guest, programs, &mut fault),
        "address_sanitizer" => address_sanitizer(guest, programs, matrix, &mut fault),
        _ => bail!("no fault `{name}`"),
    };
    if let Err(error) = outcome {
        fault.failures.push(format!("{error:#}"));
    }
    fault.seconds = began.elapsed().as_secs_f64();
    fault.passed = fault.failures.is_empty();
    Ok(fault)
}

fn perftest(guest: &Guest) -> Program {
    const POSTS: u64 = 3200;
    let gid = guest.facts.gid_index;
    let line = |device: usize, to: &str| {
        format!(
            "ib_write_bw -n {POSTS} -d {} -x {gid} -F {to}",
            DEVICES[device]
        )
    };
    let posted = |work_requests| Posted::Exactly {
        work_requests,
        bytes: work_requests * 65536,
    };
    Program {
        name: "ib_write_bw".into(),
        profile: "perftest",
        through: Through::Run,
        server: Some((Side::new(&line(0, ""), posted(0)), Ready::Port(18515))),
        client: Side::new(&line(1, ADDRESSES[0]), posted(POSTS)),
        must_defer: true,
        dscp: None,
        datagram_dscp: None,
        all_cross: true,
        limit: Duration::from_secs(90),
    }
}

/// A program with the library, its report in [`REPORT`].
fn preloaded(guest: &Guest, programs: &Programs, side: &Side, limit: Duration) -> Task {
    let through = Through::Preload;
    task(guest, programs, side, through, "default", REPORT, limit)
}

fn ended_well(what: &str, task: &TaskReport, fault: &mut Fault) {
    if !task.succeeded() {
        fault.failures.push(format!("{what}: {task}"));
    }
}

/// SIGKILL of the daemon in the middle of a transfer; another one comes half a second later.
fn daemon_killed(
    guest: &Guest,
    programs: &Programs,
    daemon: &mut Option<Daemon>,
    program: &Program,
    fault: &mut Fault,
) -> anyhow::Result<()> {
    let (server, ready) = program.server.as_ref().context("a server")?;
    let start = |side: &Side, report: &str| {
        let (through, profile, limit) = (program.through, program.profile, program.limit);
        // The library's own idea of when a daemon is dead.
        let side = side.clone().with("LAXITY_STALL_MS", "");
        task(guest, programs, &side, through, profile, report, limit).start()
    };
    let mut server = start(server, SERVER_REPORT)?;
    await_ready(guest, &mut server, *ready).map_err(anyhow::Error::msg)?;
    let at_first = status()?.totals.permitted_bytes;
    let mut client = start(&program.client, REPORT)?;
    let give_up = Instant::now() + Duration::from_secs(30);
    const UNDER_WAY: u64 = 4 << 20;
    while status()?.totals.permitted_bytes < at_first + UNDER_WAY {
        if !client.is_running() || Instant::now() > give_up {
            bail!(
                "nothing is under way; it said {}{}",
                client.stdout(),
                client.stderr()
            );
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let before = status()?.totals.permitted_bytes - at_first;
    daemon.take().context("a daemon")?.kill();
    let was_running = client.is_running();
    std::thread::sleep(Duration::from_millis(500));
    let new = Daemon::start(guest, programs)?;
    let client = client.wait();
    ended_well("the client", &client, fault);
    ended_well("the server", &server.wait(), fault);
    let after = status()?.totals.permitted_bytes;
    *daemon = Some(new);
    if !was_running {
        fault
            .failures
            .push("it had ended before the daemon was killed".into());
    }
    let line = read_report(REPORT)?.context("the library wrote no report")?;
    fault.bypassed_bytes = line.bypassed_bytes;
    fault.scheduled_bytes = line.scheduled_bytes;
    fault.seen = format!(
        "{} bytes posted; {before} permitted by the first daemon, {after} permitted by the second",
        line.bytes
    );
    if line.reattaches == 0 || after == 0 {
        fault.failures.push("the new daemon was not found".into());
    }
    check_bytes_over_a_restart(program, &client, &line, fault);
    Ok(())
}

/// Each byte that the program says it posted went out once, some of it without a daemon.
fn check_bytes_over_a_restart(
    program: &Program,
    client: &TaskReport,
    line: &LibraryReport,
    fault: &mut Fault,
) {
    let stated = match program.client.posted {
        Posted::Exactly { bytes, .. } => bytes,
        _ => stated_bytes(&client.stdout),
    };
    // A transport that gives up under the burst makes Mooncake post the same slices again, and it
    // says so.
    let again = line.bytes.saturating_sub(stated);
    if again > 0 && client.stderr.contains(POSTS_AGAIN) {
        let _ = write!(fault.seen, "; {again} bytes posted again by the program");
    } else if line.bytes != stated {
        fault.failures.push(format!(
            "it posted {stated} bytes, and the library counted {}; {client}",
            line.bytes
        ));
    }
    if line.bypassed_bytes == 0 {
        fault
            .failures
            .push("no byte was bypassed while there was no daemon".into());
    }
    if line.bypassed_bytes + line.scheduled_bytes != line.bytes {
        // Work requests pulled ahead of their permits are counted apart from either.
        fault.seen += &format!(
            "; {} neither",
            i128::from(line.bytes) - i128::from(line.bypassed_bytes + line.scheduled_bytes)
        );
    }
}

fn stated_bytes(stdout: &str) -> u64 {
    let lines = stdout.lines().filter(|line| line.starts_with('{'));
    lines
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter_map(|line| line.get("bytes")?.as_u64())
        .sum()
}

fn wait_for_no_client(limit: Duration) -> anyhow::Result<()> {
    let give_up = Instant::now() + limit;
    loop {
        let attached = status()?.clients.len();
        if attached == 0 {
            return Ok(());
        }
        if Instant::now() > give_up {
            bail!("{attached} clients are still attached");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// SIGKILL of applications while their work requests wait, again and again.
fn applications_killed(
    guest: &Guest,
    programs: &Programs,
    cycles: u32,
    daemon: &Option<Daemon>,
    fault: &mut Fault,
) -> anyhow::Result<()> {
    const WARM_UP: u32 = 10;
    /// Pages that an allocator keeps are no leak; what each of a hundred clients left would be.
    const GROWTH_KIB_MAX: u64 = 2048;
    let daemon = daemon.as_ref().context("a daemon")?;
    let cycle = |cycles: u32| -> anyhow::Result<TaskReport> {
        let line = format!("{}/orphans -n {cycles}", programs.checks.display());
        let side = Side::new(&line, Posted::Wire);
        let limit = Duration::from_secs(60 + 2 * u64::from(cycles));
        let task = preloaded(guest, programs, &side, limit);
        Ok(task.start()?.wait())
    };
    ended_well("the warm-up", &cycle(WARM_UP)?, fault);
    wait_for_no_client(Duration::from_secs(10))?;
    let (descriptors, resident) = daemon.footprint()?;
    let before = status()?.totals;
    let report = cycle(cycles)?;
    ended_well("the application", &report, fault);
    wait_for_no_client(Duration::from_secs(10))?;
    let (descriptors_after, resident_after) = daemon.footprint()?;
    let after = status()?.totals;
    let cancelled = after.cancelled_flows - before.cancelled_flows;
    fault.seen = format!(
        "{} cycles, {} attachments, {cancelled} flows ended with their process; fds {descriptors} \
         → \
         {descriptors_after}, RSS {resident} → {resident_after} KiB; {}",
        cycles,
        after.attachments - before.attachments,
        report.stdout.trim(),
    );
    let killed = u64::from(cycles);
    if after.attachments - before.attachments < killed {
        fault.failures.push("not every application attached".into());
    }
    if cancelled < killed {
        fault
            .failures
            .push("not every application had work requests that waited".into());
    }
    if descriptors_after > descriptors {
        fault
            .failures
            .push("the daemon has more file descriptors than before".into());
    }
    if resident_after > resident + GROWTH_KIB_MAX {
        fault.failures.push("the daemon's memory has grown".into());
    }
    Ok(())
}

/// Programs without libibverbs, and one that opens a device and never posts.
fn nothing_to_do(guest: &Guest, programs: &Programs, fault: &mut Fault) -> anyhow::Result<()> {
    const LIMIT: Duration = Duration::from_secs(30);
    let attachments = || anyhow::Ok(status()?.totals.attachments);
    let run = |argv: &[&str]| -> anyhow::Result<TaskReport> {
        let mut side = Side::new("", Posted::Wire);
        side.argv = argv.iter().map(ToString::to_string).collect();
        let task = preloaded(guest, programs, &side, LIMIT);
        Ok(task.start()?.wait())
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
        ended_well(argv[0], &report, fault);
        if expected.is_some_and(|expected| report.stdout != expected) || !report.stderr.is_empty() {
            fault
                .failures
                .push(format!("one thread and nothing said: {report}"));
        }
        if fs::exists(REPORT).unwrap_or(true) {
            fault.failures.push(format!("{} wrote a report", argv[0]));
        }
    }
    if attachments()? != before {
        fault
            .failures
            .push("a program without libibverbs attached to the daemon".into());
    }
    let info = run(&["/usr/bin/ibv_devinfo", "-d", DEVICES[0]])?;
    ended_well("ibv_devinfo", &info, fault);
    let line = read_report(REPORT)?;
    if line.is_none_or(|line| line.work_requests + line.passed_work_requests > 0) {
        fault
            .failures
            .push("ibv_devinfo posts nothing, and its report says otherwise".into());
    }
    if attachments()? != before {
        fault
            .failures
            .push("a program that never posts attached to the daemon".into());
    }
    fault.seen =
        "ls, python3: no thread, no report, not attached; ibv_devinfo: not attached".into();
    Ok(())
}

/// Subtests that take each way through the library, and few packets.
const SUBTESTS: [&str; 9] = [
    "post_list",
    "reuse_freed",
    "unsignaled",
    "wr_batch",
    "wr_inline",
    "wr_abort",
    "cq_events",
    "qp_error",
    "destroy_pending",
];

fn subtests() -> String {
    SUBTESTS.join(" ")
}

fn checked(
    guest: &Guest,
    programs: &Programs,
    side: &Side,
    fault: &mut Fault,
) -> anyhow::Result<()> {
    let limit = Duration::from_secs(240);
    let task = preloaded(guest, programs, side, limit);
    let report = task.start()?.wait();
    ended_well(&side.argv.join(" "), &report, fault);
    let line = read_report(REPORT)?.context("the library wrote no report")?;
    if line.work_requests == 0 {
        fault
            .failures
            .push("no work request passed through the library".into());
    }
    fault.bypassed_bytes = line.bypassed_bytes;
    fault.scheduled_bytes = line.scheduled_bytes;
    fault.seen = format!(
        "{} work requests, {} deferred",
        line.work_requests, line.deferred
    );
    Ok(())
}

fn valgrind(guest: &Guest, programs: &Programs, fault: &mut Fault) -> anyhow::Result<()> {
    let gid = guest.facts.gid_index;
    let program = programs.checks.display();
    let line = format!(
        "valgrind -q --error-exitcode=99 --fair-sched=yes {program}/verbs_check -g {gid} {}",
        subtests()
    );
    let side = Side::new(&line, Posted::Stated)
        .with("VERBS_SLOW", "30")
        .with("VERBS_NO_RSS", "1");
    checked(guest, programs, &side, fault)
}

fn address_sanitizer(
    guest: &Guest,
    programs: &Programs,
    matrix: &Matrix,
    fault: &mut Fault,
) -> anyhow::Result<()> {
    let gid = guest.facts.gid_index;
    let line = format!(
        "{}/verbs_check -g {gid} {}",
        matrix.checks_asan.display(),
        subtests()
    );
    let side = Side::new(&line, Posted::Stated)
        .with("VERBS_SLOW", "8")
        .with("VERBS_NO_RSS", "1")
        .with("LD_PRELOAD", &matrix.libasan.display().to_string());
    checked(guest, programs, &side, fault)
}
