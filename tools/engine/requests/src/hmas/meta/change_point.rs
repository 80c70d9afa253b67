//! Change points and a table (H-MAS Appendix C.2): a decision only when the load or the mix has
//! changed, and then the one that was found best for such a regime.
//!
//! The detector is Page and Hinkley's, in both directions, on the logarithms of load (arrivals
//! times `T_tot`) and of the variation of `T_tot`.

use super::super::pool::Kind;
use super::super::qos::Long;
use super::{Answer, Decision, Selector, lanes};
use crate::Time;

/// Page and Hinkley's test for a change of the mean.
#[derive(Clone, Copy, Debug, Default)]
struct PageHinkley {
    count: u32,
    mean: f64,
    up: f64,
    down: f64,
}

impl PageHinkley {
    /// Changes below this are noise.
    const DRIFT: f64 = 0.05;
    /// Sum of deviations that is a change.
    const THRESHOLD: f64 = 0.4;

    fn sees(&mut self, value: f64) -> bool {
        self.count += 1;
        self.mean += (value - self.mean) / f64::from(self.count);
        self.up = (self.up + value - self.mean - Self::DRIFT).max(0.0);
        self.down = (self.down + self.mean - value - Self::DRIFT).max(0.0);
        let changed = self.up > Self::THRESHOLD || self.down > Self::THRESHOLD;
        if changed {
            *self = Self::default();
        }
        changed
    }
}

/// A kind of traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Regime {
    /// Requests are late.
    pub loaded: bool,
    /// Lengths vary.
    pub unequal: bool,
}

impl Regime {
    /// The one that a view is of.
    #[must_use]
    pub fn of(view: &Long) -> Self {
        Self {
            loaded: view.ttft_violations > 0.02,
            unequal: view.total_cv > 1.0,
        }
    }
}

/// What to do in which regime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Table {
    /// Late, and lengths vary.
    pub loaded_unequal: Kind,
    /// Late, and they do not.
    pub loaded_equal: Kind,
    /// Not late.
    pub calm: Kind,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            loaded_unequal: Kind::TwoLane,
            loaded_equal: Kind::Edf,
            calm: Kind::Sjf,
        }
    }
}

/// Change points and a table.
#[derive(Clone, Copy, Debug)]
pub struct ChangePoint {
    table: Table,
    load: PageHinkley,
    mix: PageHinkley,
    regime: Option<Regime>,
}

impl ChangePoint {
    /// With such a table.
    #[must_use]
    pub fn new(table: Table) -> Self {
        Self {
            table,
            load: PageHinkley::default(),
            mix: PageHinkley::default(),
            regime: None,
        }
    }
}

impl Selector for ChangePoint {
    fn name(&self) -> &'static str {
        "change_point"
    }

    fn select(&mut self, _: Time, view: &Long, _: Kind) -> Answer {
        let load = self.load.sees((view.rps * view.total_mean_ms + 1.0).ln());
        let mix = self.mix.sees((view.total_cv + 0.1).ln());
        let regime = Regime::of(view);
        // The first view is a change from nothing; being late where nobody was is one that no load
        // need show.
        let known = self.regime.is_some_and(|before| before == regime);
        if known && !load && !mix {
            return Answer::Stay;
        }
        self.regime = Some(regime);
        let kind = match (regime.loaded, regime.unequal) {
            (true, true) => self.table.loaded_unequal,
            (true, false) => self.table.loaded_equal,
            (false, _) => self.table.calm,
        };
        Answer::Decided(Decision {
            kind,
            hints: Some(lanes(view)),
            bypass: false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mean_that_moves_is_seen_and_one_that_stays_is_not() {
        let mut test = PageHinkley::default();
        let quiet = (0..200).any(|n| test.sees(if n % 2 == 0 { 1.0 } else { 1.04 }));
        assert!(!quiet);
        let seen = (0..10).position(|_| test.sees(2.0));
        assert!(seen.is_some_and(|after| after < 3), "{seen:?}");
    }
}
