//! The worker on the client library. It has one queue in order, as a queue pair is, and one whose
//! transfers overtake each other.
//!
//! A worker believes what the library says: it writes as many bytes as a permit names, and nothing
//! corrects them. So the oracle sees a permit that comes twice, or for too many bytes, or never.

use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use laxity_client::{Client, Direction, Flow, Lane, Options, Stage, Ticket};
use laxity_shm::sleep::now_ns;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::frame::{Frame, content};
use super::plant::Plant;
use super::task::{FORK, LOSE_THREAD, Outlet, Starved, Task, obey};
use crate::error::LabError;

pub(super) const NAME: &str = "worker";
pub(super) const QUEUES: u32 = 2;
/// Maximum number of lanes that a worker needs: those of its queues, and one for the threads that
/// end early.
pub(super) const LANES: u32 = QUEUES + 1;
/// Threads that end at one command, one after the other.
const LOST_AT_ONCE: u32 = 3;
const WIRE: Duration = Duration::from_millis(2);
/// Time between two leaks of a planted bug, and the size of one.
const LEAK_EVERY: Duration = Duration::from_millis(20);
const LEAK_BYTES: usize = 64 << 10;
/// Transfers of the queue without order that are open at once.
const DEPTH: usize = 6;

struct Sender {
    queue: u32,
    outlet: Outlet,
    starved: Starved,
    lane: Lane,
    rng: ChaCha8Rng,
    next: u64,
    stop: Arc<AtomicBool>,
    leaks_lanes: bool,
    full_rate: bool,
}

struct Open {
    number: u64,
    ticket: Ticket,
    sent: u64,
    begin_ns: u64,
    starved: u64,
}

impl Sender {
    fn submit(&mut self, in_order: bool) -> Open {
        let bytes = 8 * if self.rng.random() {
            self.rng.random_range(1..=1024)
        } else {
            self.rng.random_range(1024..=8192)
        };
        let number = self.next;
        self.next += 1;
        self.outlet.put(&[Frame::Submitted { queue: self.queue, number, bytes, in_order }]);
        let stage = match number % 4 {
            0 => Stage::P2d,
            1 => Stage::Collective,
            2 => Stage::KvReuse,
            _ => Stage::Background,
        };
        let ticket = self.lane.submit(&Flow {
            stage,
            direction: Direction::Egress,
            layer: (number % 8) as u16,
            bytes,
            batch: 1 + number / 8,
            request: 1 + number / 4,
            ..Flow::default()
        });
        Open { number, ticket, sent: 0, begin_ns: now_ns(), starved: self.starved.ns() }
    }

    /// Sleeps for the time that bytes take on a wire, unless the worker runs at the full rate.
    fn take_time(&self) {
        if !self.full_rate {
            std::thread::sleep(WIRE);
        }
    }

    fn send(&self, open: &mut Open, bytes: u64) -> Vec<Frame> {
        let (queue, number, offset) = (self.queue, open.number, open.sent);
        open.sent += bytes;
        self.starved.report(&self.outlet, queue, open.begin_ns, open.starved);
        let mut frames = Vec::new();
        if bytes > 0 {
            let payload = content(queue, number, offset, bytes);
            frames.push(Frame::Bytes { queue, number, offset, payload });
        }
        if open.ticket.is_done() {
            frames.push(Frame::Done { queue, number });
        }
        open.begin_ns = now_ns();
        open.starved = self.starved.ns();
        frames
    }

    fn in_order(mut self) {
        while !self.stop.load(Ordering::Relaxed) {
            let mut open = self.submit(true);
            while !open.ticket.is_done() {
                let permit = self.lane.wait(&mut open.ticket);
                let frames = self.send(&mut open, permit.bytes);
                self.outlet.put(&frames);
                self.take_time();
                self.lane.complete(&open.ticket, permit.bytes);
            }
        }
        self.end();
    }

    fn without_order(mut self) {
        let mut all: Vec<Open> = Vec::new();
        loop {
            let over = self.stop.load(Ordering::Relaxed);
            while !over && all.len() < DEPTH {
                let open = self.submit(false);
                all.push(open);
            }
            if all.is_empty() {
                return self.end();
            }
            let mut permits = Vec::new();
            for (index, open) in all.iter_mut().enumerate() {
                while let Some(permit) = self.lane.poll(&mut open.ticket) {
                    let frames = self.send(open, permit.bytes);
                    self.outlet.put(&frames);
                    permits.push((index, permit.bytes));
                }
            }
            if permits.is_empty() {
                self.lane.wait_any(Duration::from_millis(20));
                continue;
            }
            self.take_time();
            for (index, bytes) in permits {
                self.lane.complete(&all[index].ticket, bytes);
            }
            all.retain(|open| !open.ticket.is_done());
        }
    }

    /// Ends a thread whose lane has flows. The lane withdraws them.
    fn be_lost(mut self) {
        let all: Vec<Open> = (0..DEPTH).map(|_| self.submit(false)).collect();
        self.outlet.put(&[Frame::Abandoned { queue: self.queue }]);
        if self.leaks_lanes {
            Box::leak(Box::new(self.lane));
        } else {
            drop(self.lane);
        }
        drop(all);
    }

    fn end(self) {
        self.outlet.put(&[Frame::Ended { queue: self.queue, count: self.next }]);
    }
}

/// Sends on the client library until the driver ends it.
pub(super) fn run(task: &Task, outlet: &Outlet, stop: &Arc<AtomicBool>) -> Result<(), LabError> {
    let starved = Starved::watch();
    let client = Client::attach(Options {
        socket: task.socket.clone(),
        name: NAME.to_owned(),
        reattach_every: Duration::from_millis(20),
        ..Options::default()
    });
    let sender = |queue: u32| {
        let mut rng = ChaCha8Rng::seed_from_u64(task.seed);
        rng.set_stream(u64::from(queue));
        Sender {
            queue,
            outlet: outlet.clone(),
            starved: starved.clone(),
            lane: client.lane(),
            rng,
            next: 0,
            stop: Arc::clone(stop),
            leaks_lanes: task.leaks_lanes,
            full_rate: task.full_rate,
        }
    };
    if let Some(leak @ (Plant::LeakMemory | Plant::LeakDescriptor)) = task.leaks {
        std::thread::spawn(move || keep_leaking(leak));
    }
    let (first, second) = (sender(0), sender(1));
    let mut threads = vec![
        std::thread::spawn(move || first.in_order()),
        std::thread::spawn(move || second.without_order()),
    ];
    let mut queue = 1000;
    obey(stop, |command| match command {
        FORK => fork(),
        LOSE_THREAD => {
            for _ in 0..LOST_AT_ONCE {
                queue += 1;
                let lost = sender(queue);
                let lost = std::thread::spawn(move || lost.be_lost());
                // The next one finds the lane that this one gave back.
                while !lost.is_finished() {
                    std::thread::sleep(WIRE);
                }
                threads.push(lost);
            }
        }
        _ => {}
    });
    for thread in threads {
        if thread.join().is_err() {
            return Err(LabError::Inside("a thread of a worker panicked".to_owned()));
        }
    }
    let stats = client.stats();
    let (scheduled, bypassed) = (stats.scheduled_bytes, stats.bypassed_bytes);
    outlet.put(&[Frame::Counted { scheduled, bypassed }]);
    Ok(())
}

fn keep_leaking(leak: Plant) {
    loop {
        if leak == Plant::LeakMemory {
            Box::leak(vec![1_u8; LEAK_BYTES].into_boxed_slice());
        } else if let Ok(file) = std::fs::File::open("/dev/null") {
            Box::leak(Box::new(file));
        }
        std::thread::sleep(LEAK_EVERY);
    }
}

/// Forks beside threads that submit, and executes another program. A command that sets the group
/// can't use `posix_spawn`, which does not call the handlers of a fork.
fn fork() {
    let group = nix::unistd::getgid().as_raw();
    let child = Command::new("true").gid(group).stdin(Stdio::null()).stdout(Stdio::null()).spawn();
    if let Ok(mut child) = child {
        std::thread::spawn(move || child.wait());
    }
}
