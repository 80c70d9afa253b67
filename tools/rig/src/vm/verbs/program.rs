//! A program of the matrix: its command and its expected results.

use std::fs;
use std::path::Path;
use std::time::Duration;

use super::Lab;
use crate::error::LabError;
use crate::vm::task::{GuestTask, PATIENCE, Running};

/// The way in which the library is loaded into a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Through {
    Run,
    Preload,
}

#[derive(Clone, Debug)]
pub(super) struct Launch {
    pub(super) through: Through,
    pub(super) profile: String,
    pub(super) limit: Duration,
}

/// The work requests that one side posts, on queue pairs of any kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Posted {
    Exactly {
        work_requests: u64,
        bytes: u64,
    },
    Stated,
    /// Only the wire shows the work requests.
    Wire,
}

/// The condition under which a client can connect to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ready {
    Port(u16),
    Management,
}

#[derive(Clone, Debug)]
pub(super) struct Side {
    pub(super) argv: Vec<String>,
    pub(super) env: Vec<(String, String)>,
    pub(super) posted: Posted,
}

/// One program of the matrix: a client, and in most cases a server.
#[derive(Clone, Debug)]
pub(super) struct Program {
    pub(super) name: String,
    pub(super) launch: Launch,
    pub(super) server: Option<(Side, Ready)>,
    pub(super) client: Side,
    pub(super) must_defer: bool,
    /// DSCP of connected queue pairs, or `None` if the program sets classes itself.
    pub(super) dscp: Option<u8>,
    pub(super) datagram_dscp: Option<u8>,
    /// Whether the wire has exactly the work requests and bytes that the library counted. False if
    /// some must fail, or siblings carry some.
    pub(super) all_cross: bool,
    /// Whether siblings of a bundle must have carried some work requests, in a class of their own.
    pub(super) siblings: bool,
}

impl Side {
    pub(super) fn new(line: &str, posted: Posted) -> Self {
        Self { argv: line.split_whitespace().map(str::to_owned).collect(), env: Vec::new(), posted }
    }

    pub(super) fn with(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }
}

/// Stall timeout of libraries, in ms. The guest is emulated, so a living daemon may be silent for
/// 100 ms, which is the default. `faults.rs` keeps the default.
const STALL_MS: &str = "5000";
/// Longest wait for the daemon's answer when a program starts, in ms. A queue pair keeps the class
/// that it gets when it connects, so it must not connect before the answer.
const ATTACH_MS: &str = "5000";

/// Returns the time limits of libraries that wait for a daemon of the guest.
pub(super) fn patience() -> [(String, String); 2] {
    [("LAXITY_STALL_MS", STALL_MS), ("LAXITY_ATTACH_MS", ATTACH_MS)]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
}

/// Returns the task of a side, with the library in it, which writes its report to a file.
pub(super) fn task(lab: &Lab<'_>, side: &Side, launch: &Launch, report: &str) -> GuestTask {
    let _ = fs::remove_file(report);
    let text = |path: &Path| path.display().to_string();
    let library = text(&lab.programs.library);
    let mut argv = Vec::new();
    let mut env = Vec::from(patience());
    env.extend(side.env.iter().cloned());
    let profile = launch.profile.as_str();
    match launch.through {
        Through::Run => {
            argv.extend([text(&lab.programs.laxity), "run".into(), "--require".into()]);
            argv.extend(["--library".into(), library]);
            argv.extend(["--profile", profile, "--report", report, "--"].map(String::from));
        }
        Through::Preload => {
            let before = side.env.iter().find(|(name, _)| name == "LD_PRELOAD");
            let preload = before.map_or(library.clone(), |(_, first)| format!("{first}:{library}"));
            let set =
                [("LD_PRELOAD", &*preload), ("LAXITY_PROFILE", profile), ("LAXITY_REPORT", report)];
            env.extend(set.map(|(name, value)| (name.to_owned(), value.to_owned())));
        }
    }
    argv.extend(side.argv.iter().cloned());
    let mut task = lab.guest.task(argv, launch.limit);
    // The last of several variables with the same name counts.
    task.env.extend(env);
    task
}

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

pub(super) fn await_ready(
    lab: &Lab<'_>,
    server: &mut Running,
    ready: Ready,
) -> Result<(), LabError> {
    const LISTENS_AFTER: Duration = Duration::from_millis(300);
    let shows = ["rdma", "resource", "show", "cm_id"];
    let is_up = || match ready {
        Ready::Port(port) => listens(port),
        Ready::Management => {
            let shown = lab.guest.task(shows, PATIENCE).start();
            shown.is_ok_and(|task| task.wait().stdout.contains("LISTEN"))
        }
    };
    server.until(|| is_up().then_some(())).ok_or_else(|| {
        let how = format!("is not ready; it said: {}", server.said());
        LabError::program("the server", how)
    })?;
    if ready == Ready::Management {
        // The kernel shows the listener a moment before the device accepts connections.
        std::thread::sleep(LISTENS_AFTER);
    }
    Ok(())
}
