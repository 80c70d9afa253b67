//! Scale-outs beside the traffic: at intervals the weights of a unit are sent to the next one, rank
//! by rank, as `Weights` flows (in the scavenger, if the policy has one).
//!
//! Only the effect on the network is modelled. Both units serve requests meanwhile, as if the
//! weights were for another instance on the same servers, and no unit serves more afterwards.

use laxity_policy::{BatchId, Event, FlowSpec, Layer, Level, RequestId, Span, Stage, Time};

use super::event::Happening;
use super::flow::{Flow, To, host_of};
use super::hosts::Regime;
use super::world::World;
use crate::outcome::Weights;

/// Number that flows of weights have instead of a request's.
const NOBODY: u32 = u32::MAX;

/// All scale-outs of a run.
#[derive(Debug, Default)]
pub(super) struct ScaleOuts {
    /// Start of each scale-out, and its number of incomplete flows.
    copies: Vec<(Time, u32)>,
    done: u64,
    took_ns: u64,
    bytes: u64,
}

impl ScaleOuts {
    pub(super) fn outcome(&self) -> Weights {
        Weights {
            begun: self.copies.len() as u64,
            done: self.done,
            mean_s: self.took_ns as f64 / 1e9 / self.done.max(1) as f64,
            bytes: self.bytes,
        }
    }
}

impl World<'_> {
    pub(super) fn schedule_scale_out(&mut self) {
        let every = self.setup.scenario.serving.scale_out_every_s;
        if every > 0.0 && self.arrived < self.requests.len() {
            let at = self.now + Span((every * 1e9) as u64);
            self.agenda.push(at, Happening::ScaleOut);
        }
    }

    /// Sends the weights of a unit to the next, from each rank to the rank of the same index.
    pub(super) fn scale_out(&mut self) {
        let copy = self.scale_outs.copies.len() as u32;
        let units = self.setup.layout.units;
        let (from, to) = (copy % units, (copy + 1) % units);
        let bytes = self.setup.model.weight_bytes(self.setup.scenario.model.ep);
        let ranks = self.setup.layout.ranks_per_unit;
        self.scale_outs.copies.push((self.now, ranks));
        for n in 0..ranks {
            let from = self.setup.layout.ranks_of(from).start + n;
            let to = self.setup.layout.ranks_of(to).start + n;
            self.send_weights(copy, from, to, bytes);
        }
        self.schedule_scale_out();
    }

    fn send_weights(&mut self, copy: u32, from: u32, reader: u32, bytes: u64) {
        let now = self.now;
        let mut flow = Flow {
            request: NOBODY,
            batch: copy,
            layer: 0,
            stage: Stage::Weights,
            from,
            to: To::Rank(reader),
            left: bytes,
            unsent: 0,
            sending: 0,
            level: Level::SCAVENGER,
            weight: 1.0,
            at_once: false,
            generation: 0,
        };
        let inside = self.setup.layout.server_of(from) == self.setup.layout.server_of(reader);
        if inside || self.setup.regime == Regime::Alone {
            let rate =
                if inside { self.setup.layout.nvlink_rate } else { self.setup.layout.rank_rate };
            let slot = self.flows.add(flow);
            let at = now + Span((bytes as f64 / rate * 1e9).ceil() as u64);
            self.agenda.push(at, Happening::Delivered { flow: slot });
            return;
        }
        self.scale_outs.bytes += bytes;
        if self.setup.regime == Regime::Static {
            flow.level = self.static_level(Stage::Weights);
            flow.unsent = bytes;
            let slot = self.flows.add(flow);
            self.send(slot);
            return;
        }
        let slot = self.flows.add(flow);
        if self.setup.regime == Regime::Grants {
            self.open(slot);
            return;
        }
        let flow = *self.flows.get_mut(slot);
        let spec = FlowSpec {
            flow: flow.id(slot),
            stage: Stage::Weights,
            batch: BatchId(0),
            request: RequestId(0),
            layer: Layer(0),
            bytes,
            deadline: Time::NEVER,
            receiver_bound: false,
            peer: self.peer_of(&flow),
            whole: false,
        };
        let host = host_of(&flow);
        self.hosts.handle(host, now, Event::FlowArrived(spec));
        self.poll(host);
    }

    /// Handles the arrival of a flow of weights.
    pub(super) fn weights_arrived(&mut self, copy: u32) {
        let (since, left) = &mut self.scale_outs.copies[copy as usize];
        *left -= 1;
        if *left == 0 {
            self.scale_outs.took_ns += self.now.since(*since).0;
            self.scale_outs.done += 1;
        }
    }

    /// Returns the bytes of weights that are on their way.
    #[cfg(debug_assertions)]
    pub(super) fn weights_left(&self) -> u64 {
        let flows = self.flows.iter();
        let weights = flows.filter(|flow| flow.stage == Stage::Weights);
        weights.map(|flow| flow.left).sum()
    }
}
