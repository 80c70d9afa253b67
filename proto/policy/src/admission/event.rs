//! Events that an [`Admission`](super::Admission) takes, and the actions and reports it returns.

use laxity_types::{BatchId, PortId, RequestId};

use crate::event::Order;
use crate::prune::Estimate;
use crate::red::Red;
use crate::time::{Span, Time};

/// The properties of a request when it joins a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestLoad {
    /// The request. Zero is ignored.
    pub request: RequestId,
    /// When the first token is due, [`Time::NEVER`] if the request has no deadline.
    pub deadline: Time,
    /// `ℓ_r`: bytes that the request has still to move through each port, over all stages.
    pub ports: Vec<(PortId, u64)>,
    /// Whether the request computes already.
    pub started: bool,
}

/// An event of admission. The caller passes the time of the event as `now`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants say what their fields are")]
pub enum AdmissionEvent {
    /// A batch was formed, or an active batch is announced again with changes.
    BatchArrived {
        /// The batch. Zero is ignored.
        batch: BatchId,
        /// The batch's members. A repeated announcement lists new or changed members.
        requests: Vec<RequestLoad>,
        /// Duration of the batch's whole computation.
        compute: Span,
    },
    /// A request is a member of an active batch, with this load.
    RequestJoined { batch: BatchId, load: RequestLoad },
    /// The request computes.
    RequestStarted { request: RequestId },
    /// The request has its first token, or was aborted. It leaves the pruned set.
    RequestEnded { request: RequestId },
    /// `bytes` of the request were delivered through `port`.
    BytesCompleted {
        request: RequestId,
        port: PortId,
        /// Bytes since the last such event.
        bytes: u64,
    },
    /// The batch belongs to a tenant. Requests that are pruned for the batch count against the
    /// budget of this tenant
    /// ([`AdmissionConfig::tenant_drop_budgets`](super::AdmissionConfig::tenant_drop_budgets)).
    /// Tenant 0 is assumed until then.
    BatchTenant { batch: BatchId, tenant: u16 },
    /// The batch computes, and so do its members.
    BatchStarted { batch: BatchId },
    /// The batch computes after `ahead`, on the same unit, until it starts or `ahead` departs. The
    /// event is ignored if the batch computes already, or if `ahead` waits behind it.
    BatchQueued {
        batch: BatchId,
        /// The batch directly before it.
        ahead: BatchId,
    },
    /// The batch has ended. Members that did not end before were aborted.
    BatchDeparted { batch: BatchId },
    /// The rate of a port is known or has changed. The owner of the port reports it, not a client,
    /// so such a port is never removed.
    PortRate {
        port: PortId,
        /// The port's rate. At zero nothing passes.
        bytes_per_second: u64,
    },
}

/// An action that admission asks of its driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdmissionAction {
    /// The driver passes this order to every link, because it differs from the last one.
    OrderChanged(Order),
}

/// The reason why a request is pruned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PruneCause {
    /// The batch that could not have finished in time.
    pub batch: BatchId,
    /// The bottleneck of that batch, which the request loaded most. `None` if the request's
    /// computation alone ended too late.
    pub port: Option<PortId>,
}

/// The decision of the last run about one batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The time of the run.
    pub decided_at: Time,
    /// Position in `σ`, from zero.
    pub rank: usize,
    /// RED of the batch, and the `D^Lo` that the estimate was compared with.
    pub red: Red,
    /// The estimate, which leaves out all pruned requests: `finish()`, bottleneck and bytes.
    pub estimate: Estimate,
    /// Whether the batch is estimated to finish by `D^Lo`.
    pub feasible: bool,
    /// The batch's pruned members, in ascending order.
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
    /// Batches removed because a cap was reached.
    pub batches_forgotten: u64,
    /// Requests that alone exceed a cap, and loads and rates of ports beyond the cap.
    pub loads_refused: u64,
    /// Events of an unknown batch or request, or of an impossible queue.
    pub events_ignored: u64,
}
