//! The JSON that operators see, from `laxity cluster … --json` and on the coordinator's page.
//!
//! It has the messages of `laxity.v1.Operator` with the same names, and three differences. Ids of
//! batches and requests are strings, since they use all 64 bits and most readers of JSON keep 53.
//! Directions, levels and stages are words. An absent value is `null`, so that each key is always
//! there.

use laxity_policy::Stage;
use serde::Serialize;

use crate::v1;

/// `egress` or `ingress`.
#[must_use]
pub fn direction(number: i32) -> &'static str {
    match v1::Direction::try_from(number) {
        Ok(v1::Direction::Egress) => "egress",
        Ok(v1::Direction::Ingress) => "ingress",
        _ => "unknown",
    }
}

const fn stage_name(stage: Stage) -> &'static str {
    match stage {
        Stage::KvReuse => "kv_reuse",
        Stage::Collective => "collective",
        Stage::P2d => "p2d",
        Stage::Weights => "weights",
        Stage::Background => "background",
    }
}

/// Bytes that wait, by what the list they are in is by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Queue {
    /// `P1` to `P16` and `scavenger`, or a stage.
    pub name: String,
    /// Not yet permitted.
    pub bytes: u64,
}

/// A list by level as daemons report it: the highest first, the scavenger last.
#[must_use]
pub fn by_level(bytes: &[u64]) -> Vec<Queue> {
    let name = |index: usize| match index + 1 {
        last if last == bytes.len() => "scavenger".to_owned(),
        level => format!("P{level}"),
    };
    let queue = |(index, &bytes)| Queue {
        name: name(index),
        bytes,
    };
    bytes.iter().enumerate().map(queue).collect()
}

/// A list by stage as daemons report it: in the order of their numbers. Those that this release does not know are left out.
#[must_use]
pub fn by_stage(bytes: &[u64]) -> Vec<Queue> {
    let queue = |(stage, &bytes)| Queue {
        name: stage_name(stage).to_owned(),
        bytes,
    };
    Stage::ALL.into_iter().zip(bytes).map(queue).collect()
}

/// One direction of one NIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Port {
    /// As its daemon calls it.
    pub port: String,
    /// `egress` or `ingress`.
    pub direction: &'static str,
    /// Its rate now.
    pub rate_bytes_per_s: u64,
    /// Not yet permitted.
    pub queued_bytes: u64,
    /// Of its rate, in thousandths.
    pub load_permille: u32,
    /// The queue by level; empty if the daemon does not say.
    pub queued_by_level: Vec<Queue>,
    /// The queue by stage; empty if the daemon does not say.
    pub queued_by_stage: Vec<Queue>,
}

impl From<&v1::PortStatus> for Port {
    fn from(port: &v1::PortStatus) -> Self {
        Self {
            port: port.port.clone(),
            direction: direction(port.direction),
            rate_bytes_per_s: port.rate_bytes_per_s,
            queued_bytes: port.queued_bytes,
            load_permille: port.load_permille,
            queued_by_level: by_level(&port.queued_level_bytes),
            queued_by_stage: by_stage(&port.queued_stage_bytes),
        }
    }
}

/// An order's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Epoch {
    /// Of the coordinator that made it.
    pub term: u64,
    /// Within the term.
    pub sequence: u64,
}

impl From<v1::Epoch> for Epoch {
    fn from(epoch: v1::Epoch) -> Self {
        Self {
            term: epoch.term,
            sequence: epoch.sequence,
        }
    }
}

/// Why a host is out of the cluster's order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DrainNote {
    /// Who took it out.
    pub author: String,
    /// Why.
    pub comment: String,
    /// Since then.
    pub age_ns: u64,
}

impl From<&v1::DrainNote> for DrainNote {
    fn from(note: &v1::DrainNote) -> Self {
        Self {
            author: note.author.clone(),
            comment: note.comment.clone(),
            age_ns: note.age_ns,
        }
    }
}

/// A host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Host {
    /// Its name.
    pub host: String,
    /// Whose it is.
    pub tenant: String,
    /// Its daemon has a stream.
    pub connected: bool,
    /// An operator took it out.
    pub drained: bool,
    /// Who did, and why; `null` if it is not drained.
    pub drain: Option<DrainNote>,
    /// Release of its daemon.
    pub software: String,
    /// In the daemon's order.
    pub ports: Vec<Port>,
    /// That it takes part in.
    pub batches: u32,
    /// That it told of.
    pub requests: u32,
    /// Fetches without a token.
    pub fetches_waiting: u32,
    /// Fetches with one.
    pub fetches_granted: u32,
    /// Since its last message.
    pub silent_ns: Option<u64>,
    /// Reports taken.
    pub reports: u64,
    /// Events in them.
    pub events: u64,
    /// Of those, refused.
    pub refused_events: u64,
    /// Orders that it was given.
    pub orders: u64,
    /// Orders that a newer one replaced first.
    pub coalesced_orders: u64,
    /// The newest that it says it applied.
    pub applied: Option<Epoch>,
    /// Flows that completed.
    pub completed_flows: u64,
    /// Of those, after their deadline.
    pub missed_flows: u64,
}

impl From<&v1::HostStatus> for Host {
    fn from(host: &v1::HostStatus) -> Self {
        Self {
            host: host.host.clone(),
            tenant: host.tenant.clone(),
            connected: host.connected,
            drained: host.drained,
            drain: host.drain.as_ref().map(DrainNote::from),
            software: host.software.clone(),
            ports: host.ports.iter().map(Port::from).collect(),
            batches: host.batches,
            requests: host.requests,
            fetches_waiting: host.fetches_waiting,
            fetches_granted: host.fetches_granted,
            silent_ns: host.silent_ns,
            reports: host.reports,
            events: host.events,
            refused_events: host.refused_events,
            orders: host.orders,
            coalesced_orders: host.coalesced_orders,
            applied: host.applied.map(Epoch::from),
            completed_flows: host.completed_flows,
            missed_flows: host.missed_flows,
        }
    }
}

/// All hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Hosts {
    /// Of this coordinator's orders.
    pub term: u64,
    /// Runs of Algorithm 1 so far.
    pub run: u64,
    /// It is the one that leads.
    pub leading: bool,
    /// By name.
    pub hosts: Vec<Host>,
}

impl From<&v1::ListHostsResponse> for Hosts {
    fn from(told: &v1::ListHostsResponse) -> Self {
        Self {
            term: told.term,
            run: told.run,
            leading: told.leading,
            hosts: told.hosts.iter().map(Host::from).collect(),
        }
    }
}

/// A batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Batch {
    /// Its id.
    pub batch: String,
    /// Whose it is.
    pub tenant: String,
    /// The host whose word holds.
    pub owner: String,
    /// All that take part.
    pub hosts: Vec<String>,
    /// From 0; `null` before the first run.
    pub rank: Option<u32>,
    /// How many.
    pub requests: u32,
    /// Of those.
    pub pruned: u32,
    /// It computes.
    pub started: bool,
    /// Where it is.
    pub layer: u32,
    /// Of how many; 0 if unknown.
    pub layers: u32,
    /// RED, from now; `null` without deadline.
    pub red_remaining_ns: Option<i64>,
    /// Estimated end, from now.
    pub finish_remaining_ns: Option<i64>,
    /// It should be in time.
    pub feasible: bool,
    /// Since it was announced.
    pub age_ns: u64,
}

impl From<&v1::BatchStatus> for Batch {
    fn from(batch: &v1::BatchStatus) -> Self {
        Self {
            batch: batch.batch.to_string(),
            tenant: batch.tenant.clone(),
            owner: batch.owner.clone(),
            hosts: batch.hosts.clone(),
            rank: batch.rank,
            requests: batch.requests,
            pruned: batch.pruned,
            started: batch.started,
            layer: batch.layer,
            layers: batch.layers,
            red_remaining_ns: batch.red_remaining_ns,
            finish_remaining_ns: batch.finish_remaining_ns,
            feasible: batch.feasible,
            age_ns: batch.age_ns,
        }
    }
}

/// Batches in their order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Batches {
    /// In all, more than are listed if there are many.
    pub total: u32,
    /// The head of the order.
    pub batches: Vec<Batch>,
}

impl From<&v1::ListBatchesResponse> for Batches {
    fn from(told: &v1::ListBatchesResponse) -> Self {
        Self {
            total: told.total,
            batches: told.batches.iter().map(Batch::from).collect(),
        }
    }
}

/// A port of some host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PortName {
    /// Whose.
    pub host: String,
    /// Its name there.
    pub port: String,
    /// `egress` or `ingress`.
    pub direction: &'static str,
}

impl From<&v1::PortName> for PortName {
    fn from(port: &v1::PortName) -> Self {
        Self {
            host: port.host.clone(),
            port: port.port.clone(),
            direction: direction(port.direction),
        }
    }
}

/// A batch close by in the order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Neighbour {
    /// Its id.
    pub batch: String,
    /// Its RED, from now.
    pub red_remaining_ns: Option<i64>,
}

impl From<&v1::Neighbour> for Neighbour {
    fn from(neighbour: &v1::Neighbour) -> Self {
        Self {
            batch: neighbour.batch.to_string(),
            red_remaining_ns: neighbour.red_remaining_ns,
        }
    }
}

/// A request of the batch that waits so that others can be in time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pruned {
    /// Its id.
    pub request: String,
    /// The batch that was to be made feasible.
    pub for_batch: String,
    /// Where it was the heaviest.
    pub port: Option<PortName>,
    /// What it still loads that port with.
    pub bytes: u64,
    /// Until it is due.
    pub remaining_ns: Option<i64>,
}

impl From<&v1::PrunedRequest> for Pruned {
    fn from(pruned: &v1::PrunedRequest) -> Self {
        Self {
            request: pruned.request.to_string(),
            for_batch: pruned.for_batch.to_string(),
            port: pruned.port.as_ref().map(PortName::from),
            bytes: pruned.bytes,
            remaining_ns: pruned.remaining_ns,
        }
    }
}

/// Why a batch has its place. The fields are those of `ExplainResponse` (`operator.proto`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[expect(missing_docs, reason = "operator.proto has them")]
pub struct Explanation {
    pub status: Option<Batch>,
    pub text: Vec<String>,
    pub tight_remaining_ns: Option<i64>,
    pub loose_remaining_ns: Option<i64>,
    pub tight_count: u32,
    pub deadline_count: u32,
    pub bottleneck: Option<PortName>,
    pub bottleneck_bytes: u64,
    pub bottleneck_rate_bytes_per_s: u64,
    pub ready_remaining_ns: i64,
    /// All 64 bits, so a string.
    pub sort_key: Option<String>,
    pub held_back_ns: i64,
    pub before: Vec<Neighbour>,
    pub after: Vec<Neighbour>,
    pub pruned: Vec<Pruned>,
    pub room_bytes: i64,
    pub decided_ago_ns: u64,
}

impl From<&v1::ExplainResponse> for Explanation {
    fn from(told: &v1::ExplainResponse) -> Self {
        Self {
            status: told.status.as_ref().map(Batch::from),
            text: told.text.clone(),
            tight_remaining_ns: told.tight_remaining_ns,
            loose_remaining_ns: told.loose_remaining_ns,
            tight_count: told.tight_count,
            deadline_count: told.deadline_count,
            bottleneck: told.bottleneck.as_ref().map(PortName::from),
            bottleneck_bytes: told.bottleneck_bytes,
            bottleneck_rate_bytes_per_s: told.bottleneck_rate_bytes_per_s,
            ready_remaining_ns: told.ready_remaining_ns,
            sort_key: told.sort_key.map(|key| key.to_string()),
            held_back_ns: told.held_back_ns,
            before: told.before.iter().map(Neighbour::from).collect(),
            after: told.after.iter().map(Neighbour::from).collect(),
            pruned: told.pruned.iter().map(Pruned::from).collect(),
            room_bytes: told.room_bytes,
            decided_ago_ns: told.decided_ago_ns,
        }
    }
}

/// A policy: every key of `laxity cluster policy set`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[expect(missing_docs, reason = "operator.proto has them")]
pub struct Policy {
    pub policy: Option<String>,
    pub drop_budget: Option<u32>,
    pub debounce_ns: Option<u64>,
    pub rank_margin_ns: Option<u64>,
    pub correction_permille: Option<u32>,
    pub fetches_per_port: Option<u32>,
    pub fetch_lease_ns: Option<u64>,
}

impl From<&v1::Policy> for Policy {
    fn from(policy: &v1::Policy) -> Self {
        Self {
            policy: policy.policy.clone(),
            drop_budget: policy.drop_budget,
            debounce_ns: policy.debounce_ns,
            rank_margin_ns: policy.rank_margin_ns,
            correction_permille: policy.correction_permille,
            fetches_per_port: policy.fetches_per_port,
            fetch_lease_ns: policy.fetch_lease_ns,
        }
    }
}

/// One revision of the policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Revision {
    /// From 1.
    pub revision: u64,
    /// What it says.
    pub policy: Policy,
    /// Who made it.
    pub author: String,
    /// Why.
    pub comment: String,
    /// Since it was made.
    pub age_ns: u64,
}

impl From<&v1::PolicyRevision> for Revision {
    fn from(revision: &v1::PolicyRevision) -> Self {
        Self {
            revision: revision.revision,
            policy: revision
                .policy
                .as_ref()
                .map_or_else(Policy::default, Policy::from),
            author: revision.author.clone(),
            comment: revision.comment.clone(),
            age_ns: revision.age_ns,
        }
    }
}

/// The policy that holds, and earlier ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PolicyHistory {
    /// What holds.
    pub current: Option<Revision>,
    /// Newest first.
    pub history: Vec<Revision>,
}

impl From<&v1::GetPolicyResponse> for PolicyHistory {
    fn from(told: &v1::GetPolicyResponse) -> Self {
        Self {
            current: told.current.as_ref().map(Revision::from),
            history: told.history.iter().map(Revision::from).collect(),
        }
    }
}

/// Something that happened, told apart by `event`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[expect(missing_docs, reason = "operator.proto has them")]
pub enum Event {
    /// A host came, went, was drained or taken back.
    Host {
        host: String,
        connected: bool,
        drained: bool,
    },
    /// Admission ran.
    Run {
        epoch: Option<Epoch>,
        batches: u32,
        requests: u32,
        pruned: u32,
        infeasible: u32,
        ranks_changed: u32,
        hosts_told: u32,
        took_ns: u64,
        runs: u32,
    },
    /// Somebody changed the policy.
    Policy(Revision),
    /// So many events came too fast for this reader.
    Missed { events: u64 },
    /// Something that this release does not know.
    Unknown,
}

impl From<&v1::WatchEvent> for Event {
    fn from(event: &v1::WatchEvent) -> Self {
        use v1::watch_event::Event as Wire;
        match &event.event {
            Some(Wire::Host(host)) => Self::Host {
                host: host.host.clone(),
                connected: host.connected,
                drained: host.drained,
            },
            Some(Wire::Run(run)) => Self::Run {
                epoch: run.epoch.map(Epoch::from),
                batches: run.batches,
                requests: run.requests,
                pruned: run.pruned,
                infeasible: run.infeasible,
                ranks_changed: run.ranks_changed,
                hosts_told: run.hosts_told,
                took_ns: run.took_ns,
                runs: run.runs,
            },
            Some(Wire::Policy(revision)) => Self::Policy(revision.into()),
            Some(Wire::Missed(events)) => Self::Missed { events: *events },
            None => Self::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_level_is_the_scavenger_whatever_the_number_of_levels() {
        let names = |bytes: &[u64]| by_level(bytes).into_iter().map(|queue| queue.name);
        assert!(names(&[1, 2, 3]).eq(["P1", "P2", "scavenger"]));
        assert_eq!(names(&[]).count(), 0);
    }

    #[test]
    fn stages_of_a_later_release_are_left_out() {
        let queues = by_stage(&[1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(queues.len(), Stage::ALL.len());
        assert_eq!((queues[2].name.as_str(), queues[2].bytes), ("p2d", 3));
    }

    #[test]
    fn an_id_of_64_bits_survives_readers_of_json_that_keep_53() {
        let status = v1::BatchStatus {
            batch: u64::MAX,
            ..v1::BatchStatus::default()
        };
        let json = serde_json::to_value(Batch::from(&status)).expect("JSON");
        assert_eq!(json["batch"], u64::MAX.to_string());
        assert!(json["rank"].is_null(), "keys are always there");
    }
}
