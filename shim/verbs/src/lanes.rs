//! The lanes of this process: where its flows are submitted, and who waits in them.
//!
//! A lane has one user at a time, and queue pairs are posted to and polled from any thread. So the
//! queue pairs are dealt out over a few lanes, each behind a lock that is held for one submit: a
//! process with one busy thread never finds it taken, and one with many has as many locks as it
//! needs to rarely find it so.

use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use std::time::{Duration, Instant};

use laxity_client::{Client, Lane, Options, Stats};
use laxity_job::fork::PerProcess;
use laxity_shm::sleep::now_ns;
use parking_lot::{Condvar, MappedMutexGuard, Mutex, MutexGuard};

use crate::pump;
use crate::queue_pair::QueuePair;

/// Lanes of a process. Each takes a pump thread once something has to wait in it.
pub(crate) const LANES: usize = 4;

/// Between two looks whether the daemon has made room for what a lane owes.
const SETTLE_EVERY: Duration = Duration::from_millis(1);

/// Between two looks at what is in flight and may not be polled for.
const LOOK_EVERY: Duration = Duration::from_millis(25);

/// A process that ends does not wait longer for that.
const SETTLE_WITHIN: Duration = Duration::from_millis(50);

/// One lane, and the queue pairs whose work requests wait in it.
#[derive(Debug)]
pub(crate) struct Shard {
    lane: Mutex<Option<Lane>>,
    waiting: Mutex<Vec<&'static QueuePair>>,
    /// Rung when `waiting` or `watched` is not empty any more. Goes with `waiting`.
    pub(crate) bell: Condvar,
    /// The queue pairs that have something in flight which the daemon counts.
    watched: Mutex<Vec<&'static QueuePair>>,
    /// Whether there are any. Relaxed: changes with `waiting` locked where the pump thread must not
    /// miss it.
    watches: AtomicBool,
    /// The tick of the last look at them. Relaxed: of the pump thread alone.
    looked: AtomicU32,
    /// Length of `waiting`. Relaxed: a hint that saves a lock.
    count: AtomicUsize,
    /// The program polled for completions, and pumped this lane, since the pump thread last looked.
    polled: AtomicBool,
    pumped: AtomicBool,
    /// The lane owes messages; see [`Shard::owe`].
    owes: AtomicBool,
    /// A work request could not be submitted, because the lane was full; see [`Shard::take_full`].
    full: AtomicBool,
}

/// The lanes of a process.
#[derive(Debug)]
pub(crate) struct Lanes {
    client: Client,
    pub(crate) shards: [Shard; LANES],
}

/// Queue pairs in which something waits, in all lanes. Relaxed: a hint that saves each poll a look
/// at all of them.
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// See [`tick`].
static TICK: AtomicU32 = AtomicU32::new(0);
/// Nanoseconds of a tick, as a power of 2: about 17 ms.
const TICK_BITS: u32 = 24;

/// A clock that costs a load, and goes only while something waits.
#[inline]
pub(crate) fn tick() -> u32 {
    TICK.load(Ordering::Relaxed)
}

/// Sets it.
pub(crate) fn advance_tick() {
    TICK.store((now_ns() >> TICK_BITS) as u32, Ordering::Relaxed);
}

static ALL: PerProcess<Lanes> = PerProcess::none();

/// The lanes of this process, attached to the daemon when first asked for.
#[inline]
pub(crate) fn all() -> &'static Lanes {
    ALL.get_or_make(|| {
        // In a forked child nothing waits that is its own.
        WAITING.store(0, Ordering::Relaxed);
        Lanes {
            client: Client::attach(Options::from_env()),
            shards: [const { Shard::new() }; LANES],
        }
    })
}

/// The attachment of this process.
#[inline]
pub(crate) fn client() -> &'static Client {
    &all().client
}

/// What the client counted; nothing if no daemon was ever looked for.
pub(crate) fn stats() -> Stats {
    ALL.get()
        .map_or_else(Stats::default, |all| all.client.stats())
}

/// Posts what may go by now, in all lanes: for threads of the program that wait for completions.
#[inline]
pub(crate) fn pump_all() {
    if WAITING.load(Ordering::Relaxed) > 0 {
        pump_those();
    }
}

/// Tells what the lanes owe, as far as the daemon makes room for it soon. For the end.
pub(crate) fn settle_all() {
    let Some(all) = ALL.get() else { return };
    let give_up = Instant::now() + SETTLE_WITHIN;
    let settled = |shard: &Shard| {
        let Some(mut lane) = shard.lane.try_lock() else {
            return true;
        };
        lane.as_mut().is_none_or(|lane| {
            lane.settle();
            !lane.owes()
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
fn take_seat(lane: &mut Option<Lane>) -> &mut Lane {
    lane.insert(client().lane())
}

impl Shard {
    const fn new() -> Self {
        Self {
            lane: Mutex::new(None),
            waiting: Mutex::new(Vec::new()),
            bell: Condvar::new(),
            watched: Mutex::new(Vec::new()),
            watches: AtomicBool::new(false),
            looked: AtomicU32::new(0),
            count: AtomicUsize::new(0),
            polled: AtomicBool::new(false),
            pumped: AtomicBool::new(false),
            owes: AtomicBool::new(false),
            full: AtomicBool::new(false),
        }
    }

    /// The lane. Lock it last, and for one submit, poll or completion.
    #[inline]
    pub(crate) fn lane(&self) -> MappedMutexGuard<'_, Lane> {
        MutexGuard::map(self.lane.lock(), |lane| match lane {
            Some(lane) => lane,
            None => take_seat(lane),
        })
    }

    /// A queue pair has work requests that wait.
    pub(crate) fn enlist(&'static self, queue_pair: &'static QueuePair) {
        let mut waiting = self.waiting.lock();
        waiting.push(queue_pair);
        WAITING.fetch_add(1, Ordering::Relaxed);
        self.count.store(waiting.len(), Ordering::Relaxed);
        self.bell.notify_one();
        drop(waiting);
        self.have_pumped();
    }

    /// A queue pair has none any more.
    pub(crate) fn strike(&self, queue_pair: &'static QueuePair) {
        let mut waiting = self.waiting.lock();
        let before = waiting.len();
        waiting.retain(|other| !ptr::eq(*other, queue_pair));
        WAITING.fetch_sub(before - waiting.len(), Ordering::Relaxed);
        self.count.store(waiting.len(), Ordering::Relaxed);
    }

    /// Waits until there is some queue pair that waits. Meanwhile pays what the lane owes, and
    /// looks after what is in flight.
    pub(crate) fn attend(&self) {
        let mut waiting = self.waiting.lock();
        while waiting.is_empty() {
            let owes = self.owes.load(Ordering::Relaxed);
            let limit = match (owes, self.watches.load(Ordering::Relaxed)) {
                (true, _) => SETTLE_EVERY,
                (false, true) => LOOK_EVERY,
                (false, false) => {
                    self.bell.wait(&mut waiting);
                    continue;
                }
            };
            self.bell.wait_for(&mut waiting, limit);
            MutexGuard::unlocked(&mut waiting, || {
                if owes {
                    let mut lane = self.lane();
                    lane.settle();
                    self.owes.store(lane.owes(), Ordering::Relaxed);
                }
                self.look();
            });
        }
    }

    /// A queue pair has something in flight that the daemon counts. Called with its state locked.
    pub(crate) fn watch(&'static self, queue_pair: &'static QueuePair) {
        self.watched.lock().push(queue_pair);
        if !self.watches.swap(true, Ordering::Relaxed) {
            // Not between the look of `attend` and its sleep.
            let _waiting = self.waiting.lock();
            self.bell.notify_one();
        }
        self.have_pumped();
    }

    /// A queue pair is closed. Called with its state locked.
    pub(crate) fn unwatch(&self, queue_pair: &'static QueuePair) {
        let mut watched = self.watched.lock();
        watched.retain(|other| !ptr::eq(*other, queue_pair));
    }

    /// Looks after what is in flight, once a tick.
    pub(crate) fn look(&self) {
        advance_tick();
        if self.looked.swap(tick(), Ordering::Relaxed) == tick()
            || !self.watches.load(Ordering::Relaxed)
        {
            return;
        }
        // Queue pairs are locked before this list elsewhere, so not while it is locked.
        let queue_pairs = core::mem::take(&mut *self.watched.lock());
        let mut left = Vec::new();
        for queue_pair in queue_pairs {
            if queue_pair.look() {
                left.push(queue_pair);
            }
        }
        let mut watched = self.watched.lock();
        watched.append(&mut left);
        self.watches.store(!watched.is_empty(), Ordering::Relaxed);
    }

    /// The lane owes messages: somebody has to come back to it, and the program may not.
    #[cold]
    pub(crate) fn owe(&'static self) {
        {
            // Not between the look of `attend` and its sleep.
            let _waiting = self.waiting.lock();
            self.owes.store(true, Ordering::Relaxed);
            self.bell.notify_one();
        }
        self.have_pumped();
    }

    fn have_pumped(&'static self) {
        if !self.pumped.swap(true, Ordering::Relaxed) {
            pump::start(self);
        }
    }

    /// Whether the program pumped since the last call.
    pub(crate) fn take_polled(&self) -> bool {
        self.polled.swap(false, Ordering::Relaxed)
    }

    /// The lane has no slot; nobody rings when it has one again.
    pub(crate) fn is_full(&self) {
        self.full.store(true, Ordering::Relaxed);
    }

    /// Whether [`Shard::is_full`] was said since the last call.
    pub(crate) fn take_full(&self) -> bool {
        self.full.swap(false, Ordering::Relaxed)
    }

    /// Posts what may go by now; whether anything went.
    pub(crate) fn pump(&self) -> bool {
        // Queue pairs are locked before this list elsewhere, so not while it is locked.
        let waiting = self.waiting.lock().clone();
        let mut went = false;
        for queue_pair in waiting {
            went |= queue_pair.pump();
        }
        went
    }
}
