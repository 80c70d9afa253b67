//! What a trace of a daemon holds: hints, submits, permits and completions, in the order in which
//! the scheduler saw them. Times are nanoseconds of CLOCK_MONOTONIC; numbers of batches and
//! requests are those of the hints.

use serde::{Deserialize, Serialize};

/// Part of a trace, the oldest events first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracePage {
    /// Events; those of later pages are not older.
    pub events: Vec<TraceEvent>,
    /// Events so far that found no room.
    pub lost: u64,
    /// There is nothing more for now.
    pub is_empty: bool,
    /// There will be nothing more after what there is.
    pub is_over: bool,
}

/// Something that the scheduler saw or did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceEvent {
    /// When.
    pub at_ns: u64,
    /// What.
    #[serde(flatten)]
    pub what: TraceKind,
}

/// What it was. A flow is named by a number that no other living flow has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum TraceKind {
    /// A flow wants to send.
    Submitted(TracedFlow),
    /// More of it may go.
    Permitted {
        /// Which.
        flow: u64,
        /// Bytes more.
        bytes: u64,
        /// 1 the highest, 255 the scavenger.
        level: u8,
        /// Nothing more will follow.
        last: bool,
    },
    /// Bytes of it have left the wire.
    Completed {
        /// Which.
        flow: u64,
        /// Bytes more.
        bytes: u64,
    },
    /// It will not complete.
    Cancelled {
        /// Which.
        flow: u64,
    },
    /// A batch was formed.
    BatchBegin {
        /// Which.
        batch: u64,
        /// Layers of the model.
        layers: u16,
    },
    /// A request is a member of a batch.
    RequestJoin {
        /// Which batch.
        batch: u64,
        /// Which request.
        request: u64,
        /// When it is due, as it was said; 0 if nothing was.
        deadline_ns: u64,
    },
    /// A request has ended.
    RequestEnd {
        /// Which.
        request: u64,
    },
    /// A batch waits behind another.
    BatchQueued {
        /// The one that waits.
        batch: u64,
        /// The one that runs.
        ahead: u64,
    },
    /// A batch computes a layer.
    LayerBegin {
        /// Which batch.
        batch: u64,
        /// Which layer.
        layer: u16,
    },
    /// A batch has computed its last layer.
    ComputeEnd {
        /// Which batch.
        batch: u64,
    },
    /// Nothing of a batch is left.
    BatchEnd {
        /// Which.
        batch: u64,
    },
}

/// A flow, and what became of it at its submit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedFlow {
    /// Its number.
    pub flow: u64,
    /// Process that submitted it.
    pub pid: u32,
    /// Index of the NIC.
    pub nic: u8,
    /// It loads the way into this host, not out of it.
    pub ingress: bool,
    /// What it is for.
    pub stage: String,
    /// The layer.
    pub layer: u16,
    /// The batch, 0 if unknown.
    pub batch: u64,
    /// The request, 0 if unknown.
    pub request: u64,
    /// Bytes.
    pub bytes: u64,
    /// When it is due; 0 if it is not.
    pub deadline_ns: u64,
    /// What became of it when it was submitted.
    pub standing: SubmitOutcome,
    /// Bytes of it that are permitted at once; 0 if it has to wait.
    pub granted: u64,
    /// Level of the permitted bytes.
    pub level: u8,
    /// Bytes of others in flight on its port.
    pub in_flight_bytes: u64,
    /// Bytes that may be in flight there.
    pub window_bytes: u64,
    /// Flows that waited there before it.
    pub ahead: u64,
}

/// What becomes of a flow when it is submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SubmitOutcome {
    /// It is permitted, or a part of it is.
    AtOnce,
    /// It went on credit, before it was told of.
    OnCredit,
    /// It went without a permit, in mode `observe`.
    Observed,
    /// It waits: others do, too.
    BehindOthers,
    /// It waits: no more bytes may be in flight on its port, and nobody else waits.
    WindowFull,
    /// It waits: the coordinator has others read first from the host that it reads from.
    Held,
}
