//! Starts the programs under test: finds the built binaries, runs a `laxityd` with its own sockets
//! in a temporary folder, and plays roles of this test binary in child processes.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use laxity_wire::ControlClient;

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

/// A `laxityd` with its own folder, which is killed when dropped.
pub(crate) struct Daemon {
    folder: PathBuf,
    child: Option<Child>,
}

impl Daemon {
    /// Starts a daemon in `folder` with `extra` lines of configuration, and waits until it answers.
    pub(crate) fn start(folder: &Path, extra: &str) -> Self {
        let mut daemon = Self::configured(folder, extra);
        daemon.launch();
        daemon
    }

    /// Writes the configuration of a daemon that is not started yet.
    pub(crate) fn configured(folder: &Path, extra: &str) -> Self {
        let daemon = Self { folder: folder.to_owned(), child: None };
        fs::write(daemon.config(), daemon.config_text(extra)).expect("config written");
        daemon
    }

    fn config_text(&self, extra: &str) -> String {
        format!(
            "socket = {:?}\ncontrol = {:?}\nmetrics = \"\"\n{extra}\n",
            self.socket(),
            self.control()
        )
    }

    pub(crate) fn launch(&mut self) {
        self.launch_by(Command::new(binary("laxityd")).stdin(Stdio::null()).stdout(Stdio::null()));
    }

    /// Does the same by a command that runs the program with the arguments that follow.
    pub(crate) fn launch_by(&mut self, command: &mut Command) {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.log()).expect("log");
        let child =
            command.arg("--config").arg(self.config()).stderr(log).spawn().expect("laxityd starts");
        self.child = Some(child);
        eventually("laxityd answers on its control socket", || self.ask().is_some());
    }

    pub(crate) fn ask(&self) -> Option<laxity_wire::Status> {
        ControlClient::connect(self.control(), Duration::from_secs(5)).ok()?.status().ok()
    }

    pub(crate) fn status(&self) -> laxity_wire::Status {
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
        self.child.as_ref().expect("running").id()
    }

    pub(crate) fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = nix::unistd::Pid::from_raw(self.pid().cast_signed());
        nix::sys::signal::kill(pid, signal).expect("signal sent");
    }

    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Waits until the daemon ends by itself.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let child = self.child.take().expect("running");
        wait_bounded(child).0
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Runs the test `test` of this binary as a child that plays `role`. See [`role`].
pub(crate) fn child(test: &str, role: &str, environment: &[(&str, &str)]) -> Child {
    child_under(Command::new(std::env::current_exe().expect("own path")), test, role, environment)
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
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("wait") {
            return (status, reader.join().expect("reader"));
        }
        if start.elapsed() > PATIENCE {
            let _ = child.kill();
            let _ = child.wait();
            panic!("a child did not end within {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
