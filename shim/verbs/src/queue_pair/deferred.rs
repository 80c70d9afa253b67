//! A work request that waits in its queue pair, and its permit.

use laxity_client::{Flow, Lane, Stage, Ticket};

use crate::work::DeferredRequest;

/// The permit of a waiting work request.
#[derive(Debug)]
pub(super) enum PermitState {
    /// The flow is not submitted.
    Unasked(Flow),
    /// The flow is submitted and waits for its permit.
    Waits(Ticket),
    /// The work request may go. Its completion is reported with the ticket.
    Permitted(Ticket),
    /// The work request moves no bytes and needs no permit. It goes after those before it.
    Free,
}

#[derive(Debug)]
pub(super) struct Deferred {
    pub(super) work: DeferredRequest,
    pub(super) wr_id: u64,
    pub(super) signaled: bool,
    pub(super) bytes: u64,
    pub(super) permit: PermitState,
    /// The stage as which it may go to another queue pair of a bundle.
    pub(super) leaves_as: Option<Stage>,
}

impl Deferred {
    /// Marks the work request as ready to post without its permit, and cancels the wait. Returns
    /// false if it has its permit.
    pub(super) fn pull(&mut self, lane: &mut Lane) -> bool {
        match &mut self.permit {
            PermitState::Permitted(_) | PermitState::Free => return false,
            PermitState::Waits(ticket) => {
                // It may have come since the last look, before that of a later work request.
                if lane.poll(ticket).is_some() {
                    self.permit = PermitState::Permitted(core::mem::take(ticket));
                    return false;
                }
                lane.cancel(core::mem::take(ticket));
            }
            PermitState::Unasked(_) => {}
        }
        self.permit = PermitState::Permitted(Ticket::default());
        true
    }
}
