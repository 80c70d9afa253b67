//! The policy that operators set while the coordinator runs, and its history.

use std::collections::VecDeque;

use laxity_policy::admission::AdmissionConfig;
use laxity_policy::config::UnknownPolicy;
use laxity_policy::prune::MEMBERS_MAX;
use laxity_policy::{PolicyKind, Span, Time};
use laxity_wire::v1;
use thiserror::Error;

use super::note::Note;

/// Maximum number of older revisions that are remembered.
const HISTORY_MAX: usize = 256;
/// Longest debounce and longest rank margin.
const SPAN_MAX: Span = Span(60_000_000_000);

/// An error by which the policy stays unchanged. Show it to the operator.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PolicyError {
    #[error("{field}: {problem}")]
    Invalid {
        field: &'static str,
        /// What is wrong and what would be right.
        problem: String,
    },
    #[error(
        "the policy is at revision {current}, not {expected}: somebody changed it; read it again"
    )]
    Stale { expected: u64, current: u64 },
}

/// The policy that operators can change while the coordinator runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterPolicy {
    /// The rule that orders batches: `mfs` or `laxity`.
    pub policy: PolicyKind,
    /// Maximum number of requests that are pruned at a time.
    pub drop_budget: usize,
    /// How long triggers are gathered before a run.
    pub debounce: Span,
    /// How far RED has to move before a batch gets a new sort key. See `rank.rs`.
    pub rank_margin: Span,
    /// Weight of each finished batch in the correction of estimates, in thousandths.
    pub correction_permille: u16,
}

impl Default for ClusterPolicy {
    fn default() -> Self {
        let admission = AdmissionConfig::for_policy(PolicyKind::default());
        Self {
            policy: PolicyKind::default(),
            drop_budget: admission.drop_budget,
            debounce: Span::from_millis(3),
            rank_margin: Span::from_millis(2),
            correction_permille: admission.correction_permille,
        }
    }
}

impl ClusterPolicy {
    pub fn validate(&self) -> Result<(), PolicyError> {
        let fail = |field, problem| Err(PolicyError::Invalid { field, problem });
        if !matches!(self.policy, PolicyKind::Mfs | PolicyKind::Laxity) {
            let problem =
                format!("`{}` has no order between batches; write mfs or laxity", self.policy);
            return fail("policy", problem);
        }
        if self.drop_budget > MEMBERS_MAX {
            let problem = format!("{} exceeds {MEMBERS_MAX}", self.drop_budget);
            return fail("drop_budget", problem);
        }
        if self.correction_permille > 1000 {
            let problem = format!("{} exceeds 1000", self.correction_permille);
            return fail("correction_permille", problem);
        }
        for (field, span) in [("debounce", self.debounce), ("rank_margin", self.rank_margin)] {
            if span > SPAN_MAX {
                return fail(field, format!("{span} exceeds {SPAN_MAX}"));
            }
        }
        Ok(())
    }

    pub fn with(mut self, change: &v1::Policy) -> Result<Self, PolicyError> {
        if let Some(name) = &change.policy {
            self.policy = name.parse().map_err(|unknown: UnknownPolicy| PolicyError::Invalid {
                field: "policy",
                problem: unknown.to_string(),
            })?;
            if change.correction_permille.is_none() {
                self.correction_permille =
                    AdmissionConfig::for_policy(self.policy).correction_permille;
            }
        }
        if let Some(budget) = change.drop_budget {
            self.drop_budget = budget as usize;
        }
        if let Some(permille) = change.correction_permille {
            self.correction_permille = u16::try_from(permille).unwrap_or(u16::MAX);
        }
        self.debounce = change.debounce_ns.map_or(self.debounce, Span);
        self.rank_margin = change.rank_margin_ns.map_or(self.rank_margin, Span);
        self.validate()?;
        Ok(self)
    }

    /// Returns the policy as operators get it, with every field.
    pub fn to_wire(&self) -> v1::Policy {
        v1::Policy {
            policy: Some(self.policy.to_string()),
            drop_budget: Some(self.drop_budget as u32),
            debounce_ns: Some(self.debounce.0),
            rank_margin_ns: Some(self.rank_margin.0),
            correction_permille: Some(u32::from(self.correction_permille)),
        }
    }
}

/// A version of the policy, with who made it and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Revision {
    pub(super) number: u64,
    pub(super) policy: ClusterPolicy,
    pub(super) note: Note,
}

impl Revision {
    pub(super) fn to_wire(&self, now: Time) -> v1::PolicyRevision {
        let note = self.note.to_wire(now);
        v1::PolicyRevision {
            revision: self.number,
            policy: Some(self.policy.to_wire()),
            author: note.author,
            comment: note.comment,
            age_ns: note.age_ns,
        }
    }
}

/// All revisions of the policy. There is always a current one.
#[derive(Debug)]
pub(super) struct Revisions {
    current: Revision,
    older: VecDeque<Revision>,
}

impl Revisions {
    pub(super) fn new(policy: ClusterPolicy, at: Time) -> Self {
        Self {
            current: Revision {
                number: 1,
                policy,
                note: Note::new("configuration", "", at, Span::ZERO),
            },
            older: VecDeque::new(),
        }
    }

    /// Returns the revisions of the leader before, given oldest first. `None` if there are none.
    pub(super) fn of(revisions: Vec<Revision>) -> Option<Self> {
        let mut older = VecDeque::from(revisions);
        let current = older.pop_back()?;
        Some(Self { current, older })
    }

    pub(super) const fn current(&self) -> &Revision {
        &self.current
    }

    pub(super) fn older(&self) -> impl Iterator<Item = &Revision> {
        self.older.iter().rev()
    }

    /// Returns the policy after `change`, without changing anything.
    pub(super) fn check(
        &self,
        change: &v1::Policy,
        expected: u64,
    ) -> Result<ClusterPolicy, PolicyError> {
        if expected != 0 && expected != self.current.number {
            return Err(PolicyError::Stale { expected, current: self.current.number });
        }
        self.current.policy.with(change)
    }

    pub(super) const fn next(&self, policy: ClusterPolicy, note: Note) -> Revision {
        Revision { number: self.current.number + 1, policy, note }
    }

    pub(super) fn push(&mut self, next: Revision) {
        self.older.push_back(core::mem::replace(&mut self.current, next));
        if self.older.len() > HISTORY_MAX {
            self.older.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_that_expects_another_revision_is_refused_and_history_is_bounded() {
        let mut revisions = Revisions::new(ClusterPolicy::default(), Time(0));
        let nothing = v1::Policy::default();
        assert!(revisions.check(&nothing, 1).is_ok() && revisions.check(&nothing, 0).is_ok());
        let set = |revisions: &mut Revisions| {
            let note = Note::new("a", &"ü".repeat(1000), Time(1), Span::ZERO);
            revisions.push(revisions.next(ClusterPolicy::default(), note));
        };
        set(&mut revisions);
        assert_eq!(
            revisions.check(&nothing, 1),
            Err(PolicyError::Stale { expected: 1, current: 2 })
        );
        for _ in 0..2 * HISTORY_MAX {
            set(&mut revisions);
        }
        assert_eq!(revisions.older().count(), HISTORY_MAX);
    }
}
