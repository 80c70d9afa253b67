//! The sustained request rate: the rate at which attainment first falls below 90 % (or another
//! share), interpolated between the rates of the plan.

use serde::Serialize;

use super::estimate::Estimate;

pub const ASKED: f64 = 0.9;

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Sustained {
    BelowLowest(f64),
    At(Estimate),
    AboveHighest(f64),
}

impl Sustained {
    /// Returns the sustained rate for [`ASKED`], see [`Self::with`].
    pub fn of(curves: &[Vec<(f64, f64)>]) -> Option<Self> {
        Self::with(ASKED, curves)
    }

    /// Returns the sustained rate for an attainment of `asked`. Each seed has a curve of `(rate,
    /// attainment)`, with ascending rates.
    ///
    /// If only some seeds cross the threshold within the rates, the mean curve is used, without an
    /// interval.
    pub fn with(asked: f64, curves: &[Vec<(f64, f64)>]) -> Option<Self> {
        let each: Vec<Self> = curves.iter().filter_map(|c| crossing(asked, c)).collect();
        let rates: Vec<f64> = each.iter().filter_map(Self::rate).collect();
        if rates.len() == each.len() {
            return Estimate::of(&rates).map(Self::At);
        }
        if rates.is_empty() && each.iter().all(|s| s == &each[0]) {
            return each.first().copied();
        }
        // Seeds whose runs all failed have no curve.
        let told: Vec<&Vec<_>> = curves.iter().filter(|curve| !curve.is_empty()).collect();
        crossing(asked, &mean_curve(&told))
    }

    pub fn rate(&self) -> Option<f64> {
        match self {
            Self::At(estimate) => Some(estimate.mean),
            Self::BelowLowest(_) | Self::AboveHighest(_) => None,
        }
    }

    pub fn bound(&self) -> f64 {
        match self {
            Self::At(estimate) => estimate.mean,
            Self::BelowLowest(rate) | Self::AboveHighest(rate) => *rate,
        }
    }
}

impl std::fmt::Display for Sustained {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::BelowLowest(rate) => write!(f, "< {rate}"),
            Self::AboveHighest(rate) => write!(f, "> {rate}"),
            Self::At(estimate) => {
                write!(f, "{:.3}", estimate.mean)?;
                match estimate.half_width {
                    Some(half) => write!(f, " ± {half:.3}"),
                    None => Ok(()),
                }
            }
        }
    }
}

fn crossing(asked: f64, curve: &[(f64, f64)]) -> Option<Sustained> {
    let (&(lowest, first), &(highest, _)) = (curve.first()?, curve.last()?);
    if first < asked {
        return Some(Sustained::BelowLowest(lowest));
    }
    let fall = curve.windows(2).find(|pair| pair[0].1 >= asked && pair[1].1 < asked);
    Some(match fall {
        None => Sustained::AboveHighest(highest),
        Some(pair) => {
            let ((x0, y0), (x1, y1)) = (pair[0], pair[1]);
            let rate = x0 + (x1 - x0) * (y0 - asked) / (y0 - y1);
            Sustained::At(Estimate::of(&[rate])?)
        }
    })
}

fn mean_curve(curves: &[&Vec<(f64, f64)>]) -> Vec<(f64, f64)> {
    let Some(first) = curves.first() else { return Vec::new() };
    first
        .iter()
        .filter_map(|&(rate, _)| {
            let values: Option<Vec<f64>> = curves
                .iter()
                .map(|curve| curve.iter().find(|p| p.0 == rate).map(|p| p.1))
                .collect();
            Some((rate, Estimate::of(&values?)?.mean))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(attainments: &[f64]) -> Vec<(f64, f64)> {
        (1..).map(f64::from).zip(attainments.iter().copied()).collect()
    }

    #[test]
    fn it_lies_where_the_line_between_two_rates_crosses() {
        let found = Sustained::of(&[rates(&[1.0, 0.95, 0.85, 0.2])]).expect("rates");
        let rate = found.rate().expect("between them");
        assert!((rate - 2.5).abs() < 1e-12, "{rate}");
    }

    #[test]
    fn a_curve_that_recovers_counts_to_where_it_first_fell() {
        let found = Sustained::of(&[rates(&[0.95, 0.85, 0.95, 0.0])]).expect("rates");
        assert!((found.rate().expect("between") - 1.5).abs() < 1e-12);
    }

    #[test]
    fn beyond_the_rates_it_says_on_which_side() {
        assert_eq!(Sustained::of(&[rates(&[0.89, 0.95])]), Some(Sustained::BelowLowest(1.0)));
        assert_eq!(Sustained::of(&[rates(&[0.99, 0.9])]), Some(Sustained::AboveHighest(2.0)));
        assert_eq!(Sustained::of(&[]), None);
        assert_eq!(Sustained::of(&[vec![]]), None);
        assert_eq!(Sustained::AboveHighest(2.0).to_string(), "> 2", "as tables show it");
    }

    #[test]
    fn seeds_give_an_interval_and_if_one_lies_beyond_the_mean_curve_decides() {
        let both = Sustained::of(&[rates(&[1.0, 0.8]), rates(&[0.94, 0.86])]).expect("rates");
        let Sustained::At(estimate) = both else {
            panic!("between: {both:?}");
        };
        assert_eq!(estimate.count, 2);
        assert!((estimate.mean - 1.5).abs() < 1e-12);
        let mixed = Sustained::of(&[rates(&[1.0, 0.7]), rates(&[1.0, 0.9])]).expect("rates");
        let Sustained::At(estimate) = mixed else {
            panic!("between: {mixed:?}");
        };
        assert_eq!(estimate.half_width, None);
        assert!((estimate.mean - 1.5).abs() < 1e-12, "{estimate:?}");
    }

    #[test]
    fn a_seed_without_runs_does_not_hide_the_others() {
        let two = [rates(&[1.0, 0.7]), rates(&[1.0, 0.9])];
        let three = [rates(&[1.0, 0.7]), rates(&[1.0, 0.9]), Vec::new()];
        assert_eq!(Sustained::of(&three), Sustained::of(&two));
    }
}
