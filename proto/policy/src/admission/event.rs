//! What goes into an [`Admission`](super::Admission), and what it says.

use laxity_types::{BatchId, PortId, RequestId};

use crate::event::Order;
use crate::prune::Estimate;
use crate::red::Red;
use crate::time::{Span, Time};

/// What is known of a request when it joins a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestLoad {
    /// The request; zero is ignored.
    pub request: RequestId,
    /// When its first token is due, [`Time::NEVER`] if it has no deadline.
    pub deadline: Time,
    /// `ℓ_r`: bytes that it has still to move through each port, over all stages.
    pub ports: Vec<(PortId, u64)>,
    /// It computes already.
    pub started: bool,
}

/// Something that happened, at the `now` that is passed beside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdmissionEvent {
    /// A batch was formed, or an active one is announced again with what changed.
    BatchArrived {
        /// Which batch; zero is ignored.
        batch: BatchId,
        /// Its members, or those that are new or changed.
        requests: Vec<RequestLoad>,
        /// How long it computes in all.
        compute: Span,
    },
    /// A request is a member of an active batch, with this load.
    RequestJoined {
        /// Which batch.
        batch: BatchId,
        /// The request.
        load: RequestLoad,
    },
    /// The request computes.
    RequestStarted {
        /// Which request.
        request: RequestId,
    },
    /// The request has its first token, or was aborted. It leaves the pruned set.
    RequestEnded {
        /// Which request.
        request: RequestId,
    },
    /// `bytes` of the request have left `port`.
    BytesCompleted {
        /// Which request.
        request: RequestId,
        /// Through which port.
        port: PortId,
        /// How many bytes more.
        bytes: u64,
    },
    /// The batch computes, and so do its members.
    BatchStarted {
        /// Which batch.
        batch: BatchId,
    },
    /// The batch computes after `ahead`, on the same unit, until it starts or `ahead` departs.
    /// Ignored if it computes already, or if `ahead` waits behind it.
    BatchQueued {
        /// The batch that waits.
        batch: BatchId,
        /// The batch directly before it.
        ahead: BatchId,
    },
    /// Nothing of the batch is left. Members that did not end before were aborted.
    BatchDeparted {
        /// Which batch.
        batch: BatchId,
    },
    /// The rate of a port is known or has changed. This comes from whoever owns the port, not
    /// from a client: such a port is never forgotten.
    PortRate {
        /// Which port.
        port: PortId,
        /// Its rate. Zero: nothing passes.
        bytes_per_second: u64,
    },
}

/// What the driver has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdmissionAction {
    /// Pass this order to every link: it differs from the one before.
    OrderChanged(Order),
}

/// Why a request is pruned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PruneCause {
    /// The batch that could not have finished in time.
    pub batch: BatchId,
    /// The bottleneck of that batch, which the request loaded most; `None` if the request was
    /// late by its computing alone.
    pub port: Option<PortId>,
}

/// What the last run decided about a batch, for those who ask why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// When the run was.
    pub decided_at: Time,
    /// Position in `σ`, from zero.
    pub rank: usize,
    /// RED, and the `D^Lo` it was measured against.
    pub red: Red,
    /// The estimate, given everybody that is pruned: `finish()`, bottleneck and its bytes.
    pub estimate: Estimate,
    /// Estimated to finish by `D^Lo`.
    pub feasible: bool,
    /// Its members that are pruned, in ascending order.
    pub pruned: Vec<RequestId>,
}

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdmissionCounters {
    /// Runs of Algorithm 1.
    pub runs: u64,
    /// Orders issued.
    pub orders: u64,
    /// Requests pruned.
    pub pruned: u64,
    /// Batches forgotten because a cap was reached.
    pub batches_forgotten: u64,
    /// Requests that alone exceed a cap, and loads of ports beyond the cap.
    pub loads_refused: u64,
    /// Events that named no active batch or request, or a queue that cannot be.
    pub events_ignored: u64,
}
