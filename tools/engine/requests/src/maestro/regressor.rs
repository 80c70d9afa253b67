//! Gradient-boosted trees of `smartcore`. The paper uses LightGBM. `smartcore` has the same kind of
//! trees in Rust, with squared loss only.

use smartcore::linalg::basic::matrix::DenseMatrix;
use smartcore::xgboost::{XGRegressor, XGRegressorParameters};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trees {
    pub count: usize,
    /// Most splits from the root to a leaf.
    pub depth: u16,
    /// Share of its correction that each tree makes.
    pub rate: f64,
    /// Least samples of a leaf.
    pub leaf: usize,
    /// Seed for the choice of each tree's samples.
    pub seed: u64,
}

impl Default for Trees {
    fn default() -> Self {
        Self { count: 60, depth: 4, rate: 0.15, leaf: 8, seed: 1 }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FitError {
    #[error("a predictor is trained on {needed} records at least, and there are {there}")]
    TooFew { there: usize, needed: usize },
    #[error("record {0} holds something that is not a finite number")]
    NotFinite(usize),
    #[error("no trees could be grown: {0}")]
    Trees(String),
}

type Model = XGRegressor<f64, f64, DenseMatrix<f64>, Vec<f64>>;

#[derive(Debug)]
pub struct Boosted {
    model: Model,
    mean: f64,
}

impl Boosted {
    /// Trains the trees.
    ///
    /// # Errors
    /// Fails if there are no rows, or if some values aren't finite.
    pub fn fit(rows: &[Vec<f64>], targets: &[f64], trees: &Trees) -> Result<Self, FitError> {
        if rows.is_empty() || rows.len() != targets.len() {
            return Err(FitError::TooFew { there: rows.len().min(targets.len()), needed: 1 });
        }
        // `smartcore` compares features by `partial_cmp` and panics on NaN.
        let finite = |(row, target): (&Vec<f64>, &f64)| {
            target.is_finite() && row.iter().all(|value| value.is_finite())
        };
        if let Some(at) = rows.iter().zip(targets).position(|record| !finite(record)) {
            return Err(FitError::NotFinite(at));
        }
        let mean = targets.iter().sum::<f64>() / targets.len() as f64;
        let parameters = XGRegressorParameters::default()
            .with_n_estimators(trees.count)
            .with_max_depth(trees.depth)
            .with_learning_rate(trees.rate)
            .with_min_child_weight(trees.leaf)
            .with_subsample(0.8)
            .with_base_score(mean)
            .with_seed(trees.seed);
        let matrix = DenseMatrix::from_2d_vec(&rows.to_vec())
            .map_err(|error| FitError::Trees(error.to_string()))?;
        let model = Model::fit(&matrix, &targets.to_vec(), parameters)
            .map_err(|error| FitError::Trees(error.to_string()))?;
        Ok(Self { model, mean })
    }

    /// Returns the number that is predicted for a row of features.
    pub fn predict(&self, row: &[f64]) -> f64 {
        // This crate never makes a row of another width than in training. The mean is a fair answer
        // to one.
        DenseMatrix::from_2d_vec(&vec![row.to_vec()])
            .ok()
            .and_then(|matrix| self.model.predict(&matrix).ok())
            .and_then(|values| values.first().copied())
            .unwrap_or(self.mean)
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
        assert_eq!(refused, FitError::NotFinite(1));
    }
}
