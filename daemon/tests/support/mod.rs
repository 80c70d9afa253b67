//! A real laxityd in a temporary folder, and clients of it.

#![allow(dead_code, reason = "each test binary uses a part")]

pub(crate) mod host;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use laxity_client::{Client, Flow, Lane, Mode, Options, Permit, Stage, Ticket};
use laxity_shm::lane::LaneMemory;
use laxity_shm::layout::attention;
use laxity_shm::producer::Producer;
use laxity_shm::record::Record;
use laxity_shm::region::Region;
use laxity_shm::registration::{
    Hello, RegistrationError, Welcome, connect, receive_reply, send_hello, wait_readable, wake,
};
use laxity_tests::{Need, skip};
use laxity_wire::{ControlClient, Status};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Longest wait for expected events. It is long because test machines are busy.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// How a shell starts the program that its arguments name, in its place.
pub(crate) const EXEC: &str = "exec \"$0\" \"$@\"";

/// A configuration with one NIC and a small window (4 chunks of 64 KiB), so that flows wait.
pub(crate) const SMALL: &str = r#"
[[nic]]
name = "eth0"
rate = "1Gbit"
chunk = "64KiB"
window = "256KiB"
"#;

/// Makes a flow that has only a stage and a size.
pub(crate) fn flow(stage: Stage, bytes: u64) -> Flow {
    Flow { stage, bytes, ..Flow::default() }
}

/// Sends a flow to its end, as an application does. Returns the permits.
pub(crate) fn send(lane: &mut Lane, flow: &Flow) -> Vec<Permit> {
    let mut ticket = lane.submit(flow);
    let mut permits = Vec::new();
    while !ticket.is_done() {
        let permit = lane.wait(&mut ticket);
        lane.complete(&ticket, permit.bytes);
        permits.push(permit);
    }
    permits
}

/// Sends a flow to its end. Returns whether all of it was scheduled.
pub(crate) fn goes_scheduled(lane: &mut Lane, flow: &Flow) -> bool {
    send(lane, flow).iter().all(|permit| !permit.bypassed)
}

/// Takes permits of a flow for `bytes` bytes, and completes none. The rest of the flow waits.
pub(crate) fn take(lane: &mut Lane, ticket: &mut Ticket, bytes: u64) -> u64 {
    let mut taken = 0;
    while taken < bytes {
        taken += lane.wait(ticket).bytes;
    }
    taken
}

/// Sends the rest of a flow and returns its bytes. All of it must be scheduled.
pub(crate) fn finish(lane: &mut Lane, ticket: &mut Ticket) -> u64 {
    let mut bytes = 0;
    while !ticket.is_done() {
        let permit = lane.wait(ticket);
        assert!(!permit.bypassed && permit.level != 255, "{permit:?}");
        bytes += permit.bytes;
        lane.complete(ticket, permit.bytes);
    }
    bytes
}

/// A client that uses the protocol without the library.
pub(crate) struct ByHand {
    pub(crate) socket: OwnedFd,
    pub(crate) region: Arc<Region>,
    pub(crate) memfd: OwnedFd,
    eventfd: OwnedFd,
    producer: Producer,
}

impl ByHand {
    /// Attaches and claims a lane.
    pub(crate) fn attach(daemon: &Laxityd, name: &str) -> Self {
        let (socket, answer) = greet(daemon, &Hello::new(name, Mode::Enforce, false));
        let welcome = answer.unwrap();
        let memfd = welcome.memfd.try_clone().unwrap();
        let region = Region::map(welcome.memfd, welcome.geometry).unwrap();
        region.header().set_claimed(0, true);
        Self {
            socket,
            producer: Producer::new(LaneMemory::mapped(&region, 0).unwrap()),
            region,
            memfd,
            eventfd: welcome.eventfd,
        }
    }

    /// Publishes unchecked records and notifies the daemon.
    pub(crate) fn publish(&mut self, records: &[Record]) {
        for record in records {
            self.producer.publish_gated(record).unwrap();
        }
        wake(self.eventfd.as_fd());
    }

    pub(crate) fn is_released(&self) -> bool {
        self.region.header().attention() & attention::RELEASED != 0
    }
}

/// Sends a greeting and returns the daemon's answer.
pub(crate) fn greet(
    daemon: &Laxityd,
    hello: &Hello,
) -> (OwnedFd, Result<Welcome, RegistrationError>) {
    let socket = connect(&daemon.socket()).unwrap();
    send_hello(socket.as_fd(), hello).unwrap();
    (socket.try_clone().unwrap(), answer(socket.as_fd()))
}

/// Returns the daemon's answer on a connection.
pub(crate) fn answer(socket: BorrowedFd<'_>) -> Result<Welcome, RegistrationError> {
    assert!(wait_readable(socket, SOON));
    receive_reply(socket).map(Option::unwrap)
}

/// A running daemon, which is killed on drop.
pub(crate) struct Laxityd {
    pub(crate) folder: Arc<tempfile::TempDir>,
    pub(crate) child: Child,
    pub(crate) metrics: u16,
    log: Receiver<String>,
    pub(crate) seen: Vec<String>,
}

/// Returns the first result of `look`, or panics after [`SOON`].
pub(crate) fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + SOON;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Returns once `holds` returns true, or panics after [`SOON`].
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    eventually(what, || holds().then_some(()));
}

impl Laxityd {
    /// Starts a daemon with the given lines at the head of its configuration.
    pub(crate) fn start(lines: &str) -> Self {
        Self::start_by(lines, &[])
    }

    /// Starts a daemon with these lines. A `command` that is not empty gets the daemon's command
    /// line as further arguments and must execute it, such as a shell with [`EXEC`].
    pub(crate) fn start_by(lines: &str, command: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = format!(
            "socket = {:?}\ncontrol = {:?}\nmetrics = \"127.0.0.1:0\"\nlog = \"debug\"\n{lines}\n",
            folder.path().join("laxityd.sock"),
            folder.path().join("control.sock"),
        );
        std::fs::write(folder.path().join("laxityd.toml"), config).unwrap();
        Self::spawn(Arc::new(folder), command)
    }

    /// Starts another daemon in the same folder, once the first has ended.
    pub(crate) fn again(&self) -> Self {
        Self::spawn(Arc::clone(&self.folder), &[])
    }

    fn spawn(folder: Arc<tempfile::TempDir>, command: &[&str]) -> Self {
        let words = [command, &[env!("CARGO_BIN_EXE_laxityd")]].concat();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]);
        let mut child = command
            .arg("--config")
            .arg(folder.path().join("laxityd.toml"))
            .env_remove("NOTIFY_SOCKET")
            .env_remove("LAXITY_SOCKET")
            .env_remove("LAXITY_CONTROL")
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let (sender, log) = channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let mut daemon = Self { folder, child, metrics: 0, log, seen: Vec::new() };
        let ready = daemon.await_log("laxityd is ready");
        let (_, port) = ready.split_once("metrics=127.0.0.1:").unwrap();
        let digits = port.find(|c: char| !c.is_ascii_digit()).unwrap_or(port.len());
        daemon.metrics = port[..digits].parse().unwrap();
        daemon
    }

    /// Returns the first line of the log that contains `text`, and waits for it.
    pub(crate) fn await_log(&mut self, text: &str) -> String {
        if let Some(line) = self.seen.iter().find(|line| line.contains(text)) {
            return line.clone();
        }
        let end = Instant::now() + SOON;
        while let Ok(line) = self.log.recv_timeout(end.saturating_duration_since(Instant::now())) {
            self.seen.push(line.clone());
            if line.contains(text) {
                return line;
            }
        }
        panic!("`{text}` is not in the log: {:#?}", self.seen);
    }

    pub(crate) fn config_file(&self) -> PathBuf {
        self.folder.path().join("laxityd.toml")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("laxityd.sock")
    }

    pub(crate) fn control(&self) -> ControlClient {
        ControlClient::connect(self.folder.path().join("control.sock"), SOON).unwrap()
    }

    pub(crate) fn status(&self) -> Status {
        self.control().status().unwrap()
    }

    /// Attaches a client to this daemon. The client must be scheduled.
    pub(crate) fn client(&self, name: &str) -> Client {
        let client = self.attach(name);
        assert!(client.is_scheduled(), "`{name}` could not attach");
        client
    }

    /// Attaches a client with a lane.
    pub(crate) fn worker(&self, name: &str) -> (Client, Lane) {
        let client = self.client(name);
        let lane = client.lane();
        (client, lane)
    }

    /// Attaches a client to this daemon. The client may be unscheduled.
    pub(crate) fn attach(&self, name: &str) -> Client {
        Client::attach(Options {
            socket: self.socket(),
            name: name.to_owned(),
            stall_timeout: SOON,
            attach_timeout: SOON,
            ..Options::default()
        })
    }

    pub(crate) fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        nix::sys::signal::kill(pid, signal).unwrap();
    }

    /// Waits until the daemon has ended.
    pub(crate) fn end(&mut self) -> ExitStatus {
        eventually("the daemon's end", || self.child.try_wait().unwrap())
    }

    /// Scrapes the metrics once.
    pub(crate) fn scrape(&self) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.metrics)).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream
            .write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            .unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 200"), "{text}");
        text
    }

    /// Returns the sum of a metric over all its series whose labels contain `labels`.
    pub(crate) fn metric(&self, name: &str, labels: &str) -> f64 {
        self.scrape()
            .lines()
            .filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])))
            .filter(|line| line.contains(labels))
            .filter_map(|line| line.rsplit_once(' '))
            .map(|(_, value)| value.parse::<f64>().unwrap())
            .sum()
    }

    /// Returns the daemon's number of descriptors, and its number of mapped regions.
    pub(crate) fn holdings(&self) -> (usize, usize) {
        let proc = PathBuf::from(format!("/proc/{}", self.child.id()));
        let descriptors = std::fs::read_dir(proc.join("fd")).unwrap().count();
        let maps = std::fs::read_to_string(proc.join("maps")).unwrap();
        (descriptors, maps.lines().filter(|line| line.contains("laxity-region")).count())
    }
}

impl Drop for Laxityd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            self.seen.extend(self.log.try_iter());
            eprintln!("the daemon's log: {:#?}", self.seen);
        }
    }
}

/// The environment variable with the role of a test binary's child process.
pub(crate) const ROLE: &str = "LAXITY_TEST_ROLE";

/// The id of a user other than root and the user of the tests.
pub(crate) const STRANGER: u32 = 54_321;

/// A child process of this test binary that plays a role until it is dropped.
pub(crate) struct Role {
    child: Child,
    /// The line in which the process reported that it plays.
    pub(crate) says: String,
}

impl Role {
    /// Starts the test `play` in `role`. Returns once the process reports that it plays.
    pub(crate) fn start(play: &str, role: &str, environment: &[(&str, String)]) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", play, "--nocapture"])
            .env(ROLE, role)
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let says = lines.by_ref().map_while(Result::ok).find(|line| line.contains(PLAYS));
        // Further output of the process is dropped.
        std::thread::spawn(move || lines.count());
        match says {
            Some(says) => Self { child, says },
            None => panic!("the role `{role}` ended"),
        }
    }
}

/// The output of a role once it plays.
pub(crate) const PLAYS: &str = "the role is played";

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the role of this process, if any, and becomes user [`STRANGER`].
pub(crate) fn role() -> Option<String> {
    let role = std::env::var(ROLE).ok()?;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let user = nix::unistd::Uid::from_raw(STRANGER);
    nix::unistd::setresuid(user, user, user).unwrap();
    Some(role)
}

/// Reports whether this process can become another user. It prints a message if not.
pub(crate) fn is_root() -> bool {
    let is_root = nix::unistd::geteuid().is_root();
    if !is_root {
        skip(Need::Machine, "only root can become another user");
    }
    is_root
}
