//! Bucketed conformal calibration of lengths (H-MAS §3.4.2 eq. 4, Appendix B.3 eq. 10).
//!
//! The bound is `l_upper = l_pred + q`, with `q` the ⌈(n + 1)(1 − ε)⌉-th smallest error of the
//! bucket. If errors are exchangeable, the bound holds for `1 − ε` of requests. A bucket with too
//! few errors uses those of all buckets. If these are too few, too, the bound is the request's own
//! limit. The paper says only "(1 − ε) quantile".
//!
//! The guarantee isn't exact, because mixes change and short answers end first. Experiments measure
//! both effects.

use crate::window::Window;

/// Upper ends of the buckets, in prompt tokens. Appendix E.2 has buckets by prompt length but no
/// values.
const BUCKETS: [u32; 5] = [128, 512, 2048, 8192, u32::MAX];

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Score {
    /// `l_real − l_pred` in tokens (eq. 4).
    #[default]
    Additive,
    /// `l_real / l_pred − 1` in thousandths. Absolute errors grow with length, and long answers are
    /// still missing from a window. Relative errors are alike for all lengths (locally weighted
    /// conformal prediction, Lei et al. 2018).
    Relative,
}

impl Score {
    fn of(self, predicted: u32, real: u32) -> i64 {
        let error = i64::from(real) - i64::from(predicted);
        match self {
            Self::Additive => error,
            Self::Relative => error * 1000 / i64::from(predicted.max(1)),
        }
    }

    fn tokens(self, predicted: u32, score: i64) -> i64 {
        match self {
            Self::Additive => score,
            // Rounded up, so that the bound isn't below the exact value.
            Self::Relative => (score * i64::from(predicted) + 999).div_euclid(1000),
        }
    }
}

/// Returns the conformal quantile, or `None` if there are too few errors.
fn quantile(errors: &Window<i64>, epsilon: f64) -> Option<i64> {
    let sorted = errors.sorted();
    let rank = ((sorted.len() + 1) as f64 * (1.0 - epsilon)).ceil() as usize;
    rank.checked_sub(1).and_then(|at| sorted.get(at)).copied()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Errors of the request's own bucket.
    Bucket,
    /// Errors of all buckets.
    Pooled,
    /// The request's own limit.
    Limit,
    /// The prediction itself, because calibration is frozen.
    Prediction,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    pub tokens: u32,
    pub source: Source,
}

/// Errors of predictions, in buckets by prompt length.
pub struct Calibration {
    epsilon: f64,
    window: usize,
    score: Score,
    buckets: [Window<i64>; BUCKETS.len()],
    pooled: Window<i64>,
}

impl Calibration {
    /// Creates a calibration for share `epsilon` from the last `window` errors of each bucket.
    ///
    /// # Panics
    /// Panics if `epsilon` isn't between 0 and 1 or `window` is 0.
    pub fn new(epsilon: f64, window: usize, score: Score) -> Self {
        assert!(
            epsilon > 0.0 && epsilon < 1.0,
            "ε is a part of requests: {epsilon} is not between 0 and 1"
        );
        assert!(window > 0, "a window holds an error at least");
        Self { epsilon, window, score, buckets: Default::default(), pooled: Window::default() }
    }

    fn bucket(prompt: u32) -> usize {
        BUCKETS.iter().position(|end| prompt <= *end).unwrap_or(BUCKETS.len() - 1)
    }

    pub fn learn(&mut self, prompt: u32, predicted: u32, real: u32) {
        let error = self.score.of(predicted, real);
        self.buckets[Self::bucket(prompt)].push(error, self.window);
        self.pooled.push(error, self.window);
    }

    /// Returns an upper bound of a request's tokens, which holds for all but a share ε.
    pub fn bound(&self, prompt: u32, predicted: u32, output_max: u32) -> Bound {
        let own = quantile(&self.buckets[Self::bucket(prompt)], self.epsilon);
        let pooled = || quantile(&self.pooled, self.epsilon);
        let (error, source) = match own {
            Some(error) => (Some(error), Source::Bucket),
            None => (pooled(), Source::Pooled),
        };
        let Some(error) = error else { return Bound { tokens: output_max, source: Source::Limit } };
        let error = self.score.tokens(predicted, error);
        let tokens = (i64::from(predicted) + error).clamp(1, i64::from(output_max.max(1)));
        Bound { tokens: tokens as u32, source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_is_that_of_split_conformal_prediction_and_too_few_errors_give_the_limit() {
        let mut calibration = Calibration::new(0.1, 100, Score::Additive);
        let bound = |c: &Calibration| c.bound(100, 50, 1000);
        assert_eq!(bound(&calibration).source, Source::Limit);
        // With 8 errors the rank is ⌈9 · 0.9⌉ = 9, which is too high.
        for error in 1..=8 {
            calibration.learn(100, 50, 50 + error);
        }
        assert_eq!(bound(&calibration).tokens, 1000);
        // With 9 errors the rank is ⌈10 · 0.9⌉ = 9, the largest error.
        calibration.learn(100, 50, 59);
        let expected = Bound { tokens: 59, source: Source::Bucket };
        assert_eq!(bound(&calibration), expected);
        // Another bucket has too few errors and uses those of all buckets.
        assert_eq!(calibration.bound(5000, 50, 1000).source, Source::Pooled);
    }

    #[test]
    fn a_relative_bound_grows_with_what_is_predicted() {
        let mut calibration = Calibration::new(0.5, 100, Score::Relative);
        for predicted in [10, 100, 1000] {
            calibration.learn(100, predicted, predicted + predicted / 5);
        }
        assert_eq!(calibration.bound(100, 50, 4096).tokens, 60);
        assert_eq!(calibration.bound(100, 2000, 4096).tokens, 2400);
    }

    #[test]
    fn old_errors_are_forgotten() {
        let mut calibration = Calibration::new(0.5, 10, Score::Additive);
        for _ in 0..10 {
            calibration.learn(1, 10, 900);
        }
        for _ in 0..10 {
            calibration.learn(1, 10, 10);
        }
        assert_eq!(calibration.bound(1, 10, 1000).tokens, 10);
    }

    #[test]
    fn exchangeable_errors_violate_the_bound_no_more_often_than_epsilon() {
        // A fixed sequence without order: fractional parts of multiples of an irrational number.
        let length = |n: u64| 1 + ((n as f64 * 0.618_033_988_75).fract() * 400.0) as u32;
        let mut calibration = Calibration::new(0.1, 500, Score::Additive);
        let (mut seen, mut above) = (0_u32, 0_u32);
        for n in 0..5000 {
            let bound = calibration.bound(300, 200, 4096);
            if n > 500 {
                seen += 1;
                above += u32::from(length(n) > bound.tokens);
            }
            calibration.learn(300, 200, length(n));
        }
        let rate = f64::from(above) / f64::from(seen);
        assert!(rate <= 0.1 + 0.01, "{rate}");
        assert!(rate > 0.05, "a bound that never fails is no bound: {rate}");
    }
}
