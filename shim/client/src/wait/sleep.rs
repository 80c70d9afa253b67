//! Sleeping until a permit comes, without holding the lane.

use std::time::Duration;

use laxity_shm::lane::LaneMemory;
use laxity_shm::layout::attention;
use laxity_shm::sleep::{Announced, Awaited};

use super::{MISSES, SLICE, SLICE_UNORDERED, any_news};
use crate::lane::Lane;
use crate::lane::handover::LOOK_EVERY;
use crate::lane_binding::LaneBinding;

/// A sleep that was announced to the daemon. It needs no access to the lane, so other threads can
/// use the lane meanwhile. See [`Lane::prepare_sleep`].
#[derive(Debug)]
pub struct Sleep {
    /// `None` while flows wait for the next daemon. Nobody wakes the thread when that daemon comes.
    announced: Option<(LaneMemory, Announced)>,
    slice: Duration,
}

impl Sleep {
    /// Sleeps until a permit comes in the lane, for [`SLICE`] at most. May return early. Call
    /// [`Lane::slept`] after it.
    pub fn sleep(self) {
        self.sleep_within(SLICE);
    }

    /// Returns how long the sleep lasts at most.
    pub fn limit(&self) -> Duration {
        self.slice
    }

    /// Reports whether a wake-up came, so that the sleep would end at once.
    pub fn is_over(&self) -> bool {
        let woken = |(lane, announced): &(LaneMemory, Announced)| {
            lane.header().waiter.woken_since(*announced)
        };
        self.announced.as_ref().is_some_and(woken)
    }

    /// Sleeps like [`Sleep::sleep`], but no longer than `limit`.
    pub fn sleep_within(self, limit: Duration) {
        let slice = self.slice.min(limit);
        match self.announced {
            Some((lane, announced)) => lane.header().waiter.sleep(announced, slice),
            None => std::thread::sleep(slice),
        }
    }
}

impl Lane {
    /// Prepares to sleep until a ticket of this lane has a permit. Returns `None` if a ticket has a
    /// permit by now, if no ticket waits, or if the caller should first check something else. The
    /// caller polls the tickets then. One thread at a time may sleep on a lane.
    pub fn prepare_sleep(&mut self) -> Option<Sleep> {
        if self.has_unsent() {
            self.send_unsent();
        }
        if self.waits_for_next() {
            return Some(Sleep { announced: None, slice: LOOK_EVERY });
        }
        if self.has_moved() || !self.is_daemon_alive(self.core.clock.now_ns()) {
            return None;
        }
        self.spin.misses = MISSES;
        let binding = self.binding.as_mut()?;
        if binding.pending.is_empty() {
            return None;
        }
        binding.turn += 1;
        let lane = binding.producer.memory().clone();
        let announced = lane.header().waiter.announce(Awaited::Any, binding.turn);
        if any_news(binding) || binding.header.attention() & attention::UNSCHEDULED != 0 {
            lane.header().waiter.awake();
            return None;
        }
        let slice = if announced.ordered { SLICE } else { SLICE_UNORDERED };
        Some(Sleep { announced: Some((lane, announced)), slice })
    }

    /// Ends the sleep, so that the daemon need not wake a thread of this lane.
    pub fn slept(&mut self) {
        if let Some(binding) = &self.binding
            && binding.session.lost_at().is_none()
        {
            binding.producer.memory().header().waiter.awake();
        }
    }

    /// Reports whether less than half of the lane is taken by waiting flows. Submit no more while
    /// it is not, since a full lane bypasses further flows.
    #[inline]
    pub fn has_room(&self) -> bool {
        self.binding.as_ref().map_or_else(|| self.handover.has_room(), LaneBinding::has_room)
    }
}
