//! Tests of `laxity-coordinator` as a process: its signals.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use laxity_wire::v1::from_coordinator::Message;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::net::TcpStream;
use tonic::transport::Endpoint;

use crate::daemon::{Daemon, PATIENCE, hello, in_time};

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_laxity-coordinator");

/// A coordinator's process, which ends when this value is dropped.
pub(crate) struct Process {
    pub(crate) child: Child,
    pub(crate) address: String,
}

impl Process {
    pub(crate) fn start(config: &Path) -> Self {
        Self::start_in(None, config)
    }

    /// Starts it, in a network namespace if one is given.
    pub(crate) fn start_in(namespace: Option<&str>, config: &Path) -> Self {
        let command = match namespace {
            // `ip` executes the program in its place, so signals reach the program.
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace, PROGRAM]);
                command
            }
            None => Command::new(PROGRAM),
        };
        Self::by(command, config, Stdio::null())
    }

    /// Starts it by a command that executes it. `log` gets its standard error.
    pub(crate) fn by(mut command: Command, config: &Path, log: impl Into<Stdio>) -> Self {
        let mut child = command
            .arg("--config")
            .arg(config)
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .expect("built");
        let mut line = String::new();
        let out = child.stdout.take().expect("piped");
        BufReader::new(out).read_line(&mut line).expect("says where it listens");
        let address = line.trim().strip_prefix("listening on ").expect("an address");
        Self { address: address.to_owned(), child }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).expect("a process of this test");
    }

    pub(crate) async fn daemon(&self, host: &str) -> Option<Daemon> {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.address)).expect("a URL");
        let endpoint = endpoint.connect_timeout(PATIENCE);
        let channel = endpoint.connect().await.ok()?;
        Daemon::attend(channel, hello(host)).await.ok()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn a_hangup_rereads_the_configuration_and_a_bad_one_is_not_taken() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("coordinator.toml");
    let write = |heartbeat: &str| {
        let text =
            format!("listen = \"127.0.0.1:0\"\nlog = \"error\"\nheartbeat = \"{heartbeat}\"\n");
        fs::write(&path, text).expect("written");
    };
    write("500ms");
    let process = Process::start(&path);
    let mut nth = 0;
    let mut heartbeat_ns = async || {
        nth += 1;
        let mut daemon = process.daemon(&format!("h{nth}")).await.expect("let in");
        let welcome = |message: &Message| match message {
            Message::Welcome(welcome) => Some(welcome.heartbeat_ns),
            _ => None,
        };
        daemon.until(welcome).await
    };
    assert_eq!(heartbeat_ns().await, 500_000_000);
    write("700ms");
    process.signal(Signal::SIGHUP);
    let reread = async { while heartbeat_ns().await != 700_000_000 {} };
    in_time(reread, "it is reread").await;
    write("1ms");
    process.signal(Signal::SIGHUP);
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    assert_eq!(heartbeat_ns().await, 700_000_000);
}

#[tokio::test]
async fn a_taken_address_of_metrics_or_pages_stops_nothing_and_is_served_once_it_is_free() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("coordinator.toml");
    let taken = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a port"));
    let [metrics, web] = taken.each_ref().map(|one| one.local_addr().expect("bound"));
    let text = "listen = \"127.0.0.1:0\"\nlog = \"error\"";
    let text = format!("{text}\nmetrics = \"{metrics}\"\n[web]\nlisten = \"{web}\"\n");
    fs::write(&path, text).expect("written");
    let process = Process::start(&path);
    assert!(process.daemon("a").await.is_some());
    drop(taken);
    for address in [metrics, web] {
        let connected = async {
            while TcpStream::connect(address).await.is_err() {
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
        };
        in_time(connected, "its address is served").await;
    }
}

#[tokio::test]
async fn on_terminate_it_says_goodbye_and_ends_well() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("coordinator.toml");
    fs::write(&path, "listen = \"127.0.0.1:0\"\nlog = \"error\"\nheartbeat = \"10s\"\n")
        .expect("written");
    let mut process = Process::start(&path);
    let mut daemon = process.daemon("a").await.expect("let in");
    daemon.snapshot(Vec::new()).await;
    daemon.settled().await;
    process.signal(Signal::SIGTERM);
    daemon.goodbye().await;
    drop(daemon);
    let ended = async {
        loop {
            if let Some(status) = process.child.try_wait().expect("a child") {
                return status;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    let status = in_time(ended, "it ends").await;
    assert!(status.success(), "{status}");
}
