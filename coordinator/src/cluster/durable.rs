//! State that outlives a leader: the policy with its last revisions, and the drains. Everything
//! else is rebuilt from the daemons' reports to the next leader.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use laxity_policy::{Span, Time};
use laxity_wire::v1;
use serde::{Deserialize, Serialize};

use super::change::{Change, ChangeKind};
use super::note::Note;
use super::policy::{ClusterPolicy, Revision, Revisions};
use super::{Cluster, admission_config};

const REVISIONS_MAX: usize = 32;

/// State that outlives a leader. From the first release on, fields are only added.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Durable {
    /// Revisions of the policy, oldest first. The last one is in force.
    revisions: Vec<SavedRevision>,
    /// Who drained each host and why, by host name.
    drains: BTreeMap<String, SavedNote>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct SavedRevision {
    number: u64,
    #[serde(flatten)]
    policy: v1::Policy,
    #[serde(flatten)]
    note: SavedNote,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct SavedNote {
    author: String,
    comment: String,
    /// When the change was made. It is only displayed, since the clocks of two machines may differ.
    unix_ms: u64,
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

impl SavedNote {
    fn of(now: Time, note: &Note) -> Self {
        Self {
            author: note.author.clone(),
            comment: note.comment.clone(),
            unix_ms: unix_ms().saturating_sub(note.age(now).0 / 1_000_000),
        }
    }

    fn restore(&self, now: Time) -> Note {
        let aged = Span(unix_ms().saturating_sub(self.unix_ms).saturating_mul(1_000_000));
        Note::new(&self.author, &self.comment, now, aged)
    }
}

impl Cluster {
    /// Returns the state that the next leader needs, after `change`.
    pub fn durable(&self, now: Time, change: Option<&Change>) -> Durable {
        let saved = |(host, note): (&String, &Note)| (host.clone(), SavedNote::of(now, note));
        let mut drains: BTreeMap<_, _> = self.hosts.drained.iter().map(saved).collect();
        let mut next = None;
        match change.map(|change| &change.0) {
            Some(ChangeKind::Policy(revision)) => next = Some(revision),
            Some(ChangeKind::Drain(host, Some(note))) => drains.extend([saved((host, note))]),
            Some(ChangeKind::Drain(host, None)) => drop(drains.remove(host)),
            None => {}
        }
        let current = next.into_iter().chain([self.revisions.current()]);
        let mut revisions: Vec<SavedRevision> = current
            .chain(self.revisions.older())
            .take(REVISIONS_MAX)
            .map(|revision| SavedRevision {
                number: revision.number,
                policy: revision.policy.to_wire(),
                note: SavedNote::of(now, &revision.note),
            })
            .collect();
        revisions.reverse();
        Durable { revisions, drains }
    }

    /// Applies the state that an earlier leader, or this one, saved.
    ///
    /// # Errors
    /// Returns what is invalid in it. Nothing was applied then.
    pub fn restore(&mut self, now: Time, saved: Durable) -> Result<(), String> {
        let mut revisions = Vec::new();
        for one in saved.revisions {
            let policy = ClusterPolicy::default().with(&one.policy);
            revisions.push(Revision {
                number: one.number,
                policy: policy.map_err(|error| error.to_string())?,
                note: one.note.restore(now),
            });
        }
        if let Some(restored) = Revisions::of(revisions) {
            let config = admission_config(&restored.current().policy, &self.settings);
            self.workload
                .admission
                .set_config(now, config)
                .map_err(|invalid| format!("{}: {}", invalid.field, invalid.problem))?;
            self.revisions = restored;
        }
        let drains = saved.drains.into_iter().take(self.settings.limits.hosts_max);
        let drained: BTreeMap<String, Note> =
            drains.map(|(host, note)| (host, note.restore(now))).collect();
        let back = self.hosts.drained.keys().filter(|host| !drained.contains_key(*host));
        for host in back.cloned().collect::<Vec<String>>() {
            self.set_drained(now, &host, None);
        }
        for (host, note) in drained {
            self.set_drained(now, &host, Some(note));
        }
        Ok(())
    }

    /// Continues the stream numbers of `before`, so that no stream of that cluster is taken for a
    /// stream of this one.
    pub fn succeed(&mut self, before: &Self) {
        self.hosts.streams = before.hosts.streams;
    }

    pub const fn term(&self) -> u64 {
        self.term
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::ClusterSettings;
    use crate::limits::Limits;

    fn cluster() -> Cluster {
        let settings = ClusterSettings { limits: Limits::default(), ..ClusterSettings::default() };
        Cluster::new(Time(0), settings, ClusterPolicy::default(), 1).expect("valid")
    }

    #[test]
    fn a_successor_knows_policy_history_and_drains() {
        let mut first = cluster();
        let change = v1::SetPolicyRequest {
            change: Some(v1::Policy { drop_budget: Some(7), ..v1::Policy::default() }),
            comment: "less".into(),
            ..v1::SetPolicyRequest::default()
        };
        let change = first.plan_policy(Time(5), &change, "me").expect("valid");
        first.apply(Time(5), change);
        let drain =
            |drain| v1::DrainRequest { host: "h9".into(), drain, comment: "its NIC flaps".into() };
        let change = first.plan_drain(Time(6), &drain(true), "me").expect("drained");
        let text = serde_json::to_vec(&first.durable(Time(9), Some(&change))).expect("plain data");
        let mut second = cluster();
        let saved = serde_json::from_slice(&text).expect("as written");
        second.restore(Time(1), saved).expect("makes sense");
        let expected = ClusterPolicy { drop_budget: 7, ..ClusterPolicy::default() };
        assert_eq!(*second.policy(), expected, "what the change does not name stays");
        let told = second.policy_history(Time(1), 9);
        assert_eq!(told.current.expect("one").comment, "less");
        assert_eq!(told.history.len(), 1);
        let hosts = second.list_hosts(Time(1)).hosts;
        let note = hosts[0].drain.clone().expect("a reason");
        assert_eq!((note.author.as_str(), note.comment.as_str()), ("me", "its NIC flaps"));
        let change = second.plan_drain(Time(2), &drain(false), "me").expect("it is drained");
        let undrained = second.durable(Time(2), Some(&change));
        second.restore(Time(2), undrained).expect("makes sense");
        assert!(second.list_hosts(Time(2)).hosts.is_empty(), "it is back");
    }

    #[test]
    fn what_makes_no_sense_is_not_taken_and_what_is_unknown_is_skipped() {
        let mut cluster = cluster();
        let odd = serde_json::from_str(r#"{"revisions":[{"number":3,"policy":"best"}]}"#);
        assert!(cluster.restore(Time(1), odd.expect("JSON")).is_err());
        let newer =
            serde_json::from_str(r#"{"colour":1,"drains":{"h":{"why":""}}}"#).expect("JSON");
        assert_eq!(cluster.restore(Time(1), newer), Ok(()));
        assert_eq!(cluster.policy_history(Time(1), 9).history.len(), 0);
    }
}
