//! The first tier, which decides what one replica computes in its next forward pass.
//!
//! A driver reports events to [`crate::replica::Replica::handle`]. When the replica is idle, it
//! calls [`crate::replica::Replica::plan`], runs the plan and reports [`Event::Done`]. At most one
//! plan runs at a time.

use crate::Span;
use crate::latency::Composition;
use crate::request::{RequestId, Spec};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Arrived(Spec),
    /// A request is cancelled or continues on another instance. If it is being computed, the result
    /// is discarded.
    Cancelled(RequestId),
    Done {
        /// Duration of the iteration, which includes host work.
        took: Span,
        /// Requests whose last token came in this iteration.
        finished: Vec<RequestId>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub request: RequestId,
    /// Number of tokens before the chunk, whose KV is on this replica.
    pub prefix: u32,
    pub tokens: u32,
    /// Whether this chunk ends the prompt, so that the request generates a token in this iteration.
    pub last: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub request: RequestId,
    /// Number of the request's tokens whose KV is on this replica.
    pub context: u32,
}

/// A request that loses its blocks before the plan runs. Its computed KV is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dropped {
    pub request: RequestId,
    pub why: Why,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// A request that is served earlier needs the blocks.
    Memory,
    Relegated,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Requests that lose their blocks before the pass.
    pub drops: Vec<Dropped>,
    pub chunks: Vec<Chunk>,
    pub steps: Vec<Step>,
}

impl Plan {
    /// Returns the sums that determine the duration of this plan.
    pub fn composition(&self) -> Composition {
        let chunks = self
            .chunks
            .iter()
            .fold(Composition::default(), |sum, chunk| sum.with_chunk(chunk.prefix, chunk.tokens));
        self.steps.iter().fold(chunks, |sum, step| sum.with_decode(step.context))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub request: RequestId,
    pub why: Refused,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The prompt and the longest answer together need more KV blocks than the replica has.
    TooLong,
    /// A request with the same id is already here.
    Known,
    /// A field is invalid: no prompt, no output, or more ready tokens than the request has.
    Senseless,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests without any computed token.
    pub waiting: u32,
    /// Relegated requests among `waiting`. They wait until the replica has nothing else to do.
    pub relegated: u32,
    pub running: u32,
    /// Requests among `running` that decode.
    pub decoding: u32,
    /// Prompt tokens that all requests together still have to compute.
    pub prefill_tokens: u64,
    /// Tokens of KV of all requests that decode.
    pub decode_context: u64,
    pub blocks: u32,
    pub blocks_free: u32,
}

impl Load {
    pub const fn in_line(&self) -> u32 {
        self.waiting.saturating_sub(self.relegated)
    }
}
