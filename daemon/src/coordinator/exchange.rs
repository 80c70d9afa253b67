//! The coordinator exchange, between the scheduler thread and the stream's task. It holds one
//! report and one cluster order.
//!
//! The scheduler thread never waits here. If the lock is taken, or the last report was not sent, it
//! tries again later. The task holds the lock only to move values. Each side is notified at most
//! once of a change: the task through [`CoordinatorExchange::report_ready`], the scheduler by one
//! [`SchedulerCommand::Coordinator`]. The room for reports and the request for more change under
//! one lock, so no notification is lost. A bounded channel would need a second lock for that.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use laxity_policy::{Span, Time};
use laxity_wire::ClusterStatus;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::order::ClusterOrder;
use super::outgoing::{EVENTS_MAX, OutgoingReport};
use crate::mailbox::{Mailbox, SchedulerCommand};

/// The place for one report, one cluster order, and the state of the stream.
#[derive(Debug)]
pub struct CoordinatorExchange {
    state: Mutex<ExchangeState>,
    report_put: Notify,
    /// Whether the scheduler has a [`SchedulerCommand::Coordinator`] to read.
    scheduler_notified: AtomicBool,
    /// When the cluster order was last confirmed, in ns of CLOCK_MONOTONIC. Without one, 0.
    confirmed_ns: AtomicU64,
    /// Time after the last confirmation for which a cluster order is valid, as the coordinator
    /// says.
    age_max_ns: AtomicU64,
    events_max: AtomicUsize,
    /// Whether the links have the cluster order.
    in_force: AtomicBool,
    view: Mutex<ClusterStatus>,
}

#[derive(Debug, Default)]
struct ExchangeState {
    stream: u64,
    connected: bool,
    snapshot_wanted: bool,
    report: Option<OutgoingReport>,
    /// Whether the scheduler has more to report and waits until `report` is sent.
    has_more: bool,
    /// A change for the scheduler: a new cluster order, or the end of the last one.
    order: Option<Option<ClusterOrder>>,
}

/// The changes that the scheduler finds in the exchange.
#[derive(Debug)]
pub struct Update {
    /// The number of the stream if it changed since the last look. Zero if the stream has ended.
    pub stream: Option<u64>,
    pub snapshot_wanted: bool,
    pub has_room: bool,
    /// A new cluster order, or `Some(None)` if the last one is withdrawn.
    pub order: Option<Option<ClusterOrder>>,
}

/// The outcome of putting a report into the exchange.
#[derive(Debug, PartialEq)]
pub enum PutOutcome {
    /// The report will be sent.
    Accepted,
    /// The lock is held, or there is no room. The caller puts the report again later.
    Busy(OutgoingReport),
    /// The stream of the report has ended. The snapshot of the next stream replaces the report.
    StreamEnded,
}

impl CoordinatorExchange {
    pub fn new(endpoint: &str, host: &str) -> Self {
        Self {
            state: Mutex::default(),
            report_put: Notify::new(),
            scheduler_notified: AtomicBool::new(false),
            confirmed_ns: AtomicU64::new(0),
            age_max_ns: AtomicU64::new(u64::MAX),
            events_max: AtomicUsize::new(EVENTS_MAX),
            in_force: AtomicBool::new(false),
            view: Mutex::new(ClusterStatus {
                endpoint: endpoint.to_owned(),
                host: host.to_owned(),
                ..ClusterStatus::default()
            }),
        }
    }

    // Methods for the scheduler thread:

    /// Takes the changes since the last call, or returns `None` if the lock is held. `stream` is
    /// the number of the last stream that the scheduler saw, or zero.
    pub fn look(&self, stream: u64) -> Option<Update> {
        let mut state = self.state.try_lock()?;
        let number = if state.connected { state.stream } else { 0 };
        let has_room = state.connected && state.report.is_none();
        state.has_more = state.connected && !has_room;
        Some(Update {
            stream: (number != stream).then_some(number),
            snapshot_wanted: core::mem::take(&mut state.snapshot_wanted),
            has_room,
            order: state.order.take(),
        })
    }

    pub fn put(&self, stream: u64, report: OutgoingReport) -> PutOutcome {
        let Some(mut state) = self.state.try_lock() else { return PutOutcome::Busy(report) };
        if !state.connected || state.stream != stream {
            return PutOutcome::StreamEnded;
        }
        if state.report.is_some() {
            return PutOutcome::Busy(report);
        }
        state.report = Some(report);
        drop(state);
        self.report_put.notify_one();
        PutOutcome::Accepted
    }

    /// Allows the next notification. The scheduler calls this when it reads its command.
    pub fn acknowledge(&self) {
        self.scheduler_notified.store(false, Ordering::Release);
    }

    pub fn events_max(&self) -> usize {
        self.events_max.load(Ordering::Relaxed)
    }

    /// Returns until when the cluster order is valid: at most `limit` after its last confirmation.
    pub fn holds_until(&self, limit: Span) -> Time {
        let limit = limit.0.min(self.age_max_ns.load(Ordering::Relaxed));
        Time(self.confirmed_ns.load(Ordering::Acquire)) + Span(limit)
    }

    pub fn set_in_force(&self, in_force: bool) {
        self.in_force.store(in_force, Ordering::Release);
    }

    // Methods for the task:

    /// Returns once the scheduler has put a report since the last call. It supports one caller.
    pub async fn report_ready(&self) {
        self.report_put.notified().await;
    }

    /// Begins a stream, on which the coordinator needs a snapshot.
    pub fn begin(&self, mailbox: &Mailbox, events_max: usize, age_max_ns: u64) {
        self.events_max.store(events_max.clamp(1, EVENTS_MAX), Ordering::Relaxed);
        self.age_max_ns.store(age_max_ns, Ordering::Relaxed);
        {
            let mut state = self.state.lock();
            state.stream += 1;
            state.connected = true;
            state.report = None;
            state.snapshot_wanted = false;
        }
        self.notify_scheduler(mailbox);
    }

    /// Ends the stream. Its cluster order holds until the age limit.
    pub fn end(&self, mailbox: &Mailbox) {
        {
            let mut state = self.state.lock();
            state.connected = false;
            state.report = None;
        }
        self.notify_scheduler(mailbox);
    }

    pub fn want_snapshot(&self, mailbox: &Mailbox) {
        self.state.lock().snapshot_wanted = true;
        self.notify_scheduler(mailbox);
    }

    pub fn has_report(&self) -> bool {
        self.state.lock().report.is_some()
    }

    /// Takes the report to send. Its spans count from `now`.
    pub fn take(&self, now: Time, mailbox: &Mailbox) -> Option<OutgoingReport> {
        let (report, has_more) = {
            let mut state = self.state.lock();
            let report = state.report.take();
            (report, core::mem::take(&mut state.has_more))
        };
        if has_more {
            self.notify_scheduler(mailbox);
        }
        let mut report = report?;
        report.age_to(now);
        Some(report)
    }

    /// Stores a cluster order. The scheduler is not notified if the order repeats the last one.
    pub fn set_order(&self, now: Time, order: ClusterOrder, is_new: bool, mailbox: &Mailbox) {
        self.confirm(now);
        let lapsed = !self.in_force.load(Ordering::Acquire);
        if is_new || lapsed {
            self.state.lock().order = Some(Some(order));
            self.notify_scheduler(mailbox);
        }
    }

    /// Records that the coordinator confirmed the cluster order at `now`.
    pub fn confirm(&self, now: Time) {
        self.confirmed_ns.store(now.0, Ordering::Release);
    }

    /// Withdraws the cluster order at once.
    pub fn withdraw(&self, mailbox: &Mailbox) {
        self.state.lock().order = Some(None);
        self.confirmed_ns.store(0, Ordering::Release);
        self.notify_scheduler(mailbox);
    }

    fn notify_scheduler(&self, mailbox: &Mailbox) {
        if !self.scheduler_notified.swap(true, Ordering::AcqRel) {
            mailbox.send(SchedulerCommand::Coordinator);
        }
    }

    // Methods for operators:

    pub fn update_view(&self, change: impl FnOnce(&mut ClusterStatus)) {
        change(&mut self.view.lock());
    }

    /// Returns the view of operators, without `order`, `age_ms` and `fetches`.
    pub fn view(&self) -> ClusterStatus {
        self.view.lock().clone()
    }

    /// Returns whether the cluster order is in force, and the time since its last confirmation.
    pub fn in_force(&self, now: Time) -> (bool, Option<Span>) {
        let confirmed = self.confirmed_ns.load(Ordering::Acquire);
        let age = (confirmed > 0).then(|| now.since(Time(confirmed)));
        (self.in_force.load(Ordering::Acquire), age)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mailbox::mailbox;
    use laxity_wire::v1::{Epoch, SnapshotPiece};

    fn report() -> OutgoingReport {
        OutgoingReport { at: Time(0), piece: SnapshotPiece::Unspecified, events: Vec::new() }
    }

    #[test]
    fn there_is_room_for_one_report_and_the_scheduler_is_notified_when_it_was_taken() {
        let (mailbox, inbox) = mailbox().expect("descriptors");
        let exchange = CoordinatorExchange::new("http://x", "a");
        let put = || exchange.put(1, report());
        assert_eq!(put(), PutOutcome::StreamEnded, "there is no stream");
        exchange.begin(&mailbox, 100, u64::MAX);
        assert_eq!(inbox.take().len(), 1);
        exchange.acknowledge();
        let update = exchange.look(0).expect("nobody holds the lock");
        assert_eq!((update.stream, update.has_room), (Some(1), true));
        assert_eq!(put(), PutOutcome::Accepted);
        assert_eq!(put(), PutOutcome::Busy(report()));
        assert!(!exchange.look(1).expect("nobody holds the lock").has_room);
        assert!(exchange.take(Time(0), &mailbox).is_some());
        assert_eq!(inbox.take().len(), 1);
        exchange.acknowledge();
        exchange.end(&mailbox);
        assert_eq!(put(), PutOutcome::StreamEnded);
        let update = exchange.look(1).expect("nobody holds the lock");
        assert_eq!(update.stream, Some(0));
    }

    #[test]
    fn however_many_orders_come_one_command_waits_and_the_newest_order_is_found() {
        let (mailbox, inbox) = mailbox().expect("descriptors");
        let exchange = CoordinatorExchange::new("http://x", "a");
        for sequence in 1..1000 {
            let order = ClusterOrder {
                epoch: Epoch { term: 1, sequence },
                content: std::sync::Arc::default(),
            };
            exchange.set_order(Time(sequence), order, true, &mailbox);
        }
        assert_eq!(inbox.take().len(), 1);
        let update = exchange.look(0).expect("nobody holds the lock");
        let order = update.order.flatten().expect("an order");
        assert_eq!(order.epoch.sequence, 999);
        assert_eq!(exchange.holds_until(Span(5)), Time(1004));
    }
}
