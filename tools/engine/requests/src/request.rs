//! A request as it arrives, and its objective.

use serde::{Deserialize, Serialize};

use crate::{Span, Time};

macro_rules! numbers {
    ($($(#[$doc:meta])* $name:ident($of:ty);)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $of);
    )*};
}
pub(crate) use numbers;

numbers! {
    /// The id of a request. The driver chooses ids and never uses one twice.
    RequestId(u64);
    /// The id of a replica of a model: one or more GPUs that run one forward pass after another.
    InstanceId(u32);
    /// A class of service, as an index into the driver's table of objectives.
    ClassId(u16);
    /// The id of an application. Its requests have similar lengths of answers (QoServe §3.4).
    ApplicationId(u32);
}

/// The objective of a request (QoServe §3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slo {
    /// Someone reads the answer while it is generated.
    Interactive {
        /// Objective for the time to the first token, ns.
        ttft: u64,
        /// Objective for the time between tokens, ns.
        tbt: u64,
    },
    /// Only the complete answer has an objective.
    Batch {
        /// Objective for the time to the last token, ns.
        ttlt: u64,
    },
}

impl Default for Slo {
    fn default() -> Self {
        Self::Batch { ttlt: 1 }
    }
}

impl Slo {
    /// Returns the deadline of token `n`, counted from 0. All tokens of a batch request have the
    /// deadline of the last one (QoServe eq. 1 to 3).
    pub const fn deadline(&self, arrival: Time, n: u32) -> Time {
        let after = match self {
            Self::Interactive { ttft, tbt } => ttft.saturating_add(tbt.saturating_mul(n as u64)),
            Self::Batch { ttlt } => *ttlt,
        };
        Time(arrival.0.saturating_add(after))
    }

    /// Reports whether each token has its own deadline.
    pub const fn is_interactive(&self) -> bool {
        matches!(self, Self::Interactive { .. })
    }
}

/// The value of a request to the operator. Less important requests are relegated first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Importance {
    /// Relegated first, such as requests of a free tier.
    Low,
    #[default]
    Important,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spec {
    pub id: RequestId,
    /// When the request arrived at the dispatcher. Deadlines count from this time.
    pub arrival: Time,
    /// Number of tokens of the prompt, at least 1.
    pub prompt: u32,
    /// Maximum number of tokens of the answer, at least 1. The actual number is unknown.
    pub output_max: u32,
    /// Number of leading tokens whose KV is already here, from a cache or from another instance.
    /// Less than `prompt` plus `generated`.
    pub ready: u32,
    pub generated: u32,
    pub class: ClassId,
    pub application: ApplicationId,
    pub importance: Importance,
    pub slo: Slo,
}

impl Spec {
    /// Returns the most tokens of KV that the request needs. The last generated token needs none.
    pub const fn tokens_max(&self) -> u32 {
        self.prompt.saturating_add(self.output_max).saturating_sub(1)
    }

    pub const fn deadline(&self, n: u32) -> Time {
        self.slo.deadline(self.arrival, n)
    }

    /// Returns the deadline of the first token, or of the last for a batch request.
    pub const fn first_deadline(&self) -> Time {
        self.deadline(0)
    }

    /// Returns the time from arrival to [`Self::first_deadline`].
    pub const fn first_allowance(&self) -> Span {
        self.first_deadline().since(self.arrival)
    }
}
