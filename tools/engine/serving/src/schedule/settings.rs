//! The scheduler's settings: `[schedule]` of the configuration.
//!
//! HyperFlexis and Maestro have no iteration policy. They have dispatch and workflow tiers over
//! replicas with continuous batching.

pub use laxity_requests::engine_policy::Policy;
use laxity_requests::hmas::pool::Kind;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    pub policy: Policy,
    /// Maximum number of tokens of an iteration, including those of running answers (the chunk).
    /// `qoserve` has its own limits.
    pub tokens: u32,
    /// Blocks that must stay free when a prompt starts while others run.
    pub watermark: u32,
    /// Parameters of `hmas`.
    pub hmas: Hmas,
}

impl Default for Settings {
    fn default() -> Self {
        Self { policy: Policy::Fcfs, tokens: 256, watermark: 0, hmas: Hmas::default() }
    }
}

/// Parameters of H-MAS ([`laxity_requests::hmas::Config`]). The chunk is `schedule.tokens`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Hmas {
    /// The order of waiting requests.
    pub order: Kind,
}

impl Settings {
    pub fn summary(&self) -> String {
        match self.policy {
            Policy::Fcfs | Policy::Edf | Policy::Srpf => {
                format!("{}, chunks of {} tokens", self.policy, self.tokens)
            }
            Policy::Qoserve => "qoserve, latency learned as it runs".to_owned(),
            Policy::Hmas => {
                let (order, tokens) = (self.hmas.order, self.tokens);
                format!("hmas, {order}, {tokens} tokens at most, latency learned as it runs")
            }
        }
    }
}
