//! What can be set of [`Admission`](super::Admission), with its defaults.

use crate::config::{InvalidConfig, PolicyKind};
use crate::prune::{Doomed, MEMBERS_MAX};
use crate::time::Span;

/// What can be set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdmissionConfig {
    /// `B` of Algorithm 1: how many living requests may be pruned at once.
    pub drop_budget: usize,
    /// Bytes per second of a port whose rate was not reported.
    pub default_rate: u64,
    /// How long triggers are gathered before a run; zero: each runs at the next poll.
    pub debounce: Span,
    /// What becomes of requests that are late whatever the network does.
    pub doomed: Doomed,
    /// Weight, in parts per thousand, that each finished batch has in the EWMA of observed over
    /// estimated communication time, by which estimates are multiplied. Zero: estimates are the
    /// paper's worst case.
    pub correction_permille: u16,
    /// Most batches held; the oldest are forgotten.
    pub batches_max: usize,
    /// Most requests held; the oldest batches are forgotten.
    pub requests_max: usize,
    /// Most (request, port) pairs held; the oldest batches are forgotten.
    pub loads_max: usize,
    /// Most ports known; loads of further ones are not counted.
    pub ports_max: usize,
}

impl Default for AdmissionConfig {
    fn default() -> Self {
        Self {
            drop_budget: 64,
            default_rate: 12_500_000_000,
            debounce: Span::ZERO,
            doomed: Doomed::SetAside,
            correction_permille: 0,
            batches_max: 1 << 14,
            requests_max: 1 << 17,
            loads_max: 1 << 21,
            ports_max: 1 << 16,
        }
    }
}

impl AdmissionConfig {
    /// The defaults for a policy: `mfs` follows the paper where the others depart from it.
    /// Uncorrected, the worst case prunes requests that would have made it
    /// (docs/notes/simulator.md).
    #[must_use]
    pub fn for_policy(policy: PolicyKind) -> Self {
        let (doomed, correction_permille) = if policy == PolicyKind::Mfs {
            (Doomed::Counted, 0)
        } else {
            (Doomed::SetAside, 50)
        };
        Self {
            doomed,
            correction_permille,
            ..Self::default()
        }
    }

    /// Checks every field.
    ///
    /// # Errors
    /// The first field that is out of range; show it to whoever wrote the configuration.
    pub fn validate(&self) -> Result<(), InvalidConfig> {
        let fail = |field, problem: String| Err(InvalidConfig { field, problem });
        if self.default_rate == 0 {
            return fail(
                "default_rate",
                "must be greater than zero bytes per second".into(),
            );
        }
        if self.correction_permille > 1000 {
            let problem = format!("{} exceeds 1000", self.correction_permille);
            return fail("correction_permille", problem);
        }
        for (field, value, most) in [
            ("batches_max", self.batches_max, MEMBERS_MAX),
            ("requests_max", self.requests_max, MEMBERS_MAX),
            ("loads_max", self.loads_max, 1 << 28),
            ("ports_max", self.ports_max, 1 << 24),
        ] {
            if value == 0 || value > most {
                return fail(field, format!("{value} is not in 1..={most}"));
            }
        }
        Ok(())
    }
}
