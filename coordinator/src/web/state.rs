//! The page's data as one JSON document: `GET /api/state`. Its size is bounded for any cluster: it
//! has sums over everything, and the hosts and batches that matter most.

use laxity_listen::{BUCKET, History};
use laxity_wire::compare::{HostAbsence, compared};
use laxity_wire::finding::{Finding, Severity};
use laxity_wire::v1::{self, BatchStatus, HostStatus, PolicyRevision, TenantStatus};
use laxity_wire::view::{self, Queue};
use parking_lot::Mutex;
use serde::Serialize;

use crate::cluster::EndedRequests;
use crate::shared::Shared;

/// Maximum number of hosts that are listed.
const HOSTS_MAX: usize = 100;
/// Maximum number of batches that are listed, from the head of the order.
const BATCHES_MAX: u32 = 50;
/// Maximum number of batches in trouble that are listed.
const TROUBLE_MAX: u32 = 20;
/// Maximum number of older revisions of the policy that are listed.
const REVISIONS_MAX: u32 = 20;

#[derive(Debug, Serialize)]
pub(super) struct WebState {
    version: &'static str,
    term: u64,
    runs: u64,
    leading: bool,
    /// Addresses of the leader and of this coordinator, HOST:PORT for daemons. Empty if unknown.
    leader: String,
    advertise: String,
    /// What is wrong and what to do, the worst first.
    findings: Vec<Finding>,
    up_ns: u64,
    policy: Option<PolicyRevision>,
    /// Older revisions of the policy, newest first.
    history: Vec<PolicyRevision>,
    tenants: Vec<TenantStatus>,
    totals: ClusterTotals,
    queues: QueueTotals,
    attainment: Attainment,
    /// The first [`HOSTS_MAX`] hosts: drained and lost ones first, then by queued bytes, and those
    /// that were stopped or are long gone last.
    hosts: Vec<HostStatus>,
    batches: Vec<BatchStatus>,
    /// Batches that would be late or have pruned requests.
    trouble: Vec<BatchStatus>,
}

#[derive(Debug, Serialize)]
struct ClusterTotals {
    hosts: usize,
    connected: usize,
    drained: usize,
    batches: usize,
    requests: usize,
    pruned: usize,
}

/// Sums over the egress ports of all hosts. What waits at an ingress also waits at an egress.
#[derive(Debug, Default, Serialize)]
struct QueueTotals {
    bytes: u64,
    by_level: Vec<Queue>,
    by_stage: Vec<Queue>,
}

#[derive(Debug, Serialize)]
struct Attainment {
    #[serde(flatten)]
    ended: EndedRequests,
    bucket_s: u64,
    /// (in time, late) of each bucket, newest last. The last one is not complete.
    buckets: Vec<[u64; 2]>,
}

pub(super) fn state(shared: &Shared, history: &Mutex<History<2>>) -> WebState {
    let now = shared.now();
    let hosts = shared.list_hosts();
    let (batches, trouble, policy, (cluster, _)) = {
        let known = shared.cluster();
        let head =
            v1::ListBatchesRequest { limit: BATCHES_MAX, ..v1::ListBatchesRequest::default() };
        let worst = v1::ListBatchesRequest {
            in_trouble: true,
            limit: TROUBLE_MAX,
            ..v1::ListBatchesRequest::default()
        };
        (
            known.list_batches(now, &head),
            known.list_batches(now, &worst),
            known.policy_history(now, REVISIONS_MAX),
            known.counters(),
        )
    };
    let ended = cluster.ended;
    let current = policy.current.as_ref().and_then(|current| current.policy.as_ref());
    let findings = worst_first(compared(&hosts, current.and_then(|it| it.drop_budget), &[]));
    let advertise = shared.config().etcd.as_ref().map(|etcd| etcd.advertise.clone());
    WebState {
        version: env!("CARGO_PKG_VERSION"),
        term: hosts.term,
        runs: hosts.run,
        leading: hosts.leading,
        leader: hosts.leader,
        advertise: advertise.unwrap_or_default(),
        findings,
        up_ns: now.0,
        policy: policy.current,
        history: policy.history,
        tenants: hosts.tenants,
        totals: ClusterTotals {
            hosts: hosts.hosts.len(),
            connected: cluster.connected,
            drained: hosts.hosts.iter().filter(|host| host.drained).count(),
            batches: cluster.batches,
            requests: cluster.requests,
            pruned: cluster.pruned,
        },
        queues: queues(&hosts.hosts),
        attainment: Attainment {
            ended,
            bucket_s: BUCKET.as_secs(),
            buckets: history.lock().buckets([ended.in_time, ended.late]),
        },
        hosts: first(hosts.hosts),
        batches: batches.batches,
        trouble: trouble.batches,
    }
}

fn worst_first(mut found: Vec<Finding>) -> Vec<Finding> {
    found.retain(|finding| finding.severity != Severity::Ok);
    found.sort_by_key(|finding| core::cmp::Reverse(finding.severity));
    found
}

fn first(mut hosts: Vec<HostStatus>) -> Vec<HostStatus> {
    hosts.sort_by_key(|host| {
        let waits: u64 = host.ports.iter().map(|port| port.queued_bytes).sum();
        // The sort is stable, so equal hosts stay in the order of their names.
        let place = match HostAbsence::of(host) {
            Some(HostAbsence::Lost) => 0,
            Some(HostAbsence::LongGone | HostAbsence::Stopped) => 2,
            None => usize::from(!host.drained),
        };
        (place, core::cmp::Reverse(waits))
    });
    hosts.truncate(HOSTS_MAX);
    hosts
}

fn queues(hosts: &[HostStatus]) -> QueueTotals {
    let mut sums = QueueTotals::default();
    let ports = hosts.iter().flat_map(|host| &host.ports);
    for port in ports.filter(|port| port.direction() == v1::Direction::Egress) {
        sums.bytes = sums.bytes.saturating_add(port.queued_bytes);
        add(&mut sums.by_level, view::by_level(&port.queued_level_bytes));
        add(&mut sums.by_stage, view::by_stage(&port.queued_stage_bytes));
    }
    sums
}

/// Adds queues by name. Hosts may have different numbers of levels, and the scavenger stays last.
fn add(sums: &mut Vec<Queue>, more: Vec<Queue>) {
    for (index, queue) in more.into_iter().enumerate() {
        match sums.iter_mut().find(|known| known.name == queue.name) {
            Some(known) => known.bytes = known.bytes.saturating_add(queue.bytes),
            None => sums.insert(index.min(sums.len()), queue),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str, connected: bool, level_bytes: &[u64]) -> HostStatus {
        HostStatus {
            host: name.into(),
            connected,
            ports: vec![v1::PortStatus {
                direction: v1::Direction::Egress as i32,
                queued_bytes: level_bytes[0],
                queued_level_bytes: level_bytes.to_vec(),
                ..v1::PortStatus::default()
            }],
            ..HostStatus::default()
        }
    }

    #[test]
    fn queues_of_hosts_with_different_numbers_of_levels_add_up() {
        let hosts = [host("a", true, &[1, 10]), host("b", true, &[2, 3, u64::MAX])];
        assert_eq!(queues(&hosts[..1]).bytes, 1);
        let mut by_level = Vec::new();
        for host in &hosts {
            add(&mut by_level, view::by_level(&host.ports[0].queued_level_bytes));
        }
        let told = by_level.iter().map(|queue| (queue.name.as_str(), queue.bytes));
        assert_eq!(told.collect::<Vec<_>>(), [("P1", 3), ("P2", 3), ("scavenger", u64::MAX)]);
    }

    #[test]
    fn the_worst_comes_first_and_what_is_well_not_at_all() {
        let found = vec![
            Finding::ok("a", ""),
            Finding::info("b", ""),
            Finding::warn("c", ""),
            Finding::error("d", ""),
            Finding::warn("e", ""),
        ];
        assert!(worst_first(found).iter().map(|it| it.id).eq(["d", "c", "e", "b"]));
    }

    #[test]
    fn hosts_in_trouble_come_first_then_those_where_most_waits() {
        let hosts = [
            host("a", true, &[1]),
            host("b", true, &[5]),
            host("c", false, &[0]),
            host("d", true, &[1]),
            HostStatus { left: true, ..host("0", false, &[0]) },
            HostStatus { silent_ns: Some(u64::MAX), ..host("1", false, &[0]) },
        ];
        let names: Vec<String> = first(hosts.into()).into_iter().map(|host| host.host).collect();
        assert_eq!(names, ["c", "b", "a", "d", "0", "1"]);
    }
}
