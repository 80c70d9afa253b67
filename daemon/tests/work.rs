//! Hints that make the scheduler visit very many flows, beside clients of another user. The
//! scheduler runs here with a clock that the test moves, so only the order of its work counts.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use laxity_daemon::clients::ClientId;
use laxity_daemon::config::Config;
use laxity_daemon::driver::{Driver, NextStep, SchedulerClock};
use laxity_daemon::mailbox::{Inbox, Mailbox, SchedulerCommand, SnapshotSlot, mailbox};
use laxity_daemon::registration::newcomer;
use laxity_policy::Time;

use laxity_shm::lane::LaneMemory;
use laxity_shm::layout::Mode;
use laxity_shm::permit::SlotState;
use laxity_shm::producer::{Producer, SlotRef};
use laxity_shm::record::{Flow, Hint, Record, Stage};
use laxity_shm::region::Region;
use laxity_shm::registration::{Hello, Peer};
use tokio::sync::oneshot;

static NOW_NS: AtomicU64 = AtomicU64::new(1_000_000_000);
const CLOCK: SchedulerClock = SchedulerClock { now_ns, processor_time };
/// Flows of the request whose deadline changes with each hint.
const FLOWS: usize = 3000;
/// Hints that are there at once.
const HINTS: usize = 400;
const MILLISECOND: u64 = 1_000_000;

fn now_ns() -> u64 {
    NOW_NS.load(Ordering::Relaxed)
}

fn processor_time() -> Time {
    Time::ZERO
}

fn pass(time_ns: u64) {
    NOW_NS.fetch_add(time_ns, Ordering::Relaxed);
}

struct Client {
    id: ClientId,
    region: Arc<Region>,
    producer: Producer,
}

impl Client {
    /// Attaches a process of this user, with one lane.
    fn attach(mailbox: &Mailbox, driver: &mut Driver, config: &Config, uid: u32) -> Self {
        let (hello, id) = (Hello::new("test", Mode::Enforce, false), ClientId(u64::from(uid)));
        let newcomer = newcomer(&hello, Peer { pid: uid, uid, gid: uid }, id, config).unwrap();
        let region = Arc::clone(newcomer.served.region());
        region.header().set_claimed(0, true);
        let (attached, _answer) = oneshot::channel();
        mailbox.send(SchedulerCommand::Attach { newcomer: Box::new(newcomer), attached });
        driver.step();
        let producer = Producer::new(LaneMemory::mapped(&region, 0).unwrap());
        Self { id, region, producer }
    }

    fn submit(&mut self, stage: Stage, request: u64, bytes: u64) -> SlotRef {
        let flow = Flow { stage, request, bytes, ..Flow::default() };
        self.producer.publish_gated(&Record::Submit(flow)).unwrap()
    }

    /// Gives the request another deadline than before.
    fn change_deadline(&mut self, turn: usize) {
        let deadline_ns = 3_600_000 * MILLISECOND + turn as u64 % 2;
        let hint = Hint::RequestJoin { batch: 1, request: 1, deadline_ns, bytes: 0 };
        self.producer.publish(&Record::Hint(hint)).unwrap();
    }

    fn is_permitted(&self, at: SlotRef) -> bool {
        matches!(self.producer.state(at), SlotState::Permit { .. })
    }
}

struct Host {
    driver: Driver,
    mailbox: Mailbox,
    config: Arc<Config>,
}

impl Host {
    fn new() -> Self {
        let (mailbox, inbox): (Mailbox, Inbox) = mailbox().unwrap();
        let mut config = Config::default();
        config.scheduler.slots = 4096;
        let config = Arc::new(config);
        let slot = Arc::new(SnapshotSlot::new().unwrap());
        let driver = Driver::by(CLOCK, inbox, slot, &config).unwrap();
        Self { driver, mailbox, config }
    }

    fn attach(&mut self, uid: u32) -> Client {
        Client::attach(&self.mailbox, &mut self.driver, &self.config, uid)
    }

    /// Lets time pass until the client's records are read, and returns how long that took.
    fn read_all(&mut self, client: &Client) -> u64 {
        let began = now_ns();
        while client.producer.backlog() > 0 {
            assert!(now_ns() - began < 10_000 * MILLISECOND, "no record may be left for ever");
            if self.driver.step() != NextStep::Turn {
                pass(MILLISECOND / 10);
            }
        }
        now_ns() - began
    }
}

/// A client with [`FLOWS`] flows that wait, behind one that fills the port.
fn with_flows(host: &mut Host, uid: u32) -> Client {
    let mut client = host.attach(uid);
    client.submit(Stage::P2d, 0, 1 << 30);
    for _ in 0..FLOWS {
        client.submit(Stage::P2d, 1, 1 << 20);
    }
    host.read_all(&client);
    client
}

#[test]
fn hints_about_very_many_flows_leave_other_users_their_time() {
    let mut host = Host::new();
    let mut victim = host.attach(2);
    let mut busy = with_flows(&mut host, 1);
    (0..HINTS).for_each(|turn| busy.change_deadline(turn));
    let began = now_ns();
    while now_ns() - began < 100 * MILLISECOND {
        let at = victim.submit(Stage::Collective, 0, 64);
        let before = busy.producer.backlog();
        pass(MILLISECOND);
        host.driver.step();
        assert!(victim.is_permitted(at), "the other user's flow is answered in the same step");
        assert!(now_ns() - victim.region.header().heartbeat_ns() <= 5 * MILLISECOND);
        victim.producer.release(at);
        victim.producer.publish(&Record::Completed { tag: at.tag, bytes: 64 }).unwrap();
        let read = before - busy.producer.backlog();
        // One in a turn, and one in the look before a sleep.
        assert!(read <= 2, "{read} hints about {FLOWS} flows are read in one step");
    }
    // Each hint is a rest of 3 ms, of which 20 ms are free.
    let read = HINTS as u64 - busy.producer.backlog();
    assert!((30..=45).contains(&read), "{read} hints are read in 100 ms");
    let took = host.read_all(&busy) / MILLISECOND;
    assert!((900..=1200).contains(&took), "all are read in the end, here after {took} ms");
}

#[test]
fn a_user_alone_is_not_delayed_by_own_hints() {
    let mut host = Host::new();
    let mut alone = with_flows(&mut host, 1);
    (0..HINTS).for_each(|turn| alone.change_deadline(turn));
    assert_eq!(host.read_all(&alone), 0);
}

#[test]
fn a_client_that_leaves_many_hints_behind_delays_nobody() {
    let mut host = Host::new();
    let mut victim = host.attach(2);
    let mut busy = with_flows(&mut host, 1);
    (0..HINTS).for_each(|turn| busy.change_deadline(turn));
    let (leaving, _answer) = oneshot::channel();
    let at = victim.submit(Stage::Collective, 0, 64);
    host.mailbox.send(SchedulerCommand::Detach { client: busy.id, leaving });
    host.driver.step();
    assert!(victim.is_permitted(at));
    let read = HINTS as u64 - busy.producer.backlog();
    assert!(read < 20, "{read} hints of a client that is gone are read");
}
