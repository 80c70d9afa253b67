//! Arbitration of one port: which waiting flow may put which bytes on the wire, at which level.
//!
//! Implements MFS §4.5 (arbitration) and the `submit` / `permit` / `completion` primitives of §5.
use std::collections::BTreeMap;

use crate::config::{InvalidConfig, LinkConfig};
use crate::event::{Action, Event, FlowSpec};
use crate::ids::{FlowId, Level, Stage};
use crate::time::Time;

/// Leave to put bytes of one flow on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permit {
    /// How many bytes.
    pub bytes: u64,
    /// The level they are tagged with.
    pub level: Level,
    /// No further permit will follow for this flow.
    pub last: bool,
}

/// A number of flows and the bytes that they have still to be permitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Flows.
    pub flows: u64,
    /// Bytes.
    pub bytes: u64,
}

/// What a port looks like at one instant, for reports.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LinkSnapshot {
    /// Waiting, by level; the row of a level is [`Level::row`], the scavenger's is the last.
    pub waiting_by_level: [Tally; Level::ROWS],
    /// Waiting, by [`Stage::index`].
    pub waiting_by_stage: [Tally; Stage::ALL.len()],
    /// Bytes permitted and not yet completed.
    pub in_flight_bytes: u64,
    /// `ρ`, share of the port's rate that early stages took lately, 0 to 1.
    pub rho: f64,
    /// Flows that climbed a level, since the link was made.
    pub promotions: u64,
    /// Flows that fell into the scavenger after they arrived, since the link was made.
    pub demotions: u64,
    /// Batches that are known.
    pub batches: usize,
    /// Requests that are known.
    pub requests: usize,
}

#[derive(Debug)]
struct Flow {
    level: Level,
    seq: u64,
    stage: Stage,
    remaining: u64,
    outstanding: u64,
    waits: bool,
}

/// The state of one port. See the module.
#[derive(Debug)]
pub struct Link {
    config: LinkConfig,
    flows: BTreeMap<FlowId, Flow>,
    waiting: BTreeMap<(Level, u64), FlowId>,
    in_flight: u64,
    seq: u64,
}

impl Link {
    /// A port with nothing on it.
    ///
    /// # Errors
    /// The first field of `config` that makes no sense.
    pub fn new(config: LinkConfig) -> Result<Self, InvalidConfig> {
        config.validate()?;
        Ok(Self {
            config,
            flows: BTreeMap::new(),
            waiting: BTreeMap::new(),
            in_flight: 0,
            seq: 0,
        })
    }

    /// The configuration in force.
    #[must_use]
    pub fn config(&self) -> &LinkConfig {
        &self.config
    }

    /// Changes the configuration, the policy included.
    ///
    /// # Errors
    /// The first field that makes no sense; the old configuration stays in force.
    pub fn set_config(&mut self, _now: Time, config: LinkConfig) -> Result<(), InvalidConfig> {
        config.validate()?;
        self.config = config;
        Ok(())
    }

    fn level(&self, spec: &FlowSpec) -> Level {
        match spec.stage {
            Stage::Collective => Level(2),
            Stage::KvReuse => Level(self.config.levels.min(3)),
            Stage::P2d => Level(self.config.levels),
            Stage::Weights | Stage::Background => Level::SCAVENGER,
        }
    }

    /// The first permit of a flow that finds the port free, `None` if it has to queue.
    #[must_use]
    pub fn peek_permit(&self, _now: Time, spec: &FlowSpec) -> Option<Permit> {
        let bytes = spec.bytes.min(self.config.chunk_bytes);
        (self.waiting.is_empty() && self.in_flight + bytes <= self.config.window_bytes).then(|| {
            Permit {
                bytes,
                level: self.level(spec),
                last: bytes == spec.bytes,
            }
        })
    }

    /// Accounts for the permit that [`Link::peek_permit`] gave for the same `spec`.
    pub fn commit_permit(&mut self, now: Time, spec: &FlowSpec, _permit: Permit) {
        self.handle(now, Event::FlowArrived(*spec));
        let _ = self.poll_action(now);
    }

    /// Takes note of what happened.
    pub fn handle(&mut self, _now: Time, event: Event) {
        match event {
            Event::FlowArrived(spec) => {
                if self.flows.contains_key(&spec.flow) {
                    return;
                }
                self.seq += 1;
                let level = self.level(&spec);
                let flow = Flow {
                    level,
                    seq: self.seq,
                    stage: spec.stage,
                    remaining: spec.bytes,
                    outstanding: 0,
                    waits: true,
                };
                self.waiting.insert((level, self.seq), spec.flow);
                self.flows.insert(spec.flow, flow);
            }
            Event::FlowOnCredit(spec) => {
                if self.flows.contains_key(&spec.flow) {
                    return;
                }
                self.seq += 1;
                let flow = Flow {
                    level: self.level(&spec),
                    seq: self.seq,
                    stage: spec.stage,
                    remaining: 0,
                    outstanding: spec.bytes,
                    waits: false,
                };
                self.in_flight = self.in_flight.saturating_add(spec.bytes);
                self.flows.insert(spec.flow, flow);
            }
            Event::BytesCompleted { flow, bytes } => {
                let Some(known) = self.flows.get_mut(&flow) else {
                    return;
                };
                let bytes = bytes.min(known.outstanding);
                known.outstanding -= bytes;
                self.in_flight = self.in_flight.saturating_sub(bytes);
                if known.outstanding == 0 && !known.waits {
                    self.flows.remove(&flow);
                }
            }
            Event::FlowCancelled { flow } => {
                let Some(known) = self.flows.remove(&flow) else {
                    return;
                };
                self.waiting.remove(&(known.level, known.seq));
                self.in_flight = self.in_flight.saturating_sub(known.outstanding);
            }
            _ => {}
        }
    }

    /// What to do next; call until `None`.
    pub fn poll_action(&mut self, _now: Time) -> Option<Action> {
        let (&key, &id) = self.waiting.first_key_value()?;
        let flow = self.flows.get_mut(&id)?;
        let bytes = flow.remaining.min(self.config.chunk_bytes);
        if self.in_flight + bytes > self.config.window_bytes {
            return None;
        }
        self.in_flight += bytes;
        flow.remaining -= bytes;
        flow.outstanding += bytes;
        let last = flow.remaining == 0;
        let level = flow.level;
        if last {
            flow.waits = false;
            let gone = flow.outstanding == 0;
            self.waiting.remove(&key);
            if gone {
                self.flows.remove(&id);
            }
        }
        Some(Action::Permit {
            flow: id,
            bytes,
            level,
            last,
        })
    }

    /// When to call [`Link::poll_action`] again though nothing happened.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        None
    }

    /// What the port looks like now.
    #[must_use]
    pub fn snapshot(&self) -> LinkSnapshot {
        let mut snapshot = LinkSnapshot {
            in_flight_bytes: self.in_flight,
            ..LinkSnapshot::default()
        };
        for flow in self.flows.values().filter(|flow| flow.waits) {
            for tally in [
                &mut snapshot.waiting_by_level[flow.level.row()],
                &mut snapshot.waiting_by_stage[flow.stage.index()],
            ] {
                tally.flows += 1;
                tally.bytes += flow.remaining;
            }
        }
        snapshot
    }

    /// Bytes of collectives that the port can take ahead of any permit, right now.
    #[must_use]
    pub fn credit_allowance(&self, _now: Time) -> u64 {
        match self.waiting.first_key_value() {
            Some(((level, _), _)) if *level <= Level::FIRST_UNRESERVED => 0,
            _ => self.config.window_bytes.saturating_sub(self.in_flight),
        }
    }

    /// Flows that have bytes still to be permitted.
    #[must_use]
    pub fn waiting_flows(&self) -> usize {
        self.waiting.len()
    }

    /// Bytes permitted, or sent on credit, and not yet completed.
    #[must_use]
    pub fn in_flight_bytes(&self) -> u64 {
        self.in_flight
    }
}
