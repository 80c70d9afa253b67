//! Changes by operators. A change is checked, then saved for the next leader by the caller, and
//! then applied.

use laxity_policy::{Span, Time};
use laxity_wire::v1::{self, from_coordinator::Message};

use super::note::Note;
use super::policy::{PolicyError, Revision};
use super::{Cluster, admission_config};

/// A change that was checked and is not in force yet.
#[derive(Clone, Debug)]
pub struct Change(pub(super) ChangeKind);

#[derive(Clone, Debug)]
pub(super) enum ChangeKind {
    Policy(Revision),
    /// Takes a host out of the cluster order with a note, or back in without one.
    Drain(String, Option<Note>),
}

impl Cluster {
    pub fn plan_policy(
        &self,
        now: Time,
        asked: &v1::SetPolicyRequest,
        author: &str,
    ) -> Result<Change, PolicyError> {
        let nothing = v1::Policy::default();
        let wanted = asked.change.as_ref().unwrap_or(&nothing);
        let policy = self.revisions.check(wanted, asked.expected_revision)?;
        admission_config(&policy, &self.settings).validate().map_err(|invalid| {
            PolicyError::Invalid { field: invalid.field, problem: invalid.problem }
        })?;
        let note = Note::new(author, &asked.comment, now, Span::ZERO);
        Ok(Change(ChangeKind::Policy(self.revisions.next(policy, note))))
    }

    /// Checks whether `author` can take a host out of the cluster order or back in.
    pub fn plan_drain(
        &self,
        now: Time,
        asked: &v1::DrainRequest,
        author: &str,
    ) -> Result<Change, String> {
        Self::check_name(&asked.host)?;
        let drained = &self.hosts.drained;
        let is_drained = drained.contains_key(&asked.host);
        if !asked.drain && !is_drained {
            return Err(format!("{} is not drained", asked.host));
        }
        if asked.drain && !is_drained && drained.len() >= self.settings.limits.hosts_max {
            return Err("there are too many drained hosts; take some back in".into());
        }
        let note = || Note::new(author, &asked.comment, now, Span::ZERO);
        Ok(Change(ChangeKind::Drain(asked.host.clone(), asked.drain.then(note))))
    }

    /// Applies a change. Returns how many batches the host took part in, if the change concerns a
    /// host.
    pub fn apply(&mut self, now: Time, change: Change) -> u32 {
        match change.0 {
            ChangeKind::Policy(next) => {
                let config = admission_config(&next.policy, &self.settings);
                // The configuration is valid, since the change was checked.
                if self.workload.admission.set_config(now, config).is_ok() {
                    self.revisions.push(next);
                }
                0
            }
            ChangeKind::Drain(name, note) => self.set_drained(now, &name, note),
        }
    }

    pub(super) fn set_drained(&mut self, now: Time, name: &str, note: Option<Note>) -> u32 {
        let drain = note.is_some();
        match note {
            Some(note) => self.hosts.drained.insert(name.to_owned(), note),
            None => self.hosts.drained.remove(name),
        };
        let Some(&id) = self.hosts.names.get(name) else { return 0 };
        let batches = self.hosts.get(id).map_or(0, |host| host.batches.len());
        if drain {
            self.forget_reports(now, id);
        }
        if let Some(host) = self.hosts.get_mut(id) {
            host.drained = drain;
            host.outbox.write(Message::Standing(v1::Standing { drained: drain }));
            if !drain {
                host.complete = false;
                host.in_snapshot = false;
                host.outbox.write(Message::SnapshotWanted(v1::SnapshotWanted {}));
            }
            self.hosts.list(id);
        }
        batches as u32
    }
}
