//! What outlives a leader: policy, with its last revisions, and drains. Everything else is rebuilt
//! from what daemons say when they attend the next one.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use laxity_policy::{Span, Time};
use laxity_wire::v1;
use serde::{Deserialize, Serialize};

use super::drains::Drain;
use super::policy::{ClusterPolicy, Revision, Revisions, cut};
use super::{Cluster, admission_config};

/// Revisions that are kept.
const REVISIONS_MAX: usize = 32;

/// See the module. Fields are only ever added.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Durable {
    /// Oldest first; the last one holds.
    revisions: Vec<SavedRevision>,
    drained: Vec<String>,
    /// Who drained them, and why, by host.
    drains: BTreeMap<String, SavedDrain>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct SavedDrain {
    author: String,
    comment: String,
    unix_ms: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct SavedRevision {
    number: u64,
    policy: String,
    drop_budget: u32,
    debounce_ns: u64,
    rank_margin_ns: u64,
    correction_permille: u32,
    fetches_per_port: u32,
    fetch_lease_ns: u64,
    author: String,
    comment: String,
    /// Times of different machines are only comparable as well as their clocks are; this one is
    /// only shown.
    unix_ms: u64,
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

fn ago_to_unix_ms(ago: Span) -> u64 {
    unix_ms().saturating_sub(ago.0 / 1_000_000)
}

fn ago_of_unix_ms(then: u64) -> Span {
    Span(unix_ms().saturating_sub(then).saturating_mul(1_000_000))
}

fn saved_drain(now: Time, drain: &Drain) -> SavedDrain {
    SavedDrain {
        author: drain.author.clone(),
        comment: drain.comment.clone(),
        unix_ms: ago_to_unix_ms(drain.age(now)),
    }
}

impl Cluster {
    /// What a successor has to know.
    #[must_use]
    pub fn durable(&self, now: Time) -> Durable {
        let revisions = self.revisions.older().take(REVISIONS_MAX - 1);
        let mut revisions: Vec<SavedRevision> = core::iter::once(self.revisions.current())
            .chain(revisions)
            .map(|revision| SavedRevision {
                number: revision.number,
                policy: revision.policy.policy.to_string(),
                drop_budget: revision.policy.drop_budget as u32,
                debounce_ns: revision.policy.debounce.0,
                rank_margin_ns: revision.policy.rank_margin.0,
                correction_permille: u32::from(revision.policy.correction_permille),
                fetches_per_port: revision.policy.fetches_per_port as u32,
                fetch_lease_ns: revision.policy.fetch_lease.0,
                author: revision.author.clone(),
                comment: revision.comment.clone(),
                unix_ms: ago_to_unix_ms(revision.age(now)),
            })
            .collect();
        revisions.reverse();
        Durable {
            revisions,
            drained: self.drained.keys().cloned().collect(),
            drains: self
                .drained
                .iter()
                .map(|(host, drain)| (host.clone(), saved_drain(now, drain)))
                .collect(),
        }
    }

    /// Takes over from a predecessor.
    ///
    /// # Errors
    /// What makes no sense in it; nothing was taken then.
    pub fn restore(&mut self, now: Time, saved: Durable) -> Result<(), String> {
        let mut revisions = Vec::new();
        for one in saved.revisions {
            let named = v1::Policy {
                policy: Some(one.policy),
                drop_budget: Some(one.drop_budget),
                debounce_ns: Some(one.debounce_ns),
                rank_margin_ns: Some(one.rank_margin_ns),
                correction_permille: Some(one.correction_permille),
                fetches_per_port: Some(one.fetches_per_port),
                fetch_lease_ns: Some(one.fetch_lease_ns),
            };
            let policy = ClusterPolicy::default()
                .with(&named)
                .map_err(|error| error.to_string())?;
            revisions.push(Revision {
                number: one.number,
                policy,
                author: one.author,
                comment: one.comment,
                at: now,
                aged: ago_of_unix_ms(one.unix_ms),
            });
        }
        if let Some(restored) = Revisions::of(revisions) {
            let config = admission_config(&restored.current().policy, &self.settings.limits);
            self.admission
                .set_config(now, config)
                .map_err(|invalid| format!("{}: {}", invalid.field, invalid.problem))?;
            self.revisions = restored;
        }
        let most = self.settings.limits.hosts_max;
        let mut drains = saved.drains;
        for host in saved.drained.into_iter().take(most) {
            // Of a release that kept no reasons: nothing is known of it.
            let note = drains.remove(&host);
            let aged = note
                .as_ref()
                .map_or(Span::ZERO, |note| ago_of_unix_ms(note.unix_ms));
            let note = note.unwrap_or_default();
            let drain = Drain {
                author: cut(&note.author),
                comment: cut(&note.comment),
                at: now,
                aged,
            };
            self.drained.insert(host, drain);
        }
        Ok(())
    }

    /// Numbers of streams go on where another cluster's ended, so that a stream of that one is none
    /// of this one.
    pub fn succeed(&mut self, before: &Self) {
        self.streams = before.streams;
    }

    /// Fences the orders.
    #[must_use]
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
        let settings = Settings {
            limits: Limits::default(),
            ..Settings::default()
        };
        Cluster::new(Time(0), settings, ClusterPolicy::default(), 1).expect("valid")
    }

    #[test]
    fn a_successor_knows_policy_history_and_drains() {
        let mut first = cluster();
        let change = v1::SetPolicyRequest {
            change: Some(v1::Policy {
                drop_budget: Some(7),
                ..v1::Policy::default()
            }),
            comment: "less".into(),
            ..v1::SetPolicyRequest::default()
        };
        first.set_policy(Time(5), &change, "me").expect("valid");
        let drain = |drain| v1::DrainRequest {
            host: "h9".into(),
            drain,
            comment: "its NIC flaps".into(),
        };
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
        assert_eq!(
            (note.author.as_str(), note.comment.as_str()),
            ("me", "its NIC flaps")
        );
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
