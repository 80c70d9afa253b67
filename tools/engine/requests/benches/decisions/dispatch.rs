//! Benchmarks of dispatches over 64 instances in five situations:
//!
//! * *free*: a request arrives and is placed at once. It ends, unmeasured, before the next arrives.
//! * *arrives*: a request arrives while all instances are full and 10 000 requests wait. Each
//!   instance is asked about it.
//! * *full*: an instance without room reports while 10 000 requests wait.
//! * *takes*: an instance reports room and takes waiting requests. The time is per request.
//! * *moves*: half of the instances decode, and a computed prompt goes to one of them.

use std::hint::black_box;

use laxity_requests::baseline::{CentralEdf, LeastLoaded, LeastWork, RoundRobin};
use laxity_requests::dispatch::{Decision, Dispatch, Event, Role};
use laxity_requests::hyperflexis::priority::Bounds;
use laxity_requests::hyperflexis::{HyperFlexis, Linear, Mapping, Options};
use laxity_requests::iteration::Load;
use laxity_requests::request::{
    ApplicationId, ClassId, Importance, InstanceId, RequestId, Slo, Spec,
};
use laxity_requests::{Span, Time};

use crate::{Row, Subject};

const MODEL: Linear = Linear { prefill: [8e6, 60_000.0, 1.5], decode: [7e6, 12.0, 20_000.0] };
const INSTANCES: u32 = 64;
const LINE: u64 = 10_000;
const KIND: &str = "dispatch";
const LIMIT_US: f64 = 10.0;

type Boxed = Box<dyn Dispatch>;
type Make = Box<dyn Fn() -> Boxed>;
type Plain = fn() -> Boxed;

fn spec(id: u64, arrival: Time) -> Spec {
    let class = id % 4;
    let (ttft, tbt) = [(700, 50), (1_000, 70), (2_000, 90), (20_000, 100)][class as usize];
    Spec {
        id: RequestId(id),
        arrival,
        prompt: 100 + (id * 37 % 900) as u32,
        output_max: 200,
        ready: 0,
        generated: 0,
        class: ClassId(class as u16),
        application: ApplicationId(class as u32),
        importance: Importance::Important,
        slo: Slo::Interactive { ttft: ttft * 1_000_000, tbt: tbt * 1_000_000 },
    }
}

fn report(at: u32, decoding: u32, blocks_free: u32) -> Event {
    let load = Load {
        running: decoding,
        decoding,
        decode_context: u64::from(decoding) * 500,
        blocks: 8_192,
        blocks_free,
        ..Load::default()
    };
    Event::Load { instance: InstanceId(at), load, took: 20_000_000 }
}

#[derive(Clone, Copy, PartialEq)]
enum Situation {
    Free,
    Arrives,
    Full,
    Takes,
    Moves,
}

struct Loaded {
    dispatch: Boxed,
    situation: Situation,
    now: Time,
    next: u64,
    event: Event,
    placed: Vec<(RequestId, InstanceId)>,
    /// Requests whose prompts were computed, and the instances that have them.
    computed: Vec<(Spec, InstanceId)>,
}

impl Loaded {
    fn new(dispatch: Boxed, situation: Situation) -> Self {
        let mut loaded = Self {
            dispatch,
            situation,
            now: Time(1_000_000_000_000),
            next: 0,
            event: Event::Cancelled(RequestId(u64::MAX)),
            placed: Vec::new(),
            computed: Vec::new(),
        };
        for at in 0..INSTANCES {
            let role = match situation {
                Situation::Moves if at % 2 == 1 => Role::Decode,
                Situation::Moves => Role::Prefill,
                _ => Role::Whole,
            };
            let instance = InstanceId(at);
            let event = Event::Up { instance, role };
            loaded.dispatch.handle(loaded.now, &event);
        }
        match situation {
            Situation::Free | Situation::Moves => loaded.spread(),
            _ => loaded.fill(),
        }
        loaded
    }

    /// Places eight requests on each instance.
    fn spread(&mut self) {
        for _ in 0..u64::from(INSTANCES) * 8 {
            self.now = self.now + Span::from_millis(5);
            let spec = self.fresh();
            self.event = Event::Arrived(spec);
            self.decide();
            if self.situation == Situation::Moves {
                self.compute(spec);
                self.decide();
            }
            for at in 0..INSTANCES {
                self.dispatch.handle(self.now, &report(at, 4, 6_000));
            }
            self.drain();
        }
        self.placed.clear();
    }

    /// Places one long request on each instance, reports that none has room, and adds waiting
    /// requests.
    fn fill(&mut self) {
        for _ in 0..INSTANCES {
            self.event = Event::Arrived(self.fresh());
            self.decide();
        }
        self.now = self.now + Span::from_millis(1);
        for at in 0..INSTANCES {
            self.dispatch.handle(self.now, &report(at, 64, 0));
        }
        for _ in 0..LINE {
            let event = Event::Arrived(self.fresh());
            self.dispatch.handle(self.now, &event);
        }
        self.drain();
        self.now = self.now + Span::from_millis(300);
        self.drain();
        let waiting = self.dispatch.waiting() as u64;
        assert!(waiting + 1_000 > LINE, "{waiting} wait");
        self.placed.clear();
    }

    fn fresh(&mut self) -> Spec {
        self.next += 1;
        spec(self.next, self.now)
    }

    /// Reports the first token of a request on its instance.
    fn compute(&mut self, spec: Spec) {
        let spec = Spec { ready: spec.prompt, generated: 1, ..spec };
        let at = self.placed.iter().find(|(other, _)| *other == spec.id);
        let instance = at.map_or(InstanceId(0), |(_, instance)| *instance);
        self.computed.push((spec, instance));
        self.event = Event::Prefilled { spec, instance };
    }

    fn drain(&mut self) -> usize {
        let mut count = 0;
        while let Some(decision) = self.dispatch.poll_decision(self.now) {
            if let Decision::Place { request, instance } = decision {
                self.placed.push((request, instance));
            }
            count += 1;
        }
        count
    }
}

impl Subject for Loaded {
    fn prepare(&mut self) {
        self.now = self.now + Span(10_000);
        if matches!(self.situation, Situation::Free | Situation::Moves) {
            for (request, instance) in std::mem::take(&mut self.placed) {
                let event = Event::Finished {
                    request,
                    instance,
                    class: ClassId((request.0 % 4) as u16),
                    ttft: 100_000_000,
                    tpot: 20_000_000,
                    generated: 100,
                };
                self.dispatch.handle(self.now, &event);
            }
            let at = (self.next % u64::from(INSTANCES)) as u32;
            self.now = self.now + Span::from_millis(20);
            self.dispatch.handle(self.now, &report(at, 4, 6_000));
        }
        self.drain();
        let at = 7 + (self.next % 50) as u32;
        match self.situation {
            Situation::Free | Situation::Arrives => self.event = Event::Arrived(self.fresh()),
            Situation::Full => self.event = report(at, 64, 0),
            Situation::Takes => {
                self.next += 1;
                self.event = report(at, 64, 6_000);
            }
            Situation::Moves => {
                let spec = self.fresh();
                self.dispatch.handle(self.now, &Event::Arrived(spec));
                self.drain();
                self.compute(spec);
                self.placed.clear();
            }
        }
    }

    fn decide(&mut self) -> usize {
        self.dispatch.handle(self.now, &self.event);
        let placed = self.drain();
        black_box(self.dispatch.next_deadline());
        // A request that has to wait counts as a decision, too.
        placed.max(1)
    }
}

fn row(name: &str, situation: Situation, make: impl Fn() -> Boxed + 'static) -> Row {
    let said = match situation {
        Situation::Free => "free",
        Situation::Arrives => "arrives, all full, 10 000 wait",
        Situation::Full => "full, 10 000 wait",
        Situation::Takes => "takes, 10 000 wait",
        Situation::Moves => "moves",
    };
    Row {
        name: format!("dispatch: {name}, {said}"),
        kind: KIND,
        limit_us: Some(LIMIT_US),
        make: Box::new(move || Box::new(Loaded::new(make(), situation))),
    }
}

pub(crate) fn rows() -> Vec<Row> {
    let bounds = || {
        [700, 1_000, 2_000, 20_000]
            .map(|ttft| Bounds::around(ttft * 1_000_000, ttft * 50_000, 0.25))
            .to_vec()
    };
    let plain: [(&str, Plain); 3] = [
        ("round robin", || Box::new(RoundRobin::default())),
        ("least loaded", || Box::new(LeastLoaded::default())),
        ("least work", || Box::new(LeastWork::new(MODEL))),
    ];
    let lined: [(&str, Make); 4] = [
        ("central edf", Box::new(|| Box::new(CentralEdf::new(MODEL, false, 2_048, 16)))),
        ("edf with admission", Box::new(|| Box::new(CentralEdf::new(MODEL, true, 2_048, 16)))),
        ("hyperflexis", Box::new(|| Box::new(HyperFlexis::new(Options::new(MODEL, 16))))),
        (
            "hyperflexis, priorities",
            Box::new(move || {
                let mapping = Mapping::new(bounds(), 16);
                Box::new(HyperFlexis::with_priorities(Options::new(MODEL, 16), mapping))
            }),
        ),
    ];
    let mut rows = Vec::new();
    for (name, make) in plain {
        rows.push(row(name, Situation::Free, make));
        if name != "silo" {
            rows.push(row(name, Situation::Moves, make));
        }
    }
    for (name, make) in lined {
        let make = std::rc::Rc::new(make);
        for situation in [
            Situation::Free,
            Situation::Arrives,
            Situation::Full,
            Situation::Takes,
            Situation::Moves,
        ] {
            let make = make.clone();
            rows.push(row(name, situation, move || make()));
        }
    }
    rows
}
