//! Correction of estimates by the outcome of earlier ones (architecture §4.4).

use super::Admission;
use crate::prune::{BatchSlot, PACE_UNIT};
use crate::time::{Span, Time};

/// Range to which the ratio of observed to estimated communication time is clamped.
const PACE_RANGE: core::ops::RangeInclusive<u64> = PACE_UNIT as u64 / 8..=PACE_UNIT as u64 * 8;

impl Admission {
    /// Records the first estimate of each batch, for [`Admission::observe_pace`].
    pub(super) fn note_forecasts(&mut self) {
        if self.config.correction_permille == 0 {
            self.unforecast.clear();
            return;
        }
        let mut unforecast = core::mem::take(&mut self.unforecast);
        // A slot may have been used more than once since the last run.
        unforecast.sort_unstable();
        unforecast.dedup();
        unforecast.retain(|&slot| {
            let Some(batch) = &mut self.batches[slot as usize] else { return false };
            let estimate = self.pruner.estimates()[self.ranks[slot as usize] as usize];
            if estimate.bytes > 0 {
                batch.forecast.get_or_insert((estimate.ready, estimate.communication()));
            }
            batch.forecast.is_none()
        });
        self.unforecast = unforecast;
    }

    /// Corrects the pace by a batch whose requests all ended. A batch with members left was
    /// aborted, so its duration does not count.
    pub(super) fn observe_pace(&mut self, now: Time, slot: BatchSlot) {
        if !self.traffic.members_of(slot).is_empty() {
            return;
        }
        let Some((ready, Span(forecast_ns @ 1..))) = self.batch_mut(slot).forecast else { return };
        let observed_ns = now.since(ready).0;
        let ratio = u128::from(observed_ns) * u128::from(PACE_UNIT) / u128::from(forecast_ns);
        let sample = u64::try_from(ratio).unwrap_or(u64::MAX);
        let sample = sample.clamp(*PACE_RANGE.start(), *PACE_RANGE.end());
        let weight = u64::from(self.config.correction_permille);
        self.pace = ((u64::from(self.pace) * (1000 - weight) + sample * weight) / 1000) as u32;
    }
}
