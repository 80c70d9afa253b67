//! The map of RDMA paths of `laxity doctor` and `laxity status`, against programs that run:
//! one under the library, one without it, and one with the NCCL plugin.

use std::fs;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde::Deserialize;

use super::Lab;
use super::case::CaseReport;
use super::catalogue::{self, LONG_WRITE};
use super::daemon::status;
use super::plugin::{self, Nccl};
use super::program::{Ready, Side, await_ready, task};
use crate::error::LabError;
use crate::vm::task::Running;

pub(super) const NAME: &str = "map_of_paths";

/// The port of perftest without the library.
const BARE_PORT: u16 = 18600;
const LIMIT: Duration = Duration::from_secs(300);
const REPORT: &str = scratch!("report.paths");
const FOLDER: &str = scratch!("paths");

/// The part of both commands' JSON that is compared.
#[derive(Deserialize)]
struct ShownMap {
    processes: Vec<ShownProcess>,
}

#[derive(Deserialize)]
struct ShownProcess {
    pid: u32,
    name: String,
    paths: Vec<ShownPath>,
}

#[derive(Debug, Deserialize)]
struct ShownPath {
    path: String,
    laxity: String,
    why: String,
}

/// A program that runs, and its row.
struct Expected {
    running: Running,
    name: &'static str,
    path: &'static str,
    laxity: &'static str,
    why: &'static str,
}

pub(super) fn run(lab: &Lab<'_>, nccl: &Nccl, case: &mut CaseReport) -> Result<(), LabError> {
    let (ordered, _server) = perftest(lab, true)?;
    let (bare, _bare_server) = perftest(lab, false)?;
    let _ = fs::remove_dir_all(FOLDER);
    fs::create_dir_all(FOLDER).map_err(LabError::file("creating", &FOLDER))?;
    let rank = |rank: u32| {
        let line = format!("-r {rank} -n 2 -d {rank} -f {FOLDER} --rounds 100000 --bytes 65536");
        plugin::task(lab, nccl, "nccl_rounds", &line).start()
    };
    let (rank, _other) = (rank(0)?, rank(1)?);
    let by_plugin = "by the NCCL plugin";
    let mut programs = [
        (ordered, "ib_write_bw", "verbs", "ordered", "by liblaxity.so"),
        (bare, "ib_write_bw", "verbs", "measured", "counted by netdev"),
        (rank, "nccl_rounds", "ncclNet", "ordered", by_plugin),
    ]
    .map(|(running, name, path, laxity, why)| Expected { running, name, path, laxity, why });
    programs.iter_mut().try_for_each(await_begin)?;
    // Nothing limits what it sends. The emulated processors have to do other work now.
    programs[1].running.signal(Signal::SIGSTOP);
    for command in ["doctor", "status"] {
        let argv = [lab.programs.laxity.display().to_string(), command.into(), "--json".into()];
        // Doctor ends with 1 if it has found any error on the host.
        let shown = lab.guest.task(argv, LIMIT).start()?.wait();
        let map: ShownMap = serde_json::from_str(&shown.stdout)
            .map_err(|error| LabError::unreadable(format!("laxity {command} {shown}"), error))?;
        for program in &programs {
            compare(command, program, &map, case);
        }
    }
    let is_running = programs.iter_mut().all(|program| program.running.is_running());
    case.check(is_running, "a program ended before it was compared");
    case.seen = format!("{} programs, as they run", case.cases / 2);
    Ok(())
}

fn perftest(lab: &Lab<'_>, is_preloaded: bool) -> Result<(Running, Running), LabError> {
    let program = catalogue::find(LONG_WRITE, lab)?;
    let start = |side: &Side| {
        let mut side = side.clone();
        // The last of several options counts.
        side.argv.extend(["-n", "1000000"].map(str::to_owned));
        if is_preloaded {
            return task(lab, &side, &program.launch, REPORT).start();
        }
        side.argv.extend(["-p".to_owned(), BARE_PORT.to_string()]);
        lab.guest.task(side.argv, LIMIT).start()
    };
    let (server, ready) = program.server.as_ref().ok_or_else(|| {
        LabError::Plan(format!("`{}` has no server to be compared with", program.name))
    })?;
    let mut server = start(server)?;
    let ready = if is_preloaded { *ready } else { Ready::Port(BARE_PORT) };
    await_ready(lab, &mut server, ready)?;
    Ok((start(&program.client)?, server))
}

/// Waits until a program that is to be ordered is a client of the daemon, and another one has a
/// device open.
fn await_begin(program: &mut Expected) -> Result<(), LabError> {
    let pid = program.running.id();
    let has_begun = || -> Result<bool, LabError> {
        if program.laxity != "ordered" {
            return Ok(has_device(pid));
        }
        Ok(status()?.clients.iter().any(|it| it.pid == pid && it.submitted_bytes > 0))
    };
    let begun = program.running.until(|| match has_begun() {
        Ok(false) => None,
        begun => Some(begun.map(drop)),
    });
    begun.unwrap_or_else(|| {
        let how = format!("does not begin; it said {}", program.running.said());
        Err(LabError::program(program.name, how))
    })
}

fn has_device(pid: u32) -> bool {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let mut targets = files.filter_map(|file| fs::read_link(file.path()).ok());
    targets.any(|target| target.to_string_lossy().contains("uverbs"))
}

fn compare(command: &str, program: &Expected, map: &ShownMap, case: &mut CaseReport) {
    let Expected { name, path, laxity, why, .. } = program;
    let pid = program.running.id();
    let row = map.processes.iter().find(|row| row.pid == pid && row.name == *name);
    let fits =
        |it: &&ShownPath| it.path == *path && it.laxity == *laxity && it.why.starts_with(why);
    let is_right = row.is_some_and(|row| row.paths.iter().any(|it| fits(&it)));
    let paths = row.map(|row| &row.paths);
    let otherwise = format!(
        "laxity {command}: {pid} ({name}) was to be {path}, {laxity} {why}, and is {paths:?}"
    );
    case.check(is_right, otherwise);
    case.cases += usize::from(is_right);
}
