//! A minimal daemon for tests of the client. It implements the whole protocol of `laxity_shm`
//! (registration, permits in chunks, credit, sleep and wake, heartbeat, release) and has no policy.
//! Tests change its knobs while it runs.

#![allow(dead_code, reason = "each test binary uses some of it")]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use laxity_shm::consumer::{Incoming, Wake};
use laxity_shm::layout::{CREDIT_WHOLE, Geometry, attention};
use laxity_shm::marking::{Marking, Treatments};
use laxity_shm::producer::SlotRef;
use laxity_shm::record::{Flow, Record, Stage};
use laxity_shm::registration::{self, Reason};
use laxity_shm::served::RegionConsumer;
use laxity_shm::sleep::{self, now_ns};
use laxity_shm::sync::heavy_fence;

/// Settings that a test may change, and counters that it may read.
#[derive(Debug, Default)]
pub(crate) struct Knobs {
    /// Largest permit in bytes. By default, everything is permitted at once.
    pub(crate) chunk: AtomicU64,
    /// Whether gated flows get no permits.
    pub(crate) hold: AtomicBool,
    /// Whether the daemon does nothing, as if a signal had stopped it.
    pub(crate) stalled: AtomicBool,
    is_stalled: AtomicBool,
    /// Whether the daemon reads no records, but gives signs of life.
    pub(crate) deaf: AtomicBool,
    /// Credit of every lane for each port, in bytes. Spent credit is replaced.
    pub(crate) credit: AtomicU64,
    /// Whether flows in one piece may use credit whatever their stage.
    pub(crate) idle: AtomicBool,
    /// Whether clients were told so.
    pub(crate) is_idle: AtomicBool,
    /// Bits to raise in every attention word. The others are lowered.
    pub(crate) attention: AtomicU32,
    /// Whether the bypass is switched on and off all the time.
    pub(crate) flicker: AtomicBool,
    /// What clients do to classes. `None` makes this a daemon of a release without marking.
    pub(crate) marking: Mutex<Option<(Marking, Treatments)>>,
    /// Service levels of queue pairs by stage, where an operator named some.
    pub(crate) service_levels: Mutex<Option<[u8; Stage::ALL.len()]>>,
    /// The reason with which clients are refused.
    pub(crate) refuse: Mutex<Option<Reason>>,
    /// Number of rounds without work before the daemon sleeps.
    pub(crate) patience: AtomicU32,
    /// Number of times that the daemon slept.
    pub(crate) sleeps: AtomicU64,
    pub(crate) records: AtomicU64,
    pub(crate) submitted_bytes: AtomicU64,
    pub(crate) permitted_bytes: AtomicU64,
    pub(crate) completed_bytes: AtomicU64,
    pub(crate) garbage: AtomicU64,
    pub(crate) clients: AtomicU64,
    /// All records except flows, in order.
    pub(crate) heard: Mutex<Vec<Record>>,
    /// Flows in the order in which they were submitted, if the test sets it.
    pub(crate) flows: Mutex<Option<Vec<Flow>>>,
    geometry: Geometry,
    stop: AtomicBool,
    killed: AtomicBool,
    hands_over: AtomicBool,
}

pub(crate) struct TestDaemon {
    pub(crate) socket: PathBuf,
    pub(crate) knobs: Arc<Knobs>,
    listener: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    _dir: Option<tempfile::TempDir>,
}

struct Waiting {
    lane: u16,
    at: SlotRef,
    flow: Flow,
    permitted: u64,
}

struct Attached {
    socket: OwnedFd,
    served: RegionConsumer,
    waiting: Vec<Waiting>,
    bad: bool,
}

impl TestDaemon {
    pub(crate) fn start() -> Self {
        Self::with(Geometry::default())
    }

    /// Starts a daemon that holds flows back.
    pub(crate) fn holding() -> Self {
        let daemon = Self::start();
        daemon.set(&daemon.knobs.hold, true);
        daemon
    }

    pub(crate) fn with(geometry: Geometry) -> Self {
        let dir = tempfile::tempdir().expect("temporary directory");
        let mut daemon = Self::at(&dir.path().join("laxityd.sock"), geometry);
        daemon._dir = Some(dir);
        daemon
    }

    /// Starts a daemon at a path that stays after its end, so that another can take its place.
    pub(crate) fn at(socket: &Path, geometry: Geometry) -> Self {
        let listener = registration::listen(socket).expect("socket of the test daemon");
        Self::serving(socket, listener.into(), geometry)
    }

    /// Starts a daemon with the socket that another one has handed over.
    pub(crate) fn serving(socket: &Path, listener: Arc<OwnedFd>, geometry: Geometry) -> Self {
        let knobs = Arc::new(Knobs {
            chunk: AtomicU64::new(u64::MAX),
            patience: AtomicU32::new(100),
            geometry,
            ..Knobs::default()
        });
        let theirs = (Arc::clone(&knobs), Arc::clone(&listener));
        let thread = Some(std::thread::spawn(move || run(&theirs.0, &theirs.1)));
        Self { socket: socket.to_owned(), knobs, listener, thread, _dir: None }
    }

    pub(crate) fn options(&self) -> laxity_client::Options {
        laxity_client::Options {
            socket: self.socket.clone(),
            name: "test".into(),
            attach_timeout: Duration::from_secs(10),
            stall_timeout: Duration::from_secs(10),
            reattach_every: Duration::from_millis(5),
            ..laxity_client::Options::default()
        }
    }

    /// Makes the daemon stall, and returns once it does.
    pub(crate) fn stall(&self) {
        self.knobs.stalled.store(true, Ordering::SeqCst);
        eventually("the daemon stalls", || self.knobs.is_stalled.load(Ordering::SeqCst));
    }

    pub(crate) fn set(&self, knob: &AtomicBool, on: bool) {
        knob.store(on, Ordering::SeqCst);
    }

    /// Stops the daemon as SIGTERM would: clients are released.
    pub(crate) fn stop(mut self) {
        self.join();
    }

    /// Stops the daemon in an upgrade, and returns the socket for the next one.
    pub(crate) fn hand_over(&mut self) -> Arc<OwnedFd> {
        self.knobs.hands_over.store(true, Ordering::SeqCst);
        self.join();
        Arc::clone(&self.listener)
    }

    /// Ends the daemon as SIGKILL would: clients get no record.
    pub(crate) fn kill(mut self) {
        self.knobs.killed.store(true, Ordering::SeqCst);
        self.join();
        let _ = std::fs::remove_file(&self.socket);
    }

    fn join(&mut self) {
        self.knobs.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && !std::thread::panicking()
        {
            panic!("the test daemon panicked");
        }
    }
}

impl Drop for TestDaemon {
    fn drop(&mut self) {
        self.join();
    }
}

/// Waits, for a long time at most, until a condition holds.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < end, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn run(knobs: &Knobs, listener: &OwnedFd) {
    let mut greeting: Vec<OwnedFd> = Vec::new();
    let mut clients: Vec<Attached> = Vec::new();
    let mut idle = 0;
    let mut round = 0_u64;
    loop {
        if knobs.stop.load(Ordering::SeqCst) {
            if !knobs.killed.load(Ordering::SeqCst) {
                let heir = knobs.hands_over.load(Ordering::SeqCst);
                let heir = if heir { attention::HANDOVER } else { 0 };
                for client in &mut clients {
                    client.served.announce(attention::RELEASED | heir, 0);
                }
            }
            return;
        }
        let stalled = knobs.stalled.load(Ordering::SeqCst);
        knobs.is_stalled.store(stalled, Ordering::SeqCst);
        if stalled {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        round += 1;
        let mut work = 0;
        if round.is_multiple_of(64) || idle > 0 {
            work += register(knobs, listener, &mut greeting, &mut clients);
        }
        for client in &mut clients {
            work += serve(knobs, client, round);
        }
        clients.retain_mut(|client| {
            let gone = idle > 0 && registration::is_hung_up(client.socket.as_fd());
            // A program that lived shorter than a round may have left records in lanes not seen
            // yet.
            if gone && !client.bad {
                client.served.refresh();
                while serve(knobs, client, 1) > 0 {}
            }
            !(client.bad || gone)
        });
        knobs.clients.store(clients.len() as u64, Ordering::SeqCst);
        idle = if work > 0 { 0 } else { idle + 1 };
        if idle > knobs.patience.load(Ordering::Relaxed) {
            doze(knobs, listener, &mut clients);
            idle = 1;
        }
    }
}

fn register(
    knobs: &Knobs,
    listener: &OwnedFd,
    greeting: &mut Vec<OwnedFd>,
    clients: &mut Vec<Attached>,
) -> usize {
    if let Ok(Some(socket)) = registration::accept(listener.as_fd()) {
        greeting.push(socket);
    }
    let mut done = 0;
    greeting.retain(|socket| match registration::receive_hello(socket.as_fd()) {
        Ok(None) => true,
        Err(_) => {
            let _ = registration::send_reject(socket.as_fd(), Reason::Version);
            false
        }
        Ok(Some(hello)) => {
            done += 1;
            if let Some(reason) = *knobs.refuse.lock().expect("knob") {
                let _ = registration::send_reject(socket.as_fd(), reason);
                return false;
            }
            let colour = (clients.len() % 64) as u8;
            let geometry = Geometry { colour, ..knobs.geometry };
            let fenced = hello.flags & registration::HELLO_FENCED != 0;
            let served = RegionConsumer::new(geometry, fenced).expect("region");
            let header = served.header();
            header.set_credit_class(1 << 2, 2);
            header.set_dscp(&std::array::from_fn(|i| i as u8 + 10));
            header.set_dscp_of_stages([51, 52, 53, 54, 55]);
            if let Some((marking, treatments)) = &*knobs.marking.lock().expect("knob") {
                header.set_marking(*marking, treatments);
            }
            header.set_sl_of_stages(*knobs.service_levels.lock().expect("knob"));
            header.raise(hello.mode().expect("checked").attention());
            header.raise(knobs.attention.load(Ordering::SeqCst));
            header.set_daemon_cpu(sleep::current_cpu());
            header.beat(now_ns());
            if served.welcome(socket.as_fd()).is_ok() {
                let socket = socket.try_clone().expect("dup");
                clients.push(Attached { socket, served, waiting: Vec::new(), bad: false });
            }
            false
        }
    });
    done
}

fn serve(knobs: &Knobs, client: &mut Attached, round: u64) -> usize {
    let wanted = knobs.attention.load(Ordering::Relaxed);
    let managed = attention::BYPASS | attention::OBSERVE | attention::OFF;
    if client.served.header().attention() & managed != wanted && wanted != 0 {
        client.served.announce(wanted, 0);
    }
    if knobs.flicker.load(Ordering::Relaxed) {
        for _ in 0..1000 {
            client.served.header().raise(attention::BYPASS);
            client.served.header().lower(attention::BYPASS);
        }
    }
    if round.is_multiple_of(32) {
        client.served.header().set_daemon_cpu(sleep::current_cpu());
    }
    client.served.header().beat(now_ns());
    let idle = knobs.idle.load(Ordering::SeqCst);
    client.served.header().set_credit_stages(1 << 2 | if idle { CREDIT_WHOLE } else { 0 });
    knobs.is_idle.store(idle, Ordering::SeqCst);
    if knobs.deaf.load(Ordering::SeqCst) {
        return 0;
    }
    if round.is_multiple_of(16) {
        client.served.refresh();
    }
    let credit = knobs.credit.load(Ordering::Relaxed);
    let Attached { served, waiting, bad, .. } = client;
    let mut work = served.scan(32, |lane, _, incoming| {
        knobs.records.fetch_add(1, Ordering::Relaxed);
        let Ok(incoming) = incoming else {
            knobs.garbage.fetch_add(1, Ordering::SeqCst);
            *bad = true;
            return;
        };
        take(knobs, waiting, lane, &incoming);
    });
    if *bad {
        // The client was released, and notices the hang-up.
        return 1;
    }
    if credit > 0 {
        for (_, consumer) in served.consumers() {
            for port in 0..2 {
                let (_, spent) = consumer.credit(port);
                consumer.give_credit(port, spent + credit);
            }
        }
    }
    if !knobs.hold.load(Ordering::SeqCst) {
        work += waiting.len();
        permit(knobs, served, waiting);
    }
    work
}

fn take(knobs: &Knobs, waiting: &mut Vec<Waiting>, lane: u16, incoming: &Incoming) {
    let Incoming { at, record } = *incoming;
    let hear = || knobs.heard.lock().expect("heard").push(record);
    match record {
        Record::Submit(flow) | Record::SubmitOnCredit { flow, .. } => {
            if let Some(flows) = &mut *knobs.flows.lock().expect("flows") {
                flows.push(flow);
            }
            knobs.submitted_bytes.fetch_add(flow.bytes, Ordering::Relaxed);
            if matches!(record, Record::Submit(_)) {
                waiting.push(Waiting { lane, at, flow, permitted: 0 });
            }
        }
        Record::Completed { bytes, .. } => {
            knobs.completed_bytes.fetch_add(bytes, Ordering::SeqCst);
        }
        Record::Cancelled { tag, .. } => {
            waiting.retain(|flow| flow.lane != lane || flow.at.tag != tag);
            hear();
        }
        Record::LaneReset => {
            waiting.retain(|flow| flow.lane != lane);
            hear();
        }
        _ => hear(),
    }
}

/// Permits another chunk of each flow that waits.
fn permit(knobs: &Knobs, served: &mut RegionConsumer, waiting: &mut Vec<Waiting>) {
    let chunk = knobs.chunk.load(Ordering::Relaxed);
    waiting.retain_mut(|flow| {
        let more = chunk.min(flow.flow.bytes - flow.permitted);
        let permitted = flow.permitted + more;
        let last = permitted == flow.flow.bytes;
        let Some(consumer) = served.consumer(flow.lane) else { return false };
        let Ok(wake) = consumer.permit(flow.at, permitted, 3, last) else { return false };
        knobs.permitted_bytes.fetch_add(more, Ordering::Relaxed);
        flow.permitted = permitted;
        if wake == Wake::Needed {
            consumer.wake();
        }
        !last
    });
}

/// Does the daemon's part of the sleep protocol.
fn doze(knobs: &Knobs, listener: &OwnedFd, clients: &mut [Attached]) {
    for client in clients.iter() {
        client.served.header().raise(attention::SLEEPING);
    }
    let ordered = heavy_fence();
    let mut found = 0;
    if !knobs.deaf.load(Ordering::SeqCst) {
        for client in clients.iter_mut() {
            client.served.refresh();
            found += serve(knobs, client, 1);
        }
    }
    if found == 0 {
        knobs.sleeps.fetch_add(1, Ordering::Relaxed);
        let entry = |fd: i32| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut fds = vec![entry(listener.as_raw_fd())];
        fds.extend(clients.iter().map(|client| entry(client.served.eventfd().as_raw_fd())));
        let limit = if ordered { 20 } else { 1 };
        // SAFETY: the array has that many valid entries.
        unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, limit) };
        for client in clients.iter() {
            registration::drain(client.served.eventfd());
        }
    }
    for client in clients.iter() {
        client.served.header().lower(attention::SLEEPING);
    }
}

pub(crate) fn completed(daemon: &TestDaemon) -> u64 {
    daemon.knobs.completed_bytes.load(Ordering::SeqCst)
}

pub(crate) fn submitted(daemon: &TestDaemon) -> u64 {
    daemon.knobs.submitted_bytes.load(Ordering::SeqCst)
}
