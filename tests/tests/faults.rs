//! Whatever breaks, the job's traffic goes out once, in order, soon (architecture §3, fail open).

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use laxity_shm::layout::Mode;
use laxity_shm::registration::{self, Hello};
use nix::sys::signal::Signal;

use crate::process::{Daemon, PATIENCE, eventually, wait_bounded};
use crate::sender::{self, Sink, TOTAL_BYTES};

/// A window far smaller than what a sender submits, so that flows wait.
const SMALL_WINDOW: &str =
    "[[nic]]\nname = \"test\"\nrate = \"1Gbit\"\nchunk = \"16KiB\"\nwindow = \"64KiB\"\n";

/// Time within which a client that lost its daemon must have sent everything. The bound itself is
/// a hangup or the 100 ms stall timeout; the rest is for a machine that is busy.
const BYPASS_WITHIN: Duration = Duration::from_secs(20);

fn waits(daemon: &Daemon) -> bool {
    daemon
        .status()
        .clients
        .iter()
        .any(|client| client.waiting_flows > 0)
}

#[test]
fn a_daemon_killed_with_work_pending_costs_no_byte_and_no_order() {
    let folder = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::start(folder.path(), SMALL_WINDOW);
    let path = folder.path().join("sink");
    let sink = Sink::listen(&path);
    let sender = sender::start("hold", &daemon.socket(), &path);
    eventually("flows wait for a window that never opens", || {
        waits(&daemon)
    });

    daemon.kill();
    let killed = Instant::now();
    let summary = sender::finish(sender);
    assert!(
        killed.elapsed() < BYPASS_WITHIN,
        "took {:?}",
        killed.elapsed()
    );
    assert_eq!(sink.bytes(), TOTAL_BYTES);
    assert_eq!(
        summary.scheduled_bytes + summary.bypassed_bytes,
        TOTAL_BYTES
    );
    assert!(
        summary.bypassed_bytes > 0 && summary.scheduled_bytes > 0,
        "{summary:?}"
    );
    assert!(summary.unscheduled_ns > 0);
}

#[test]
fn a_daemon_that_stops_answering_is_given_up_within_the_stall_timeout() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(folder.path(), SMALL_WINDOW);
    let path = folder.path().join("sink");
    let sink = Sink::listen(&path);
    let sender = sender::start("hold", &daemon.socket(), &path);
    eventually("flows wait for a window that never opens", || {
        waits(&daemon)
    });

    daemon.signal(Signal::SIGSTOP);
    let stopped = Instant::now();
    let summary = sender::finish(sender);
    assert!(
        stopped.elapsed() < BYPASS_WITHIN,
        "took {:?}",
        stopped.elapsed()
    );
    assert_eq!(sink.bytes(), TOTAL_BYTES);
    assert_eq!(
        summary.scheduled_bytes + summary.bypassed_bytes,
        TOTAL_BYTES
    );
    daemon.signal(Signal::SIGCONT);
    eventually("the daemon has forgotten the client that left it", || {
        daemon.status().clients.is_empty()
    });
}

#[test]
fn a_daemon_stopped_in_order_holds_nothing_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::start(folder.path(), SMALL_WINDOW);
    let path = folder.path().join("sink");
    let sink = Sink::listen(&path);
    let sender = sender::start("hold", &daemon.socket(), &path);
    eventually("flows wait for a window that never opens", || {
        waits(&daemon)
    });

    daemon.signal(Signal::SIGTERM);
    let status = daemon.wait();
    assert!(status.success(), "{status}: {}", daemon.log_text());
    sender::finish(sender);
    assert_eq!(sink.bytes(), TOTAL_BYTES);
    assert!(!daemon.socket().exists(), "the socket is left behind");
}

#[test]
fn bypass_lets_waiting_flows_go_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(folder.path(), SMALL_WINDOW);
    let path = folder.path().join("sink");
    let sink = Sink::listen(&path);
    let sender = sender::start("hold", &daemon.socket(), &path);
    eventually("flows wait for a window that never opens", || {
        waits(&daemon)
    });

    daemon.operator().bypass(true).unwrap();
    let summary = sender::finish(sender);
    assert_eq!(sink.bytes(), TOTAL_BYTES);
    assert!(summary.bypassed_bytes > 0);
    assert_eq!(summary.reattaches, 0, "a bypass is no loss of the daemon");
}

#[test]
fn with_completions_a_small_window_schedules_every_byte() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(folder.path(), SMALL_WINDOW);
    let path = folder.path().join("sink");
    let sink = Sink::listen(&path);
    let summary = sender::finish(sender::start("complete", &daemon.socket(), &path));
    assert_eq!(sink.bytes(), TOTAL_BYTES);
    assert_eq!(summary.scheduled_bytes, TOTAL_BYTES, "{summary:?}");
    eventually("the daemon's books are closed", || {
        let totals = daemon.status().totals;
        totals.permitted_bytes == TOTAL_BYTES && totals.attached_clients == 0
    });
}

#[test]
fn a_client_killed_at_any_point_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(folder.path(), SMALL_WINDOW);
    let descriptors = || {
        std::fs::read_dir(format!("/proc/{}/fd", daemon.pid()))
            .expect("fds")
            .count()
    };
    let before = descriptors();
    for round in 0..12_u64 {
        let path = folder.path().join(format!("sink{round}"));
        let listener = UnixListener::bind(&path).unwrap();
        let mut sender = sender::start("hold", &daemon.socket(), &path);
        let (mut stream, _) = listener.accept().unwrap();
        // From before its registration to the middle of its transfers.
        let mut taste = vec![0; (round as usize * 1000) + 1];
        if round > 1 {
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.read_exact(&mut taste).unwrap();
        }
        sender.kill().unwrap();
        sender.wait().unwrap();
        eventually("the dead client is forgotten", || {
            daemon.status().clients.is_empty()
        });
    }
    for port in &daemon.status().ports {
        assert_eq!(
            (port.waiting_flows, port.in_flight_bytes),
            (0, 0),
            "{port:?}"
        );
    }
    eventually("its descriptors are closed", || descriptors() <= before);
}

#[test]
fn a_client_finds_a_daemon_that_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::start(folder.path(), "");
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
    eventually("it is seen by the new daemon", || {
        daemon.status().clients.len() == 1
    });
    drop(stream);
    assert!(wait_bounded(sender).0.success());
}

#[test]
fn a_client_of_another_version_is_refused_and_the_daemon_stays() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(folder.path(), "");
    let socket = registration::connect(&daemon.socket()).unwrap();
    let mut hello = Hello::new("from the future", Mode::Enforce, false);
    hello.version += 1;
    registration::send_hello(socket.as_fd(), &hello).unwrap();
    assert!(registration::wait_readable(socket.as_fd(), PATIENCE));
    let refusal = registration::receive_reply(socket.as_fd())
        .unwrap_err()
        .to_string();
    assert!(refusal.contains("version"), "{refusal}");
    assert_eq!(daemon.status().totals.refusals, 1);
}

/// xorshift: the garbage must differ from run to run of the loop, not from run to run of the test.
fn next(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

#[test]
fn garbage_in_every_field_of_a_region_hurts_nobody_else() {
    let folder = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::start(folder.path(), SMALL_WINDOW);

    let vandal = registration::connect(&daemon.socket()).unwrap();
    registration::send_hello(vandal.as_fd(), &Hello::new("vandal", Mode::Enforce, false)).unwrap();
    assert!(registration::wait_readable(vandal.as_fd(), PATIENCE));
    let welcome = registration::receive_reply(vandal.as_fd())
        .unwrap()
        .expect("a region");
    let region = std::fs::File::from(welcome.memfd.try_clone().unwrap());
    let length = region.metadata().unwrap().len();
    assert!(
        region.set_len(length * 2).is_err() && region.set_len(0).is_err(),
        "not sealed"
    );

    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stopped = stop.clone();
    let scribbler = std::thread::spawn(move || {
        let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
        let mut writes = 0_u64;
        while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
            // Whole sweeps of random words, then single words with likely values, so that some
            // records pass the first checks and reach the deeper ones.
            if writes.is_multiple_of(64) {
                let noise: Vec<u8> = (0..length / 8)
                    .flat_map(|_| next(&mut seed).to_le_bytes())
                    .collect();
                region
                    .write_all_at(&noise, 0)
                    .expect("a region can be written");
            }
            let at = next(&mut seed) % (length / 8) * 8;
            let word = match next(&mut seed) % 4 {
                0 => 0,
                1 => u64::MAX,
                2 => (1 << 60) | (next(&mut seed) % 64),
                _ => next(&mut seed) % 256,
            };
            region
                .write_all_at(&word.to_le_bytes(), at)
                .expect("a region can be written");
            registration::ring(welcome.eventfd.as_fd());
            writes += 1;
        }
        writes
    });

    for round in 0..3 {
        let path = folder.path().join(format!("sink{round}"));
        let sink = Sink::listen(&path);
        let summary = sender::finish(sender::start("complete", &daemon.socket(), &path));
        assert_eq!(sink.bytes(), TOTAL_BYTES);
        assert_eq!(
            summary.scheduled_bytes, TOTAL_BYTES,
            "the honest client was not served"
        );
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    assert!(scribbler.join().unwrap() > 0);
    assert!(
        daemon.is_running(),
        "the daemon died:\n{}",
        daemon.log_text()
    );
    assert!(
        !daemon.log_text().contains("panicked"),
        "{}",
        daemon.log_text()
    );
    drop(vandal);
    eventually("the vandal is forgotten", || {
        daemon.status().clients.is_empty()
    });
    for port in &daemon.status().ports {
        assert_eq!(
            (port.waiting_flows, port.in_flight_bytes),
            (0, 0),
            "{port:?}"
        );
    }
}
