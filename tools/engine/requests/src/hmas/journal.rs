//! What an [`super::Agent`] did that a figure or an operator asks for: switches, fence, limits.
//! Shared, because whoever runs a replica holds its discipline.

use std::sync::{Arc, Mutex, PoisonError};

use super::meta::Switch;
use crate::Time;

/// An agent's record of itself.
#[derive(Clone, Debug, Default)]
pub struct Log {
    /// Structures taken up.
    pub switches: Vec<Switch>,
    /// Requests that ended under a fence.
    pub fenced: u64,
    /// Of those, the ones that generated more than their bound.
    pub violations: u64,
    /// As `fenced` and `violations`, of those whose bound was calibrated by their own bucket.
    pub fenced_own_bucket: (u64, u64),
    /// Sum of bounds over sum of real lengths: what safety costs.
    pub bound_tokens: u64,
    /// Tokens that they generated.
    pub real_tokens: u64,
    /// Limits, once a second: when, concurrency, token budget, utilisation.
    pub limits: Vec<Entry>,
    /// Questions to an outside service.
    pub asked: u64,
    /// Answers of an outside service that were turned away or never came, and why.
    pub rejected: Vec<String>,
    /// Requests that stayed unknown, and those that were tagged.
    pub unknown: u64,
    /// See `unknown`.
    pub tagged: u64,
}

/// Limits at some time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Entry {
    /// When.
    pub at: Time,
    /// `N_run`.
    pub concurrency: u32,
    /// `B_token`.
    pub tokens: u32,
    /// What they are set by.
    pub utilisation: f64,
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
