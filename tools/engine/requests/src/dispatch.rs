//! The second tier: which instance takes a request, and when it moves to another.

use serde::{Deserialize, Serialize};

use crate::Time;
use crate::iteration::Load;
use crate::request::{ClassId, InstanceId, RequestId, Spec};

/// What an instance does of a request.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// All of it.
    #[default]
    Whole,
    /// The prompt and the first token.
    Prefill,
    /// The other tokens.
    Decode,
}

/// Something happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// A request came to the front door.
    Arrived(Spec),
    /// An instance is ready.
    Up {
        /// Which.
        instance: InstanceId,
        /// For what.
        role: Role,
    },
    /// An instance takes no more: what it has ends there (`lost` is empty), or is lost and has to
    /// be placed again.
    Down {
        /// Which.
        instance: InstanceId,
        /// Requests that it had.
        lost: Vec<Spec>,
    },
    /// An instance says what stands there: after each of its iterations.
    Load {
        /// Which.
        instance: InstanceId,
        /// What stands there.
        load: Load,
        /// Time its last iteration took, ns; 0 if it had none.
        took: u64,
    },
    /// A request's first token is out, on a prefill instance, and it can move to one that decodes.
    /// `spec` counts what is ready and generated.
    Prefilled {
        /// As it stands.
        spec: Spec,
        /// Where.
        instance: InstanceId,
    },
    /// A request is complete.
    Finished {
        /// Which.
        request: RequestId,
        /// Where.
        instance: InstanceId,
        /// Its class.
        class: ClassId,
        /// Measured time to its first token, ns.
        ttft: u64,
        /// Measured mean time between its tokens, ns.
        tpot: u64,
        /// Tokens that it generated.
        generated: u32,
    },
    /// Nobody wants it any more.
    Cancelled(RequestId),
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// It goes there. A request that was prefilled elsewhere takes its KV along.
    Place {
        /// Which.
        request: RequestId,
        /// Where to.
        instance: InstanceId,
    },
    /// It is turned away.
    Refuse(RequestId),
}

/// Decides where requests go.
pub trait Dispatch {
    /// How it is called on tables.
    fn name(&self) -> &'static str;
    /// Takes in what happened.
    fn handle(&mut self, now: Time, event: &Event);
    /// The next decision.
    fn poll_decision(&mut self, now: Time) -> Option<Decision>;
    /// When to poll again though nothing happened.
    fn next_deadline(&self) -> Option<Time>;
    /// Requests that came and have no place yet.
    fn waiting(&self) -> usize;
}
