//! The experts that tokens are sent to, and the traffic of expert-parallel dispatch and combine
//! (stage 2, MFS §3.1), as expectations over tokens.
//!
//! The experts of a token are a set of size `top_k`. A set is drawn with a probability proportional
//! to the product of its experts' weights. Weights follow Zipf's law, `1 / r^skew` for the r-th
//! most popular expert. The order of popularity is drawn for each unit and layer. With `skew` 0 all
//! sets are equally likely. The elementary symmetric polynomials `e_k` of the weights give the
//! probabilities without sampling (`W` are all weights, `S` those of a rank's experts):
//!
//! ```text
//! P(expert i is one of the token's)      = w_i · e_{k−1}(W \ i) / e_k(W)
//! P(none of the token's experts is in S) = e_k(W \ S) / e_k(W)
//! ```
//!
//! All terms are sums of products of positive numbers. Powers use only `+ − × ÷` (`zipf`), so that
//! the result is the same on every machine.
//!
//! Experts are assigned in order: of `E` experts, rank `r` of `R` has `r·E/R` to `(r+1)·E/R`.

use std::ops::Range;

use rand::RngExt as _;
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::SeedableRng as _;

use super::Model;

/// Expected use of one layer's experts by the tokens of one unit.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertRouting {
    /// Probability for each expert that a token is sent to it. The sum is `top_k`.
    chosen: Vec<f64>,
    /// First expert of each rank, followed by the number of experts.
    first: Vec<u32>,
    /// Expected (token, expert) pairs of one token on each rank. The sum is `top_k`.
    pairs: Vec<f64>,
    reached: Vec<f64>,
}

/// Largest skew. No measured distribution is steeper, and weights stay representable.
const MOST_SKEW: f64 = 8.0;

impl ExpertRouting {
    /// Returns the expected use of the experts of `layer` by the tokens of `unit`, for `ranks`
    /// ranks. `skew` is Zipf's exponent, from 0 (even use) to 8.
    ///
    /// # Panics
    /// Panics if `ranks` is zero.
    pub fn new(model: &Model, ranks: u32, skew: f64, seed: u64, unit: u32, layer: u16) -> Self {
        let popularity = shuffled(model.experts, seed, unit, layer);
        let by_rank = zipf(model.experts, skew.clamp(0.0, MOST_SKEW));
        let weights: Vec<f64> = popularity.iter().map(|&r| by_rank[r as usize]).collect();
        Self::from_weights(&weights, model.top_k as usize, ranks)
    }

    fn from_weights(weights: &[f64], top_k: usize, ranks: u32) -> Self {
        assert!(ranks > 0, "experts lie on one rank at least");
        let experts = weights.len();
        // Polynomials e_0 … e_k of the first i weights, and of all weights but the first i.
        let before = prefixes(weights.iter(), top_k);
        let mut after = prefixes(weights.iter().rev(), top_k);
        after.reverse();
        let all = before[experts][top_k];
        let without = |range: Range<usize>, k: usize| -> f64 {
            (0..=k).map(|j| before[range.start][j] * after[range.end][k - j]).sum()
        };
        let chosen: Vec<f64> =
            (0..experts).map(|i| weights[i] * without(i..i + 1, top_k - 1) / all).collect();
        let first: Vec<u32> = (0..=ranks)
            .map(|rank| (u64::from(rank) * experts as u64 / u64::from(ranks)) as u32)
            .collect();
        let ranges = || first.windows(2).map(|w| w[0] as usize..w[1] as usize);
        let pairs = ranges().map(|on| chosen[on].iter().sum()).collect();
        let reached = ranges().map(|on| (1.0 - without(on, top_k) / all).clamp(0.0, 1.0)).collect();
        Self { chosen, first, pairs, reached }
    }

    pub fn experts_of(&self, rank: usize) -> Range<u32> {
        self.first[rank]..self.first[rank + 1]
    }

    /// Returns the expected (token, expert) pairs of one token on a rank.
    pub fn expected_pairs(&self, rank: usize) -> f64 {
        self.pairs[rank]
    }

    /// Returns the expected copies of one token's hidden state on a rank, including tokens of the
    /// rank itself. A rank receives one copy if it has at least one of the token's experts, as in
    /// DeepEP.
    pub fn expected_copies(&self, rank: usize) -> f64 {
        self.reached[rank]
    }

    /// Returns the expected number of a rank's experts that receive any of the unit's `tokens`
    /// tokens.
    pub fn active_experts(&self, rank: usize, tokens: u64) -> f64 {
        let on = self.first[rank] as usize..self.first[rank + 1] as usize;
        self.chosen[on].iter().map(|p| 1.0 - power((1.0 - p).max(0.0), tokens)).sum()
    }
}

/// Returns `0..count` in a random order that depends on seed, unit and layer.
fn shuffled(count: u32, seed: u64, unit: u32, layer: u16) -> Vec<u32> {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..12].copy_from_slice(&unit.to_le_bytes());
    key[12..14].copy_from_slice(&layer.to_le_bytes());
    key[16..].copy_from_slice(b"expert routing 1");
    let mut random = ChaCha12Rng::from_seed(key);
    let mut order: Vec<u32> = (0..count).collect();
    for left in (1..count).rev() {
        order.swap(left as usize, random.random_range(0..=left) as usize);
    }
    order
}

/// Returns the polynomials `e_0 … e_k` of each prefix of the weights, starting with the empty one.
fn prefixes<'a>(weights: impl Iterator<Item = &'a f64>, k: usize) -> Vec<Vec<f64>> {
    let mut so_far = vec![0.0; k + 1];
    so_far[0] = 1.0;
    let mut all = vec![so_far.clone()];
    for weight in weights {
        for j in (1..=k).rev() {
            so_far[j] += weight * so_far[j - 1];
        }
        all.push(so_far.clone());
    }
    all
}

fn power(mut base: f64, mut exponent: u64) -> f64 {
    let mut product = 1.0;
    while exponent > 0 && product > 0.0 {
        if exponent % 2 == 1 {
            product *= base;
        }
        base *= base;
        exponent /= 2;
    }
    product
}

/// Returns `1 / r^skew` for r = 1 to `count`, scaled to a mean of 1.
fn zipf(count: u32, skew: f64) -> Vec<f64> {
    let weights: Vec<f64> =
        (1..=count).map(|r| exponential(-skew * logarithm(f64::from(r)))).collect();
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight * f64::from(count) / sum).collect()
}

const SQRT_2: f64 = std::f64::consts::SQRT_2;
const LN_2: f64 = std::f64::consts::LN_2;

/// Returns the natural logarithm of a number ≥ 1, with the same bits on every platform.
fn logarithm(mut x: f64) -> f64 {
    let mut halvings = 0.0;
    while x > SQRT_2 {
        x /= 2.0;
        halvings += 1.0;
    }
    // ln x = 2 artanh z with |z| < 0.18: terms beyond the 11th are below the last bit.
    let z = (x - 1.0) / (x + 1.0);
    let (mut term, mut sum) = (z, 0.0);
    for k in 0..11 {
        sum += term / f64::from(2 * k + 1);
        term *= z * z;
    }
    halvings * LN_2 + 2.0 * sum
}

/// Returns the exponential of a number ≤ 0, with the same bits on every platform.
fn exponential(mut x: f64) -> f64 {
    let mut scale = 1.0;
    while x < -LN_2 && scale > 0.0 {
        x += LN_2;
        scale /= 2.0;
    }
    let (mut term, mut sum) = (1.0, 0.0);
    for k in 1..22 {
        sum += term;
        term *= x / f64::from(k);
    }
    scale * sum
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn model(name: &str) -> Model {
        Model::named(name).unwrap()
    }

    #[test]
    fn powers_are_those_of_the_library() {
        for r in 1..600 {
            for skew in [0.0, 0.2, 1.0, 3.7, 8.0] {
                let ours = exponential(-skew * logarithm(f64::from(r)));
                let theirs = f64::from(r).powf(-skew);
                assert!((ours / theirs - 1.0).abs() < 1e-12, "{r} {skew}");
            }
        }
        assert!((power(0.9, 37) / 0.9_f64.powi(37) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn without_skew_ranks_are_reached_as_combinatorics_says() {
        // DBRX on 2 ranks has 1 − C(8, 4) / C(16, 4).
        let two = ExpertRouting::new(&model("dbrx"), 2, 0.0, 1, 0, 0);
        assert!((two.expected_copies(0) - (1.0 - 70.0 / 1820.0)).abs() < 1e-12);
        assert!((two.expected_pairs(1) - 2.0).abs() < 1e-12);
        // On 16 ranks each has one expert, so pairs and copies are equal.
        let sixteen = ExpertRouting::new(&model("dbrx"), 16, 0.0, 1, 0, 0);
        for rank in 0..16 {
            assert!((sixteen.expected_copies(rank) - 0.25).abs() < 1e-12);
            assert!((sixteen.expected_pairs(rank) - 0.25).abs() < 1e-12);
        }
    }

    #[test]
    fn the_expectations_are_those_of_drawn_tokens() {
        // All sets of 2 out of 5, each with the product of its weights as its probability.
        let weights = [3.0, 1.0, 0.5, 2.0, 1.0];
        let routing = ExpertRouting::from_weights(&weights, 2, 2);
        let (mut all, mut has_third, mut has_low) = (0.0, 0.0, 0.0);
        for a in 0..5 {
            for b in a + 1..5 {
                let likely = weights[a] * weights[b];
                all += likely;
                has_third += if a == 2 || b == 2 { likely } else { 0.0 };
                has_low += if a < 2 { likely } else { 0.0 };
            }
        }
        assert_eq!(routing.experts_of(0), 0..2);
        assert!((routing.chosen[2] - has_third / all).abs() < 1e-12);
        assert!((routing.expected_copies(0) - has_low / all).abs() < 1e-12);
    }

    #[test]
    fn it_depends_on_seed_unit_and_layer_and_on_nothing_else() {
        let dbrx = model("dbrx");
        let drawn = |seed, unit, layer| ExpertRouting::new(&dbrx, 16, 0.5, seed, unit, layer);
        assert_eq!(drawn(1, 2, 3), drawn(1, 2, 3));
        for other in [drawn(2, 2, 3), drawn(1, 3, 3), drawn(1, 2, 4)] {
            assert_ne!(drawn(1, 2, 3), other);
        }
    }

    #[test]
    fn with_few_tokens_few_experts_are_active() {
        let next = ExpertRouting::new(&model("qwen3-coder-next"), 8, 0.0, 1, 0, 0);
        assert!((next.active_experts(0, 0)).abs() < 1e-12);
        // Ten of 512 experts are chosen, and 64 of the 512 are on this rank.
        assert!((next.active_experts(0, 1) - 1.25).abs() < 1e-9);
        assert!((next.active_experts(0, 100_000) - 64.0).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn a_token_has_all_of_its_experts_and_no_more_copies_than_pairs(
            experts in 2u32..64,
            top_k in 1u32..9,
            ranks in 1u32..20,
            skew in 0.0f64..2.0,
            seed: u64,
        ) {
            let mut model = model("dbrx");
            model.experts = experts;
            model.top_k = top_k.min(experts);
            let routing = ExpertRouting::new(&model, ranks, skew, seed, 0, 0);
            let k = f64::from(model.top_k);
            let sum: f64 = routing.chosen.iter().sum();
            prop_assert!((sum / k - 1.0).abs() < 1e-9, "{sum}");
            for rank in 0..ranks as usize {
                prop_assert!(routing.expected_copies(rank) <= routing.expected_pairs(rank) + 1e-9);
            }
        }
    }
}
