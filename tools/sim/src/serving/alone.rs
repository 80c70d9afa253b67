//! The time to first token on an otherwise idle cluster, which objectives are derived from (MFS
//! §6.1, "under low-load conditions").
//!
//! It does not depend on the policy. It assumes that an infinite cache holds the reused tokens and
//! that all of them are fetched from another unit.

use laxity_policy::Span;

use super::batch::pairs;
use super::setup::Setup;

impl Setup<'_> {
    /// Returns the TTFT of a request with `reused` of its `prompt` tokens on another unit.
    pub(super) fn alone(&self, prompt: u32, reused: u32) -> Span {
        let serving = &self.scenario.serving;
        let stripes = self.stripes();
        let share = |n| self.share(n);
        let seconds = |bytes: f64, rate: f64| bytes / rate * 1e9;
        let to_decode = (self.layout.rank_rate * stripes as f64).min(self.layout.decode_rate);
        let latency = self.latency.0 as f64;
        let (mut clock, mut fetched, mut arrived) = (0.0_f64, 0.0_f64, 0.0_f64);
        let mut before = reused;
        while before < prompt {
            let most = if serving.chunked { serving.token_budget } else { prompt };
            let tokens = (prompt - before).min(most);
            let attended = share(pairs(tokens, before));
            let ends = self.compute.ends_ns(u64::from(tokens), 1) as f64;
            clock += ends / 2.0;
            let attention: Vec<f64> = self
                .layer_of_kind
                .iter()
                .map(|&layer| {
                    self.compute.attention_ns(share(u64::from(tokens)), attended, layer) as f64
                })
                .collect();
            let (exchange, rest) = self.layer_alone(u64::from(tokens), u64::from(tokens));
            for layer in 0..usize::from(self.layers) {
                let per_token = self.kv_bytes[layer] as f64;
                if before == reused && reused > 0 {
                    let bytes = f64::from(reused) * per_token + self.state_bytes[layer] as f64;
                    let bytes = bytes / stripes as f64;
                    fetched += seconds(bytes, self.layout.rank_rate);
                    clock = clock.max(fetched + latency);
                }
                let attention = attention[usize::from(per_token == 0.0)];
                clock += self.attention_alone(attention, u64::from(before + tokens), layer as u16);
                let sent = if before == reused { prompt.min(before + tokens) } else { tokens };
                let last = before + tokens == prompt;
                let state = if last { self.state_bytes[layer] as f64 } else { 0.0 };
                let bytes = f64::from(sent) * per_token + state;
                arrived = arrived.max(clock) + seconds(bytes, to_decode);
                clock += exchange + rest;
            }
            clock += ends / 2.0;
            before += tokens;
        }
        Span(clock.max(arrived + latency).ceil() as u64)
    }

    /// Returns the time to compute `tokens` with `attended` pairs on an otherwise idle unit,
    /// including the exchanges of the layers.
    pub(super) fn computing_alone(&self, tokens: u64, attended: u64) -> f64 {
        let share = |n| self.share(n);
        let (exchange, rest) = self.layer_alone(tokens, tokens);
        let context = attended.div_ceil(tokens.max(1));
        let attention = |layer: u16| {
            let kind = usize::from(self.kv_bytes[usize::from(layer)] == 0);
            let kind = self.layer_of_kind[kind];
            let takes = self.compute.attention_ns(share(tokens), share(attended), kind);
            self.attention_alone(takes as f64, context, layer)
        };
        let layers = (0..self.layers).map(|layer| attention(layer) + exchange + rest).sum::<f64>();
        self.compute.ends_ns(tokens, 1) as f64 + layers
    }

    /// Returns the time of a layer's attention, including the exchange of the KV cache of `context`
    /// tokens in a sequence-parallel unit. A ring computes meanwhile.
    pub(super) fn attention_alone(&self, attention: f64, context: u64, layer: u16) -> f64 {
        let ranks = self.layout.ranks_per_unit;
        let per_token = self.kv_bytes[usize::from(layer)];
        if !self.striped || ranks == 1 || per_token == 0 {
            return attention;
        }
        let shard = (context * per_token) as f64 / f64::from(ranks);
        let inside = self.layout.ranks_per_server.min(ranks);
        // In a ring every byte passes every link.
        let passed = f64::from(ranks - 1);
        let (near, far) = match inside {
            _ if inside == ranks => (passed, 0.0),
            1 => (0.0, passed),
            _ => (passed, passed),
        };
        let seconds =
            (shard * near / self.layout.nvlink_rate).max(shard * far / self.layout.rank_rate);
        let exchange = seconds * 1e9 + self.latency.0 as f64;
        attention.max(exchange)
    }

    /// Returns the times of exchange and computing of a layer after attention. One rank has at most
    /// `most` tokens, and all ranks have `all`. With sequence parallelism both are the unit's.
    pub(super) fn layer_alone(&self, most: u64, all: u64) -> (f64, f64) {
        let ranks = u64::from(self.layout.ranks_per_unit);
        let share = |n| self.share(n);
        if self.model.experts <= 1 {
            return (0.0, self.compute.mlp_ns(share(most)) as f64);
        }
        let use_ = &self.experts[0];
        let own = if self.scenario.model.ep > 1 { all } else { share(most) };
        let rest = self.experts_of(use_, own) as f64;
        let shared = self.compute.shared_ns(share(most)) as f64;
        if self.scenario.model.ep <= 1 {
            return (0.0, rest + shared);
        }
        let inside = u64::from(self.layout.ranks_per_server).min(ranks) as f64 / ranks as f64;
        // The bottleneck is a rank that sends to all others, or the rank that most tokens need.
        let sent = share(most) as f64 * use_.copies.iter().sum::<f64>();
        let received = all as f64 * use_.copies.iter().copied().fold(0.0, f64::max);
        let bytes = sent.max(received) * (1.0 - inside) * self.activation_bytes;
        let takes = bytes / self.layout.rank_rate * 1e9;
        let there = takes + self.latency.0 as f64;
        (there.max(shared) + there, rest)
    }
}
