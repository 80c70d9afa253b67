//! The batch predictor (QoServe §3.6.1): a random forest that says how long an iteration takes.
//! This is the asking; it is trained where profiles are (`laxity_sim::requests::predictor`), by a
//! kept crate, and arrives here as a table.
//!
//! Departures: the paper adds up forests of single operators; here one looks at the whole
//! iteration, because that is what a driver measures. A forest is a staircase, and over five
//! numbers at once its steps are coarse: alone it is off by 15 % here and there, and every such
//! iteration makes tokens late. So a [`LinearTerms`] says the most, and the forest corrects it: it
//! predicts `ln (time / line)`. The side to err on is the policy's (its margin), not the forest's.

use serde::{Deserialize, Serialize};

use super::linear::{FEATURES, LinearTerms, features};
use crate::Span;
use crate::latency::{Composition, Latency};

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
    /// Logarithm of the time over what the line says.
    Leaf(f32),
}

/// A forest that can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForestError {
    /// It says nothing: train it on at least one iteration.
    #[error("a forest of latencies has no tree, or one without nodes; train it again")]
    Empty,
    /// It was edited.
    #[error(
        "the line under a forest of latencies has a part that is negative or no number, or is \
         nothing; train it again"
    )]
    LinearTerms,
    /// It was cut off or edited.
    #[error("tree {tree}, node {node} of a forest of latencies is wrong: {wrong}; train it again")]
    Node {
        /// Which tree, from 0.
        tree: usize,
        /// Which node of it, from 0.
        node: usize,
        /// What is wrong with it.
        wrong: &'static str,
    },
}

/// A forest in a file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    line: LinearTerms,
    trees: Vec<Vec<Node>>,
}

/// A node as it is walked: at most so much of a feature leads to the next one, more leads `above`.
/// A leaf leads to itself.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Step {
    most: f32,
    value: f32,
    above: u32,
    feature: u32,
}

/// Trees that are walked side by side, so that the processor waits for the memory of all of them at
/// once.
const ABREAST: usize = 8;

/// Trees whose mean is the answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Table", into = "Table")]
pub struct Forest {
    line: LinearTerms,
    /// Where each tree begins.
    roots: Vec<u32>,
    nodes: Vec<Node>,
    /// The same nodes, to be walked without a branch that can't be foreseen.
    steps: Vec<Step>,
    /// Splits on the longest way from a root to a leaf.
    depth: u32,
}

impl Forest {
    /// A forest of such trees, each in the order in which it is walked (the branch "at most" comes
    /// next).
    ///
    /// # Errors
    /// If it can't be walked to a leaf from everywhere.
    pub fn new(line: LinearTerms, trees: &[Vec<Node>]) -> Result<Self, ForestError> {
        if !line.is_sound() {
            return Err(ForestError::LinearTerms);
        }
        if trees.is_empty() || trees.iter().any(Vec::is_empty) {
            return Err(ForestError::Empty);
        }
        let mut forest = Self {
            line,
            roots: Vec::new(),
            nodes: Vec::new(),
            steps: Vec::new(),
            depth: 0,
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
        // Both ways of a split lead on, so that what is behind a node is known before it.
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
                Node::Split {
                    feature,
                    most,
                    above,
                } => Step {
                    most,
                    value: 0.0,
                    above,
                    feature: feature.into(),
                },
                Node::Leaf(value) => Step {
                    most: f32::NEG_INFINITY,
                    value,
                    above: at as u32,
                    feature: 0,
                },
            })
            .collect();
        Ok(forest)
    }

    /// What the trees say of these features, ns.
    #[must_use]
    pub fn predict(&self, features: &[f64; FEATURES]) -> f64 {
        // A power of two, so that no index can be beyond it.
        let mut padded = [0.0; FEATURES.next_power_of_two()];
        padded[..FEATURES].copy_from_slice(features);
        let mut sum = 0.0;
        for roots in self.roots.chunks(ABREAST) {
            // Where there are fewer trees than that, the first is walked several times.
            let mut at = [roots[0]; ABREAST];
            at[..roots.len()].copy_from_slice(roots);
            for _ in 0..self.depth {
                for at in &mut at {
                    let step = &self.steps[*at as usize];
                    let feature = padded[step.feature as usize % padded.len()];
                    *at = if feature <= f64::from(step.most) {
                        *at + 1
                    } else {
                        step.above
                    };
                }
            }
            // One after the other, in the order of the trees: sums of floats depend on it.
            for at in &at[..roots.len()] {
                sum += f64::from(self.steps[*at as usize].value);
            }
        }
        self.line.ns(features) * (sum / self.roots.len() as f64).exp()
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

impl TryFrom<Table> for Forest {
    type Error = ForestError;

    fn try_from(table: Table) -> Result<Self, ForestError> {
        Self::new(table.line, &table.trees)
    }
}

impl From<Forest> for Table {
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
        let trees = forest.roots.iter().zip(ends).map(|(root, end)| {
            let nodes = forest.nodes[*root as usize..end as usize].iter();
            nodes.map(relative(*root)).collect()
        });
        Self {
            line: forest.line,
            trees: trees.collect(),
        }
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
        let forest = Forest::new(
            LinearTerms::NONE,
            &[tree(100.0, 1.0, 3.0), tree(200.0, 3.0, 5.0)],
        )
        .unwrap();
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

    /// A tree that asks at random, `depth` levels deep or less.
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

    /// One tree after the other, from the root.
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
    fn a_forest_goes_through_a_file_unchanged() {
        let forest = Forest::new(
            LinearTerms::NONE,
            &[tree(100.0, 1.0, 3.0), tree(200.0, 3.0, 5.0)],
        )
        .unwrap();
        let table: Table = forest.clone().into();
        assert_eq!(Forest::try_from(table).unwrap(), forest);
    }

    #[test]
    fn a_forest_corrects_its_line() {
        let line = LinearTerms {
            fixed: 100.0,
            token: 2.0,
            ..LinearTerms::NONE
        };
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
        assert_eq!(
            Forest::new(LinearTerms::NONE, &[vec![]]),
            Err(ForestError::Empty)
        );
        for above in [0, 1, 3, 900] {
            let mut broken = tree(1.0, 1.0, 1.0);
            broken[0] = Node::Split {
                feature: 0,
                most: 1.0,
                above,
            };
            let error = Forest::new(LinearTerms::NONE, &[tree(1.0, 1.0, 1.0), broken]).unwrap_err();
            assert!(
                error.to_string().starts_with("tree 1, node 0"),
                "{above}: {error}"
            );
        }
        let mut broken = tree(1.0, 1.0, f32::NAN);
        assert!(
            matches!(
                Forest::new(LinearTerms::NONE, std::slice::from_ref(&broken)),
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
            Forest::new(LinearTerms::NONE, &[broken]),
            Err(ForestError::Node { node: 0, .. })
        ));
    }
}
