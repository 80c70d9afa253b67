//! Arbitration of one port: which waiting flow may put which bytes on the wire, at which level.
//!
//! Implements the frame of MFS §4.5 (strict priority over one substrate for all stages, the
//! scavenger below it), §4.3 (promotion at layer boundaries, then periodic) and the `submit`,
//! `permit`, `completion` primitives of §5. A `Discipline` (see `discipline.rs`) has the rules of
//! one policy. These rules hold for all policies:
//!
//! 1. bytes are permitted in chunks of at most `chunk_bytes`, while those in flight *at their level
//!    or above* stay within `window_bytes`. A flow that cannot be cut is permitted in one piece
//!    when a chunk would fit. If that piece exceeds the window, the next flow waits only for the
//!    time that the piece takes at the port's rate, and not until the application notices the
//!    piece's end. Up to four such pieces are in flight while they do not fill the port,
//!    and a scavenged piece is the second at most (`link/in_flight.rs`). Bytes on credit count as
//!    in flight and may exceed the window. Lower levels do not count, because bytes queued in a
//!    lower class for a busy receiver would fill the window and delay collectives on an idle port.
//!    Beyond the window, bytes are permitted at the port's rate at most, up to `overcommit`
//!    windows: bytes that had time to leave and have not are queued elsewhere. Under `laxity`,
//!    bytes in flight are bounded by peer, and bytes for peers that are not busy may go beyond the
//!    window, too (`link/peers.rs`);
//! 2. the best-ranked group is served, its head flow first. The scavenger gets the port when no
//!    level has work, and at least `scavenger_permille` of the port in any case;
//! 3. a flow's level only rises, except by demotion to the scavenger. On the wire the flow keeps
//!    the level of its first permit;
//! 4. equals are served in the order of arrival;
//! 5. a held flow is not served until it is released;
//! 6. under `laxity` and `mfs`, starved flows are served by turns with a small share of the port,
//!    whatever their rank (`link/starved.rs`).
//!
//! The driver passes the time in and polls actions until there are none. The link does not read a
//! clock. Cost is O(log n) per event, and one layer boundary updates the groups of its batch, not
//! its flows. Ids in events come from untrusted processes: unknown ids are ignored, and the state
//! that hints can create is bounded (`link/batch_table.rs`).

mod backlog_rate;
pub(crate) mod batch_table;
mod credit;
pub mod explain;
pub(crate) mod flows;
mod held_up;
mod hints;
mod in_flight;
mod late;
mod late_reuse;
mod named;
mod peer_room;
mod peers;
mod piece_rate;
pub(crate) mod port;
pub(crate) mod queue;
mod serving;
mod snapshot;
pub(crate) mod starved;
mod waiting;

use std::collections::{BTreeSet, VecDeque};

use batch_table::NULL_BATCH;
use flows::{FlowPhase, NONE, SlotId};
use in_flight::Oversized;
use port::Port;
use queue::{QueueId, SCAVENGER};
use starved::Starved;

use laxity_types::{FlowId, Layer, Level, PeerId, RequestId, Stage};

use crate::config::{InvalidConfig, LinkConfig};
use crate::discipline::{Discipline, UncontendedFlow};
use crate::event::{Action, Event, FlowSpec};
use crate::policies;
use crate::scavenger::Guarantee;
use crate::time::Time;

pub use crate::config::{BATCHES_MAX, REQUESTS_MAX};
pub use crate::discipline::LevelRule;
pub use batch_table::FOLLOWERS_MAX;
pub use peers::{PEER_WINDOWS, PEERS_MAX};
pub use queue::Tally;
pub use snapshot::LinkSnapshot;
pub use starved::{STARVED_AFTER, STARVED_PERMILLE};

/// Permission to put bytes of one flow on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permit {
    /// Bytes that the permit covers.
    pub bytes: u64,
    /// The level with which the bytes are tagged.
    pub level: Level,
    /// Whether this permit is the last one of the flow.
    pub last: bool,
}

/// The state machine that arbitrates one port, or a trust domain's part of it (`domains.rs`).
#[derive(Debug)]
pub struct Link {
    port: Port,
    discipline: Box<dyn Discipline>,
    collective_level: Option<Level>,
    guarantee: Guarantee,
    starved: Starved,
    /// Batches with flows whose level must be checked, by the time of their first check.
    due: BTreeSet<(Time, SlotId)>,
    moved: VecDeque<Action>,
    /// Requests that an order pruned and whose flows were not all moved yet.
    to_scavenge: VecDeque<RequestId>,
    waiting: usize,
    arrivals: u64,
    by_level: [Tally; Level::ROWS],
    by_stage: [Tally; Stage::ALL.len()],
    held: Tally,
    promotions: u64,
    demotions: u64,
    order_epoch: Option<u64>,
    /// The pieces in flight that are larger than the window, each by itself.
    oversized: Oversized,
    /// Whether no other trust domain has a part of the port.
    is_alone: bool,
    /// When the peers that have no room were offered again.
    offered: Time,
    /// When all permitted bytes have left, if the port sends at its configured rate, and at the
    /// rate in force.
    drained: Time,
    drained_in_force: Time,
    /// The same where bytes are bounded by peer, without bytes that have completed: at the port's
    /// rate, and at that of permits beyond the window.
    drained_by_peers: (Time, Time),
    /// Until when a flow waits only for the pace of [`Link::exceeds_at`].
    paced: Option<Time>,
    /// The latest `now` that the driver passed in.
    last_now: Time,
}

impl Link {
    /// Creates a port without flows.
    ///
    /// # Errors
    /// Returns the first field of `config` that is out of range.
    pub fn new(config: LinkConfig) -> Result<Self, InvalidConfig> {
        config.validate()?;
        let discipline = policies::of(&config);
        let port = Port::new(config, discipline.held_up_from());
        Ok(Self {
            collective_level: discipline.collective_level(),
            discipline,
            guarantee: Guarantee::new(port.config.scavenger_permille, port.config.chunk_bytes),
            starved: Starved::new(port.config.chunk_bytes),
            port,
            due: BTreeSet::new(),
            moved: VecDeque::new(),
            to_scavenge: VecDeque::new(),
            waiting: 0,
            arrivals: 0,
            by_level: [Tally::default(); Level::ROWS],
            by_stage: [Tally::default(); Stage::ALL.len()],
            held: Tally::default(),
            promotions: 0,
            demotions: 0,
            order_epoch: None,
            oversized: Oversized::default(),
            is_alone: true,
            offered: Time::ZERO,
            drained: Time::ZERO,
            drained_in_force: Time::ZERO,
            drained_by_peers: (Time::ZERO, Time::ZERO),
            paced: None,
            last_now: Time::ZERO,
        })
    }

    /// Returns the current configuration.
    pub fn config(&self) -> &LinkConfig {
        &self.port.config
    }

    /// Changes the configuration, including the policy. Waiting flows are queued again, in the
    /// order of their arrival. Bytes in flight and the batch table stay. Scavenged work stays
    /// scavenged as long as the policy is the same.
    ///
    /// # Errors
    /// Returns the first field that is out of range. The old configuration then stays.
    pub fn set_config(&mut self, now: Time, config: LinkConfig) -> Result<(), InvalidConfig> {
        config.validate()?;
        let old = &self.port.config;
        let same = config.policy == old.policy && config.levels == old.levels;
        let mut slots = self.port.flows.by_arrival();
        let held = slots.split_off(self.waiting);
        for &slot in &slots {
            self.dequeue(now, slot);
            self.starved.leave(&mut self.port.flows, slot);
        }
        self.discipline = policies::of(&config);
        self.collective_level = self.discipline.collective_level();
        self.guarantee = Guarantee::new(config.scavenger_permille, config.chunk_bytes);
        self.starved = Starved::new(config.chunk_bytes);
        self.port.set_config(config, self.discipline.held_up_from());
        for &slot in slots.iter().chain(&held) {
            let flow = self.port.flows.get_mut(slot);
            flow.share = 0;
            if !same {
                flow.level = Level(Level::COUNT_MAX);
            }
        }
        for slot in slots {
            self.enqueue_again(now, slot);
        }
        Ok(())
    }

    /// Changes the rate and the window in force, as [`crate::residual`] finds them. They bound what
    /// is in flight and how fast. Levels and the order of flows go by the configured rate. Values
    /// that [`LinkConfig::validate`] would refuse are raised to the least valid ones.
    pub fn set_capacity(&mut self, rate: u64, window_bytes: u64) {
        let config = &mut self.port.config;
        config.rate = rate.max(1);
        config.window_bytes = window_bytes.max(config.chunk_bytes);
        self.port.queues.offer_all();
    }

    /// Reports whether flows wait above the scavenger, for the port or for their peers.
    pub(crate) fn waits_in_levels(&self) -> bool {
        let scavenger = self.port.queues.scavenger();
        self.waiting > scavenger.map_or(0, |group| self.port.queues.get(group).members.len())
    }

    /// Fast path: returns the first permit of a flow if no flow waits and the window has room.
    /// Otherwise it returns `None`, and the driver sends [`Event::FlowArrived`]. O(1), with the
    /// slow path's result. Changes nothing: call [`Link::commit_permit`] next, possibly after the
    /// permit was published.
    #[inline]
    pub fn peek_permit(&self, now: Time, spec: &FlowSpec) -> Option<Permit> {
        let bytes = self.piece(spec, spec.bytes);
        if self.waiting != 0 {
            return None;
        }
        let level = self.level_alone(now, spec);
        let queue = if level == Level::SCAVENGER { SCAVENGER } else { 0 };
        let fits =
            self.peer_takes(queue, spec, level, bytes) && self.fits(now, queue, level, bytes);
        fits.then_some(Permit { bytes, level, last: bytes == spec.bytes })
    }

    /// Accounts for the permit that [`Link::peek_permit`] gave for the same `spec`.
    ///
    /// The link does not store a flow that was permitted whole, because a second lookup for each
    /// flow would dominate the cost of an uncontended port. The driver reports the bytes of such a
    /// flow with [`Link::remove_in_flight`], not with [`Event::BytesCompleted`] or
    /// [`Event::FlowCancelled`].
    pub fn commit_permit(&mut self, now: Time, spec: &FlowSpec, permit: Permit) {
        if spec.stage == Stage::KvReuse {
            let batch = self.port.batches.find_batch(spec.batch).unwrap_or(NULL_BATCH);
            self.note_late_reuse(now, spec.stage, batch, spec.layer);
        }
        if permit.last {
            self.add_in_flight(now, spec.stage, spec.peer, permit.level, permit.bytes);
            if permit.level == Level::SCAVENGER {
                self.guarantee.spend(permit.bytes);
            }
            return;
        }
        let Some(slot) = self.arrive(now, *spec) else { return };
        let flow = self.port.flows.get_mut(slot);
        flow.wire = Some(permit.level);
        self.serve(now, slot, permit.bytes);
    }

    /// Counts bytes as in flight at `level` that the driver sends ahead of any permit, as for a
    /// flow on credit. [`Link::remove_in_flight`] ends the count.
    #[inline]
    pub fn add_in_flight(
        &mut self,
        now: Time,
        stage: Stage,
        peer: PeerId,
        level: Level,
        bytes: u64,
    ) {
        self.last_now = now;
        if level != Level::SCAVENGER && self.port.queues.scavenger().is_some() {
            self.guarantee.earn(bytes);
        }
        self.account(now, stage, peer, level, bytes);
    }

    /// Removes bytes from those in flight, because they were delivered.
    #[inline]
    pub fn remove_in_flight(&mut self, now: Time, peer: PeerId, level: Level, bytes: u64) {
        self.last_now = now;
        self.deliver(now, peer, level, bytes);
    }

    /// Removes bytes from those in flight that were not delivered, and may never be.
    pub fn write_off(&mut self, now: Time, peer: PeerId, level: Level, bytes: u64) {
        self.last_now = now;
        self.settle(peer, level, bytes);
    }

    /// Updates the state for an event.
    pub fn handle(&mut self, now: Time, event: Event) {
        self.last_now = now;
        match event {
            Event::FlowArrived(spec) => {
                self.arrive(now, spec);
            }
            Event::BytesCompleted { flow, bytes } => {
                if let Some((done, level, peer)) = self.port.flows.complete(flow, bytes) {
                    self.deliver(now, peer, level, done);
                }
            }
            Event::BytesWrittenOff { flow, bytes } => {
                if let Some((done, level, peer)) = self.port.flows.complete(flow, bytes) {
                    self.settle(peer, level, done);
                }
            }
            Event::FlowCancelled { flow } => self.cancel(now, flow),
            Event::FlowHeld { flow } => self.hold(now, flow),
            Event::FlowReleased { flow } => self.release(now, flow),
            Event::BatchBegan(spec) => self.batch_began(now, &spec),
            Event::RequestJoined { batch, request, deadline, bytes: _ } => {
                self.request_joined(now, batch, request, deadline);
            }
            Event::RequestEnded { request } => self.request_ended(now, request),
            Event::BatchQueued { batch, ahead } => self.batch_queued(now, batch, ahead),
            Event::LayerBegan { batch, layer } => self.layer_began(now, batch, layer),
            Event::ComputeFinished { batch } => self.compute_finished(now, batch),
            Event::BatchEnded { batch } => self.batch_ended(now, batch),
            Event::OrderChanged(order) => self.order_changed(now, &order),
        }
    }

    /// Returns the next action. Call it until it returns `None`.
    pub fn poll_action(&mut self, now: Time) -> Option<Action> {
        self.last_now = now;
        self.port.load.advance(now);
        if self.moved.is_empty() && !self.to_scavenge.is_empty() {
            self.scavenge_pruned(now);
        }
        if let Some(moved) = self.moved.pop_front() {
            return Some(moved);
        }
        if self.waiting == 0 {
            self.paced = None;
            return None;
        }
        self.offer_peers(now);
        self.look_and_pick(now)
    }

    /// Returns when to call [`Link::poll_action`] if no event comes before. A time in the past
    /// means at once.
    pub fn next_deadline(&self) -> Option<Time> {
        self.due.first().map(|&(due, _)| due).into_iter().chain(self.paced).min()
    }

    /// Returns the state of the port at the last `now` that the driver passed in. The cost grows
    /// with the number of waiting groups, not flows. Ten calls per second are fine.
    pub fn snapshot(&self) -> LinkSnapshot {
        let mut waiting_by_level = self.by_level;
        for group in self.port.queues.promotable() {
            for (&layer, tally) in &group.layers {
                let rli = self.port.rli(group.batch, Layer(layer));
                let row =
                    &mut waiting_by_level[self.discipline.level_by_rli(&self.port, rli).row()];
                row.flows += tally.flows;
                row.bytes = row.bytes.saturating_add(tally.bytes);
            }
        }
        LinkSnapshot {
            waiting_by_level,
            waiting_by_stage: self.by_stage,
            held: self.held,
            in_flight_bytes: self.port.in_flight.all,
            rho: self.port.load.rho(self.last_now),
            promotions: self.promotions,
            demotions: self.demotions,
            batches: self.port.batches.batches_known(),
            requests: self.port.batches.requests_known(),
        }
    }

    /// Returns the number of flows that have bytes still to be permitted and are not held.
    pub fn waiting_flows(&self) -> usize {
        self.waiting
    }

    /// Returns the bytes that are permitted, or sent on credit, and not yet completed.
    pub fn in_flight_bytes(&self) -> u64 {
        self.port.in_flight.all
    }

    /// Returns the size of the next permit for a flow that has `remaining` bytes left.
    fn piece(&self, spec: &FlowSpec, remaining: u64) -> u64 {
        if spec.whole {
            return remaining;
        }
        remaining.min(self.discipline.chunk_bytes(spec, self.port.config.chunk_bytes))
    }

    /// Reports whether the window has room for a piece. A piece larger than a chunk counts as a
    /// chunk, or it might never fit.
    fn fits(&self, now: Time, queue: QueueId, level: Level, piece: u64) -> bool {
        let window = self.port.config.window_bytes;
        let bytes = piece.min(self.port.config.chunk_bytes);
        let all = self.port.in_flight.all.saturating_add(bytes);
        bytes == 0
            || all <= window
            || self.port.in_flight.at_or_above(level).saturating_add(bytes) <= window
            || self.exceeds_at(queue, piece).is_some_and(|at| now >= at)
    }

    /// Returns the level of the first permit of a flow if no other flow waits.
    pub fn level_alone(&self, now: Time, spec: &FlowSpec) -> Level {
        match self.collective_level {
            Some(level) if spec.stage == Stage::Collective => level,
            _ => self.lone_level(now, spec),
        }
    }

    /// Returns the discipline's level for a flow if no other flow waits.
    fn lone_level(&self, now: Time, spec: &FlowSpec) -> Level {
        let batch = self.port.batches.find_batch(spec.batch).unwrap_or(NULL_BATCH);
        let request = self.port.batches.find_request(spec.request).unwrap_or(NONE);
        let lone = UncontendedFlow { spec, deadline: self.deadline(spec, request), batch, request };
        self.discipline.lone_level(&self.port, now, &lone)
    }

    /// Returns the flow's own deadline, or else that of its request.
    fn deadline(&self, spec: &FlowSpec, request: SlotId) -> Time {
        if spec.deadline == Time::NEVER && request != NONE {
            self.port.batches.request(request).deadline
        } else {
            spec.deadline
        }
    }

    /// Counts bytes as in flight.
    #[inline]
    fn account(&mut self, now: Time, stage: Stage, peer: PeerId, level: Level, bytes: u64) {
        self.port.in_flight.add(level, bytes);
        self.port.peers.add(now, peer, level, bytes, self.piece_bound(peer));
        self.oversized.add(now, level, bytes, self.port.config.window_bytes);
        self.pace(now, bytes);
        self.note_collective(now, stage);
        if stage.is_early() {
            self.port.load.add(now, bytes);
        }
    }

    fn cancel(&mut self, now: Time, id: FlowId) {
        match self.port.flows.life(id) {
            None => return,
            Some(FlowPhase::InFlight(bytes, level, peer)) => {
                self.settle(peer, level, bytes);
            }
            Some(FlowPhase::Waits(slot)) => {
                let flow = self.port.flows.get(slot);
                let (outstanding, remaining) = (flow.outstanding, flow.remaining);
                let (peer, held) = (flow.spec.peer, flow.is_held());
                if let Some(level) = flow.wire {
                    self.settle(peer, level, outstanding);
                }
                if held {
                    self.held.remove(remaining);
                } else {
                    self.dequeue(now, slot);
                    self.depart(slot);
                }
            }
        }
        self.port.flows.remove(id);
    }
}
