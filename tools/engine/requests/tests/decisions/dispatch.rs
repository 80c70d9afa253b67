//! The placements and wake-up times of every dispatcher.

use std::collections::BTreeMap;

use laxity_requests::baseline::{CentralEdf, LeastLoaded, LeastWork, RoundRobin};
use laxity_requests::dispatch::{Decision, Dispatch, Event, Role};
use laxity_requests::hyperflexis::priority::Bounds;
use laxity_requests::hyperflexis::{HyperFlexis, Linear, Mapping, Options};
use laxity_requests::iteration::Load;
use laxity_requests::request::{
    ApplicationId, ClassId, Importance, InstanceId, RequestId, Slo, Spec,
};
use laxity_requests::{Span, Time};

use super::{Dice, Tally, table};

const MODEL: Linear = Linear { prefill: [8e6, 60_000.0, 1.5], decode: [7e6, 12.0, 20_000.0] };
const BLOCKS: u32 = 600;
const MS: u64 = 1_000_000;

fn dispatchers() -> Vec<(&'static str, Box<dyn Dispatch>)> {
    let options = Options::new(MODEL, 16);
    let bounds = [700, 1_000, 2_000, 20_000]
        .map(|ttft| Bounds::around(ttft * MS, ttft * 50_000, 0.25))
        .to_vec();
    let other = Options { theta: 0.5, monitor: Span::from_millis(300), scan_max: 3, ..options };
    vec![
        ("round_robin", Box::new(RoundRobin::default())),
        ("least_loaded", Box::new(LeastLoaded::default())),
        ("least_work", Box::new(LeastWork::new(MODEL))),
        ("central_edf", Box::new(CentralEdf::new(MODEL, false, 2_048, 16))),
        ("edf_admission", Box::new(CentralEdf::new(MODEL, true, 2_048, 16))),
        ("hyperflexis", Box::new(HyperFlexis::new(options))),
        ("hyperflexis_other", Box::new(HyperFlexis::new(other))),
        (
            "hyperflexis_pm",
            Box::new(HyperFlexis::with_priorities(options, Mapping::new(bounds, 16))),
        ),
    ]
}

#[derive(Clone, Copy, PartialEq)]
enum At {
    Line,
    On(InstanceId, bool),
}

struct Run {
    dispatch: Box<dyn Dispatch>,
    dice: Dice,
    now: Time,
    up: BTreeMap<InstanceId, Role>,
    live: BTreeMap<RequestId, (Spec, At)>,
    next: u64,
    tally: Tally,
}

impl Run {
    fn tell(&mut self, event: &Event) {
        self.dispatch.handle(self.now, event);
        self.drain();
    }

    fn drain(&mut self) {
        while let Some(decision) = self.dispatch.poll_decision(self.now) {
            self.tally.add(&decision);
            self.tally.show(|| format!("{decision:?}"));
            let Decision::Place { request, instance } = decision else {
                self.tally.count("refused", 1);
                continue;
            };
            self.tally.count("placed", 1);
            // The sum shows a change in which instances are preferred.
            self.tally.count("instances", instance.0 as usize);
            let decodes = self.up[&instance] == Role::Decode;
            if let Some((_, at)) = self.live.get_mut(&request) {
                *at = At::On(instance, decodes);
            }
        }
        let wake = self.dispatch.next_deadline().map(|at| at.0);
        self.tally.add(&(wake, self.dispatch.waiting()));
        self.tally.count("waiting", self.dispatch.waiting());
    }

    fn start(&mut self, role: Role) {
        let instance = InstanceId(self.next as u32);
        self.next += 1;
        self.up.insert(instance, role);
        self.tell(&Event::Up { instance, role });
    }

    fn arrive(&mut self) {
        let class = self.dice.below(4) as u16;
        let ttft = [700, 1_000, 2_000, 20_000][usize::from(class)] * MS;
        let slo = if self.dice.one_in(7) {
            Slo::Batch { ttlt: ttft * 10 }
        } else {
            Slo::Interactive { ttft, tbt: ttft / 20 }
        };
        let spec = Spec {
            id: RequestId(self.next),
            arrival: Time(self.now.0 - self.dice.below(100) * MS),
            prompt: 1 + self.dice.below(3_000) as u32,
            output_max: 1 + self.dice.below(300) as u32,
            ready: 0,
            generated: 0,
            class: ClassId(class),
            application: ApplicationId(u32::from(class)),
            importance: Importance::Important,
            slo,
        };
        self.next += 1;
        self.live.insert(spec.id, (spec, At::Line));
        self.tell(&Event::Arrived(spec));
    }

    fn some(&mut self) -> Option<RequestId> {
        let at = self.dice.below(self.live.len() as u64) as usize;
        self.live.keys().nth(at).copied()
    }

    fn instance(&mut self) -> Option<InstanceId> {
        let at = self.dice.below(self.up.len() as u64) as usize;
        self.up.keys().nth(at).copied()
    }

    fn progress(&mut self) {
        let Some(request) = self.some() else { return };
        let (spec, at) = self.live[&request];
        let At::On(instance, decodes) = at else {
            return;
        };
        let pools = self.up.get(&instance) == Some(&Role::Prefill);
        if pools && !decodes {
            let spec = Spec { ready: spec.prompt, generated: 1, ..spec };
            self.live.insert(request, (spec, At::Line));
            self.tell(&Event::Prefilled { spec, instance });
            return;
        }
        self.live.remove(&request);
        let since = self.now.since(spec.arrival).0;
        self.tell(&Event::Finished {
            request,
            instance,
            class: spec.class,
            ttft: since / 2,
            tpot: since / 100,
            generated: spec.output_max,
        });
    }

    fn report(&mut self) {
        let Some(instance) = self.instance() else {
            return;
        };
        let mut load = Load { blocks: BLOCKS, ..Load::default() };
        for (spec, at) in self.live.values() {
            match at {
                At::On(other, false) if *other == instance && spec.id.0 % 3 == 0 => {
                    load.waiting += 1;
                    load.prefill_tokens += u64::from(spec.prompt);
                }
                At::On(other, _) if *other == instance => {
                    load.running += 1;
                    load.decoding += 1;
                    load.decode_context += u64::from(spec.prompt);
                }
                _ => (),
            }
        }
        load.blocks_free = BLOCKS.saturating_sub((load.decode_context / 16) as u32);
        let took = 10 * MS + self.dice.below(20 * MS);
        self.tell(&Event::Load { instance, load, took });
    }

    fn stop(&mut self) {
        if self.up.len() < 3 {
            return;
        }
        let Some(instance) = self.instance() else {
            return;
        };
        self.up.remove(&instance);
        let mut lost = Vec::new();
        for (spec, at) in self.live.values_mut() {
            if matches!(*at, At::On(other, _) if other == instance) {
                *at = At::Line;
                *spec = Spec { ready: 0, generated: 0, ..*spec };
                lost.push(*spec);
            }
        }
        self.tell(&Event::Down { instance, lost });
    }

    fn step(&mut self, pools: bool) {
        let roles = if pools { [Role::Prefill, Role::Decode] } else { [Role::Whole; 2] };
        match self.dice.below(30) {
            0..9 => self.arrive(),
            9 => {
                if let Some(request) = self.some() {
                    self.live.remove(&request);
                    self.tell(&Event::Cancelled(request));
                }
            }
            10..18 => self.progress(),
            18..25 => self.report(),
            25 if self.dice.one_in(3) => {
                let role = roles[self.dice.below(2) as usize];
                self.start(role);
            }
            26 if self.dice.one_in(4) => self.stop(),
            _ => {
                self.now = self.now + Span(self.dice.below(60 * MS));
                self.drain();
            }
        }
    }
}

fn run(dispatch: Box<dyn Dispatch>, pools: bool, seed: u64, tally: Tally) -> Tally {
    let mut run = Run {
        dispatch,
        dice: Dice(seed),
        now: Time(1_000 * MS),
        up: BTreeMap::new(),
        live: BTreeMap::new(),
        next: 0,
        tally,
    };
    for nth in 0..if seed.is_multiple_of(5) { 64 } else { 4 } {
        run.start(match (pools, nth % 2) {
            (false, _) => Role::Whole,
            (true, 0) => Role::Prefill,
            (true, _) => Role::Decode,
        });
    }
    for _ in 0..1_500 {
        run.step(pools);
    }
    run.tally
}

#[test]
fn a_dispatcher_places_as_it_did() {
    for (at, (name, _)) in dispatchers().into_iter().enumerate() {
        let mut rows = [("whole", Tally::new()), ("pools", Tally::new())];
        for seed in 0..15 {
            let (_, dispatch) = dispatchers().swap_remove(at);
            let pools = seed % 2 == 1;
            let tally = &mut rows[usize::from(pools)].1;
            *tally = run(dispatch, pools, seed, std::mem::replace(tally, Tally::new()));
        }
        insta::assert_snapshot!(name, table(&rows));
    }
}
