//! The batch predictor (QoServe §3.6.1): a random forest that says how long an iteration takes. This is the asking; it is
//! trained where profiles are (`laxity sim train-latency`), by a kept crate, and arrives here as a table.
//!
//! Departures: the paper has forests per operator; here one forest sees the whole iteration, because that is what a driver measures. It
//! predicts `ln` of the time, so that short iterations count as much as long ones. The side to err on is the policy's
//! (its margin), not the forest's.

use serde::{Deserialize, Serialize};

use crate::Span;
use crate::latency::{Composition, Latency};

/// Numbers that a forest looks at: see [`features`].
pub const FEATURES: usize = 6;

/// What a forest looks at.
#[must_use]
pub fn features(of: &Composition) -> [f64; FEATURES] {
    [
        f64::from(of.prefill_tokens) + f64::from(of.decodes),
        f64::from(of.prefill_tokens),
        of.prefill_pairs as f64,
        f64::from(of.chunks),
        f64::from(of.decodes),
        of.decode_context as f64,
    ]
}

/// A place in a tree.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Node {
    /// Asks whether a feature is at most so much: on to the next node if so, else to `above`.
    Split {
        /// Which.
        feature: u8,
        /// So much. Single precision goes through a JSON file unchanged; tokens are far coarser.
        most: f32,
        /// Where to go else; behind this node.
        above: u32,
    },
    /// Logarithm of the time, ns.
    Leaf(f32),
}

/// A forest that can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForestError {
    /// It says nothing: train it on at least one iteration.
    #[error("a forest of latencies has no tree, or one without nodes; train it again")]
    Empty,
    /// It was cut off or edited.
    #[error(
        "tree {tree}, node {node} of a forest of latencies is wrong: {wrong}; train it again with `laxity sim train-latency`"
    )]
    Node {
        /// Which tree, from 0.
        tree: usize,
        /// Which node of it, from 0.
        node: usize,
        /// What is wrong with it.
        wrong: &'static str,
    },
}

/// Trees whose mean is the answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Vec<Vec<Node>>", into = "Vec<Vec<Node>>")]
pub struct Forest {
    /// Where each tree begins.
    roots: Vec<u32>,
    nodes: Vec<Node>,
}

impl Forest {
    /// A forest of such trees, each in the order in which it is walked (the branch "at most" comes next).
    ///
    /// # Errors
    /// If it can't be walked to a leaf from everywhere.
    pub fn new(trees: &[Vec<Node>]) -> Result<Self, ForestError> {
        if trees.is_empty() || trees.iter().any(Vec::is_empty) {
            return Err(ForestError::Empty);
        }
        let mut forest = Self {
            roots: Vec::new(),
            nodes: Vec::new(),
        };
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
                    Node::Split {
                        feature,
                        most,
                        above,
                    } => {
                        // Both ways lead on, so that every walk ends.
                        if above as usize <= node + 1 || above as usize >= nodes.len() {
                            return wrong("a branch leads nowhere");
                        }
                        let above = above + root;
                        Node::Split {
                            feature,
                            most,
                            above,
                        }
                    }
                });
            }
        }
        Ok(forest)
    }

    /// What the trees say of these features, ns.
    #[must_use]
    pub fn predict(&self, features: &[f64; FEATURES]) -> f64 {
        let sum: f64 = self
            .roots
            .iter()
            .map(|root| {
                let mut at = *root as usize;
                loop {
                    match self.nodes[at] {
                        Node::Leaf(value) => break f64::from(value),
                        Node::Split {
                            feature,
                            most,
                            above,
                        } => {
                            at = if features[usize::from(feature)] <= f64::from(most) {
                                at + 1
                            } else {
                                above as usize
                            };
                        }
                    }
                }
            })
            .sum();
        (sum / self.roots.len() as f64).exp()
    }

    /// Nodes of all trees.
    #[must_use]
    pub fn size(&self) -> usize {
        self.nodes.len()
    }

    /// Trees.
    #[must_use]
    pub fn trees(&self) -> usize {
        self.roots.len()
    }
}

impl TryFrom<Vec<Vec<Node>>> for Forest {
    type Error = ForestError;

    fn try_from(trees: Vec<Vec<Node>>) -> Result<Self, ForestError> {
        Self::new(&trees)
    }
}

impl From<Forest> for Vec<Vec<Node>> {
    fn from(forest: Forest) -> Self {
        let ends = forest.roots[1..]
            .iter()
            .copied()
            .chain([forest.nodes.len() as u32]);
        let relative = |root: u32| {
            move |node: &Node| match *node {
                Node::Split {
                    feature,
                    most,
                    above,
                } => Node::Split {
                    feature,
                    most,
                    above: above - root,
                },
                leaf @ Node::Leaf(_) => leaf,
            }
        };
        forest
            .roots
            .iter()
            .zip(ends)
            .map(|(root, end)| {
                let nodes = forest.nodes[*root as usize..end as usize].iter();
                nodes.map(relative(*root)).collect()
            })
            .collect()
    }
}

impl Latency for Forest {
    fn iteration(&self, of: &Composition) -> Span {
        if of.is_empty() {
            return Span::ZERO;
        }
        // Saturates at both ends.
        Span(self.predict(&features(of)).ceil() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(most: f32, low: f32, high: f32) -> Vec<Node> {
        vec![
            Node::Split {
                feature: 1,
                most,
                above: 2,
            },
            Node::Leaf(low),
            Node::Leaf(high),
        ]
    }

    #[test]
    fn a_forest_answers_with_the_mean_of_its_trees() {
        let forest = Forest::new(&[tree(100.0, 1.0, 3.0), tree(200.0, 3.0, 5.0)]).unwrap();
        let of = |tokens| Composition::default().with_chunk(0, tokens);
        assert_eq!(forest.iteration(&of(50)), Span(2.0_f64.exp().ceil() as u64));
        assert_eq!(
            forest.iteration(&of(150)),
            Span(3.0_f64.exp().ceil() as u64)
        );
        assert_eq!(
            forest.iteration(&of(250)),
            Span(4.0_f64.exp().ceil() as u64)
        );
        assert_eq!(forest.iteration(&Composition::default()), Span::ZERO);
    }

    #[test]
    fn a_forest_goes_through_a_file_unchanged() {
        let forest = Forest::new(&[tree(100.0, 1.0, 3.0), tree(200.0, 3.0, 5.0)]).unwrap();
        let trees: Vec<Vec<Node>> = forest.clone().into();
        assert_eq!(Forest::try_from(trees).unwrap(), forest);
    }

    #[test]
    fn a_damaged_forest_is_refused_with_its_place() {
        assert_eq!(Forest::new(&[]), Err(ForestError::Empty));
        assert_eq!(Forest::new(&[vec![]]), Err(ForestError::Empty));
        for above in [0, 1, 3, 900] {
            let mut broken = tree(1.0, 1.0, 1.0);
            broken[0] = Node::Split {
                feature: 0,
                most: 1.0,
                above,
            };
            let error = Forest::new(&[tree(1.0, 1.0, 1.0), broken]).unwrap_err();
            assert!(
                error.to_string().starts_with("tree 1, node 0"),
                "{above}: {error}"
            );
        }
        let mut broken = tree(1.0, 1.0, f32::NAN);
        assert!(
            matches!(
                Forest::new(std::slice::from_ref(&broken)),
                Err(ForestError::Node { node: 2, .. })
            ),
            "not a number"
        );
        broken[0] = Node::Split {
            feature: 6,
            most: 1.0,
            above: 2,
        };
        assert!(matches!(
            Forest::new(&[broken]),
            Err(ForestError::Node { node: 0, .. })
        ));
    }
}
