//! Hosts that operators took out of the cluster's order, with who did, when and why.

use laxity_policy::{Span, Time};
use laxity_wire::v1::{self, from_coordinator::Message};

use super::Cluster;
use super::policy::cut;

/// Why a host is out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Drain {
    pub(super) author: String,
    pub(super) comment: String,
    /// When this coordinator learned of it, and how old it was then.
    pub(super) at: Time,
    pub(super) aged: Span,
}

impl Drain {
    pub(super) fn age(&self, now: Time) -> Span {
        now.since(self.at) + self.aged
    }

    pub(super) fn to_wire(&self, now: Time) -> v1::DrainNote {
        v1::DrainNote {
            author: self.author.clone(),
            comment: self.comment.clone(),
            age_ns: self.age(now).0,
        }
    }
}

impl Cluster {
    /// Takes a host out of the cluster's order, or back in, as `author` asks. Gives the number of
    /// batches it took part in.
    ///
    /// # Errors
    /// There are too many drained hosts, or the name is none; text for the operator.
    pub fn drain(
        &mut self,
        now: Time,
        asked: &v1::DrainRequest,
        author: &str,
    ) -> Result<u32, String> {
        let (name, drain) = (asked.host.as_str(), asked.drain);
        Self::check_name(name)?;
        if drain {
            let most = self.settings.limits.hosts_max;
            if self.drained.len() >= most && !self.drained.contains_key(name) {
                return Err("there are too many drained hosts; take some back in".into());
            }
            let note = Drain {
                author: cut(author),
                comment: cut(&asked.comment),
                at: now,
                aged: Span::ZERO,
            };
            self.drained.insert(name.to_owned(), note);
        } else if self.drained.remove(name).is_none() {
            return Err(format!("{name} is not drained"));
        }
        let Some(&id) = self.host_names.get(name) else {
            return Ok(0);
        };
        let batches = self.host(id).map_or(0, |host| host.batches.len()) as u32;
        if drain {
            self.forget_reports(now, id);
        }
        if let Some(host) = self.host_mut(id) {
            host.drained = drain;
            host.outbox
                .write(Message::Standing(v1::Standing { drained: drain }));
            if !drain {
                host.complete = false;
                host.in_snapshot = false;
                host.outbox
                    .write(Message::SnapshotWanted(v1::SnapshotWanted {}));
            }
            self.list(id);
        }
        Ok(batches)
    }

    /// What those who watch are told of a host, whatever of it has changed.
    #[must_use]
    pub fn host_changed(&self, name: &str) -> v1::HostChanged {
        let host = self.host_names.get(name).and_then(|&id| self.host(id));
        v1::HostChanged {
            host: name.to_owned(),
            connected: host.is_some_and(|host| host.stream.is_some()),
            drained: self.drained.contains_key(name),
        }
    }
}
