//! Leave to send for transfers that any thread may wait for: the lanes of this process behind
//! locks.
//!
//! A lane has one user at a time, and one sleeper. Here a transfer may be submitted by one thread,
//! waited for by another and reported complete by a third. So each transfer is in one of a few
//! lanes, mostly alone there: it goes to the first lane that has none, else to the one with the
//! fewest. Nobody holds a lane while he sleeps. Of several who wait in one lane one sleeps, and
//! wakes the others when it has news.

use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use laxity_shm::record::Flow;
use laxity_shm::sleep::now_ns;

use super::Hub;
use crate::client::Client;
use crate::lane::Lane;
use crate::ticket::{Permit, Ticket};

/// Lanes of a process, taken when needed.
pub(super) const LANES: usize = 8;
/// Looks at a lane before the first sleep: about the time in which a daemon that is awake answers.
const GLANCES: u32 = 32;
/// Longest that one who waits goes without a look of his own.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// The same while the lane has news for somebody else, who has not come for them yet.
const LOOK_AGAIN: Duration = Duration::from_micros(200);

/// One lane.
#[derive(Debug, Default)]
pub(super) struct Shard {
    inner: Mutex<Inner>,
    /// Rung when the sleeper wakes.
    bell: Condvar,
    /// Transfers in it. Relaxed: a hint which lane to take.
    load: AtomicUsize,
}

#[derive(Debug, Default)]
struct Inner {
    lane: Option<Lane>,
    asleep: bool,
}

impl Shard {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic in here leaves a lane that is still one.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn lane(&mut self, client: &Client) -> &mut Lane {
        self.lane.get_or_insert_with(|| client.lane())
    }
}

/// A transfer that asked for leave to send. When it is dropped, what was not sent of it is given
/// up.
#[derive(Debug)]
pub struct Transfer {
    hub: &'static Hub,
    shard: usize,
    /// Of the process that submitted it; a forked child has no part in it.
    epoch: u32,
    bytes: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    ticket: Ticket,
    completed: u64,
    /// It was given up, or all of it is sent: nothing more is to be said of it to the daemon. Bytes
    /// that had been permitted by then.
    over: Option<u64>,
}

impl State {
    fn permitted(&self) -> u64 {
        self.over.unwrap_or_else(|| self.ticket.permitted())
    }
}

/// More was reported complete than was permitted; nothing was reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{reported} bytes cannot be complete: {permitted} were permitted so far, and {completed} of \
     them reported before"
)]
pub struct Excess {
    /// What was reported.
    pub reported: u64,
    /// Permitted so far.
    pub permitted: u64,
    /// Reported before.
    pub completed: u64,
}

/// What a look gave.
enum Look {
    Permitted(Permit),
    /// Nothing, and nobody sleeps: here is the sleep.
    Sleep(crate::wait::Sleep),
    /// Nothing, and somebody else sleeps.
    Others,
    /// Nothing, but there is no sleeping in this lane now.
    Busy,
}

const OVER: Permit = Permit {
    bytes: 0,
    level: 0,
    dscp: 0,
    last: true,
    bypassed: false,
};

/// The first of the lanes with the least to do.
fn least_loaded(hub: &Hub) -> usize {
    let load = |index: &usize| hub.shards[*index].load.load(Ordering::Relaxed);
    (0..hub.shards.len()).min_by_key(load).unwrap_or(0)
}

impl Transfer {
    pub(super) fn submit(hub: &'static Hub, flow: &Flow) -> Self {
        Self::submit_to(hub, least_loaded(hub), flow)
    }

    fn submit_to(hub: &'static Hub, shard: usize, flow: &Flow) -> Self {
        let place = &hub.shards[shard];
        place.load.fetch_add(1, Ordering::Relaxed);
        let ticket = place.lock().lane(&hub.client).submit(flow);
        Self {
            hub,
            shard,
            epoch: hub.epoch,
            bytes: flow.bytes,
            state: Mutex::new(State {
                ticket,
                completed: 0,
                over: None,
            }),
        }
    }

    /// Bytes of it.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes permitted so far.
    #[must_use]
    pub fn permitted(&self) -> u64 {
        self.lock().map_or(self.bytes, |state| state.permitted())
    }

    /// Nothing more will be permitted.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.lock().is_none_or(|state| state.ticket.is_done())
    }

    fn shard(&self) -> &'static Shard {
        &self.hub.shards[self.shard]
    }

    /// Whether this is a forked child of the process that submitted it: then its lane is not to be
    /// touched, nor waited for.
    fn is_foreign(&self) -> bool {
        self.epoch != super::epoch()
    }

    /// `None` in a forked child where another thread of the parent held it.
    fn lock(&self) -> Option<MutexGuard<'_, State>> {
        if self.is_foreign() {
            return self.state.try_lock().ok();
        }
        Some(self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What may be sent now beyond earlier permits, `None` if nothing. Never blocks for longer than
    /// another thread's look.
    #[must_use]
    pub fn poll(&self) -> Option<Permit> {
        let Some(mut state) = self.lock() else {
            return Some(OVER);
        };
        if self.is_foreign() {
            return (!state.ticket.is_done()).then(|| state.ticket.rest());
        }
        let mut inner = self.shard().lock();
        inner.lane(&self.hub.client).poll(&mut state.ticket)
    }

    fn look(&self) -> Look {
        let Some(mut state) = self.lock() else {
            return Look::Permitted(OVER);
        };
        if state.ticket.is_done() {
            return Look::Permitted(OVER);
        }
        if self.is_foreign() {
            return Look::Permitted(state.ticket.rest());
        }
        let mut inner = self.shard().lock();
        let asleep = inner.asleep;
        let lane = inner.lane(&self.hub.client);
        if let Some(permit) = lane.poll(&mut state.ticket) {
            return Look::Permitted(permit);
        }
        if asleep {
            return Look::Others;
        }
        match lane.prepare_sleep() {
            Some(sleep) => {
                inner.asleep = true;
                Look::Sleep(sleep)
            }
            None => Look::Busy,
        }
    }

    /// Waits for the next permit, `limit` at most: `None` then. After the last one it gives an
    /// empty last permit. Without a limit it ends, too: with the daemon, at the latest.
    #[must_use]
    pub fn wait(&self, limit: Option<Duration>) -> Option<Permit> {
        for _ in 0..GLANCES {
            if let Some(permit) = self.poll() {
                return Some(permit);
            }
            if self.is_done() {
                return Some(OVER);
            }
            core::hint::spin_loop();
        }
        let end = limit.and_then(|limit| Instant::now().checked_add(limit));
        loop {
            let left = match end {
                None => Duration::MAX,
                Some(end) => end.saturating_duration_since(Instant::now()),
            };
            let shard = self.shard();
            match self.look() {
                Look::Permitted(permit) => return Some(permit),
                look if left.is_zero() => {
                    if matches!(look, Look::Sleep(_)) {
                        shard.wake();
                    }
                    return None;
                }
                Look::Sleep(sleep) => {
                    sleep.sleep_within(left.min(LOOK_EVERY));
                    shard.wake();
                }
                Look::Others => shard.nap(left.min(LOOK_EVERY)),
                Look::Busy => shard.nap(left.min(LOOK_AGAIN)),
            }
        }
    }

    /// `bytes` that were permitted have left the wire.
    ///
    /// # Errors
    /// [`Excess`]; nothing was reported then.
    pub fn complete(&self, bytes: u64) -> Result<(), Excess> {
        let Some(mut state) = self.lock() else {
            return Ok(());
        };
        if state.over.is_some() {
            // Given up meanwhile: the daemon counts on nothing any more.
            return Ok(());
        }
        let (permitted, completed) = (state.permitted(), state.completed);
        if bytes > permitted.saturating_sub(completed) {
            return Err(Excess {
                reported: bytes,
                permitted,
                completed,
            });
        }
        state.completed += bytes;
        if !self.is_foreign() && bytes > 0 {
            let mut inner = self.shard().lock();
            inner.lane(&self.hub.client).complete(&state.ticket, bytes);
        }
        Ok(())
    }

    /// Gives up what was not permitted and what was not sent; whether there was any.
    pub fn cancel(&self) -> bool {
        let Some(mut state) = self.lock() else {
            return false;
        };
        if state.over.is_some() {
            return false;
        }
        let permitted = state.permitted();
        state.over = Some(permitted);
        let open = !state.ticket.is_done() || state.completed < permitted;
        if self.is_foreign() {
            return open;
        }
        if open {
            let ticket = core::mem::take(&mut state.ticket);
            self.shard().lock().lane(&self.hub.client).cancel(ticket);
        }
        self.shard().load.fetch_sub(1, Ordering::Relaxed);
        open
    }
}

/// Transfers in one lane, so that one thread can wait for any of them.
#[derive(Debug)]
pub struct Transfers {
    hub: &'static Hub,
    shard: usize,
    epoch: u32,
    /// The last wait found something else to look at and did not sleep. Relaxed: a hint.
    in_vain: AtomicBool,
}

impl Transfers {
    pub(super) fn open(hub: &'static Hub) -> Self {
        let shard = least_loaded(hub);
        hub.shards[shard].load.fetch_add(1, Ordering::Relaxed);
        Self {
            hub,
            shard,
            epoch: hub.epoch,
            in_vain: AtomicBool::new(false),
        }
    }

    /// [`super::submit`], in this lane.
    #[must_use]
    pub fn submit(&self, asked: &super::Asked) -> Transfer {
        if self.epoch != super::epoch() {
            return super::submit(asked);
        }
        let flow = super::flow(self.hub, now_ns(), asked);
        Transfer::submit_to(self.hub, self.shard, &flow)
    }

    /// Sleeps until one of them may have more to say, or `limit` has passed. May return early: poll
    /// them all, then come again.
    pub fn wait_any(&self, limit: Duration) {
        if self.epoch != super::epoch() {
            return std::thread::sleep(limit.min(LOOK_AGAIN));
        }
        let shard = &self.hub.shards[self.shard];
        let sleep = {
            let mut inner = shard.lock();
            if inner.asleep {
                drop(inner);
                return shard.nap(limit.min(LOOK_EVERY));
            }
            let sleep = inner.lane(&self.hub.client).prepare_sleep();
            inner.asleep = sleep.is_some();
            sleep
        };
        match sleep {
            Some(sleep) => {
                sleep.sleep_within(limit);
                shard.wake();
                self.in_vain.store(false, Ordering::Relaxed);
            }
            // News, perhaps of others in the lane who don't come for them.
            None if self.in_vain.swap(true, Ordering::Relaxed) => {
                shard.nap(limit.min(LOOK_AGAIN));
            }
            None => {}
        }
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        if self.epoch == super::epoch() {
            let load = &self.hub.shards[self.shard].load;
            load.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if self.cancel() {
            self.hub.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Shard {
    /// The sleeper is up.
    fn wake(&self) {
        let mut inner = self.lock();
        inner.asleep = false;
        if let Some(lane) = &mut inner.lane {
            lane.slept();
        }
        drop(inner);
        self.bell.notify_all();
    }

    fn nap(&self, limit: Duration) {
        let inner = self.lock();
        let _ = self.bell.wait_timeout(inner, limit);
    }
}
