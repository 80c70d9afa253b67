//! Trains the batch predictor of QoServe (§3.6.1): a random forest (`smartcore`) on iterations of a
//! [`Latency`], which in the simulator is the roofline ([`train`]), or on those that a machine
//! measured ([`train_on`], `measured`). `laxity sim train-latency` is the command.
//!
//! Of a [`Latency`], iterations are drawn over what a replica meets: prompt tokens up to the
//! largest chunk and none, prefixes, decodes and their contexts, evenly in the logarithm, so that
//! small ones are as well covered as large ones. A tenth is held out, and the error on it is
//! reported; another tenth says what margin is safe. `smartcore` keeps its trees to itself; they
//! are read from what it serialises, and asked by [`Forest`], which needs no matrix.

use crate::compute::least_squares::{Parameter, least_squares};
use laxity_requests::latency::{Composition, Latency};
use laxity_requests::qoserve::{Forest, ForestError, LinearTerms, Node, features};
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha12Rng;
use serde::{Deserialize, Serialize};
use smartcore::ensemble::random_forest_regressor::{
    RandomForestRegressor, RandomForestRegressorParameters,
};
use smartcore::linalg::basic::matrix::DenseMatrix;

/// What to train on.
#[derive(Clone, Copy, Debug)]
pub struct Training {
    /// Iterations, those held out included.
    pub iterations: usize,
    /// Prompt tokens of an iteration at most.
    pub prompt_tokens: u32,
    /// Tokens before a chunk at most.
    pub prefix: u32,
    /// Requests that decode at most.
    pub decodes: u32,
    /// Tokens that one of those attends to at most.
    pub context: u32,
    /// Trees.
    pub trees: usize,
    /// Splits from a tree's root to a leaf at most.
    pub depth: u16,
    /// For what is drawn.
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

/// An iteration, and how long it took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timed {
    /// What was in it.
    pub of: Composition,
    /// Host work included, ns.
    pub ns: u64,
}

/// The form of a forest.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Trees.
    pub trees: usize,
    /// Splits from a tree's root to a leaf at most.
    pub depth: u16,
    /// For what is drawn.
    pub seed: u64,
}

/// How far off a predictor is, on iterations that it was not trained on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Errors {
    /// Iterations.
    pub iterations: usize,
    /// Mean of the absolute error, %.
    pub mean: f64,
    /// 95th percentile of it, %.
    pub p95: f64,
    /// Largest, %.
    pub most: f64,
    /// Iterations that take longer than predicted with a margin of 5 %, in percent: those in which
    /// a token may come too late.
    pub late: f64,
    /// The margin that [`SAFE`] of the iterations stay within, at least 0.05: what a policy should
    /// plan with. From other iterations than those that the rest is about.
    pub margin: f64,
    /// Iterations that take longer than predicted with that margin, %.
    pub late_with_margin: f64,
}

/// Share of iterations that shall not take longer than planned (§3.6.1: "err on the side of
/// under-predicting chunk size"). An answer of 30 tokens meets with 30 iterations, and one that is
/// too long makes it late.
pub const SAFE: f64 = 0.998;

/// Iterations that something can be learnt from, a tenth of them held out.
const FEWEST: usize = 100;

/// A predictor cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum TrainingError {
    /// There is too little to train on: ask for more iterations.
    #[error("{0} iterations are too few to train a predictor on: 100 at least")]
    Few(usize),
    /// The trainer gave up.
    #[error("training a random forest: {0}")]
    Trainer(String),
    /// Its trees have another form than was expected: another version of `smartcore`.
    #[error("reading the trees of a random forest: {0}")]
    Trees(#[from] serde_json::Error),
    /// They can't be walked.
    #[error(transparent)]
    Forest(#[from] ForestError),
}

/// A tree as `smartcore` 0.7 serialises it.
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
    /// In the order in which [`Forest`] walks it.
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

/// A number from 0 to `most`, evenly in the logarithm.
fn even(rng: &mut ChaCha12Rng, most: u32) -> u32 {
    let top = f64::from(most + 1).ln();
    (rng.random::<f64>() * top).exp() as u32 - 1
}

fn draw(rng: &mut ChaCha12Rng, of: &Training) -> Composition {
    let mut drawn = Composition::default();
    // One in ten has no prompt, one in ten no decodes.
    let kind = rng.random_range(0..10);
    if kind > 0 {
        let mut tokens = if rng.random() {
            even(rng, of.prompt_tokens - 1) + 1
        } else {
            rng.random_range(1..=of.prompt_tokens)
        };
        while tokens > 0 {
            // A chunk ends the prompt of one and begins that of the next.
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
    let time = |of| Timed {
        of,
        ns: latency.iteration(&of).0,
    };
    drawn.map(time).collect()
}

/// Says how far off a predictor of something else is on iterations of `latency`, with the margin
/// that it has.
#[must_use]
pub fn judge(forest: &Forest, latency: &dyn Latency, of: &Training, margin: f64) -> Errors {
    let count = (of.iterations / 10).max(1);
    errors(forest, &timed(latency, of, count, of.seed), margin)
}

/// Trains a predictor of `latency`, and says how far off it is.
///
/// # Errors
/// See [`TrainingError`].
pub fn train(latency: &dyn Latency, of: &Training) -> Result<(Forest, Errors), TrainingError> {
    if of.iterations < FEWEST {
        return Err(TrainingError::Few(of.iterations));
    }
    let timed = timed(latency, of, of.iterations, of.seed);
    let shape = Shape {
        trees: of.trees,
        depth: of.depth,
        seed: of.seed,
    };
    grow(&timed, shape)
}

/// Trains a predictor on iterations that were measured, and says how far off it is on those of them
/// that it did not see.
///
/// # Errors
/// See [`TrainingError`].
pub fn train_on(measured: &[Timed], shape: Shape) -> Result<(Forest, Errors), TrainingError> {
    if measured.len() < FEWEST {
        return Err(TrainingError::Few(measured.len()));
    }
    // A load that grows from the first row to the last would be learnt from its beginning and
    // judged by its end.
    let mut measured = measured.to_vec();
    measured.shuffle(&mut ChaCha12Rng::seed_from_u64(shape.seed));
    grow(&measured, shape)
}

/// A tenth is held out, another says what margin is safe, the rest is learnt from.
fn grow(timed: &[Timed], shape: Shape) -> Result<(Forest, Errors), TrainingError> {
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

/// The line through those iterations that is least off, relatively.
fn line(of: &[Timed]) -> LinearTerms {
    // A few hundred are enough for six numbers.
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
                features
                    .iter()
                    .zip(&times)
                    .map(|(features, time)| (line.ns(features) / time).ln()),
            );
        },
    );
    of(&found)
}

/// Measured over predicted times, ascending.
fn ratios(forest: &Forest, of: &[Timed]) -> Vec<f64> {
    let ratio = |of: &Timed| of.ns as f64 / forest.iteration(&of.of).0.max(1) as f64;
    let mut all: Vec<f64> = of.iter().map(ratio).collect();
    all.sort_by(f64::total_cmp);
    all
}

/// The margin that [`SAFE`] of the iterations stay within, 5 % at least.
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
        let training = Training {
            iterations: 3_000,
            trees: 8,
            ..Training::default()
        };
        let (forest, errors) = train(&roofline, &training).expect("enough to learn from");
        assert_eq!((forest.trees(), errors.iterations), (8, 300));
        assert!(errors.mean < 10.0, "{errors:?}");
        assert!(errors.p95 < 30.0, "{errors:?}");
        assert!(
            errors.margin >= 0.05 && errors.late_with_margin <= 2.0,
            "{errors:?}"
        );
        // Through a file, and the same for the same seed.
        let text = serde_json::to_string(&forest).expect("numbers");
        let read: Forest = serde_json::from_str(&text).expect("as it was written");
        assert_eq!(read, forest);
        let (again, _) = train(&roofline, &training).expect("as before");
        assert_eq!(again, forest);
    }

    #[test]
    fn measured_iterations_are_learnt_in_whatever_order_they_come_and_noise_widens_the_margin() {
        let gpu = Gpu::named("a100").expect("built in");
        let model = Model::named("llama-3-8b").expect("built in");
        let roofline = Roofline::new(&gpu, &model, 1, Span::from_millis(2));
        let training = Training {
            iterations: 3_000,
            ..Training::default()
        };
        let mut rows = timed(&roofline, &training, 3_000, 5);
        // From the shortest to the longest: what a test with a growing load leaves.
        rows.sort_by_key(|row| row.ns);
        let shape = Shape {
            trees: 8,
            depth: 12,
            seed: 3,
        };
        let (_, clean) = train_on(&rows, shape).expect("enough to learn from");
        assert!(clean.iterations == 300 && clean.mean < 2.0, "{clean:?}");
        // One in twenty takes half as long again.
        for row in rows.iter_mut().step_by(20) {
            row.ns += row.ns / 2;
        }
        let (_, noisy) = train_on(&rows, shape).expect("enough to learn from");
        assert!(noisy.margin > 0.3, "{noisy:?}");
        assert!(
            noisy.late > 2.0 && noisy.late_with_margin < noisy.late,
            "{noisy:?}"
        );
    }

    #[test]
    fn a_predictor_of_another_machine_is_judged_by_the_one_that_it_is_used_on() {
        let of = |ns: f64| {
            let line = LinearTerms {
                fixed: ns,
                ..LinearTerms::NONE
            };
            Forest::new(line, &[vec![Node::Leaf(0.0)]]).expect("a leaf")
        };
        let training = Training {
            iterations: 1_000,
            ..Training::default()
        };
        let errors = judge(&of(1e6), &of(1.2e6), &training, 0.1);
        assert_eq!((errors.iterations, errors.late_with_margin), (100, 100.0));
        assert!((errors.mean - 100.0 / 6.0).abs() < 0.1, "{errors:?}");
        let errors = judge(&of(1e6), &of(1.2e6), &training, 0.25);
        assert_eq!((errors.late, errors.late_with_margin), (100.0, 0.0));
    }

    #[test]
    fn too_little_to_learn_from_is_said() {
        let nothing: &dyn Latency =
            &Forest::new(LinearTerms::NONE, &[vec![Node::Leaf(1.0)]]).expect("a leaf");
        let training = Training {
            iterations: 50,
            ..Training::default()
        };
        let error = train(nothing, &training).expect_err("too few");
        assert!(error.to_string().starts_with("50 iterations"), "{error}");
    }
}
