//! The policy of a scenario, and its choices where papers leave a question open.

use laxity_policy::{Granularity, PolicyKind};
use serde::{Deserialize, Serialize};

use super::requests::is_default;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Policy {
    #[serde(with = "kind_by_name")]
    pub kind: PolicyKind,
    /// Number of levels without the scavenger, `K` in MFS.
    pub levels: u8,
    /// Scale of the level thresholds, `U` in MFS.
    pub threshold_scale: f64,
    /// Base of the level thresholds, `E` in MFS.
    pub threshold_base: f64,
    /// What `fair`, `sjf` and `edf` treat as one unit: a flow or a coflow.
    #[serde(with = "GranularityName")]
    pub granularity: Granularity,
    /// Parts of `mfs` or `laxity` that are disabled, to measure what each part contributes.
    pub without: Vec<Part>,
    /// Whether receivers grant what is sent to them, and in which order. If they do, no daemon
    /// decides.
    #[serde(skip_serializing_if = "is_default")]
    pub grants: Grants,
    /// Whether transfers never contend. The result is a bound for all policies.
    pub no_contention: bool,
    /// Maximum number of requests that are pruned at once.
    pub drop_budget: usize,
    /// Shortest time between two runs of the order between batches, in milliseconds.
    pub debounce_ms: f64,
}

/// The order in which a receiver grants the transfers that are under way to it, as Homa does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grants {
    /// Receivers do not grant.
    #[default]
    Off,
    /// The transfer with the fewest bytes left first.
    Shortest,
    /// The transfer whose deadline leaves the least time after the rest of it is sent.
    LeastLaxity,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// MLU. Without it P2D flows stay at the lowest level.
    Mlu,
    /// RLI. Without it all KV reuse is as urgent as that of the layer that computes.
    Rli,
    /// RED. Without it batches are ordered by arrival.
    Red,
    /// Pruning. Without it no request is pruned.
    Pruning,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Granularity", rename_all = "snake_case")]
enum GranularityName {
    Flow,
    Coflow,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            kind: PolicyKind::Laxity,
            levels: 8,
            threshold_scale: 0.5,
            threshold_base: 4.0,
            granularity: Granularity::default(),
            without: Vec::new(),
            grants: Grants::Off,
            no_contention: false,
            drop_budget: 64,
            debounce_ms: 2.0,
        }
    }
}

mod kind_by_name {
    use laxity_policy::PolicyKind;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(kind: &PolicyKind, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(kind.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PolicyKind, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}
