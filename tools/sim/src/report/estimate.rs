//! Means over seeds and their two-sided 95 % confidence intervals by Student's t.

use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    pub mean: f64,
    /// Half the width of the 95 % confidence interval, or `None` for a single value.
    pub half_width: Option<f64>,
    pub count: usize,
}

impl Estimate {
    /// Returns the estimate for independent values, or `None` if there are none.
    pub fn of(values: &[f64]) -> Option<Self> {
        if values.is_empty() {
            return None;
        }
        let count = values.len();
        let mean = values.iter().sum::<f64>() / count as f64;
        let half_width = (count > 1).then(|| {
            let squares: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
            let deviation = (squares / (count - 1) as f64).sqrt();
            t_quantile(count - 1) * deviation / (count as f64).sqrt()
        });
        Some(Self { mean, half_width, count })
    }

    /// Returns the lower end of the interval, or the mean if there is no interval.
    pub fn low(&self) -> f64 {
        self.mean - self.half_width.unwrap_or(0.0)
    }

    /// Returns the upper end of the interval, or the mean if there is no interval.
    pub fn high(&self) -> f64 {
        self.mean + self.half_width.unwrap_or(0.0)
    }
}

/// Returns the 97.5 % quantile of Student's distribution.
///
/// Up to 30 degrees of freedom it is taken from a table. Above, it is the Cornish–Fisher expansion
/// around the normal distribution (Abramowitz and Stegun, 26.7.5), with an error below 1e-5.
pub fn t_quantile(degrees: usize) -> f64 {
    const TABLE: [f64; 30] = [
        12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010,
        2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739,
        2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
    ];
    if degrees == 0 {
        return f64::INFINITY;
    }
    if let Some(&t) = TABLE.get(degrees - 1) {
        return t;
    }
    let (z, n): (f64, f64) = (1.959_963_985, degrees as f64);
    let (z3, z5, z7) = (z.powi(3), z.powi(5), z.powi(7));
    z + (z3 + z) / (4.0 * n)
        + (5.0 * z5 + 16.0 * z3 + 3.0 * z) / (96.0 * n.powi(2))
        + (3.0 * z7 + 19.0 * z5 + 17.0 * z3 - 15.0 * z) / (384.0 * n.powi(3))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64, within: f64) {
        assert!((a - b).abs() <= within, "{a} is not {b}");
    }

    #[test]
    fn an_interval_is_that_of_the_textbook() {
        // Result of scipy.stats.t.interval(0.95, 4, loc=3, scale=sem([1, 2, 3, 4, 5])): 1.0367568
        // to 4.9632432.
        let found = Estimate::of(&[1.0, 2.0, 3.0, 4.0, 5.0]).expect("values");
        near(found.mean, 3.0, 1e-12);
        near(found.low(), 1.036_757, 1e-4);
        near(found.high(), 4.963_243, 1e-4);
    }

    #[test]
    fn of_one_value_nothing_is_known_and_of_equal_ones_all() {
        let one = Estimate::of(&[0.7]).expect("a value");
        assert_eq!((one.half_width, one.low()), (None, 0.7));
        let same = Estimate::of(&[0.5, 0.5, 0.5]).expect("values");
        assert_eq!(same.half_width, Some(0.0));
        assert_eq!(Estimate::of(&[]), None);
    }

    #[test]
    fn quantiles_beyond_the_table_follow_on() {
        near(t_quantile(31), 2.039_513, 1e-5);
        near(t_quantile(40), 2.021_075, 1e-5);
        near(t_quantile(100), 1.983_972, 1e-5);
        near(t_quantile(1_000_000), 1.959_966, 1e-5);
        for degrees in 1..200 {
            assert!(t_quantile(degrees) > t_quantile(degrees + 1), "{degrees}");
        }
    }
}
