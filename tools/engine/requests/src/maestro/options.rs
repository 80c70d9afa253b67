//! The options of Maestro's scheduler.

use super::fitness::Mode;
use super::queue::{Boundary, StageOrder};
use crate::Span;

#[derive(Clone, Debug, PartialEq)]
pub struct MaestroOptions {
    pub name: String,
    pub order: StageOrder,
    /// Rule for turns between the stages of a job.
    pub boundary: Boundary,
    pub mode: Mode,
    /// Round-trip times from a job's source (row) to a node's cluster (column). A missing entry is
    /// zero.
    pub rtt: Vec<Vec<Span>>,
}

impl MaestroOptions {
    /// Returns Maestro's options, with the paper's values where it has some.
    pub fn maestro() -> Self {
        Self {
            name: "maestro".to_owned(),
            order: StageOrder::Remaining { aging: 0.01, aging_interactive: 0.0 },
            boundary: Boundary::MAESTRO,
            mode: Mode::MAESTRO,
            rtt: Vec::new(),
        }
    }

    /// Returns Maestro's options with another order, which also applies at every boundary.
    pub fn ordered(name: &str, order: StageOrder) -> Self {
        Self { name: name.to_owned(), order, boundary: Boundary::Requeue, ..Self::maestro() }
    }
}
