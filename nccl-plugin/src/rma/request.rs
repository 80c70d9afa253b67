//! A request of NCCL's, and the tokens by which its parts report that they are complete.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use super::context::RmaContext;

/// An operation as NCCL tests it. It is done when all its parts are.
pub(super) struct RmaRequest {
    pub(super) context: Weak<RmaContext>,
    pub(super) rank: usize,
    /// Whether the operation reads, and is in the gate of reads.
    pub(super) reads: bool,
    /// Number of parts that are not complete.
    parts: AtomicU32,
    failed: AtomicBool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RmaRequestState {
    Pending,
    Done,
    Failed,
}

impl RmaRequest {
    /// Returns a request, and the token of its first part.
    pub(super) fn new(
        context: Weak<RmaContext>,
        rank: usize,
        reads: bool,
    ) -> (Arc<Self>, RequestPart) {
        let request = Arc::new(Self {
            context,
            rank,
            reads,
            parts: AtomicU32::new(1),
            failed: AtomicBool::new(false),
        });
        let part =
            RequestPart { request: Arc::clone(&request), account: None, bytes: 0, fine: false };
        (request, part)
    }

    pub(super) fn state(&self) -> RmaRequestState {
        // Acquire pairs with the release in `RequestPart::drop`: what the parts wrote is visible.
        match (self.parts.load(Ordering::Acquire), self.failed.load(Ordering::Relaxed)) {
            (0, false) => RmaRequestState::Done,
            (0, true) => RmaRequestState::Failed,
            _ => RmaRequestState::Pending,
        }
    }
}

/// The token of a part of a request. A token that is dropped before [`RequestPart::succeed`] fails
/// the request, so no request is forgotten.
pub(crate) struct RequestPart {
    request: Arc<RmaRequest>,
    /// Where the completion of the bytes is counted.
    account: Option<Arc<AtomicU64>>,
    bytes: u64,
    fine: bool,
}

impl RequestPart {
    /// Returns the token of a further part. Its bytes are added to `account` when it ends.
    pub(super) fn another(&self, bytes: u64, account: Option<&Arc<AtomicU64>>) -> Self {
        // Relaxed, because this part is not complete, so the count isn't 0.
        self.request.parts.fetch_add(1, Ordering::Relaxed);
        let request = Arc::clone(&self.request);
        Self { request, account: account.map(Arc::clone), bytes, fine: false }
    }

    /// Reports that the part is complete.
    pub(crate) fn succeed(mut self) {
        self.fine = true;
    }
}

impl Drop for RequestPart {
    fn drop(&mut self) {
        if let Some(account) = &self.account {
            // Relaxed, because the gate only counts with it.
            account.fetch_add(self.bytes, Ordering::Relaxed);
        }
        if !self.fine {
            self.request.failed.store(true, Ordering::Relaxed);
        }
        // Release pairs with the acquire in `RmaRequest::state`.
        self.request.parts.fetch_sub(1, Ordering::Release);
    }
}
