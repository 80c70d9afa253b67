//! The trees of `smartcore` in place of those that the papers use: boosted ones for LightGBM
//! (Maestro), with squared loss only, and a forest for CatBoost (H-MAS), which needs no tuning.

use smartcore::ensemble::random_forest_regressor::{
    RandomForestRegressor, RandomForestRegressorParameters,
};
use smartcore::linalg::basic::matrix::DenseMatrix;
use smartcore::xgboost::{XGRegressor, XGRegressorParameters};

type Matrix = DenseMatrix<f64>;

/// The error of a training without valid examples. All examples need the same number of features,
/// and each number must be finite.
#[derive(Debug, thiserror::Error)]
#[error("no model can be trained on {examples} examples: {why}")]
pub struct TrainingError {
    pub examples: usize,
    pub why: String,
}

impl TrainingError {
    pub(crate) fn new(examples: usize, why: &impl ToString) -> Self {
        Self { examples, why: why.to_string() }
    }
}

/// Returns the rows as a matrix. `smartcore` compares numbers by `partial_cmp` and panics on NaN.
fn matrix(rows: &[Vec<f64>], targets: &[f64]) -> Result<Matrix, TrainingError> {
    let wrong = |why: &str| Err(TrainingError::new(rows.len(), &why));
    if rows.is_empty() || rows.len() != targets.len() {
        return wrong("not each has an answer, or there are none");
    }
    if rows.iter().flatten().chain(targets).any(|value| !value.is_finite()) {
        return wrong("something is no number");
    }
    DenseMatrix::from_2d_vec(&rows.to_vec()).map_err(|why| TrainingError::new(rows.len(), &why))
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Returns a row as a matrix, for a prediction. This crate never makes a row of another width than
/// in training.
fn one(row: &[f64]) -> Option<Matrix> {
    Matrix::from_2d_vec(&vec![row.to_vec()]).ok()
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trees {
    pub count: usize,
    pub depth: u16,
    /// Share of its correction that each tree makes.
    pub rate: f64,
    pub leaf: usize,
    /// Seed for the choice of each tree's samples.
    pub seed: u64,
}

impl Default for Trees {
    fn default() -> Self {
        Self { count: 60, depth: 4, rate: 0.15, leaf: 8, seed: 1 }
    }
}

#[derive(Debug)]
pub struct Boosted {
    model: XGRegressor<f64, f64, Matrix, Vec<f64>>,
    mean: f64,
}

impl Boosted {
    pub fn fit(rows: &[Vec<f64>], targets: &[f64], trees: &Trees) -> Result<Self, TrainingError> {
        let matrix = matrix(rows, targets)?;
        let mean = mean(targets);
        let parameters = XGRegressorParameters::default()
            .with_n_estimators(trees.count)
            .with_max_depth(trees.depth)
            .with_learning_rate(trees.rate)
            .with_min_child_weight(trees.leaf)
            .with_subsample(0.8)
            .with_base_score(mean)
            .with_seed(trees.seed);
        let model = XGRegressor::fit(&matrix, &targets.to_vec(), parameters)
            .map_err(|why| TrainingError::new(rows.len(), &why))?;
        Ok(Self { model, mean })
    }

    pub fn predict(&self, row: &[f64]) -> f64 {
        let made = one(row).and_then(|row| self.model.predict(&row).ok());
        made.and_then(|values| values.first().copied()).unwrap_or(self.mean)
    }
}

#[derive(Debug)]
pub struct Forest {
    model: RandomForestRegressor<f64, f64, Matrix, Vec<f64>>,
    mean: f64,
}

impl Forest {
    /// Number of trees. More trees change the error by less than 1 %, and each adds about 100 ns to
    /// a prediction.
    const TREES: usize = 24;

    /// Trains a forest. The same seed gives the same forest.
    pub fn fit(rows: &[Vec<f64>], values: &[f64], seed: u64) -> Result<Self, TrainingError> {
        let parameters = RandomForestRegressorParameters::default()
            .with_n_trees(Self::TREES)
            .with_max_depth(10)
            .with_min_samples_leaf(4)
            .with_seed(seed);
        let model =
            RandomForestRegressor::fit(&matrix(rows, values)?, &values.to_vec(), parameters)
                .map_err(|why| TrainingError::new(rows.len(), &why))?;
        Ok(Self { model, mean: mean(values) })
    }

    /// Returns the predicted value, or the mean of the training values for invalid features.
    pub fn predict(&self, features: &[f64]) -> f64 {
        let made = one(features).and_then(|row| self.model.predict(&row).ok());
        let first = made.and_then(|values| values.first().copied());
        first.filter(|value| value.is_finite()).unwrap_or(self.mean)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> (Vec<Vec<f64>>, Vec<f64>) {
        (0..400)
            .map(|i| {
                let (a, b) = (f64::from(i % 20), f64::from(i / 20));
                (vec![a, b], if a < 10.0 { b } else { 100.0 - b })
            })
            .unzip()
    }

    #[test]
    fn trees_learn_what_no_line_can_say() {
        let (rows, targets) = rows();
        let trees = Boosted::fit(&rows, &targets, &Trees::default()).unwrap();
        let off = |(row, target): (&Vec<f64>, &f64)| (trees.predict(row) - target).abs();
        let off = rows.iter().zip(&targets).map(off).sum::<f64>() / 400.0;
        assert!(off < 2.0, "{off}");
    }

    #[test]
    fn the_same_seed_grows_the_same_trees() {
        let (rows, targets) = rows();
        let one = Boosted::fit(&rows, &targets, &Trees::default()).unwrap();
        let two = Boosted::fit(&rows, &targets, &Trees::default()).unwrap();
        assert!(rows.iter().all(|row| one.predict(row) == two.predict(row)));
    }

    #[test]
    fn what_is_not_a_number_is_named_and_not_trained_on() {
        let rows = vec![vec![1.0], vec![f64::NAN]];
        let refused = Boosted::fit(&rows, &[1.0, 2.0], &Trees::default()).unwrap_err();
        assert!(refused.to_string().contains("no number"), "{refused}");
    }
}
