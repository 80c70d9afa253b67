//! Which policy a scenario runs, and with which reading of what papers leave open.

use laxity_policy::{Granularity, LastStage, MluScope, PolicyKind, Ties};
use serde::{Deserialize, Serialize};

/// Who decides, and with which reading of what papers leave open.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Policy {
    /// Which policy.
    #[serde(with = "kind_by_name")]
    pub kind: PolicyKind,
    /// `K`.
    pub levels: u8,
    /// `U` of the thresholds.
    pub threshold_scale: f64,
    /// `E` of the thresholds.
    pub threshold_base: f64,
    /// What `fair`, `sjf` and `edf` take for one job.
    #[serde(with = "GranularityName")]
    pub granularity: Granularity,
    /// How `sjf`, `edf`, `edf_low` and `tent_edf` order equals.
    #[serde(with = "TiesName")]
    pub ties: Ties,
    /// Where `mfs` puts waiting last-stage flows.
    #[serde(with = "LastStageName")]
    pub last_stage: LastStage,
    /// Whose bytes `mfs` sets against a deadline.
    #[serde(with = "MluName")]
    pub mlu: MluScope,
    /// `mfs` and `laxity`: parts that are taken out, to see what they are worth.
    pub without: Vec<Part>,
    /// No network at all: the bound that no policy can pass.
    pub no_contention: bool,
    /// Requests pruned at once at most.
    pub drop_budget: usize,
    /// Time between runs of the order between batches at least, ms.
    pub debounce_ms: f64,
}

/// A part of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Last-stage flows stay at the lowest level.
    Mlu,
    /// KV reuse knows no layers: all of it is as urgent as the layer that computes.
    Rli,
    /// Batches are ordered by arrival.
    Red,
    /// Nothing is pruned.
    Pruning,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Granularity", rename_all = "snake_case")]
enum GranularityName {
    Flow,
    Coflow,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Ties", rename_all = "snake_case")]
enum TiesName {
    Arrival,
    Fair,
    Shortest,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "LastStage", rename_all = "snake_case")]
enum LastStageName {
    BelowEarly,
    WithinLevel,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "MluScope")]
enum MluName {
    #[serde(rename = "per_flow")]
    Flow,
    #[serde(rename = "per_request")]
    Request,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            kind: PolicyKind::Laxity,
            levels: 8,
            threshold_scale: 0.5,
            threshold_base: 4.0,
            granularity: Granularity::default(),
            ties: Ties::default(),
            last_stage: LastStage::default(),
            mlu: MluScope::default(),
            without: Vec::new(),
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
