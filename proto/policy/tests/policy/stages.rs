//! Whole prefills in virtual time: layers that wait for their KV reuse and for the collective
//! before them (MFS §3.1), on one port that several prefill units share.
//!
//! These tests are no evaluation, which is the simulator's task. They check on small, loaded
//! instances that under `mfs` and `laxity` more requests make their deadlines than under `fair`,
//! and that collectives finish sooner.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::virtual_time::{
    Port, TICK, at, batch, batch_ended, compute_finished, flow, fluid, layer_began, ticks,
};
use laxity_policy::{
    BatchId, Event, FlowId, FlowSpec, Layer, LinkConfig, PolicyKind, RequestId, Span, Stage, Time,
};

/// One batch, with one request.
#[derive(Clone, Copy, Debug)]
struct Prefill {
    unit: usize,
    arrival: f64,
    layers: u16,
    compute: f64,
    reuse: f64,
    collective: f64,
    p2d: f64,
    deadline: f64,
}

impl Prefill {
    /// Returns the time to first token with the port to itself and all reuse overlapped.
    fn alone(&self) -> f64 {
        self.reuse + f64::from(self.layers) * (self.compute + self.collective) + self.p2d
    }
}

/// Number of layers by which KV reuse is fetched ahead.
const LOOKAHEAD: u16 = 3;

#[derive(Clone, Debug, Default)]
struct Progress {
    layer: u16,
    computing: bool,
    reuse_done: BTreeSet<u16>,
    p2d_done: u16,
    collective_sent: f64,
    finished: Option<f64>,
}

struct Outcome {
    attained: usize,
    mean_ttft: f64,
    mean_collective: f64,
}

struct Run<'a> {
    port: Port,
    plan: &'a [Prefill],
    progress: Vec<Progress>,
    queued: BTreeMap<usize, VecDeque<usize>>,
    running: BTreeMap<usize, usize>,
    timers: BTreeSet<(Time, usize, bool)>,
    flows: BTreeMap<FlowId, (usize, Stage, u16)>,
    collective_times: Vec<f64>,
}

impl<'a> Run<'a> {
    fn new(config: LinkConfig, plan: &'a [Prefill]) -> Self {
        let arrivals = plan.iter().zip(0..).map(|(p, i)| (at(p.arrival), i, false)).collect();
        Self {
            port: Port::new(config),
            plan,
            progress: vec![Progress::default(); plan.len()],
            queued: BTreeMap::new(),
            running: BTreeMap::new(),
            timers: arrivals,
            flows: BTreeMap::new(),
            collective_times: Vec::new(),
        }
    }

    fn submit(&mut self, i: usize, stage: Stage, layer: u16, units: f64) {
        let id = self.flows.len() as u64 + 1;
        self.flows.insert(FlowId(id), (i, stage, layer));
        let whole_batch = stage == Stage::Collective;
        self.port.submit(FlowSpec {
            batch: BatchId(i as u64 + 1),
            request: RequestId(if whole_batch { 0 } else { i as u64 + 1 }),
            layer: Layer(layer),
            deadline: if stage == Stage::P2d { at(self.plan[i].deadline) } else { Time::NEVER },
            ..flow(id, stage, units)
        });
    }

    fn arrive(&mut self, i: usize) {
        let prefill = self.plan[i];
        let id = BatchId(i as u64 + 1);
        let per_layer = prefill.compute + prefill.collective;
        self.port.tell(batch(id.0, prefill.layers, per_layer));
        self.port.tell(Event::RequestJoined {
            batch: id,
            request: RequestId(id.0),
            deadline: at(prefill.deadline),
            bytes: 0,
        });
        let unit = prefill.unit;
        let behind = self.queued.entry(unit).or_default().back().or(self.running.get(&unit));
        if let Some(&ahead) = behind {
            let ahead = BatchId(ahead as u64 + 1);
            self.port.tell(Event::BatchQueued { batch: id, ahead });
        }
        for layer in 0..LOOKAHEAD.min(prefill.layers) {
            self.submit(i, Stage::KvReuse, layer, prefill.reuse);
        }
        self.queued.entry(unit).or_default().push_back(i);
        self.start_next(unit);
    }

    fn start_next(&mut self, unit: usize) {
        if self.running.contains_key(&unit) {
            return;
        }
        if let Some(i) = self.queued.entry(unit).or_default().pop_front() {
            self.running.insert(unit, i);
            self.begin_layer(i);
        }
    }

    fn begin_layer(&mut self, i: usize) {
        let layer = self.progress[i].layer;
        self.port.tell(layer_began(i as u64 + 1, layer));
        let ahead = layer + LOOKAHEAD;
        if ahead < self.plan[i].layers {
            self.submit(i, Stage::KvReuse, ahead, self.plan[i].reuse);
        }
        self.try_compute(i);
    }

    fn try_compute(&mut self, i: usize) {
        let progress = &mut self.progress[i];
        let runs = self.running.get(&self.plan[i].unit) == Some(&i);
        if runs && !progress.computing && progress.reuse_done.contains(&progress.layer) {
            progress.computing = true;
            let span = Span((self.plan[i].compute * TICK as f64) as u64);
            self.timers.insert((self.port.now + span, i, true));
        }
    }

    fn computed(&mut self, i: usize) {
        let layer = self.progress[i].layer;
        self.progress[i].collective_sent = ticks(self.port.now);
        self.submit(i, Stage::Collective, layer, self.plan[i].collective);
        self.submit(i, Stage::P2d, layer, self.plan[i].p2d);
    }

    fn finished(&mut self, id: FlowId) {
        let (i, stage, layer) = self.flows[&id];
        let now = ticks(self.port.now);
        let progress = &mut self.progress[i];
        match stage {
            Stage::KvReuse => {
                progress.reuse_done.insert(layer);
                self.try_compute(i);
            }
            Stage::Collective => {
                self.collective_times.push(now - progress.collective_sent);
                progress.computing = false;
                progress.layer += 1;
                if progress.layer < self.plan[i].layers {
                    self.begin_layer(i);
                } else {
                    self.port.tell(compute_finished(i as u64 + 1));
                    self.running.remove(&self.plan[i].unit);
                    self.start_next(self.plan[i].unit);
                }
            }
            _ => {
                progress.p2d_done += 1;
                if progress.p2d_done == self.plan[i].layers {
                    progress.finished = Some(now);
                    let request = RequestId(i as u64 + 1);
                    self.port.tell(Event::RequestEnded { request });
                    self.port.tell(batch_ended(i as u64 + 1));
                }
            }
        }
    }

    fn run(mut self) -> Outcome {
        while self.progress.iter().any(|progress| progress.finished.is_none()) {
            let next = self.timers.first().map_or(at(1e6), |&(time, ..)| time);
            if self.port.step(next) {
                let id = self.port.latest.expect("a flow finished");
                self.finished(id);
            } else {
                let (_, i, computed) = self.timers.pop_first().expect("not stuck");
                if computed {
                    self.computed(i);
                } else {
                    self.arrive(i);
                }
            }
        }
        let n = self.plan.len() as f64;
        let done: Vec<f64> = self.progress.iter().filter_map(|p| p.finished).collect();
        Outcome {
            attained: done.iter().zip(self.plan).filter(|(done, p)| **done <= p.deadline).count(),
            mean_ttft: done.iter().zip(self.plan).map(|(done, p)| done - p.arrival).sum::<f64>()
                / n,
            mean_collective: self.collective_times.iter().sum::<f64>()
                / self.collective_times.len() as f64,
        }
    }
}

/// Deterministic pseudo-random numbers in [0, 1).
struct Lcg(u64);

impl Lcg {
    fn next(&mut self) -> f64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Proportions of a layer: compute time, and units of each stage.
#[derive(Clone, Copy, Debug)]
struct Mix {
    compute: f64,
    reuse: f64,
    collective: f64,
    p2d: f64,
    /// Whether reuse varies between batches independently of the other sizes.
    uneven: bool,
}

const MIXES: [Mix; 5] = [
    Mix { compute: 0.4, reuse: 0.5, collective: 0.3, p2d: 0.4, uneven: false },
    Mix { compute: 0.4, reuse: 0.5, collective: 0.3, p2d: 0.4, uneven: true },
    Mix { compute: 0.8, reuse: 0.2, collective: 0.5, p2d: 0.2, uneven: true },
    Mix { compute: 0.4, reuse: 0.3, collective: 0.2, p2d: 0.8, uneven: true },
    Mix { compute: 0.4, reuse: 0.8, collective: 0.2, p2d: 0.2, uneven: true },
];

/// Returns `n` prefills over three units, with a port load of about `load`. Deadlines are three
/// times the time that each would take alone (the paper's SLO).
fn plan(seed: u64, n: usize, load: f64, mix: Mix) -> Vec<Prefill> {
    let mut random = Lcg(seed);
    let mut now = 0.0;
    (0..n)
        .map(|i| {
            let scale = 0.5 + 1.5 * random.next() * random.next();
            let own_scale = 0.5 + random.next();
            let layers = 8;
            let reuse = mix.reuse * if mix.uneven { own_scale } else { scale };
            let (collective, p2d) = (mix.collective * scale, mix.p2d * scale);
            let bytes = f64::from(layers) * (reuse + collective + p2d);
            now += -(1.0 - random.next()).ln() * bytes / load;
            let mut prefill = Prefill {
                unit: i % 3,
                arrival: now,
                layers,
                compute: mix.compute * scale,
                reuse,
                collective,
                p2d,
                deadline: 0.0,
            };
            prefill.deadline = now + 3.0 * prefill.alone();
            prefill
        })
        .collect()
}

const SEEDS: u64 = 3;
const PREFILLS: usize = 40;

/// Returns, over all seeds, requests in time, mean TTFT and mean collective time in ticks.
fn outcome(policy: PolicyKind, mix: Mix) -> (usize, f64, f64) {
    let (mut attained, mut ttft, mut collective) = (0, 0.0, 0.0);
    for seed in 1..=SEEDS {
        let plan = plan(seed, PREFILLS, 0.7, mix);
        let outcome = Run::new(LinkConfig { policy, ..fluid() }, &plan).run();
        attained += outcome.attained;
        ttft += outcome.mean_ttft / SEEDS as f64;
        collective += outcome.mean_collective / SEEDS as f64;
    }
    (attained, ttft, collective)
}

#[test]
fn stage_aware_policies_meet_more_deadlines_with_shorter_collectives() {
    use PolicyKind::{Edf, EdfLow, Fair, Laxity, Mfs, Tent, TentEdf, TwoClass, TwoClass99};
    let mut sums: BTreeMap<PolicyKind, usize> = BTreeMap::new();
    for mix in MIXES {
        let table: BTreeMap<PolicyKind, (usize, f64, f64)> =
            PolicyKind::ALL.iter().map(|&policy| (policy, outcome(policy, mix))).collect();
        println!("{mix:?}");
        for (policy, (attained, ttft, collective)) in &table {
            println!(
                "{policy:>10} {attained:4} in time, TTFT {ttft:5.1}, collective {collective:.2}"
            );
            *sums.entry(*policy).or_default() += attained;
        }
        let (attained, _, collective) = table[&Laxity];
        for other in [Fair, Edf, EdfLow, TwoClass, TwoClass99, TentEdf, Tent, Mfs] {
            assert!(attained > table[&other].0, "laxity not above {other}: {table:?}");
        }
        assert!(collective < 0.6 * table[&Fair].2 && collective <= table[&TwoClass].2 * 1.01);
        assert!(table[&Mfs].2 < 0.7 * table[&Fair].2, "mfs collectives: {table:?}");
    }
    println!("{sums:?}");
    assert!(PolicyKind::ALL.iter().all(|policy| sums[policy] <= sums[&Laxity]), "{sums:?}");
    for other in [Fair, Edf, EdfLow, TwoClass] {
        assert!(sums[&Mfs] > sums[&other], "mfs not above {other}: {sums:?}");
    }
}
