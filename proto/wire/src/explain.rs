//! The flows that `laxity explain` asks for. Times are nanoseconds of CLOCK_MONOTONIC.

#![allow(missing_docs, reason = "most fields say by their names what they are")]

use serde::{Deserialize, Serialize};

use crate::trace::TracedFlow;

/// Maximum number of flows in one answer.
pub const EXPLAINED_MAX: usize = 16;

/// Selects the flows that meet all conditions. Without a condition, it selects those that wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FlowQuery {
    pub flow: Option<u64>,
    pub request: Option<u64>,
    /// The id of the batch. Only flows that wait have a known batch.
    pub batch: Option<u64>,
    pub pid: Option<u32>,
}

/// The flows that a [`FlowQuery`] selects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    /// The time of the answer.
    pub now_ns: u64,
    /// Flows that wait first, then others, those without progress for longest first:
    /// [`EXPLAINED_MAX`] at most.
    pub flows: Vec<ExplainedFlow>,
    /// Number of flows that match the query.
    pub count: u64,
}

/// A flow that has not ended, as it is now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExplainedFlow {
    /// The flow. `permitted` counts all permitted bytes, and `ahead` has an upper limit. The batch
    /// and the layer are known only while the flow waits.
    #[serde(flatten)]
    pub flow: TracedFlow,
    pub client: u64,
    /// The id of the trace that the request's engine named, or empty.
    #[serde(default)]
    pub trace_id: String,
    pub completed_bytes: u64,
    /// When the flow was submitted, was permitted or completed bytes last.
    pub since_ns: u64,
    pub wait: Option<FlowWait>,
}

/// Why a flow waits. An `obstacle` or a `rule` of a later release can be unknown to the reader.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowWait {
    /// What keeps the flow from a permit: `held`, `order`, `peer`, `window`, `turn` or `nothing`.
    pub obstacle: String,
    /// The level that the flow has in the host: from 1 as the highest, or 255 for the scavenger.
    pub level: u8,
    /// The rule that gives this level.
    pub rule: String,
    /// When the work must begin to make its deadline, or 0 if unknown.
    pub begin_by_ns: u64,
    /// When the level changed last, or 0 if it never did.
    pub moved_ns: u64,
    /// The level before that.
    pub moved_from: u8,
    pub ahead_bytes: u64,
    /// Whether the flow is starved, and so is served from the starved flows' share.
    pub starved: bool,
}
