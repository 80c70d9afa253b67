//! A prefill unit: each of its batches, layer by layer. Which requests are in it: `filling`.

use laxity_policy::admission::AdmissionEvent;
use laxity_policy::{PortId, RequestId, Span, Time};

use super::batch::Step;
use super::collective::Collective;
use super::exchange::Pattern;
use super::hosts::Regime;
use super::line::WaitingRequests;
use super::order;
use super::transfer::To;
use super::world::World;
use crate::scenario::SpExchange;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Unit {
    /// Requests that no batch has room for yet, by rank; with sequence parallelism in the first.
    pub(super) lines: Vec<WaitingRequests>,
    pub(super) current: Option<u32>,
    pub(super) next: Option<u32>,
    pub(super) step: Step,
    /// Counts the steps that were scheduled: an earlier one that comes up is void.
    pub(super) steps: u32,
    pub(super) since: Time,
    pub(super) collective: Collective,
}

impl World<'_> {
    /// How long a layer takes, for hints and for the coordinator.
    pub(super) fn estimate(&mut self, slot: u32) {
        let ranks = u64::from(self.layout.ranks_per_unit);
        let batch = &self.batches[slot as usize];
        let share = |n: u64| if self.striped { n.div_ceil(ranks) } else { n };
        let mut attention = [0; 2];
        for (&tokens, &pairs) in batch.tokens.iter().zip(&batch.pairs) {
            if tokens == 0 {
                continue;
            }
            for (kind, worst) in attention.iter_mut().enumerate() {
                let layer = self.layer_of_kind[kind];
                let takes = self
                    .compute
                    .attention_ns(share(tokens), share(pairs), layer);
                *worst = takes.max(*worst);
            }
        }
        // Without contention, but with what the layer exchanges.
        let most = batch.tokens.iter().copied().max().unwrap_or(0);
        let all = batch.tokens.iter().sum();
        let (exchange, rest) = self.layer_alone(most, all);
        let layer = self.layer_of_kind[0];
        let attended = self.attention_alone(attention[0] as f64, batch.context, layer);
        let layer_ns = attended + exchange + rest;
        let batch = &mut self.batches[slot as usize];
        batch.attention_ns = attention;
        batch.layer_ns = layer_ns as u64;
    }

    /// Tells the coordinator.
    pub(super) fn announce(&mut self, slot: u32) {
        let Some(coordinator) = &mut self.coordinator else {
            return;
        };
        let now = self.now;
        let batch = &mut self.batches[slot as usize];
        let per_token = self.collective_bytes_per_token;
        let mut loads = Vec::with_capacity(batch.members.len());
        for member in &batch.members[batch.announced..] {
            let request = &self.requests[member.request as usize];
            let (rank, decode) = (request.rank, request.decode);
            let all = if member.first { request.reused } else { 0 } + member.tokens;
            let last_stage = u64::from(all) * self.kv_bytes_all_layers;
            let reuse = if member.first { request.fetched } else { 0 };
            let reuse = u64::from(reuse) * self.kv_bytes_all_layers;
            let ranks = u64::from(self.layout.ranks_per_unit);
            let stripes = if self.striped { ranks } else { 1 };
            let collective = if self.striped {
                // A rank at the edge of its server passes on the shards of all others.
                let inside = u64::from(self.layout.ranks_per_server);
                let context = u64::from(member.before + member.tokens);
                let passed = if ranks > inside { ranks - 1 } else { 0 };
                context * self.kv_bytes_all_layers * passed / ranks
            } else {
                u64::from(member.tokens) * per_token
            };
            let senders = if self.striped {
                self.layout.ranks_of(self.layout.unit_of(rank))
            } else {
                rank..rank + 1
            };
            let mut ports = vec![(PortId(self.layout.decode_ingress(decode).0), last_stage)];
            for rank in senders {
                let egress = PortId(self.layout.egress(rank).0);
                ports.push((egress, last_stage / stripes + collective));
                if reuse > 0 {
                    ports.push((PortId(self.layout.ingress(rank).0), reuse / stripes));
                }
            }
            let id = RequestId(u64::from(member.request) + 1);
            let load = ports.iter().map(|&(port, bytes)| (id, port, bytes));
            batch.loads.extend(load);
            // Work that was given up never sets a batch's urgency.
            let deadline = request.due();
            loads.push(order::load(id, deadline, ports, batch.started.is_some()));
        }
        batch.announced = batch.members.len();
        coordinator.handle(
            now,
            AdmissionEvent::BatchArrived {
                batch: batch.policy_id(),
                requests: loads,
                compute: Span(batch.layer_ns * u64::from(self.layers)),
            },
        );
        if let (Some(ahead), None) = (batch.ahead, batch.started) {
            let batch = batch.policy_id();
            coordinator.handle(now, AdmissionEvent::BatchQueued { batch, ahead });
        }
        self.schedule_order();
    }

    /// The coordinator hears of progress four times in a batch's life, not more: a quarter of what
    /// each request brought is off.
    fn report_quarter(&mut self, slot: u32) {
        let Some(coordinator) = &mut self.coordinator else {
            return;
        };
        for (request, port, bytes) in &self.batches[slot as usize].loads {
            coordinator.handle(
                self.now,
                AdmissionEvent::BytesCompleted {
                    request: *request,
                    port: *port,
                    bytes: bytes / 4,
                },
            );
        }
    }

    /// Stage-1 flows of the layers that are near enough.
    pub(super) fn fetch_ahead(&mut self, slot: u32) {
        let lookahead = self.scenario.serving.lookahead_layers;
        let batch = &self.batches[slot as usize];
        let first = batch.fetched;
        let until = batch
            .layer
            .saturating_add(lookahead.max(1))
            .min(self.layers);
        if first >= until {
            return;
        }
        self.batches[slot as usize].fetched = until;
        for layer in first..until {
            for index in 0..self.batches[slot as usize].members.len() {
                let member = self.batches[slot as usize].members[index];
                if member.first {
                    self.fetch(slot, member.request, layer);
                }
            }
        }
    }

    pub(super) fn fetch(&mut self, slot: u32, request: u32, layer: u16) {
        let state = &self.requests[request as usize];
        let (first, count, rank) = (state.first_source, state.sources, state.rank);
        let alike = if self.coflows {
            self.fetches_at(slot, self.seat(request))
        } else {
            1
        };
        for at in first..first + count {
            let (from, tokens) = self.sources[at as usize];
            // Linear attention goes on from its state after the last reused token.
            let bytes = self.layer_bytes(layer, tokens, at + 1 == first + count);
            if bytes == 0 {
                continue;
            }
            if !self.striped {
                if from != rank {
                    self.batches[slot as usize].reuse_left[usize::from(layer)] += 1;
                    self.submit((request, slot, layer), from, To::Rank(rank), bytes, alike);
                }
                continue;
            }
            let (unit, home) = (self.layout.unit_of(rank), self.layout.unit_of(from));
            if unit == home {
                continue;
            }
            let stripes = self.layout.ranks_per_unit;
            for n in 0..stripes {
                let from = self.layout.ranks_of(home).start + n;
                let to = To::Rank(self.layout.ranks_of(unit).start + n);
                self.batches[slot as usize].reuse_left[usize::from(layer)] += 1;
                self.submit(
                    (request, slot, layer),
                    from,
                    to,
                    bytes / u64::from(stripes),
                    alike,
                );
            }
        }
    }

    /// Sources that the batch's members at one queue fetch a layer from.
    fn fetches_at(&self, slot: u32, seat: usize) -> u32 {
        let members = &self.batches[slot as usize].members;
        let here = members
            .iter()
            .filter(|member| member.first && self.seat(member.request) == seat);
        here.map(|member| self.requests[member.request as usize].sources)
            .sum()
    }

    /// Stage-1 bytes of a layer are there.
    pub(super) fn blocks_arrived(&mut self, slot: u32, layer: u16) {
        let complete = self.now + self.latency;
        let batch = &mut self.batches[slot as usize];
        batch.reuse_left[usize::from(layer)] -= 1;
        batch.reuse_complete[usize::from(layer)] = complete;
        let unit = batch.unit;
        let state = &self.units[unit as usize];
        let waits = state.current == Some(slot) && state.step == Step::Stalled;
        if waits && layer == batch.layer && batch.reuse_left[usize::from(layer)] == 0 {
            batch.stalled_ns += self.now.since(state.since).0;
            self.start_attention(unit, self.latency);
        }
    }

    /// The next batch computes.
    pub(super) fn start_batch(&mut self, unit: u32) {
        let now = self.now;
        if self.relegated > 0 {
            self.fill_up(unit);
        }
        let Some(slot) = self.units[unit as usize].next else {
            return;
        };
        if self.batches[slot as usize].members.is_empty() {
            return;
        }
        let state = &mut self.units[unit as usize];
        state.current = Some(slot);
        state.next = None;
        let batch = &mut self.batches[slot as usize];
        batch.started = Some(now);
        let id = batch.policy_id();
        self.measure.batch(batch.members.len());
        for index in 0..batch.members.len() {
            let member = self.batches[slot as usize].members[index];
            let request = &mut self.requests[member.request as usize];
            if member.first {
                request.started = now;
            }
        }
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.handle(now, AdmissionEvent::BatchStarted { batch: id });
        }
        self.fill(unit);
        self.begin_layer(unit);
    }

    fn begin_layer(&mut self, unit: u32) {
        let slot = self.running(unit);
        self.fetch_ahead(slot);
        self.tell_boundary(slot);
        let batch = &self.batches[slot as usize];
        if batch.reuse_left[usize::from(batch.layer)] > 0 {
            let now = self.now;
            let state = &mut self.units[unit as usize];
            (state.step, state.since) = (Step::Stalled, now);
            return;
        }
        // What has come just now is not complete yet.
        let complete = batch.reuse_complete[usize::from(batch.layer)];
        self.start_attention(unit, complete.since(self.now));
    }

    pub(super) fn running(&self, unit: u32) -> u32 {
        self.units[unit as usize]
            .current
            .expect("a unit with a step has a batch")
    }

    /// Links where something of the batch waits hear of the layer at once.
    fn tell_boundary(&mut self, slot: u32) {
        if self.regime != Regime::Daemons {
            return;
        }
        for at in 0..self.batches[slot as usize].hosts.len() {
            let host = self.batches[slot as usize].hosts[at];
            if self.hosts.waits(host) {
                self.tell(host, slot);
                self.poll(host);
            }
        }
    }

    fn start_attention(&mut self, unit: u32, delay: Span) {
        let slot = self.running(unit);
        self.units[unit as usize].step = Step::Attention;
        let batch = &self.batches[slot as usize];
        let kind = usize::from(self.kv_bytes[usize::from(batch.layer)] == 0);
        let mut takes = batch.attention_ns[kind];
        if batch.layer == 0 {
            let requests = batch.members.len() as u64;
            let most = batch.tokens.iter().copied().max().unwrap_or(0);
            takes += self.compute.ends_ns(most, requests) / 2;
        }
        let per_token = self.kv_bytes[usize::from(batch.layer)];
        if !self.striped || self.layout.ranks_per_unit == 1 || per_token == 0 {
            self.batches[slot as usize].computed_ns += takes;
            self.schedule_step(unit, self.now + delay + Span(takes));
            return;
        }
        // Every rank's queries meet the keys of the whole context.
        let ranks = self.layout.ranks_per_unit as usize;
        let shard = (batch.context * per_token) as f64 / ranks as f64;
        let ring = self.scenario.model.sp_exchange == SpExchange::Ring;
        let pattern = if ring {
            Pattern::Ring
        } else {
            Pattern::AllGather
        };
        let collective = &mut self.units[unit as usize].collective;
        let source = core::iter::repeat_n(shard, ranks);
        let sink = core::iter::repeat_n(1.0, ranks);
        collective.exchange.set(&self.layout, pattern, source, sink);
        if ring {
            self.start_collective(unit, delay + Span(takes), Span::ZERO);
        } else {
            self.start_collective(unit, delay, Span(takes));
        }
    }

    /// A unit's step has come to its end.
    pub(super) fn step_ended(&mut self, unit: u32, step: u32) {
        if self.units[unit as usize].steps != step || !self.end_collective(unit) {
            return;
        }
        match self.units[unit as usize].step {
            Step::Attention => self.after_attention(unit),
            Step::Experts => {
                self.units[unit as usize].step = Step::Combine;
                let slot = self.running(unit);
                self.set_exchange(unit, slot, Pattern::Combine);
                self.start_collective(unit, Span::ZERO, Span::ZERO);
            }
            Step::Combine | Step::Mlp => self.next_layer(unit),
            Step::Head => self.finish_batch(unit),
            Step::Idle | Step::Stalled => unreachable!("nothing is scheduled for an idle unit"),
        }
    }

    fn after_attention(&mut self, unit: u32) {
        let slot = self.running(unit);
        let batch = &self.batches[slot as usize];
        if self.model.experts <= 1 {
            self.units[unit as usize].step = Step::Mlp;
            let most = batch.tokens.iter().copied().max().unwrap_or(0);
            let ranks = u64::from(self.layout.ranks_per_unit);
            let takes = self.compute.mlp_ns(if self.striped {
                most.div_ceil(ranks)
            } else {
                most
            });
            self.batches[slot as usize].computed_ns += takes;
            self.schedule_step(unit, self.now + Span(takes));
        } else if self.layout.ranks_per_unit == 1 || self.striped || self.scenario.model.ep == 1 {
            self.units[unit as usize].step = Step::Mlp;
            let takes = self.experts_ns(unit, slot) + self.shared_ns(slot);
            self.batches[slot as usize].computed_ns += takes;
            self.schedule_step(unit, self.now + Span(takes));
        } else {
            self.units[unit as usize].step = Step::Experts;
            self.set_exchange(unit, slot, Pattern::Dispatch);
            // The shared expert needs nothing of the others: it computes while tokens travel.
            let shared = Span(self.shared_ns(slot));
            let takes = Span(self.experts_ns(unit, slot));
            self.start_collective(unit, shared, takes);
        }
        self.send_layer(slot);
    }

    fn shared_ns(&self, slot: u32) -> u64 {
        let most = self.batches[slot as usize].tokens.iter().copied().max();
        let most = most.unwrap_or(0);
        let ranks = u64::from(self.layout.ranks_per_unit);
        self.compute.shared_ns(if self.striped {
            most.div_ceil(ranks)
        } else {
            most
        })
    }

    /// What the layer computed, and what was reused, goes to the decode ranks.
    fn send_layer(&mut self, slot: u32) {
        let layer = self.batches[slot as usize].layer;
        for index in 0..self.batches[slot as usize].members.len() {
            let batch = &self.batches[slot as usize];
            let member = batch.members[index];
            let request = &self.requests[member.request as usize];
            let tokens = member.tokens + if member.first { request.reused } else { 0 };
            let bytes = self.layer_bytes(layer, tokens, member.last);
            if bytes == 0 {
                continue;
            }
            let (rank, to) = (request.rank, To::Decode(request.decode));
            let alike = batch.seats[self.seat(member.request)];
            let stripes = if self.striped {
                self.layout.ranks_per_unit
            } else {
                1
            };
            let unit = self.layout.unit_of(rank);
            for n in 0..stripes {
                let from = if self.striped {
                    self.layout.ranks_of(unit).start + n
                } else {
                    rank
                };
                self.requests[member.request as usize].last_stage_left += 1;
                self.batches[slot as usize].last_stage_left += 1;
                let id = (member.request, slot, layer);
                self.submit(id, from, to, bytes / u64::from(stripes), alike);
            }
        }
    }

    fn next_layer(&mut self, unit: u32) {
        let slot = self.running(unit);
        let batch = &mut self.batches[slot as usize];
        batch.layer += 1;
        if batch.layer < self.layers {
            if batch.layer.is_multiple_of(self.layers.div_ceil(4)) {
                self.report_quarter(slot);
            }
            self.begin_layer(unit);
            return;
        }
        batch.layer = self.layers - 1;
        let requests = batch.members.len() as u64;
        let most = batch.tokens.iter().copied().max().unwrap_or(0);
        let takes = self.compute.ends_ns(most, requests) / 2;
        batch.computed_ns += takes;
        self.units[unit as usize].step = Step::Head;
        self.schedule_step(unit, self.now + Span(takes));
    }

    fn finish_batch(&mut self, unit: u32) {
        let now = self.now;
        let slot = self.running(unit);
        self.batches[slot as usize].finished = true;
        self.tell_boundary(slot);
        self.measure
            .computed(self.batches[slot as usize].computed_ns);
        self.units[unit as usize].current = None;
        self.units[unit as usize].step = Step::Idle;
        self.tell_lines(unit, slot);
        for index in 0..self.batches[slot as usize].members.len() {
            let batch = &self.batches[slot as usize];
            let member = batch.members[index];
            let spent = (batch.stalled_ns, batch.collective_ns, batch.computed_ns);
            let request = &mut self.requests[member.request as usize];
            request.stalled_ns += spent.0;
            request.collective_ns += spent.1;
            request.computed_ns += spent.2;
            let rank = request.rank as usize;
            self.router.queued[rank] -= u64::from(member.tokens);
            if member.last {
                request.prefilled = Some(now);
                self.keep_blocks(member.request);
                self.try_end(member.request);
            }
        }
        if let Some(next) = self.units[unit as usize].next {
            self.batches[next as usize].ahead = None;
        }
        self.retire(slot);
        self.start_batch(unit);
    }

    /// The disciplines of a unit hear of what it has computed.
    fn tell_lines(&mut self, unit: u32, slot: u32) {
        let batch = &self.batches[slot as usize];
        let took = batch.started.map_or(Span::ZERO, |at| self.now.since(at));
        for seat in 0..self.units[unit as usize].lines.len() {
            let members = batch.members.iter();
            let finished: Vec<u32> = members
                .filter(|member| member.last && self.seat(member.request) == seat)
                .map(|member| member.request)
                .collect();
            self.units[unit as usize].lines[seat].done(self.now, took, &finished);
        }
    }

    /// A stage-3 flow is there.
    pub(super) fn layer_arrived(&mut self, request: u32, slot: u32) {
        let now = self.now;
        let state = &mut self.requests[request as usize];
        state.last_stage_left -= 1;
        state.last_arrival = now;
        self.try_end(request);
        self.batches[slot as usize].last_stage_left -= 1;
        self.retire(slot);
    }

    /// Forgets a batch of which nothing is left.
    fn retire(&mut self, slot: u32) {
        let now = self.now;
        let batch = &mut self.batches[slot as usize];
        if !batch.finished || batch.last_stage_left > 0 {
            return;
        }
        let id = batch.policy_id();
        for host in core::mem::take(&mut batch.hosts) {
            self.hosts.forget(host, now, id);
        }
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.handle(now, AdmissionEvent::BatchDeparted { batch: id });
            self.schedule_order();
        }
        self.batches[slot as usize].finished = false;
        self.free_batches.push(slot);
    }

    /// The pattern of this layer's exchange.
    fn set_exchange(&mut self, unit: u32, slot: u32, pattern: Pattern) {
        let batch = &self.batches[slot as usize];
        let activation = self.activation_bytes;
        let source = batch
            .tokens
            .iter()
            .map(|&tokens| tokens as f64 * activation);
        let at = unit as usize * usize::from(self.layers) + usize::from(batch.layer);
        let copies = &self.experts[at].copies;
        let collective = &mut self.units[unit as usize].collective;
        collective
            .exchange
            .set(&self.layout, pattern, source, copies.iter().copied());
    }
}
