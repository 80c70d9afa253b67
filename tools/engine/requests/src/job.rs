//! A request at a replica: how far it is.

use crate::Time;
use crate::request::{RequestId, Spec};

/// Where a job stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Tokens of its prompt (or of what was dropped) are to be computed; nothing of it was ever
    /// planned, or all was dropped.
    Waiting,
    /// Some are, more are to be.
    Prefilling,
    /// One token after the other.
    Decoding,
}

/// A job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    /// What was known of it.
    pub spec: Spec,
    /// Where it stands.
    pub phase: Phase,
    /// Tokens whose KV is here.
    pub context: u32,
    /// Tokens that have to be here before it decodes: the prompt, and after a drop also what it had
    /// generated.
    pub target: u32,
    /// Tokens that it gave out.
    pub generated: u32,
    /// When it gave out the first.
    pub first_token: Option<Time>,
    /// When it gave out the last so far.
    pub last_token: Option<Time>,
    /// Given up: served when there is nothing else to do (QoServe §3.4).
    pub relegated: bool,
    /// How often all that was computed of it was lost.
    pub drops: u32,
}

impl Job {
    /// A job as it arrives.
    #[must_use]
    pub const fn new(spec: Spec) -> Self {
        // The KV of a token that was just generated is computed in the pass that gives the next
        // one.
        let computed = spec.prompt.saturating_add(spec.generated.saturating_sub(1));
        let decodes = spec.generated > 0 && spec.ready >= computed;
        let target = if decodes {
            computed
        } else {
            spec.prompt.saturating_add(spec.generated)
        };
        let most = if decodes { target } else { target - 1 };
        Self {
            spec,
            phase: if decodes {
                Phase::Decoding
            } else {
                Phase::Waiting
            },
            context: if spec.ready < most { spec.ready } else { most },
            target,
            generated: spec.generated,
            first_token: None,
            last_token: None,
            relegated: false,
            drops: 0,
        }
    }

    /// It gave out a token. Whether that was the last that it may.
    pub(crate) const fn gave_token(&mut self, now: Time) -> bool {
        self.phase = Phase::Decoding;
        self.generated += 1;
        if self.first_token.is_none() {
            self.first_token = Some(now);
        }
        self.last_token = Some(now);
        self.generated >= self.spec.output_max
    }

    /// All that was computed of it is lost.
    pub(crate) const fn lost(&mut self) {
        self.phase = Phase::Waiting;
        self.context = 0;
        self.target = self.spec.prompt + self.generated;
        self.drops += 1;
    }

    /// Its number.
    #[must_use]
    pub const fn id(&self) -> RequestId {
        self.spec.id
    }

    /// Tokens to compute before it decodes.
    #[must_use]
    pub const fn prefill_left(&self) -> u32 {
        self.target.saturating_sub(self.context)
    }

    /// When its next token has to be there.
    #[must_use]
    pub const fn next_deadline(&self) -> Time {
        self.spec.deadline(self.generated)
    }
}
