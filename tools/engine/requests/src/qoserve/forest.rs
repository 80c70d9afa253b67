//! The batch predictor (QoServe §3.6.1), a random forest that predicts how long an iteration takes.
//! This module evaluates the forest, which `laxity_sim::requests::predictor` trains.
//!
//! Departures from the paper: the paper adds forests of single operators. Here one forest predicts
//! the whole iteration, because drivers measure that. A forest alone has errors of up to 15 %,
//! because its steps are coarse over several features, and each such error makes tokens late. So
//! the forest only corrects a [`LinearTerms`] model and predicts `ln (time / line)`. The policy's
//! margin, not the forest, keeps predictions on the safe side.

use super::linear::{FEATURES, LinearTerms, features};
use crate::Span;
use crate::latency::{Composition, Latency};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Node {
    /// A comparison of a feature. Values up to `most` lead to the next node, larger ones to
    /// `above`.
    Split {
        /// Index of the feature.
        feature: u8,
        /// Largest value that leads to the next node.
        most: f32,
        /// Index of the node for larger values. It is behind this node.
        above: u32,
    },
    /// Logarithm of the ratio of the time to the linear model's time.
    Leaf(f32),
}

/// The reason why a forest can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForestError {
    #[error("a forest of latencies has no tree, or one without nodes; train it again")]
    Empty,
    #[error(
        "the line under a forest of latencies has a part that is negative or no number, or is \
         nothing; train it again"
    )]
    LinearTerms,
    #[error("tree {tree}, node {node} of a forest of latencies is wrong: {wrong}; train it again")]
    Node { tree: usize, node: usize, wrong: &'static str },
}

/// A node in the form for evaluation. A feature up to `most` leads to the next node, a larger one
/// to `above`. A leaf leads to itself.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Step {
    most: f32,
    value: f32,
    above: u32,
    feature: u32,
}

/// Number of trees that are evaluated together, so that their memory accesses overlap.
const ABREAST: usize = 8;

/// A linear model, and trees whose mean corrects it.
#[derive(Clone, Debug, PartialEq)]
pub struct Forest {
    line: LinearTerms,
    /// Index of each tree's first node.
    roots: Vec<u32>,
    nodes: Vec<Node>,
    /// The nodes in a form without unpredictable branches.
    steps: Vec<Step>,
    /// Most splits between a root and a leaf.
    depth: u32,
}

impl Forest {
    /// Creates a forest of `trees`. The nodes of each tree are in depth-first order, with the
    /// branch for smaller values first.
    ///
    /// # Errors
    /// Fails if a coefficient or a node is invalid.
    pub fn new(line: LinearTerms, trees: &[Vec<Node>]) -> Result<Self, ForestError> {
        if !line.is_sound() {
            return Err(ForestError::LinearTerms);
        }
        if trees.is_empty() || trees.iter().any(Vec::is_empty) {
            return Err(ForestError::Empty);
        }
        let mut forest =
            Self { line, roots: Vec::new(), nodes: Vec::new(), steps: Vec::new(), depth: 0 };
        for (tree, nodes) in trees.iter().enumerate() {
            let root = forest.nodes.len() as u32;
            forest.roots.push(root);
            for (node, what) in nodes.iter().enumerate() {
                let wrong = |wrong| Err(ForestError::Node { tree, node, wrong });
                forest.nodes.push(match *what {
                    Node::Leaf(value) if !value.is_finite() => {
                        return wrong("its value is no number");
                    }
                    Node::Leaf(_) => *what,
                    Node::Split { feature, .. } if usize::from(feature) >= FEATURES => {
                        return wrong("there is no such feature");
                    }
                    Node::Split { most, .. } if !most.is_finite() => {
                        return wrong("its bound is no number");
                    }
                    Node::Split { feature, most, above } => {
                        // Both branches lead to later nodes, so that every path ends.
                        if above as usize <= node + 1 || above as usize >= nodes.len() {
                            return wrong("a branch leads nowhere");
                        }
                        let above = above + root;
                        Node::Split { feature, most, above }
                    }
                });
            }
        }
        // Both branches of a split lead to later nodes, so the depths of children come first.
        let mut depths = vec![0_u32; forest.nodes.len()];
        for (at, node) in forest.nodes.iter().enumerate().rev() {
            if let Node::Split { above, .. } = node {
                depths[at] = 1 + depths[at + 1].max(depths[*above as usize]);
            }
        }
        forest.depth = depths.into_iter().max().unwrap_or(0);
        let steps = forest.nodes.iter().enumerate();
        forest.steps = steps
            .map(|(at, node)| match *node {
                Node::Split { feature, most, above } => {
                    Step { most, value: 0.0, above, feature: feature.into() }
                }
                Node::Leaf(value) => {
                    Step { most: f32::NEG_INFINITY, value, above: at as u32, feature: 0 }
                }
            })
            .collect();
        Ok(forest)
    }

    /// Returns the predicted time for these features, in ns.
    pub fn predict(&self, features: &[f64; FEATURES]) -> f64 {
        // The length is a power of two, so that the masked index is in range without a check.
        let mut padded = [0.0; FEATURES.next_power_of_two()];
        padded[..FEATURES].copy_from_slice(features);
        let mut sum = 0.0;
        for roots in self.roots.chunks(ABREAST) {
            // With fewer trees than `ABREAST`, the first tree is evaluated several times.
            let mut at = [roots[0]; ABREAST];
            at[..roots.len()].copy_from_slice(roots);
            for _ in 0..self.depth {
                for at in &mut at {
                    let step = &self.steps[*at as usize];
                    let feature = padded[step.feature as usize % padded.len()];
                    *at = if feature <= f64::from(step.most) { *at + 1 } else { step.above };
                }
            }
            // The sum follows the order of the trees, because sums of floats depend on the order.
            for at in &at[..roots.len()] {
                sum += f64::from(self.steps[*at as usize].value);
            }
        }
        self.line.ns(features) * (sum / self.roots.len() as f64).exp()
    }

    /// Returns the number of nodes of all trees.
    pub fn size(&self) -> usize {
        self.nodes.len()
    }

    pub fn trees(&self) -> usize {
        self.roots.len()
    }
}

impl Latency for Forest {
    fn iteration(&self, of: &Composition) -> Span {
        if of.is_empty() {
            return Span::ZERO;
        }
        // The cast saturates at both ends.
        Span(self.predict(&features(of)).ceil() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(most: f32, low: f32, high: f32) -> Vec<Node> {
        vec![Node::Split { feature: 1, most, above: 2 }, Node::Leaf(low), Node::Leaf(high)]
    }

    #[test]
    fn a_forest_answers_with_the_mean_of_its_trees() {
        let forest =
            Forest::new(LinearTerms::NONE, &[tree(100.0, 1.0, 3.0), tree(200.0, 3.0, 5.0)])
                .unwrap();
        let of = |tokens| Composition::default().with_chunk(0, tokens);
        assert_eq!(forest.iteration(&of(50)), Span(2.0_f64.exp().ceil() as u64));
        assert_eq!(forest.iteration(&of(150)), Span(3.0_f64.exp().ceil() as u64));
        assert_eq!(forest.iteration(&of(250)), Span(4.0_f64.exp().ceil() as u64));
        assert_eq!(forest.iteration(&Composition::default()), Span::ZERO);
    }

    /// Adds a tree with random splits of at most `depth` levels.
    fn random(dice: &mut u64, depth: u32, into: &mut Vec<Node>) {
        *dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let roll = *dice >> 33;
        if depth == 0 || roll.is_multiple_of(7) {
            into.push(Node::Leaf((roll % 1_000) as f32 / 300.0));
            return;
        }
        let at = into.len();
        into.push(Node::Leaf(0.0));
        random(dice, depth - 1, into);
        let above = into.len() as u32;
        into[at] = Node::Split {
            feature: (roll % FEATURES as u64) as u8,
            most: (roll % 500) as f32,
            above,
        };
        random(dice, depth - 1, into);
    }

    /// Evaluates one tree after another, from the root.
    fn plain(forest: &Forest, features: &[f64; FEATURES]) -> f64 {
        let mut sum = 0.0;
        for root in &forest.roots {
            let mut at = *root as usize;
            sum += loop {
                match forest.nodes[at] {
                    Node::Leaf(value) => break f64::from(value),
                    Node::Split { feature, most, .. }
                        if features[usize::from(feature)] <= f64::from(most) =>
                    {
                        at += 1;
                    }
                    Node::Split { above, .. } => at = above as usize,
                }
            };
        }
        forest.line.ns(features) * (sum / forest.roots.len() as f64).exp()
    }

    #[test]
    fn trees_walked_side_by_side_say_what_they_say_one_by_one() {
        let mut dice = 7;
        for trees in [1, 3, 8, 9, 21] {
            let trees: Vec<Vec<Node>> = (0..trees)
                .map(|depth| {
                    let mut nodes = Vec::new();
                    random(&mut dice, depth % 9, &mut nodes);
                    nodes
                })
                .collect();
            let forest = Forest::new(LinearTerms::NONE, &trees).unwrap();
            for asked in 0..200_u64 {
                let of: [f64; FEATURES] =
                    std::array::from_fn(|at| (asked * (at as u64 + 3) * 37 % 600) as f64 - 20.0);
                assert_eq!(forest.predict(&of).to_bits(), plain(&forest, &of).to_bits());
            }
        }
    }

    #[test]
    fn a_forest_corrects_its_line() {
        let line = LinearTerms { fixed: 100.0, token: 2.0, ..LinearTerms::NONE };
        let forest = Forest::new(line, &[tree(100.0, 0.0, 0.5)]).unwrap();
        let of = |tokens| Composition::default().with_chunk(0, tokens);
        assert_eq!(forest.iteration(&of(50)), Span(200));
        let higher = (700.0 * 0.5_f64.exp()).ceil() as u64;
        assert_eq!(forest.iteration(&of(300)), Span(higher));
        let negative = LinearTerms { pair: -1.0, ..line };
        let error = Forest::new(negative, &[tree(1.0, 1.0, 1.0)]);
        assert_eq!(error, Err(ForestError::LinearTerms));
    }

    #[test]
    fn a_damaged_forest_is_refused_with_its_place() {
        assert_eq!(Forest::new(LinearTerms::NONE, &[]), Err(ForestError::Empty));
        assert_eq!(Forest::new(LinearTerms::NONE, &[vec![]]), Err(ForestError::Empty));
        for above in [0, 1, 3, 900] {
            let mut broken = tree(1.0, 1.0, 1.0);
            broken[0] = Node::Split { feature: 0, most: 1.0, above };
            let error = Forest::new(LinearTerms::NONE, &[tree(1.0, 1.0, 1.0), broken]).unwrap_err();
            assert!(error.to_string().starts_with("tree 1, node 0"), "{above}: {error}");
        }
        let mut broken = tree(1.0, 1.0, f32::NAN);
        assert!(
            matches!(
                Forest::new(LinearTerms::NONE, std::slice::from_ref(&broken)),
                Err(ForestError::Node { node: 2, .. })
            ),
            "not a number"
        );
        broken[0] = Node::Split { feature: 6, most: 1.0, above: 2 };
        assert!(matches!(
            Forest::new(LinearTerms::NONE, &[broken]),
            Err(ForestError::Node { node: 0, .. })
        ));
    }
}
