//! What an event of the network costs, a start or an end. Situations, all with 10 000 ports:
//!
//! * `single`: one transfer at a time, over two ports;
//! * `lone`: transfers over two ports that they have to themselves, 2 500 at a time;
//! * `collective`: aggregates of class 1 start on the 32 ports of a unit at once and end at once;
//!   every fourth port has a transfer of a lower class, which thereby stops and goes on;
//! * `hot_egress`: 500 equal transfers from one port to idle ones;
//! * `hot_ingress`: 500 transfers to one port, from ports that send four more each;
//! * `serving`: each of 2 500 ranks sends chunk after chunk to a port at random, one to four at a
//!   time in six classes, while collectives come and go on the ranks' own ports;
//! * `crowd`: 100 000 transfers between 10 000 ports at random, in one class. Every event changes
//!   most rates there are, if ever so little. `crowd_1_percent` is the same with that tolerance.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use laxity_policy::Time;
use laxity_sim::network::{Network, PortId};

const PORTS: u64 = 10_000;
const NIC: f64 = 25e9;
const CHUNK: u64 = 4 << 20;
const UNIT: u64 = 32;

/// A network, its time, and a source of random numbers.
struct Bed {
    network: Network,
    now: Time,
    seed: u64,
}

impl Bed {
    fn new() -> Self {
        Self::with_tolerance(0.0)
    }

    fn with_tolerance(tolerance: f64) -> Self {
        let mut network = Network::with_tolerance(tolerance);
        for _ in 0..PORTS {
            network.add_port(NIC);
        }
        Self {
            network,
            now: Time(0),
            seed: 0,
        }
    }

    /// The next number of SplitMix64.
    fn draw(&mut self) -> u64 {
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = self.seed;
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn start(&mut self, path: [u64; 2], bytes: u64, class: u8, tag: u64) {
        let path = path.map(|port| PortId(port as u32));
        self.network
            .start(self.now, &path, bytes, class, 1.0, tag as u32);
    }

    fn start_one(&mut self, port: u64, bytes: u64, class: u8, tag: u64) {
        let path = [PortId(port as u32)];
        self.network
            .start(self.now, &path, bytes, class, 1.0, tag as u32);
    }

    /// Goes to the next end.
    fn step(&mut self) {
        let now = self.network.next_end(self.now);
        self.now = now.expect("something is under way");
    }

    fn pop(&mut self) -> Option<u64> {
        let (_, tag) = self.network.pop_ended(self.now)?;
        Some(u64::from(tag))
    }
}

/// Time per event: `turn` makes some events and says how many.
fn measure(c: &mut Criterion, name: &str, mut bed: Bed, mut turn: impl FnMut(&mut Bed) -> u64) {
    let mut group = c.benchmark_group("network");
    group.throughput(Throughput::Elements(1));
    group.bench_function(name, |b| {
        b.iter_custom(|events| {
            let (mut taken, mut done) = (Duration::ZERO, 0);
            while done < events {
                let start = Instant::now();
                let mut some = 0;
                while some < 100 {
                    some += turn(black_box(&mut bed));
                }
                taken += start.elapsed();
                done += some;
            }
            taken.mul_f64(events as f64 / done as f64)
        });
    });
    group.finish();
}

fn lone(c: &mut Criterion) {
    for (name, pairs) in [("single", 1), ("lone", 2500)] {
        let mut bed = Bed::new();
        for pair in 0..pairs {
            let bytes = 1 + bed.draw() % CHUNK;
            bed.start([pair, PORTS / 2 + pair], bytes, 2, pair);
        }
        measure(c, name, bed, |bed| {
            bed.step();
            let mut events = 0;
            while let Some(pair) = bed.pop() {
                bed.start([pair, PORTS / 2 + pair], CHUNK, 2, pair);
                events += 2;
            }
            events
        });
    }
}

fn collective(c: &mut Criterion) {
    let mut bed = Bed::new();
    for egress in (0..PORTS / 2).step_by(4) {
        bed.start([egress, PORTS / 2 + egress], 1 << 60, 3, 0);
    }
    let mut unit = 0;
    measure(c, "collective", bed, move |bed| {
        unit = (unit + 1) % (PORTS / UNIT);
        for port in unit * UNIT..(unit + 1) * UNIT {
            bed.start_one(port, CHUNK, 1, port);
        }
        bed.step();
        while bed.pop().is_some() {}
        2 * UNIT
    });
}

fn hot_egress(c: &mut Criterion) {
    let mut bed = Bed::new();
    for ingress in 1..=500 {
        bed.start([0, ingress], CHUNK + ingress * 1000, 2, ingress);
    }
    measure(c, "hot_egress", bed, |bed| {
        bed.step();
        let mut events = 0;
        while let Some(ingress) = bed.pop() {
            let bytes = CHUNK + bed.draw() % CHUNK;
            bed.start([0, ingress], bytes, 2, ingress);
            events += 2;
        }
        events
    });
}

fn hot_ingress(c: &mut Criterion) {
    let mut bed = Bed::new();
    for egress in 1..=500 {
        bed.start([0, egress], CHUNK + egress * 1000, 2, egress);
        for _ in 0..4 {
            let to = 1000 + bed.draw() % 2000;
            bed.start([egress, to], 1 << 60, 2, 0);
        }
    }
    measure(c, "hot_ingress", bed, |bed| {
        bed.step();
        let mut events = 0;
        while let Some(egress) = bed.pop() {
            let bytes = CHUNK + bed.draw() % CHUNK;
            bed.start([0, egress], bytes, 2, egress);
            events += 2;
        }
        events
    });
}

/// Tag of the aggregates of `serving`; below are its chunks.
const AGGREGATE: u64 = PORTS;

fn serving(c: &mut Criterion) {
    const RANKS: u64 = 2500;
    let chunk = |bed: &mut Bed, rank: u64| {
        let to = RANKS + bed.draw() % (PORTS - RANKS);
        let bytes = 1 + bed.draw() % (2 * CHUNK);
        let class = 2 + bed.draw() % 6;
        bed.start([rank, to], bytes, class as u8, rank);
    };
    let collective = |bed: &mut Bed, unit: u64| {
        let bytes = 8 * CHUNK + bed.draw() % CHUNK;
        for port in unit * UNIT..((unit + 1) * UNIT).min(RANKS) {
            bed.start_one(port, bytes, 1, AGGREGATE + unit);
        }
    };
    let mut bed = Bed::new();
    for rank in 0..RANKS {
        for _ in 0..=rank % 4 {
            chunk(&mut bed, rank);
        }
    }
    let units = RANKS.div_ceil(UNIT);
    let mut left = vec![0_u64; units as usize];
    // A third of the units is in a collective at any time.
    for unit in 0..units / 3 {
        collective(&mut bed, unit);
        left[unit as usize] = UNIT.min(RANKS - unit * UNIT);
    }
    measure(c, "serving", bed, move |bed| {
        bed.step();
        let mut events = 0;
        while let Some(tag) = bed.pop() {
            events += 1;
            if tag < AGGREGATE {
                chunk(bed, tag);
                events += 1;
                continue;
            }
            let unit = (tag - AGGREGATE) as usize;
            left[unit] -= 1;
            if left[unit] == 0 {
                let idle = (0..units).filter(|&unit| left[unit as usize] == 0);
                let idle: Vec<u64> = idle.collect();
                let next = idle[(bed.draw() % idle.len() as u64) as usize];
                collective(bed, next);
                left[next as usize] = UNIT.min(RANKS - next * UNIT);
                events += left[next as usize];
            }
        }
        events
    });
}

fn crowd(c: &mut Criterion) {
    let start = |bed: &mut Bed| {
        let from = bed.draw() % (PORTS / 2);
        let to = PORTS / 2 + bed.draw() % (PORTS / 2);
        let bytes = 1 + bed.draw() % (2 * CHUNK);
        bed.start([from, to], bytes, 2, 0);
    };
    for (name, tolerance) in [("crowd", 0.0), ("crowd_1_percent", 0.01)] {
        let mut bed = Bed::with_tolerance(tolerance);
        for _ in 0..100_000 {
            start(&mut bed);
        }
        measure(c, name, bed, move |bed| {
            bed.step();
            let mut events = 0;
            while bed.pop().is_some() {
                start(bed);
                events += 2;
            }
            events
        });
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(2));
    targets = lone, collective, hot_egress, hot_ingress, serving
}
criterion_group! {
    name = slow;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(1))
        .measurement_time(Duration::from_secs(1));
    targets = crowd
}
criterion_main!(benches, slow);
