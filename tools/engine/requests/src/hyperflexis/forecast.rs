//! How far off predicted maturity times are (the paper gives none; an acceptance figure here).
//!
//! A prediction is made at a dispatch: the instance will have computed its prompts, and those that
//! decode will have made good that they stood still. It comes true when they have: the time from
//! the dispatch until no prompt was left has been earned back, each step after that earning `TPOT −
//! step`, as measured. A prediction that the next dispatch to the instance overtakes is *cut*: it
//! was at least that much too early.

use std::collections::BTreeMap;

use crate::Time;
use crate::iteration::Load;
use crate::request::InstanceId;

#[derive(Clone, Copy, Debug)]
struct Open {
    begun: Time,
    mature: Time,
    tpot: f64,
    /// Time that is to be earned back, ns; `None` while prompts are computed.
    owed: Option<f64>,
}

/// A prediction and what became of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// From the dispatch to the predicted maturity, ns.
    pub predicted: f64,
    /// From the dispatch to maturity, ns; of one that was cut, to the dispatch that cut it.
    pub realised: f64,
    /// It was overtaken.
    pub cut: bool,
}

/// What stands open, and what became of the others.
#[derive(Clone, Debug, Default)]
pub struct Forecasts {
    open: BTreeMap<InstanceId, Open>,
    outcomes: Vec<Outcome>,
}

impl Forecasts {
    /// Beyond so many outcomes none is kept: a dispatcher that runs for weeks is no log.
    const KEPT: usize = 1 << 20;

    /// Something was dispatched: the instance is expected to be mature at `mature`; `tpot` ns is
    /// the tightest time per token there.
    pub fn predict(&mut self, now: Time, instance: InstanceId, mature: Time, tpot: f64) {
        let open = Open {
            begun: now,
            mature,
            tpot,
            owed: None,
        };
        if let Some(before) = self.open.insert(instance, open) {
            self.close(&before, now, true);
        }
    }

    /// The instance reports at the end of an iteration of `took` ns.
    pub fn report(&mut self, now: Time, instance: InstanceId, load: &Load, took: u64) {
        let Some(open) = self.open.get_mut(&instance) else {
            return;
        };
        let took = took as f64;
        let at = match open.owed {
            None if load.prefill_tokens > 0 => return,
            None => {
                open.owed = Some(now.since(open.begun).0 as f64);
                if load.decoding > 0 && open.tpot.is_finite() {
                    return;
                }
                now
            }
            // Another prompt came by another way: the time that it takes is owed, too.
            Some(owed) if load.prefill_tokens > 0 => {
                open.owed = Some(owed + took);
                return;
            }
            Some(owed) => {
                let earned = open.tpot - took;
                if load.decoding == 0 {
                    now
                } else if earned >= owed {
                    let unneeded = took * (1.0 - owed / earned);
                    Time(now.0.saturating_sub(unneeded as u64))
                } else {
                    open.owed = Some(owed - earned);
                    return;
                }
            }
        };
        if let Some(open) = self.open.remove(&instance) {
            self.close(&open, at, false);
        }
    }

    /// The instance is gone: nothing will come of it.
    pub fn forget(&mut self, instance: InstanceId) {
        self.open.remove(&instance);
    }

    fn close(&mut self, open: &Open, at: Time, cut: bool) {
        if self.outcomes.len() < Self::KEPT {
            self.outcomes.push(Outcome {
                predicted: open.mature.since(open.begun).0 as f64,
                realised: at.since(open.begun).0 as f64,
                cut,
            });
        }
    }

    /// What became of predictions.
    #[must_use]
    pub fn outcomes(&self) -> &[Outcome] {
        &self.outcomes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: InstanceId = InstanceId(3);

    fn load(prefill_tokens: u64) -> Load {
        Load {
            decoding: 4,
            running: 4,
            prefill_tokens,
            ..Load::default()
        }
    }

    #[test]
    fn a_prediction_comes_true_when_the_time_stood_still_is_earned_back() {
        let mut forecasts = Forecasts::default();
        forecasts.predict(Time(0), AT, Time(180), 50.0);
        forecasts.report(Time(60), AT, &load(10), 60);
        forecasts.report(Time(100), AT, &load(0), 40);
        // 100 are owed; each step of 20 earns 30.
        for end in [120, 140, 160] {
            forecasts.report(Time(end), AT, &load(0), 20);
            assert!(forecasts.outcomes().is_empty());
        }
        forecasts.report(Time(180), AT, &load(0), 20);
        let [outcome] = forecasts.outcomes() else {
            panic!("one prediction, one outcome")
        };
        // A third of the last step was needed.
        assert!((outcome.realised - 167.0).abs() < 1.0, "{outcome:?}");
        assert!(!outcome.cut);
    }

    #[test]
    fn a_dispatch_before_maturity_cuts_the_prediction() {
        let mut forecasts = Forecasts::default();
        forecasts.predict(Time(0), AT, Time(180), 50.0);
        forecasts.predict(Time(200), AT, Time(400), 50.0);
        assert_eq!(
            forecasts.outcomes(),
            [Outcome {
                predicted: 180.0,
                realised: 200.0,
                cut: true
            }]
        );
    }
}
