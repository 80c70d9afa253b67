//! What lies between the scheduler's thread and the task that holds the stream: room for one dispatch and one decree.
//!
//! The scheduler never waits here. It only ever tries the lock, and where it fails, or the dispatch before has not been taken,
//! it comes back; the other side takes the lock for the length of a move. Each side is told at most once
//! that there is something for it: the task by [`Desk::rung`], the scheduler by one
//! [`Command::Coordinator`] that lies in its mailbox until it is read.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use laxity_policy::{Span, Time};
use laxity_wire::v1::Epoch;
use tokio::sync::Notify;

use super::decree::Decree;
use super::ledger::{Dispatch, EVENTS_MAX};
use crate::mailbox::{Command, Mailbox};

/// See the module.
#[derive(Debug)]
pub struct Desk {
    papers: Mutex<Papers>,
    bell: Notify,
    /// The scheduler has a [`Command::Coordinator`] to read.
    knocked: AtomicBool,
    /// When the decree was last confirmed, CLOCK_MONOTONIC in ns; 0 if there is none.
    confirmed_ns: AtomicU64,
    /// How long a decree may be followed, by the coordinator's word.
    age_max_ns: AtomicU64,
    events_max: AtomicUsize,
    /// The decree is what the links have.
    in_force: AtomicBool,
    view: Mutex<View>,
}

#[derive(Debug, Default)]
struct Papers {
    /// Streams so far.
    stream: u64,
    attended: bool,
    snapshot_wanted: bool,
    dispatch: Option<Dispatch>,
    /// The scheduler has more, and waits for the dispatch to be taken.
    has_more: bool,
    /// News for the scheduler: a decree, or that there is none any more.
    decree: Option<Option<Decree>>,
}

/// What the task knows of its stream, for operators.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Where the coordinator is.
    pub endpoint: String,
    /// What this host calls itself.
    pub host: String,
    /// There is a stream.
    pub connected: bool,
    /// An operator has taken this host out of the cluster's order.
    pub drained: bool,
    /// What the coordinator calls its release.
    pub software: String,
    /// Of the newest order applied.
    pub epoch: Option<Epoch>,
    /// Orders applied.
    pub orders: u64,
    /// Orders refused because they were overtaken: of an older term or sequence.
    pub stale_orders: u64,
    /// Orders dropped because a part was missing or made no sense.
    pub broken_orders: u64,
    /// Streams that the coordinator welcomed.
    pub connects: u64,
    /// Attempts that failed, and streams that ended.
    pub failures: u64,
    /// Reports sent.
    pub reports: u64,
    /// Events that the coordinator refused.
    pub refused_events: u64,
    /// Why there was no stream last time.
    pub problem: String,
}

/// What the scheduler finds.
#[derive(Debug)]
pub enum Found {
    /// Somebody else is looking; come back.
    Busy,
    /// What lies there.
    Papers {
        /// A new stream, by number.
        stream: Option<u64>,
        /// Everything has to be told again.
        snapshot_wanted: bool,
        /// There is room for a dispatch.
        has_room: bool,
        /// A decree has come, or does not hold any more.
        decree: Option<Option<Decree>>,
    },
}

/// What became of a dispatch.
#[derive(Debug, PartialEq)]
pub enum Put {
    /// It will be sent.
    Done,
    /// Somebody else is looking, or there is no room: come back with it.
    Busy(Dispatch),
    /// Its stream has ended. The snapshot of the next one says the same.
    Lost,
}

impl Desk {
    /// An empty desk.
    #[must_use]
    pub fn new(endpoint: &str, host: &str) -> Self {
        Self {
            papers: Mutex::default(),
            bell: Notify::new(),
            knocked: AtomicBool::new(false),
            confirmed_ns: AtomicU64::new(0),
            age_max_ns: AtomicU64::new(u64::MAX),
            events_max: AtomicUsize::new(EVENTS_MAX),
            in_force: AtomicBool::new(false),
            view: Mutex::new(View {
                endpoint: endpoint.to_owned(),
                host: host.to_owned(),
                ..View::default()
            }),
        }
    }

    fn papers(&self) -> MutexGuard<'_, Papers> {
        self.papers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // The scheduler's side.

    /// Looks for what there is for the scheduler; `stream` is the number that it saw last, zero if nobody attended.
    pub fn look(&self, stream: u64) -> Found {
        let mut papers = match self.papers.try_lock() {
            Ok(papers) => papers,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Found::Busy,
        };
        let number = if papers.attended { papers.stream } else { 0 };
        let has_room = papers.attended && papers.dispatch.is_none();
        papers.has_more = papers.attended && !has_room;
        Found::Papers {
            stream: (number != stream).then_some(number),
            snapshot_wanted: core::mem::take(&mut papers.snapshot_wanted),
            has_room,
            decree: papers.decree.take(),
        }
    }

    /// Puts a dispatch of this stream on the desk.
    pub fn put(&self, stream: u64, dispatch: Dispatch) -> Put {
        let mut papers = match self.papers.try_lock() {
            Ok(papers) => papers,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Put::Busy(dispatch),
        };
        if !papers.attended || papers.stream != stream {
            return Put::Lost;
        }
        if papers.dispatch.is_some() {
            return Put::Busy(dispatch);
        }
        papers.dispatch = Some(dispatch);
        drop(papers);
        self.bell.notify_one();
        Put::Done
    }

    /// The scheduler reads its command now.
    pub fn heed(&self) {
        self.knocked.store(false, Ordering::Release);
    }

    /// Most events that a dispatch may hold.
    #[must_use]
    pub fn events_max(&self) -> usize {
        self.events_max.load(Ordering::Relaxed)
    }

    /// Until when the decree may be followed: for `limit` at most since it was last confirmed.
    #[must_use]
    pub fn holds_until(&self, limit: Span) -> Time {
        let limit = limit.0.min(self.age_max_ns.load(Ordering::Relaxed));
        Time(self.confirmed_ns.load(Ordering::Acquire)) + Span(limit)
    }

    /// Whether the decree is what the links have.
    pub fn set_in_force(&self, in_force: bool) {
        self.in_force.store(in_force, Ordering::Release);
    }

    // The task's side.

    /// Returns once the scheduler has put something down since the last call; for one caller.
    pub async fn rung(&self) {
        self.bell.notified().await;
    }

    /// A stream begins: everything is wanted.
    pub fn begin(&self, mailbox: &Mailbox, events_max: usize, age_max_ns: u64) {
        self.events_max
            .store(events_max.clamp(1, EVENTS_MAX), Ordering::Relaxed);
        self.age_max_ns.store(age_max_ns, Ordering::Relaxed);
        {
            let mut papers = self.papers();
            papers.stream += 1;
            papers.attended = true;
            papers.dispatch = None;
            papers.snapshot_wanted = false;
        }
        self.knock(mailbox);
    }

    /// The stream has ended. Its decree holds until its age limit.
    pub fn end(&self, mailbox: &Mailbox) {
        {
            let mut papers = self.papers();
            papers.attended = false;
            papers.dispatch = None;
        }
        self.knock(mailbox);
    }

    /// The coordinator wants a snapshot again.
    pub fn want_snapshot(&self, mailbox: &Mailbox) {
        self.papers().snapshot_wanted = true;
        self.knock(mailbox);
    }

    /// Whether there is something to send.
    #[must_use]
    pub fn has_dispatch(&self) -> bool {
        self.papers().dispatch.is_some()
    }

    /// What there is to send, with spans that count from `now`.
    pub fn take(&self, now: Time, mailbox: &Mailbox) -> Option<Dispatch> {
        let (dispatch, has_more) = {
            let mut papers = self.papers();
            let dispatch = papers.dispatch.take();
            (dispatch, core::mem::take(&mut papers.has_more))
        };
        if has_more {
            self.knock(mailbox);
        }
        let mut dispatch = dispatch?;
        dispatch.age_to(now);
        Some(dispatch)
    }

    /// A decree has come. If it says what the one before said, the scheduler need not be told.
    pub fn decree(&self, now: Time, decree: Decree, is_new: bool, mailbox: &Mailbox) {
        self.confirm(now);
        let lapsed = !self.in_force.load(Ordering::Acquire);
        if is_new || lapsed {
            self.papers().decree = Some(Some(decree));
            self.knock(mailbox);
        }
    }

    /// What was decreed is as good as if it came now.
    pub fn confirm(&self, now: Time) {
        self.confirmed_ns.store(now.0, Ordering::Release);
    }

    /// What was decreed does not hold any more.
    pub fn withdraw(&self, mailbox: &Mailbox) {
        self.papers().decree = Some(None);
        self.confirmed_ns.store(0, Ordering::Release);
        self.knock(mailbox);
    }

    fn knock(&self, mailbox: &Mailbox) {
        if !self.knocked.swap(true, Ordering::AcqRel) {
            mailbox.send(Command::Coordinator);
        }
    }

    // For operators.

    /// Changes what operators see.
    pub fn show(&self, change: impl FnOnce(&mut View)) {
        change(&mut self.view.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// What operators see.
    #[must_use]
    pub fn view(&self) -> View {
        self.view
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Whether the coordinator's order is in force, and how long ago it was last confirmed, if ever.
    #[must_use]
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
    use laxity_wire::v1::SnapshotPiece;

    fn dispatch() -> Dispatch {
        Dispatch {
            at: Time(0),
            piece: SnapshotPiece::Unspecified,
            events: Vec::new(),
        }
    }

    #[test]
    fn there_is_room_for_one_dispatch_and_the_scheduler_is_called_when_it_was_taken() {
        let (mailbox, inbox) = mailbox().expect("descriptors");
        let desk = Desk::new("http://x", "a");
        assert_eq!(desk.put(1, dispatch()), Put::Lost, "nobody attends");
        desk.begin(&mailbox, 100, u64::MAX);
        assert_eq!(inbox.take().len(), 1);
        desk.heed();
        let Found::Papers {
            stream: Some(1),
            has_room: true,
            ..
        } = desk.look(0)
        else {
            panic!("a stream, with room");
        };
        assert_eq!(desk.put(1, dispatch()), Put::Done);
        assert_eq!(desk.put(1, dispatch()), Put::Busy(dispatch()));
        assert!(matches!(
            desk.look(1),
            Found::Papers {
                has_room: false,
                ..
            }
        ));
        assert!(desk.take(Time(0), &mailbox).is_some());
        assert_eq!(inbox.take().len(), 1);
        desk.heed();
        desk.end(&mailbox);
        assert_eq!(desk.put(1, dispatch()), Put::Lost);
        assert!(matches!(
            desk.look(1),
            Found::Papers {
                stream: Some(0),
                ..
            }
        ));
    }

    #[test]
    fn however_much_comes_one_command_waits_and_the_newest_decree_is_found() {
        let (mailbox, inbox) = mailbox().expect("descriptors");
        let desk = Desk::new("http://x", "a");
        for sequence in 1..1000 {
            let decree = Decree {
                epoch: Epoch { term: 1, sequence },
                terms: std::sync::Arc::default(),
            };
            desk.decree(Time(sequence), decree, true, &mailbox);
        }
        assert_eq!(inbox.take().len(), 1);
        let Found::Papers {
            decree: Some(Some(decree)),
            ..
        } = desk.look(0)
        else {
            panic!("a decree");
        };
        assert_eq!(decree.epoch.sequence, 999);
        assert_eq!(desk.holds_until(Span(5)), Time(1004));
    }
}
