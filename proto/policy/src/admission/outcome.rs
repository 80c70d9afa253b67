//! What the last run decided, for reports.

use laxity_types::{BatchId, RequestId};

use super::{Admission, Decision, PruneCause, UNRANKED};
use crate::prune::{BatchSlot, Estimate, Turn};
use crate::time::Time;

impl Admission {
    /// `σ` of the last run with the RED of each batch, less those that have departed since.
    pub fn ranking(&self) -> impl Iterator<Item = (BatchId, Time)> {
        self.turns.iter().filter_map(|turn| {
            // A slot that is used again belongs to a batch that the run did not see.
            self.ranked(turn.batch)
        })
    }

    /// Those of [`Admission::ranking`] whose RED may differ from what it was before the last run.
    pub fn rescored(&self) -> impl Iterator<Item = (BatchId, Time)> {
        self.rescored.iter().filter_map(|&slot| self.ranked(slot))
    }

    fn ranked(&self, slot: BatchSlot) -> Option<(BatchId, Time)> {
        let batch = self.batches[slot as usize].as_ref()?;
        (self.ranks[slot as usize] != UNRANKED).then_some((batch.id, batch.red.score))
    }

    /// What the last run decided about `batch`; `None` if it was not there.
    #[must_use]
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

    /// Of the batches that the last run saw and that are still there, those that it took to end
    /// after their `D^Lo`.
    #[must_use]
    pub fn infeasible(&self) -> usize {
        let estimates = self.pruner.estimates().iter();
        let late = |(turn, estimate): &(&Turn, &Estimate)| {
            self.ranked(turn.batch).is_some() && estimate.is_later_than(turn.limit)
        };
        self.turns.iter().zip(estimates).filter(late).count()
    }

    /// When a batch will have computed, as it looks at `now`: one that waits, after those before it
    /// on its unit.
    #[must_use]
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

    /// Why a request is pruned; `None` if it is not.
    #[must_use]
    pub fn prune_cause(&self, request: RequestId) -> Option<PruneCause> {
        self.pruned.get(&request).copied()
    }
}
