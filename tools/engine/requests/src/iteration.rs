//! The first tier: what one replica computes in its next forward pass.
//!
//! A driver calls [`Iteration::handle`] for what happened, [`Iteration::plan`] when the replica is
//! idle, runs the plan, and says [`Event::Done`]. One plan is under way at a time.

use serde::{Deserialize, Serialize};

use crate::latency::Composition;
use crate::request::{RequestId, Spec};
use crate::{Span, Time};

/// Something happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// A request came.
    Arrived(Spec),
    /// Nobody wants it any more, or it goes on elsewhere. May come while it is computed: what that
    /// gives is thrown away.
    Cancelled(RequestId),
    /// The plan was computed.
    Done {
        /// Time it took, host work included.
        #[serde(with = "crate::nanoseconds::span")]
        took: Span,
        /// Of those that gave out a token, those for which it was the last.
        finished: Vec<RequestId>,
    },
    /// There are so many KV blocks from now on.
    Capacity(u32),
}

/// Some tokens of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// Whose.
    pub request: RequestId,
    /// Tokens before it, whose KV is here.
    pub prefix: u32,
    /// How many.
    pub tokens: u32,
    /// It is the last one: the request gives out a token in this iteration.
    pub last: bool,
}

/// A request that computes one token more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// Whose.
    pub request: RequestId,
    /// Tokens whose KV is here.
    pub context: u32,
}

/// A request whose blocks are taken away before the plan is computed. What was computed of it is
/// lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drop {
    /// Whose.
    pub request: RequestId,
    /// Why.
    pub why: Why,
}

/// Why blocks are taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// One that comes before it needs them.
    Memory,
    /// It was given up.
    Relegated,
}

/// What is computed next.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// First these lose their blocks.
    pub drops: Vec<Drop>,
    /// Prompts.
    pub chunks: Vec<Chunk>,
    /// Tokens.
    pub steps: Vec<Step>,
}

impl Plan {
    /// What is in it.
    #[must_use]
    pub fn composition(&self) -> Composition {
        let chunks = self
            .chunks
            .iter()
            .fold(Composition::default(), |sum, chunk| {
                sum.with_chunk(chunk.prefix, chunk.tokens)
            });
        self.steps
            .iter()
            .fold(chunks, |sum, step| sum.with_decode(step.context))
    }
}

/// A request that was turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// Which.
    pub request: RequestId,
    /// Why.
    pub why: Refused,
}

/// Why a request is turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Refused {
    /// With all that it may generate it is larger than all KV blocks together.
    TooLong,
    /// There is such a request already.
    Known,
    /// A number in it makes no sense: no prompt, no output, or more ready than there is.
    Senseless,
}

/// What stands at a replica, for those that place requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// Requests of which no token was computed.
    pub waiting: u32,
    /// Of those, how many were given up: they stand aside, and wait until nothing else is to do.
    #[serde(default, skip_serializing_if = "is_none")]
    pub relegated: u32,
    /// Requests that compute their prompt or decode.
    pub running: u32,
    /// Of those, how many decode.
    pub decoding: u32,
    /// Prompt tokens to be computed, of all.
    pub prefill_tokens: u64,
    /// Tokens of KV of those that decode.
    pub decode_context: u64,
    /// KV blocks.
    pub blocks: u32,
    /// Those of them that nobody holds.
    pub blocks_free: u32,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde hands out references"
)]
const fn is_none(count: &u32) -> bool {
    *count == 0
}

impl Load {
    /// Requests that wait and were not given up.
    #[must_use]
    pub const fn in_line(&self) -> u32 {
        self.waiting.saturating_sub(self.relegated)
    }
}

/// Decides what a replica computes.
pub trait Iteration {
    /// Takes in what happened.
    fn handle(&mut self, now: Time, event: &Event);

    /// What to compute now; nothing while a plan is under way, or if there is nothing to compute.
    fn plan(&mut self, now: Time) -> Option<Plan>;

    /// The next one that was turned away.
    fn poll_refusal(&mut self) -> Option<Refusal>;

    /// When to ask for a plan again though nothing happened.
    fn next_deadline(&self) -> Option<Time>;

    /// What stands here.
    fn load(&self) -> Load;
}
