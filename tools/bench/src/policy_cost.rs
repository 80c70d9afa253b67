//! What a decision costs: direct calls of `laxity_policy::link::Link` with thousands of flows
//! waiting on one saturated port.
//!
//! The mix is that of a prefill node: flows of all stages, spread over many batches of 80 layers,
//! each with requests that have deadlines. A chunk completes and is replaced by the next permit,
//! a finished flow by a new one, layers begin, timers fire. An *event* is one call of `handle`
//! and all calls of `poll_action` that follow it; time passes as the port's rate says.

use std::collections::VecDeque;

use laxity_policy::link::Link;
use laxity_policy::{
    Action, BatchId, BatchSpec, Event, FlowId, FlowSpec, Layer, LinkConfig, PolicyKind, RequestId,
    Span, Stage, Time,
};

use crate::bench::{Bench, Row};
use crate::clock::Clock;
use crate::draw::Draw;
use crate::figure::{Gate, Limit, Quantile};
use crate::sample::{Percentiles, Recorder};

const LAYERS: u16 = 80;
const REQUESTS_PER_BATCH: u64 = 8;
/// Flows that one batch has waiting on the port.
const FLOWS_PER_BATCH: usize = 200;
/// Of this many events one begins a layer: a batch moves a few dozen flows per layer.
const EVENTS_PER_LAYER: u64 = 64;
/// Events per repetition.
const EVENTS: usize = 50_000;

/// The rows: two policies, three queue lengths.
pub(crate) fn rows(bench: &mut Bench) {
    let sizes = [
        ("link-mfs-1k", PolicyKind::Mfs, 1_000, "1 k"),
        ("link-mfs-10k", PolicyKind::Mfs, 10_000, "10 k"),
        ("link-mfs-100k", PolicyKind::Mfs, 100_000, "100 k"),
        ("link-laxity-1k", PolicyKind::Laxity, 1_000, "1 k"),
        ("link-laxity-10k", PolicyKind::Laxity, 10_000, "10 k"),
        ("link-laxity-100k", PolicyKind::Laxity, 100_000, "100 k"),
    ];
    for (name, policy, flows, shown) in sizes {
        let row = Row::latency(name, format!("link event, {policy}, {shown} flows waiting"))
            .gates([Gate::at_most(Quantile::Mean, Limit::Value(1_000.0))]);
        bench.measure(row, |bench| {
            let events = if bench.effort.repetitions < 5 {
                EVENTS / 5
            } else {
                EVENTS
            };
            bench.latencies_alone(|bench| repetition(bench.clock, policy, flows, events))
        });
    }
}

/// A port under load.
struct Port {
    link: Link,
    draw: Draw,
    now: Time,
    rate: u64,
    batches: u64,
    next_flow: u64,
    /// Permitted chunks in the order in which they leave the wire.
    in_flight: VecDeque<(FlowId, u64, bool)>,
    /// Layer that each batch computes.
    layers: Vec<u16>,
}

fn repetition(
    clock: Clock,
    policy: PolicyKind,
    flows: usize,
    events: usize,
) -> anyhow::Result<Percentiles> {
    let mut port = Port::filled(policy, flows)?;
    let mut recorder = Recorder::with_room_for(2 * events);
    port.run(clock, events / 10, &mut recorder);
    recorder.clear();
    port.run(clock, events, &mut recorder);
    anyhow::ensure!(
        port.link.waiting_flows().abs_diff(flows) <= 1 + flows / 20,
        "{} flows wait instead of {flows}",
        port.link.waiting_flows()
    );
    Ok(recorder.finish(clock))
}

impl Port {
    fn filled(policy: PolicyKind, flows: usize) -> anyhow::Result<Self> {
        let config = LinkConfig {
            policy,
            ..LinkConfig::default()
        };
        let rate = config.rate;
        let batches = (flows / FLOWS_PER_BATCH).max(4) as u64;
        let mut port = Self {
            link: Link::new(config).map_err(|e| anyhow::anyhow!("{e}"))?,
            draw: Draw::new(flows as u64),
            now: Time(1_000_000_000),
            rate,
            batches,
            next_flow: 1,
            in_flight: VecDeque::new(),
            layers: vec![0; batches as usize + 1],
        };
        for batch in 1..=batches {
            let spec = BatchSpec {
                batch: BatchId(batch),
                layers: LAYERS,
                layer_time: Span::from_millis(5),
            };
            port.link.handle(port.now, Event::BatchBegan(spec));
            for member in 0..REQUESTS_PER_BATCH {
                let joined = Event::RequestJoined {
                    batch: BatchId(batch),
                    request: RequestId(batch * REQUESTS_PER_BATCH + member),
                    deadline: port.deadline(),
                    bytes: 0,
                };
                port.link.handle(port.now, joined);
            }
        }
        while port.link.waiting_flows() < flows {
            let arrival = port.arrival();
            port.link.handle(port.now, arrival);
            port.take_permits();
        }
        Ok(port)
    }

    fn deadline(&mut self) -> Time {
        self.now + Span::from_millis(500 + self.draw.below(20_000))
    }

    fn arrival(&mut self) -> Event {
        let batch = 1 + self.draw.below(self.batches);
        let stage = match self.draw.below(100) {
            0..25 => Stage::Collective,
            25..60 => Stage::KvReuse,
            60..95 => Stage::P2d,
            _ => Stage::Background,
        };
        let request = match stage {
            Stage::Collective | Stage::Background => 0,
            _ => batch * REQUESTS_PER_BATCH + self.draw.below(REQUESTS_PER_BATCH),
        };
        let current = self.layers[batch as usize];
        let ahead = self.draw.below(u64::from(LAYERS - current)) as u16;
        let deadline = self.deadline();
        let flow = self.next_flow;
        self.next_flow += 1;
        Event::FlowArrived(FlowSpec {
            flow: FlowId(flow),
            stage,
            batch: BatchId(batch),
            request: RequestId(request),
            layer: Layer(if stage == Stage::Collective {
                current
            } else {
                current + ahead
            }),
            bytes: (16 << 10) + self.draw.below(1 << 20),
            deadline: if request == 0 { Time::NEVER } else { deadline },
            receiver_bound: false,
            whole: false,
        })
    }

    fn layer_began(&mut self) -> Event {
        let batch = 1 + self.draw.below(self.batches);
        let layer = &mut self.layers[batch as usize];
        *layer = (*layer + 1) % LAYERS;
        Event::LayerBegan {
            batch: BatchId(batch),
            layer: Layer(*layer),
        }
    }

    /// Executes all actions, as a driver would.
    #[inline]
    fn take_permits(&mut self) {
        while let Some(action) = self.link.poll_action(self.now) {
            if let Action::Permit {
                flow, bytes, last, ..
            } = action
            {
                self.in_flight.push_back((flow, bytes, last));
            }
        }
    }

    fn run(&mut self, clock: Clock, events: usize, recorder: &mut Recorder) {
        for i in 0..events as u64 {
            if self.link.next_deadline().is_some_and(|due| due <= self.now) {
                let begin = clock.begin();
                self.take_permits();
                recorder.note(begin, clock.end());
            }
            let event = if i % EVENTS_PER_LAYER == 0 {
                self.layer_began()
            } else if let Some((flow, bytes, last)) = self.in_flight.pop_front() {
                self.now = self.now + Span::transfer(bytes, self.rate);
                if last {
                    let arrival = self.arrival();
                    let begin = clock.begin();
                    self.link.handle(self.now, arrival);
                    self.take_permits();
                    recorder.note(begin, clock.end());
                }
                Event::BytesCompleted { flow, bytes }
            } else {
                self.arrival()
            };
            let begin = clock.begin();
            self.link.handle(self.now, event);
            self.take_permits();
            recorder.note(begin, clock.end());
        }
    }
}
