//! Collectives on the ports of a unit.
//!
//! A collective has one aggregate for each rank and direction, and ends when all have drained. On
//! an otherwise idle port the end of an aggregate is known when it starts. Such aggregates are not
//! put on the network, and only the latest of their ends is stored. When other traffic comes to
//! such a port, its aggregate *materialises* with its remaining bytes. In the exact mode a flow for
//! each pair of ranks is put on the network at once.

use laxity_policy::{Event, FlowId, FlowSpec, Layer, Level, Span, Stage, Time};

use super::event::Happening;
use super::exchange::Exchange;
use super::hosts::{Hosts, Regime};
use super::world::{Tag, World};
use crate::network::{NewTransfer, PortId};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Piece {
    #[default]
    Counted,
    Waits,
    Sent(LinkAccounting),
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkAccounting {
    /// The link does not account for them.
    Unknown,
    Launched(Level, u64),
    Permitted(u64),
}

#[derive(Debug, Default)]
pub(super) struct Collective {
    pub(super) exchange: Exchange,
    pub(super) active: bool,
    started: Time,
    counted_end: Time,
    ended: Time,
    alone: Span,
    pending: u32,
    beside: Span,
    after: Span,
    /// Aggregates: egress of rank `r` at `2r`, ingress at `2r + 1`.
    pieces: Vec<Piece>,
    sending: Vec<u32>,
    level: Option<Level>,
}

impl World<'_> {
    pub(super) fn start_collective(&mut self, unit: u32, beside: Span, after: Span) {
        let now = self.now;
        let ranks = self.setup.layout.ranks_per_unit as usize;
        let collective = &mut self.units[unit as usize].collective;
        let most = collective.exchange.most;
        let network = Span((most as f64 / self.setup.layout.rank_rate * 1e9).ceil() as u64);
        let nvlink = collective.exchange.nvlink() / self.setup.layout.nvlink_rate * 1e9;
        let alone = network.max(Span(nvlink.ceil() as u64));
        collective.active = true;
        collective.started = now;
        collective.alone = alone;
        collective.counted_end = now + alone;
        collective.ended = collective.counted_end;
        collective.level = None;
        collective.pending = 0;
        (collective.beside, collective.after) = (beside, after);
        let exact = self.setup.regime != Regime::Alone
            && (self.setup.exact || self.setup.layout.crosses_racks(unit));
        let piece = if exact { Piece::Done } else { Piece::Counted };
        collective.pieces.clear();
        collective.pieces.resize(2 * ranks, piece);
        collective.sending.clear();
        collective.sending.resize(ranks, 0);
        if self.setup.regime != Regime::Alone {
            self.measure.bytes.collective += collective.exchange.total;
        }
        if most > 0 && self.setup.regime != Regime::Alone {
            for rank in 0..ranks {
                self.start_egress(unit, rank, exact);
                if !exact {
                    self.start_ingress(unit, rank);
                }
            }
        }
        let collective = &self.units[unit as usize].collective;
        let end = collective.counted_end;
        self.schedule_end(unit, end);
    }

    fn schedule_end(&mut self, unit: u32, drained: Time) {
        let collective = &self.units[unit as usize].collective;
        let ready = (drained + self.setup.latency).max(collective.started + collective.beside);
        let end = ready + collective.after;
        self.schedule_step(unit, end);
    }

    fn start_egress(&mut self, unit: u32, rank: usize, exact: bool) {
        let now = self.now;
        let global = self.setup.layout.ranks_of(unit).start + rank as u32;
        let bytes = self.units[unit as usize].collective.exchange.piece(2 * rank);
        if bytes == 0 {
            return;
        }
        let port = self.setup.layout.egress(global);
        let host = Hosts::egress(global);
        match self.setup.regime {
            Regime::Daemons if self.hosts.waits(host) => self.submit_collective(unit, rank, bytes),
            Regime::Daemons if exact || self.network.active(port) > 0 => {
                let level = self.hosts.collective_level(host, now, bytes);
                self.hosts.add_in_flight(host, now, level, bytes);
                self.send_egress(unit, rank, level, LinkAccounting::Launched(level, bytes), exact);
            }
            Regime::Static | Regime::Grants if exact || self.network.active(port) > 0 => {
                let level = self.undecided_level(unit, port, bytes);
                self.send_egress(unit, rank, level, LinkAccounting::Unknown, exact);
            }
            _ => {}
        }
    }

    fn start_ingress(&mut self, unit: u32, rank: usize) {
        let global = self.setup.layout.ranks_of(unit).start + rank as u32;
        let port = self.setup.layout.ingress(global);
        if self.network.active(port) > 0 {
            let bytes = self.units[unit as usize].collective.exchange.piece(2 * rank + 1);
            self.send_aggregate(unit, 2 * rank + 1, port, bytes, LinkAccounting::Unknown);
        }
    }

    /// Submits a rank's egress to its host, because something waits at the host already.
    fn submit_collective(&mut self, unit: u32, rank: usize, bytes: u64) {
        let global = self.setup.layout.ranks_of(unit).start + rank as u32;
        let Some(slot) = self.units[unit as usize].current else { return };
        let host = Hosts::egress(global);
        self.tell(host, slot);
        let batch = &self.batches[slot];
        let spec = FlowSpec {
            batch: batch.policy_id(),
            layer: Layer(batch.layer),
            whole: true,
            ..FlowSpec::anonymous(collective_flow(global), Stage::Collective, bytes)
        };
        let collective = &mut self.units[unit as usize].collective;
        collective.pieces[2 * rank] = Piece::Waits;
        collective.pending += 1;
        self.hosts.handle(host, self.now, Event::FlowArrived(spec));
        self.poll(host);
    }

    pub(super) fn permitted_collective(&mut self, rank: u32, level: Level, bytes: u64) {
        let unit = self.setup.layout.unit_of(rank);
        let index = (rank - self.setup.layout.ranks_of(unit).start) as usize;
        let exact = self.setup.exact || self.setup.layout.crosses_racks(unit);
        let collective = &mut self.units[unit as usize].collective;
        debug_assert_eq!(collective.pieces[2 * index], Piece::Waits);
        collective.pending -= 1;
        self.send_egress(unit, index, level, LinkAccounting::Permitted(bytes), exact);
    }

    fn send_egress(
        &mut self,
        unit: u32,
        rank: usize,
        level: Level,
        book: LinkAccounting,
        exact: bool,
    ) {
        let first = self.setup.layout.ranks_of(unit).start;
        let global = first + rank as u32;
        self.units[unit as usize].collective.level = Some(level);
        if !exact {
            let bytes = self.units[unit as usize].collective.exchange.piece(2 * rank);
            let port = self.setup.layout.egress(global);
            self.send_aggregate(unit, 2 * rank, port, bytes, book);
            return;
        }
        let class = self.hosts.class(level);
        self.units[unit as usize].collective.pieces[2 * rank] = Piece::Sent(book);
        let ranks = self.setup.layout.ranks_per_unit as usize;
        for to in 0..ranks {
            let bytes = self.units[unit as usize].collective.exchange.pair(rank, to);
            if bytes == 0 {
                continue;
            }
            let (ports, count) = self.setup.layout.between(global, first + to as u32);
            let weight = self.collective_weight(unit)
                / self.units[unit as usize].collective.exchange.peers();
            let tag = Tag::Collective(2 * global).pack();
            self.make_room_for(&ports[..count], Some(unit));
            let carried = NewTransfer { bytes, class, weight, tag };
            self.network.start(self.now, &ports[..count], carried);
            let collective = &mut self.units[unit as usize].collective;
            collective.pending += 1;
            collective.sending[rank] += 1;
        }
        let collective = &mut self.units[unit as usize].collective;
        if collective.sending[rank] == 0 {
            // Each pair has less than a byte, so that no transfer was started and none will end.
            collective.pieces[2 * rank] = Piece::Done;
            self.settle(global, book);
        }
    }

    /// Reports the sent bytes of a rank's egress to its host's link, if it accounts for them.
    fn settle(&mut self, rank: u32, book: LinkAccounting) {
        let (now, host) = (self.now, Hosts::egress(rank));
        match book {
            LinkAccounting::Unknown => {}
            LinkAccounting::Launched(level, bytes) => {
                self.hosts.remove_in_flight(host, now, level, bytes);
            }
            LinkAccounting::Permitted(bytes) => {
                let flow = collective_flow(rank);
                self.hosts.handle(host, now, Event::BytesCompleted { flow, bytes });
            }
        }
    }

    fn collective_weight(&self, unit: u32) -> f64 {
        let flows = if self.setup.coflows {
            1.0
        } else {
            self.units[unit as usize].collective.exchange.peers()
        };
        flows * self.setup.scenario.network.collective_weight
    }

    fn send_aggregate(
        &mut self,
        unit: u32,
        piece: usize,
        port: PortId,
        bytes: u64,
        book: LinkAccounting,
    ) {
        if bytes == 0 {
            return;
        }
        let now = self.now;
        let first = self.setup.layout.ranks_of(unit).start;
        let level = match (self.setup.regime, self.units[unit as usize].collective.level) {
            (Regime::Daemons, None) => {
                self.hosts.collective_level(Hosts::egress(first), now, bytes)
            }
            (Regime::Daemons, Some(level)) => level,
            _ => self.undecided_level(unit, port, bytes),
        };
        let weight = self.collective_weight(unit);
        let class = self.hosts.class(level);
        let tag = Tag::Collective(2 * first + piece as u32).pack();
        self.network.start(now, &[port], NewTransfer { bytes, class, weight, tag });
        let collective = &mut self.units[unit as usize].collective;
        collective.pieces[piece] = Piece::Sent(book);
        collective.pending += 1;
    }

    /// Puts aggregates with computed ends on the network, because other traffic comes to these
    /// ports.
    pub(super) fn make_room_for(&mut self, ports: &[PortId], except: Option<u32>) {
        for &port in ports {
            let Some(rank) = self.setup.layout.rank_of_port(port) else { continue };
            let unit = self.setup.layout.unit_of(rank);
            if self.units[unit as usize].collective.active && except != Some(unit) {
                self.materialise(unit, port);
            }
        }
    }

    /// Puts the aggregate of this port on the network, if its end was computed and has not passed.
    pub(super) fn materialise(&mut self, unit: u32, port: PortId) {
        let now = self.now;
        let piece =
            (port.0 - self.setup.layout.egress(self.setup.layout.ranks_of(unit).start).0) as usize;
        let collective = &self.units[unit as usize].collective;
        if !collective.active || collective.pieces[piece] != Piece::Counted {
            return;
        }
        let bytes = collective.exchange.piece(piece);
        let left = bytes.saturating_sub(self.passed_since(collective.started));
        if left == 0 || self.setup.regime == Regime::Alone {
            return;
        }
        self.counted[port.0 as usize] += bytes - left;
        let rank = self.setup.layout.ranks_of(unit).start + piece as u32 / 2;
        let mut book = LinkAccounting::Unknown;
        if self.setup.regime == Regime::Daemons && piece.is_multiple_of(2) {
            let host = Hosts::egress(rank);
            let level = self.hosts.collective_level(host, now, left);
            self.hosts.add_in_flight(host, now, level, left);
            book = LinkAccounting::Launched(level, left);
        }
        self.send_aggregate(unit, piece, port, left, book);
    }

    /// Returns the bytes that an idle port of a rank carries from `then` until now.
    fn passed_since(&self, then: Time) -> u64 {
        (self.now.since(then).0 as f64 / 1e9 * self.setup.layout.rank_rate) as u64
    }

    /// Returns the bytes of collectives that have passed a port, and that the network did not
    /// carry.
    pub(super) fn counted_bytes(&self, port: PortId) -> u64 {
        let Some(rank) = self.setup.layout.rank_of_port(port) else { return 0 };
        let unit = self.setup.layout.unit_of(rank);
        let first = self.setup.layout.egress(self.setup.layout.ranks_of(unit).start).0;
        let collective = &self.units[unit as usize].collective;
        let piece = (port.0 - first) as usize;
        let is_counted = collective.active && collective.pieces[piece] == Piece::Counted;
        let under_way = match is_counted && self.setup.regime != Regime::Alone {
            true => self.passed_since(collective.started).min(collective.exchange.piece(piece)),
            false => 0,
        };
        self.counted[port.0 as usize] + under_way
    }

    pub(super) fn collective_drained(&mut self, piece: u32) {
        let now = self.now;
        let rank = piece / 2;
        let unit = self.setup.layout.unit_of(rank);
        let index = (piece - 2 * self.setup.layout.ranks_of(unit).start) as usize;
        let collective = &mut self.units[unit as usize].collective;
        collective.pending -= 1;
        let sending = &mut collective.sending[index / 2];
        *sending = sending.saturating_sub(1);
        let drained = *sending == 0;
        let Piece::Sent(book) = collective.pieces[index] else {
            unreachable!("only what was sent drains")
        };
        if drained {
            collective.pieces[index] = Piece::Done;
        }
        // If the computed ends are later, the step is due then.
        if collective.pending == 0 && now > collective.counted_end {
            collective.ended = now;
            self.schedule_end(unit, now);
        }
        if drained && book != LinkAccounting::Unknown {
            self.settle(rank, book);
            self.poll(Hosts::egress(rank));
        }
    }

    /// Handles a unit's step that is due. Returns true unless its collective still runs.
    pub(super) fn end_collective(&mut self, unit: u32) -> bool {
        let first = self.setup.layout.egress(self.setup.layout.ranks_of(unit).start).0 as usize;
        let unit = &mut self.units[unit as usize];
        let collective = &mut unit.collective;
        if !collective.active {
            return true;
        }
        if collective.pending > 0 {
            return false;
        }
        collective.active = false;
        if self.setup.regime != Regime::Alone {
            for (piece, state) in collective.pieces.iter().enumerate() {
                if *state != Piece::Counted {
                    continue;
                }
                let bytes = collective.exchange.piece(piece);
                self.counted[first + piece] += bytes;
                // Only MLU needs the load of the early stages (MFS §4.3).
                if self.setup.measures_load && piece.is_multiple_of(2) {
                    let host = (first + piece) as u32;
                    let level = self.hosts.collective_level(host, self.now, bytes);
                    self.hosts.note_sent(host, self.now, level, bytes);
                }
            }
        }
        let took = collective.ended.since(collective.started);
        self.measure.collective(took, collective.alone);
        if let Some(slot) = unit.current {
            let batch = &mut self.batches[slot];
            // While the unit computes in parallel, it does not wait.
            batch.collective_ns += took.0.saturating_sub(collective.beside.0);
            batch.computed_ns += collective.beside.0 + collective.after.0;
        }
        true
    }

    fn undecided_level(&self, unit: u32, port: PortId, bytes: u64) -> Level {
        match self.setup.regime {
            Regime::Grants => {
                let peers = self.units[unit as usize].collective.exchange.peers();
                self.granted_level(port, (bytes as f64 / peers) as u64)
            }
            _ => self.static_level(Stage::Collective),
        }
    }

    pub(super) fn static_level(&self, stage: Stage) -> Level {
        self.hosts.level_alone(0, Time::ZERO, &FlowSpec::anonymous(FlowId(0), stage, 1))
    }

    pub(super) fn schedule_step(&mut self, unit: u32, at: Time) {
        let state = &mut self.units[unit as usize];
        state.steps = state.steps.wrapping_add(1);
        let step = state.steps;
        self.agenda.push(at, Happening::Step { unit, step });
    }
}

pub(super) const fn collective_flow(rank: u32) -> FlowId {
    FlowId(1 << 63 | rank as u64)
}

pub(super) const fn rank_of_flow(flow: FlowId) -> Option<u32> {
    if flow.0 >> 63 == 1 { Some(flow.0 as u32) } else { None }
}
