//! Transfers of KV cache: from the unit that holds a block, and to the decode rank.
//!
//! A flow is one request's part of one layer. With daemons it gets permits in chunks, and one chunk
//! at a time is on the network, as with a queue pair.

use laxity_policy::{Action, Event, FlowSpec, Layer, Level, PeerId, RequestId, Span, Stage, Time};

use super::collective::rank_of_flow;
use super::event::Happening;
use super::flow::{Flow, To, host_of};
use super::hosts::Regime;
use super::world::{Tag, World};
use crate::network::{NewTransfer, PortId};

impl World<'_> {
    /// Starts a flow of `bytes`. The `alike` flows of its batch, stage and layer share its ports.
    pub(super) fn submit(
        &mut self,
        (request, batch, layer): (u32, u32, u16),
        from: u32,
        to: To,
        bytes: u64,
        alike: u32,
    ) {
        let stage = match to {
            To::Rank(_) => Stage::KvReuse,
            To::Decode(_) => Stage::P2d,
        };
        let flow = Flow {
            request,
            batch,
            layer,
            stage,
            from,
            to,
            left: bytes,
            unsent: 0,
            sending: 0,
            level: Level::SCAVENGER,
            weight: self.weight_of(stage, alike),
            at_once: false,
            generation: 0,
        };
        let slot = self.flows.add(flow);
        let layout = &self.setup.layout;
        let inside = matches!(to, To::Rank(at) if layout.server_of(from) == layout.server_of(at));
        if inside || self.setup.regime == Regime::Alone {
            let at = if inside {
                let takes = bytes as f64 / layout.nvlink_rate * 1e9;
                self.now + Span(takes.ceil() as u64)
            } else {
                self.alone_until(request, to, bytes)
            };
            self.agenda.push(at, Happening::Delivered { flow: slot });
            return;
        }
        match stage {
            Stage::KvReuse => self.measure.bytes.kv_reuse += bytes,
            _ => self.measure.bytes.p2d += bytes,
        }
        match self.setup.regime {
            Regime::Static => {
                let level = self.static_level(stage);
                let flow = self.flows.get_mut(slot);
                (flow.level, flow.unsent) = (level, bytes);
                self.send(slot);
            }
            Regime::Grants => self.open(slot),
            _ => self.ask(slot),
        }
    }

    pub(super) fn due(&self, flow: &Flow) -> Time {
        self.requests[flow.request as usize].due()
    }

    fn weight_of(&self, stage: Stage, alike: u32) -> f32 {
        let flows = if self.setup.coflows { alike.max(1) } else { 1 };
        let weight = match stage {
            Stage::P2d => self.setup.scenario.network.p2d_weight,
            _ => 1.0,
        };
        (weight / f64::from(flows)) as f32
    }

    /// Returns when `bytes` of a request arrive if they contend only with the same request.
    fn alone_until(&mut self, request: u32, to: To, bytes: u64) -> Time {
        let all = self.setup.layout.rank_rate * self.setup.stripes() as f64;
        let request = &mut self.requests[request as usize];
        let (busy, rate) = match to {
            To::Rank(_) => (&mut request.fetching_until, all),
            To::Decode(_) => (&mut request.sending_until, all.min(self.setup.layout.decode_rate)),
        };
        let takes = Span((bytes as f64 / rate * 1e9).ceil() as u64);
        *busy = self.now.max(*busy) + takes;
        *busy
    }

    /// Returns the number of the rank at the other end, as links know it. Links know the decode
    /// rank of a P2D flow, and the rank that KV reuse is read from. Ranks beyond the range are
    /// unknown.
    pub(super) fn peer_of(&self, flow: &Flow) -> PeerId {
        let number = match flow.to {
            To::Rank(_) => flow.from + 1,
            To::Decode(decode) => self.setup.layout.ranks + decode + 1,
        };
        PeerId(u16::try_from(number).unwrap_or(0))
    }

    fn ask(&mut self, slot: u32) {
        let now = self.now;
        let flow = *self.flows.get_mut(slot);
        let host = host_of(&flow);
        let request = &self.requests[flow.request as usize];
        let spec = FlowSpec {
            flow: flow.id(slot),
            stage: flow.stage,
            batch: self.batches[flow.batch].policy_id(),
            request: RequestId(u64::from(flow.request) + 1),
            layer: Layer(if self.setup.without_layers && flow.stage == Stage::KvReuse {
                0
            } else {
                flow.layer
            }),
            bytes: flow.left,
            deadline: self.due(&flow),
            peer: self.peer_of(&flow),
            whole: false,
        };
        let request_pruned = request.pruned || request.relegated;
        // The host must account for a collective with a computed end before it decides.
        if let To::Decode(_) = flow.to {
            let port = self.setup.layout.egress(flow.from);
            self.make_room_for(&[port], None);
        }
        if flow.stage == Stage::KvReuse {
            self.tell(host, flow.batch);
        }
        if request_pruned {
            self.tell_order(host);
        }
        if let Some(permit) = self.hosts.permit_at_once(host, now, &spec) {
            let flow = self.flows.get_mut(slot);
            flow.at_once = true;
            flow.level = permit.level;
            flow.unsent = permit.bytes;
            self.send(slot);
            return;
        }
        self.tell(host, flow.batch);
        self.hosts.handle(host, now, Event::FlowArrived(spec));
        self.poll(host);
    }

    /// Puts the permitted bytes of a flow on the network, unless some are there already.
    pub(super) fn send(&mut self, slot: u32) {
        let flow = *self.flows.get_mut(slot);
        if flow.sending > 0 || flow.unsent == 0 {
            return;
        }
        let (ports, count) = match flow.to {
            To::Rank(reader) => self.setup.layout.between(flow.from, reader),
            To::Decode(decode) => self.setup.layout.to_decode(flow.from, decode),
        };
        let ports: &[PortId] = &ports[..count];
        self.make_room_for(ports, None);
        let class = self.hosts.class(flow.level);
        let weight = f64::from(flow.weight);
        let tag = Tag::Flow(slot).pack();
        self.network.start(self.now, ports, NewTransfer { bytes: flow.unsent, class, weight, tag });
        let flow = self.flows.get_mut(slot);
        flow.sending = flow.unsent;
        flow.unsent = 0;
    }

    pub(super) fn sent(&mut self, slot: u32) {
        let now = self.now;
        let regime = self.setup.regime;
        let flow = self.flows.get_mut(slot);
        let bytes = core::mem::take(&mut flow.sending);
        flow.left -= bytes;
        let flow = *flow;
        if regime == Regime::Daemons {
            let host = host_of(&flow);
            if flow.at_once {
                let peer = self.peer_of(&flow);
                self.hosts.remove_in_flight_to(host, now, peer, flow.level, bytes);
            } else {
                let flow = flow.id(slot);
                self.hosts.handle(host, now, Event::BytesCompleted { flow, bytes });
            }
        }
        if regime == Regime::Grants {
            self.granted_arrived(slot);
        }
        self.send(slot);
        if flow.left == 0 {
            self.delivered(slot);
        }
        if regime == Regime::Daemons {
            self.poll(host_of(&flow));
        }
    }

    pub(super) fn delivered(&mut self, slot: u32) {
        let flow = self.flows.take(slot);
        match flow.stage {
            Stage::KvReuse => self.blocks_arrived(flow.batch, flow.layer),
            _ => self.layer_arrived(flow.request, flow.batch),
        }
    }

    pub(super) fn poll(&mut self, host: u32) {
        if !self.hosts.waits(host) {
            return;
        }
        let now = self.now;
        self.tell_order(host);
        while let Some(action) = self.hosts.poll(host, now) {
            let Action::Permit { flow, bytes, level, .. } = action else { continue };
            if let Some(rank) = rank_of_flow(flow) {
                self.permitted_collective(rank, level, bytes);
                continue;
            }
            let slot = flow.0 as u32;
            let flow = self.flows.get_mut(slot);
            flow.level = level;
            flow.unsent += bytes;
            self.send(slot);
        }
        if self.hosts.waits(host)
            && let Some(at) = self.hosts.next_wake(host, now)
        {
            self.agenda.push(at, Happening::Wake { host });
        }
    }

    pub(super) fn tell(&mut self, host: u32, slot: u32) {
        let now = self.now;
        let batch = &self.batches[slot];
        if batch.ahead.is_some()
            && let Some(current) = self.units[batch.unit as usize].current
            && current != slot
        {
            // The link also needs the batch that computes before, to know how long this one waits.
            self.tell(host, current);
        }
        let batch = &mut self.batches[slot];
        let progress = batch.progress(self.setup.layers);
        if !self.hosts.tell(host, now, &progress) {
            return;
        }
        batch.hosts.push(host);
        let rank = host / 2;
        for member in &batch.members {
            let request = &self.requests[member.request as usize];
            if self.setup.striped || request.rank == rank {
                let event = Event::RequestJoined {
                    batch: batch.policy_id(),
                    request: RequestId(u64::from(member.request) + 1),
                    deadline: request.due(),
                    bytes: 0,
                };
                self.hosts.handle(host, now, event);
            }
        }
    }

    fn tell_order(&mut self, host: u32) {
        let Some(coordinator) = &self.coordinator else { return };
        if self.hosts.lacks_order(host, coordinator.epoch()) {
            let order = coordinator.order_for(self.hosts.batches(host));
            self.hosts.tell_order(host, self.now, order);
        }
    }

    pub(super) fn run_order(&mut self) {
        let now = self.now;
        let Some(coordinator) = &mut self.coordinator else { return };
        let Some(pruned) = coordinator.run(now) else { return };
        for request in pruned {
            self.requests[request.0 as usize - 1].pruned = true;
        }
        for host in 0..2 * self.setup.layout.ranks {
            self.poll(host);
        }
    }

    pub(super) fn schedule_order(&mut self) {
        if let Some(at) = self.coordinator.as_mut().and_then(super::order::Coordinator::next_due) {
            self.agenda.push(at.max(self.now), Happening::Order);
        }
    }
}
