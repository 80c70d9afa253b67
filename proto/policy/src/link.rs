//! Arbitration of one port: which waiting flow may put which bytes on the wire, at which level.
//!
//! Implements the frame of MFS §4.5 (strict priority over one substrate for all stages, the
//! scavenger below it), §4.3 (promotion at layer boundaries, then periodic) and the `submit`,
//! `permit`, `completion` primitives of §5. What differs between policies is a
//! `Discipline` (see `discipline.rs`); everything else is here, for all of them:
//!
//! 1. bytes are permitted in chunks of at most `chunk_bytes` (a flow that cannot be cut in one
//!    piece, when a chunk would fit), while those in flight *at their
//!    level or above* stay within `window_bytes`; bytes on credit count as in flight and may
//!    exceed it. Lower levels do not count: what stands in line for a busy receiver in a lower
//!    class of the fabric would otherwise fill the window, and hold up the collectives of a port
//!    that is idle. The highest level with bytes in flight fills its window. Inside a level it is
//!    the same, so beyond the window bytes are permitted at the port's rate and no faster, up to
//!    `overcommit` windows: what has had the time to leave and has not, stands in line elsewhere;
//! 2. the best-ranked group is served, its head flow first; if no level has work the scavenger
//!    gets the port, and it is sure of `scavenger_permille` of it in any case;
//! 3. a flow's level only climbs, except into the scavenger; on the wire it keeps the level of
//!    its first permit;
//! 4. equals are served in the order of arrival;
//! 5. a flow that is held has no part in any of this until it is released;
//! 6. under `laxity` and `mfs`, flows that have waited for long are served by turns with a small
//!    share of the port, whatever their rank (`link/starved.rs`).
//!
//! The driver passes time in and asks for actions until there are none; nothing here reads a
//! clock. Cost is O(log n) per event; one layer boundary touches the groups of its batch, not
//! its flows. Ids in events come from untrusted processes: unknown ones are ignored, and what
//! hints can make a port remember is bounded (`link/batch_table.rs`).

pub(crate) mod batch_table;
pub(crate) mod flows;
mod hints;
mod in_flight;
mod named;
pub(crate) mod port;
pub(crate) mod queue;
mod serving;
pub(crate) mod starved;
mod waiting;

use std::collections::{BTreeSet, VecDeque};

use batch_table::NULL_BATCH;
use flows::{Life, NONE, Slot};
use in_flight::InFlight;
use port::Port;
use starved::Starved;

use laxity_types::{FlowId, Layer, Level, Stage};

use crate::config::{InvalidConfig, LinkConfig};
use crate::discipline::{Discipline, Lone};
use crate::event::{Action, Event, FlowSpec};
use crate::policies;
use crate::scavenger::Guarantee;
use crate::time::{Span, Time};

pub use batch_table::{BATCHES_MAX, FOLLOWERS_MAX, REQUESTS_MAX};
pub use queue::Tally;
pub use starved::{STARVED_AFTER, STARVED_PERMILLE};

/// Permission to put bytes of one flow on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permit {
    /// How many bytes.
    pub bytes: u64,
    /// The level they are tagged with.
    pub level: Level,
    /// No further permit will follow for this flow.
    pub last: bool,
}

/// What a port looks like at one instant, for reports.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LinkSnapshot {
    /// Waiting, by level; the row of a level is [`Level::row`], the scavenger's is the last.
    pub waiting_by_level: [Tally; Level::ROWS],
    /// Waiting, by [`Stage::index`].
    pub waiting_by_stage: [Tally; Stage::ALL.len()],
    /// Held back ([`Event::FlowHeld`]); not counted as waiting.
    pub held: Tally,
    /// Bytes permitted and not yet completed.
    pub in_flight_bytes: u64,
    /// `ρ`, share of the port's rate that early stages took lately, 0 to 1.
    pub rho: f64,
    /// Flows that climbed a level while they waited, since the link was made.
    pub promotions: u64,
    /// Flows that fell into the scavenger after they arrived, since the link was made.
    pub demotions: u64,
    /// Batches that are known.
    pub batches: usize,
    /// Requests that are known.
    pub requests: usize,
}

/// The state of one port. See the module.
#[derive(Debug)]
pub struct Link {
    port: Port,
    discipline: Box<dyn Discipline>,
    collective_level: Option<Level>,
    guarantee: Guarantee,
    starved: Starved,
    /// Batches with flows that are to be looked at, by when.
    due: BTreeSet<(Time, Slot)>,
    moved: VecDeque<Action>,
    waiting: usize,
    in_flight: InFlight,
    arrivals: u64,
    by_level: [Tally; Level::ROWS],
    by_stage: [Tally; Stage::ALL.len()],
    held: Tally,
    promotions: u64,
    demotions: u64,
    order_epoch: Option<u64>,
    /// When all that was permitted has left, if the port sends at its rate.
    drained: Time,
    /// Something waits for that alone.
    paced: bool,
    /// The latest instant that the driver has passed in.
    told: Time,
}

impl Link {
    /// A port with nothing on it.
    ///
    /// # Errors
    /// The first field of `config` that makes no sense.
    pub fn new(config: LinkConfig) -> Result<Self, InvalidConfig> {
        config.validate()?;
        let discipline = policies::of(&config);
        Ok(Self {
            collective_level: discipline.collective_level(),
            discipline,
            guarantee: Guarantee::new(config.scavenger_permille, config.chunk_bytes),
            starved: Starved::new(config.chunk_bytes),
            port: Port::new(config),
            due: BTreeSet::new(),
            moved: VecDeque::new(),
            waiting: 0,
            in_flight: InFlight::default(),
            arrivals: 0,
            by_level: [Tally::default(); Level::ROWS],
            by_stage: [Tally::default(); Stage::ALL.len()],
            held: Tally::default(),
            promotions: 0,
            demotions: 0,
            order_epoch: None,
            drained: Time::ZERO,
            paced: false,
            told: Time::ZERO,
        })
    }

    /// The configuration in force.
    #[must_use]
    pub fn config(&self) -> &LinkConfig {
        &self.port.config
    }

    /// Changes the configuration, the policy included. Flows that wait are queued anew, in the
    /// order of their arrival; what is in flight and what is known of batches stays. Scavenged
    /// work stays scavenged as long as the policy is the same.
    ///
    /// # Errors
    /// The first field that makes no sense; the old configuration stays in force.
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
        self.port.set_config(config);
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

    /// Fast path: the first permit of a flow that finds nothing waiting and room in the window,
    /// `None` if it has to go through [`Event::FlowArrived`]. O(1), and decides what the slow
    /// path would. Changes nothing: follow up with [`Link::commit_permit`], possibly after the
    /// permit was published.
    #[must_use]
    pub fn peek_permit(&self, now: Time, spec: &FlowSpec) -> Option<Permit> {
        let bytes = self.piece(spec, spec.bytes);
        if self.waiting != 0 {
            return None;
        }
        let level = self.level_alone(now, spec);
        self.fits(now, level, bytes).then_some(Permit {
            bytes,
            level,
            last: bytes == spec.bytes,
        })
    }

    /// Accounts for the permit that [`Link::peek_permit`] gave for the same `spec`.
    ///
    /// A flow that was permitted whole is not remembered: the driver accounts for it, and a second
    /// lookup for each flow of an uncontended port would be most of the work. Report its bytes with
    /// [`Link::land`], not with [`Event::BytesCompleted`] or [`Event::FlowCancelled`].
    pub fn commit_permit(&mut self, now: Time, spec: &FlowSpec, permit: Permit) {
        if permit.last {
            self.launch(now, spec.stage, permit.level, permit.bytes);
            if permit.level == Level::SCAVENGER {
                self.guarantee.spend(permit.bytes);
            }
            return;
        }
        let Some(slot) = self.arrive(now, *spec) else {
            return;
        };
        let flow = self.port.flows.get_mut(slot);
        flow.wire = Some(permit.level);
        self.serve(now, slot, permit.bytes);
    }

    /// The driver puts bytes on the wire at `level` and accounts for them: a flow on credit, ahead
    /// of any permit. [`Link::land`] takes them off again.
    pub fn launch(&mut self, now: Time, stage: Stage, level: Level, bytes: u64) {
        self.told = now;
        if level != Level::SCAVENGER && self.port.queues.scavenger().is_some() {
            self.guarantee.earn(bytes);
        }
        self.account(now, stage, level, bytes);
    }

    /// Bytes that were launched at `level` have left the wire, or never will.
    pub fn land(&mut self, now: Time, level: Level, bytes: u64) {
        self.told = now;
        self.in_flight.remove(level, bytes);
    }

    /// Takes note of what happened.
    pub fn handle(&mut self, now: Time, event: Event) {
        self.told = now;
        match event {
            Event::FlowArrived(spec) => {
                self.arrive(now, spec);
            }
            Event::BytesCompleted { flow, bytes } => {
                if let Some((done, level)) = self.port.flows.complete(flow, bytes) {
                    self.in_flight.remove(level, done);
                }
            }
            Event::FlowCancelled { flow } => self.cancel(now, flow),
            Event::FlowHeld { flow } => self.hold(now, flow),
            Event::FlowReleased { flow } => self.release(now, flow),
            Event::BatchBegan(spec) => self.batch_began(now, &spec),
            Event::RequestJoined {
                batch,
                request,
                deadline,
                bytes: _,
            } => {
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

    /// What to do next; call until `None`.
    pub fn poll_action(&mut self, now: Time) -> Option<Action> {
        self.told = now;
        self.port.load.advance(now);
        if let Some(moved) = self.moved.pop_front() {
            return Some(moved);
        }
        if self.waiting == 0 {
            self.paced = false;
            return None;
        }
        self.look_and_pick(now)
    }

    /// When to call [`Link::poll_action`] again though nothing happened. A time that has come
    /// already means: now.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        let due = self.due.first().map(|&(due, _)| due);
        if !self.paced {
            return due;
        }
        let pace = self.pace_at();
        Some(due.map_or(pace, |due| due.min(pace)))
    }

    /// What the port looks like, as of the last `now` that it was told of. Cost grows with the
    /// number of waiting groups, not flows: fit for ten times a second.
    #[must_use]
    pub fn snapshot(&self) -> LinkSnapshot {
        let mut waiting_by_level = self.by_level;
        for group in self.port.queues.climbing() {
            for (&layer, tally) in &group.layers {
                let rli = self.port.rli(group.batch, Layer(layer));
                let row = &mut waiting_by_level[self.discipline.climb(&self.port, rli).row()];
                row.flows += tally.flows;
                row.bytes = row.bytes.saturating_add(tally.bytes);
            }
        }
        LinkSnapshot {
            waiting_by_level,
            waiting_by_stage: self.by_stage,
            held: self.held,
            in_flight_bytes: self.in_flight.all,
            rho: self.port.load.rho(self.told),
            promotions: self.promotions,
            demotions: self.demotions,
            batches: self.port.batches.batches_known(),
            requests: self.port.batches.requests_known(),
        }
    }

    /// The level of a collective that nothing waits beside, of which no more is known: that of
    /// credit.
    #[must_use]
    pub fn credit_level(&self, now: Time) -> Level {
        let name = FlowId(u64::MAX);
        self.level_alone(now, &FlowSpec::anonymous(name, Stage::Collective, 1))
    }

    /// Bytes of collectives that the port can take ahead of any permit, right now: what is left
    /// of the window, nothing while something waits that stands at or above them, or is starved.
    #[must_use]
    pub fn credit_allowance(&self, _now: Time) -> u64 {
        if !self.starved.is_empty() {
            return 0;
        }
        match self.port.queues.first() {
            Some((rank, _)) if rank <= self.discipline.credit_bar() => 0,
            _ => {
                let level = self.collective_level.unwrap_or(Level::SCAVENGER);
                self.port
                    .config
                    .window_bytes
                    .saturating_sub(self.in_flight.at_or_above(level))
            }
        }
    }

    /// Bytes of any stage that the port can take ahead of any permit, right now: what is left of
    /// the window while nothing waits. For flows whose class on the wire is fixed, see
    /// [`FlowSpec::whole`]; the level they would get is [`Link::level_alone`].
    #[must_use]
    pub fn idle_allowance(&self) -> u64 {
        if self.waiting != 0 {
            return 0;
        }
        self.port
            .config
            .window_bytes
            .saturating_sub(self.in_flight.all)
    }

    /// Flows that have bytes still to be permitted and are not held.
    #[must_use]
    pub fn waiting_flows(&self) -> usize {
        self.waiting
    }

    /// Bytes permitted, or sent on credit, and not yet completed.
    #[must_use]
    pub fn in_flight_bytes(&self) -> u64 {
        self.in_flight.all
    }

    /// What is permitted next of a flow that has `remaining` bytes to go.
    fn piece(&self, spec: &FlowSpec, remaining: u64) -> u64 {
        if spec.whole {
            remaining
        } else {
            remaining.min(self.port.config.chunk_bytes)
        }
    }

    /// Whether the window has room for a piece. One that is larger than a chunk counts as a chunk,
    /// or it would never fit.
    fn fits(&self, now: Time, level: Level, piece: u64) -> bool {
        let window = self.port.config.window_bytes;
        let bytes = piece.min(self.port.config.chunk_bytes);
        let all = self.in_flight.all.saturating_add(bytes);
        bytes == 0
            || all <= window
            || self.in_flight.at_or_above(level).saturating_add(bytes) <= window
            || (now >= self.pace_at() && self.overcommits(bytes))
    }

    /// Whether all that may be in flight leaves room for these bytes.
    fn overcommits(&self, bytes: u64) -> bool {
        let config = &self.port.config;
        let most = config
            .window_bytes
            .saturating_mul(u64::from(config.overcommit));
        config.overcommit > 1 && self.in_flight.all.saturating_add(bytes) <= most
    }

    /// From when on the port would idle if all that was permitted left at its rate, less a chunk.
    fn pace_at(&self) -> Time {
        self.drained - Span::transfer(self.port.config.chunk_bytes, self.port.config.rate)
    }

    /// The level of the first permit of a flow that nothing waits beside.
    #[must_use]
    pub fn level_alone(&self, now: Time, spec: &FlowSpec) -> Level {
        match self.collective_level {
            Some(level) if spec.stage == Stage::Collective => level,
            _ => self.lone_level(now, spec),
        }
    }

    /// The level of a flow that nothing waits beside.
    fn lone_level(&self, now: Time, spec: &FlowSpec) -> Level {
        let batch = self
            .port
            .batches
            .find_batch(spec.batch)
            .unwrap_or(NULL_BATCH);
        let request = self.port.batches.find_request(spec.request).unwrap_or(NONE);
        let lone = Lone {
            spec,
            deadline: self.deadline(spec, request),
            batch,
            request,
        };
        self.discipline.lone_level(&self.port, now, &lone)
    }

    /// The flow's own deadline, or what is known of its request.
    fn deadline(&self, spec: &FlowSpec, request: Slot) -> Time {
        if spec.deadline == Time::NEVER && request != NONE {
            self.port.batches.request(request).deadline
        } else {
            spec.deadline
        }
    }

    /// Bytes go on the wire.
    fn account(&mut self, now: Time, stage: Stage, level: Level, bytes: u64) {
        self.in_flight.add(level, bytes);
        self.drained = self.drained.max(now) + Span::transfer(bytes, self.port.config.rate);
        if stage.is_early() {
            self.port.load.add(now, bytes);
        }
    }

    fn cancel(&mut self, now: Time, id: FlowId) {
        match self.port.flows.life(id) {
            None => return,
            Some(Life::InFlight(bytes, level)) => self.in_flight.remove(level, bytes),
            Some(Life::Waits(slot)) => {
                let flow = self.port.flows.get(slot);
                if let Some(level) = flow.wire {
                    self.in_flight.remove(level, flow.outstanding);
                }
                if flow.is_held() {
                    let remaining = flow.remaining;
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
