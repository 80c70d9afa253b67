//! Tests that a job's traffic goes out once, in order and soon, whatever fails (architecture §7).

use std::io::Read;
use std::os::unix::net::UnixListener;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use laxity_tests::{Need, skip};
use nix::sys::signal::Signal;
use tempfile::TempDir;

use crate::process::{Daemon, PATIENCE, eventually, this_binary, wait_bounded};
use crate::sender::{self, Sink, TOTAL_BYTES};

/// Configuration with a window far smaller than what a sender submits, so that flows wait.
pub(crate) const SMALL_WINDOW: &str =
    "[[nic]]\nname = \"test\"\nrate = \"1Gbit\"\nchunk = \"16KiB\"\nwindow = \"64KiB\"\n";

/// Longest time until a client that lost its daemon has sent everything. The client notices by a
/// hangup or by the stall timeout of 100 ms. The rest is for a busy machine.
const BYPASS_WITHIN: Duration = Duration::from_secs(20);

fn waits(daemon: &Daemon) -> bool {
    let clients = daemon.status().clients;
    clients.iter().any(|client| client.waiting_flows > 0)
}

/// A sender whose flows wait for a window that never opens.
struct Waiting {
    folder: TempDir,
    daemon: Daemon,
    sink: Sink,
    sender: Child,
}

impl Waiting {
    fn begin(command: Command) -> Self {
        let (folder, daemon) = Daemon::alone(SMALL_WINDOW);
        let path = folder.path().join("sink");
        let sink = Sink::listen(&path);
        let sender = sender::start_under(command, "hold", &daemon.socket(), &path);
        eventually("flows wait for a window that never opens", || waits(&daemon));
        Self { folder, daemon, sink, sender }
    }

    /// Waits until every byte has arrived, once and soon. Returns the sender's summary, and the
    /// daemon with its folder.
    fn finish(self) -> (sender::Summary, Daemon, TempDir) {
        let since = Instant::now();
        let summary = sender::finish(self.sender);
        let took = since.elapsed();
        assert!(took < BYPASS_WITHIN, "took {took:?}");
        assert_eq!(self.sink.bytes(), TOTAL_BYTES);
        let sent = summary.scheduled_bytes + summary.bypassed_bytes;
        assert_eq!(sent, TOTAL_BYTES, "{summary:?}");
        (summary, self.daemon, self.folder)
    }
}

#[test]
fn a_daemon_killed_with_work_pending_costs_no_byte_and_no_order() {
    let mut waiting = Waiting::begin(this_binary());
    waiting.daemon.kill();
    let (summary, ..) = waiting.finish();
    assert!(summary.bypassed_bytes > 0, "{summary:?}");
    assert!(summary.scheduled_bytes > 0, "{summary:?}");
    assert!(summary.unscheduled_ns > 0, "{summary:?}");
}

#[test]
fn a_daemon_that_stops_answering_is_given_up_and_every_byte_goes_out_once() {
    a_daemon_that_stops_is_given_up(this_binary());
}

/// Returns a command for this binary in a time namespace whose clock is `seconds` ahead, or the
/// reason why there is none.
fn in_another_time(seconds: i64) -> Result<Command, String> {
    let mut command = Command::new("unshare");
    if !nix::unistd::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command.args(["--time", &format!("--monotonic={seconds}")]);
    let mut probe = Command::new("unshare");
    let probed = probe.args(command.get_args()).arg("true").output();
    let probed = probed.map_err(|error| format!("unshare: {error}"))?;
    if !probed.status.success() {
        return Err(String::from_utf8_lossy(&probed.stderr).into_owned());
    }
    command.arg(std::env::current_exe().expect("own path"));
    Ok(command)
}

#[test]
fn a_client_whose_clock_is_behind_gives_a_hung_daemon_up_too() {
    // The offset exceeds BYPASS_WITHIN. A clock can't be set to before the boot.
    match in_another_time(-40) {
        Ok(command) => a_daemon_that_stops_is_given_up(command),
        Err(why) => skip(Need::Machine, format!("no time namespace: {why}")),
    }
}

#[test]
fn a_client_whose_clock_is_ahead_waits_for_a_daemon_that_lives() {
    let command = match in_another_time(1000) {
        Ok(command) => command,
        Err(why) => return skip(Need::Machine, format!("no time namespace: {why}")),
    };
    let waiting = Waiting::begin(command);
    // The sleep is several times the stall timeout.
    std::thread::sleep(Duration::from_millis(500));
    assert!(waits(&waiting.daemon), "it has given up a daemon that lives");
    waiting.daemon.operator().bypass(true).unwrap();
    waiting.finish();
}

/// Starts a client by `command`, and stops its daemon while the client waits.
fn a_daemon_that_stops_is_given_up(command: Command) {
    let waiting = Waiting::begin(command);
    waiting.daemon.signal(Signal::SIGSTOP);
    let (_, daemon, _folder) = waiting.finish();
    daemon.signal(Signal::SIGCONT);
    eventually("the daemon has forgotten the client that left it", || {
        daemon.status().clients.is_empty()
    });
}

#[test]
fn a_daemon_stopped_in_order_holds_nothing_back() {
    let mut waiting = Waiting::begin(this_binary());
    waiting.daemon.signal(Signal::SIGTERM);
    let status = waiting.daemon.wait();
    assert!(status.success(), "{status}: {}", waiting.daemon.log_text());
    let socket = waiting.daemon.socket();
    assert!(!socket.exists(), "the socket is left behind");
    waiting.finish();
}

#[test]
fn bypass_lets_waiting_flows_go_at_once() {
    let waiting = Waiting::begin(this_binary());
    waiting.daemon.operator().bypass(true).unwrap();
    let (summary, ..) = waiting.finish();
    assert!(summary.bypassed_bytes > 0);
    assert_eq!(summary.reattaches, 0, "a bypass is no loss of the daemon");
}

#[test]
fn with_completions_a_small_window_schedules_every_byte() {
    let (folder, daemon) = Daemon::alone(SMALL_WINDOW);
    sender::complete(&daemon, &folder.path().join("sink"));
    eventually("the daemon has accounted for all of it", || {
        let totals = daemon.status().totals;
        totals.permitted_bytes == TOTAL_BYTES && totals.attached_clients == 0
    });
}

fn assert_idle(daemon: &Daemon) {
    for port in &daemon.status().ports {
        let left = (port.waiting_flows, port.in_flight_bytes);
        assert_eq!(left, (0, 0), "{port:?}");
    }
}

#[test]
fn a_client_killed_at_any_point_leaves_nothing_behind() {
    let (folder, daemon) = Daemon::alone(SMALL_WINDOW);
    let descriptors =
        || std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).expect("fds").count();
    let before = descriptors();
    for round in 0..12_u64 {
        let path = folder.path().join(format!("sink{round}"));
        let listener = UnixListener::bind(&path).unwrap();
        let mut sender = sender::start("hold", &daemon.socket(), &path);
        let (mut stream, _) = listener.accept().unwrap();
        // The kill comes at points from before the registration to the middle of the transfers.
        let mut taste = vec![0; (round as usize * 1000) + 1];
        if round > 1 {
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.read_exact(&mut taste).unwrap();
        }
        sender.kill().unwrap();
        sender.wait().unwrap();
        eventually("the dead client is forgotten", || daemon.status().clients.is_empty());
    }
    assert_idle(&daemon);
    eventually("its descriptors are closed", || descriptors() <= before);
}

#[test]
fn a_client_finds_a_daemon_that_comes_back() {
    let (folder, mut daemon) = Daemon::alone("");
    let path = folder.path().join("sink");
    let listener = UnixListener::bind(&path).unwrap();
    let sender = sender::start("linger", &daemon.socket(), &path);
    let (mut stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut until = |scheduled: u8| {
        let start = Instant::now();
        let mut how = [2];
        while how[0] != scheduled {
            assert!(start.elapsed() < PATIENCE, "never became {scheduled}");
            stream.read_exact(&mut how).expect("flows keep going out");
        }
    };
    until(1);
    daemon.kill();
    until(0);
    daemon.launch();
    until(1);
    eventually("it is seen by the new daemon", || daemon.status().clients.len() == 1);
    drop(stream);
    assert!(wait_bounded(sender).0.success());
}

/// Kills a daemon whose client never waits for it, and starts another one.
fn a_client_that_never_waits_finds_the_next_daemon(config: &str, bypass: bool) {
    let (folder, mut daemon) = Daemon::alone(config);
    if bypass {
        daemon.operator().bypass(true).expect("done");
    }
    let path = folder.path().join("sink");
    let sink = Sink::listen(&path);
    let sender = sender::start("glide", &daemon.socket(), &path);
    eventually("it is attached", || daemon.status().clients.len() == 1);
    // The client is somewhere in the middle of its flows.
    std::thread::sleep(Duration::from_millis(50));
    daemon.kill();
    daemon.launch();
    eventually("it has a lane of the new daemon", || {
        daemon.status().clients.iter().any(|client| client.lanes > 0)
    });
    std::fs::write(path.with_extension("stop"), "").expect("written");
    let summary = sender::finish(sender);
    let sent = summary.scheduled_bytes + summary.bypassed_bytes + summary.observed_bytes;
    assert_eq!(sink.bytes(), sent, "{summary:?}");
    assert_eq!(summary.reattaches, 1, "{summary:?}");
    assert!(summary.unscheduled_ns > 0, "{summary:?}");
}

#[test]
fn a_bypassed_client_finds_a_daemon_that_comes_back() {
    a_client_that_never_waits_finds_the_next_daemon("", true);
}

#[test]
fn a_client_in_mode_off_finds_a_daemon_that_comes_back() {
    a_client_that_never_waits_finds_the_next_daemon("mode = \"off\"", false);
}

#[test]
fn an_observed_client_finds_a_daemon_that_comes_back() {
    a_client_that_never_waits_finds_the_next_daemon("mode = \"observe\"", false);
}

#[test]
fn a_client_on_credit_finds_a_daemon_that_comes_back() {
    a_client_that_never_waits_finds_the_next_daemon("", false);
}
