//! `laxity cluster load`, ended before its time, leaves nothing behind.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

fn coordinator() -> PathBuf {
    let laxity = Path::new(env!("CARGO_BIN_EXE_laxity-lab"));
    let beside = laxity.with_file_name("laxity-coordinator");
    assert!(
        beside.exists(),
        "{} is missing: run `cargo build --workspace --bins` first (make test does)",
        beside.display()
    );
    beside
}

struct Load {
    child: Child,
    /// What it says goes to files: a coordinator that outlived it would keep a pipe open.
    said: tempfile::TempDir,
    folder: tempfile::TempDir,
}

impl Load {
    fn start() -> Self {
        coordinator();
        let folder = tempfile::tempdir().expect("a folder");
        let said = tempfile::tempdir().expect("a folder");
        let file = |name| fs::File::create(said.path().join(name)).expect("a file");
        let child = Command::new(env!("CARGO_BIN_EXE_laxity-lab"))
            .args(["cluster-load", "--daemons", "4", "--batches", "20"])
            .args(["--duration", "60s"])
            .env("TMPDIR", folder.path())
            .stdin(Stdio::null())
            .stdout(file("out"))
            .stderr(file("err"))
            .spawn()
            .expect("laxity runs");
        Self { child, said, folder }
    }

    /// Its coordinator, once it has attended to daemons for a while.
    fn serving(&self) -> u32 {
        let children = format!("/proc/{0}/task/{0}/children", self.child.id());
        let pid = eventually("it starts a coordinator", || {
            let text = fs::read_to_string(&children).ok()?;
            text.split_whitespace().next()?.parse().ok()
        });
        // Daemons are connected as soon as the coordinator has a socket for each, and one that
        // listens.
        let sockets = || {
            let files = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
            let links = files.filter_map(|file| fs::read_link(file.path()).ok());
            let sockets = links.filter(|link| link.to_string_lossy().starts_with("socket:"));
            (sockets.count() >= 5).then_some(())
        };
        eventually("its daemons connect", sockets);
        std::thread::sleep(Duration::from_secs(2));
        pid
    }

    fn end(self) -> (Output, tempfile::TempDir) {
        let mut child = self.child;
        let status = eventually("it ends", || child.try_wait().expect("ours"));
        let read = |name| fs::read(self.said.path().join(name)).expect("written");
        let output = Output { status, stdout: read("out"), stderr: read("err") };
        (output, self.folder)
    }
}

fn kill(signal: &str, pid: u32) {
    let killed = Command::new("kill").args([format!("-{signal}"), pid.to_string()]).status();
    assert!(killed.expect("kill runs").success(), "{pid} is not there");
}

fn eventually<T>(what: &str, mut holds: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(value) = holds() {
            return value;
        }
        assert!(begun.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn is_gone(pid: u32) {
    eventually("the coordinator ends", || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
        // Whoever took it over may leave it a zombie.
        stat.map_or(true, |stat| stat.contains(") Z ")).then_some(())
    });
}

#[test]
fn a_load_that_is_killed_takes_its_coordinator_along_and_leaves_no_file() {
    let load = Load::start();
    let coordinator = load.serving();
    kill("KILL", load.child.id());
    let (_, folder) = load.end();
    is_gone(coordinator);
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
}

#[test]
fn a_coordinator_that_dies_is_the_cause() {
    let load = Load::start();
    kill("KILL", load.serving());
    let (output, _) = load.end();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("was killed by SIGKILL") && !said.contains("h2"), "{said}");
}
