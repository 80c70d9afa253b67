//! The predicted length of a stage's output before it runs (Maestro §III-B).
//!
//! A regressor of `log(1 + L)` predicts the length. Each role has its own regressor, or the common
//! one if it has too few records.
//!
//! Departures from the paper: its first phase, the probability of a tool call as a feature of the
//! length, is missing, because it gained nothing: the trees see the features that predict calls.
//! "Incrementally calibrate" (§III-A) has no rule. Here the mean residual of `log(1 + L)` per role
//! is added (EWMA with weight 1/50, at most ±0.5).

use std::collections::HashMap;
use std::sync::Arc;

use crate::trees::{Boosted, TrainingError, Trees};
use crate::workflow::{RoleId, Stage};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageRecord {
    pub stage: Stage,
    pub output: u32,
}

/// Least records of a role for its own regressor.
const OWN: usize = 150;
const LEAST: usize = 20;

fn features(stage: &Stage) -> Vec<f64> {
    let mut row = vec![
        f64::from(stage.role.0),
        f64::from(stage.position),
        f64::from(stage.invocation),
        f64::from(stage.tools),
        f64::from(u8::from(stage.thinking)),
        f64::from(stage.prompt).ln_1p(),
    ];
    // Trees can't compare NaN, so values that aren't finite are replaced.
    let finite = |value: f32| if value.is_finite() { f64::from(value) } else { 0.0 };
    row.extend(stage.semantics.map(finite));
    row
}

/// The predictor of lengths. Clones share the trees, but not what they learn later.
#[derive(Clone)]
pub struct LengthPredictor {
    trained: Arc<TrainedTrees>,
    /// Mean recent residual by role, in log tokens.
    drift: HashMap<RoleId, f64>,
}

struct TrainedTrees {
    roles: HashMap<RoleId, Boosted>,
    global: Boosted,
}

impl LengthPredictor {
    /// Trains a predictor on records.
    /// Fails with fewer than 20 records or with values that aren't finite.
    pub fn train(records: &[StageRecord], trees: &Trees) -> Result<Self, TrainingError> {
        if records.len() < LEAST {
            return Err(TrainingError::new(records.len(), &format!("at least {LEAST} are needed")));
        }
        let fit = |of: &[&StageRecord]| {
            let rows: Vec<_> = of.iter().map(|record| features(&record.stage)).collect();
            let lengths: Vec<_> = of.iter().map(|r| f64::from(r.output).ln_1p()).collect();
            Boosted::fit(&rows, &lengths, trees)
        };
        let mut by_role: HashMap<RoleId, Vec<&StageRecord>> = HashMap::new();
        for record in records {
            by_role.entry(record.stage.role).or_default().push(record);
        }
        by_role.retain(|_, of| of.len() >= OWN);
        let roles = by_role.into_iter().map(|(role, of)| Ok((role, fit(&of)?)));
        let roles = roles.collect::<Result<_, TrainingError>>()?;
        let global = fit(&records.iter().collect::<Vec<_>>())?;
        Ok(Self { trained: Arc::new(TrainedTrees { roles, global }), drift: HashMap::new() })
    }

    pub fn predict(&self, stage: &Stage) -> f64 {
        let regressor = self.trained.roles.get(&stage.role).unwrap_or(&self.trained.global);
        let drift = self.drift.get(&stage.role).copied().unwrap_or(0.0);
        let log = regressor.predict(&features(stage)) + drift;
        log.exp_m1().clamp(1.0, f64::from(stage.output_max.max(1)))
    }

    pub fn observe(&mut self, stage: &Stage, predicted: f64, output: u32) {
        let drift = self.drift.entry(stage.role).or_default();
        let residual = f64::from(output).ln_1p() - predicted.ln_1p();
        // `predicted` contains the drift at its time, so the drift settles where residuals have a
        // mean of 0.
        *drift = (*drift + residual / 50.0).clamp(-0.5, 0.5);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workflow::StageId;

    /// Returns a record that is short where it has tools and the meaning is positive. Otherwise its
    /// length is its role's.
    fn record(i: u32) -> StageRecord {
        let role = i % 2;
        let tools = u16::from(!i.is_multiple_of(3));
        let meaning = (i as f32 * 0.37).sin();
        let output = if tools > 0 && meaning > 0.0 { 20 } else { 300 + 500 * role } + i % 7;
        StageRecord {
            stage: Stage {
                id: StageId(u64::from(i)),
                role: RoleId(role as u16),
                tools,
                prompt: 100 + i % 50,
                output_max: 4096,
                semantics: [meaning, 0.0, 0.0, 0.0],
                ..Stage::default()
            },
            output,
        }
    }

    fn trained() -> LengthPredictor {
        let records: Vec<StageRecord> = (0..800).map(record).collect();
        let trees = Trees { count: 30, ..Trees::default() };
        LengthPredictor::train(&records, &trees).unwrap()
    }

    #[test]
    fn it_knows_calls_from_answers_on_stages_it_has_not_seen() {
        let lengths = trained();
        let mut off = 0.0;
        for seen in (800..1000).map(record) {
            off += (lengths.predict(&seen.stage) - f64::from(seen.output)).abs();
        }
        assert!(off / 200.0 < 30.0, "mean error {}", off / 200.0);
    }

    #[test]
    fn a_drift_of_lengths_is_followed() {
        let mut lengths = trained();
        let seen = record(900);
        let before = lengths.predict(&seen.stage);
        for _ in 0..300 {
            let forecast = lengths.predict(&seen.stage);
            lengths.observe(&seen.stage, forecast, (before * 1.4) as u32);
        }
        let after = lengths.predict(&seen.stage);
        assert!((after / before - 1.4).abs() < 0.05, "{after} after {before}");
    }

    #[test]
    fn too_few_records_are_refused() {
        let records: Vec<StageRecord> = (0..5).map(record).collect();
        assert!(LengthPredictor::train(&records, &Trees::default()).is_err());
    }
}
