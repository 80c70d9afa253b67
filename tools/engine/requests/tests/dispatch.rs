//! Properties of every dispatcher under random events: no request is lost or placed twice, each
//! instance is up and has the right role, and each request that can be placed is placed in the end.

use std::collections::{BTreeMap, BTreeSet};

use laxity_requests::baseline::{CentralEdf, LeastWork, RoundRobin};
use laxity_requests::dispatch::{Dispatch, DispatchDecision, DispatchEvent, Role};
use laxity_requests::hyperflexis::priority::Bounds;
use laxity_requests::hyperflexis::{DispatcherOptions, HyperFlexis, Linear, Mapping};
use laxity_requests::iteration::Load;
use laxity_requests::request::{ApplicationId, ClassId, InstanceId, RequestId, Slo, Spec};
use laxity_requests::{Span, Time};
use proptest::prelude::*;

const MODEL: Linear = Linear { prefill: [8e6, 60_000.0, 1.5], decode: [7e6, 12.0, 20_000.0] };
const BLOCKS: u32 = 400;
const BLOCK_TOKENS: u32 = 16;

#[derive(Clone, Debug)]
enum Step {
    Arrive { prompt: u32, output: u32, class: u16 },
    Cancel(usize),
    // A placed request generates its first token or ends.
    Progress(usize),
    Report(usize),
    Up(bool),
    Down { which: usize, drains: bool },
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (1..3_000_u32, 1..300_u32, 0..4_u16)
            .prop_map(|(prompt, output, class)| Step::Arrive { prompt, output, class }),
        1 => any::<usize>().prop_map(Step::Cancel),
        6 => any::<usize>().prop_map(Step::Progress),
        4 => any::<usize>().prop_map(Step::Report),
        1 => any::<bool>().prop_map(Step::Up),
        1 => (any::<usize>(), any::<bool>())
            .prop_map(|(which, drains)| Step::Down { which, drains }),
        3 => (1..2_000_u64).prop_map(Step::Pass),
    ]
}

fn dispatcher(which: usize) -> Box<dyn Dispatch> {
    let options = DispatcherOptions::new(MODEL, BLOCK_TOKENS);
    let bounds = [700, 1_000, 2_000, 20_000]
        .map(|ttft| Bounds::around(ttft * 1_000_000, ttft * 50_000, 0.25))
        .to_vec();
    match which {
        0 => Box::new(RoundRobin::default()),
        1 => Box::new(LeastWork::new(MODEL)),
        2 => Box::new(CentralEdf::new(MODEL, 2_048, BLOCK_TOKENS)),
        3 => Box::new(HyperFlexis::new(options)),
        4 => Box::new(HyperFlexis::new(DispatcherOptions {
            monitor: Span::from_millis(300),
            scan_max: 3,
            ..options
        })),
        _ => Box::new(HyperFlexis::with_priorities(options, Mapping::new(bounds, 16))),
    }
}

const DISPATCHERS: usize = 6;

#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    Line,
    Placed(InstanceId),
    /// The prompt is computed, and the request waits for a decode instance.
    Computed,
    Decodes(InstanceId),
}

struct Driver {
    dispatch: Box<dyn Dispatch>,
    pools: bool,
    now: Time,
    up: BTreeMap<InstanceId, Role>,
    draining: BTreeSet<InstanceId>,
    live: BTreeMap<RequestId, (Spec, At)>,
    next: u64,
    next_instance: u32,
}

impl Driver {
    fn new(dispatch: Box<dyn Dispatch>, pools: bool) -> Self {
        Self {
            dispatch,
            pools,
            now: Time(1_000_000_000),
            up: BTreeMap::new(),
            draining: BTreeSet::new(),
            live: BTreeMap::new(),
            next: 0,
            next_instance: 0,
        }
    }

    fn tell(&mut self, event: &DispatchEvent) {
        self.dispatch.handle(self.now, event);
        self.drain();
    }

    fn drain(&mut self) {
        let mut count = 0;
        while let Some(decision) = self.dispatch.poll_decision(self.now) {
            count += 1;
            assert!(count < 10_000, "decisions without end");
            let DispatchDecision::Place { request, instance } = decision else {
                panic!("none of these refuses: {decision:?}")
            };
            let role = self.up.get(&instance).copied();
            let role = role.unwrap_or_else(|| panic!("{instance:?} is not up"));
            let (_, at) = self.live.get_mut(&request).expect("placed and not live");
            *at = match *at {
                At::Line => {
                    assert_ne!(role, Role::Decode, "a prompt on an instance that decodes");
                    At::Placed(instance)
                }
                At::Computed => {
                    assert_eq!(role, Role::Decode);
                    At::Decodes(instance)
                }
                other => panic!("{request:?} is placed twice: {other:?}"),
            };
        }
        let waiting =
            self.live.values().filter(|(_, at)| matches!(at, At::Line | At::Computed)).count();
        assert_eq!(self.dispatch.waiting(), waiting);
        // A wake-up that isn't in the future would make the driver spin.
        if let Some(wake) = self.dispatch.next_deadline() {
            assert!(wake > self.now, "woken at once, for ever");
        }
    }

    fn arrive(&mut self, prompt: u32, output: u32, class: u16) {
        let ttft = [700_000_000, 1_000_000_000, 2_000_000_000, 20_000_000_000][usize::from(class)];
        let slo = if self.next % 7 == 6 {
            Slo::Batch { ttlt: ttft * 10 }
        } else {
            let tbt = ttft / 20;
            Slo::Interactive { ttft, tbt }
        };
        let spec = Spec {
            id: RequestId(self.next),
            arrival: self.now,
            prompt,
            output_max: output + 1,
            class: ClassId(class),
            application: ApplicationId(u32::from(class)),
            slo,
            ..Spec::default()
        };
        self.next += 1;
        self.live.insert(spec.id, (spec, At::Line));
        self.tell(&DispatchEvent::Arrived(spec));
    }

    fn start(&mut self, decodes: bool) {
        let role = match (self.pools, decodes) {
            (false, _) => Role::Whole,
            (true, false) => Role::Prefill,
            (true, true) => Role::Decode,
        };
        let instance = InstanceId(self.next_instance);
        self.next_instance += 1;
        self.up.insert(instance, role);
        self.tell(&DispatchEvent::Up { instance, role });
    }

    fn stop(&mut self, instance: InstanceId, drains: bool) {
        self.up.remove(&instance);
        let mut lost = Vec::new();
        if drains {
            self.draining.insert(instance);
        } else {
            for (spec, at) in self.live.values_mut() {
                if matches!(*at, At::Placed(other) | At::Decodes(other) if other == instance) {
                    *at = At::Line;
                    lost.push(*spec);
                }
            }
        }
        self.tell(&DispatchEvent::Down { instance, lost });
    }

    fn progress(&mut self, request: RequestId) {
        let (spec, at) = self.live[&request];
        match at {
            At::Placed(instance) if self.pools => {
                let spec = Spec { ready: spec.prompt, generated: 1, ..spec };
                self.live.insert(request, (spec, At::Computed));
                self.tell(&DispatchEvent::Prefilled { spec, instance });
            }
            At::Placed(instance) | At::Decodes(instance) => {
                self.live.remove(&request);
                let since = self.now.since(spec.arrival).0;
                self.tell(&DispatchEvent::Finished {
                    request,
                    instance,
                    class: spec.class,
                    ttft: since / 2,
                    tpot: since / 100,
                    generated: spec.output_max,
                });
            }
            At::Line | At::Computed => (),
        }
    }

    fn report(&mut self, instance: InstanceId) {
        let mut load = Load { blocks: BLOCKS, ..Load::default() };
        for (nth, (spec, at)) in self.live.values().enumerate() {
            match at {
                At::Placed(other) if *other == instance && nth % 2 == 0 => {
                    load.waiting += 1;
                    load.prefill_tokens += u64::from(spec.prompt);
                }
                At::Placed(other) | At::Decodes(other) if *other == instance => {
                    load.running += 1;
                    load.decoding += 1;
                    load.decode_context += u64::from(spec.prompt);
                }
                _ => (),
            }
        }
        let held = load.decode_context / u64::from(BLOCK_TOKENS);
        load.blocks_free = BLOCKS.saturating_sub(held as u32);
        self.tell(&DispatchEvent::Load { instance, load, took: 20_000_000 });
    }
}

fn nth<K: Copy, V>(of: &BTreeMap<K, V>, at: usize) -> Option<K> {
    of.keys().nth(at % of.len().max(1)).copied()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn nobody_is_lost_or_placed_twice_and_all_end(
        which in 0..DISPATCHERS, pools in any::<bool>(),
        steps in prop::collection::vec(step(), 1..150)
    ) {
        let mut driver = Driver::new(dispatcher(which), pools);
        let name = which;
        driver.start(false);
        driver.start(true);
        for step in steps {
            match step {
                Step::Arrive { prompt, output, class } => driver.arrive(prompt, output, class),
                Step::Cancel(at) => {
                    if let Some(request) = nth(&driver.live, at) {
                        driver.live.remove(&request);
                        driver.tell(&DispatchEvent::Cancelled(request));
                    }
                }
                Step::Progress(at) => {
                    nth(&driver.live, at).into_iter().for_each(|request| driver.progress(request));
                }
                Step::Report(at) => {
                    nth(&driver.up, at).into_iter().for_each(|instance| driver.report(instance));
                }
                Step::Up(decodes) => driver.start(decodes),
                Step::Down { which, drains } => {
                    if let Some(instance) = nth(&driver.up, which) {
                        driver.stop(instance, drains);
                    }
                }
                Step::Pass(milliseconds) => {
                    driver.now = driver.now + Span::from_millis(milliseconds);
                    driver.drain();
                }
            }
        }
        driver.start(false);
        driver.start(true);
        let mut rounds = 0;
        while !driver.live.is_empty() {
            rounds += 1;
            prop_assert!(rounds < 2_000, "{name}: never ended: {:?}", driver.live);
            let instances: Vec<_> = driver.up.keys().copied().collect();
            for instance in instances {
                driver.report(instance);
            }
            let requests: Vec<_> = driver.live.keys().copied().collect();
            for request in requests {
                driver.progress(request);
            }
            driver.now = driver.now + Span::from_millis(100);
            driver.drain();
        }
        prop_assert_eq!(driver.dispatch.waiting(), 0);
    }
}

/// Lets a request with this prompt arrive, and returns the instance that gets it.
fn placed(driver: &mut Driver, prompt: u32) -> InstanceId {
    let number = driver.next;
    driver.arrive(prompt, 1, 0);
    match driver.live[&RequestId(number)].1 {
        At::Placed(instance) => instance,
        other => panic!("not placed: {other:?}"),
    }
}

#[test]
fn a_turn_goes_on_where_it_was_when_an_instance_goes() {
    let mut driver = Driver::new(Box::new(RoundRobin::default()), false);
    (0..4).for_each(|_| driver.start(false));
    assert_eq!([placed(&mut driver, 1).0, placed(&mut driver, 1).0], [0, 1]);
    driver.stop(InstanceId(0), true);
    let next = [placed(&mut driver, 1).0, placed(&mut driver, 1).0, placed(&mut driver, 1).0];
    assert_eq!(next, [2, 3, 1]);
}

#[test]
fn an_instance_that_comes_back_still_has_its_requests() {
    let mut driver = Driver::new(Box::new(LeastWork::new(MODEL)), false);
    driver.start(false);
    (0..3).for_each(|_| {
        placed(&mut driver, 10);
    });
    driver.start(false);
    driver.tell(&DispatchEvent::Up { instance: InstanceId(0), role: Role::Whole });
    let got = [placed(&mut driver, 10).0, placed(&mut driver, 10).0];
    assert_eq!(got, [1, 1]);
}
