//! The lanes of this process, in which flows are submitted, and the queue pairs that wait in them.
//!
//! A lane has one user at a time, and any thread may post to or poll a queue pair. Queue pairs are
//! therefore spread over a few lanes, each behind a lock that is held for one submit. A process
//! with one busy thread always finds the lock free, and one with many threads nearly always.

use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use std::time::{Duration, Instant};

use laxity_client::{Client, Lane, Options, Stats};
use laxity_job::fork::PerProcess;
use laxity_job::monitor::Monitor;
use laxity_shm::sleep::now_ns;
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};

use crate::pump;
use crate::queue_pair::QueuePair;

/// Number of lanes of a process. Each starts a pump thread once a work request has to wait in it.
pub(crate) const LANES: usize = 4;

/// Time between two attempts to report what a lane could not report before.
const SETTLE_EVERY: Duration = Duration::from_millis(1);

/// Time between two checks of work requests in flight, which the program may not poll for.
const LOOK_EVERY: Duration = Duration::from_millis(25);

/// Longest time by which outstanding reports delay the end of the process.
const SETTLE_WITHIN: Duration = Duration::from_millis(50);

/// A lane with the queue pairs whose work requests wait in it.
#[derive(Debug)]
pub(crate) struct LaneShard {
    lane: Mutex<Option<Lane>>,
    /// Queue pairs whose work requests wait. The pump thread waits for one ([`LaneShard::attend`]).
    waiting: Monitor<Vec<&'static QueuePair>>,
    /// Queue pairs with flows in flight that the daemon counts.
    watched: Mutex<Vec<&'static QueuePair>>,
    /// Whether `watched` has entries. Relaxed: `waiting` is locked for changes that the thread must
    /// see.
    watches: AtomicBool,
    /// The tick of the last check of `watched`. Relaxed, because only the pump thread uses it.
    looked: AtomicU32,
    /// Length of `waiting`. Relaxed, because it is a hint that saves a lock.
    count: AtomicUsize,
    /// Whether the program polled for completions, and so pumped this lane, since the pump thread's
    /// last check.
    polled: AtomicBool,
    /// Whether the pump thread was started.
    has_pump_thread: AtomicBool,
    /// Whether the lane has unsent records, as [`LaneShard::owe`] sets it.
    has_unsent: AtomicBool,
    /// Whether the lane was too full to submit a work request, until [`LaneShard::take_full`].
    full: AtomicBool,
}

#[derive(Debug)]
pub(crate) struct VerbsLanes {
    client: Client,
    pub(crate) shards: [LaneShard; LANES],
}

/// Number of queue pairs with waiting work requests, in all lanes. Relaxed, because it is a hint
/// that saves each poll a check of all lanes.
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// The clock that [`tick`] returns.
static TICK: AtomicU32 = AtomicU32::new(0);
/// Nanoseconds of a tick, as a power of 2: about 17 ms.
const TICK_BITS: u32 = 24;

/// Returns the time in ticks. It advances only while something waits or is in flight.
#[inline]
pub(crate) fn tick() -> u32 {
    TICK.load(Ordering::Relaxed)
}

pub(crate) fn advance_tick() {
    TICK.store((now_ns() >> TICK_BITS) as u32, Ordering::Relaxed);
}

static ALL: PerProcess<VerbsLanes> = PerProcess::none();

/// Returns the lanes of this process. The first call attaches to the daemon.
#[inline]
pub(crate) fn all() -> &'static VerbsLanes {
    ALL.get_or_make(|| {
        // A forked child has no waiting queue pairs of its own.
        WAITING.store(0, Ordering::Relaxed);
        VerbsLanes {
            client: Client::attach(Options::from_env()),
            shards: [const { LaneShard::new() }; LANES],
        }
    })
}

#[inline]
pub(crate) fn client() -> &'static Client {
    &all().client
}

/// Returns the client's statistics, or zeros if the process never looked for a daemon.
pub(crate) fn stats() -> Stats {
    ALL.get().map_or_else(Stats::default, |all| all.client.stats())
}

/// Posts all permitted work requests in all lanes. The program's polls call this.
#[inline]
pub(crate) fn pump_all() {
    if WAITING.load(Ordering::Relaxed) > 0 {
        pump_those();
    }
}

/// Sends outstanding records of all lanes at the process's end, within [`SETTLE_WITHIN`].
pub(crate) fn settle_all() {
    let Some(all) = ALL.get() else { return };
    let give_up = Instant::now() + SETTLE_WITHIN;
    let settled = |shard: &LaneShard| {
        let Some(mut lane) = shard.lane.try_lock() else { return true };
        lane.as_mut().is_none_or(|lane| {
            lane.flush_unsent();
            !lane.has_unsent()
        })
    };
    while !all.shards.iter().all(settled) && Instant::now() < give_up {
        std::thread::sleep(SETTLE_EVERY);
    }
}

#[cold]
fn pump_those() {
    let Some(all) = ALL.get() else { return };
    for shard in &all.shards {
        if shard.count.load(Ordering::Relaxed) > 0 {
            shard.polled.store(true, Ordering::Relaxed);
            shard.pump();
        }
    }
}

#[cold]
#[inline(never)]
fn open_lane(lane: &mut Option<Lane>) -> &mut Lane {
    lane.insert(client().lane())
}

impl LaneShard {
    const fn new() -> Self {
        Self {
            lane: Mutex::new(None),
            waiting: Monitor::new(Vec::new()),
            watched: Mutex::new(Vec::new()),
            watches: AtomicBool::new(false),
            looked: AtomicU32::new(0),
            count: AtomicUsize::new(0),
            polled: AtomicBool::new(false),
            has_pump_thread: AtomicBool::new(false),
            has_unsent: AtomicBool::new(false),
            full: AtomicBool::new(false),
        }
    }

    /// Returns the lane. Lock it last, and for one submit, poll or completion.
    #[inline]
    pub(crate) fn lane(&self) -> MappedMutexGuard<'_, Lane> {
        MutexGuard::map(self.lane.lock(), |lane| match lane {
            Some(lane) => lane,
            None => open_lane(lane),
        })
    }

    /// Returns the lane if there is one, and it can be locked within `limit`.
    pub(crate) fn lane_within(&self, limit: Duration) -> Option<MappedMutexGuard<'_, Lane>> {
        MutexGuard::try_map(self.lane.try_lock_for(limit)?, Option::as_mut).ok()
    }

    /// Adds a queue pair whose work requests wait.
    pub(crate) fn add_waiting(&'static self, queue_pair: &'static QueuePair) {
        let mut waiting = self.waiting.lock();
        waiting.push(queue_pair);
        WAITING.fetch_add(1, Ordering::Relaxed);
        self.count.store(waiting.len(), Ordering::Relaxed);
        self.waiting.notify();
        drop(waiting);
        self.ensure_pump_thread();
    }

    /// Removes a queue pair without waiting work requests.
    pub(crate) fn remove_waiting(&self, queue_pair: &'static QueuePair) {
        let mut waiting = self.waiting.lock();
        let before = waiting.len();
        waiting.retain(|other| !ptr::eq(*other, queue_pair));
        WAITING.fetch_sub(before - waiting.len(), Ordering::Relaxed);
        self.count.store(waiting.len(), Ordering::Relaxed);
    }

    /// Blocks until a queue pair has deferred work requests. Meanwhile it sends the lane's
    /// outstanding records and checks work requests in flight.
    pub(crate) fn attend(&self) {
        let mut waiting = self.waiting.lock();
        while waiting.is_empty() {
            let has_unsent = self.has_unsent.load(Ordering::Relaxed);
            let limit = match (has_unsent, self.watches.load(Ordering::Relaxed)) {
                (true, _) => SETTLE_EVERY,
                (false, true) => LOOK_EVERY,
                (false, false) => {
                    waiting = self.waiting.wait(waiting);
                    continue;
                }
            };
            self.waiting.wait_for(waiting, limit);
            if has_unsent {
                let mut lane = self.lane();
                lane.flush_unsent();
                self.has_unsent.store(lane.has_unsent(), Ordering::Relaxed);
            }
            self.check_in_flight();
            waiting = self.waiting.lock();
        }
    }

    /// Adds a queue pair with flows in flight that the daemon counts. Its state is locked.
    pub(crate) fn watch(&'static self, queue_pair: &'static QueuePair) {
        self.watched.lock().push(queue_pair);
        if !self.watches.swap(true, Ordering::Relaxed) {
            // The lock prevents a change between the check of `attend` and its sleep.
            let _waiting = self.waiting.lock();
            self.waiting.notify();
        }
        self.ensure_pump_thread();
    }

    /// Removes a closed queue pair. Its state is locked.
    pub(crate) fn unwatch(&self, queue_pair: &'static QueuePair) {
        let mut watched = self.watched.lock();
        watched.retain(|other| !ptr::eq(*other, queue_pair));
    }

    /// Checks the work requests in flight, once a tick.
    pub(crate) fn check_in_flight(&self) {
        advance_tick();
        if self.looked.swap(tick(), Ordering::Relaxed) == tick()
            || !self.watches.load(Ordering::Relaxed)
        {
            return;
        }
        // Other code locks a queue pair before this list, so the list must not stay locked.
        let queue_pairs = core::mem::take(&mut *self.watched.lock());
        let mut left = Vec::new();
        for queue_pair in queue_pairs {
            if queue_pair.check_in_flight() {
                left.push(queue_pair);
            }
        }
        let mut watched = self.watched.lock();
        watched.append(&mut left);
        self.watches.store(!watched.is_empty(), Ordering::Relaxed);
    }

    /// Makes the pump thread send the lane's outstanding records, since the program may not do so.
    #[cold]
    pub(crate) fn request_flush(&'static self) {
        {
            // The lock prevents a change between the check of `attend` and its sleep.
            let _waiting = self.waiting.lock();
            self.has_unsent.store(true, Ordering::Relaxed);
            self.waiting.notify();
        }
        self.ensure_pump_thread();
    }

    fn ensure_pump_thread(&'static self) {
        if !self.has_pump_thread.swap(true, Ordering::Relaxed) {
            pump::start(self);
        }
    }

    /// Reports whether the program pumped since the last call.
    pub(crate) fn take_polled(&self) -> bool {
        self.polled.swap(false, Ordering::Relaxed)
    }

    /// Records that the lane is full. The daemon doesn't report free slots.
    pub(crate) fn note_full(&self) {
        self.full.store(true, Ordering::Relaxed);
    }

    /// Reports whether [`LaneShard::note_full`] was called since the last call.
    pub(crate) fn take_full(&self) -> bool {
        self.full.swap(false, Ordering::Relaxed)
    }

    /// Posts all permitted work requests of the lane. Reports whether there were any.
    pub(crate) fn pump(&self) -> bool {
        // Other code locks a queue pair before this list, so the list must not stay locked.
        let waiting = self.waiting.lock().clone();
        let mut went = false;
        for queue_pair in waiting {
            went |= queue_pair.pump();
        }
        went
    }
}
