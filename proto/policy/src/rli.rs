//! Relative layer index: how soon an early-stage flow is needed.
//!
//! Implements MFS §4.4.1, `RLI = L_target − L_curr`, smaller first (Theorem 1, Appendix A).
//!
//! Departures. The paper leaves open what `L_curr` is for a batch that is queued behind another.
//! Its layers begin after the running batch's layers, so those are counted first:
//! `RLI = L_target + remaining layers ahead`. Here a batch has the *progress*
//! `L_curr − remaining layers ahead`, which is negative while the batch is queued, and
//! `RLI = max(0, L_target − progress)`. A flow whose layer has begun has an RLI of zero.

use laxity_types::Layer;

/// Largest RLI at which KV reuse has the level of collectives under `laxity`: its batch waits for
/// it, or will after the current layer.
pub(crate) const BLOCKING_LAYERS: u32 = 1;

/// Largest RLI at which KV reuse is above the last stage on the wire under `laxity`.
pub(crate) const NEAR_LAYERS: u32 = 8;

/// Reports whether KV reuse with this RLI has a level that lateness decides.
pub(crate) fn needed_soon(rli: u32) -> bool {
    rli > BLOCKING_LAYERS && rli <= NEAR_LAYERS
}

/// Returns the progress of a batch at layer `current` that waits for `layers_ahead` other layers.
pub fn progress(current: Layer, layers_ahead: u64) -> i64 {
    i64::from(current.0) - i64::try_from(layers_ahead).unwrap_or(i64::MAX / 2)
}

/// Returns the `RLI` of a flow whose bytes layer `target` consumes, in a batch at `progress`.
pub fn rli(target: Layer, progress: i64) -> u32 {
    u32::try_from(i64::from(target.0).saturating_sub(progress).max(0)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extremes_saturate() {
        assert_eq!(rli(Layer(u16::MAX), progress(Layer(0), u64::MAX)), u32::MAX);
        assert_eq!(rli(Layer(0), i64::MIN), u32::MAX);
        assert_eq!(rli(Layer(0), i64::MAX), 0);
    }
}
