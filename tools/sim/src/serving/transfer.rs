//! Transfers of KV cache: from the unit that holds a block, and to the decode rank.
//!
//! A flow is one request's part of one layer. Where daemons decide it gets its permits in chunks,
//! and is on the network with one chunk at a time, as a queue pair would send it.

use laxity_policy::{Action, Event, FlowId, FlowSpec, Layer, Level, RequestId, Span, Stage, Time};

use super::collective::rank_of_flow;
use super::event::Happening;
use super::hosts::{Hosts, Regime};
use super::world::{Tag, World};
use crate::network::PortId;

/// Where a flow ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum To {
    Rank(u32),
    Decode(u32),
}

/// One flow.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flow {
    pub(super) request: u32,
    pub(super) batch: u32,
    pub(super) layer: u16,
    pub(super) stage: Stage,
    pub(super) from: u32,
    pub(super) to: To,
    /// Bytes that are not there yet.
    pub(super) left: u64,
    /// Permitted and not on the network.
    pub(super) unsent: u64,
    /// On the network.
    pub(super) sending: u64,
    pub(super) level: Level,
    pub(super) weight: f32,
    /// The link forgot it: its bytes are landed.
    pub(super) at_once: bool,
    /// Tells the flows of a slot apart.
    pub(super) generation: u32,
}

impl Flow {
    /// As links know it.
    pub(super) const fn id(&self, slot: u32) -> FlowId {
        FlowId((self.generation as u64) << 32 | slot as u64)
    }

    #[cfg(test)]
    pub(super) const fn weight(&self) -> f32 {
        self.weight
    }
}

/// Which host decides over the flow: the one that posts it.
pub(super) const fn host_of(flow: &Flow) -> u32 {
    match flow.to {
        To::Rank(reader) => Hosts::ingress(reader),
        To::Decode(_) => Hosts::egress(flow.from),
    }
}

impl World<'_> {
    /// Starts a flow of `bytes`; `alike` flows of its batch, stage and layer share its ports.
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
        let (slot, generation) = self.free_flow();
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
            generation,
        };
        let inside = match to {
            To::Rank(reader) => self.layout.server_of(from) == self.layout.server_of(reader),
            To::Decode(_) => false,
        };
        self.flows[slot as usize] = Some(flow);
        if inside || self.regime == Regime::Alone {
            let at = if inside {
                let takes = bytes as f64 / self.layout.nvlink_rate * 1e9;
                self.now + Span(takes.ceil() as u64)
            } else {
                self.alone_until(request, to, bytes)
            };
            self.agenda.push(at, Happening::Delivered { flow: slot });
            return;
        }
        match stage {
            Stage::KvReuse => self.bytes.kv_reuse += bytes,
            _ => self.bytes.p2d += bytes,
        }
        if self.regime == Regime::Static {
            let level = self.static_level(stage);
            let flow = self.flow_mut(slot);
            (flow.level, flow.unsent) = (level, bytes);
            self.send(slot);
        } else {
            self.ask(slot);
        }
    }

    /// A slot for a flow, and what tells it from those that had the slot before.
    pub(super) fn free_flow(&mut self) -> (u32, u32) {
        let slot = self.free_flows.pop().unwrap_or_else(|| {
            self.flows.push(None);
            (self.flows.len() - 1) as u32
        });
        self.flow_generation = self.flow_generation.wrapping_add(1) & 0x7fff_ffff;
        (slot, self.flow_generation)
    }

    /// When all of a flow has to be there.
    pub(super) fn due(&self, flow: &Flow) -> Time {
        self.requests[flow.request as usize].due()
    }

    /// Weight of one of `alike` flows.
    fn weight_of(&self, stage: Stage, alike: u32) -> f32 {
        let flows = if self.coflows { alike.max(1) } else { 1 };
        let weight = match stage {
            Stage::P2d => self.scenario.network.p2d_weight,
            _ => 1.0,
        };
        (weight / f64::from(flows)) as f32
    }

    /// When `bytes` of a request have come that meet nothing but others of the same request.
    fn alone_until(&mut self, request: u32, to: To, bytes: u64) -> Time {
        let stripes = if self.striped {
            f64::from(self.layout.ranks_per_unit)
        } else {
            1.0
        };
        let all = self.layout.rank_rate * stripes;
        let request = &mut self.requests[request as usize];
        let (busy, rate) = match to {
            To::Rank(_) => (&mut request.fetching_until, all),
            To::Decode(_) => (&mut request.sending_until, all.min(self.layout.decode_rate)),
        };
        let takes = Span((bytes as f64 / rate * 1e9).ceil() as u64);
        *busy = self.now.max(*busy) + takes;
        *busy
    }

    pub(super) fn flow_mut(&mut self, slot: u32) -> &mut Flow {
        self.flows[slot as usize]
            .as_mut()
            .expect("the slot of a living flow")
    }

    /// Asks the host for leave.
    fn ask(&mut self, slot: u32) {
        let now = self.now;
        let flow = *self.flow_mut(slot);
        let host = host_of(&flow);
        let request = &self.requests[flow.request as usize];
        let spec = FlowSpec {
            flow: flow.id(slot),
            stage: flow.stage,
            batch: self.batches[flow.batch as usize].policy_id(),
            request: RequestId(u64::from(flow.request) + 1),
            layer: Layer(if self.without_layers && flow.stage == Stage::KvReuse {
                0
            } else {
                flow.layer
            }),
            bytes: flow.left,
            deadline: self.due(&flow),
            receiver_bound: self.receiver_bound,
            whole: false,
        };
        let request_pruned = request.pruned || request.relegated;
        // A collective that was counted on has the port: the host has to know before it decides.
        if let To::Decode(_) = flow.to {
            let port = self.layout.egress(flow.from);
            self.make_room_for(&[port], None);
        }
        if flow.stage == Stage::KvReuse {
            self.tell(host, flow.batch);
        }
        if request_pruned {
            self.tell_order(host);
        }
        if let Some(permit) = self.hosts.permit_at_once(host, now, &spec) {
            let flow = self.flow_mut(slot);
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

    /// Puts what is permitted on the network, if nothing of the flow is.
    pub(super) fn send(&mut self, slot: u32) {
        let flow = *self.flow_mut(slot);
        if flow.sending > 0 || flow.unsent == 0 {
            return;
        }
        let (ports, count) = match flow.to {
            To::Rank(reader) => self.layout.between(flow.from, reader),
            To::Decode(decode) => self.layout.to_decode(flow.from, decode),
        };
        let ports: &[PortId] = &ports[..count];
        self.make_room_for(ports, None);
        let class = self.hosts.class(flow.level);
        let weight = f64::from(flow.weight);
        let tag = Tag::Flow(slot).pack();
        self.network
            .start(self.now, ports, flow.unsent, class, weight, tag);
        let flow = self.flow_mut(slot);
        flow.sending = flow.unsent;
        flow.unsent = 0;
    }

    /// A chunk has left the network.
    pub(super) fn sent(&mut self, slot: u32) {
        let now = self.now;
        let regime = self.regime;
        let flow = self.flow_mut(slot);
        let bytes = core::mem::take(&mut flow.sending);
        flow.left -= bytes;
        let flow = *flow;
        if regime == Regime::Daemons {
            let host = host_of(&flow);
            if flow.at_once {
                self.hosts.land(host, now, flow.level, bytes);
            } else {
                let flow = flow.id(slot);
                self.hosts
                    .handle(host, now, Event::BytesCompleted { flow, bytes });
            }
        }
        self.send(slot);
        if flow.left == 0 {
            self.delivered(slot);
        }
        if regime == Regime::Daemons {
            self.poll(host_of(&flow));
        }
    }

    /// All of a flow is there.
    pub(super) fn delivered(&mut self, slot: u32) {
        let flow = self.flows[slot as usize]
            .take()
            .expect("the slot of a living flow");
        self.free_flows.push(slot);
        match flow.stage {
            Stage::KvReuse => self.blocks_arrived(flow.batch, flow.layer),
            Stage::Weights => self.weights_arrived(flow.batch),
            _ => self.layer_arrived(flow.request, flow.batch),
        }
    }

    /// Does what the host's link says, and asks to be called again when it wants to be.
    pub(super) fn poll(&mut self, host: u32) {
        if !self.hosts.waits(host) {
            return;
        }
        let now = self.now;
        self.tell_order(host);
        while let Some(action) = self.hosts.poll(host, now) {
            let Action::Permit {
                flow, bytes, level, ..
            } = action
            else {
                continue;
            };
            if let Some(rank) = rank_of_flow(flow) {
                self.permitted_collective(rank, level, bytes);
                continue;
            }
            let slot = flow.0 as u32;
            let flow = self.flow_mut(slot);
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

    /// Tells a host's link of a batch.
    pub(super) fn tell(&mut self, host: u32, slot: u32) {
        let now = self.now;
        let batch = &self.batches[slot as usize];
        if batch.ahead.is_some()
            && let Some(current) = self.units[batch.unit as usize].current
            && current != slot
        {
            // What it waits behind, or the link would not know how long.
            self.tell(host, current);
        }
        let batch = &mut self.batches[slot as usize];
        let progress = batch.progress(self.layers);
        if !self.hosts.tell(host, now, &progress) {
            return;
        }
        batch.hosts.push(host);
        let rank = host / 2;
        for member in &batch.members {
            let request = &self.requests[member.request as usize];
            if self.striped || request.rank == rank {
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
        let Some(coordinator) = &self.coordinator else {
            return;
        };
        if self.hosts.lacks_order(host, coordinator.epoch()) {
            let order = coordinator.order_for(self.hosts.batches(host));
            self.hosts.tell_order(host, self.now, order);
        }
    }

    /// Runs the order between batches, and has the hosts where something waits decide anew.
    pub(super) fn run_order(&mut self) {
        let now = self.now;
        let Some(coordinator) = &mut self.coordinator else {
            return;
        };
        let Some(pruned) = coordinator.run(now) else {
            return;
        };
        for request in pruned {
            self.requests[request.0 as usize - 1].pruned = true;
        }
        for host in 0..2 * self.layout.ranks {
            self.poll(host);
        }
    }

    /// What the coordinator has been told may want a run.
    pub(super) fn schedule_order(&mut self) {
        if let Some(at) = self
            .coordinator
            .as_mut()
            .and_then(super::order::Coordinator::next_due)
        {
            self.agenda.push(at.max(self.now), Happening::Order);
        }
    }
}
