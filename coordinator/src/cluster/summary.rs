//! Counts for metrics, and what happened since the last summary for watchers.

use laxity_policy::admission::AdmissionCounters;
use laxity_wire::v1;

use super::{Cluster, ClusterCounters};

impl Cluster {
    pub fn counters(&self) -> (ClusterCounters, AdmissionCounters) {
        let streams = self.hosts.iter().filter(|(_, host)| host.stream.is_some());
        let counters = ClusterCounters {
            hosts: self.hosts.len(),
            connected: streams.count(),
            batches: self.workload.batches.len(),
            requests: self.workload.requests.len(),
            pruned: self.workload.pruned.len(),
            messages: self.hosts.counters(),
            ended: self.workload.ended,
        };
        (counters, *self.workload.admission.counters())
    }

    /// Returns what happened since the last call, and the current state.
    pub fn summary(&mut self) -> v1::RunSummary {
        let runs = self.workload.admission.counters().runs;
        let since = core::mem::take(&mut self.since);
        self.since.runs = runs;
        v1::RunSummary {
            epoch: Some(v1::Epoch { term: self.term, sequence: self.sequence }),
            batches: self.workload.batches.len() as u32,
            requests: self.workload.requests.len() as u32,
            pruned: self.workload.pruned.len() as u32,
            infeasible: self.workload.admission.infeasible() as u32,
            ranks_changed: since.ranks_changed,
            hosts_told: self.hosts.take_told() as u32,
            took_ns: since.took.0,
            runs: (runs - since.runs) as u32,
        }
    }
}
