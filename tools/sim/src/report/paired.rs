//! Differences between variants on the same arrivals. They are taken seed by seed, so that effects
//! of the arrivals cancel out.

use serde::Serialize;

use super::estimate::Estimate;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Above,
    /// The difference is not significant.
    Level,
    Below,
    /// There is one seed, so that the noise is unknown.
    Unknown,
}

impl Verdict {
    pub fn of(difference: &Estimate) -> Self {
        match difference.half_width {
            None if difference.mean == 0.0 => Self::Level,
            None => Self::Unknown,
            Some(_) if difference.low() > 0.0 => Self::Above,
            Some(_) if difference.high() < 0.0 => Self::Below,
            Some(_) => Self::Level,
        }
    }
}

/// Returns the mean difference over common seeds, or `None` if there are none.
pub fn difference(reference: &[(u64, f64)], other: &[(u64, f64)]) -> Option<Estimate> {
    let differences: Vec<f64> = reference
        .iter()
        .filter_map(|(seed, a)| {
            let (_, b) = other.iter().find(|(s, _)| s == seed)?;
            Some(a - b)
        })
        .collect();
    Estimate::of(&differences)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_by_seed_and_what_one_lacks_is_left_out() {
        let ours = [(1, 0.9), (2, 0.5), (3, 0.7)];
        let theirs = [(3, 0.6), (1, 0.8)];
        let found = difference(&ours, &theirs).expect("two seeds");
        assert_eq!(found.count, 2);
        assert!((found.mean - 0.1).abs() < 1e-12);
        assert_eq!(difference(&ours, &[(9, 1.0)]), None);
    }

    #[test]
    fn a_difference_counts_only_beyond_the_noise_of_the_pairs() {
        let of = |values: &[f64]| Verdict::of(&Estimate::of(values).expect("values"));
        // The attainments may vary much. Only their differences matter.
        assert_eq!(of(&[0.10, 0.11, 0.09]), Verdict::Above);
        assert_eq!(of(&[0.10, -0.11, 0.02]), Verdict::Level);
        assert_eq!(of(&[-0.10, -0.11, -0.09]), Verdict::Below);
        assert_eq!(of(&[0.0, 0.0]), Verdict::Level);
        assert_eq!(of(&[0.3]), Verdict::Unknown);
    }
}
