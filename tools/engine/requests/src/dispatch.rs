//! The second tier, which decides which instance takes a request and when it moves to another.

use crate::Time;
use crate::iteration::Load;
use crate::request::{ClassId, InstanceId, RequestId, Spec};

/// The part of a request that an instance computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// The prompt and all tokens of the answer.
    #[default]
    Whole,
    /// The prompt and the first token.
    Prefill,
    /// All tokens after the first.
    Decode,
}

#[derive(Clone, Debug, PartialEq)]
pub enum DispatchEvent {
    Arrived(Spec),
    Up {
        instance: InstanceId,
        role: Role,
    },
    /// An instance takes no more requests. If `lost` is empty, its requests end there.
    Down {
        instance: InstanceId,
        /// Requests that were lost with the instance and need a new one.
        lost: Vec<Spec>,
    },
    /// An instance reports its load after an iteration.
    Load {
        instance: InstanceId,
        load: Load,
        /// Duration of the last iteration in ns, or 0 if there was none.
        took: u64,
    },
    /// A prefill instance generated a request's first token. The request can move to a decode
    /// instance.
    Prefilled {
        /// The request with its current `ready` and `generated`.
        spec: Spec,
        instance: InstanceId,
    },
    Finished {
        request: RequestId,
        instance: InstanceId,
        class: ClassId,
        /// Measured time to the first token, ns.
        ttft: u64,
        /// Measured mean time between tokens, ns.
        tpot: u64,
        generated: u32,
    },
    Cancelled(RequestId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DispatchDecision {
    /// Place a request on an instance. If it was prefilled elsewhere, its KV moves along.
    Place { request: RequestId, instance: InstanceId },
    /// Refuse a request for good.
    Refuse(RequestId),
}

pub trait Dispatch {
    fn handle(&mut self, now: Time, event: &DispatchEvent);
    fn poll_decision(&mut self, now: Time) -> Option<DispatchDecision>;
    /// Returns when to poll again if no event comes before.
    fn next_deadline(&self) -> Option<Time> {
        None
    }
    fn waiting(&self) -> usize;
}
