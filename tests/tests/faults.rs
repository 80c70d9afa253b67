//! Tests that a job's traffic goes out once, in order and soon, whatever fails (architecture §7).

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use laxity_shm::layout::{LaneHeader, Mode};
use laxity_shm::permit::published;
use laxity_shm::region::Region;
use laxity_shm::registration::{self, Hello};
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

/// A xorshift generator: the garbage differs between rounds but not between runs of the test.
fn next(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

/// Attaches once as a client that writes garbage: noise everywhere, and records that look
/// published, with invalid descriptors.
fn vandalise(daemon_socket: &Path, seed: &mut u64) {
    let socket = registration::connect(daemon_socket).expect("the daemon listens");
    let hello = Hello::new("vandal", Mode::Enforce, false);
    registration::send_hello(socket.as_fd(), &hello).expect("it takes the greeting");
    assert!(registration::wait_readable(socket.as_fd(), PATIENCE));
    let welcome =
        registration::receive_reply(socket.as_fd()).expect("a welcome").expect("a region");
    let file = std::fs::File::from(welcome.memfd.try_clone().expect("a descriptor"));
    let length = file.metadata().expect("a size").len();
    assert!(file.set_len(length * 2).is_err() && file.set_len(0).is_err(), "not sealed");
    let geometry = welcome.geometry;
    let region = Region::map(welcome.memfd, geometry).expect("it can be mapped");
    let write = |at: u64, word: u64| {
        file.write_all_at(&word.to_le_bytes(), at).expect("a region can be written");
    };
    if next(seed).is_multiple_of(4) {
        let noise: Vec<u8> = (0..length / 8).flat_map(|_| next(seed).to_le_bytes()).collect();
        file.write_all_at(&noise, 0).expect("it can be written");
    }
    for lane in 0..4 {
        region.header().set_claimed(lane, true);
        let slots = (geometry.lane_offset(lane) + size_of::<LaneHeader>()) as u64;
        // The first record of a lane is in its first slot. The next ones go to random low slots.
        for (slot, seq) in [(0, 1), (next(seed) % 8, 2), (next(seed) % 8, 3)] {
            let at = slots + slot * 64;
            for word in 0..7 {
                // Small numbers pass the first checks and reach the later ones.
                let value = match next(seed) % 3 {
                    0 => next(seed),
                    1 => next(seed) % 32,
                    _ => (next(seed) % 32) | ((next(seed) % 8) << 16),
                };
                write(at + word * 8, value);
            }
            write(at + 56, published(seq));
        }
    }
    // Write likely values at random places while the daemon reads.
    for _ in 0..64 {
        let at = next(seed) % (length / 8) * 8;
        let word = match next(seed) % 4 {
            0 => 0,
            1 => u64::MAX,
            2 => published(next(seed) % 64),
            _ => next(seed) % 256,
        };
        write(at, word);
        registration::wake(welcome.eventfd.as_fd());
    }
}

#[test]
fn garbage_in_every_field_of_a_region_hurts_nobody_else() {
    let folder = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::start(folder.path(), SMALL_WINDOW);
    let stop = Arc::new(AtomicBool::new(false));
    let (stopped, socket) = (Arc::clone(&stop), daemon.socket());
    let scribbler = std::thread::spawn(move || {
        let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
        let mut attachments = 0_u64;
        while !stopped.load(Ordering::Relaxed) {
            vandalise(&socket, &mut seed);
            attachments += 1;
        }
        attachments
    });

    for round in 0..3 {
        sender::complete(&daemon, &folder.path().join(format!("sink{round}")));
    }
    eventually("the daemon has read garbage many times", || {
        daemon.status().totals.garbage_records > 20
    });
    stop.store(true, Ordering::Relaxed);
    assert!(scribbler.join().unwrap() > 0);
    let log = daemon.log_text();
    assert!(daemon.is_running(), "the daemon died:\n{log}");
    assert!(!log.contains("panicked"), "{log}");
    eventually("the vandal is forgotten", || daemon.status().clients.is_empty());
    assert_idle(&daemon);
}
