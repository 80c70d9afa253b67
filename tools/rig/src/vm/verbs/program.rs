//! A program of the matrix: what is run, and what must come of it.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use super::Lab;
use crate::vm::task::{Running, Task};

/// How the library gets into a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Through {
    /// `laxity run --profile … -- PROGRAM`.
    Run,
    /// `LD_PRELOAD` and `LAXITY_PROFILE`, set by hand.
    Preload,
}

/// How both sides of a program are started.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launch {
    pub(super) through: Through,
    pub(super) profile: &'static str,
    /// The program is killed after this time.
    pub(super) limit: Duration,
}

/// What one side posts on queue pairs of any kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Posted {
    /// Known from its arguments.
    Exactly {
        /// Work requests.
        work_requests: u64,
        /// Their payload.
        bytes: u64,
    },
    /// It says so itself, in lines of JSON with `work_requests`, `bytes` and `passed`.
    Stated,
    /// Only the wire tells.
    Wire,
}

/// When a server can be connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ready {
    /// Something listens at this TCP port.
    Port(u16),
    /// Something listens for connections by rdma_cm.
    Management,
}

/// One process.
#[derive(Clone, Debug)]
pub(super) struct Side {
    pub(super) argv: Vec<String>,
    pub(super) env: Vec<(String, String)>,
    pub(super) posted: Posted,
}

/// One program of the matrix: a client, mostly with a server.
#[derive(Clone, Debug)]
pub(super) struct Program {
    pub(super) name: String,
    pub(super) launch: Launch,
    pub(super) server: Option<(Side, Ready)>,
    pub(super) client: Side,
    /// Work requests must have waited.
    pub(super) must_defer: bool,
    /// DSCP of connected queue pairs; `None`: the program sets classes itself.
    pub(super) dscp: Option<u8>,
    /// DSCP of datagrams, which keep the program's own.
    pub(super) datagram_dscp: Option<u8>,
    /// Whether each work request is a message on the wire: not so where some are made to fail.
    pub(super) all_cross: bool,
}

impl Side {
    pub(super) fn new(line: &str, posted: Posted) -> Self {
        Self {
            argv: line.split_whitespace().map(str::to_owned).collect(),
            env: Vec::new(),
            posted,
        }
    }

    pub(super) fn with(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }
}

/// The guest is emulated and shares its processors. A daemon that is silent for 100 ms, the
/// library's default limit, is not dead there. `faults.rs` keeps the default.
const STALL_MS: &str = "5000";
/// Time for the daemon's answer when a program starts. A queue pair keeps for life the class that
/// it gets when it connects, so it must not connect before the daemon has answered.
const ATTACH_MS: &str = "5000";

/// How long libraries wait for a daemon of the guest.
pub(super) fn patience() -> [(String, String); 2] {
    [
        ("LAXITY_STALL_MS", STALL_MS),
        ("LAXITY_ATTACH_MS", ATTACH_MS),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
}

/// A side's task, with the library in it, reporting to a file.
pub(super) fn task(lab: &Lab<'_>, side: &Side, launch: Launch, report: &str) -> Task {
    let _ = fs::remove_file(report);
    let text = |path: &Path| path.display().to_string();
    let library = text(&lab.programs.library);
    let mut argv = Vec::new();
    let mut env = Vec::from(patience());
    env.extend(side.env.iter().cloned());
    let profile = launch.profile;
    match launch.through {
        Through::Run => {
            argv.extend([text(&lab.programs.laxity), "run".into(), "--require".into()]);
            argv.extend(["--library".into(), library]);
            argv.extend(["--profile", profile, "--report", report, "--"].map(String::from));
        }
        Through::Preload => {
            let before = side.env.iter().find(|(name, _)| name == "LD_PRELOAD");
            let preload = before.map_or(library.clone(), |(_, first)| format!("{first}:{library}"));
            let set = [
                ("LD_PRELOAD", &*preload),
                ("LAXITY_PROFILE", profile),
                ("LAXITY_REPORT", report),
            ];
            env.extend(set.map(|(name, value)| (name.to_owned(), value.to_owned())));
        }
    }
    argv.extend(side.argv.iter().cloned());
    let mut task = lab.guest.task(argv, launch.limit);
    // The last value of a name counts.
    task.env.extend(env);
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

/// Waits until a server can be connected to.
pub(super) fn await_ready(lab: &Lab<'_>, server: &mut Running, ready: Ready) -> anyhow::Result<()> {
    const READY_WITHIN: Duration = Duration::from_secs(30);
    const LISTENS_AFTER: Duration = Duration::from_millis(300);
    let shows = ["rdma", "resource", "show", "cm_id"];
    let give_up = Instant::now() + READY_WITHIN;
    loop {
        let up = match ready {
            Ready::Port(port) => listens(port),
            Ready::Management => {
                let shown = lab.guest.task(shows, READY_WITHIN).start();
                shown.is_ok_and(|task| task.wait().stdout.contains("LISTEN"))
            }
        };
        if up {
            if ready == Ready::Management {
                // It is said to listen a moment before the device does, which until then rejects.
                std::thread::sleep(LISTENS_AFTER);
            }
            return Ok(());
        }
        if !server.is_running() || Instant::now() > give_up {
            anyhow::bail!("the server is not ready; it said: {}", server.said());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
