//! Messages to the coordinator about a batch: its load and its progress.

use laxity_policy::admission::{AdmissionEvent, RequestLoad};
use laxity_policy::{PortId, RequestId, Span};

use super::world::World;

impl World<'_> {
    pub(super) fn estimate(&mut self, slot: u32) {
        let batch = &self.batches[slot];
        let share = |n| self.setup.share(n);
        let mut attention = [0; 2];
        for (&tokens, &pairs) in batch.tokens.iter().zip(&batch.pairs) {
            if tokens == 0 {
                continue;
            }
            for (kind, worst) in attention.iter_mut().enumerate() {
                let layer = self.setup.layer_of_kind[kind];
                let takes = self.setup.compute.attention_ns(share(tokens), share(pairs), layer);
                *worst = takes.max(*worst);
            }
        }
        // The estimate assumes no contention, and includes the layer's exchange.
        let all = batch.tokens.iter().sum();
        let (exchange, rest) = self.setup.layer_alone(batch.most_tokens(), all);
        let layer = self.setup.layer_of_kind[0];
        let attended = self.setup.attention_alone(attention[0] as f64, batch.context, layer);
        let layer_ns = attended + exchange + rest;
        let batch = &mut self.batches[slot];
        batch.attention_ns = attention;
        batch.layer_ns = layer_ns as u64;
    }

    pub(super) fn announce(&mut self, slot: u32) {
        let Some(coordinator) = &mut self.coordinator else { return };
        let now = self.now;
        let batch = &mut self.batches[slot];
        let per_token = self.setup.collective_bytes_per_token;
        let mut loads = Vec::with_capacity(batch.members.len());
        for member in &batch.members[batch.announced..] {
            let request = &self.requests[member.request as usize];
            let (rank, decode) = (request.rank, request.decode);
            let all = if member.first { request.reused } else { 0 } + member.tokens;
            let last_stage = u64::from(all) * self.setup.kv_bytes_all_layers;
            let reuse = if member.first { request.fetched } else { 0 };
            let reuse = u64::from(reuse) * self.setup.kv_bytes_all_layers;
            let stripes = self.setup.stripes();
            let collective = if self.setup.striped {
                // A rank at the edge of its server passes on the shards of all others.
                let inside = u64::from(self.setup.layout.ranks_per_server);
                let context = u64::from(member.before + member.tokens);
                let passed = if stripes > inside { stripes - 1 } else { 0 };
                // With experts, its share of the tokens goes to their ranks, too.
                (context * self.setup.kv_bytes_all_layers * passed
                    + u64::from(member.tokens) * per_token)
                    / stripes
            } else {
                u64::from(member.tokens) * per_token
            };
            let mut ports = vec![(PortId(self.setup.layout.decode_ingress(decode).0), last_stage)];
            for rank in self.setup.ranks_for(rank) {
                let egress = PortId(self.setup.layout.egress(rank).0);
                ports.push((egress, last_stage / stripes + collective));
                if reuse > 0 {
                    ports.push((PortId(self.setup.layout.ingress(rank).0), reuse / stripes));
                }
            }
            let id = RequestId(u64::from(member.request) + 1);
            let load = ports.iter().map(|&(port, bytes)| (id, port, bytes));
            batch.loads.extend(load);
            // Relegated requests never make a batch urgent.
            let deadline = request.due();
            let started = batch.started.is_some();
            loads.push(RequestLoad { request: id, deadline, ports, started });
        }
        batch.announced = batch.members.len();
        coordinator.handle(
            now,
            AdmissionEvent::BatchArrived {
                batch: batch.policy_id(),
                requests: loads,
                compute: Span(batch.layer_ns * u64::from(self.setup.layers)),
            },
        );
        if let (Some(ahead), None) = (batch.ahead, batch.started) {
            let batch = batch.policy_id();
            coordinator.handle(now, AdmissionEvent::BatchQueued { batch, ahead });
        }
        self.schedule_order();
    }

    /// Reports progress to the coordinator four times in a batch's life. Each report subtracts a
    /// quarter of the load of each request.
    pub(super) fn report_quarter(&mut self, slot: u32) {
        let Some(coordinator) = &mut self.coordinator else { return };
        for (request, port, bytes) in &self.batches[slot].loads {
            coordinator.handle(
                self.now,
                AdmissionEvent::BytesCompleted { request: *request, port: *port, bytes: bytes / 4 },
            );
        }
    }
}
