//! A port in virtual time: drives a [`Link`] exactly as a daemon would, without a clock.
//!
//! The wire serves permitted chunks one after the other at the port's rate. With a window of one
//! small chunk it approaches the fluid, preemptive model of MFS Appendix A. Sizes are in units and
//! times in ticks: one unit takes one tick.

use std::collections::{BTreeMap, VecDeque};

use laxity_policy::{
    Action, BatchId, BatchSpec, Event, FlowId, FlowSpec, Layer, Level, Link, LinkConfig,
    PolicyKind, RequestId, Span, Stage, Time,
};

pub(crate) const UNIT: u64 = 1_000_000;
/// Nanoseconds of one tick, short beside `STARVED_AFTER`, so that only tests of it reach it.
pub(crate) const TICK: u64 = 1_000_000;
/// Bytes of one chunk: a hundredth of a unit.
pub(crate) const CHUNK: u64 = UNIT / 100;

/// Returns the time after `ticks`.
pub(crate) fn at(ticks: f64) -> Time {
    Time((ticks * TICK as f64).round() as u64)
}

/// Returns the ticks at `time`.
pub(crate) fn ticks(time: Time) -> f64 {
    time.0 as f64 / TICK as f64
}

/// Returns a near-fluid configuration: one unit takes one tick, at most one chunk is in flight.
pub(crate) fn fluid() -> LinkConfig {
    LinkConfig {
        rate: UNIT * (1_000_000_000 / TICK),
        chunk_bytes: CHUNK,
        window_bytes: CHUNK,
        overcommit: 1,
        promotion_period: Span(TICK / 1000),
        load_time_constant: Span(u64::MAX / 2), // ρ stays 0
        ..LinkConfig::default()
    }
}

/// Returns a flow of `units`, with no batch, request or deadline.
pub(crate) fn flow(id: u64, stage: Stage, units: f64) -> FlowSpec {
    let bytes = (units * UNIT as f64).round() as u64;
    FlowSpec::anonymous(FlowId(id), stage, bytes)
}

/// Returns the beginning of a batch of `layers` layers of `layer_ticks`.
pub(crate) fn batch(id: u64, layers: u16, layer_ticks: f64) -> Event {
    Event::BatchBegan(BatchSpec {
        batch: BatchId(id),
        layers,
        layer_time: Span((layer_ticks * TICK as f64) as u64),
    })
}

pub(crate) fn queued(batch: u64, ahead: u64) -> Event {
    let (batch, ahead) = (BatchId(batch), BatchId(ahead));
    Event::BatchQueued { batch, ahead }
}

pub(crate) fn layer_began(batch: u64, layer: u16) -> Event {
    let (batch, layer) = (BatchId(batch), Layer(layer));
    Event::LayerBegan { batch, layer }
}

pub(crate) fn compute_finished(batch: u64) -> Event {
    let batch = BatchId(batch);
    Event::ComputeFinished { batch }
}

pub(crate) fn batch_ended(batch: u64) -> Event {
    let batch = BatchId(batch);
    Event::BatchEnded { batch }
}

pub(crate) fn request_ended(request: u64) -> Event {
    let request = RequestId(request);
    Event::RequestEnded { request }
}

/// Returns the event that a request without announced bytes joins a batch.
pub(crate) fn joined(batch: u64, request: u64, deadline: Time) -> Event {
    Event::RequestJoined { batch: BatchId(batch), request: RequestId(request), deadline, bytes: 0 }
}

pub(crate) fn completed(flow: u64, bytes: u64) -> Event {
    let flow = FlowId(flow);
    Event::BytesCompleted { flow, bytes }
}

pub(crate) fn cancelled(flow: u64) -> Event {
    Event::FlowCancelled { flow: FlowId(flow) }
}

pub(crate) fn held(flow: u64) -> Event {
    Event::FlowHeld { flow: FlowId(flow) }
}

pub(crate) fn released(flow: u64) -> Event {
    Event::FlowReleased { flow: FlowId(flow) }
}

pub(crate) fn port(policy: PolicyKind) -> Port {
    Port::new(LinkConfig { policy, ..fluid() })
}

/// A link with a simulated wire and clock.
pub(crate) struct Port {
    pub(crate) link: Link,
    pub(crate) now: Time,
    wire: VecDeque<(FlowId, u64)>,
    wire_free_at: Time,
    left: BTreeMap<FlowId, u64>,
    pub(crate) latest: Option<FlowId>,
    /// When the last byte of each flow was delivered.
    pub(crate) finished: BTreeMap<FlowId, Time>,
    /// Every action, with its time.
    pub(crate) actions: Vec<(Time, Action)>,
    /// Delivered bytes by level.
    pub(crate) bytes_by_level: BTreeMap<Level, u64>,
}

impl Port {
    pub(crate) fn new(config: LinkConfig) -> Self {
        Self {
            link: Link::new(config).expect("a valid configuration"),
            now: Time::ZERO,
            wire: VecDeque::new(),
            wire_free_at: Time::ZERO,
            left: BTreeMap::new(),
            latest: None,
            finished: BTreeMap::new(),
            actions: Vec::new(),
            bytes_by_level: BTreeMap::new(),
        }
    }

    pub(crate) fn tell(&mut self, event: Event) {
        if let Event::FlowArrived(spec) = &event {
            self.left.insert(spec.flow, spec.bytes);
        }
        self.link.handle(self.now, event);
    }

    pub(crate) fn submit(&mut self, spec: FlowSpec) {
        self.tell(Event::FlowArrived(spec));
    }

    /// Takes every action that is possible now.
    pub(crate) fn poll(&mut self) {
        while let Some(action) = self.link.poll_action(self.now) {
            self.actions.push((self.now, action));
            if let Action::Permit { flow, bytes, level, .. } = action {
                if self.wire.is_empty() {
                    self.wire_free_at = self.now + self.span(bytes);
                }
                self.wire.push_back((flow, bytes));
                *self.bytes_by_level.entry(level).or_default() += bytes;
            }
        }
    }

    fn span(&self, bytes: u64) -> Span {
        Span::transfer(bytes, self.link.config().rate)
    }

    /// Returns when the next timer or completion is due.
    pub(crate) fn next_event(&self) -> Option<Time> {
        let wire = (!self.wire.is_empty()).then_some(self.wire_free_at);
        let timer = self.link.next_deadline().map(|at| at.max(self.now));
        wire.into_iter().chain(timer).min()
    }

    /// Lets time pass until `until` or until a flow finishes. Returns whether a flow finished.
    pub(crate) fn step(&mut self, until: Time) -> bool {
        loop {
            self.poll();
            let next = self.next_event().unwrap_or(Time::NEVER);
            if next > until {
                self.now = until;
                return false;
            }
            if next == self.now && self.wire.is_empty() {
                // Polling must have handled every timer that is due.
                assert!(self.link.next_deadline().is_none_or(|due| due > self.now), "busy loop");
            }
            self.now = next;
            if !self.wire.is_empty() && self.wire_free_at <= self.now {
                let (flow, bytes) = self.wire.pop_front().expect("checked above");
                if let Some(&(_, bytes)) = self.wire.front() {
                    self.wire_free_at = self.now + self.span(bytes);
                }
                self.link.handle(self.now, Event::BytesCompleted { flow, bytes });
                let left = self.left.get_mut(&flow).expect("permitted, so submitted");
                *left -= bytes;
                if *left == 0 {
                    self.finished.insert(flow, self.now);
                    self.latest = Some(flow);
                    return true;
                }
            }
        }
    }

    /// Lets time pass until `until`.
    pub(crate) fn run_until(&mut self, until: Time) {
        while self.step(until) {}
    }

    /// Lets time pass until every flow has finished. Panics if that takes a million ticks.
    pub(crate) fn run_out(&mut self) {
        while self.finished.len() < self.left.len() {
            assert!(self.step(at(1e6)), "some flow never finishes");
        }
    }

    /// Returns when flow `id` finished, in ticks.
    pub(crate) fn finish(&self, id: u64) -> f64 {
        ticks(self.finished[&FlowId(id)])
    }
}
