//! What came of questions.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::client::Failure;

/// What came of all questions so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Questions sent.
    pub asked: u64,
    /// Answers that are decisions.
    pub answered: u64,
    /// No connection, or one that broke.
    pub unreachable: u64,
    /// No answer in time.
    pub late: u64,
    /// Answers with a status that is an error.
    pub refused: u64,
    /// Answers that are no decision: not of the form, or not in the pool.
    pub invalid: u64,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            asked,
            answered,
            unreachable,
            late,
            refused,
            invalid,
        } = self;
        write!(
            f,
            "{asked} questions: {answered} decisions, {invalid} answers that are none, {refused} \
             refused, {late} late, {unreachable} unreachable"
        )
    }
}

/// Counted from any thread. The counts are for reading by people: no order between them is needed.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    asked: AtomicU64,
    answered: AtomicU64,
    unreachable: AtomicU64,
    late: AtomicU64,
    refused: AtomicU64,
    invalid: AtomicU64,
}

impl Tally {
    pub(crate) fn note(&self, came: &Result<String, Failure>) {
        let which = match came {
            Ok(_) => &self.answered,
            Err(Failure::Unreachable { .. }) => &self.unreachable,
            Err(Failure::Late(_)) => &self.late,
            Err(Failure::Refused { .. }) => &self.refused,
            Err(Failure::TooLong(_) | Failure::Invalid(_)) => &self.invalid,
        };
        self.asked.fetch_add(1, Ordering::Relaxed);
        which.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Counts {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Counts {
            asked: of(&self.asked),
            answered: of(&self.answered),
            unreachable: of(&self.unreachable),
            late: of(&self.late),
            refused: of(&self.refused),
            invalid: of(&self.invalid),
        }
    }
}
