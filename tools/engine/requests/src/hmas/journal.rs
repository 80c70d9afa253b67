//! A log of the memory bounds of an [`super::Agent`] and the actual lengths, for figures. The log
//! is shared, because the replica owns the agent.

use std::sync::{Arc, Mutex, PoisonError};

/// Counts over the requests that ended, for comparison with their bounds.
#[derive(Clone, Debug, Default)]
pub struct Log {
    pub fenced: u64,
    /// Number of ended requests that generated more than their bound.
    pub violations: u64,
    /// `fenced` and `violations` for the requests whose bound comes from their own bucket.
    pub fenced_own_bucket: (u64, u64),
    pub bound_tokens: u64,
    /// Sum of all generated tokens.
    pub real_tokens: u64,
}

#[derive(Clone, Debug, Default)]
pub struct Journal(Arc<Mutex<Log>>);

impl Journal {
    pub(super) fn note(&self, with: impl FnOnce(&mut Log)) {
        with(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub fn read(&self) -> Log {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
