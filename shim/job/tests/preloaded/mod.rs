//! Helpers for tests of preloaded libraries as files.

#![allow(dead_code, reason = "each test binary uses some of it")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the path of a library, which is next to the test's directory or in it.
pub(crate) fn library(name: &str) -> PathBuf {
    let own = std::env::current_exe().expect("own path");
    let deps = own.parent().expect("deps");
    [deps.join(name), deps.join("..").join(name)]
        .into_iter()
        .find(|path| path.exists())
        .unwrap_or_else(|| panic!("{name} is built with its tests"))
}

/// Returns the output of a program, which must succeed.
pub(crate) fn output(command: &mut Command) -> Output {
    let output = command.output().expect("the program starts");
    assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
    output
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns the symbols that a library exports.
pub(crate) fn exported(name: &str) -> BTreeSet<String> {
    let symbols = output(Command::new("nm").args(["-D", "--defined-only"]).arg(library(name)));
    let last = |line: &str| line.split_whitespace().last().map(str::to_owned);
    text(&symbols.stdout).lines().filter_map(last).collect()
}

/// Checks that a process which doesn't use a library's functions has no output, even with a missing
/// profile. None of the library's code may run.
pub(crate) fn a_process_does_not_notice(name: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let report = folder.path().join("report");
    let script = "ls /proc/self/task | wc -l; exec true";
    let alone = output(Command::new("sh").args(["-c", script]));
    let preloaded = output(
        Command::new("sh")
            .args(["-c", script])
            .env("LD_PRELOAD", library(name))
            .env("LAXITY_REPORT", &report)
            .env("LAXITY_PROFILE", "no-such-profile")
            .env("LAXITY_SOCKET", folder.path().join("none.sock")),
    );
    assert_eq!(text(&preloaded.stdout), text(&alone.stdout));
    assert_eq!(text(&preloaded.stderr), text(&alone.stderr));
    assert!(!report.exists());
}

/// A program with the library's settings, and a folder for its report and the log of a stand-in.
pub(crate) struct Job {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) command: Command,
}

/// A program that ended successfully, with its output.
pub(crate) struct Done {
    pub(crate) lines: Vec<String>,
    pub(crate) errors: String,
    pub(crate) log: String,
    pub(crate) report: String,
}

impl Job {
    /// Returns a program without the library and without a daemon.
    pub(crate) fn of(mut command: Command) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .env("STANDIN_LOG", folder.path().join("log"))
            .env("LAXITY_REPORT", folder.path().join("report"))
            .env("LAXITY_SOCKET", folder.path().join("nowhere.sock"))
            // A busy machine may answer slowly.
            .env("LAXITY_ATTACH_MS", "20000")
            .env("LAXITY_STALL_MS", "20000");
        Self { folder, command }
    }

    pub(crate) fn preloaded(mut self, name: &str) -> Self {
        self.command.env("LD_PRELOAD", library(name));
        self
    }

    /// Names the socket of a daemon.
    pub(crate) fn under(mut self, socket: &Path) -> Self {
        self.command.env("LAXITY_SOCKET", socket);
        self
    }

    fn file(&self, name: &str) -> String {
        fs::read_to_string(self.folder.path().join(name)).unwrap_or_default()
    }

    pub(crate) fn log(&self) -> String {
        self.file("log")
    }

    pub(crate) fn start(&mut self) -> Child {
        self.command.spawn().expect("the program starts")
    }

    pub(crate) fn end(self, mut child: Child) -> Done {
        let end = Instant::now() + PATIENCE;
        while child.try_wait().expect("wait").is_none() {
            if Instant::now() > end {
                let _ = child.kill();
                panic!("it hangs: {:?}: {}", self.command, self.log());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let output = child.wait_with_output().expect("its output");
        let errors = text(&output.stderr);
        assert!(output.status.success(), "{:?}: {errors}{}", self.command, self.log());
        let lines = text(&output.stdout).lines().map(str::to_owned).collect();
        Done { lines, errors, log: self.log(), report: self.file("report") }
    }

    pub(crate) fn run(mut self) -> Done {
        let child = self.start();
        self.end(child)
    }
}

impl Done {
    /// Returns a counter of the report.
    pub(crate) fn count(&self, name: &str) -> u64 {
        let key = format!("\"{name}\":");
        let at = self.report.find(&key).unwrap_or_else(|| panic!("{name} in {:?}", self.report));
        let digits = self.report[at + key.len()..].split([',', '}']).next();
        digits.and_then(|digits| digits.parse().ok()).expect("a number")
    }
}
