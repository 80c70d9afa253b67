//! Which members of a batch count as started.
//!
//! A daemon says at each layer that a batch has started. Only the first time are all members
//! visited. Later times visit the requests that joined meanwhile, so that the hints of a process
//! cost no more than the hints that came before them.

use laxity_types::{BatchId, RequestId};

use super::Admission;
use crate::prune::BatchSlot;
use crate::time::Time;

impl Admission {
    pub(super) fn batch_started(&mut self, now: Time, batch: BatchId) -> bool {
        let Some(&slot) = self.batch_slots.get(&batch) else { return false };
        let state = self.batch_mut(slot);
        state.ahead = None;
        if state.started.is_some() {
            for request in core::mem::take(&mut state.joined_late) {
                if let Some(&member) = self.requests.get(&request)
                    && self.traffic.batch_of(member) == slot
                {
                    self.traffic.started(member);
                }
            }
            return true;
        }
        state.started = Some(now);
        for index in 0..self.traffic.members_of(slot).len() {
            let member = self.traffic.members_of(slot)[index];
            self.traffic.started(member);
        }
        true
    }

    /// Notes a request that joined a batch and does not count as started.
    pub(super) fn joined_unstarted(&mut self, batch: BatchSlot, request: RequestId) {
        let members = self.traffic.members_of(batch).len();
        let state = self.batch_mut(batch);
        if state.started.is_none() {
            return;
        }
        state.joined_late.push(request);
        // A request may leave and join again and again.
        if state.joined_late.len() > 2 * members {
            let mut late = core::mem::take(&mut state.joined_late);
            late.sort_unstable();
            late.dedup();
            late.retain(|request| {
                let slot = self.requests.get(request);
                slot.is_some_and(|&slot| self.traffic.batch_of(slot) == batch)
            });
            self.batch_mut(batch).joined_late = late;
        }
    }
}
