//! A setting whose value makes no sense: its key, and what is wrong.

use thiserror::Error;

/// A key whose value makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{key}: {problem}")]
pub struct Nonsense {
    key: String,
    problem: String,
}

impl Nonsense {
    pub(crate) fn new(key: &str, problem: String) -> Self {
        Self {
            key: key.to_owned(),
            problem,
        }
    }
}
