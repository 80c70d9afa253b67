//! State that outlives a leader: the policy with its last revisions, and the drains. Everything
//! else is rebuilt from the daemons' reports to the next leader.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use laxity_policy::{Span, Time};
use laxity_wire::v1;
use serde::{Deserialize, Serialize};

use super::note::Note;
use super::policy::{ClusterPolicy, Revision, Revisions};
use super::{Cluster, admission_config};

/// Maximum number of revisions that are saved.
const REVISIONS_MAX: usize = 32;

/// State that outlives a leader. Fields are only added, never removed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Durable {
    /// Revisions of the policy, oldest first. The last one is in force.
    revisions: Vec<SavedRevision>,
    drained: Vec<String>,
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
    /// Returns the state that the next leader needs.
    #[must_use]
    pub fn durable(&self, now: Time) -> Durable {
        let revisions = self.revisions.older().take(REVISIONS_MAX - 1);
        let mut revisions: Vec<SavedRevision> = core::iter::once(self.revisions.current())
            .chain(revisions)
            .map(|revision| SavedRevision {
                number: revision.number,
                policy: revision.policy.to_wire(),
                note: SavedNote::of(now, &revision.note),
            })
            .collect();
        revisions.reverse();
        let drained = &self.hosts.drained;
        Durable {
            revisions,
            drained: drained.keys().cloned().collect(),
            drains: drained
                .iter()
                .map(|(host, note)| (host.clone(), SavedNote::of(now, note)))
                .collect(),
        }
    }

    /// Restores the state that the leader before saved.
    ///
    /// # Errors
    /// Returns what is invalid in it. Nothing was restored then.
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
            let config = admission_config(&restored.current().policy, &self.settings.limits);
            self.workload
                .admission
                .set_config(now, config)
                .map_err(|invalid| format!("{}: {}", invalid.field, invalid.problem))?;
            self.revisions = restored;
        }
        let most = self.settings.limits.hosts_max;
        let mut drains = saved.drains;
        for host in saved.drained.into_iter().take(most) {
            let note = match drains.remove(&host) {
                Some(note) => note.restore(now),
                // The release that saved this did not save reasons.
                None => Note::new("", "", now, Span::ZERO),
            };
            self.hosts.drained.insert(host, note);
        }
        Ok(())
    }

    /// Continues the stream numbers of `before`, so that no stream of that cluster is taken for a
    /// stream of this one.
    pub fn succeed(&mut self, before: &Self) {
        self.hosts.streams = before.hosts.streams;
    }

    /// Returns the term, which fences the orders.
    pub const fn term(&self) -> u64 {
        self.term
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Settings;
    use crate::limits::Limits;

    fn cluster() -> Cluster {
        let settings = Settings { limits: Limits::default(), ..Settings::default() };
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
        first.set_policy(Time(5), &change, "me").expect("valid");
        let drain =
            |drain| v1::DrainRequest { host: "h9".into(), drain, comment: "its NIC flaps".into() };
        first.drain(Time(6), &drain(true), "me").expect("drained");
        let text = serde_json::to_vec(&first.durable(Time(9))).expect("plain data");
        let mut second = cluster();
        let saved = serde_json::from_slice(&text).expect("as written");
        second.restore(Time(1), saved).expect("makes sense");
        assert_eq!(second.policy().drop_budget, 7);
        let told = second.policy_history(Time(1), 9);
        assert_eq!(told.current.expect("one").comment, "less");
        assert_eq!(told.history.len(), 1);
        let hosts = second.list_hosts(Time(1)).hosts;
        let note = hosts[0].drain.clone().expect("a reason");
        assert_eq!((note.author.as_str(), note.comment.as_str()), ("me", "its NIC flaps"));
        assert!(second.drain(Time(2), &drain(false), "me").is_ok());
    }

    #[test]
    fn what_makes_no_sense_is_not_taken_and_what_is_unknown_is_skipped() {
        let mut cluster = cluster();
        let odd = serde_json::from_str(r#"{"revisions":[{"number":3,"policy":"best"}]}"#);
        assert!(cluster.restore(Time(1), odd.expect("JSON")).is_err());
        let newer = serde_json::from_str(r#"{"colour":1,"drained":["h"]}"#).expect("JSON");
        assert_eq!(cluster.restore(Time(1), newer), Ok(()));
        assert_eq!(cluster.policy_history(Time(1), 9).history.len(), 0);
    }
}
