//! Events that a [`Link`](crate::link::Link) takes, and the actions that it returns.

use laxity_types::{BatchId, FlowId, Layer, Level, PeerId, RequestId, Stage};

use crate::time::{Span, Time};

/// The properties of a flow when it arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowSpec {
    /// The flow's id. The driver chooses it, unique among the living flows of the link.
    pub flow: FlowId,
    /// What the flow is for.
    pub stage: Stage,
    /// The flow's batch, zero if unknown.
    pub batch: BatchId,
    /// The flow's request, zero if unknown or if the flow serves the whole batch (collectives).
    pub request: RequestId,
    /// `L_target`: the layer that consumes (stages 1, 2) or produced (stage 3) the bytes.
    pub layer: Layer,
    /// Bytes to move. A flow of zero bytes gets one permit, for zero bytes.
    pub bytes: u64,
    /// TTFT deadline of the request, [`Time::NEVER`] if there is none.
    pub deadline: Time,
    /// The other end: the port that receives what this one sends, or that holds what it reads.
    pub peer: PeerId,
    /// Whether the flow must be permitted in one piece, however large (a work request). The part of
    /// the piece beyond one chunk may exceed the window.
    pub whole: bool,
}

impl FlowSpec {
    /// Creates a flow whose batch, request, layer and deadline are unknown.
    pub const fn anonymous(flow: FlowId, stage: Stage, bytes: u64) -> Self {
        Self {
            flow,
            stage,
            batch: BatchId(0),
            request: RequestId(0),
            layer: Layer(0),
            bytes,
            deadline: Time::NEVER,
            peer: PeerId(0),
            whole: false,
        }
    }
}

/// The properties of a batch that a hint (or the simulator's engine) announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSpec {
    /// The batch that is announced.
    pub batch: BatchId,
    /// Number of layers that the model has.
    pub layers: u16,
    /// Expected duration of one layer without contention, zero if unknown.
    pub layer_time: Span,
}

/// The order between batches and the pruned set. The [`admission`](crate::admission) of this host
/// or of the coordinator computes them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// A number that increases with every order that is issued.
    pub epoch: u64,
    /// `σ`: batches in ascending RED. Batches that are not listed come after those that are.
    pub sigma: Vec<BatchId>,
    /// `H`: the pruned requests, in ascending order of their ids.
    pub pruned: Vec<RequestId>,
}

/// An event of a link. The caller passes the time of the event as `now`.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the variants say what their fields are")]
pub enum Event {
    /// A flow wants to send.
    FlowArrived(FlowSpec),
    /// `bytes` of `flow` were delivered, as a completion or an acknowledgement reports.
    BytesCompleted {
        flow: FlowId,
        /// Bytes since the last such event.
        bytes: u64,
    },
    /// `bytes` of `flow` count as in flight no more, though they have not completed.
    BytesWrittenOff { flow: FlowId, bytes: u64 },
    /// The flow has ended and sends nothing more (its process died, its queue pair was destroyed).
    FlowCancelled { flow: FlowId },
    /// The flow gets no permits until [`Event::FlowReleased`], because its client
    /// owes completions. Earlier permits stay valid.
    FlowHeld { flow: FlowId },
    /// The flow waits for permits again, at the position that it had.
    FlowReleased { flow: FlowId },
    /// A batch was formed. It may still wait in a queue.
    BatchBegan(BatchSpec),
    /// `request` joined `batch` and should have its first token by `deadline`.
    RequestJoined {
        batch: BatchId,
        request: RequestId,
        deadline: Time,
        /// Bytes that the request will probably move through this port, zero if unknown.
        bytes: u64,
    },
    /// The request has its first token, or was aborted.
    RequestEnded { request: RequestId },
    /// `batch` waits behind `ahead`: the RLI of its flows counts the remaining layers of the
    /// running batch first.
    BatchQueued { batch: BatchId, ahead: BatchId },
    /// `L_curr` of `batch` is now `layer`.
    LayerBegan { batch: BatchId, layer: Layer },
    /// `batch` has computed its last layer: promotion is periodic from here on (MFS §4.5).
    ComputeFinished { batch: BatchId },
    /// `batch` has ended, so the link need not keep its state.
    BatchEnded { batch: BatchId },
    /// A new order between batches.
    OrderChanged(Order),
}

/// An action that a link asks of its driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants say what their fields are")]
pub enum Action {
    /// `bytes` more of `flow` may go out at `level`.
    Permit {
        flow: FlowId,
        bytes: u64,
        /// The level with which the bytes are tagged. A message keeps one level on the wire for its
        /// whole life (architecture §4.3). So each permit has the level of the flow's first permit,
        /// though the host may have promoted the rest of the flow since then ([`Action::Moved`]).
        level: Level,
        last: bool,
    },
    /// `flow`, still waiting, moved to another level. The action serves accounting; it sends
    /// nothing. A layer boundary promotes all stage-1 flows of a batch at once. The snapshot counts
    /// them instead, so that the cost of a boundary does not grow with the number of flows.
    Moved {
        flow: FlowId,
        from: Level,
        /// The flow's new level. [`Level::SCAVENGER`] is the only demotion.
        to: Level,
    },
}
