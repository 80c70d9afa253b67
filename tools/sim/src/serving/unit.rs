//! A prefill unit computes its batches layer by layer. The module `filling` chooses their requests.

use laxity_policy::admission::AdmissionEvent;
use laxity_policy::{Span, Time};

use super::batch::Step;
use super::collective::Collective;
use super::exchange::Pattern;
use super::flow::To;
use super::hosts::Regime;
use super::line::WaitingRequests;
use super::world::World;

#[derive(Debug, Default)]
pub(super) struct PrefillUnit {
    /// Requests that wait for room in a batch, by rank. With sequence parallelism, all have rank 0.
    pub(super) lines: Vec<WaitingRequests>,
    pub(super) current: Option<u32>,
    pub(super) next: Option<u32>,
    pub(super) step: Step,
    pub(super) steps: u32,
    pub(super) since: Time,
    pub(super) collective: Collective,
}

impl World<'_> {
    pub(super) fn fetch_ahead(&mut self, slot: u32) {
        let lookahead = self.setup.scenario.serving.lookahead_layers;
        let batch = &self.batches[slot];
        let first = batch.fetched;
        let until = batch.layer.saturating_add(lookahead.max(1)).min(self.setup.layers);
        if first >= until {
            return;
        }
        self.batches[slot].fetched = until;
        for layer in first..until {
            for index in 0..self.batches[slot].members.len() {
                let member = self.batches[slot].members[index];
                if member.first {
                    self.fetch(slot, member.request, layer);
                }
            }
        }
    }

    pub(super) fn fetch(&mut self, slot: u32, request: u32, layer: u16) {
        let state = &self.requests[request as usize];
        let (first, count, rank) = (state.first_source, state.sources, state.rank);
        let alike = if self.setup.coflows { self.fetches_at(slot, self.seat(request)) } else { 1 };
        for at in first..first + count {
            let (from, tokens) = self.sources[at as usize];
            // Linear attention continues from its state after the last reused token.
            let bytes = self.setup.layer_bytes(layer, tokens, at + 1 == first + count);
            if bytes == 0 {
                continue;
            }
            let (readers, holders) = (self.setup.ranks_for(rank), self.setup.ranks_for(from));
            if readers == holders {
                continue;
            }
            let bytes = bytes / self.setup.stripes();
            for (from, to) in holders.zip(readers) {
                self.batches[slot].reuse_left[usize::from(layer)] += 1;
                self.submit((request, slot, layer), from, To::Rank(to), bytes, alike);
            }
        }
    }

    fn fetches_at(&self, slot: u32, seat: usize) -> u32 {
        let members = &self.batches[slot].members;
        let here =
            members.iter().filter(|member| member.first && self.seat(member.request) == seat);
        here.map(|member| self.requests[member.request as usize].sources).sum()
    }

    pub(super) fn blocks_arrived(&mut self, slot: u32, layer: u16) {
        let complete = self.now + self.setup.latency;
        let batch = &mut self.batches[slot];
        batch.reuse_left[usize::from(layer)] -= 1;
        batch.reuse_complete[usize::from(layer)] = complete;
        let unit = batch.unit;
        let state = &self.units[unit as usize];
        let waits = state.current == Some(slot) && state.step == Step::Stalled;
        if waits && layer == batch.layer && batch.reuse_left[usize::from(layer)] == 0 {
            batch.stalled_ns += self.now.since(state.since).0;
            self.start_attention(unit, self.setup.latency);
        }
    }

    pub(super) fn start_batch(&mut self, unit: u32) {
        let now = self.now;
        if self.measure.relegated > 0 {
            self.fill_up(unit);
        }
        let Some(slot) = self.units[unit as usize].next else { return };
        if self.batches[slot].members.is_empty() {
            return;
        }
        let state = &mut self.units[unit as usize];
        state.current = Some(slot);
        state.next = None;
        let batch = &mut self.batches[slot];
        batch.started = Some(now);
        let id = batch.policy_id();
        self.measure.batch(batch.members.len());
        for member in batch.members.iter().filter(|member| member.first) {
            self.requests[member.request as usize].started = now;
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
        let batch = &self.batches[slot];
        if batch.reuse_left[usize::from(batch.layer)] > 0 {
            let now = self.now;
            let state = &mut self.units[unit as usize];
            (state.step, state.since) = (Step::Stalled, now);
            return;
        }
        // Blocks that have just arrived are not complete yet.
        let complete = batch.reuse_complete[usize::from(batch.layer)];
        self.start_attention(unit, complete.since(self.now));
    }

    pub(super) fn running(&self, unit: u32) -> u32 {
        self.units[unit as usize].current.expect("a unit with a step has a batch")
    }

    fn tell_boundary(&mut self, slot: u32) {
        if self.setup.regime != Regime::Daemons {
            return;
        }
        for at in 0..self.batches[slot].hosts.len() {
            let host = self.batches[slot].hosts[at];
            if self.hosts.waits(host) {
                self.tell(host, slot);
                self.poll(host);
            }
        }
    }

    fn start_attention(&mut self, unit: u32, delay: Span) {
        let slot = self.running(unit);
        self.units[unit as usize].step = Step::Attention;
        let batch = &self.batches[slot];
        let kind = usize::from(self.setup.kv_bytes[usize::from(batch.layer)] == 0);
        let mut takes = batch.attention_ns[kind];
        if batch.layer == 0 {
            takes += self.ends_ns(slot) / 2;
        }
        let per_token = self.setup.kv_bytes[usize::from(batch.layer)];
        if !self.setup.striped || self.setup.layout.ranks_per_unit == 1 || per_token == 0 {
            self.batches[slot].computed_ns += takes;
            self.schedule_step(unit, self.now + delay + Span(takes));
            return;
        }
        // Every rank's queries attend to the keys of the whole context.
        let ranks = self.setup.layout.ranks_per_unit as usize;
        let shard = (batch.context * per_token) as f64 / ranks as f64;
        let collective = &mut self.units[unit as usize].collective;
        let source = core::iter::repeat_n(shard, ranks);
        let sink = core::iter::repeat_n(1.0, ranks);
        collective.exchange.set(&self.setup.layout, Pattern::Ring, source, sink);
        self.start_collective(unit, delay + Span(takes), Span::ZERO);
    }

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
        let batch = &self.batches[slot];
        let (setup, tokens) = (&self.setup, self.setup.share(batch.most_tokens()));
        let has_experts = setup.model.experts > 1;
        let shared = if has_experts { setup.compute.shared_ns(tokens) } else { 0 };
        let own = if has_experts { setup.experts_ns(batch) } else { setup.compute.mlp_ns(tokens) };
        if has_experts && setup.scenario.model.ep > 1 {
            self.units[unit as usize].step = Step::Experts;
            self.set_exchange(unit, slot, Pattern::Dispatch);
            // The shared expert needs no exchange, so it computes while tokens are sent.
            self.start_collective(unit, Span(shared), Span(own));
        } else {
            self.units[unit as usize].step = Step::Mlp;
            self.batches[slot].computed_ns += own + shared;
            self.schedule_step(unit, self.now + Span(own + shared));
        }
        self.send_layer(slot);
    }

    fn ends_ns(&self, slot: u32) -> u64 {
        let batch = &self.batches[slot];
        self.setup.compute.ends_ns(batch.most_tokens(), batch.members.len() as u64)
    }

    fn send_layer(&mut self, slot: u32) {
        let layer = self.batches[slot].layer;
        for index in 0..self.batches[slot].members.len() {
            let batch = &self.batches[slot];
            let member = batch.members[index];
            let request = &self.requests[member.request as usize];
            let tokens = member.tokens + if member.first { request.reused } else { 0 };
            let bytes = self.setup.layer_bytes(layer, tokens, member.last);
            if bytes == 0 {
                continue;
            }
            let (rank, to) = (request.rank, To::Decode(request.decode));
            let alike = batch.seats[self.seat(member.request)];
            for from in self.setup.ranks_for(rank) {
                self.requests[member.request as usize].last_stage_left += 1;
                self.batches[slot].last_stage_left += 1;
                let id = (member.request, slot, layer);
                self.submit(id, from, to, bytes / self.setup.stripes(), alike);
            }
        }
    }

    fn next_layer(&mut self, unit: u32) {
        let slot = self.running(unit);
        let batch = &mut self.batches[slot];
        batch.layer += 1;
        if batch.layer < self.setup.layers {
            if batch.layer.is_multiple_of(self.setup.layers.div_ceil(4)) {
                self.report_quarter(slot);
            }
            self.begin_layer(unit);
            return;
        }
        batch.layer = self.setup.layers - 1;
        let takes = self.ends_ns(slot) / 2;
        self.batches[slot].computed_ns += takes;
        self.units[unit as usize].step = Step::Head;
        self.schedule_step(unit, self.now + Span(takes));
    }

    fn finish_batch(&mut self, unit: u32) {
        let now = self.now;
        let slot = self.running(unit);
        self.batches[slot].finished = true;
        self.tell_boundary(slot);
        let batch = &self.batches[slot];
        let took = batch.started.map_or(Span::ZERO, |at| now.since(at));
        self.measure.finished(took, batch.computed_ns);
        self.units[unit as usize].current = None;
        self.units[unit as usize].step = Step::Idle;
        self.tell_lines(unit, slot);
        for index in 0..self.batches[slot].members.len() {
            let batch = &self.batches[slot];
            let member = batch.members[index];
            let spent = (batch.stalled_ns, batch.collective_ns, batch.computed_ns);
            let request = &mut self.requests[member.request as usize];
            request.stalled_ns += spent.0;
            request.collective_ns += spent.1;
            request.computed_ns += spent.2;
            let rank = request.rank;
            self.router.queued[rank as usize] -= u64::from(member.tokens);
            if member.last {
                request.prefilled = Some(now);
                self.prefixes.keep_blocks(&self.setup, member.request, rank);
                self.try_end(member.request);
            }
        }
        if let Some(next) = self.units[unit as usize].next {
            self.batches[next].ahead = None;
        }
        self.retire(slot);
        self.start_batch(unit);
    }

    fn tell_lines(&mut self, unit: u32, slot: u32) {
        let batch = &self.batches[slot];
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

    pub(super) fn layer_arrived(&mut self, request: u32, slot: u32) {
        let now = self.now;
        let state = &mut self.requests[request as usize];
        state.last_stage_left -= 1;
        state.last_arrival = now;
        self.try_end(request);
        self.batches[slot].last_stage_left -= 1;
        self.retire(slot);
    }

    fn retire(&mut self, slot: u32) {
        let now = self.now;
        let batch = &mut self.batches[slot];
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
        self.batches.close(slot);
    }

    fn set_exchange(&mut self, unit: u32, slot: u32, pattern: Pattern) {
        let batch = &self.batches[slot];
        let activation = self.setup.activation_bytes;
        let ranks = self.setup.layout.ranks_per_unit as usize;
        // A striped unit has one line, whose tokens are spread evenly over its ranks.
        let (lines, share) =
            if self.setup.striped { (ranks, activation / ranks as f64) } else { (1, activation) };
        let tokens = batch.tokens.iter().flat_map(|tokens| core::iter::repeat_n(tokens, lines));
        let source = tokens.map(|&tokens| tokens as f64 * share);
        let copies = &self.setup.expert_use(unit, batch.layer).copies;
        let collective = &mut self.units[unit as usize].collective;
        collective.exchange.set(&self.setup.layout, pattern, source, copies.iter().copied());
    }
}
