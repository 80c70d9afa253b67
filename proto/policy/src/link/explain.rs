//! Why a flow waits, for an operator who asks. Nothing here changes the state of the link.

use laxity_types::{BatchId, Deadline, FlowId, Level, PeerId};

use super::Link;
use super::flows::{Flow, FlowPhase, NONE, SlotId};
use super::peers::{counted, part};
use super::queue::{Group, SCAVENGER, Tally};
use crate::discipline::LevelRule;
use crate::event::FlowSpec;
use crate::time::Time;

/// Maximum number of flows that are counted as ahead of another one, which bounds the cost.
pub const AHEAD_MAX: usize = 256;

/// What keeps a waiting flow from a permit now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// No obstacle: it gets a permit at the next opportunity.
    Nothing,
    /// The flow is held, because its client owes bytes.
    Held,
    /// Other flows of its trust domain come first.
    Order,
    /// Too much is in flight to its peer.
    Peer,
    /// The window is full.
    Window,
    /// Other trust domains have their turn.
    Turn,
}

/// What a link knows about a flow that has bytes still to be permitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitingFlow {
    /// The flow as it arrived, with its own deadline or that of its request.
    pub spec: FlowSpec,
    /// The level that a permit would have now, if the flow has had none yet.
    pub level: Level,
    /// The rule that gives this level.
    pub rule: LevelRule,
    /// When the work must begin, [`Time::NEVER`] without a deadline.
    pub begin_by: Time,
    /// When the level changed last, and from which level.
    pub moved: Option<(Time, Level)>,
    /// What keeps the flow from a permit.
    pub obstacle: Obstacle,
    /// The flows that come first, [`AHEAD_MAX`] at most.
    pub ahead: Tally,
    /// Bytes in flight at the level or above, and the window. If the flow waits for its peer, the
    /// bytes to that peer, or to all unknown peers, and their bound.
    pub window: (u64, u64),
    /// Whether the flow is starved, and so is served from the starved flows' share.
    pub is_starved: bool,
}

impl Link {
    /// Returns the batch of a flow that has bytes still to be permitted.
    pub fn batch_of(&self, id: FlowId) -> Option<BatchId> {
        match self.port.flows.life(id)? {
            FlowPhase::Waits(slot) => Some(self.port.flows.get(slot).spec.batch),
            FlowPhase::InFlight(..) => None,
        }
    }

    /// Explains a flow that has bytes still to be permitted. It costs as much as a look at
    /// [`AHEAD_MAX`] flows.
    pub fn explain(&self, now: Time, id: FlowId) -> Option<WaitingFlow> {
        let Some(FlowPhase::Waits(slot)) = self.port.flows.life(id) else { return None };
        let flow = self.port.flows.get(slot);
        let mut known = WaitingFlow {
            spec: FlowSpec { deadline: flow.deadline, ..flow.spec },
            level: flow.level,
            rule: LevelRule::Policy,
            begin_by: Time::NEVER,
            moved: flow.moved,
            obstacle: Obstacle::Held,
            ahead: Tally::default(),
            window: (self.port.in_flight.at_or_above(flow.level), self.port.config.window_bytes),
            is_starved: flow.age.is_starved(),
        };
        if flow.group == NONE {
            return Some(known);
        }
        let group = self.port.queues.get(flow.group);
        known.level = self.level_now(now, flow, group);
        known.window.0 = self.port.in_flight.at_or_above(known.level);
        (known.rule, known.begin_by) = match group.queue {
            SCAVENGER => (self.scavenged_by(flow), Time::NEVER),
            _ => self.discipline.rule(&self.port, now, flow, group),
        };
        known.ahead = self.ahead_of(slot, flow, group);
        let bytes = self.piece(&flow.spec, flow.remaining);
        let wire = flow.wire.unwrap_or(known.level);
        known.obstacle = if known.ahead.flows > 0 {
            Obstacle::Order
        } else if !self.peer_takes(group.queue, &flow.spec, wire, bytes) {
            let peer = flow.spec.peer;
            known.window =
                (self.port.peers.at_or_above(peer, wire), self.bound_at(&flow.spec, wire));
            // Unknown peers share the port's windows.
            if counted(peer) == PeerId(0) { Obstacle::Window } else { Obstacle::Peer }
        } else if !self.fits(now, group.queue, wire, bytes) {
            Obstacle::Window
        } else {
            Obstacle::Nothing
        };
        Some(known)
    }

    fn scavenged_by(&self, flow: &Flow) -> LevelRule {
        match flow.spec.stage.deadline() {
            _ if self.port.is_pruned(flow.spec.request) => LevelRule::Pruned,
            Deadline::None => LevelRule::Undated,
            _ => LevelRule::Lost,
        }
    }

    fn ahead_of(&self, slot: SlotId, flow: &Flow, group: &Group) -> Tally {
        let own = (flow.order.0, flow.order.1, flow.seq, slot);
        // Flows to another peer that has no room are passed over.
        let is_ahead = |group: &&Group| {
            let Some((_, _, _, head)) = group.head() else { return false };
            let first = self.port.flows.get(head);
            let bytes = self.piece(&first.spec, first.remaining);
            part(first.spec.peer) == part(flow.spec.peer)
                || self.peer_takes(
                    group.queue,
                    &first.spec,
                    first.wire.unwrap_or(first.level),
                    bytes,
                )
        };
        let groups = self.port.queues.before(group).take(AHEAD_MAX).filter(is_ahead);
        let before = groups.flat_map(|group| &group.members);
        let mut ahead = Tally::default();
        for &(_, _, _, slot) in group.members.range(..own).chain(before).take(AHEAD_MAX) {
            ahead.add(self.port.flows.get(slot).remaining);
        }
        ahead
    }
}
