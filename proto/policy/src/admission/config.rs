//! The configuration of [`Admission`](super::Admission), with its defaults.

use crate::config::{InvalidConfig, PolicyKind};
use crate::prune::{Doomed, MEMBERS_MAX};
use crate::time::Span;

/// Configuration of the order and the pruning between batches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdmissionConfig {
    /// `B` of Algorithm 1: how many living requests may be pruned at once.
    pub drop_budget: usize,
    /// Budgets of tenants, by [`AdmissionEvent::BatchTenant`](super::AdmissionEvent::BatchTenant).
    /// A tenant that has none, or is not here, shares `drop_budget` with the others.
    pub tenant_drop_budgets: Vec<Option<usize>>,
    /// Bytes per second of a port whose rate was not reported.
    pub default_rate: u64,
    /// Time from the first trigger to the run. At zero, each trigger runs at the next poll.
    pub debounce: Span,
    /// The treatment of requests that are late even on an idle network.
    pub doomed: Doomed,
    /// Weight of each finished batch, in parts per thousand, in the EWMA of the ratio of observed
    /// to estimated communication time. Estimates are multiplied by that ratio. At zero, estimates
    /// are the paper's worst case.
    pub correction_permille: u16,
    /// Maximum number of batches. Above it the oldest batches are removed.
    pub batches_max: usize,
    /// Maximum number of requests. Above it the oldest batches are removed.
    pub requests_max: usize,
    /// Maximum number of (request, port) pairs. Above it the oldest batches are removed.
    pub loads_max: usize,
    /// Maximum number of ports. Loads of further ports are not counted.
    pub ports_max: usize,
}

impl Default for AdmissionConfig {
    fn default() -> Self {
        Self {
            drop_budget: 64,
            tenant_drop_budgets: Vec::new(),
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
    /// Returns the defaults for a policy. `mfs` follows the paper where the others depart from it:
    /// without a correction, the worst case prunes requests that would have met their deadline
    /// (docs/notes/simulator.md).
    pub fn for_policy(policy: PolicyKind) -> Self {
        let (doomed, correction_permille) =
            if policy == PolicyKind::Mfs { (Doomed::Counted, 0) } else { (Doomed::SetAside, 50) };
        Self { doomed, correction_permille, ..Self::default() }
    }

    /// Returns the budget of a tenant: 0 for the common one, otherwise one more than its index.
    pub(super) fn budget_of(&self, tenant: u16) -> u16 {
        let own = self.tenant_drop_budgets.get(usize::from(tenant));
        own.map_or(0, |own| own.map_or(0, |_| tenant.saturating_add(1)))
    }

    /// Returns how many more requests each budget allows, the common one first, when `spent` lists
    /// the budget of each pruned request.
    pub(super) fn drops_left(&self, spent: impl Iterator<Item = u16>) -> Vec<usize> {
        let own = self.tenant_drop_budgets.iter().map(|own| own.unwrap_or(0));
        let mut left: Vec<usize> = [self.drop_budget].into_iter().chain(own).collect();
        for budget in spent {
            // The configuration may have had more budgets when the request was pruned.
            if let Some(left) = left.get_mut(usize::from(budget)) {
                *left = left.saturating_sub(1);
            }
        }
        left
    }

    /// Checks every field.
    ///
    /// # Errors
    /// Returns the first field that is out of range. Show the error to the author of the
    /// configuration.
    pub fn validate(&self) -> Result<(), InvalidConfig> {
        let fail = |field, problem: String| Err(InvalidConfig { field, problem });
        if self.default_rate == 0 {
            return fail("default_rate", "must be greater than zero bytes per second".into());
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
