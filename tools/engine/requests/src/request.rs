//! A request: what is known of it when it arrives, and what it was promised.

use serde::{Deserialize, Serialize};

use crate::{Span, Time};

/// A request. Numbers are the driver's, and not used twice.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct RequestId(pub u64);

/// A replica of a model: one or more GPUs that run one forward pass after the other.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct InstanceId(pub u32);

/// A class of service: an index into the driver's table of objectives.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct ClassId(pub u16);

/// Who sends such requests; those of one application are alike (QoServe §3.4: lengths of answers).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct ApplicationId(pub u32);

/// What was promised (QoServe §3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Slo {
    /// Somebody reads along.
    Interactive {
        /// Time to the first token, ns.
        ttft: u64,
        /// Time between tokens, ns.
        tbt: u64,
    },
    /// Somebody waits for the end.
    Batch {
        /// Time to the last token, ns.
        ttlt: u64,
    },
}

impl Slo {
    /// When token `n` (from 0) has to be there. Tokens of a batch request have no deadline of their
    /// own: that of the last one holds for all (QoServe eq. 1 to 3).
    #[must_use]
    pub const fn deadline(&self, arrival: Time, n: u32) -> Time {
        let after = match self {
            Self::Interactive { ttft, tbt } => ttft.saturating_add(tbt.saturating_mul(n as u64)),
            Self::Batch { ttlt } => *ttlt,
        };
        Time(arrival.0.saturating_add(after))
    }

    /// Somebody reads along.
    #[must_use]
    pub const fn is_interactive(&self) -> bool {
        matches!(self, Self::Interactive { .. })
    }
}

/// What a request is worth to its operator: who is given up first when not all can be served.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Importance {
    /// Given up first (a free tier).
    Low,
    /// Paid for.
    #[default]
    Important,
}

/// A request as it arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// Its number.
    pub id: RequestId,
    /// When it came to the front door. Deadlines count from here, wherever it waits.
    #[serde(with = "crate::nanoseconds::time")]
    pub arrival: Time,
    /// Tokens of its prompt, 1 at least.
    pub prompt: u32,
    /// Most tokens that it may generate, 1 at least. How many it will is not known.
    pub output_max: u32,
    /// Tokens at the start of it whose KV is here already: a prefix that was cached, or all of it,
    /// where another instance computed it. Less than prompt plus `generated`.
    pub ready: u32,
    /// Tokens that it generated elsewhere.
    pub generated: u32,
    /// Its class.
    pub class: ClassId,
    /// Its application.
    pub application: ApplicationId,
    /// What it is worth.
    pub importance: Importance,
    /// What was promised.
    pub slo: Slo,
}

impl Spec {
    /// Tokens of KV it holds at most: the last token that is generated needs none.
    #[must_use]
    pub const fn tokens_max(&self) -> u32 {
        self.prompt
            .saturating_add(self.output_max)
            .saturating_sub(1)
    }

    /// See [`Slo::deadline`].
    #[must_use]
    pub const fn deadline(&self, n: u32) -> Time {
        self.slo.deadline(self.arrival, n)
    }

    /// When its first token has to be there, for those with such an objective, else its last.
    #[must_use]
    pub const fn first_deadline(&self) -> Time {
        self.deadline(0)
    }

    /// An allowance, as a [`Span`].
    #[must_use]
    pub const fn first_allowance(&self) -> Span {
        self.first_deadline().since(self.arrival)
    }
}
