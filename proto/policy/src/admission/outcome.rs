//! The decisions of the last run, for reports.

use laxity_types::{BatchId, RequestId};

use super::{Admission, Decision, PruneCause, UNRANKED};
use crate::prune::{BatchSlot, Estimate, Turn};
use crate::time::Time;

impl Admission {
    /// Returns `σ` of the last run with each batch's RED, without batches that departed since.
    pub fn ranking(&self) -> impl Iterator<Item = (BatchId, Time)> {
        self.turns.iter().filter_map(|turn| {
            // A reused slot belongs to a batch that the run did not see.
            self.ranked(turn.batch)
        })
    }

    /// Returns the part of [`Admission::ranking`] whose RED the last run computed anew.
    pub fn rescored(&self) -> impl Iterator<Item = (BatchId, Time)> {
        self.rescored.iter().filter_map(|&slot| self.ranked(slot))
    }

    fn ranked(&self, slot: BatchSlot) -> Option<(BatchId, Time)> {
        let batch = self.batches[slot as usize].as_ref()?;
        (self.ranks[slot as usize] != UNRANKED).then_some((batch.id, batch.red.score))
    }

    /// Returns what the last run decided about `batch`, or `None` if it did not see the batch.
    pub fn last_decision(&self, batch: BatchId) -> Option<Decision> {
        let &slot = self.batch_slots.get(&batch)?;
        let state = self.batches[slot as usize].as_ref()?;
        let rank = self.ranks[slot as usize];
        if rank == UNRANKED {
            return None;
        }
        let rank = rank as usize;
        let estimate = self.pruner.estimates()[rank];
        let members = self.traffic.members_of(slot).iter();
        let mut pruned: Vec<RequestId> = members
            .map(|&member| self.traffic.member(member))
            .filter(|member| member.pruned)
            .map(|member| member.request)
            .collect();
        pruned.sort_unstable();
        Some(Decision {
            decided_at: self.decided_at,
            rank,
            red: state.red,
            estimate,
            feasible: !estimate.is_later_than(state.red.loose),
            pruned,
        })
    }

    /// Returns how many of the last run's batches were estimated to end after their `D^Lo`. Batches
    /// that departed since do not count.
    pub fn infeasible(&self) -> usize {
        let estimates = self.pruner.estimates().iter();
        let late = |(turn, estimate): &(&Turn, &Estimate)| {
            self.ranked(turn.batch).is_some() && estimate.is_later_than(turn.limit)
        };
        self.turns.iter().zip(estimates).filter(late).count()
    }

    /// Returns when a batch will have computed, as estimated at `now`. The computation of batches
    /// before it on its unit counts if it waits.
    pub fn ready(&self, now: Time, batch: BatchId) -> Option<Time> {
        let &slot = self.batch_slots.get(&batch)?;
        let state = self.batches[slot as usize].as_ref()?;
        if let Some(started) = state.started {
            return Some(started + state.compute);
        }
        let mut ready = now + state.compute;
        for before in self.ahead_of(slot) {
            ready = ready + self.compute_left(now, before);
        }
        Some(ready)
    }

    /// Returns why a request is pruned, or `None` if it is not.
    pub fn prune_cause(&self, request: RequestId) -> Option<PruneCause> {
        self.pruned.get(&request).map(|&(cause, _)| cause)
    }
}
