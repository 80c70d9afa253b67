//! A rolling upgrade of eight hosts under load.
//!
//! The test plays the service manager: it keeps the listening sockets of each daemon and passes
//! them to the next one. `LAXITY_OLD_LAXITYD` names the daemon to upgrade from, else it is this
//! build's (`tests/upgrade.sh`). `LAXITY_OLD_RELEASES` says that this daemon does not hand over.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use laxity_client::{Client, Flow, Options, Stage, Stats};
use laxity_shm::layout::Mode;
use laxity_shm::registration::{self, Hello};
use nix::sys::signal::Signal;
use tempfile::TempDir;

use crate::faults::SMALL_WINDOW;
use crate::process::{Daemon, PATIENCE, binary, eventually};

const HOSTS: usize = 8;
/// Clients that come while no daemon runs: more than may greet one at the same time.
const QUEUED: usize = 100;
const FLOW_BYTES: u64 = 96 * 1024;
/// The time for which clients wait for the next daemon.
const HANDOVER: Duration = Duration::from_secs(1);
const PASS: &str = "export LISTEN_PID=$$ LISTEN_FDS=2\n\
    exec \"$0\" \"$@\" 3<&0 4<&1 </dev/null >/dev/null";

struct Host {
    daemon: Daemon,
    registration: OwnedFd,
    control: OwnedFd,
    _folder: TempDir,
}

impl Host {
    fn start(program: &Path) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let daemon = Daemon::configured(folder.path(), SMALL_WINDOW);
        let registration = registration::listen(&daemon.socket()).expect("a socket");
        let control = UnixListener::bind(daemon.control()).expect("a socket").into();
        let mut host = Self { daemon, registration, control, _folder: folder };
        host.launch(program);
        host
    }

    fn launch(&mut self, program: &Path) {
        let copy = |fd: &OwnedFd| fd.try_clone().expect("a descriptor");
        let mut command = Command::new("sh");
        command.args(["-c", PASS]).arg(program);
        command.stdin(copy(&self.registration)).stdout(copy(&self.control));
        self.daemon.launch_by(&mut command);
    }

    /// Replaces the daemon. Returns how long it took until the client had the next one.
    fn upgrade(&mut self, program: &Path) -> Duration {
        let start = Instant::now();
        self.daemon.signal(Signal::SIGTERM);
        assert!(self.daemon.wait().success(), "{}", self.daemon.log_text());
        self.launch(program);
        let is_attached = || self.daemon.status().clients.iter().any(|it| it.name == "load");
        eventually("the client has the next daemon", is_attached);
        start.elapsed()
    }
}

/// Sends until `stop`. Returns the client's counters. Without a passed socket, this client would
/// look for the next daemon after the test has failed.
fn load(socket: PathBuf, stop: &AtomicBool) -> Stats {
    let client = Client::attach(Options {
        socket,
        name: "load".into(),
        attach_timeout: PATIENCE,
        reattach_every: 4 * PATIENCE,
        stall_timeout: PATIENCE,
        ..Options::default()
    });
    assert!(client.is_scheduled(), "no daemon at the start");
    let mut lane = client.lane();
    let flow = Flow { stage: Stage::P2d, bytes: FLOW_BYTES, ..Flow::default() };
    let mut sent = 0;
    let start = Instant::now();
    while !stop.load(Ordering::Relaxed) && start.elapsed() < 3 * PATIENCE {
        let mut tickets: Vec<_> = (0..8).map(|_| (lane.submit(&flow), 0)).collect();
        while !tickets.is_empty() {
            let before = sent;
            for (ticket, bytes) in &mut tickets {
                if let Some(permit) = lane.poll(ticket) {
                    lane.complete(ticket, permit.bytes);
                    *bytes += permit.bytes;
                    sent += permit.bytes;
                    assert_eq!(permit.last, *bytes == FLOW_BYTES, "each byte once");
                }
            }
            tickets.retain(|(ticket, _)| !ticket.is_done());
            if sent == before {
                lane.wait_any(Duration::from_millis(20));
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let stats = client.stats();
    assert_eq!(stats.scheduled_bytes + stats.bypassed_bytes, sent, "{stats:?}");
    stats
}

#[test]
fn a_rolling_upgrade_loses_nothing_and_the_next_daemon_takes_over_each_client() {
    let new = binary("laxityd");
    let old = std::env::var_os("LAXITY_OLD_LAXITYD").map_or_else(|| new.clone(), PathBuf::from);
    let mut hosts: Vec<Host> = (0..HOSTS).map(|_| Host::start(&old)).collect();
    let stop = AtomicBool::new(false);
    let (mut took, stats) = std::thread::scope(|scope| {
        let clients: Vec<_> = hosts
            .iter()
            .map(|host| (host.daemon.socket(), &stop))
            .map(|(socket, stop)| scope.spawn(move || load(socket, stop)))
            .collect();
        let took: Vec<Duration> = hosts
            .iter_mut()
            .map(|host| {
                std::thread::sleep(Duration::from_millis(200));
                host.upgrade(&new)
            })
            .collect();
        std::thread::sleep(Duration::from_millis(200));
        stop.store(true, Ordering::Relaxed);
        let join = |client: std::thread::ScopedJoinHandle<'_, _>| client.join().expect("a client");
        let stats: Vec<Stats> = clients.into_iter().map(join).collect();
        (took, stats)
    });
    let upgrades: Vec<_> = took.iter().copied().zip(&stats).collect();
    took.sort_unstable();
    let sum = |of: fn(&Stats) -> u64| stats.iter().map(of).sum::<u64>();
    let (bypassed, scheduled) = (sum(|it| it.bypassed_bytes), sum(|it| it.scheduled_bytes));
    let share = bypassed as f64 / (bypassed + scheduled) as f64;
    println!(
        "{HOSTS} hosts upgraded: clients had the next daemon after {:?} (median), {:?} (longest); \
         {:.2} % of {} MiB went out unscheduled",
        took[HOSTS / 2],
        took[HOSTS - 1],
        100.0 * share,
        (bypassed + scheduled) >> 20,
    );
    assert!(stats.iter().all(|it| it.reattaches == 1), "{stats:?}");
    assert!(took[HOSTS / 2] < HANDOVER, "{took:?}");
    if std::env::var_os("LAXITY_OLD_RELEASES").is_none() {
        let in_time: Vec<_> = upgrades.iter().filter(|(took, _)| *took < HANDOVER).collect();
        println!("{} of {HOSTS} daemons were there before clients gave up", in_time.len());
        // A busy machine may take longer for one daemon than clients wait.
        assert!(in_time.len() + 1 >= HOSTS, "{took:?}");
        for it in in_time {
            assert_eq!(it.1.bypassed_bytes, 0, "unscheduled: {it:?}");
        }
    }
}

#[test]
fn clients_that_come_while_the_daemon_restarts_are_all_served_by_the_next_one() {
    let program = binary("laxityd");
    let mut host = Host::start(&program);
    host.daemon.signal(Signal::SIGTERM);
    assert!(host.daemon.wait().success(), "{}", host.daemon.log_text());
    let queued: Vec<OwnedFd> = (0..QUEUED)
        .map(|_| {
            let socket = registration::connect(&host.daemon.socket()).expect("the queue has room");
            let hello = Hello::new("queued", Mode::Enforce, true);
            registration::send_hello(socket.as_fd(), &hello).expect("sent");
            socket
        })
        .collect();
    host.launch(&program);
    for socket in &queued {
        assert!(registration::wait_readable(socket.as_fd(), PATIENCE));
        let answer = registration::receive_reply(socket.as_fd()).expect("admitted");
        assert!(answer.is_some(), "no answer");
    }
}

/// Starts a daemon that waits for the end of the one that serves in `folder`.
fn standby(folder: &Path) -> Daemon {
    let mut next = Daemon::configured(folder, SMALL_WINDOW);
    let waits = |daemon: &Daemon| daemon.log_text().matches("waiting for its end").count();
    let before = waits(&next);
    next.launch_by(Command::new(binary("laxityd")).arg("--standby"));
    eventually("it waits", || waits(&next) > before);
    next
}

/// Waits until a daemon other than the one with the process id `before` serves the client. Returns
/// how long that took, and its process id.
fn next_serves(daemon: &Daemon, before: Option<u32>) -> (Duration, u32) {
    let start = Instant::now();
    let mut pid = 0;
    eventually("the client has the next daemon", || {
        let status = daemon.ask().unwrap_or_default();
        pid = status.pid;
        Some(pid) != before && status.clients.iter().any(|client| client.name == "load")
    });
    (start.elapsed(), pid)
}

#[test]
fn daemons_in_standby_take_turns_with_each_client_where_nobody_keeps_the_sockets() {
    let (folder, mut first) = Daemon::alone(SMALL_WINDOW);
    let stop = AtomicBool::new(false);
    let (took, stats, mut last) = std::thread::scope(|scope| {
        let (socket, stop) = (first.socket(), &stop);
        let client = scope.spawn(move || load(socket, stop));
        next_serves(&first, None);
        let mut others = [standby(folder.path()), standby(folder.path())];
        assert_eq!(first.status().pid, first.pid(), "the first one serves");
        first.signal(Signal::SIGTERM);
        let (took, pid) = next_serves(&first, Some(first.pid()));
        assert!(first.wait().success(), "{}", first.log_text());
        others.sort_by_key(|other| other.pid() != pid);
        std::thread::sleep(Duration::from_millis(200));
        stop.store(true, Ordering::Relaxed);
        let stats = client.join().expect("a client");

        // A daemon that is killed passes nothing, and yet the next one serves.
        let [mut second, mut third] = others;
        second.kill();
        let serves = |daemon: &Daemon| daemon.ask().is_some_and(|it| it.pid == daemon.pid());
        eventually("the third one serves", || serves(&third));
        let fourth = standby(folder.path());
        third.signal(Signal::SIGTERM);
        assert!(third.wait().success());
        eventually("the fourth one serves", || serves(&fourth));
        (took, stats, fourth)
    });
    assert_eq!(stats.reattaches, 1, "{stats:?}");
    // A busy machine may take longer than clients wait.
    assert!(stats.bypassed_bytes == 0 || took > HANDOVER, "{took:?}: {stats:?}");
    last.signal(Signal::SIGTERM);
    assert!(last.wait().success());
    assert!(!last.socket().exists(), "nobody has the socket that was passed on");
    let log = last.log_text();
    assert!(log.lines().rev().any(|line| line.contains("handover=false")));
    assert!(
        !log.contains("refused a client"),
        "daemons that look who listens are no clients: {log}"
    );
}

#[test]
fn a_daemon_in_standby_ends_in_order_and_survives_a_broken_configuration() {
    let (folder, mut first) = Daemon::alone(SMALL_WINDOW);
    let mut second = standby(folder.path());
    second.signal(Signal::SIGHUP);
    second.signal(Signal::SIGTERM);
    assert!(second.wait().success(), "{}", second.log_text());
    let second = standby(folder.path());
    std::fs::write(second.config(), "socket = 7").expect("written");
    first.signal(Signal::SIGTERM);
    let serves = || second.ask().is_some_and(|status| status.pid == second.pid());
    eventually("the second one serves", serves);
    assert!(second.log_text().contains("as it was before the wait holds"), "{}", second.log_text());
    assert!(first.wait().success());
}
