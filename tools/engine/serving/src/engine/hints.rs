//! Hints about batches to the daemon here, and to the processes that gave KV.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use laxity_client::Hint;
use laxity_requests::iteration::Plan;
use laxity_requests::request::RequestId;

use super::Engine;
use crate::apart::between::{Export, Holders};
use crate::apart::{PrefixQuery, Words};

impl Engine {
    /// Sends the daemon hints about the batch that is about to be computed.
    pub(super) fn begin_batch_hints(&self, plan: &Plan, batch: u64, exports: &[Export]) {
        let Some(net) = &self.net else { return };
        let layers = self.model.shape().layers;
        net.carrier.hint(Hint::BatchBegin {
            batch,
            layers: layers as u16,
            layer_time_ns: self.layer_time_ns,
        });
        for chunk in &plan.chunks {
            let Some(sequence) = self.sequences.get(&chunk.request) else { continue };
            // A relegated request must not make its batch urgent.
            if self.schedulers.is_relegated(chunk.request) {
                continue;
            }
            let goes = exports.iter().find(|export| export.request == chunk.request.0);
            let bytes =
                goes.map_or(0, |export| export.tokens * self.model.kv().token_bytes() * layers);
            net.carrier.hint(Hint::RequestJoin {
                batch,
                request: chunk.request.0,
                deadline_ns: sequence.deadline_ns(),
                bytes: bytes as u64,
            });
        }
        self.join_others();
    }

    /// Reports whether the daemon gets hints about a batch. A batch of single tokens has nothing to
    /// send, unless other processes hold experts.
    pub(super) fn hints(&self, plan: &Plan) -> bool {
        self.net.is_some() && (!plan.chunks.is_empty() || self.lockstep.is_some())
    }

    /// Returns the processes that gave KV for requests here, with the batches about which each is
    /// informed: the computed one, and those that stand for the KV that the process gave.
    pub(super) fn holders(&self, batch: u64, imported: &[(RequestId, usize)]) -> Holders {
        let mut holders = BTreeMap::<SocketAddr, Vec<u64>>::new();
        for (request, import) in &self.imports {
            let batches = holders.entry(import.from).or_insert_with(|| vec![batch]);
            if imported.iter().any(|(now, _)| now == request) {
                batches.push(PrefixQuery::batch(request.0));
            }
        }
        holders.into_iter().collect()
    }

    /// Informs the processes that gave KV that a batch was computed.
    pub(super) fn tell_holders(&self, holders: Holders, imported: &[(RequestId, usize)]) {
        if let Some(net) = &self.net {
            net.running().batch = 0;
        }
        for (holder, batches) in holders {
            let requests = imported.iter().map(|(request, _)| request.0);
            let gave = requests.filter(|request| batches.contains(&PrefixQuery::batch(*request)));
            let requests = gave.collect();
            self.say_computed(holder, batches, requests);
        }
    }

    /// Announces the end of batches for these requests to the daemon that schedules their KV: that
    /// of `giver`, or the one here if the KV is read.
    pub(super) fn say_computed(&self, giver: SocketAddr, batches: Vec<u64>, requests: Vec<u64>) {
        let Some(net) = &self.net else { return };
        if net.reads {
            net.end_batches(&batches, &requests);
        } else {
            net.say(giver, &Words::Computed { batches, requests });
        }
    }

    pub(super) fn end_batch_hints(&self, plan: &Plan, batch: u64) {
        if let Some(net) = &self.net
            && self.hints(plan)
        {
            net.carrier.hint(Hint::ComputeEnd { batch });
            net.carrier.end_batch(batch);
        }
    }
}
