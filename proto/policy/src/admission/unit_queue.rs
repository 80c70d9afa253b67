//! Batches that compute one after the other on one unit.

use laxity_types::BatchId;

use super::{Admission, AdmissionBatch, QUEUE_MAX};
use crate::prune::BatchSlot;
use crate::time::{Span, Time};

impl Admission {
    pub(super) fn batch_queued(&mut self, now: Time, batch: BatchId, ahead: BatchId) -> bool {
        let known = |id| self.batch_slots.get(id).copied();
        let (Some(slot), Some(before)) = (known(&batch), known(&ahead)) else { return false };
        let starts_a_ring = slot == before || self.ahead_of(before).any(|other| other == slot);
        if starts_a_ring || self.batch_mut(slot).started.is_some() {
            return false;
        }
        let ahead = Some((before, self.batch_mut(before).arrival));
        if self.batch_mut(slot).ahead != ahead {
            self.batch_mut(slot).ahead = ahead;
            self.trigger(now);
        }
        true
    }

    /// Returns the batches that compute before this one on its unit, the closest first. At most
    /// [`QUEUE_MAX`], so that a longer cycle ends as well.
    pub(super) fn ahead_of(&self, slot: BatchSlot) -> impl Iterator<Item = BatchSlot> {
        let next = |slot: &BatchSlot| {
            let (before, arrival) = self.batches[*slot as usize].as_ref()?.ahead?;
            let same = self.batches[before as usize].as_ref()?.arrival == arrival;
            same.then_some(before)
        };
        core::iter::successors(next(&slot), next).take(QUEUE_MAX)
    }

    /// Returns how long the batch itself has still to compute.
    pub(super) fn compute_left(&self, now: Time, slot: BatchSlot) -> Span {
        let left = |batch: &AdmissionBatch| {
            let elapsed = batch.started.map_or(Span::ZERO, |at| now.since(at));
            Span(batch.compute.0.saturating_sub(elapsed.0))
        };
        self.batches[slot as usize].as_ref().map_or(Span::ZERO, left)
    }
}
