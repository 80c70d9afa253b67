//! Four client processes and one daemon that all sleep whenever they can, a thousand runs each.
//! Only the watchdog limits a sleep. A single lost wake-up on either side therefore fails the test
//! (in production it would cost a slice of 20 ms).
//!
//! The clients are this test binary, started again with `LAXITY_STRESS_SOCKET` set.

#![cfg(not(loom))]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use laxity_shm::consumer::Wake;
use laxity_shm::lane::LaneMemory;
use laxity_shm::layout::{Geometry, Mode, attention};
use laxity_shm::permit::SlotState;
use laxity_shm::producer::{Producer, SlotRef};
use laxity_shm::record::{Flow, Record};
use laxity_shm::region::Region;
use laxity_shm::registration::{self, Hello};
use laxity_shm::served::RegionConsumer;
use laxity_shm::sleep::{self, Awaited, now_ns};
use laxity_shm::sync::heavy_fence;

const CLIENTS: usize = 4;
const RUNS: u64 = 1000;
const FLOWS: u64 = 4;
/// Sleep after which a wake-up counts as lost, far beyond the delays of a busy machine.
const WATCHDOG: Duration = Duration::from_secs(20);
const SOCKET: &str = "LAXITY_STRESS_SOCKET";

/// A cheap generator of random delays. Each client has another seed.
struct Disorder(u64);

impl Disorder {
    fn below(&mut self, n: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }

    /// Pauses for up to a few microseconds, so that the two sides meet at every point.
    fn pause(&mut self) {
        for _ in 0..self.below(2000) {
            core::hint::spin_loop();
        }
    }
}

#[test]
fn no_wake_up_is_lost_in_a_thousand_runs_of_four_clients() {
    if std::env::var_os(SOCKET).is_some() {
        return;
    }
    if !sleep::register() {
        // Without membarrier, sleeps have a time limit instead (`sleep.rs`).
        return;
    }
    let dir = tempfile::tempdir().expect("temporary directory");
    let path = dir.path().join("s");
    let listener = registration::listen(&path).expect("listens");
    let mut children: Vec<Child> = (0..CLIENTS)
        .map(|_| {
            Command::new(std::env::current_exe().expect("own path"))
                .args(["--exact", "a_client_process_of_the_stress", "--nocapture"])
                .env(SOCKET, &path)
                .spawn()
                .expect("starts itself")
        })
        .collect();
    let mut clients = Vec::new();
    while clients.len() < CLIENTS {
        assert!(registration::wait_readable(listener.as_fd(), WATCHDOG), "clients come");
        let socket = registration::accept(listener.as_fd()).expect("accepts").expect("readable");
        assert!(registration::wait_readable(socket.as_fd(), WATCHDOG), "clients greet");
        registration::receive_hello(socket.as_fd()).expect("greets").expect("readable");
        let colour = clients.len() as u8;
        let served =
            RegionConsumer::new(Geometry { lanes: 1, slots: 16, colour }, false).expect("region");
        served.welcome(socket.as_fd()).expect("welcomed");
        clients.push((socket, served));
    }
    let total = serve(&mut clients);
    assert_eq!(total, CLIENTS as u64 * RUNS * FLOWS);
    for child in &mut children {
        assert!(child.wait().expect("child").success());
    }
}

/// Runs the daemon. It permits each flow in two chunks and sleeps at once when no record waits.
fn serve(clients: &mut Vec<(OwnedFd, RegionConsumer)>) -> u64 {
    let mut disorder = Disorder(now_ns());
    let mut flows = 0;
    let mut second: Vec<(usize, u16, SlotRef)> = Vec::new();
    while !clients.is_empty() {
        let mut work = 0;
        for (index, (_, served)) in clients.iter_mut().enumerate() {
            work += permit_first(index, served, &mut second, &mut flows);
        }
        for (index, lane, at) in second.drain(..) {
            disorder.pause();
            let consumer = clients[index].1.consumer(lane).expect("seen");
            if consumer.permit(at, 10, 2, true).expect("waits") == Wake::Needed {
                consumer.wake();
            }
        }
        if work > 0 {
            continue;
        }
        for (_, served) in clients.iter() {
            served.header().raise(attention::SLEEPING);
        }
        assert!(heavy_fence());
        for (index, (_, served)) in clients.iter_mut().enumerate() {
            work += permit_first(index, served, &mut second, &mut flows);
        }
        if work == 0 {
            let entry = |fd: i32| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            let mut fds: Vec<_> = clients
                .iter()
                .flat_map(|(socket, served)| [socket.as_raw_fd(), served.eventfd().as_raw_fd()])
                .map(entry)
                .collect();
            let limit = WATCHDOG.as_millis() as i32;
            // SAFETY: a valid array of that many entries.
            let n = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, limit) };
            assert!(n > 0, "the daemon was not woken");
            for (_, served) in clients.iter() {
                registration::drain(served.eventfd());
            }
            let mut gone = fds.iter().step_by(2).map(|fd| fd.revents != 0);
            clients.retain(|_| !gone.next().unwrap_or(false));
        }
        for (_, served) in clients.iter() {
            served.header().lower(attention::SLEEPING);
        }
    }
    flows
}

fn permit_first(
    index: usize,
    served: &mut RegionConsumer,
    second: &mut Vec<(usize, u16, SlotRef)>,
    flows: &mut u64,
) -> usize {
    served.sweep(16, |lane, consumer, incoming| {
        let incoming = incoming.expect("no garbage");
        if let Record::Submit(flow) = incoming.record {
            assert_eq!(flow.bytes, 10);
            *flows += 1;
            if consumer.permit(incoming.at, 4, 2, false).expect("waits") == Wake::Needed {
                consumer.wake();
            }
            second.push((index, lane, incoming.at));
        }
    })
}

#[test]
fn a_client_process_of_the_stress() {
    let Some(path) = std::env::var_os(SOCKET) else { return };
    assert!(sleep::register());
    let socket = registration::connect(path.as_ref()).expect("connects");
    registration::send_hello(socket.as_fd(), &Hello::new("stress", Mode::Enforce, false))
        .expect("greets");
    assert!(registration::wait_readable(socket.as_fd(), WATCHDOG));
    let welcome = registration::receive_reply(socket.as_fd()).expect("welcome").expect("readable");
    let region = Region::map(welcome.memfd, welcome.geometry).expect("maps");
    let mut producer = Producer::new(LaneMemory::mapped(&region, 0).expect("lane"));
    region.header().set_claimed(0, true);
    let mut disorder = Disorder(u64::from(std::process::id()));
    let mut turn = 0;
    for run in 0..RUNS {
        if run % 4 == 0 {
            until_the_daemon_sleeps(&region);
        }
        for _ in 0..FLOWS {
            let record = Record::Submit(Flow { bytes: 10, ..Flow::default() });
            let at = producer.publish_gated(&record).expect("room");
            let seen = region.header().after_publish();
            if seen != 0 && region.header().answer(0, seen) {
                registration::wake(welcome.eventfd.as_fd());
            }
            disorder.pause();
            await_all(&mut producer, at, &mut turn, &mut disorder);
        }
    }
}

/// Sleeps, without spinning first, until the last permit of the flow.
fn await_all(producer: &mut Producer, at: SlotRef, turn: &mut u64, disorder: &mut Disorder) {
    loop {
        let known = producer.word(at.slot);
        if matches!(producer.state(at), SlotState::Permit { last: true, .. }) {
            break;
        }
        *turn += 1;
        let waiter = &producer.memory().header().waiter;
        let what = if turn.is_multiple_of(2) { Awaited::Any } else { Awaited::Slot(at.slot) };
        let announced = waiter.announce(what, *turn);
        assert!(announced.ordered);
        if producer.word(at.slot) == known {
            disorder.pause();
            let began = Instant::now();
            waiter.sleep(announced, WATCHDOG);
            assert!(began.elapsed() < WATCHDOG, "a client was not woken");
        }
        waiter.awake();
    }
    producer.release(at);
}

fn until_the_daemon_sleeps(region: &Arc<Region>) {
    for _ in 0..50 {
        if region.header().attention() & attention::SLEEPING != 0 {
            return;
        }
        std::thread::yield_now();
    }
}
