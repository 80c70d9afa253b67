//! Distributions over all seeds, computed from the percentiles of each seed.

use super::Report;
use crate::outcome::{Distribution, Outcome};

/// A cumulative curve as points of value and share of the sample below.
pub(super) type Curve = Vec<(f64, f64)>;

/// Returns the curve of a variant at a point over all seeds. Each seed has the weight of its sample
/// size. Empty if the samples are.
pub(super) fn curve(
    report: &Report,
    point: usize,
    variant: usize,
    of: fn(&Outcome) -> &Distribution,
) -> Curve {
    pool(report.runs_of(point, variant).map(|run| of(&run.outcome)))
}

fn pool<'a>(samples: impl Iterator<Item = &'a Distribution>) -> Curve {
    const STEPS: usize = 200;
    let mut weighted: Vec<(f64, f64)> = Vec::new();
    for sample in samples {
        // Percentiles are ends of 100 equal parts, so the outer two have half the weight.
        let last = sample.percentiles.len().saturating_sub(1);
        for (index, &value) in sample.percentiles.iter().enumerate() {
            let part = if index == 0 || index == last { 0.5 } else { 1.0 };
            weighted.push((value, part * sample.count as f64));
        }
    }
    weighted.sort_by(|a, b| a.0.total_cmp(&b.0));
    let total: f64 = weighted.iter().map(|(_, weight)| weight).sum();
    let (Some(&(first, _)), true) = (weighted.first(), total > 0.0) else {
        return Curve::new();
    };
    let (mut curve, mut below) = (vec![(first, 0.0)], 0.0);
    for (value, weight) in weighted {
        below += weight;
        let share = below / total;
        // More points than can be seen only make the page larger.
        let last = curve.last().expect("it starts with one").1;
        if share - last >= 1.0 / STEPS as f64 {
            curve.push((value, share));
        }
    }
    curve
}

/// Returns the value below which `share` of the curve lies.
pub(super) fn quantile(curve: &Curve, share: f64) -> f64 {
    curve.iter().find(|point| point.1 >= share).or(curve.last()).map_or(0.0, |point| point.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_weigh_as_much_as_their_samples() {
        let few = Distribution::of(vec![100.0; 100]);
        let many = Distribution::of((0..300).map(|i| f64::from(i) / 10.0).collect());
        let pooled = pool([&few, &many].into_iter());
        assert!(quantile(&pooled, 0.5) < 30.0);
        assert_eq!(quantile(&pooled, 0.8), 100.0, "the upper quarter is the few");
        assert_eq!(quantile(&pooled, 1.0), 100.0);
        assert!(pooled.windows(2).all(|p| p[0].0 <= p[1].0 && p[0].1 < p[1].1));
        assert!(pool([].into_iter()).is_empty());
        assert!(pool([&Distribution::default()].into_iter()).is_empty());
    }

    #[test]
    fn one_sample_keeps_its_median() {
        let one = Distribution::of((0..=1000).map(f64::from).collect());
        let median = quantile(&pool([&one].into_iter()), 0.5);
        assert!((median - 500.0).abs() <= 10.0, "{median}");
    }
}
