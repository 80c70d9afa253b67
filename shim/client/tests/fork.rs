//! A forked child doesn't use its parent's attachment, and can have its own.

mod daemon;

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use daemon::{TestDaemon, eventually};
use laxity_client::{Client, Flow, Lane, Ticket};

fn flow(bytes: u64) -> Flow {
    Flow { bytes, ..Flow::default() }
}

/// Runs `body` in a child, which ends with its result. `body` must take no lock that another thread
/// may hold, except those of malloc, which glibc handles.
fn fork(body: impl FnOnce() -> i32) -> libc::pid_t {
    // SAFETY: upheld by the caller, and the child ends by _exit.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork");
    if pid == 0 {
        let code = body();
        // SAFETY: the call ends the child without the parent's destructors or exit handlers.
        unsafe { libc::_exit(code) };
    }
    pid
}

/// A child that does nothing, and is killed when dropped.
struct Sleeper(libc::pid_t);

impl Sleeper {
    fn fork() -> Self {
        Self(fork(|| {
            std::thread::sleep(Duration::from_secs(60));
            0
        }))
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        // SAFETY: the process is this one's child, which was not waited for yet.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, core::ptr::null_mut(), 0);
        }
    }
}

/// Returns the number of the check that fails in the child, or 0. A failed assertion would unwind
/// into the parent's test harness.
fn child(client: &Client, lane: &mut Lane, waiting: &mut Ticket) -> i32 {
    // The parent's flow becomes bypassed here, too, since the library can't know which process
    // sends it. An application that forks with transfers in flight knows.
    match lane.poll(waiting) {
        Some(permit) if permit.bypassed && permit.last => {}
        _ => return 1,
    }
    let mut ticket = lane.submit(&flow(5));
    if lane.poll(&mut ticket).is_none_or(|permit| permit.bytes != 5) {
        return 2;
    }
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let mut ticket = lane.submit(&flow(111));
        let mut bypassed = false;
        while !ticket.is_done() {
            bypassed |= lane.wait(&mut ticket).bypassed;
        }
        if !bypassed {
            break;
        }
        if Instant::now() > end {
            return 3;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    if !client.is_scheduled() {
        return 4;
    }
    0
}

#[test]
fn a_forked_child_leaves_its_parents_lanes_alone_and_attaches_for_itself() {
    let daemon = TestDaemon::holding();
    let client = Client::attach(daemon.options());
    let mut lane = client.lane();
    let mut ticket = lane.submit(&flow(10));
    let pid = fork(|| child(&client, &mut lane, &mut ticket));
    eventually("the child attaches under its own connection", || {
        daemon.knobs.clients.load(Ordering::SeqCst) == 2
    });
    assert_eq!(lane.poll(&mut ticket), None, "the parent still waits, as the daemon wants it");
    daemon.set(&daemon.knobs.hold, false);
    let permit = lane.wait(&mut ticket);
    assert_eq!((permit.bytes, permit.last, permit.bypassed), (10, true, false));
    assert_eq!(end_of(pid), Some(0));
    assert_eq!(daemon.knobs.garbage.load(Ordering::SeqCst), 0);
    assert!(client.is_scheduled());
    assert_eq!(client.stats().bypassed_bytes, 0, "what the child did is the child's");
}

#[test]
fn a_child_that_lives_on_does_not_keep_its_parents_attachment_alive() {
    let daemon = TestDaemon::start();
    let client = Client::attach(daemon.options());
    eventually("attached", || daemon.knobs.clients.load(Ordering::SeqCst) == 1);
    let child = Sleeper::fork();
    drop(client);
    eventually("the daemon sees the parent leave", || {
        daemon.knobs.clients.load(Ordering::SeqCst) == 0
    });
    drop(child);
}

#[test]
fn a_child_holds_no_socket_on_which_its_parent_waits_for_an_answer() {
    use laxity_shm::registration;
    use std::os::fd::AsFd;
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("laxityd.sock");
    let listener = registration::listen(&path).expect("listens");
    let client = Client::attach(laxity_client::Options {
        socket: path,
        attach_timeout: Duration::from_millis(10),
        ..laxity_client::Options::default()
    });
    let socket =
        registration::accept(listener.as_fd()).expect("accepts").expect("it has connected");
    let child = Sleeper::fork();
    drop(client);
    eventually("the daemon sees the parent leave", || registration::is_hung_up(socket.as_fd()));
    drop(child);
}

/// Waits for a child, and returns its exit code. Returns `None` if a signal ends it, or if it does
/// not end within 30 s.
fn end_of(child: libc::pid_t) -> Option<i32> {
    let end = Instant::now() + Duration::from_secs(30);
    let mut status = 0;
    // SAFETY: the process is this one's child, which was not waited for yet.
    while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
        if Instant::now() > end {
            // SAFETY: it still was not waited for.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, &raw mut status, 0);
            }
            return None;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status))
}

#[test]
fn a_child_does_not_wait_for_locks_that_threads_of_its_parent_held() {
    const FORKS: u32 = 300;
    let folder = tempfile::tempdir().expect("a folder");
    // Nobody listens, so each new lane takes all locks.
    let client = Client::attach(laxity_client::Options {
        socket: folder.path().join("laxityd.sock"),
        reattach_every: Duration::ZERO,
        ..laxity_client::Options::default()
    });
    let stop = AtomicBool::new(false);
    let hung = std::thread::scope(|threads| {
        for _ in 0..2 {
            threads.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    drop(client.lane());
                    client.stats();
                }
            });
        }
        let hung = (0..FORKS).find(|_| {
            // The locks of the library are what is tested.
            let pid = fork(|| {
                let mut lane = client.lane();
                let mut ticket = lane.submit(&flow(5));
                let permit = lane.wait(&mut ticket);
                drop(lane);
                let _ = (client.is_attached(), client.refusal(), client.stats());
                let _ = (client.dscp(1), client.nic("mlx5_0"));
                i32::from(permit.bytes != 5)
            });
            end_of(pid) != Some(0)
        });
        stop.store(true, Ordering::Relaxed);
        hung
    });
    assert_eq!(hung, None, "the child of this fork did not get through");
}

/// Checks in a child, which had no free descriptor at the fork, that its parent's client closes and
/// shuts down nothing of the child's. Returns the number of the check that fails, or 0.
fn uses_own_descriptors(client: &Client, lane: &mut Lane, limit: libc::rlimit) -> i32 {
    // SAFETY: the call reads a valid struct.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } != 0 {
        return 1;
    }
    let pairs: Vec<_> = (0..4).filter_map(|_| UnixStream::pair().ok()).collect();
    let mut ticket = lane.submit(&flow(5));
    if lane.wait(&mut ticket).bytes != 5 || client.stats().bypassed_bytes == 0 {
        return 2;
    }
    let works = |(one, other): &(UnixStream, UnixStream)| {
        let mut byte = [0];
        (&*one).write_all(&[7]).is_ok() && (&*other).read(&mut byte).is_ok() && byte == [7]
    };
    if pairs.len() == 4 && pairs.iter().all(works) { 0 } else { 3 }
}

#[test]
fn a_child_of_a_process_without_a_free_descriptor_loses_none_of_its_own() {
    let daemon = TestDaemon::start();
    let client = Client::attach(daemon.options());
    let mut lane = client.lane();
    let mut ticket = lane.submit(&flow(10));
    lane.wait(&mut ticket);
    let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes a valid struct.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut before) }, 0);
    // All numbers below the limit are in use then.
    let open = || File::open("/dev/null");
    let last = open().expect("a descriptor").as_raw_fd().max(64);
    let limit = libc::rlimit { rlim_cur: last as u64 + 1, ..before };
    // SAFETY: the call reads a valid struct.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    let taken: Vec<File> = std::iter::from_fn(|| open().ok()).collect();
    let code = end_of(fork(|| uses_own_descriptors(&client, &mut lane, before)));
    drop(taken);
    // SAFETY: the call reads a valid struct.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const before) }, 0);
    assert_eq!(code, Some(0));
}

#[test]
fn a_process_may_have_more_clients_than_anyone_counts() {
    const CLIENTS: u64 = 130;
    let daemon = TestDaemon::start();
    let clients: Vec<Client> = (0..CLIENTS).map(|_| Client::attach(daemon.options())).collect();
    eventually("every client attaches, and is guarded against fork", || {
        // Lanes attach, so the loop opens one.
        clients.iter().all(|client| {
            drop(client.lane());
            client.is_scheduled()
        })
    });
}
