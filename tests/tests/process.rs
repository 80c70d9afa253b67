//! Starts the programs under test: finds the built binaries, runs a `laxityd` with its own sockets
//! in a temporary folder, and plays roles of this test binary in child processes.

use std::fs;
use std::io::{BufRead as _, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use laxity_wire::{ControlClient, Status};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// Longest wait before a test fails as a hang. It is generous, since the machine may be busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
const ROLE: &str = "LAXITY_TEST_ROLE";

pub(crate) fn binary(name: &str) -> PathBuf {
    let own = std::env::current_exe().expect("own path");
    let folder = own.parent().and_then(Path::parent).expect("target/<profile>/deps");
    let path = folder.join(name);
    assert!(
        path.exists(),
        "{} is missing: run `cargo build --workspace --bins` first (make test does)",
        path.display()
    );
    path
}

#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Said {
    #[track_caller]
    pub(crate) fn of(command: &mut Command) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        match command.output() {
            Ok(output) => Self {
                status: output.status,
                stdout: text(output.stdout),
                stderr: text(output.stderr),
            },
            Err(why) => panic!("{command:?} can't be started: {why}"),
        }
    }

    pub(crate) fn all(&self) -> String {
        format!("{}{}", self.stdout, self.stderr)
    }

    /// Returns this if the program succeeded, and panics otherwise.
    #[track_caller]
    pub(crate) fn good(self) -> Self {
        assert!(self.status.success(), "{}: {}", self.status, self.all());
        self
    }

    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|why| panic!("{why}: {}", self.all()))
    }
}

/// Splits a command line without quotes into words.
pub(crate) fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

#[track_caller]
pub(crate) fn laxity(arguments: &[&str]) -> Said {
    Said::of(Command::new(binary("laxity")).args(arguments))
}

/// Polls `condition` until it holds. Panics with `what` after [`PATIENCE`].
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "still not so after {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs a script in `folder`. Returns what it prints, or all that it said if it fails.
pub(crate) fn shell(script: &str, folder: &Path) -> Result<String, String> {
    let output = Said::of(Command::new("sh").args(["-ec", script]).current_dir(folder));
    if output.status.success() { Ok(output.stdout) } else { Err(output.all()) }
}

/// Installs packages without what they need into a folder. Returns the reason if that fails.
pub(crate) fn pip_install(packages: &[&str], folder: &Path) -> Result<(), String> {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]);
    let output = Said::of(pip.arg("--target").arg(folder).args(packages));
    if output.status.success() { Ok(()) } else { Err(output.all()) }
}

/// A process that is killed when dropped.
pub(crate) struct Killed(pub(crate) Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn signal(pid: u32, signal: Signal) {
    kill(Pid::from_raw(pid.cast_signed()), signal).expect("signal sent");
}

/// Starts a coordinator on a free port. Returns it with its address.
pub(crate) fn coordinator(folder: &Path, config: &str) -> (Killed, String) {
    let file = folder.join("coordinator.toml");
    fs::write(&file, format!("listen = \"127.0.0.1:0\"\n{config}")).expect("written");
    let mut child = Command::new(binary("laxity-coordinator"))
        .arg("--config")
        .arg(file)
        .stdout(Stdio::piped())
        .spawn()
        .expect("laxity-coordinator starts");
    let mut line = String::new();
    let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
    stdout.read_line(&mut line).expect("says where it listens");
    let address = line.trim().strip_prefix("listening on ").expect("an address");
    (Killed(child), address.to_owned())
}

/// A `laxityd` with its own folder, which is killed when dropped.
pub(crate) struct Daemon {
    folder: PathBuf,
    child: Option<Killed>,
}

impl Daemon {
    /// Starts a daemon in `folder` with `extra` lines of configuration, and waits until it answers.
    pub(crate) fn start(folder: &Path, extra: &str) -> Self {
        let mut daemon = Self::configured(folder, extra);
        daemon.launch();
        daemon
    }

    /// Does the same in a new folder.
    pub(crate) fn alone(extra: &str) -> (TempDir, Self) {
        let folder = tempfile::tempdir().expect("a folder");
        let daemon = Self::start(folder.path(), extra);
        (folder, daemon)
    }

    /// Writes the configuration of a daemon that is not started yet.
    pub(crate) fn configured(folder: &Path, extra: &str) -> Self {
        let daemon = Self { folder: folder.to_owned(), child: None };
        let (socket, control) = (daemon.socket(), daemon.control());
        let text = format!("socket = {socket:?}\ncontrol = {control:?}\nmetrics = \"\"\n{extra}\n");
        fs::write(daemon.config(), text).expect("config written");
        daemon
    }

    pub(crate) fn launch(&mut self) {
        self.launch_by(Command::new(binary("laxityd")).stdin(Stdio::null()).stdout(Stdio::null()));
    }

    /// Does the same by a command that runs the program with the arguments that follow.
    pub(crate) fn launch_by(&mut self, command: &mut Command) {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.log()).expect("log");
        let child =
            command.arg("--config").arg(self.config()).stderr(log).spawn().expect("laxityd starts");
        self.child = Some(Killed(child));
        eventually("laxityd answers on its control socket", || self.ask().is_some());
    }

    pub(crate) fn ask(&self) -> Option<Status> {
        ControlClient::connect(self.control(), Duration::from_secs(5)).ok()?.status().ok()
    }

    pub(crate) fn status(&self) -> Status {
        self.ask()
            .unwrap_or_else(|| panic!("laxityd gives no status; its log:\n{}", self.log_text()))
    }

    pub(crate) fn operator(&self) -> ControlClient {
        ControlClient::connect(self.control(), Duration::from_secs(10)).expect("control socket")
    }

    pub(crate) fn config(&self) -> PathBuf {
        self.folder.join("laxityd.toml")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.join("laxityd.sock")
    }

    pub(crate) fn control(&self) -> PathBuf {
        self.folder.join("control.sock")
    }

    fn log(&self) -> PathBuf {
        self.folder.join("laxityd.log")
    }

    pub(crate) fn log_text(&self) -> String {
        fs::read_to_string(self.log()).unwrap_or_default()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().expect("running").0.id()
    }

    pub(crate) fn signal(&self, what: Signal) {
        signal(self.pid(), what);
    }

    pub(crate) fn kill(&mut self) {
        self.child = None;
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        let status = wait_for(&mut self.child.as_mut().expect("running").0);
        self.child = None;
        status
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| matches!(child.0.try_wait(), Ok(None)))
    }
}

pub(crate) fn this_binary() -> Command {
    Command::new(std::env::current_exe().expect("own path"))
}

/// Runs the test `test` of this binary as a child that plays `role`. See [`role`].
pub(crate) fn child(test: &str, role: &str, environment: &[(&str, &str)]) -> Child {
    child_under(this_binary(), test, role, environment)
}

/// Does the same as [`child`] by a command that runs this binary with the arguments that follow.
pub(crate) fn child_under(
    mut command: Command,
    test: &str,
    role: &str,
    environment: &[(&str, &str)],
) -> Child {
    command
        .args(["--exact", test, "--nocapture"])
        .env(ROLE, role)
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("this binary starts again")
}

/// Returns the role for which this process was started, if any.
pub(crate) fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// Waits for `child` for at most [`PATIENCE`]. Returns its status and standard output.
pub(crate) fn wait_bounded(mut child: Child) -> (ExitStatus, String) {
    let stdout = child.stdout.take();
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        if let Some(mut stdout) = stdout {
            let _ = stdout.read_to_string(&mut text);
        }
        text
    });
    let mut child = Killed(child);
    (wait_for(&mut child.0), reader.join().expect("reader"))
}

fn wait_for(child: &mut Child) -> ExitStatus {
    let mut status = None;
    eventually("a child ends", || {
        status = child.try_wait().expect("wait");
        status.is_some()
    });
    status.expect("it ended")
}
