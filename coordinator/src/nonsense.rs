//! The error for a setting with an invalid value.

use thiserror::Error;

/// A setting with an invalid value: its key and the problem.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{key}: {problem}")]
pub struct Nonsense {
    key: String,
    problem: String,
}

impl Nonsense {
    pub(crate) fn new(key: &str, problem: String) -> Self {
        Self { key: key.to_owned(), problem }
    }
}
