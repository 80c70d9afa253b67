//! Permits for transfers that any thread may wait for: the lanes of this process behind locks.
//!
//! A lane has one user and one sleeper at a time. Here, one thread may submit a transfer, another
//! wait for it, and a third report its completion. Each transfer is therefore in one of a few
//! lanes, usually alone: the first lane with the fewest transfers. A thread that sleeps doesn't
//! hold its lane. If several threads wait in one lane, one sleeps and wakes the others when it has
//! news.

use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use laxity_shm::record::Flow;
use laxity_shm::sleep::now_ns;

use super::HintHub;
use crate::client::Client;
use crate::lane::Lane;
use crate::ticket::{Permit, Ticket};

/// Number of lanes of a process, which are taken when needed.
pub(super) const LANES: usize = 8;
/// Number of polls before the first sleep, about the time in which a daemon that is awake answers.
const GLANCES: u32 = 32;
/// Longest wait of a thread without a poll of its own.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Longest wait of a thread without a poll while the lane has news that another thread has not
/// collected yet.
const LOOK_AGAIN: Duration = Duration::from_micros(200);

/// A lane that several threads share.
#[derive(Debug, Default)]
pub(super) struct Shard {
    inner: Mutex<Inner>,
    /// Notified when the thread that slept in the lane is awake.
    bell: Condvar,
    /// Number of transfers in the lane. Relaxed, because it is a hint for choosing a lane.
    load: AtomicUsize,
}

#[derive(Debug, Default)]
struct Inner {
    lane: Option<Lane>,
    asleep: bool,
}

impl Shard {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // The lane stays valid after a panic.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn lane(&mut self, client: &Client) -> &mut Lane {
        self.lane.get_or_insert_with(|| client.lane())
    }
}

/// A transfer that waits for permits. Dropping it cancels what was not sent.
#[derive(Debug)]
pub struct Transfer {
    hub: &'static HintHub,
    shard: usize,
    /// The epoch of the process that submitted it. A forked child must not use it.
    epoch: u32,
    bytes: u64,
    state: Mutex<TransferState>,
}

#[derive(Debug)]
struct TransferState {
    ticket: Ticket,
    completed: u64,
    /// The permitted bytes of a transfer that is cancelled or sent completely. Nothing more is
    /// reported to the daemon then.
    over: Option<u64>,
}

impl TransferState {
    fn permitted(&self) -> u64 {
        self.over.unwrap_or_else(|| self.ticket.permitted())
    }
}

/// The error of reporting more bytes complete than were permitted. Nothing was reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{reported} bytes cannot be complete: {permitted} were permitted so far, and {completed} of \
     them reported before"
)]
pub struct Excess {
    /// Bytes in the call.
    pub reported: u64,
    /// Bytes of the transfer that are permitted so far.
    pub permitted: u64,
    /// Bytes reported before.
    pub completed: u64,
}

/// The result of a poll.
enum Look {
    Permitted(Permit),
    /// There is no permit, and the caller may sleep.
    Sleep(crate::wait::Sleep),
    /// There is no permit, and another thread sleeps.
    Others,
    /// There is no permit, and no thread may sleep in this lane now.
    Busy,
}

const OVER: Permit = Permit { bytes: 0, level: 0, dscp: 0, last: true, bypassed: false };

/// Returns the index of the first lane with the fewest transfers.
fn least_loaded(hub: &HintHub) -> usize {
    let load = |index: &usize| hub.shards[*index].load.load(Ordering::Relaxed);
    (0..hub.shards.len()).min_by_key(load).unwrap_or(0)
}

impl Transfer {
    pub(super) fn submit(hub: &'static HintHub, flow: &Flow) -> Self {
        Self::submit_to(hub, least_loaded(hub), flow)
    }

    fn submit_to(hub: &'static HintHub, shard: usize, flow: &Flow) -> Self {
        let place = &hub.shards[shard];
        place.load.fetch_add(1, Ordering::Relaxed);
        let ticket = place.lock().lane(&hub.client).submit(flow);
        Self {
            hub,
            shard,
            epoch: hub.epoch,
            bytes: flow.bytes,
            state: Mutex::new(TransferState { ticket, completed: 0, over: None }),
        }
    }

    /// Returns the transfer's size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the bytes permitted so far.
    #[must_use]
    pub fn permitted(&self) -> u64 {
        self.lock().map_or(self.bytes, |state| state.permitted())
    }

    /// Reports whether nothing more will be permitted.
    pub fn is_done(&self) -> bool {
        self.lock().is_none_or(|state| state.ticket.is_done())
    }

    fn shard(&self) -> &'static Shard {
        &self.hub.shards[self.shard]
    }

    /// Reports whether this is a forked child of the process that submitted the transfer. The
    /// transfer's lane must not be used then, nor waited for.
    fn is_foreign(&self) -> bool {
        self.epoch != super::epoch()
    }

    /// Locks the state. Returns `None` in a forked child if another thread held the lock.
    fn lock(&self) -> Option<MutexGuard<'_, TransferState>> {
        if self.is_foreign() {
            return self.state.try_lock().ok();
        }
        Some(self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns a permit for further bytes, or `None`. Blocks only while another thread polls.
    pub fn poll(&self) -> Option<Permit> {
        let Some(mut state) = self.lock() else { return Some(OVER) };
        if self.is_foreign() {
            return (!state.ticket.is_done()).then(|| state.ticket.rest());
        }
        let mut inner = self.shard().lock();
        inner.lane(&self.hub.client).poll(&mut state.ticket)
    }

    fn look(&self) -> Look {
        let Some(mut state) = self.lock() else { return Look::Permitted(OVER) };
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

    /// Waits for the next permit, for `limit` at most, and then returns `None`. After the last
    /// permit it returns an empty last permit. Without a limit, the wait ends at the latest when
    /// the daemon is gone.
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

    /// Waits for the permits of the whole transfer, for `limit` at most. Returns whether bytes were
    /// bypassed, or `None` after `limit`.
    pub fn wait_whole(&self, limit: Duration) -> Option<bool> {
        let end = Instant::now().checked_add(limit);
        let mut is_bypassed = false;
        loop {
            let permit = if limit.is_zero() {
                self.poll()
            } else {
                self.wait(end.map(|end| end.saturating_duration_since(Instant::now())))
            };
            is_bypassed |= permit?.bypassed;
            if self.is_done() {
                return Some(is_bypassed);
            }
        }
    }

    /// Reports that permitted `bytes` were delivered.
    ///
    /// # Errors
    /// [`Excess`]. Nothing was reported then.
    pub fn complete(&self, bytes: u64) -> Result<(), Excess> {
        let Some(mut state) = self.lock() else { return Ok(()) };
        if state.over.is_some() {
            // The transfer was cancelled, so the daemon expects no completions.
            return Ok(());
        }
        let (permitted, completed) = (state.permitted(), state.completed);
        if bytes > permitted.saturating_sub(completed) {
            return Err(Excess { reported: bytes, permitted, completed });
        }
        state.completed += bytes;
        if !self.is_foreign() && bytes > 0 {
            let mut inner = self.shard().lock();
            inner.lane(&self.hub.client).complete(&state.ticket, bytes);
        }
        Ok(())
    }

    /// Cancels what was not permitted, or not reported as completed. Reports whether there was any.
    pub fn cancel(&self) -> bool {
        let Some(mut state) = self.lock() else { return false };
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
    hub: &'static HintHub,
    shard: usize,
    epoch: u32,
    /// Whether the last wait didn't sleep, because the lane had other news. Relaxed, as a hint.
    in_vain: AtomicBool,
}

impl Transfers {
    pub(super) fn open(hub: &'static HintHub) -> Self {
        let shard = least_loaded(hub);
        hub.shards[shard].load.fetch_add(1, Ordering::Relaxed);
        Self { hub, shard, epoch: hub.epoch, in_vain: AtomicBool::new(false) }
    }

    /// Does the same as [`super::submit`] in this lane.
    pub fn submit(&self, asked: &super::Asked) -> Transfer {
        if self.epoch != super::epoch() {
            return super::submit(asked);
        }
        let flow = super::flow(self.hub, now_ns(), asked);
        Transfer::submit_to(self.hub, self.shard, &flow)
    }

    /// Sleeps until a transfer may have a permit, or `limit` has passed. May return early. The
    /// caller polls all transfers, then calls again.
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
            // The news may be for other threads of the lane that don't come for it.
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
    /// Wakes the other threads after the sleeper woke.
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
