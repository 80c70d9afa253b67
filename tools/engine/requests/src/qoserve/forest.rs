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

/// A linear model, and trees whose mean corrects it.
#[derive(Clone, Debug, PartialEq)]
pub struct Forest {
    line: LinearTerms,
    /// Index of each tree's first node.
    roots: Vec<u32>,
    nodes: Vec<Node>,
}

impl Forest {
    /// Creates a forest of `trees`. The nodes of each tree are in depth-first order, with the
    /// branch for smaller values first.
    /// Fails if a coefficient or a node is invalid.
    pub fn new(line: LinearTerms, trees: &[Vec<Node>]) -> Result<Self, ForestError> {
        if !line.is_sound() {
            return Err(ForestError::LinearTerms);
        }
        if trees.is_empty() || trees.iter().any(Vec::is_empty) {
            return Err(ForestError::Empty);
        }
        let mut forest = Self { line, roots: Vec::new(), nodes: Vec::new() };
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
        Ok(forest)
    }

    /// Returns the predicted time for these features, in ns.
    pub fn predict(&self, features: &[f64; FEATURES]) -> f64 {
        let mut sum = 0.0;
        for root in &self.roots {
            let mut at = *root as usize;
            sum += loop {
                match self.nodes[at] {
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
        self.line.ns(features) * (sum / self.roots.len() as f64).exp()
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
