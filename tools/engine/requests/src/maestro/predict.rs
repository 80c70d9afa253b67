//! The predicted cost of a stage before it runs (Maestro §III-B).
//!
//! There are two phases. A classifier predicts the probability of a tool call from the stage's
//! features. Isotonic regression on held-out records calibrates its score. Without tools the
//! probability is 0. Then a regressor of `log(1 + L)` predicts the length of the output, with that
//! probability as a feature. Each role has its own regressor, or the common one if it has too few
//! records.
//!
//! Departures from the paper: the classifier is a regression on 0 and 1, because the trees have
//! squared loss only. Calibration makes its score a probability. The length regressors are trained
//! with the classifier's calibrated probabilities, also for its own training records. The held-out
//! share is a fifth. "Incrementally calibrate" (§III-A) has no rule. Here the mean residual of
//! `log(1 + L)` per role is added (EWMA with weight 1/50, at most ±0.5).

use std::collections::HashMap;
use std::sync::Arc;

use super::isotonic::Isotonic;
use crate::trees::{Boosted, FitError, Trees};
use crate::workflow::{RoleId, Stage};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Record {
    pub stage: Stage,
    pub output: u32,
    pub tool: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Forecast {
    pub tool: f64,
    pub output: f64,
}

/// Least records of a role for its own regressor.
const OWN: usize = 150;
/// Least records for training.
const LEAST: usize = 20;
/// One record in this many, the latest ones, is held out for calibration.
const HELD: usize = 5;

fn features(stage: &Stage, tool: f64) -> Vec<f64> {
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
    row.push(tool);
    row
}

/// The two-phase predictor. Clones share the trees, but not what they learn later.
#[derive(Clone)]
pub struct TwoPhase {
    trained: Arc<Trained>,
    /// Mean recent residual by role, in log tokens.
    drift: HashMap<RoleId, f64>,
}

struct Trained {
    classifier: Boosted,
    calibration: Isotonic,
    roles: HashMap<RoleId, Boosted>,
    global: Boosted,
}

impl TwoPhase {
    /// Trains a predictor on records in the order of time.
    /// Fails with fewer than 20 records or with values that aren't finite.
    pub fn train(records: &[Record], trees: &Trees) -> Result<Self, FitError> {
        if records.len() < LEAST {
            return Err(FitError::new(records.len(), &format!("at least {LEAST} are needed")));
        }
        let (classifier, calibration) = Self::classifier(records, trees)?;
        let mut rows = Vec::with_capacity(records.len());
        let mut targets = Vec::with_capacity(records.len());
        for record in records {
            let tool = probability(&classifier, &calibration, &record.stage);
            rows.push(features(&record.stage, tool));
            targets.push(f64::from(record.output).ln_1p());
        }
        let mut by_role: HashMap<RoleId, Vec<usize>> = HashMap::new();
        for (at, record) in records.iter().enumerate() {
            by_role.entry(record.stage.role).or_default().push(at);
        }
        let mut roles = HashMap::new();
        for (role, at) in by_role {
            if at.len() >= OWN {
                let own: Vec<Vec<f64>> = at.iter().map(|i| rows[*i].clone()).collect();
                let lengths: Vec<f64> = at.iter().map(|i| targets[*i]).collect();
                roles.insert(role, Boosted::fit(&own, &lengths, trees)?);
            }
        }
        Ok(Self {
            trained: Arc::new(Trained {
                classifier,
                calibration,
                roles,
                global: Boosted::fit(&rows, &targets, trees)?,
            }),
            drift: HashMap::new(),
        })
    }

    fn classifier(records: &[Record], trees: &Trees) -> Result<(Boosted, Isotonic), FitError> {
        let with_tools: Vec<&Record> = records.iter().filter(|r| r.stage.tools > 0).collect();
        let row = |record: &&Record| features(&record.stage, 0.0);
        let called = |record: &&Record| f64::from(u8::from(record.tool));
        if with_tools.len() < LEAST {
            // Too few stages have tools, so a constant classifier is enough.
            let rows = vec![vec![0.0; features(&records[0].stage, 0.0).len()]];
            return Ok((Boosted::fit(&rows, &[0.0], trees)?, Isotonic::default()));
        }
        let (train, held) = with_tools.split_at(with_tools.len() - with_tools.len() / HELD);
        let rows: Vec<Vec<f64>> = train.iter().map(row).collect();
        let targets: Vec<f64> = train.iter().map(called).collect();
        let classifier = Boosted::fit(&rows, &targets, trees)?;
        let points: Vec<(f64, f64)> =
            held.iter().map(|record| (classifier.predict(&row(record)), called(record))).collect();
        Ok((classifier, Isotonic::fit(&points)))
    }

    /// Returns the predicted result of a stage, with the probability of a tool call of eq. 1.
    pub fn predict(&self, stage: &Stage) -> Forecast {
        let of = &*self.trained;
        let tool = probability(&of.classifier, &of.calibration, stage);
        let row = features(stage, tool);
        let regressor = of.roles.get(&stage.role).unwrap_or(&of.global);
        let drift = self.drift.get(&stage.role).copied().unwrap_or(0.0);
        let log = regressor.predict(&row) + drift;
        Forecast { tool, output: log.exp_m1().clamp(1.0, f64::from(stage.output_max.max(1))) }
    }

    pub fn observe(&mut self, stage: &Stage, forecast: &Forecast, output: u32) {
        let drift = self.drift.entry(stage.role).or_default();
        let residual = f64::from(output).ln_1p() - forecast.output.ln_1p();
        // `forecast` contains the drift at its time, so the drift settles where residuals have a
        // mean of 0.
        *drift = (*drift + residual / 50.0).clamp(-0.5, 0.5);
    }
}

fn probability(classifier: &Boosted, calibration: &Isotonic, stage: &Stage) -> f64 {
    if stage.tools == 0 {
        return 0.0;
    }
    calibration.at(classifier.predict(&features(stage, 0.0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workflow::{JobId, ModelId, StageId};

    /// Returns a record whose tool call depends on the meaning. Calls are short, and each role has
    /// its own length.
    fn record(i: u32) -> Record {
        let role = i % 2;
        let tools = u16::from(!i.is_multiple_of(3));
        let meaning = (i as f32 * 0.37).sin();
        let tool = tools > 0 && meaning > 0.0;
        let output = if tool { 20 } else { 300 + 500 * role } + i % 7;
        Record {
            stage: Stage {
                id: StageId(u64::from(i)),
                job: JobId(0),
                model: ModelId(0),
                role: RoleId(role as u16),
                position: 0,
                invocation: 0,
                tools,
                thinking: false,
                prompt: 100 + i % 50,
                output_max: 4096,
                semantics: [meaning, 0.0, 0.0, 0.0],
            },
            output,
            tool,
        }
    }

    fn trained() -> TwoPhase {
        let records: Vec<Record> = (0..800).map(record).collect();
        let trees = Trees { count: 30, ..Trees::default() };
        TwoPhase::train(&records, &trees).unwrap()
    }

    #[test]
    fn a_stage_without_tools_calls_none() {
        let two = trained();
        for i in (800..1000).map(record).filter(|r| r.stage.tools == 0) {
            assert_eq!(two.predict(&i.stage).tool, 0.0);
        }
    }

    #[test]
    fn it_knows_calls_from_answers_on_stages_it_has_not_seen() {
        let two = trained();
        let mut off = 0.0;
        for seen in (800..1000).map(record) {
            let forecast = two.predict(&seen.stage);
            assert!((0.0..=1.0).contains(&forecast.tool));
            off += (forecast.output - f64::from(seen.output)).abs();
        }
        assert!(off / 200.0 < 30.0, "mean error {}", off / 200.0);
    }

    #[test]
    fn a_drift_of_lengths_is_followed() {
        let mut two = trained();
        let seen = record(900);
        let before = two.predict(&seen.stage).output;
        for _ in 0..300 {
            let forecast = two.predict(&seen.stage);
            two.observe(&seen.stage, &forecast, (before * 1.4) as u32);
        }
        let after = two.predict(&seen.stage).output;
        assert!((after / before - 1.4).abs() < 0.05, "{after} after {before}");
    }

    #[test]
    fn too_few_records_are_refused() {
        let records: Vec<Record> = (0..5).map(record).collect();
        assert!(TwoPhase::train(&records, &Trees::default()).is_err());
    }
}
