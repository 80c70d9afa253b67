//! A trace of a daemon: hints, submits, permits and completions, in the scheduler's order. Times
//! are nanoseconds of CLOCK_MONOTONIC. Numbers of batches and requests are those of the hints.

#![allow(missing_docs, reason = "most fields say by their names what they are")]

use serde::{Deserialize, Serialize};

/// A part of a trace, the oldest events first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracePage {
    /// The events. None is older than those of earlier pages.
    pub events: Vec<TraceEvent>,
    /// Events lost for lack of room since the trace began.
    pub lost: u64,
    /// Whether there are no more events now.
    pub is_empty: bool,
    /// Whether the trace has ended, so that no events will be added.
    pub is_over: bool,
}

/// An event of the scheduler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceEvent {
    pub at_ns: u64,
    #[serde(flatten)]
    pub what: TraceKind,
}

/// A kind of event. A flow has a number that no other current flow has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum TraceKind {
    /// A client submitted a flow.
    Submitted(TracedFlow),
    /// The flow got a permit.
    Permitted {
        flow: u64,
        bytes: u64,
        /// The level, from 1 as the highest, or 255 for the scavenger.
        level: u8,
        last: bool,
    },
    /// Bytes of the flow completed.
    Completed { flow: u64, bytes: u64 },
    /// The flow was cancelled and will not complete.
    Cancelled { flow: u64 },
    /// A batch was announced.
    BatchBegin { batch: u64, layers: u16 },
    /// A request joined a batch.
    RequestJoin {
        batch: u64,
        request: u64,
        /// The deadline of the hint, or 0 if it has none.
        deadline_ns: u64,
    },
    /// A request has ended.
    RequestEnd { request: u64 },
    /// The trace of a request at its engine, in the hexadecimal digits of W3C Trace Context.
    RequestTrace {
        request: u64,
        trace_id: String,
        /// The id of the span that called the engine.
        span_id: String,
    },
    /// A batch waits behind another batch.
    BatchQueued {
        batch: u64,
        /// The id of the batch that computes first.
        ahead: u64,
    },
    /// A batch began to compute a layer.
    LayerBegin { batch: u64, layer: u16 },
    /// A batch has computed its last layer.
    ComputeEnd { batch: u64 },
    /// A batch ended.
    BatchEnd { batch: u64 },
}

/// A flow, and the outcome of its submit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedFlow {
    pub flow: u64,
    /// The id of the process that submitted the flow.
    pub pid: u32,
    pub nic: u8,
    /// Whether the flow's port is an ingress port.
    pub ingress: bool,
    pub stage: String,
    pub layer: u16,
    /// The id of the batch, or 0 if unknown.
    pub batch: u64,
    /// The id of the request, or 0 if unknown.
    pub request: u64,
    pub bytes: u64,
    /// The deadline, or 0 if there is none.
    pub deadline_ns: u64,
    pub standing: SubmitOutcome,
    /// The bytes that were permitted at once, or 0 if the flow has to wait.
    pub permitted: u64,
    /// The level of the permitted bytes.
    pub level: u8,
    /// The bytes of other flows in flight on the port.
    pub in_flight_bytes: u64,
    pub window_bytes: u64,
    /// Flows that waited on the port before this one.
    pub ahead: u64,
}

/// The outcome of a flow's submit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SubmitOutcome {
    /// The flow, or a part of it, was permitted.
    AtOnce,
    /// The flow was sent on credit, before its record was read.
    OnCredit,
    /// The flow was sent without a permit, in mode `observe`.
    Observed,
    /// The flow waits, as do others.
    BehindOthers,
    /// The flow waits alone, because the window of its port is full.
    WindowFull,
    /// The flow waits, because its client owes completions.
    Held,
}
