//! What has happened since those who watch were told last.

use laxity_policy::Span;
use laxity_wire::v1;

use super::Cluster;

/// Sums since the last summary.
#[derive(Debug, Default)]
pub(super) struct Since {
    pub(super) ranks_changed: u32,
    /// Runs of Algorithm 1 up to then.
    pub(super) runs: u64,
    pub(super) took: Span,
}

impl Cluster {
    /// What has happened since this was asked last, and how things are now.
    pub fn summary(&mut self) -> v1::RunSummary {
        let told = |host: &mut super::host::Host| core::mem::take(&mut host.told);
        let hosts_told = self
            .hosts
            .iter_mut()
            .flatten()
            .filter_map(|host| told(host).then_some(()));
        let hosts_told = hosts_told.count() as u32;
        let runs = self.admission.counters().runs;
        let since = core::mem::take(&mut self.since);
        self.since.runs = runs;
        v1::RunSummary {
            epoch: Some(v1::Epoch {
                term: self.term,
                sequence: self.sequence,
            }),
            batches: self.batches.len() as u32,
            requests: self.requests.len() as u32,
            pruned: self.pruned.len() as u32,
            infeasible: self.admission.infeasible() as u32,
            ranks_changed: since.ranks_changed,
            hosts_told,
            took_ns: since.took.0,
            runs: (runs - since.runs) as u32,
        }
    }
}
