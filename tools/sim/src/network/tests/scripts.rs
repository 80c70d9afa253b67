//! Random scripts that are compared with the oracle after every step.

use laxity_policy::Time;
use proptest::collection::vec;
use proptest::prelude::*;

use super::super::{Network, NewTransfer, PortId, TransferId};
use super::oracle::{self, Fluid};

#[derive(Clone, Debug)]
enum Step {
    Start(Vec<usize>, u64, u8, f64),
    /// Computes rates and advances by a percentage of the time to the next end.
    Pass(u64),
}

#[derive(Clone, Debug)]
struct Script {
    capacities: Vec<f64>,
    steps: Vec<Step>,
    patience: usize,
    /// First class with a guaranteed share of each port, and that share.
    floor: Option<(u8, f64)>,
}

/// One transfer in flight with its expected remaining bytes.
struct Shadow {
    id: TransferId,
    tag: u32,
    fluid: Fluid,
    bytes: u64,
    left: f64,
    rate: f64,
}

struct Pair {
    network: Network,
    ports: Vec<PortId>,
    capacities: Vec<f64>,
    floor: Option<(u8, f64)>,
    now_ns: u64,
    shadows: Vec<Shadow>,
    carried: Vec<f64>,
    started: u32,
}

impl Pair {
    fn new(script: &Script) -> Self {
        let capacities = &script.capacities;
        let mut network = Network { patience: script.patience, ..Network::default() };
        if let Some((class, share)) = script.floor {
            network.guarantee(class, share);
        }
        let ports = capacities.iter().map(|&c| network.add_port(c)).collect();
        Self {
            network,
            ports,
            floor: script.floor,
            capacities: capacities.clone(),
            now_ns: 0,
            shadows: Vec::new(),
            carried: vec![0.0; capacities.len()],
            started: 0,
        }
    }

    fn start(&mut self, draws: &[usize], bytes: u64, class: u8, weight: f64) {
        let mut path: Vec<usize> = draws.iter().map(|d| d % self.ports.len()).collect();
        path.sort_unstable();
        path.dedup();
        let ports: Vec<PortId> = path.iter().map(|&port| self.ports[port]).collect();
        let tag = self.started;
        self.started += 1;
        let now = Time(self.now_ns);
        let id = self.network.start(now, &ports, NewTransfer { bytes, class, weight, tag });
        let fluid = Fluid { path, class, weight };
        self.shadows.push(Shadow { id, tag, fluid, bytes, left: bytes as f64, rate: 0.0 });
    }

    /// Computes and compares rates, then advances by `percent` of the time to the next end.
    fn pass(&mut self, percent: u64) {
        let next = self.network.next_end(Time(self.now_ns));
        self.network.check();
        let fluids: Vec<Fluid> = self.shadows.iter().map(|one| one.fluid.clone()).collect();
        // Transfers of zero bytes get no share.
        let live: Vec<usize> =
            (0..fluids.len()).filter(|&one| self.shadows[one].bytes > 0).collect();
        let flowing: Vec<Fluid> = live.iter().map(|&one| fluids[one].clone()).collect();
        let rates = oracle::rates(&self.capacities, &flowing, self.floor);
        for (&one, &rate) in live.iter().zip(&rates) {
            let shadow = &mut self.shadows[one];
            let got = self.network.rate(shadow.id);
            let scale = shadow.fluid.path.iter().map(|&port| self.capacities[port]);
            let scale = scale.fold(f64::INFINITY, f64::min);
            assert!(
                (got - rate).abs() <= 1e-9 * rate + 1e-12 * scale,
                "transfer {} gets {got}, should get {rate}",
                shadow.tag
            );
            shadow.rate = got;
        }
        let ends = self.shadows.iter().filter_map(|one| {
            if one.left <= 0.0 {
                return Some(self.now_ns as f64);
            }
            (one.rate > 0.0).then(|| self.now_ns as f64 + one.left / one.rate * 1e9)
        });
        let expected = ends.min_by(f64::total_cmp).filter(|&ns| ns < 9e18);
        let (Some(next), Some(expected)) = (next, expected) else {
            assert_eq!(next.is_some(), expected.is_some(), "{next:?} {expected:?}");
            return;
        };
        assert!(next.0 >= self.now_ns);
        let late = next.0 as f64 - expected;
        let slip = 0.01 + (expected - self.now_ns as f64) * 1e-9;
        assert!(late > -slip && late < 1.0 + slip, "next end at {next:?}, should be at {expected}");
        let to_ns =
            self.now_ns + (u128::from(next.0 - self.now_ns) * u128::from(percent) / 100) as u64;
        self.advance(to_ns);
        self.pop();
    }

    fn advance(&mut self, to_ns: u64) {
        let seconds = (to_ns - self.now_ns) as f64 / 1e9;
        for shadow in &mut self.shadows {
            shadow.left = (shadow.left - shadow.rate * seconds).max(0.0);
        }
        self.now_ns = to_ns;
        for shadow in &self.shadows {
            let left = self.network.remaining(shadow.id, Time(to_ns));
            // The tolerance grows with the size of the transfer.
            let slip = 1e-2 + shadow.bytes as f64 * 1e-9;
            assert!(
                (left - shadow.left).abs() < slip,
                "transfer {} has {left} left, should have {}",
                shadow.tag,
                shadow.left
            );
        }
        for (port, &id) in self.ports.iter().enumerate() {
            let crossing = self.shadows.iter().filter(|one| one.fluid.path.contains(&port));
            let under_way: f64 = crossing.map(|one| one.bytes as f64 - one.left).sum();
            let expected = self.carried[port] + under_way;
            let carried = self.network.carried(id, Time(to_ns));
            assert!(
                (carried - expected).abs() <= 1.0 + expected * 1e-9,
                "{carried} carried, should be {expected}"
            );
            assert!(carried <= self.capacities[port] * to_ns as f64 / 1e9 * (1.0 + 1e-9) + 1.0);
        }
    }

    fn pop(&mut self) {
        let mut last = None;
        while let Some((id, tag)) = self.network.pop_ended(Time(self.now_ns)) {
            let place = self.shadows.iter().position(|one| one.id == id);
            let shadow = self.shadows.remove(place.expect("it is in flight"));
            assert_eq!(shadow.tag, tag);
            assert!(
                shadow.left <= 1e-2 + shadow.bytes as f64 * 1e-9,
                "ended with {} left",
                shadow.left
            );
            assert!(last < Some(tag), "in the order of starts");
            last = Some(tag);
            for &port in &shadow.fluid.path {
                self.carried[port] += shadow.bytes as f64;
            }
        }
    }

    fn run(mut self, steps: &[Step]) {
        for step in steps {
            match step {
                Step::Start(path, bytes, class, weight) => {
                    self.start(path, *bytes, *class, *weight);
                }
                Step::Pass(percent) => self.pass(*percent),
            }
        }
        // All bytes get through in the end.
        while !self.shadows.is_empty() {
            self.pass(100);
        }
        assert_eq!(self.network.next_end(Time(self.now_ns)), None);
        self.network.check();
        for (port, &id) in self.ports.iter().enumerate() {
            assert_eq!(self.network.active(id), 0);
            assert_eq!(self.network.carried(id, Time(self.now_ns)), self.carried[port]);
        }
    }
}

fn capacity() -> impl Strategy<Value = f64> {
    prop_oneof![
        4 => Just(25e9),
        2 => Just(50e9),
        1 => Just(1e9),
        2 => (1u32..1000).prop_map(|c| f64::from(c) * 1e8),
    ]
}

fn weight() -> impl Strategy<Value = f64> {
    prop_oneof![
        5 => Just(1.0),
        2 => Just(2.0),
        1 => Just(0.3),
        2 => 1e-3..1e3_f64,
    ]
}

fn step(classes: u8, hops: usize) -> impl Strategy<Value = Step> {
    let bytes = prop_oneof![
        1 => Just(0),
        4 => Just(4 << 20),
        8 => 1u64..100_000_000,
    ];
    let start = (vec(any::<usize>(), 1..=hops), bytes, 0..classes, weight());
    let percent = prop_oneof![3 => Just(100u64), 1 => 0..100u64];
    prop_oneof![
        6 => start.prop_map(|(path, bytes, class, weight)| Step::Start(path, bytes, class, weight)),
        4 => percent.prop_map(Step::Pass),
    ]
}

fn script(steps: usize) -> impl Strategy<Value = Script> {
    let patience = prop_oneof![Just(0), Just(super::super::PATIENCE), Just(1000)];
    (1usize..14, 1u8..5, 1usize..5).prop_flat_map(move |(ports, classes, hops)| {
        let floor = (1..=classes, prop_oneof![Just(0.01), 0.0..0.9_f64]);
        (
            vec(capacity(), ports),
            vec(step(classes, hops), 1..steps),
            patience.clone(),
            proptest::option::of(floor),
        )
            .prop_map(|(capacities, steps, patience, floor)| Script {
                capacities,
                steps,
                patience,
                floor,
            })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn rates_and_ends_are_those_of_the_oracle(script in script(120)) {
        Pair::new(&script).run(&script.steps);
    }
}
