//! What can be set of Maestro's scheduler.

use super::fitness::Mode;
use super::queue::{Boundary, StageOrder};
use crate::Span;

/// How it decides.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// How it is called on tables.
    pub name: String,
    /// Who is first.
    pub order: StageOrder,
    /// What becomes of turns between stages.
    pub boundary: Boundary,
    /// Which node.
    pub mode: Mode,
    /// Stages that wait at a node at most, beyond its slots.
    pub backlog: usize,
    /// Stages of the queue that are tried at a time.
    pub lookahead: usize,
    /// How long a stage is overtaken before a node is kept for it.
    pub patience: Span,
    /// `c_int` of eq. 4.
    pub interrupt: Span,
    /// Round trips: from a job's source (row) to a node's cluster (column). What is missing is
    /// zero.
    pub rtt: Vec<Vec<Span>>,
}

impl Options {
    /// Maestro, as its paper has it where it says so.
    #[must_use]
    pub fn maestro() -> Self {
        Self {
            name: "maestro".to_owned(),
            order: StageOrder::Remaining {
                aging: 0.1,
                aging_interactive: 0.1,
            },
            boundary: Boundary::MAESTRO,
            mode: Mode::MAESTRO,
            backlog: 0,
            lookahead: 16,
            patience: Span::from_millis(5_000),
            interrupt: Span::from_millis(10_000),
            rtt: Vec::new(),
        }
    }

    /// The same with another order, which every boundary obeys.
    #[must_use]
    pub fn ordered(name: &str, order: StageOrder) -> Self {
        Self {
            name: name.to_owned(),
            order,
            boundary: Boundary::Requeue,
            ..Self::maestro()
        }
    }
}
