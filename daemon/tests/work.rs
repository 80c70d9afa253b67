//! Hints that take much of the scheduler's time, beside clients of another user. The clocks of the
//! scheduler are the test's.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

use std::cell::Cell;
use std::sync::Arc;

use laxity_daemon::clients::ClientId;
use laxity_daemon::config::Config;
use laxity_daemon::driver::{Driver, SchedulerClock};
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

const CLOCK: SchedulerClock = SchedulerClock { now_ns, processor_time };
const MILLISECOND: u64 = 1_000_000;
/// The processor time that the scheduler sees pass between two looks.
const HINT_NS: u64 = MILLISECOND / 2;
/// Hints that are there at once.
const HINTS: usize = 400;

thread_local! {
    static NOW_NS: Cell<u64> = const { Cell::new(1_000_000_000) };
    static LOOKS: Cell<u64> = const { Cell::new(0) };
}

fn now_ns() -> u64 {
    NOW_NS.get()
}

fn processor_time() -> Time {
    LOOKS.set(LOOKS.get() + 1);
    Time(LOOKS.get() * HINT_NS)
}

fn pass(time_ns: u64) {
    NOW_NS.set(NOW_NS.get() + time_ns);
}

/// Returns how many hints, and few other things, were measured so far.
fn measured() -> u64 {
    LOOKS.get() / 2
}

struct Client {
    id: ClientId,
    region: Arc<Region>,
    producer: Producer,
}

impl Client {
    /// Attaches a process of this user, with one lane.
    fn attach(host: &mut Host, pid: u32, uid: u32) -> Self {
        let Host { driver, mailbox, config } = host;
        let (hello, id) = (Hello::new("test", Mode::Enforce, false), ClientId(u64::from(pid)));
        let newcomer = newcomer(&hello, Peer { pid, uid, gid: uid }, id, config).unwrap();
        let region = Arc::clone(newcomer.served.region());
        region.header().set_claimed(0, true);
        let (attached, _answer) = oneshot::channel();
        mailbox.send(SchedulerCommand::Attach { newcomer: Box::new(newcomer), attached });
        // The lanes of a client are seen after a few turns.
        (0..32).for_each(|_| _ = driver.step());
        let producer = Producer::new(LaneMemory::mapped(&region, 0).unwrap());
        Self { id, region, producer }
    }

    fn submit(&mut self, stage: Stage, bytes: u64) -> SlotRef {
        let flow = Flow { stage, bytes, ..Flow::default() };
        self.producer.publish_gated(&Record::Submit(flow)).unwrap()
    }

    /// Gives requests deadlines, one after another.
    fn hint(&mut self, hints: usize) {
        for turn in 1..=hints as u64 {
            let deadline_ns = 3_600_000 * MILLISECOND + turn;
            let hint = Hint::RequestJoin { batch: 0, request: turn, deadline_ns, bytes: 0 };
            self.producer.publish(&Record::Hint(hint)).unwrap();
        }
    }

    /// Completes a flow whose permit came, and returns the slot.
    fn complete(&mut self, at: SlotRef, bytes: u64) {
        self.producer.release(at);
        self.producer.publish(&Record::Completed { tag: at.tag, bytes }).unwrap();
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
}

#[test]
fn hints_have_a_part_of_the_time_and_all_else_of_their_user_is_read() {
    let mut host = Host::new();
    let mut victim = Client::attach(&mut host, 1, 1);
    let mut busy = Client::attach(&mut host, 2, 2);
    let mut sibling = Client::attach(&mut host, 3, 2);
    let (began, before) = (now_ns(), measured());
    let mut read = 0;
    while now_ns() - began < 100 * MILLISECOND {
        busy.hint(HINTS / 10);
        let flows = [&mut victim, &mut sibling, &mut busy].map(|client| {
            let at = client.submit(Stage::Collective, 64);
            (client, at)
        });
        pass(MILLISECOND);
        host.driver.step();
        for (client, at) in flows {
            assert!(client.is_permitted(at), "answered in the same step, for {:?}", client.id);
            assert_eq!(client.producer.backlog(), 0);
            assert!(now_ns() - client.region.header().heartbeat_ns() <= 5 * MILLISECOND);
            client.complete(at, 64);
        }
        read += HINTS / 10;
    }
    assert_eq!(read, 10 * HINTS);
    // Half a millisecond each: 5 ms at once, and a quarter of 100 ms.
    let heard = measured() - before;
    assert!((50..=70).contains(&heard), "{heard} of {read} hints were heard in 100 ms");
    pass(1000 * MILLISECOND);
    host.driver.step();
    busy.hint(5);
    let before = measured();
    host.driver.step();
    assert!(measured() - before >= 5, "it is heard again");
}

#[test]
fn hints_of_a_user_alone_are_not_measured() {
    let mut host = Host::new();
    let mut alone = Client::attach(&mut host, 1, 1);
    let before = measured();
    alone.hint(HINTS);
    while alone.producer.backlog() > 0 {
        host.driver.step();
    }
    assert!(measured() - before < 5, "{} measurements", measured() - before);
}

#[test]
fn all_records_of_a_client_that_leaves_are_read_however_many_hints_are_among_them() {
    let mut host = Host::new();
    let _other = Client::attach(&mut host, 1, 1);
    let mut busy = Client::attach(&mut host, 2, 2);
    let at = busy.submit(Stage::Collective, 64);
    host.driver.step();
    assert!(busy.is_permitted(at));
    busy.hint(HINTS);
    busy.complete(at, 64);
    let (leaving, mut left) = oneshot::channel();
    host.mailbox.send(SchedulerCommand::Detach { client: busy.id, leaving });
    host.driver.step();
    assert_eq!(busy.producer.backlog(), 0);
    let counters = left.try_recv().unwrap().unwrap().counters;
    assert_eq!((counters.completed_bytes, counters.cancelled_flows), (64, 0));
}
