//! Trains the batch predictor of QoServe (§3.6.1), a random forest (`smartcore`), on iterations of
//! a [`Latency`], in the simulator the roofline.
//!
//! Iterations of a [`Latency`] are drawn over the range that a replica sees: prompt tokens,
//! prefixes, decodes and contexts. Draws are uniform in the logarithm, so that small iterations are
//! well covered. A tenth is used to measure the error, and another tenth to choose a safe margin.
//! The trees of `smartcore` are private. They are read from its serialised form and evaluated by
//! [`Forest`].

use crate::compute::least_squares::{Parameter, least_squares};
use laxity_requests::latency::{Composition, Latency};
use laxity_requests::qoserve::{Forest, ForestError, LinearTerms, Node, features};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha12Rng;
use serde::Deserialize;
use smartcore::ensemble::random_forest_regressor::{
    RandomForestRegressor, RandomForestRegressorParameters,
};
use smartcore::linalg::basic::matrix::DenseMatrix;

#[derive(Clone, Copy, Debug)]
pub struct Training {
    pub iterations: usize,
    pub prompt_tokens: u32,
    pub prefix: u32,
    pub decodes: u32,
    pub context: u32,
    pub trees: usize,
    pub depth: u16,
    pub seed: u64,
}

impl Default for Training {
    fn default() -> Self {
        Self {
            iterations: 20_000,
            prompt_tokens: 2_560,
            prefix: 8_192,
            decodes: 256,
            context: 4_096,
            trees: 16,
            depth: 16,
            seed: 1,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timed {
    pub of: Composition,
    /// Time including host work, in nanoseconds.
    pub ns: u64,
}

/// The errors of a predictor on iterations that it was not trained on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Errors {
    pub iterations: usize,
    /// Mean absolute error, in percent.
    pub mean: f64,
    /// 95th percentile of the absolute error, in percent.
    pub p95: f64,
    /// Largest absolute error, in percent.
    pub most: f64,
    /// Percentage of iterations that take longer than predicted with a margin of 5 %, so that a
    /// token may be late.
    pub late: f64,
    /// Margin that covers the share [`SAFE`] of iterations, at least 0.05. Policies should plan
    /// with it. It is measured on a separate set of iterations.
    pub margin: f64,
    pub late_with_margin: f64,
}

/// Share of iterations that must not take longer than planned (§3.6.1: "err on the side of
/// under-predicting chunk size"). An answer of 30 tokens spans 30 iterations, and a single slow one
/// makes it late.
pub const SAFE: f64 = 0.998;

const FEWEST: usize = 100;

#[derive(Debug, thiserror::Error)]
pub enum TrainingError {
    #[error("{0} iterations are too few to train a predictor on: 100 at least")]
    Few(usize),
    #[error("training a random forest: {0}")]
    Trainer(String),
    #[error("reading the trees of a random forest: {0}")]
    Trees(#[from] serde_json::Error),
    #[error(transparent)]
    Forest(#[from] ForestError),
}

/// A tree in the serialised form of `smartcore` 0.7.
#[derive(Deserialize)]
struct Tree {
    nodes: Vec<TreeNode>,
}

#[derive(Deserialize)]
struct TreeNode {
    output: f64,
    split_feature: usize,
    split_value: Option<f64>,
    true_child: Option<usize>,
    false_child: Option<usize>,
}

impl Tree {
    /// Appends the nodes in the order in which [`Forest`] visits them.
    fn walk(&self, at: usize, into: &mut Vec<Node>) -> Result<(), TrainingError> {
        let missing = || TrainingError::Trainer(format!("its tree has no node {at}"));
        let place = self.nodes.get(at).ok_or_else(missing)?;
        let children = (place.true_child, place.false_child, place.split_value);
        let (Some(below), Some(above), Some(most)) = children else {
            into.push(Node::Leaf(place.output as f32));
            return Ok(());
        };
        let here = into.len();
        into.push(Node::Leaf(place.output as f32));
        self.walk(below, into)?;
        into[here] = Node::Split {
            feature: u8::try_from(place.split_feature).unwrap_or(u8::MAX),
            most: most as f32,
            above: into.len() as u32,
        };
        self.walk(above, into)
    }
}

/// Returns a number from 0 to `most`, uniform in the logarithm.
fn even(rng: &mut ChaCha12Rng, most: u32) -> u32 {
    let top = f64::from(most + 1).ln();
    (rng.random::<f64>() * top).exp() as u32 - 1
}

fn draw(rng: &mut ChaCha12Rng, of: &Training) -> Composition {
    let mut drawn = Composition::default();
    // One in ten iterations has no prompt, and one in ten has no decodes.
    let kind = rng.random_range(0..10);
    if kind > 0 {
        let mut tokens = if rng.random() {
            even(rng, of.prompt_tokens - 1) + 1
        } else {
            rng.random_range(1..=of.prompt_tokens)
        };
        while tokens > 0 {
            // A chunk may end one prompt and begin the next.
            let some = rng.random_range(1..=tokens);
            let some = if rng.random() { tokens } else { some };
            drawn = drawn.with_chunk(even(rng, of.prefix), some);
            tokens -= some;
        }
    }
    if kind < 9 {
        let context = even(rng, of.context);
        for _ in 0..=even(rng, of.decodes - 1) {
            drawn = drawn.with_decode(rng.random_range(context / 2..=context));
        }
    }
    drawn
}

fn timed(latency: &dyn Latency, of: &Training, count: usize, seed: u64) -> Vec<Timed> {
    let mut rng = ChaCha12Rng::seed_from_u64(seed);
    let drawn = (0..count).map(|_| draw(&mut rng, of));
    let time = |of| Timed { of, ns: latency.iteration(&of).0 };
    drawn.map(time).collect()
}

/// Trains a predictor of `latency` and measures its errors.
/// Returns [`TrainingError`] if there is too little data or the trainer fails.
pub fn train(latency: &dyn Latency, of: &Training) -> Result<(Forest, Errors), TrainingError> {
    if of.iterations < FEWEST {
        return Err(TrainingError::Few(of.iterations));
    }
    let timed = timed(latency, of, of.iterations, of.seed);
    grow(&timed, of)
}

/// Trains on the data without two tenths: one for tests, and one to choose the margin.
fn grow(timed: &[Timed], shape: &Training) -> Result<(Forest, Errors), TrainingError> {
    let (held_out, rest) = timed.split_at(timed.len() / 10);
    let (sized_by, learnt) = rest.split_at(timed.len() / 10);
    let line = line(learnt);
    let rows: Vec<Vec<f64>> = learnt.iter().map(|t| features(&t.of).to_vec()).collect();
    let failed = |failure: smartcore::error::Failed| TrainingError::Trainer(failure.to_string());
    let x = DenseMatrix::from_2d_vec(&rows).map_err(failed)?;
    let y: Vec<f64> = learnt
        .iter()
        .map(|timed| (timed.ns.max(1) as f64 / line.ns(&features(&timed.of))).ln())
        .collect();
    let parameters = RandomForestRegressorParameters::default()
        .with_n_trees(shape.trees)
        .with_max_depth(shape.depth)
        .with_min_samples_leaf(1)
        .with_m(features(&Composition::default()).len())
        .with_seed(shape.seed);
    let trained = RandomForestRegressor::fit(&x, &y, parameters).map_err(failed)?;
    let mut value = serde_json::to_value(&trained)?;
    let trees: Vec<Tree> = serde_json::from_value(value["forest_regressor"]["trees"].take())?;
    let walked = trees.iter().map(|tree| {
        let mut nodes = Vec::with_capacity(tree.nodes.len());
        tree.walk(0, &mut nodes).map(|()| nodes)
    });
    let forest = Forest::new(line, &walked.collect::<Result<Vec<_>, _>>()?)?;
    let margin = safe_margin(&forest, sized_by);
    let errors = errors(&forest, held_out, margin);
    Ok((forest, errors))
}

fn line(of: &[Timed]) -> LinearTerms {
    // A few hundred iterations suffice for six numbers.
    let of = &of[..of.len().min(600)];
    let times: Vec<f64> = of.iter().map(|timed| timed.ns.max(1) as f64).collect();
    let features: Vec<_> = of.iter().map(|timed| features(&timed.of)).collect();
    let least = times.iter().copied().fold(f64::INFINITY, f64::min);
    let of = |p: &[f64; 6]| LinearTerms {
        fixed: p[0],
        floor: p[1],
        token: p[2],
        pair: p[3],
        context: p[4],
        request: p[5],
    };
    let found = least_squares(
        [
            Parameter::new(least / 2.0, 1.0, least * 2.0),
            Parameter::new(least / 2.0, 1.0, least * 2.0),
            Parameter::new(5e4, 1.0, 1e8),
            Parameter::new(1.0, 1e-3, 1e5),
            Parameter::new(50.0, 1e-3, 1e6),
            Parameter::new(1e3, 1e-1, 1e7),
        ],
        |parameters, out| {
            let line = of(parameters);
            out.clear();
            out.extend(
                features.iter().zip(&times).map(|(features, time)| (line.ns(features) / time).ln()),
            );
        },
    );
    of(&found)
}

/// Returns the ratios of measured to predicted times, ascending.
fn ratios(forest: &Forest, of: &[Timed]) -> Vec<f64> {
    let ratio = |of: &Timed| of.ns as f64 / forest.iteration(&of.of).0.max(1) as f64;
    let mut all: Vec<f64> = of.iter().map(ratio).collect();
    all.sort_by(f64::total_cmp);
    all
}

/// Returns the margin that covers the share [`SAFE`] of the iterations, at least 5 %.
fn safe_margin(forest: &Forest, sized_by: &[Timed]) -> f64 {
    let sizes = ratios(forest, sized_by);
    (sizes[(SAFE * (sizes.len() - 1) as f64).ceil() as usize] - 1.0).max(0.05)
}

fn errors(forest: &Forest, held_out: &[Timed], margin: f64) -> Errors {
    let ratios = ratios(forest, held_out);
    let mut off: Vec<f64> = ratios.iter().map(|r| (1.0 / r - 1.0).abs()).collect();
    off.sort_by(f64::total_cmp);
    let count = off.len() as f64;
    let beyond = |margin: f64| {
        let late = ratios.iter().filter(|ratio| **ratio > 1.0 + margin);
        late.count() as f64 / count * 100.0
    };
    Errors {
        iterations: off.len(),
        mean: off.iter().sum::<f64>() / count * 100.0,
        p95: off[(0.95 * (count - 1.0)) as usize] * 100.0,
        most: off[off.len() - 1] * 100.0,
        late: beyond(0.05),
        margin,
        late_with_margin: beyond(margin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::Gpu;
    use crate::model::Model;
    use crate::requests::latency::Roofline;
    use laxity_requests::Span;

    #[test]
    fn a_forest_learns_the_roofline_and_says_how_well() {
        let gpu = Gpu::named("a100").expect("built in");
        let model = Model::named("llama-3-8b").expect("built in");
        let roofline = Roofline::new(&gpu, &model, 1, Span::from_millis(2));
        let training = Training { iterations: 3_000, trees: 8, ..Training::default() };
        let (forest, errors) = train(&roofline, &training).expect("enough to learn from");
        assert_eq!((forest.trees(), errors.iterations), (8, 300));
        assert!(errors.mean < 10.0, "{errors:?}");
        assert!(errors.p95 < 30.0, "{errors:?}");
        assert!(errors.margin >= 0.05 && errors.late_with_margin <= 2.0, "{errors:?}");
        // The same seed gives the same forest.
        let (again, _) = train(&roofline, &training).expect("as before");
        assert_eq!(again, forest);
    }

    #[test]
    fn too_little_to_learn_from_is_said() {
        let nothing: &dyn Latency =
            &Forest::new(LinearTerms::NONE, &[vec![Node::Leaf(1.0)]]).expect("a leaf");
        let training = Training { iterations: 50, ..Training::default() };
        let error = train(nothing, &training).expect_err("too few");
        assert!(error.to_string().starts_with("50 iterations"), "{error}");
    }
}
