//! What goes into a [`Link`](crate::link::Link) and what comes out of it.

use laxity_types::{BatchId, FlowId, Layer, Level, RequestId, Stage};

use crate::time::{Span, Time};

/// Everything the policy is told of one flow when it arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowSpec {
    /// Chosen by the driver, unique among the living flows of the link.
    pub flow: FlowId,
    /// What the flow is for.
    pub stage: Stage,
    /// The batch it belongs to, zero if unknown.
    pub batch: BatchId,
    /// The request it belongs to, zero if it serves the whole batch (collectives) or is unknown.
    pub request: RequestId,
    /// `L_target`, the layer that consumes (stages 1, 2) or produced (stage 3) the bytes.
    pub layer: Layer,
    /// Bytes to move. Zero is allowed: such a flow is permitted once, with zero bytes.
    pub bytes: u64,
    /// TTFT deadline of the request, [`Time::NEVER`] if there is none.
    pub deadline: Time,
    /// The receiving side of this transfer is the bottleneck, not this port. Only the `laxity`
    /// policy uses it: promotion of P2D above collectives pays on such paths alone.
    pub receiver_bound: bool,
    /// It cannot be cut: permitted in one piece, however large (a work request). The piece may
    /// exceed the window, by what it is larger than a chunk.
    pub whole: bool,
}

impl FlowSpec {
    /// A flow of which no more is known.
    #[must_use]
    pub const fn anonymous(flow: FlowId, stage: Stage, bytes: u64) -> Self {
        Self {
            flow,
            stage,
            batch: BatchId(0),
            request: RequestId(0),
            layer: Layer(0),
            bytes,
            deadline: Time::NEVER,
            receiver_bound: false,
            whole: false,
        }
    }
}

/// What is known of a batch when it is announced (by hints, or by the simulator's engine).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSpec {
    /// The batch.
    pub batch: BatchId,
    /// Number of layers that the model has.
    pub layers: u16,
    /// Expected duration of one layer without contention, zero if unknown.
    pub layer_time: Span,
}

/// The order between batches and the pruned set, as computed by
/// [`admission`](crate::admission) here or at the coordinator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// Increases with every order that is issued.
    pub epoch: u64,
    /// `σ`: batches in ascending RED. A batch that is not in it comes after those that are.
    pub sigma: Vec<BatchId>,
    /// `H`: requests found infeasible, in ascending order of their id.
    pub pruned: Vec<RequestId>,
}

/// Something that happened, at the `now` that is passed beside it.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A flow wants to send.
    FlowArrived(FlowSpec),
    /// `bytes` of `flow` have left the wire (a completion, an acknowledgement).
    BytesCompleted {
        /// Which flow.
        flow: FlowId,
        /// How many bytes more.
        bytes: u64,
    },
    /// The flow is gone and will send nothing more (its process died, its QP was destroyed).
    FlowCancelled {
        /// Which flow.
        flow: FlowId,
    },
    /// Nothing of the flow is to be permitted until it is released: elsewhere it would be in the
    /// way of others (fetch tokens, architecture §5). What was permitted stays permitted.
    FlowHeld {
        /// Which flow.
        flow: FlowId,
    },
    /// The flow waits for permits again, where it stood.
    FlowReleased {
        /// Which flow.
        flow: FlowId,
    },
    /// A batch was formed; it may be queued still.
    BatchBegan(BatchSpec),
    /// `request` is a member of `batch` and should have its first token by `deadline`.
    RequestJoined {
        /// Which batch.
        batch: BatchId,
        /// Which request.
        request: RequestId,
        /// When its first token is due.
        deadline: Time,
        /// Bytes that it is expected to move through this port in all, zero if unknown.
        bytes: u64,
    },
    /// The request has its first token, or was aborted.
    RequestEnded {
        /// Which request.
        request: RequestId,
    },
    /// `batch` waits behind `ahead`: the RLI of its flows counts the remaining layers of the
    /// running batch first.
    BatchQueued {
        /// The batch that waits.
        batch: BatchId,
        /// The batch that runs.
        ahead: BatchId,
    },
    /// `L_curr` of `batch` is now `layer`.
    LayerBegan {
        /// Which batch.
        batch: BatchId,
        /// The layer that now computes.
        layer: Layer,
    },
    /// `batch` has computed its last layer: promotion is periodic from here on (MFS §4.5).
    ComputeFinished {
        /// Which batch.
        batch: BatchId,
    },
    /// Nothing of `batch` is left; its state can be forgotten.
    BatchEnded {
        /// Which batch.
        batch: BatchId,
    },
    /// A new order between batches.
    OrderChanged(Order),
}

/// What the driver has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// `bytes` more of `flow` may go out at `level`.
    Permit {
        /// Which flow.
        flow: FlowId,
        /// How many bytes more.
        bytes: u64,
        /// With which level they are to be tagged. A message keeps one level on the wire for its
        /// whole life (architecture §4.3), so every permit of a flow says the level of its first
        /// one, though the host may have promoted the rest of it meanwhile ([`Action::Moved`]).
        level: Level,
        /// No further permit will follow for this flow.
        last: bool,
    },
    /// `flow`, still waiting, moved to another level. For accounting; nothing is sent yet.
    /// The climb of a batch's stage-1 flows at a layer boundary is one decision over all of them
    /// and is counted in the snapshot instead, so that a boundary costs the same however many
    /// flows wait.
    Moved {
        /// Which flow.
        flow: FlowId,
        /// Where it was.
        from: Level,
        /// Where it is now. [`Level::SCAVENGER`] is the only move downwards.
        to: Level,
    },
}
