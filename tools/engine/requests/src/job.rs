//! The progress of a request at a replica.

use crate::Time;
use crate::request::{RequestId, Spec};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// No token of its prompt is computed: nothing was planned yet, or a drop lost everything.
    Waiting,
    /// Some prompt tokens are computed and some are not.
    Prefilling,
    /// The job generates one token after another.
    Decoding,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    pub spec: Spec,
    pub phase: Phase,
    /// Number of tokens whose KV is on this replica.
    pub context: u32,
    /// Number of tokens whose KV decode needs: the prompt, and after a drop also generated tokens.
    pub target: u32,
    pub generated: u32,
    pub first_token: Option<Time>,
    pub last_token: Option<Time>,
    /// Whether the job is relegated: served when there is nothing else to do (QoServe §3.4).
    pub relegated: bool,
    /// How often the job lost all its KV.
    pub drops: u32,
}

impl Job {
    pub const fn new(spec: Spec) -> Self {
        // The pass that generates a token computes the KV of the token before it.
        let computed = spec.prompt.saturating_add(spec.generated.saturating_sub(1));
        let decodes = spec.generated > 0 && spec.ready >= computed;
        let target = if decodes { computed } else { spec.prompt.saturating_add(spec.generated) };
        let most = if decodes { target } else { target - 1 };
        Self {
            spec,
            phase: if decodes { Phase::Decoding } else { Phase::Waiting },
            context: if spec.ready < most { spec.ready } else { most },
            target,
            generated: spec.generated,
            first_token: None,
            last_token: None,
            relegated: false,
            drops: 0,
        }
    }

    /// Records a generated token. Returns whether the request may generate no more.
    pub(crate) const fn gave_token(&mut self, now: Time) -> bool {
        self.phase = Phase::Decoding;
        self.generated += 1;
        if self.first_token.is_none() {
            self.first_token = Some(now);
        }
        self.last_token = Some(now);
        self.generated >= self.spec.output_max
    }

    pub(crate) const fn lost(&mut self) {
        self.phase = Phase::Waiting;
        self.context = 0;
        self.target = self.spec.prompt + self.generated;
        self.drops += 1;
    }

    pub const fn id(&self) -> RequestId {
        self.spec.id
    }

    /// Returns the number of tokens to compute before the job decodes.
    pub const fn prefill_left(&self) -> u32 {
        self.target.saturating_sub(self.context)
    }

    pub const fn next_deadline(&self) -> Time {
        self.spec.deadline(self.generated)
    }
}
