//! Isotonic regression: the nondecreasing step function with the least squared distance to given
//! points (pool adjacent violators, Barlow et al. 1972). Maestro §III-B calibrates its classifier
//! of tool calls with it.
//!
//! The code is here because `pav_regression` is LGPL, and `linfa-linear` needs an optimiser and a
//! matrix library.

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Isotonic {
    /// Mean x and y of each block, both in rising order.
    knots: Vec<(f64, f64)>,
}

#[derive(Clone, Copy)]
struct Block {
    x: f64,
    y: f64,
    weight: f64,
}

impl Isotonic {
    /// Fits points in any order. Points that aren't finite are ignored.
    pub fn fit(points: &[(f64, f64)]) -> Self {
        let mut points: Vec<(f64, f64)> =
            points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite()).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut blocks: Vec<Block> = Vec::new();
        for (x, y) in points {
            let mut block = Block { x, y, weight: 1.0 };
            // Points with equal x are one block. Blocks with falling y are merged.
            while let Some(last) = blocks.last().copied() {
                if last.y < block.y && last.x < block.x {
                    break;
                }
                blocks.pop();
                let weight = last.weight + block.weight;
                block = Block {
                    x: last.x.mul_add(last.weight, block.x * block.weight) / weight,
                    y: last.y.mul_add(last.weight, block.y * block.weight) / weight,
                    weight,
                };
            }
            blocks.push(block);
        }
        Self { knots: blocks.iter().map(|block| (block.x, block.y)).collect() }
    }

    /// Returns the value at `x`: interpolated between blocks, and constant beyond the ends. Without
    /// points it returns `x`, limited to 0 to 1.
    pub fn at(&self, x: f64) -> f64 {
        let (Some(first), Some(last)) = (self.knots.first(), self.knots.last()) else {
            return x.clamp(0.0, 1.0);
        };
        if x.is_nan() || x <= first.0 {
            return first.1;
        }
        if x >= last.0 {
            return last.1;
        }
        let after = self.knots.partition_point(|knot| knot.0 <= x);
        let (a, b) = (self.knots[after - 1], self.knots[after]);
        let share = (x - a.0) / (b.0 - a.0);
        a.1 + share * (b.1 - a.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_falls_is_pooled_into_its_mean() {
        let fit = Isotonic::fit(&[(0.0, 0.0), (1.0, 3.0), (2.0, 1.0), (3.0, 5.0)]);
        assert_eq!(fit.at(1.5), 2.0);
        assert_eq!(fit.at(3.0), 5.0);
    }

    #[test]
    fn without_points_it_is_the_identity_on_probabilities() {
        assert_eq!(Isotonic::default().at(0.3), 0.3);
        assert_eq!(Isotonic::default().at(3.0), 1.0);
    }

    proptest! {
        #[test]
        fn it_never_falls_and_keeps_the_mean(
            points in prop::collection::vec((0.0..1.0f64, prop::bool::ANY), 1..80),
        ) {
            let points: Vec<(f64, f64)> =
                points.into_iter().map(|(x, y)| (x, f64::from(u8::from(y)))).collect();
            let fit = Isotonic::fit(&points);
            let steps: Vec<f64> = (0..=50).map(|i| fit.at(f64::from(i) / 50.0)).collect();
            prop_assert!(steps.windows(2).all(|pair| pair[0] <= pair[1] + 1e-12));
            prop_assert!(steps.iter().all(|p| (0.0..=1.0).contains(p)));
        }
    }
}
