//! What the fence of an [`super::Agent`] did, for figures. The log is shared, because whoever runs
//! a replica holds its discipline.

use std::sync::{Arc, Mutex, PoisonError};

/// Requests that ended, and how long they were beside their bounds.
#[derive(Clone, Debug, Default)]
pub struct Log {
    /// Requests that ended.
    pub fenced: u64,
    /// Of those, the ones that generated more than their bound.
    pub violations: u64,
    /// As `fenced` and `violations`, of those whose bound was calibrated by their own bucket.
    pub fenced_own_bucket: (u64, u64),
    /// Sum of bounds, tokens.
    pub bound_tokens: u64,
    /// Tokens that they generated.
    pub real_tokens: u64,
}

/// A handle to a log.
#[derive(Clone, Debug, Default)]
pub struct Journal(Arc<Mutex<Log>>);

impl Journal {
    pub(super) fn note(&self, with: impl FnOnce(&mut Log)) {
        with(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// The log so far.
    #[must_use]
    pub fn read(&self) -> Log {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}
