//! The daemon of a round: its configuration, its process, its limits, and questions to it.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use laxity_shm::sleep::now_ns;
use laxity_wire::{ControlClient, ControlError, Status};
use nix::sys::signal::Signal;

use super::setting::Pace;
use crate::child::{Guarded, descriptors, output, poll, status_number, tail};
use crate::error::LabError;
use crate::sandbox;
use crate::vm::memory_group::MemoryGroup;

/// Longest time until a daemon that was started, stopped or asked answers. On a busy machine it
/// needed more than 5 s to find its coordinator.
const ANSWER_MAX: Duration = Duration::from_secs(20);

/// Time until a daemon that aborts has ended, as a rule and on a busy machine.
const ABORTED_WITHIN: Duration = Duration::from_millis(10);
const ABORTED_WITHIN_MAX: Duration = Duration::from_secs(1);

/// Executes the daemon so that it dies with the process that started it.
pub(super) fn become_daemon(program: &Path, arguments: &[std::ffi::OsString]) -> LabError {
    // A parent that is gone already leaves a daemon that nobody uses; its folder is temporary.
    let _ = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL);
    LabError::start(program.display())(Command::new(program).args(arguments).exec())
}

/// A `laxityd` with sockets in a folder of its own.
pub(super) struct Daemon {
    program: PathBuf,
    next: PathBuf,
    folder: PathBuf,
    process: Option<Guarded>,
    /// Whether a signal of ours ends the process, so that its end is no violation.
    doomed: bool,
    pub(super) policy: &'static str,
    pub(super) mode: &'static str,
    pub(super) window_kib: u64,
    pub(super) rate: &'static str,
    pub(super) coordinator: Option<SocketAddr>,
    pub(super) log_is_full: bool,
    limit: Option<String>,
    pace: Pace,
    memory_is_short: bool,
    had_no_memory: bool,
    group: Option<MemoryGroup>,
    /// The process, and the run delay of its scheduler thread at the last look.
    run_delay: (Option<u32>, u64),
    /// Until when the process may abort, because it had no memory.
    may_abort_until: Instant,
}

impl Daemon {
    pub(super) fn new(
        program: &Path,
        then: Option<&PathBuf>,
        folder: &Path,
        pace: Pace,
    ) -> Result<Self, LabError> {
        let daemon = Self {
            program: program.to_owned(),
            next: then.map_or(program, PathBuf::as_path).to_owned(),
            folder: folder.to_owned(),
            process: None,
            doomed: false,
            policy: "laxity",
            mode: "enforce",
            window_kib: 64,
            rate: pace.rate,
            coordinator: None,
            log_is_full: false,
            limit: None,
            pace,
            memory_is_short: false,
            had_no_memory: false,
            group: None,
            run_delay: (None, 0),
            may_abort_until: Instant::now(),
        };
        daemon.configure()?;
        Ok(daemon)
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.folder.join("laxityd.sock")
    }

    fn answer_max(&self) -> Duration {
        self.pace.slow(ANSWER_MAX)
    }

    fn control(&self) -> PathBuf {
        self.folder.join("control.sock")
    }

    fn log(&self) -> PathBuf {
        self.folder.join("laxityd.log")
    }

    fn file(&self) -> PathBuf {
        self.folder.join("laxityd.toml")
    }

    fn text(&self) -> String {
        let nic = |name: &&str| {
            format!(
                "[[nic]]\nname = {name:?}\nrate = {:?}\nchunk = \"16KiB\"\nwindow = \
                 \"{}KiB\"\n",
                self.rate, self.window_kib
            )
        };
        let coordinator = self.coordinator.map_or_else(String::new, |address| {
            format!("[coordinator]\nendpoint = \"http://{address}\"\nhost = \"this\"\n")
        });
        format!(
            "socket = {:?}\ncontrol = {:?}\nmetrics = \"\"\nlog = \"warn\"\nmode = {:?}\n\
             policy = {:?}\n[access]\nanyone = true\n[scheduler]\nspin_us = 0\nlanes = 16\n\
             slots = 64\n{}{coordinator}",
            self.socket(),
            self.control(),
            self.mode,
            self.policy,
            self.pace.nics.iter().map(nic).collect::<String>()
        )
    }

    /// Writes the configuration. The window is a few chunks, so that flows wait.
    pub(super) fn configure(&self) -> Result<(), LabError> {
        fs::write(self.file(), self.text()).map_err(LabError::file("writing", &self.file()))
    }

    pub(super) fn break_configuration(&self, choice: u64) -> Result<(), LabError> {
        let text = self.text();
        let broken = match choice % 4 {
            0 => text[..text.len() / 2].to_owned() + "\n[[nic",
            1 => format!("{text}rate = 7\n"),
            2 => text.replace(self.rate, "fast"),
            _ => "\0".repeat(100),
        };
        fs::write(self.file(), broken).map_err(LabError::file("writing", &self.file()))
    }

    /// Starts the program without waiting for it.
    pub(super) fn launch(&mut self) -> Result<(), LabError> {
        let log = if self.log_is_full { PathBuf::from("/dev/full") } else { self.log() };
        self.log_is_full = false;
        self.limit = None;
        self.memory_is_short = false;
        self.group = None;
        let mut command = sandbox::internal("faults-daemon");
        command.arg(&self.program).arg("--config").arg(self.file());
        self.process = Some(Guarded::start("laxityd", &mut command, &log)?);
        self.doomed = false;
        std::mem::swap(&mut self.program, &mut self.next);
        Ok(())
    }

    pub(super) fn is_up(&self) -> bool {
        self.process.is_some() && !self.doomed
    }

    pub(super) fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Guarded::id)
    }

    pub(super) fn signal(&mut self, signal: Signal) {
        self.doomed |= matches!(signal, Signal::SIGKILL | Signal::SIGTERM);
        if let Some(process) = &mut self.process {
            process.signal(signal);
        }
    }

    /// Returns what is wrong if the daemon ended by itself, or not well after SIGTERM.
    pub(super) fn look(&mut self) -> Option<String> {
        let status = self.process.as_mut()?.ended()?;
        self.process = None;
        let killed = status.signal() == Some(Signal::SIGKILL as i32);
        let fine = self.may_abort() || (self.doomed && (killed || status.success()));
        (!fine).then(|| format!("laxityd ended by itself: {status}{}", tail(&self.log())))
    }

    /// Waits until a daemon that was told to end has ended. Returns what is wrong if it does not.
    pub(super) fn wait_end(&mut self) -> Option<String> {
        let within = self.answer_max();
        let ended = poll(within, Duration::from_millis(1), || match self.look() {
            None if self.process.is_some() => None,
            wrong => Some(wrong),
        });
        ended.unwrap_or_else(|| Some(format!("laxityd still runs {within:?} after SIGTERM")))
    }

    /// Connects to the control socket, which a daemon that just started does not have yet.
    pub(super) fn operator(&mut self) -> Result<ControlClient, String> {
        let start = Instant::now();
        loop {
            match ControlClient::connect(self.control(), self.answer_max()) {
                Ok(client) => return Ok(client),
                Err(error) if start.elapsed() > self.answer_max() => {
                    return Err(format!("no operator gets in: {error}{}", tail(&self.log())));
                }
                Err(_) => {}
            }
            if let Some(wrong) = self.look() {
                return Err(wrong);
            }
            // The daemon aborted for lack of memory just now.
            if self.process.is_none() {
                self.launch().map_err(|error| error.to_string())?;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub(super) fn ask<T>(
        &mut self,
        what: impl Fn(&mut ControlClient) -> Result<T, ControlError>,
    ) -> Result<T, String> {
        let give_up = Instant::now() + self.answer_max();
        loop {
            let mut operator = self.operator()?;
            match what(&mut operator) {
                Ok(answer) => return Ok(answer),
                // A daemon that ends for lack of memory says that it stops, and another is started.
                Err(_) if self.may_abort() && Instant::now() < give_up => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => {
                    let log = tail(&self.log());
                    return Err(format!("laxityd does not answer: {error}{log}"));
                }
            }
        }
    }

    /// Whether the daemon may end by itself. A program whose memory can't grow may abort, which is
    /// no worse than a SIGKILL.
    pub(super) fn may_abort(&self) -> bool {
        self.memory_is_short || Instant::now() < self.may_abort_until
    }

    pub(super) fn status(&mut self) -> Result<Status, String> {
        self.ask(ControlClient::status)
    }

    /// Takes all descriptors from the daemon that it does not use yet. Returns what is wrong.
    pub(super) fn limit_descriptors(&mut self) -> Option<String> {
        let (open, _) = self.size()?;
        let limits = fs::read_to_string(format!("/proc/{}/limits", self.pid()?)).ok()?;
        let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
        if self.limit.is_none() {
            self.limit = line.split_whitespace().next().map(str::to_owned);
        }
        self.prlimit(&format!("--nofile={}:", open + 1))
    }

    pub(super) fn give_descriptors(&mut self) {
        if let Some(limit) = self.limit.take() {
            // A daemon that has ended has no limit.
            let _ = self.prlimit(&format!("--nofile={limit}:"));
        }
    }

    /// Takes all memory from the daemon that it does not have yet. Returns what is wrong.
    pub(super) fn limit_memory(&mut self) -> Option<String> {
        let kib = status_number(self.pid()?, "VmSize")?;
        self.memory_is_short = true;
        self.had_no_memory = true;
        self.prlimit(&format!("--as={}:", kib << 10))
    }

    /// Puts the daemon into a control group that has hardly any memory.
    pub(super) fn limit_group(&mut self) -> Result<(), LabError> {
        if let Some(process) = self.pid() {
            self.memory_is_short = true;
            // The folder is that of the process. An earlier group has to be gone.
            self.group = None;
            self.group = Some(MemoryGroup::around(process)?);
        }
        Ok(())
    }

    pub(super) fn give_memory(&mut self) {
        if self.memory_is_short {
            self.group = None;
            // A daemon that has ended has no limit.
            let _ = self.prlimit("--as=unlimited:");
            self.memory_is_short = false;
            self.may_abort_until = Instant::now() + ABORTED_WITHIN_MAX;
            std::thread::sleep(ABORTED_WITHIN);
        }
    }

    fn prlimit(&self, limit: &str) -> Option<String> {
        let pid = self.pid()?.to_string();
        let mut command = Command::new("prlimit");
        let set = output("prlimit (util-linux)", command.args(["--pid", &pid, limit]), "");
        set.err().map(|error| error.to_string())
    }

    /// Returns how long the scheduler thread could run and had no processor, in nanoseconds.
    fn run_delay_ns(&self) -> Option<u64> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid()?)).ok()?;
        let is_scheduler =
            |task: &PathBuf| fs::read(task.join("comm")).is_ok_and(|comm| comm == b"scheduler\n");
        let task = tasks.flatten().map(|entry| entry.path()).find(is_scheduler)?;
        // Time on a processor, time in a run queue, and the number of times.
        let text = fs::read_to_string(task.join("schedstat")).ok()?;
        text.split_whitespace().nth(1)?.parse().ok()
    }

    /// Returns about when the scheduler thread had no processor since the last call.
    pub(super) fn had_no_processor(&mut self) -> Option<(u64, u64)> {
        let (pid, now, delay) = (self.pid(), now_ns(), self.run_delay_ns()?);
        let (before, earlier) = std::mem::replace(&mut self.run_delay, (pid, delay));
        let more = delay.saturating_sub(earlier);
        (before == pid && more > 0).then(|| (now.saturating_sub(more), now))
    }

    /// Waits until the daemon answers, and has found the coordinator if there is one.
    pub(super) fn await_coordinator(&mut self) -> Result<(), String> {
        let within = self.answer_max();
        let found = poll(within, Duration::from_millis(5), || match self.status() {
            Ok(status) if self.coordinator.is_some() && !is_connected(&status) => None,
            status => Some(status.map(drop)),
        });
        let late = || Err(format!("{within:?} after its start laxityd has no coordinator"));
        found.unwrap_or_else(late)
    }

    /// Returns the open descriptors and the resident memory in KiB.
    pub(super) fn size(&self) -> Option<(usize, u64)> {
        let pid = self.pid()?;
        Some((descriptors(pid)?, status_number(pid, "VmRSS")?))
    }

    /// Returns the line of a panic. A daemon without memory may panic, such as for a new thread.
    pub(super) fn panicked(&self) -> Option<String> {
        if self.had_no_memory {
            return None;
        }
        let text = fs::read(self.log()).ok()?;
        let text = String::from_utf8_lossy(&text);
        text.lines().find(|line| line.contains("panicked")).map(str::to_owned)
    }
}

fn is_connected(status: &Status) -> bool {
    status.cluster.as_ref().is_some_and(|cluster| cluster.connected)
}
