//! The options of Maestro's scheduler.

use super::fitness::Mode;
use super::queue::{Boundary, StageOrder};
use crate::Span;

#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Name in result tables.
    pub name: String,
    /// Order of the queue.
    pub order: StageOrder,
    /// Rule for turns between the stages of a job.
    pub boundary: Boundary,
    /// Rule by which nodes are compared.
    pub mode: Mode,
    /// Most stages that wait at a node beyond its slots.
    pub backlog: usize,
    /// Number of queued stages that are tried in one pass.
    pub lookahead: usize,
    /// Time for which a stage may be overtaken before a node is reserved for it.
    pub patience: Span,
    /// Cost of an interruption, `c_int` of eq. 4.
    pub interrupt: Span,
    /// Round-trip times from a job's source (row) to a node's cluster (column). A missing entry is
    /// zero.
    pub rtt: Vec<Vec<Span>>,
}

impl Options {
    /// Returns Maestro's options, with the paper's values where it has some.
    pub fn maestro() -> Self {
        Self {
            name: "maestro".to_owned(),
            order: StageOrder::Remaining { aging: 0.01, aging_interactive: 0.0 },
            boundary: Boundary::MAESTRO,
            mode: Mode::MAESTRO,
            backlog: 0,
            lookahead: 16,
            patience: Span::from_millis(5_000),
            interrupt: Span::from_millis(10_000),
            rtt: Vec::new(),
        }
    }

    /// Returns Maestro's options with another order, which also applies at every boundary.
    pub fn ordered(name: &str, order: StageOrder) -> Self {
        Self { name: name.to_owned(), order, boundary: Boundary::Requeue, ..Self::maestro() }
    }
}
