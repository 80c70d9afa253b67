//! The constants of a run: the scenario, its inputs, and values derived from both.

use std::ops::Range;

use laxity_policy::{Granularity, PolicyKind, Span};

use super::batch::Batch;
use super::hosts::Regime;
use super::layout::Layout;
use super::router::{PrefixSource, Route};
use super::{Inputs, SimError};
use crate::compute::Compute;
use crate::model::{ExpertRouting, Model};
use crate::network::Network;
use crate::scenario::{Mode, Part, Scenario};

#[derive(Debug)]
pub(super) struct ExpertUse {
    pub(super) copies: Vec<f64>,
    worst: usize,
    pairs: f64,
    local: u32,
    routing: Option<ExpertRouting>,
}

#[derive(Debug)]
pub(super) struct Setup<'a> {
    pub(super) scenario: &'a Scenario,
    pub(super) inputs: &'a Inputs,
    pub(super) model: &'a Model,
    pub(super) compute: Compute,
    pub(super) layout: Layout,
    /// Expert use by unit, then by layer. Empty without experts.
    pub(super) experts: Vec<ExpertUse>,
    pub(super) regime: Regime,
    pub(super) exact: bool,
    pub(super) coflows: bool,
    pub(super) without_layers: bool,
    pub(super) measures_load: bool,
    pub(super) striped: bool,
    pub(super) layers: u16,
    pub(super) latency: Span,
    /// Bytes of a token's KV cache by layer, followed by the sum over all layers.
    pub(super) kv_bytes: Vec<u64>,
    pub(super) kv_bytes_all_layers: u64,
    /// Bytes of a request's state by layer, zero in layers with a KV cache.
    pub(super) state_bytes: Vec<u64>,
    /// A layer with a KV cache and, if there is any, one without.
    pub(super) layer_of_kind: [u16; 2],
    pub(super) activation_bytes: f64,
    pub(super) collective_bytes_per_token: u64,
}

impl<'a> Setup<'a> {
    /// Adds the ports of the cluster to `network` and returns the constants of the run.
    pub(super) fn new(
        scenario: &'a Scenario,
        inputs: &'a Inputs,
        compute: Compute,
        network: &mut Network,
    ) -> Result<Self, SimError> {
        let layout = Layout::new(scenario, inputs.gpu.nvlink_bytes_per_second, network);
        if layout.units == 0 || layout.decodes == 0 {
            return Err(SimError::Mismatch(format!(
                "cluster: {} servers make {} prefill units of {} ranks and {} decode ranks; both \
                 need one at least",
                scenario.cluster.servers, layout.units, layout.ranks_per_unit, layout.decodes
            )));
        }
        let model = &inputs.model;
        let kv_bytes: Vec<u64> =
            (0..model.layers).map(|layer| model.kv_bytes_per_token(layer)).collect();
        let of_kind = |keeps: bool| kv_bytes.iter().position(|&bytes| (bytes > 0) == keeps);
        let with_cache = of_kind(true).unwrap_or(0) as u16;
        let without_cache = of_kind(false).map_or(with_cache, |at| at as u16);
        let regime = Regime::of(scenario);
        let mut setup = Self {
            experts: Vec::new(),
            regime,
            exact: scenario.network.mode == Mode::Exact,
            coflows: scenario.policy.granularity == Granularity::Coflow,
            without_layers: scenario.policy.without.contains(&Part::Rli),
            measures_load: scenario.policy.kind == PolicyKind::Mfs && regime == Regime::Daemons,
            striped: scenario.model.sp > 1,
            layers: model.layers,
            latency: Span((scenario.network.latency_us * 1e3) as u64),
            kv_bytes_all_layers: kv_bytes.iter().sum(),
            state_bytes: (0..model.layers).map(|layer| model.state_bytes(layer)).collect(),
            kv_bytes,
            layer_of_kind: [with_cache, without_cache],
            activation_bytes: model.activation_bytes() as f64,
            collective_bytes_per_token: 0,
            scenario,
            inputs,
            model,
            compute,
            layout,
        };
        setup.draw_experts();
        Ok(setup)
    }

    fn draw_experts(&mut self) {
        let model = self.model;
        if model.experts <= 1 {
            return;
        }
        let ranks = if self.scenario.model.ep > 1 { self.layout.ranks_per_unit } else { 1 };
        let skew = self.scenario.model.expert_skew;
        for unit in 0..self.layout.units {
            for layer in 0..self.layers {
                let routing =
                    ExpertRouting::new(model, ranks, skew, self.scenario.seed, unit, layer);
                let (mut worst, mut pairs) = (0, 0.0);
                for rank in 0..ranks as usize {
                    let here = routing.expected_pairs(rank);
                    if here > pairs {
                        (worst, pairs) = (rank, here);
                    }
                }
                let copies =
                    (0..ranks as usize).map(|rank| routing.expected_copies(rank)).collect();
                let local = routing.experts_of(worst).len() as u32;
                self.experts.push(ExpertUse {
                    copies,
                    worst,
                    pairs,
                    local,
                    routing: (local > 1).then_some(routing),
                });
            }
        }
        let copies: f64 = self.experts[0].copies.iter().sum();
        // Traffic inside a server passes no NIC.
        let inside = self.layout.ranks_per_server.min(ranks);
        let outside = 1.0 - f64::from(inside) / f64::from(ranks);
        let per_layer = 2.0 * copies * outside * self.activation_bytes;
        self.collective_bytes_per_token = (per_layer * f64::from(self.layers)) as u64;
    }

    /// Returns the number of ranks that compute a request together.
    pub(super) fn stripes(&self) -> u64 {
        if self.striped { u64::from(self.layout.ranks_per_unit) } else { 1 }
    }

    /// Returns the ranks that compute a request which was routed to `rank`.
    pub(super) fn ranks_for(&self, rank: u32) -> Range<u32> {
        if self.striped { self.layout.ranks_of(self.layout.unit_of(rank)) } else { rank..rank + 1 }
    }

    /// Returns the part of a request's tokens or pairs that one rank computes.
    pub(super) fn share(&self, all: u64) -> u64 {
        all.div_ceil(self.stripes())
    }

    pub(super) fn over_the_network(&self, route: &Route) -> u32 {
        let layout = &self.layout;
        let apart = |from, to| layout.server_of(from) != layout.server_of(to);
        let of = |&(from, tokens): &PrefixSource| -> u32 {
            // Each rank fetches its share from the rank of the same index.
            let pairs = self.ranks_for(from).zip(self.ranks_for(route.rank));
            let far = pairs.filter(|&(from, to)| apart(from, to)).count();
            (u64::from(tokens) * far as u64 / self.stripes()) as u32
        };
        route.sources.iter().map(of).sum()
    }

    /// Returns the P2D bytes of a layer for `tokens` of a request. The `last` part has the state.
    pub(super) fn layer_bytes(&self, layer: u16, tokens: u32, last: bool) -> u64 {
        let at = usize::from(layer);
        let state = if last { self.state_bytes[at] } else { 0 };
        u64::from(tokens) * self.kv_bytes[at] + state
    }

    pub(super) fn expert_use(&self, unit: u32, layer: u16) -> &ExpertUse {
        &self.experts[unit as usize * usize::from(self.layers) + usize::from(layer)]
    }

    /// Returns the time of the experts of a batch's current layer on the slowest rank.
    pub(super) fn experts_ns(&self, batch: &Batch) -> u64 {
        // Expert parallelism combines the tokens of all ranks. Otherwise each rank computes its own
        // tokens.
        let tokens = if self.scenario.model.ep > 1 {
            batch.tokens.iter().sum()
        } else {
            self.share(batch.most_tokens())
        };
        self.experts_of(self.expert_use(batch.unit, batch.layer), tokens)
    }

    pub(super) fn experts_of(&self, experts: &ExpertUse, tokens: u64) -> u64 {
        let pairs = (tokens as f64 * experts.pairs).ceil() as u64;
        let active = match &experts.routing {
            Some(routing) => routing.active_experts(experts.worst, tokens).ceil() as u32,
            None => experts.local,
        };
        self.compute.experts_ns(pairs, active.max(1))
    }
}
