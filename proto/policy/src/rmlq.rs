//! The reverse multi-level queue: the levels of flows and the rule that a flow is only promoted.
//!
//! Implements MFS §4.2 (a flow starts low and is promoted), §4.3 (geometric thresholds) and §5 (RLI
//! mapped to the levels). `K` levels, `P_1` highest; thresholds
//!
//! ```text
//! Q_i = U · E^(−i)        1 ≤ i ≤ K−1
//! level(mlu) = 1 + #{ i : mlu < Q_i }
//! ```
//!
//! so that `P_1` has the flows with `mlu ≥ Q_1` and `P_K` those with `mlu < Q_{K−1}`.
//!
//! Departure: the paper calls the threshold for promotion from `P_j` `τ_j` and sets `τ_K = +∞` "so
//! that even the loosest flows are captured in the lowest queue". Promotion on `mlu ≥ τ_K` could
//! then never happen, and no flow would leave `P_K`. Laxity follows the intent: `P_K` has no lower
//! bound, and a flow leaves `P_j` when it reaches `Q_{j−1}`.

use laxity_types::Level;

const THRESHOLDS_MAX: usize = Level::COUNT_MAX as usize - 1;

/// The levels of one port and the thresholds between them.
#[derive(Clone, Debug, PartialEq)]
pub struct Ladder {
    levels: u8,
    thresholds: [f64; THRESHOLDS_MAX],
}

impl Ladder {
    /// Creates `levels` (`K`) levels with the thresholds of `scale` (`U`) and `base` (`E`), which
    /// [`LinkConfig::validate`](crate::LinkConfig::validate) checks. `K` is clamped to the valid
    /// range.
    pub fn new(levels: u8, scale: f64, base: f64) -> Self {
        let levels = levels.clamp(2, Level::COUNT_MAX);
        let mut thresholds = [0.0; THRESHOLDS_MAX];
        let mut threshold = scale;
        for slot in thresholds.iter_mut().take(usize::from(levels) - 1) {
            // Repeated division instead of `powi`, whose precision is not specified: the same
            // configuration must give the same thresholds on every machine.
            threshold /= base;
            *slot = threshold;
        }
        Self { levels, thresholds }
    }

    /// Returns `K`, the number of levels.
    pub fn levels(&self) -> u8 {
        self.levels
    }

    /// Returns `P_K`, the lowest level above the scavenger.
    #[must_use]
    pub fn lowest(&self) -> Level {
        Level(self.levels)
    }

    /// Returns `Q_i`, for `1 ≤ i ≤ K−1`.
    pub fn threshold(&self, i: u8) -> Option<f64> {
        (i >= 1 && i < self.levels).then(|| self.thresholds[usize::from(i) - 1])
    }

    /// Returns the level of a last-stage flow with this MLU. NaN gives the lowest level.
    #[must_use]
    pub fn level_of(&self, mlu: f64) -> Level {
        let thresholds = &self.thresholds[..usize::from(self.levels) - 1];
        // NaN reaches no threshold, so this count leaves it in `P_K`.
        let reached = thresholds.iter().filter(|&&q| mlu >= q).count();
        Level(self.levels - reached as u8)
    }

    /// Returns the MLU at which a flow of `level` is promoted. Returns `None` for `P_1`, which is
    /// the highest level, and for the scavenger, which no flow leaves by urgency.
    pub fn leaves_at(&self, level: Level) -> Option<f64> {
        if level.0 > self.levels {
            return None;
        }
        self.threshold(level.0.saturating_sub(1))
    }

    /// Returns the level of an early-stage flow: `min(1 + rli, K − 1)` below the reserved `P_1`.
    /// Collectives have `rli = 0` and so enter `P_2`.
    #[must_use]
    pub fn early(&self, rli: u32) -> Level {
        Level(1 + rli.saturating_add(1).min(u32::from(self.levels) - 1) as u8)
    }
}

/// Returns the higher of two levels, because promotion is monotonic (MFS §4.3).
pub fn promoted(current: Level, candidate: Level) -> Level {
    current.min(candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_level_counts_the_thresholds_above_the_urgency() {
        let ladder = Ladder::new(4, 0.5, 4.0); // Q = 0.125, 0.03125, 0.0078125
        for (mlu, level) in [
            (f64::INFINITY, 1),
            (1.0, 1),
            (0.125, 1),
            (0.1249, 2),
            (0.03125, 2),
            (0.03, 3),
            (0.0078, 4),
            (0.0, 4),
            (f64::NAN, 4),
        ] {
            assert_eq!(ladder.level_of(mlu), Level(level), "mlu {mlu}");
        }
    }

    #[test]
    fn early_stages_stay_below_the_reserved_level_and_inside_the_ladder() {
        let ladder = Ladder::new(8, 0.5, 4.0);
        let levels: Vec<u8> = (0..10).map(|rli| ladder.early(rli).0).collect();
        assert_eq!(levels, [2, 3, 4, 5, 6, 7, 8, 8, 8, 8]);
        assert_eq!(ladder.early(u32::MAX), Level(8));
        assert_eq!(Ladder::new(2, 0.5, 4.0).early(0), Level(2));
        assert_eq!(Ladder::new(2, 0.5, 4.0).early(9), Level(2));
        assert_eq!([ladder.leaves_at(Level(1)), ladder.leaves_at(Level::SCAVENGER)], [None; 2]);
    }
}
