//! A worker of a fault campaign on the client library. It has one queue in order, as a queue pair
//! is, and one whose transfers overtake each other.
//!
//! A worker believes what the library says: it writes as many bytes as a permit names, and nothing
//! corrects them. So the oracle sees a permit that comes twice, or for too many bytes, or never.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use laxity_client::{Client, Direction, Flow, Lane, Options, Stage, Ticket};
use laxity_shm::sleep::now_ns;
use nix::sys::signal::Signal;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::frame::{Frame, content};
use crate::error::LabError;

/// Time that bytes take on the wire.
const WIRE: Duration = Duration::from_millis(2);
/// Transfers of the queue without order that are open at once.
const DEPTH: usize = 6;
/// Time between two looks of the thread that notices when the process does not run.
const WATCH: Duration = Duration::from_millis(5);
/// Waits that are shorter are not reported.
const REPORTED_NS: u64 = 20_000_000;

/// Commands of the driver, one byte each. The end of the pipe ends the worker.
pub(super) const FINISH: u8 = b'e';

/// A bug on purpose, by which a test finds out whether the oracle sees anything. It happens once,
/// after the client has found a second daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Plant {
    /// A transfer completes twice.
    Twice,
    /// A transfer is lost.
    Drop,
    /// Two transfers change places.
    Swap,
    /// A client stays attached when the round is over.
    Leak,
}

/// What a worker is started with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Task {
    pub(super) socket: PathBuf,
    pub(super) seed: u64,
    pub(super) plant: Option<Plant>,
}

/// Writes frames to the driver. A thread that finds the pipe closed ends the process.
#[derive(Clone)]
pub(super) struct Outlet(Arc<Mutex<File>>);

impl Outlet {
    pub(super) fn stdout() -> Result<Self, LabError> {
        let stdout = std::io::stdout().as_fd().try_clone_to_owned();
        let stdout = stdout.map_err(LabError::system("sharing the pipe to the driver"))?;
        Ok(Self(Arc::new(Mutex::new(File::from(stdout)))))
    }

    pub(super) fn put(&self, frames: &[Frame]) {
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.put(&mut bytes));
        let mut pipe = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if pipe.write_all(&bytes).is_err() {
            std::process::exit(0);
        }
    }
}

/// Counts the time in which the process wanted to run and did not: it was stopped, or the machine
/// was busy.
#[derive(Clone, Default)]
pub(super) struct Starved(Arc<AtomicU64>);

impl Starved {
    pub(super) fn watch() -> Self {
        let own = Self::default();
        let total = Arc::clone(&own.0);
        std::thread::spawn(move || {
            let mut last = now_ns();
            loop {
                std::thread::sleep(WATCH);
                let now = now_ns();
                let late = (now - last).saturating_sub(WATCH.as_nanos() as u64 + 1_000_000);
                // Relaxed, since it is a statistic.
                total.fetch_add(late, Ordering::Relaxed);
                last = now;
            }
        });
        own
    }

    pub(super) fn ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Reports a wait that began at `begin_ns`, when [`Self::ns`] was `before`.
    pub(super) fn report(&self, outlet: &Outlet, queue: u32, begin_ns: u64, before: u64) {
        let end_ns = now_ns();
        if end_ns.saturating_sub(begin_ns) > REPORTED_NS {
            // The watching thread runs at least once after the wait.
            std::thread::sleep(2 * WATCH);
            let starved_ms = ((self.ns() - before) / 1_000_000).try_into().unwrap_or(u16::MAX);
            outlet.put(&[Frame::Waited { queue, begin_ns, end_ns, starved_ms }]);
        }
    }
}

/// One thread's queue.
struct Sender {
    queue: u32,
    outlet: Outlet,
    starved: Starved,
    client: Client,
    lane: Lane,
    rng: ChaCha8Rng,
    next: u64,
    stop: Arc<AtomicBool>,
    plant: Option<Plant>,
    /// Frames that a planted bug keeps back.
    kept: Vec<Frame>,
}

/// A transfer that is under way.
struct Open {
    number: u64,
    ticket: Ticket,
    sent: u64,
    begin_ns: u64,
    starved: u64,
}

impl Sender {
    /// Submits the next transfer.
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

    /// Sends the bytes that a permit names, and returns the frames of it.
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

    /// Puts the frames of a transfer, or what a planted bug makes of them.
    fn deliver(&mut self, mut frames: Vec<Frame>) {
        let armed = self.client.generation() > 1;
        let whole = matches!(frames.first(), Some(Frame::Bytes { offset: 0, .. }))
            && matches!(frames.last(), Some(Frame::Done { .. }));
        if let (Some(plant), true, true) = (self.plant, armed, whole) {
            match plant {
                Plant::Twice => frames.extend(frames.last().cloned()),
                Plant::Drop => frames.clear(),
                Plant::Swap if self.kept.is_empty() => std::mem::swap(&mut self.kept, &mut frames),
                Plant::Swap => frames.append(&mut self.kept),
                Plant::Leak => {}
            }
            if self.kept.is_empty() {
                self.plant = None;
            }
        }
        self.outlet.put(&frames);
    }

    fn in_order(mut self) {
        while !self.stop.load(Ordering::Relaxed) {
            let mut open = self.submit(true);
            while !open.ticket.is_done() {
                let permit = self.lane.wait(&mut open.ticket);
                let frames = self.send(&mut open, permit.bytes);
                self.deliver(frames);
                std::thread::sleep(WIRE);
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
            std::thread::sleep(WIRE);
            for (index, bytes) in permits {
                self.lane.complete(&all[index].ticket, bytes);
            }
            all.retain(|open| !open.ticket.is_done());
        }
    }

    fn end(self) {
        let mut frames = self.kept;
        frames.push(Frame::Ended { queue: self.queue, count: self.next });
        self.outlet.put(&frames);
    }
}

/// Runs a worker until the driver ends it.
pub(super) fn run(task: &str) -> Result<(), LabError> {
    // A driver that is killed takes its workers with it, even those that are stopped.
    let _ = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL);
    let task: Task = serde_json::from_str(task)?;
    let (outlet, starved) = (Outlet::stdout()?, Starved::watch());
    let client = Client::attach(Options {
        socket: task.socket.clone(),
        name: "worker".to_owned(),
        reattach_every: Duration::from_millis(20),
        ..Options::default()
    });
    let stop = Arc::new(AtomicBool::new(false));
    let sender = |queue: u32| {
        let mut rng = ChaCha8Rng::seed_from_u64(task.seed);
        rng.set_stream(u64::from(queue));
        Sender {
            queue,
            outlet: outlet.clone(),
            starved: starved.clone(),
            client: client.clone(),
            lane: client.lane(),
            rng,
            next: 0,
            stop: Arc::clone(&stop),
            plant: task.plant.filter(|_| queue == 0),
            kept: Vec::new(),
        }
    };
    let (first, second) = (sender(0), sender(1));
    let threads = [
        std::thread::spawn(move || first.in_order()),
        std::thread::spawn(move || second.without_order()),
    ];
    let mut command = [0];
    loop {
        match std::io::stdin().read(&mut command) {
            Ok(1) if command[0] == FINISH => break,
            Ok(1) => {}
            _ => std::process::exit(0),
        }
    }
    stop.store(true, Ordering::Relaxed);
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

/// Returns the command that starts a worker.
pub(super) fn command(task: &Task) -> Result<Command, LabError> {
    let mut command = crate::sandbox::internal("faults-worker");
    command.arg(serde_json::to_string(task)?);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    Ok(command)
}
