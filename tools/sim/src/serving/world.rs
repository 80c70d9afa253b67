//! The state of a run, and its loop.

use laxity_policy::{PolicyKind, RequestId, Span, Time};

use super::batch::Batch;
use super::cache::{Caches, Pinned};
use super::disciplines::{self, UnitLatency};
use super::event::{Agenda, Happening};
use super::hosts::{Hosts, Regime};
use super::layout::{Layout, mix};
use super::line::WaitingRequests;
use super::measure::{Measure, Served};
use super::order::Coordinator;
use super::router::{Route, Router, Source};
use super::transfer::Flow;
use super::unit::Unit;
use super::weights::ScaleOuts;
use super::{Inputs, SimError};
use crate::compute::Compute;
use crate::model::{Copies, Model, Routing as Experts};
use crate::network::Network;
use crate::outcome::{Outcome, StageBytes};
use crate::scenario::{JobSize, Routing, Scenario, SloKind};

/// What a transfer on the network is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Tag {
    /// A chunk of the flow in this slot.
    Flow(u32),
    /// Of a collective: twice the rank, and one more for its ingress.
    Collective(u32),
}

impl Tag {
    pub(super) const fn pack(self) -> u32 {
        match self {
            Self::Flow(slot) => slot,
            Self::Collective(piece) => 1 << 31 | piece,
        }
    }

    const fn unpack(tag: u32) -> Self {
        if tag >> 31 == 1 {
            Self::Collective(tag & !(1 << 31))
        } else {
            Self::Flow(tag)
        }
    }
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) arrival: Time,
    pub(super) deadline: Time,
    pub(super) prompt: u32,
    pub(super) reused: u32,
    /// Of the reused tokens, those that come over the network.
    pub(super) fetched: u32,
    pub(super) rank: u32,
    pub(super) decode: u32,
    pub(super) first_source: u32,
    pub(super) sources: u32,
    /// Tokens that no batch has taken.
    pub(super) to_compute: u32,
    pub(super) started: Time,
    pub(super) prefilled: Option<Time>,
    pub(super) last_stage_left: u32,
    pub(super) last_arrival: Time,
    pub(super) stalled_ns: u64,
    pub(super) collective_ns: u64,
    pub(super) computed_ns: u64,
    pub(super) pruned: bool,
    /// Its unit gave it up.
    pub(super) relegated: bool,
    /// Without contention, when what the request fetches, and what it sends, has passed.
    pub(super) fetching_until: Time,
    pub(super) sending_until: Time,
}

impl Request {
    /// When its first token is due, for those who schedule its flows: what was given up is due no
    /// more.
    pub(super) const fn due(&self) -> Time {
        if self.relegated {
            Time::NEVER
        } else {
            self.deadline
        }
    }
}

/// How a layer of a unit uses its experts.
#[derive(Debug)]
pub(super) struct ExpertUse {
    /// Copies of a token that go to each rank.
    pub(super) copies: Vec<f64>,
    /// The rank with most pairs, and how many a token has there.
    worst: usize,
    pairs: f64,
    local: u32,
    routing: Option<Experts>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct World<'a> {
    pub(super) scenario: &'a Scenario,
    pub(super) inputs: &'a Inputs,
    pub(super) model: &'a Model,
    pub(super) compute: Compute,
    pub(super) now: Time,
    pub(super) agenda: Agenda,
    pub(super) network: Network,
    pub(super) layout: Layout,
    pub(super) hosts: Hosts,
    pub(super) coordinator: Option<Coordinator>,
    pub(super) router: Router,
    pub(super) caches: Caches,
    pub(super) units: Vec<Unit>,
    pub(super) batches: Vec<Batch>,
    pub(super) free_batches: Vec<u32>,
    pub(super) batches_seen: u64,
    pub(super) requests: Vec<Request>,
    pub(super) sources: Vec<Source>,
    /// Blocks that a request has still to read, by request.
    pinned: Vec<Vec<Pinned>>,
    pub(super) flows: Vec<Option<Flow>>,
    pub(super) free_flows: Vec<u32>,
    pub(super) flow_generation: u32,
    pub(super) experts: Vec<ExpertUse>,
    pub(super) measure: Measure,
    pub(super) bytes: StageBytes,
    /// Bytes of collectives that drained without being put on the network, by port.
    pub(super) counted: Vec<u64>,
    pub(super) regime: Regime,
    pub(super) exact: bool,
    pub(super) coflows: bool,
    pub(super) without_layers: bool,
    pub(super) receiver_bound: bool,
    /// The policy goes by the load of the early stages.
    pub(super) measures_load: bool,
    /// Requests are spread over all ranks of their unit (sequence parallelism).
    pub(super) striped: bool,
    pub(super) layers: u16,
    pub(super) latency: Span,
    /// A token's KV cache, by layer, and over all layers.
    pub(super) kv_bytes: Vec<u64>,
    pub(super) kv_bytes_all_layers: u64,
    /// A request's state in a layer with linear attention, which has no KV cache.
    pub(super) state_bytes: Vec<u64>,
    /// A layer with KV cache, and one without if there is any.
    pub(super) layer_of_kind: [u16; 2],
    pub(super) activation_bytes: f64,
    /// Of collectives, leaving a rank, over all layers.
    pub(super) collective_bytes_per_token: u64,
    /// Requests that were given up.
    pub(super) relegated: u64,
    pub(super) scale_outs: ScaleOuts,
    pub(super) arrived: usize,
    served: usize,
    events: u64,
}

impl<'a> World<'a> {
    pub(super) fn new(
        scenario: &'a Scenario,
        inputs: &'a Inputs,
        compute: Compute,
    ) -> Result<Self, SimError> {
        let mut network = Network::new();
        let layout = Layout::new(scenario, inputs.gpu.nvlink_bytes_per_second, &mut network);
        if layout.units == 0 || layout.decodes == 0 {
            return Err(SimError::Mismatch(format!(
                "cluster: {} servers make {} prefill units of {} ranks and {} decode ranks; both \
                 need one at least",
                scenario.cluster.servers, layout.units, layout.ranks_per_unit, layout.decodes
            )));
        }
        let list = &inputs.requests.list;
        if list.is_empty() {
            return Err(SimError::Mismatch("workload: no request arrives".into()));
        }
        let model = &inputs.model;
        let layers = model.layers;
        let kv_bytes: Vec<u64> = (0..layers)
            .map(|layer| model.kv_bytes_per_token(layer))
            .collect();
        let of_kind = |keeps: bool| kv_bytes.iter().position(|&bytes| (bytes > 0) == keeps);
        let with_cache = of_kind(true).unwrap_or(0) as u16;
        let layer_of_kind = [
            with_cache,
            of_kind(false).map_or(with_cache, |at| at as u16),
        ];
        let block_tokens = u64::from(inputs.requests.block_tokens.max(1));
        let ranks_per_unit = layout.ranks_per_unit;
        let striped = scenario.model.sp > 1;
        let stripes = f64::from(if striped { ranks_per_unit } else { 1 });
        let queues = if striped { 1 } else { ranks_per_unit as usize };
        let rates = (0..2 * layout.ranks)
            .map(|port| (port, layout.rank_rate))
            .chain((0..layout.decodes).map(|d| (layout.decode_ingress(d).0, layout.decode_rate)));
        let warm_up = (list.len() as f64 * scenario.workload.warm_up) as usize;
        let mut world = Self {
            hosts: Hosts::new(scenario, layout.ranks, layout.rank_rate)?,
            coordinator: Coordinator::new(scenario, rates)?,
            router: Router::new(&scenario.serving, &layout, striped, scenario.seed),
            caches: Caches::new(
                inputs.requests.distinct_blocks,
                layout.units,
                ranks_per_unit,
                scenario.serving.cache_tokens / block_tokens,
            ),
            units: (0..layout.units)
                .map(|_| Unit {
                    lines: Vec::new(),
                    ..Unit::default()
                })
                .collect(),
            experts: Vec::new(),
            counted: vec![0; 2 * layout.ranks as usize],
            measure: Measure::after(list[warm_up.min(list.len() - 1)].arrival),
            regime: Regime::of(scenario),
            exact: scenario.network.mode == crate::scenario::Mode::Exact,
            coflows: scenario.policy.granularity == JobSize::Coflow,
            without_layers: scenario
                .policy
                .without
                .contains(&crate::scenario::Part::Rli),
            measures_load: scenario.policy.kind == PolicyKind::Mfs
                && Regime::of(scenario) == Regime::Daemons,
            receiver_bound: layout.decode_rate < layout.rank_rate * stripes,
            striped,
            layers,
            latency: Span((scenario.network.latency_us * 1e3) as u64),
            kv_bytes_all_layers: kv_bytes.iter().sum(),
            state_bytes: (0..layers).map(|layer| model.state_bytes(layer)).collect(),
            kv_bytes,
            layer_of_kind,
            activation_bytes: model.activation_bytes() as f64,
            collective_bytes_per_token: 0,
            scenario,
            inputs,
            model,
            compute,
            now: Time::ZERO,
            agenda: Agenda::default(),
            network,
            layout,
            batches: Vec::new(),
            free_batches: Vec::new(),
            batches_seen: 0,
            requests: Vec::with_capacity(list.len()),
            sources: Vec::new(),
            pinned: vec![Vec::new(); list.len()],
            flows: Vec::new(),
            free_flows: Vec::new(),
            flow_generation: 0,
            bytes: StageBytes::default(),
            relegated: 0,
            scale_outs: ScaleOuts::default(),
            arrived: 0,
            served: 0,
            events: 0,
        };
        world.draw_experts();
        world.set_objectives();
        world.form_lines(queues);
        world.check_scale_out()?;
        Ok(world)
    }

    fn draw_experts(&mut self) {
        let model = self.model;
        if model.experts <= 1 {
            return;
        }
        let ranks = if self.scenario.model.ep > 1 {
            self.layout.ranks_per_unit
        } else {
            1
        };
        let skew = self.scenario.model.expert_skew;
        for unit in 0..self.layout.units {
            for layer in 0..self.layers {
                let routing = Experts::new(model, ranks, skew, self.scenario.seed, unit, layer);
                let (mut worst, mut pairs) = (0, 0.0);
                for rank in 0..ranks as usize {
                    let here = routing.expected_pairs(rank);
                    if here > pairs {
                        (worst, pairs) = (rank, here);
                    }
                }
                let copies = (0..ranks as usize)
                    .map(|rank| routing.expected_copies(rank, Copies::PerRank))
                    .collect();
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
        // What stays in a server passes no NIC.
        let inside = self.layout.ranks_per_server.min(ranks);
        let outside = 1.0 - f64::from(inside) / f64::from(ranks);
        let per_layer = 2.0 * copies * outside * self.activation_bytes;
        self.collective_bytes_per_token = (per_layer * f64::from(self.layers)) as u64;
    }

    /// A line before each rank, or before the whole unit where that computes one request after the
    /// other.
    fn form_lines(&mut self, queues: usize) {
        let latency = UnitLatency::of(self);
        let serving = &self.scenario.serving;
        for unit in &mut self.units {
            unit.lines = (0..queues)
                .map(|_| WaitingRequests::new(disciplines::discipline(serving, &latency)))
                .collect();
        }
    }

    fn set_objectives(&mut self) {
        let requests = &self.inputs.requests;
        let mut seen = vec![false; requests.distinct_blocks as usize];
        let slo = &self.scenario.slo;
        let mut alone = Vec::with_capacity(requests.list.len());
        for request in &requests.list {
            let blocks = requests.blocks_of(request);
            let known = blocks
                .iter()
                .take_while(|&&block| seen[block as usize])
                .count() as u32;
            for &block in blocks {
                seen[block as usize] = true;
            }
            let prompt = request.prompt_tokens.max(1);
            let reused = (known * requests.block_tokens).min(prompt - 1);
            alone.push(self.alone(prompt, reused));
        }
        let mean = alone.iter().map(|span| span.0 as f64).sum::<f64>() / alone.len() as f64;
        for (request, alone) in requests.list.iter().zip(alone) {
            let objective = match slo.kind {
                SloKind::Alone => alone.0 as f64 * slo.factor,
                SloKind::Mean => mean * slo.factor,
                SloKind::Fixed => slo.fixed_ms * 1e6,
            };
            let objective = objective.max(slo.least_ms * 1e6);
            self.requests.push(Request {
                arrival: request.arrival,
                deadline: request.arrival + Span(objective as u64),
                prompt: request.prompt_tokens.max(1),
                reused: 0,
                fetched: 0,
                rank: 0,
                decode: 0,
                first_source: 0,
                sources: 0,
                to_compute: 0,
                started: request.arrival,
                prefilled: None,
                last_stage_left: 0,
                last_arrival: Time::ZERO,
                stalled_ns: 0,
                collective_ns: 0,
                computed_ns: 0,
                pruned: false,
                relegated: false,
                fetching_until: Time::ZERO,
                sending_until: Time::ZERO,
            });
        }
    }

    /// Runs until all requests are served.
    pub(super) fn run(&mut self) {
        self.run_observed(|_| {});
        #[cfg(debug_assertions)]
        self.check_conservation();
    }

    /// As [`Self::run`], and `look`s after each event.
    pub(super) fn run_observed(&mut self, mut look: impl FnMut(&Self)) {
        self.agenda
            .push(self.requests[0].arrival, Happening::Arrival);
        self.schedule_scale_out();
        while self.served < self.requests.len() {
            let drained = self.network.next_end(self.now);
            let next = match (drained, self.agenda.next()) {
                (Some(a), Some(b)) => a.min(b),
                (Some(at), None) | (None, Some(at)) => at,
                (None, None) => unreachable!("what is not served waits for something"),
            };
            self.now = next.max(self.now);
            while let Some((_, tag)) = self.network.pop_ended(self.now) {
                self.events += 1;
                match Tag::unpack(tag) {
                    Tag::Flow(slot) => self.sent(slot),
                    Tag::Collective(piece) => self.collective_drained(piece),
                }
                look(self);
            }
            while let Some(happening) = self.agenda.pop(self.now) {
                self.events += 1;
                self.happens(happening);
                look(self);
            }
        }
    }

    fn happens(&mut self, happening: Happening) {
        match happening {
            Happening::Arrival => self.arrive(),
            Happening::Step { unit, step } => self.step_ended(unit, step),
            Happening::Wake { host } => {
                self.hosts.woken(host, self.now);
                self.poll(host);
            }
            Happening::Order => {
                self.run_order();
                self.schedule_order();
            }
            Happening::Delivered { flow } => self.delivered(flow),
            Happening::ScaleOut => self.scale_out(),
        }
    }

    fn arrive(&mut self) {
        let number = self.arrived;
        self.arrived += 1;
        if let Some(next) = self.requests.get(self.arrived) {
            self.agenda.push(next.arrival, Happening::Arrival);
        }
        self.measure.at(self.now);
        let route = self
            .router
            .route(&self.layout, &self.caches, &self.inputs.requests, number);
        let unit = self.layout.unit_of(route.rank);
        let fetched = self.over_the_network(&route);
        let request = &mut self.requests[number];
        request.rank = route.rank;
        request.reused = route.reused;
        request.fetched = fetched;
        request.to_compute = request.prompt - route.reused;
        request.first_source = self.sources.len() as u32;
        request.sources = route.sources.len() as u32;
        self.sources.extend_from_slice(&route.sources);
        self.router.queued[route.rank as usize] += u64::from(request.to_compute);
        let bytes = u64::from(request.prompt) * self.kv_bytes_all_layers;
        request.decode = self.router.place(number, bytes);
        self.use_blocks(number, unit, &route.blocks);
        self.enqueue(unit, number as u32);
    }

    /// Reused tokens that come through NICs.
    fn over_the_network(&self, route: &Route) -> u32 {
        let layout = &self.layout;
        let apart = |from, to| layout.server_of(from) != layout.server_of(to);
        let of = |&(from, tokens): &Source| -> u32 {
            if !self.striped {
                return if apart(from, route.rank) { tokens } else { 0 };
            }
            // Each rank fetches its share from its like; within the unit everybody has what it
            // needs.
            let (home, unit) = (layout.unit_of(from), layout.unit_of(route.rank));
            let pairs = layout.ranks_of(home).zip(layout.ranks_of(unit));
            let far = pairs.filter(|&(from, to)| home != unit && apart(from, to));
            (u64::from(tokens) * far.count() as u64 / u64::from(layout.ranks_per_unit)) as u32
        };
        route.sources.iter().map(of).sum()
    }

    /// Blocks that are reused stay where they are until the request has computed; with copies, they
    /// are where it computes, too.
    fn use_blocks(&mut self, number: usize, unit: u32, blocks: &[(u32, u32)]) {
        let rank = self.requests[number].rank;
        let mut pinned = Vec::with_capacity(blocks.len());
        // Back to front: of a prefix that does not fit, the tail is to go first.
        for &(block, holder) in blocks.iter().rev() {
            pinned.extend(self.caches.pin(holder, block));
            if self.layout.unit_of(holder) != unit && self.scenario.serving.copy_on_fetch {
                self.caches.insert(rank, block);
            }
        }
        self.pinned[number] = pinned;
    }

    /// The unit keeps the blocks of a request that it has computed, or brings them home.
    pub(super) fn keep_blocks(&mut self, number: u32) {
        let requests = &self.inputs.requests;
        let blocks = requests.blocks_of(&requests.list[number as usize]);
        for pinned in core::mem::take(&mut self.pinned[number as usize]) {
            self.caches.release(pinned);
        }
        let mut rank = self.requests[number as usize].rank;
        if let (Routing::StaticHomes, Some(&first)) =
            (self.scenario.serving.routing, blocks.first())
        {
            rank = (mix(u64::from(first)) % u64::from(self.layout.ranks)) as u32;
        }
        let unit = self.layout.unit_of(rank);
        for &block in blocks.iter().rev() {
            // A block has one holder, unless copies are wanted.
            let held = self.caches.holders(block).next().is_some();
            if !held || self.scenario.serving.copy_on_fetch {
                self.caches.insert(rank, block);
            } else {
                self.caches.touch(unit, block);
            }
        }
    }

    /// Ends the request if its first token can be out.
    pub(super) fn try_end(&mut self, number: u32) {
        let request = self.requests[number as usize];
        let Some(prefilled) = request.prefilled else {
            return;
        };
        if request.last_stage_left > 0 {
            return;
        }
        let mut first_token = prefilled;
        if request.last_arrival > Time::ZERO {
            first_token = first_token.max(request.last_arrival + self.latency);
        }
        self.served += 1;
        let bytes = u64::from(request.prompt) * self.kv_bytes_all_layers;
        self.router.decode_load[request.decode as usize] -= bytes;
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.ended(self.now, RequestId(u64::from(number) + 1));
        }
        self.measure.served(&Served {
            arrival: request.arrival,
            deadline: request.deadline,
            started: request.started,
            prefilled,
            first_token,
            stalled_ns: request.stalled_ns,
            collective_ns: request.collective_ns,
            computed_ns: request.computed_ns,
            prompt: request.prompt,
            reused: request.reused,
            fetched: request.fetched,
            pruned: request.pruned,
        });
    }

    /// What of a layer goes to the decode rank for `tokens` of a request, the last part or not.
    pub(super) fn layer_bytes(&self, layer: u16, tokens: u32, last: bool) -> u64 {
        let at = usize::from(layer);
        let state = if last { self.state_bytes[at] } else { 0 };
        u64::from(tokens) * self.kv_bytes[at] + state
    }

    fn expert_use(&self, unit: u32, layer: u16) -> &ExpertUse {
        &self.experts[unit as usize * usize::from(self.layers) + usize::from(layer)]
    }

    /// The experts of the running batch's layer, on the slowest rank.
    pub(super) fn experts_ns(&self, unit: u32, slot: u32) -> u64 {
        let batch = &self.batches[slot as usize];
        let ranks = u64::from(self.layout.ranks_per_unit);
        // Expert parallelism brings the tokens of all ranks together; otherwise each rank computes
        // its own.
        let tokens = if self.scenario.model.ep > 1 {
            batch.tokens.iter().sum()
        } else if self.striped {
            batch.tokens.iter().sum::<u64>().div_ceil(ranks)
        } else {
            batch.tokens.iter().copied().max().unwrap_or(0)
        };
        self.experts_of(self.expert_use(unit, batch.layer), tokens)
    }

    pub(super) fn experts_of(&self, experts: &ExpertUse, tokens: u64) -> u64 {
        let pairs = (tokens as f64 * experts.pairs).ceil() as u64;
        let active = match &experts.routing {
            Some(routing) => routing.active_experts(experts.worst, tokens).ceil() as u32,
            None => experts.local,
        };
        self.compute.experts_ns(pairs, active.max(1))
    }

    pub(super) fn outcome(&self) -> Outcome {
        let seconds = self.now.0 as f64 / 1e9;
        let busy = |port: u32| {
            let id = crate::network::PortId(port);
            let bytes = self.network.carried(id, self.now) + self.counted[port as usize] as f64;
            if seconds > 0.0 {
                bytes / (self.layout.rank_rate * seconds)
            } else {
                0.0
            }
        };
        let ports = 2 * self.layout.ranks;
        Outcome {
            bytes: self.bytes,
            relegated: self.relegated,
            weights: self.scale_outs.outcome(),
            port_busy_mean: (0..ports).map(busy).sum::<f64>() / f64::from(ports),
            port_busy_most: (0..ports).map(busy).fold(0.0, f64::max),
            events: self.events,
            ..self.measure.outcome(self.layout.units, self.now.0)
        }
    }

    /// What was sent has been received, and all of it was carried once.
    #[cfg(debug_assertions)]
    fn check_conservation(&self) {
        let carried = |port: u32| {
            let id = crate::network::PortId(port);
            let counted = self.counted.get(port as usize).copied().unwrap_or(0);
            self.network.carried(id, self.now) + counted as f64
        };
        if self.regime == Regime::Alone {
            return;
        }
        let ranks = self.layout.ranks;
        let sent: f64 = (0..ranks).map(|rank| carried(2 * rank)).sum();
        let received: f64 = (0..ranks).map(|rank| carried(2 * rank + 1)).sum::<f64>()
            + (0..self.layout.decodes)
                .map(|decode| carried(self.layout.decode_ingress(decode).0))
                .sum::<f64>();
        let StageBytes {
            kv_reuse,
            collective,
            p2d,
        } = self.bytes;
        // Weights may be on their way still when the last request has been served.
        let (weights, under_way) = (self.scale_outs.outcome().bytes, self.weights_left());
        let wanted = (kv_reuse + collective + p2d + weights) as f64;
        // Shares of a collective are rounded down to whole bytes, on each side by itself.
        let slack = 1e-6 * wanted + 1e6 + under_way as f64;
        assert!(
            (sent - wanted).abs() <= slack,
            "{wanted} bytes were to be sent, {sent} were"
        );
        assert!(
            (received - sent).abs() <= slack,
            "{sent} bytes were sent, {received} arrived"
        );
    }
}
