//! Relative layer index: how soon an early-stage flow is needed.
//!
//! Implements MFS §4.4.1, `RLI = L_target − L_curr`, smaller first (Theorem 1, Appendix A).
//!
//! Departures. The paper leaves open what `L_curr` is for a batch that is queued behind another.
//! Its layers cannot begin before the running batch has done its own, so those are counted
//! first: `RLI = L_target + remaining layers ahead`. In the form used here a batch has
//! *progress* `= L_curr − remaining layers ahead` (negative while it is queued), and
//! `RLI = max(0, L_target − progress)`; a flow whose layer has begun already is needed now.

use laxity_types::Layer;

/// Progress of a batch that computes `current` after `layers_ahead` layers of other batches.
#[must_use]
pub fn progress(current: Layer, layers_ahead: u64) -> i64 {
    i64::from(current.0) - i64::try_from(layers_ahead).unwrap_or(i64::MAX / 2)
}

/// `RLI` of a flow whose bytes `target` consumes, in a batch at `progress`.
#[must_use]
pub fn rli(target: Layer, progress: i64) -> u32 {
    u32::try_from(i64::from(target.0).saturating_sub(progress).max(0)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collective_of_the_current_layer_has_index_zero_and_lookahead_counts_layers() {
        assert_eq!(rli(Layer(5), progress(Layer(5), 0)), 0);
        assert_eq!(rli(Layer(8), progress(Layer(5), 0)), 3);
    }

    #[test]
    fn a_flow_whose_layer_has_begun_is_needed_now() {
        assert_eq!(rli(Layer(2), progress(Layer(5), 0)), 0);
    }

    #[test]
    fn a_queued_batch_counts_what_is_left_of_the_running_one_first() {
        // The running batch computes layer 30 of 32: two layers left, this one's layer 1 is third.
        assert_eq!(rli(Layer(1), progress(Layer(0), 2)), 3);
    }

    #[test]
    fn extremes_saturate() {
        assert_eq!(rli(Layer(u16::MAX), progress(Layer(0), u64::MAX)), u32::MAX);
        assert_eq!(rli(Layer(0), i64::MIN), u32::MAX);
        assert_eq!(rli(Layer(0), i64::MAX), 0);
    }
}
