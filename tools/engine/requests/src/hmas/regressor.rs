//! Trained models: random forests of `smartcore`, behind what is needed of them here.
//!
//! The paper has CatBoost; boosted trees and forests differ by little on a handful of features, and
//! a forest needs no tuning.

use smartcore::ensemble::random_forest_regressor::{
    RandomForestRegressor, RandomForestRegressorParameters,
};
use smartcore::linalg::basic::matrix::DenseMatrix;

type Matrix = DenseMatrix<f64>;

/// Nothing could be trained: check that there are examples, and that all have the same features,
/// each a number.
#[derive(Debug, thiserror::Error)]
#[error("no model can be trained on {examples} examples: {why}")]
pub struct TrainingError {
    /// How many there were.
    pub examples: usize,
    /// What was wrong.
    pub why: String,
}

impl TrainingError {
    fn new(examples: usize, why: &impl ToString) -> Self {
        Self {
            examples,
            why: why.to_string(),
        }
    }
}

fn matrix(rows: &[Vec<f64>], targets: usize) -> Result<Matrix, TrainingError> {
    let wrong = |why: &str| Err(TrainingError::new(rows.len(), &why));
    if rows.is_empty() {
        return wrong("there are none");
    }
    if rows.len() != targets {
        return wrong("not each has an answer");
    }
    if rows.iter().flatten().any(|value| !value.is_finite()) {
        return wrong("a feature is no number");
    }
    DenseMatrix::from_2d_vec(&rows.to_vec()).map_err(|why| TrainingError::new(rows.len(), &why))
}

/// Predicts a number.
#[derive(Debug)]
pub struct Forest {
    model: RandomForestRegressor<f64, f64, Matrix, Vec<f64>>,
    mean: f64,
}

impl Forest {
    /// Trees of it: more change the error by less than a percent, and each costs a prediction about
    /// 100 ns.
    const TREES: usize = 24;

    /// Trains. The same seed gives the same forest.
    ///
    /// # Errors
    /// If there is nothing to train on.
    pub fn fit(rows: &[Vec<f64>], values: &[f64], seed: u64) -> Result<Self, TrainingError> {
        let x = matrix(rows, values.len())?;
        let parameters = RandomForestRegressorParameters::default()
            .with_n_trees(Self::TREES)
            .with_max_depth(10)
            .with_min_samples_leaf(4)
            .with_seed(seed);
        let values = values.to_vec();
        let model = RandomForestRegressor::fit(&x, &values, parameters)
            .map_err(|why| TrainingError::new(rows.len(), &why))?;
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        Ok(Self { model, mean })
    }

    /// What it expects; the mean of what it was trained on for features that make no sense.
    #[must_use]
    pub fn predict(&self, features: &[f64]) -> f64 {
        let row = Matrix::from_2d_vec(&vec![features.to_vec()]).ok();
        row.and_then(|row| self.model.predict(&row).ok())
            .and_then(|values| values.first().copied())
            .filter(|value| value.is_finite())
            .unwrap_or(self.mean)
    }
}
