//! A map from what goes wrong to what helps (H-MAS §3.4.1, Appendix C.2 "rule-based policy map"):
//! short requests stuck behind long ones → two-lane; deadlines missed → EDF; applications treated
//! unequally → WFQ. Overload is the bypass's.
//!
//! Thresholds are not in the paper.

use super::super::pool::Kind;
use super::super::qos::Long;
use super::{Answer, Decision, Selector, lanes};
use crate::Time;

/// Rules.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Part of requests that may be late before anything is changed.
    pub tolerated: f64,
    /// Variation of `T_tot` above which lengths are unequal.
    pub unequal: f64,
    /// Jain's index below which shares are.
    pub unfair: f64,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            tolerated: 0.02,
            unequal: 1.0,
            unfair: 0.5,
        }
    }
}

impl Selector for Rules {
    fn name(&self) -> &'static str {
        "rules"
    }

    fn select(&mut self, _: Time, view: &Long, _: Kind) -> Answer {
        let late = view.ttft_violations.max(view.tpot_violations);
        if late <= self.tolerated {
            return Answer::Stay;
        }
        if view.fairness < self.unfair && view.tasks.len() > 1 {
            return Answer::Decided(Kind::Wfq.into());
        }
        if view.total_cv > self.unequal {
            return Answer::Decided(Decision {
                kind: Kind::TwoLane,
                hints: Some(lanes(view)),
                bypass: false,
            });
        }
        Answer::Decided(Kind::Edf.into())
    }
}
