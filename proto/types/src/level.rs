//! The levels of a port, from `P_1` to `P_K`, and the scavenger below them.

use core::fmt;

/// A level of the reverse multi-level queue. 1 is the highest; [`Level::SCAVENGER`] lies below all
/// others. A smaller number is served first, so `a < b` means that `a` is the higher level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Level(pub u8);

impl Level {
    /// The highest level, `P_1`. MFS §4.5 reserves it for urgent last-stage flows, and `laxity` for
    /// KV reuse that stays late beside collectives.
    pub const HIGHEST: Self = Self(1);
    /// The highest level that is not reserved, `P_2`. Collectives enter here.
    pub const FIRST_UNRESERVED: Self = Self(2);
    /// The level below all others, for pruned requests and for stages that no request waits for.
    pub const SCAVENGER: Self = Self(u8::MAX);
    /// Maximum number of levels in a configuration.
    pub const COUNT_MAX: u8 = 16;
    /// Length of a table with one row for each level and one for the scavenger.
    pub const ROWS: usize = Self::COUNT_MAX as usize + 1;

    /// Returns the zero-based row in a table of [`Level::ROWS`]. The scavenger has the last row.
    #[inline]
    #[must_use]
    pub const fn row(self) -> usize {
        let row = self.0.wrapping_sub(1) as usize;
        if row < Self::ROWS { row } else { Self::ROWS - 1 }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::SCAVENGER { f.write_str("scavenger") } else { write!(f, "P{}", self.0) }
    }
}
