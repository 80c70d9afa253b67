//! Programs that a job runs inside the guest, to their end or in the background. Their output is
//! captured and their time is limited.
//!
//! Each program has a process group of its own. Processes that a program left running are killed
//! when the program ends or is given up.

use std::io::Read;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::child::{lock, poll};

/// Longest wait for something that the guest does at once, such as the start of a program. On a
/// busy machine, Mooncake once was not ready after 30 s on the emulated processors.
pub(super) const PATIENCE: Duration = Duration::from_secs(180);
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Pause between looks that take processor time themselves, such as a question to the daemon.
pub(super) const LOOK_LATER: Duration = Duration::from_millis(50);
const DRAIN: Duration = Duration::from_secs(2);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestTask {
    pub argv: Vec<String>,
    pub env: Vec<(String, String)>,
    pub cwd: PathBuf,
    pub limit: Duration,
}

#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    #[error("cannot start `{0}`: {1}")]
    Start(String, #[source] std::io::Error),
    #[error("`{what}` did not say `{awaited}` within {waited_ms} ms; it said: {said}")]
    Silent {
        what: String,
        awaited: String,
        waited_ms: u64,
        /// Output of the program until then.
        said: String,
    },
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskReport {
    /// How the program ended, if that is known.
    pub status: Option<ExitStatus>,
    pub timed_out: bool,
    /// Standard output of the program. Bytes that are not UTF-8 are replaced.
    pub stdout: String,
    pub stderr: String,
}

impl TaskReport {
    pub fn succeeded(&self) -> bool {
        self.status.is_some_and(|status| status.success()) && !self.timed_out
    }
}

impl std::fmt::Display for TaskReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let how = match self.status {
            _ if self.timed_out => "was killed at its time limit".into(),
            Some(status) => format!("ended with {status}"),
            None => "ended".to_owned(),
        };
        let last = |text: &str| {
            let lines: Vec<&str> = text.trim_end().lines().collect();
            lines[lines.len().saturating_sub(12)..].join("\n")
        };
        write!(f, "{how} and said: {}\n{}", last(&self.stdout), last(&self.stderr))
    }
}

pub fn shell_code(status: ExitStatus) -> i32 {
    status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1)
}

/// The bytes that a stream delivered so far.
type SharedOutput = Arc<Mutex<Vec<u8>>>;

fn text(said: &SharedOutput) -> String {
    String::from_utf8_lossy(&lock(said)).into_owned()
}

fn listen(stream: Option<impl Read + Send + 'static>) -> (SharedOutput, JoinHandle<()>) {
    let said = SharedOutput::default();
    let heard = Arc::clone(&said);
    let listener = std::thread::spawn(move || {
        let Some(mut stream) = stream else { return };
        let mut buffer = [0; 16 << 10];
        while let Ok(length @ 1..) = stream.read(&mut buffer) {
            lock(&heard).extend_from_slice(&buffer[..length]);
        }
    });
    (said, listener)
}

/// A task in the background. Dropping this kills the task.
#[derive(Debug)]
pub struct Running {
    task: GuestTask,
    child: Child,
    started: Instant,
    stdout: SharedOutput,
    stderr: SharedOutput,
    listeners: Vec<JoinHandle<()>>,
}

impl GuestTask {
    pub fn start(self) -> Result<Running, TaskError> {
        let (program, args) = self.argv.split_first().ok_or_else(|| {
            let empty = std::io::Error::from(std::io::ErrorKind::InvalidInput);
            TaskError::Start(String::new(), empty)
        })?;
        let mut child = Command::new(program)
            .args(args)
            .env_clear()
            .envs(self.env.iter().cloned())
            .current_dir(&self.cwd)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|error| TaskError::Start(program.clone(), error))?;
        let (stdout, listener) = listen(child.stdout.take());
        let (stderr, another) = listen(child.stderr.take());
        Ok(Running {
            task: self,
            child,
            started: Instant::now(),
            stdout,
            stderr,
            listeners: vec![listener, another],
        })
    }
}

impl Running {
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    pub fn stdout(&self) -> String {
        text(&self.stdout)
    }

    pub fn stderr(&self) -> String {
        text(&self.stderr)
    }

    pub fn said(&self) -> String {
        self.stdout() + &self.stderr()
    }

    pub fn signal(&self, signal: Signal) {
        // The process group may have ended already.
        let _ = killpg(Pid::from_raw(self.child.id() as i32), signal);
    }

    /// Looks for something while the program runs. Returns `None` if the program ends before it
    /// is there, or if it takes too long.
    pub fn until<T>(&mut self, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        let found = poll(PATIENCE, LOOK_LATER, || match look() {
            None if self.is_running() => None,
            found => Some(found),
        });
        found.flatten()
    }

    pub fn wait_for(&mut self, awaited: &str, limit: Duration) -> Result<(), TaskError> {
        let began = Instant::now();
        let has_said = poll(limit, LOOK_EVERY, || {
            let is_over = !self.is_running() && self.is_drained();
            let has_said = self.stdout().contains(awaited) || self.stderr().contains(awaited);
            (is_over || has_said).then_some(has_said)
        });
        if has_said == Some(true) {
            return Ok(());
        }
        Err(TaskError::Silent {
            what: self.task.argv.join(" "),
            awaited: awaited.to_owned(),
            waited_ms: began.elapsed().as_millis() as u64,
            said: self.said(),
        })
    }

    fn is_drained(&self) -> bool {
        self.listeners.iter().all(JoinHandle::is_finished)
    }

    fn drain(&self) {
        poll(DRAIN, LOOK_EVERY, || self.is_drained().then_some(()));
    }

    pub fn wait(mut self) -> TaskReport {
        let left = self.task.limit.saturating_sub(self.started.elapsed());
        let ended = poll(left, LOOK_EVERY, || (!self.is_running()).then_some(()));
        self.end(ended.is_none())
    }

    pub fn kill(mut self) -> TaskReport {
        self.end(false)
    }

    fn end(&mut self, timed_out: bool) -> TaskReport {
        // The kill also ends processes that the program left, which may hold its streams open.
        if !self.is_running() {
            self.drain();
        }
        self.signal(Signal::SIGKILL);
        let status = self.child.wait().ok();
        self.drain();
        TaskReport { status, timed_out, stdout: self.stdout(), stderr: self.stderr() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.is_running() {
            self.signal(Signal::SIGKILL);
            let _ = self.child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str, limit: Duration) -> Running {
        let task = GuestTask {
            argv: ["sh", "-c", script].map(str::to_owned).into(),
            env: std::env::vars().filter(|(name, _)| name == "PATH").collect(),
            cwd: "/".into(),
            limit,
        };
        task.start().expect("starts")
    }

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn what_a_task_says_and_how_it_ends_is_reported() {
        let report = sh("echo out; echo err >&2; exit 3", LONG).wait();
        assert_eq!((&*report.stdout, &*report.stderr), ("out\n", "err\n"));
        assert!(report.to_string().starts_with("ended with exit status: 3"), "{report}");
        assert!(!report.succeeded() && !report.timed_out);
        let report = sh("kill -9 $$", LONG).wait();
        assert_eq!(report.status.and_then(|status| status.signal()), Some(9));
    }

    #[test]
    fn a_task_is_killed_with_all_it_started_when_its_time_is_up() {
        let mut task = sh("sleep 60 & echo $!; sleep 60", Duration::from_millis(300));
        task.wait_for("\n", LONG).expect("a process id");
        let left: u32 = task.stdout().trim().parse().expect("a process id");
        let report = task.wait();
        assert!(report.timed_out && report.to_string().starts_with("was killed"), "{report}");
        // The kernel closes the streams of a killed process, for which `wait` waits, before it
        // shows the process as dead.
        let is_dead = || {
            let state = std::fs::read_to_string(format!("/proc/{left}/stat")).unwrap_or_default();
            let is_dead = state.is_empty() || state.contains(") Z") || state.contains(") X");
            is_dead.then_some(())
        };
        poll(LONG, LOOK_EVERY, is_dead).expect("it is dead");
    }

    #[test]
    fn a_text_that_never_comes_is_an_error_with_what_came_instead() {
        let mut task = sh("echo something else", LONG);
        let error = task.wait_for("ready", LONG).expect_err("it ended");
        assert!(error.to_string().contains("something else"), "{error}");
    }
}
