//! `laxity cluster load`, ended before its time: by a signal, or because its coordinator died.
//! Nothing is left behind, and what was measured is shown.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

/// The coordinator that a load starts is the one beside `laxity`.
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
    /// Where temporary files go.
    folder: tempfile::TempDir,
}

impl Load {
    fn start(more: &[&str]) -> Self {
        coordinator();
        let folder = tempfile::tempdir().expect("a folder");
        let said = tempfile::tempdir().expect("a folder");
        let file = |name| fs::File::create(said.path().join(name)).expect("a file");
        let child = Command::new(env!("CARGO_BIN_EXE_laxity-lab"))
            .args(["cluster-load", "--daemons", "4", "--batches", "20"])
            .args(["--duration", "60s", "--json", "-"])
            .args(more)
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

    fn signal(&self, name: &str) {
        kill(name, self.child.id());
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

fn is_partial(output: &Output) {
    let figures: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(figures["complete"], false, "{figures}");
    assert_eq!(figures["daemons"], 4, "{figures}");
    assert!(figures["seconds"].as_f64().is_some_and(|it| it > 0.0), "{figures}");
    assert!(figures["answered"].as_u64().is_some_and(|it| it > 0), "{figures}");
}

#[test]
fn a_signal_ends_the_load_with_its_coordinator_its_files_and_the_figures_so_far() {
    for signal in ["INT", "TERM", "HUP"] {
        let load = Load::start(&["--tls"]);
        let coordinator = load.serving();
        load.signal(signal);
        let (output, folder) = load.end();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(&format!("SIG{signal} ended the load")), "{said}");
        is_partial(&output);
        is_gone(coordinator);
        let left = fs::read_dir(folder.path()).expect("a folder").count();
        assert_eq!(left, 0, "keys are left in {}", folder.path().display());
    }
}

#[test]
fn a_load_that_is_killed_takes_its_coordinator_along_and_leaves_no_key() {
    let load = Load::start(&["--tls"]);
    let coordinator = load.serving();
    load.signal("KILL");
    let (_, folder) = load.end();
    is_gone(coordinator);
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
}

#[test]
fn a_coordinator_that_dies_is_the_cause_and_the_figures_so_far_are_shown() {
    let load = Load::start(&[]);
    kill("KILL", load.serving());
    let (output, _) = load.end();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("was killed by SIGKILL") && !said.contains("h2"), "{said}");
    is_partial(&output);
}

#[test]
fn a_coordinator_of_others_that_dies_is_named_by_its_endpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("coordinator.toml");
    fs::write(&file, "").expect("written");
    let mut theirs = Command::new(coordinator())
        .args(["--listen", "127.0.0.1:0", "--config"])
        .arg(file)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("it runs");
    let mut line = String::new();
    let mut out = BufReader::new(theirs.stdout.take().expect("a pipe"));
    out.read_line(&mut line).expect("it says where");
    let address = line.trim().strip_prefix("listening on ").expect("where");
    let load = Load::start(&["--endpoint", &format!("http://{address}")]);
    std::thread::sleep(Duration::from_secs(3));
    theirs.kill().expect("ours");
    theirs.wait().expect("ours");
    let (output, _) = load.end();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains(&format!("the coordinator at http://{address}: ")), "{said}");
    assert!(!said.contains("transport error"), "{said}");
    let _ = out.read_to_string(&mut line);
}
