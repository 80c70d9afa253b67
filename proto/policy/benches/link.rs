//! The cost of one event on a port with many queued flows (architecture §6: at most 1 µs at 100
//! 000, O(log n)), for the paper's policy and the default one.
//!
//! 64 batches of 8 requests have KV reuse, collectives and P2D arriving in equal parts. Flows have
//! 64 KiB to 2 MiB, so that some need several permits. The policy serves P2D last, so the queue
//! comes to consist mostly of P2D that can wait, until as much P2D is permitted as arrives. The
//! deadlines are such that some of it is late. Each batch computes for 80 layers, sends for as long
//! as 40 more, and another batch replaces it. The benchmark measures the cost of
//!
//! * `event`: an arrival, a permit or a completion, in the proportion in which they occur. Time
//!   passes as the port needs for the bytes, so the figure includes boundaries and promotions, but
//!   they do not count as events;
//! * `event_without_boundaries`: the same, but no boundaries follow the beginning of a batch;
//! * `layer_boundary`: a batch begins a layer, with all the promotions that this causes.

use std::collections::VecDeque;
use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use laxity_policy::link::Link;
use laxity_policy::{
    Action, BatchId, BatchSpec, Event, FlowId, FlowSpec, Layer, LinkConfig, PeerId, PolicyKind,
    RequestId, Span, Stage, Time,
};

const BATCHES: u64 = 64;
const REQUESTS_PER_BATCH: u64 = 8;
const LAYERS: u16 = 80;
/// Layer times from the beginning of a batch to the end of its last transfer.
const LIFE: u16 = LAYERS + LAYERS / 2;

/// Returns a well-mixed function of its argument (the finalizer of SplitMix64).
fn mix(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// An active batch, and the number of layer times since its beginning.
#[derive(Clone, Copy)]
struct Batch {
    id: u64,
    age: u16,
}

/// A port under load, and the state of its driver.
struct Rig {
    link: Link,
    now: Time,
    batches: Vec<Batch>,
    /// Average time for which flows can wait, in nanoseconds.
    horizon_ns: u64,
    layer_time: Span,
    /// Time of the next layer boundary of any batch, `NEVER` if there is none.
    next_boundary: Time,
    next_batch: usize,
    arrived: u64,
    /// Permits that are not completed: the flow, the bytes, and whether the permit was the last.
    in_flight: VecDeque<(FlowId, u64, bool)>,
    /// Number of flows that changed their level while they waited.
    moves: u64,
}

impl Rig {
    fn new(policy: PolicyKind, queued: u64, boundaries: bool) -> Self {
        let config = LinkConfig { policy, ..LinkConfig::default() };
        // The time that the port, a third of which is for P2D, needs for all waiting bytes.
        let horizon_ns = Span::transfer(queued * 3 * (1 << 20), config.rate).0;
        let mut rig = Self {
            link: Link::new(config).expect("the defaults are valid"),
            now: Time(1_000_000_000),
            batches: Vec::new(),
            horizon_ns,
            layer_time: Span(horizon_ns / u64::from(LAYERS)),
            next_boundary: if boundaries { Time::ZERO } else { Time::NEVER },
            next_batch: 0,
            arrived: 0,
            in_flight: VecDeque::new(),
            moves: 0,
        };
        for id in 1..=BATCHES {
            rig.batches.push(Batch { id, age: 0 });
            rig.begin(id);
            let index = id as usize - 1;
            for _ in 0..id * u64::from(LIFE) / BATCHES * u64::from(boundaries) {
                rig.move_on(index);
            }
        }
        for _ in 0..queued {
            rig.arrive();
        }
        rig.permit();
        rig
    }

    fn begin(&mut self, id: u64) {
        let batch = BatchId(id);
        let spec = BatchSpec { batch, layers: LAYERS, layer_time: self.layer_time };
        self.link.handle(self.now, Event::BatchBegan(spec));
        self.link.handle(self.now, Event::LayerBegan { batch, layer: Layer(0) });
        for nth in 0..REQUESTS_PER_BATCH {
            let request = RequestId(id * REQUESTS_PER_BATCH + nth);
            let deadline = Time(self.now.0 + mix(request.0) % (2 * self.horizon_ns));
            let joined = Event::RequestJoined { batch, request, deadline, bytes: 0 };
            self.link.handle(self.now, joined);
        }
    }

    /// Begins the batch's next layer, ends its computation, or replaces it by another batch.
    fn move_on(&mut self, index: usize) {
        let Batch { id, age } = self.batches[index];
        let batch = BatchId(id);
        self.batches[index].age += 1;
        match age + 1 {
            layer if layer < LAYERS => {
                self.link.handle(self.now, Event::LayerBegan { batch, layer: Layer(layer) });
            }
            LAYERS => self.link.handle(self.now, Event::ComputeFinished { batch }),
            LIFE => {
                for nth in 0..REQUESTS_PER_BATCH {
                    let request = RequestId(id * REQUESTS_PER_BATCH + nth);
                    self.link.handle(self.now, Event::RequestEnded { request });
                }
                self.link.handle(self.now, Event::BatchEnded { batch });
                self.batches[index] = Batch { id: id + BATCHES, age: 0 };
                self.begin(id + BATCHES);
            }
            _ => {}
        }
    }

    fn arrive(&mut self) {
        let bits = mix(self.arrived);
        let Batch { id, age } = self.batches[(bits >> 8) as usize % self.batches.len()];
        let request = RequestId(id * REQUESTS_PER_BATCH + (bits >> 16) % REQUESTS_PER_BATCH);
        let layer = age.min(LAYERS - 1);
        let ahead = (bits >> 24) as u16 % (LAYERS - layer);
        let due = Time(self.now.0 + mix(bits) % (2 * self.horizon_ns));
        let (stage, request, layer, deadline) = match bits % 3 {
            0 => (Stage::KvReuse, request, layer + ahead, Time::NEVER),
            1 => (Stage::Collective, RequestId(0), layer, Time::NEVER),
            _ => (Stage::P2d, request, layer, due),
        };
        let spec = FlowSpec {
            flow: FlowId(self.arrived),
            stage,
            batch: BatchId(id),
            request,
            layer: Layer(layer),
            bytes: (1 << 16) + (bits >> 32) % (1 << 21),
            deadline,
            whole: false,
            peer: PeerId(bits as u16 % 16),
        };
        self.link.handle(self.now, Event::FlowArrived(spec));
        self.arrived += 1;
    }

    /// Takes all permits that are possible now and returns their number.
    fn permit(&mut self) -> u64 {
        let mut permits = 0;
        while let Some(action) = black_box(self.link.poll_action(self.now)) {
            match action {
                Action::Permit { flow, bytes, last, .. } => {
                    self.in_flight.push_back((flow, bytes, last));
                    permits += 1;
                }
                Action::Moved { .. } => self.moves += 1,
            }
        }
        permits
    }

    /// Completes one chunk and returns the number of events that this caused.
    fn cycle(&mut self) -> u64 {
        let (flow, bytes, last) =
            self.in_flight.pop_front().expect("a busy port has bytes in flight");
        self.now = self.now + Span::transfer(bytes, self.link.config().rate);
        while self.next_boundary <= self.now {
            self.move_on(self.next_batch);
            self.next_batch = (self.next_batch + 1) % self.batches.len();
            self.next_boundary =
                self.now.max(self.next_boundary) + Span(self.layer_time.0 / BATCHES);
        }
        self.link.handle(self.now, Event::BytesCompleted { flow, bytes });
        if last {
            self.arrive();
        }
        1 + u64::from(last) + self.permit()
    }
}

fn events(c: &mut Criterion, name: &str, boundaries: bool) {
    let mut group = c.benchmark_group(name);
    group.sample_size(20).measurement_time(Duration::from_secs(3));
    for policy in [PolicyKind::Mfs, PolicyKind::Laxity] {
        for queued in [1_000, 10_000, 100_000] {
            let mut rig = None;
            let (mut all, mut moves_before) = (0, 0);
            group.bench_function(BenchmarkId::new(policy.name(), queued), |b| {
                let rig = rig.get_or_insert_with(|| {
                    let mut rig = Rig::new(policy, queued, boundaries);
                    // The drift has ended once all flows were replaced a few times.
                    let mut warm = 0;
                    while warm < 20 * queued {
                        warm += rig.cycle();
                    }
                    moves_before = rig.moves;
                    rig
                });
                b.iter_custom(|wanted| {
                    let start = Instant::now();
                    let mut events = 0;
                    while events < wanted {
                        events += rig.cycle();
                    }
                    let spent = start.elapsed();
                    all += events;
                    spent.mul_f64(wanted as f64 / events as f64)
                });
            });
            let Some(rig) = rig else { continue };
            let waiting = rig.link.waiting_flows() as u64;
            assert!(waiting > queued * 9 / 10, "{waiting} flows wait instead of {queued}");
            let moves = (rig.moves - moves_before) as f64 / f64::max(all as f64, 1.0);
            println!("{policy}, {queued} queued: {moves:.3} changes of level per event");
        }
    }
    group.finish();
}

fn event(c: &mut Criterion) {
    events(c, "link_event", true);
}

fn event_without_boundaries(c: &mut Criterion) {
    events(c, "link_event_without_boundaries", false);
}

fn layer_boundary(c: &mut Criterion) {
    let mut group = c.benchmark_group("link_layer_boundary");
    group.sample_size(20).measurement_time(Duration::from_secs(2));
    for policy in [PolicyKind::Mfs, PolicyKind::Laxity] {
        for queued in [1_000, 10_000, 100_000] {
            let mut rig = None;
            let mut batch = 0;
            group.bench_function(BenchmarkId::new(policy.name(), queued), |b| {
                let rig = rig.get_or_insert_with(|| Rig::new(policy, queued, true));
                b.iter(|| {
                    batch = (batch + 1) % rig.batches.len();
                    rig.move_on(batch);
                    rig.permit();
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, event, event_without_boundaries, layer_boundary);
criterion_main!(benches);
