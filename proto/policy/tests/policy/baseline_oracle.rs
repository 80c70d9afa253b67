//! The baselines against a minimal definition of each: a key over the waiting flows, computed anew
//! for all flows at every permit. The served flow must have the smallest key. Each key ends with
//! the arrival, so that flow is unique. `karuna` is not covered, because it delays flows by time
//! and not by order; `baselines.rs` tests it.

use std::collections::BTreeMap;

use crate::random_events::{config, flow};
use laxity_policy::{
    Action, BatchId, Event, FlowId, FlowSpec, Level, Link, LinkConfig, PolicyKind, RequestId, Span,
    Stage, Time,
};
use proptest::prelude::*;

const RATE: u64 = 1_000_000_000;
const SLACK_NS: u64 = 5000;
/// Period of promotion in `random_events`, in which `tent` predicts MLU again.
const PERIOD_NS: u64 = 2000;
/// Due flows that one pick handles. With at most as many paced flows, no timer is left for the next
/// pick.
const PACED_MAX: usize = 8;

#[derive(Clone, Debug)]
enum Step {
    Arrive(FlowSpec),
    CompleteAll,
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => flow().prop_map(Step::Arrive),
        6 => Just(Step::CompleteAll),
        4 => (0u64..9000).prop_map(Step::Pass),
    ]
}

#[derive(Clone, Debug)]
struct Waiting {
    spec: FlowSpec,
    seq: u64,
    left: u64,
    /// Fair sharing: bytes that the flow has had, from its class's `had` at its arrival on.
    share: u64,
    /// Karuna: when the next chunk is due, `None` if the flow goes by size.
    due: Option<u64>,
    /// The older rule of TENT: whether the flow was promoted.
    promoted: bool,
    /// TENT: when MLU was predicted last.
    predicted: u64,
    /// TENT: whether the flow was dropped.
    dropped: bool,
}

impl Waiting {
    fn explicit(&self) -> bool {
        self.spec.stage == Stage::P2d && self.spec.deadline != Time::NEVER
    }

    /// Returns the time that the rest of the flow takes alone.
    fn needs(&self) -> u64 {
        (self.left * 1_000_000_000).div_ceil(RATE)
    }

    /// Reports whether a flow of the last stage cannot be in time.
    fn is_hopeless(&self, now: u64) -> bool {
        self.explicit() && self.spec.deadline.0.saturating_sub(now) <= self.needs()
    }

    /// Returns how many times the rest of the flow fits in the time that it had left when MLU was
    /// predicted, in steps: the inverse of MLU.
    fn fits(&self) -> u64 {
        if self.spec.deadline == Time::NEVER {
            return u64::MAX;
        }
        let window = u128::from(self.spec.deadline.0.saturating_sub(self.predicted));
        (window * 65_536 / u128::from(self.needs().max(1))) as u64
    }

    /// Returns the instant at which the flow's slack falls to the threshold.
    fn slack_is_gone_at(&self) -> u64 {
        self.spec.deadline.0.saturating_sub(self.needs() + SLACK_NS)
    }
}

struct Model {
    link: Link,
    policy: PolicyKind,
    now: u64,
    seq: u64,
    flows: BTreeMap<FlowId, Waiting>,
    in_flight: BTreeMap<FlowId, u64>,
    /// By class: the share of the flow that was served last, 0 while the class is empty.
    had: BTreeMap<u64, u64>,
}

impl Model {
    fn new(policy: PolicyKind) -> Self {
        let config =
            LinkConfig { scavenger_permille: 0, slack_threshold: Span(SLACK_NS), ..config(policy) };
        Self {
            link: Link::new(config).expect("valid"),
            policy,
            now: 1000,
            seq: 0,
            flows: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            had: BTreeMap::new(),
        }
    }

    /// Returns the static class of a flow. Smaller is served first.
    fn class(&self, flow: &Waiting) -> u64 {
        let by_stage = |classes: [u64; 5]| classes[flow.spec.stage.index()];
        match self.policy {
            PolicyKind::Edf => u64::from(!flow.explicit()),
            PolicyKind::EdfLow => u64::from(flow.explicit()),
            // The order is KV reuse, collectives, last stage, weights, background.
            PolicyKind::TwoClass => by_stage([1, 0, 1, 2, 2]),
            PolicyKind::TwoClass99 => by_stage([1, 0, 1, 1, 1]),
            PolicyKind::Tent if flow.dropped => 3,
            PolicyKind::Tent => by_stage([1, 0, 2, 3, 3]),
            PolicyKind::TentEdf if flow.promoted => 0,
            PolicyKind::TentEdf => by_stage([2, 1, 3, 4, 4]),
            PolicyKind::KarunaWc => match flow.due {
                Some(due) if due <= self.now => 0,
                None => 1,
                Some(_) => 2,
            },
            _ => 0,
        }
    }

    fn key(&self, flow: &Waiting) -> (u64, u64, u64) {
        let class = self.class(flow);
        let order = match self.policy {
            PolicyKind::Sjf => flow.left,
            PolicyKind::Edf | PolicyKind::EdfLow if flow.explicit() => flow.spec.deadline.0,
            PolicyKind::TwoClass if class == 2 => 0,
            PolicyKind::TentEdf if class == 4 => 0,
            PolicyKind::Tent if class == 3 => 0,
            PolicyKind::Tent => flow.fits(),
            PolicyKind::TentEdf => flow.spec.deadline.0,
            PolicyKind::KarunaWc => flow.due.unwrap_or(flow.left),
            _ => flow.share,
        };
        (class, order, flow.seq)
    }

    fn arrive(&mut self, spec: FlowSpec) {
        // Every flow with a deadline has a timer under `tent`, and the last stage under Karuna.
        let timed = |stage| stage == Stage::P2d || self.policy == PolicyKind::Tent;
        let paced = self.flows.values().filter(|flow| timed(flow.spec.stage)).count();
        if paced >= PACED_MAX && timed(spec.stage) {
            return;
        }
        self.seq += 1;
        // The deadline of a flow must not depend on other properties of its request.
        let spec =
            FlowSpec { flow: FlowId(self.seq), batch: BatchId(0), request: RequestId(0), ..spec };
        let mut flow = Waiting {
            spec,
            seq: self.seq,
            left: spec.bytes,
            share: 0,
            due: None,
            promoted: false,
            predicted: self.now,
            dropped: false,
        };
        let deadline = spec.deadline.0;
        if flow.explicit() && deadline > self.now {
            flow.due = Some(self.now);
        }
        flow.share = self.had.get(&self.class(&flow)).copied().unwrap_or(0);
        let scavenged = spec.stage.is_scavenged();
        let late = spec.deadline == Time::NEVER || deadline <= self.now || scavenged;
        flow.dropped = flow.is_hopeless(self.now);
        flow.promoted = !late && flow.slack_is_gone_at() <= self.now;
        self.flows.insert(spec.flow, flow);
        self.link.handle(Time(self.now), Event::FlowArrived(spec));
    }

    fn served(&mut self, id: FlowId, bytes: u64, last: bool) {
        let flow = self.flows[&id].clone();
        let hopeless = flow.is_hopeless(self.now);
        assert!(self.policy != PolicyKind::Tent || flow.dropped || !hopeless, "{flow:?}");
        let best = self.flows.values().min_by_key(|flow| self.key(flow));
        let best = best.expect("one was served");
        assert_eq!(
            best.seq, flow.seq,
            "{} at {}: {best:?} comes before {flow:?}",
            self.policy, self.now
        );
        *self.in_flight.entry(id).or_default() += bytes;
        let class = self.class(&flow);
        let had = self.had.entry(class).or_default();
        *had = flow.share.max(*had);
        let now = self.now;
        let known = self.flows.get_mut(&id).expect("waits");
        known.share += bytes;
        let pause = |deadline: u64| {
            let left = u128::from(deadline - now);
            (u128::from(bytes) * left / u128::from(flow.left.max(1))) as u64
        };
        let deadline = known.spec.deadline.0;
        known.due = (known.explicit() && deadline > now).then(|| now + pause(deadline));
        known.left -= bytes;
        known.predicted = now;
        known.dropped |= known.is_hopeless(now);
        if last {
            assert_eq!(known.left, 0);
            self.flows.remove(&id);
        }
        if self.flows.values().all(|flow| self.class(flow) != class) {
            self.had.remove(&class);
        }
    }

    fn apply(&mut self, step: &Step) {
        match step {
            Step::Arrive(spec) => self.arrive(*spec),
            Step::CompleteAll => {
                for (flow, bytes) in core::mem::take(&mut self.in_flight) {
                    self.link.handle(Time(self.now), Event::BytesCompleted { flow, bytes });
                }
            }
            Step::Pass(ns) => self.pass(*ns),
        }
        self.drain();
    }

    /// Lets time pass and polls at each deadline that the link asks for, as a driver does.
    fn pass(&mut self, ns: u64) {
        let until = self.now + ns;
        while let Some(Time(due)) = self.link.next_deadline()
            && due <= until
        {
            self.now = self.now.max(due);
            self.drain();
        }
        self.now = until;
    }

    fn drain(&mut self) {
        let now = self.now;
        // Karuna: a flow that is due after its deadline goes by size from then on.
        for flow in self.flows.values_mut() {
            if flow.predicted + PERIOD_NS <= now {
                flow.predicted = now;
            }
            let late = flow.spec.deadline.0 <= now;
            if late && flow.due.is_some_and(|due| due == now) {
                flow.due = None;
            }
        }
        while let Some(action) = self.link.poll_action(Time(now)) {
            match action {
                Action::Permit { flow, bytes, last, .. } => self.served(flow, bytes, last),
                Action::Moved { flow, to, .. } if self.policy == PolicyKind::TentEdf => {
                    let flow = self.flows.get_mut(&flow).expect("waits");
                    assert_eq!(to, Level::HIGHEST);
                    assert!(flow.slack_is_gone_at() <= now && flow.spec.deadline.0 > now);
                    flow.promoted = true;
                }
                Action::Moved { flow, to, .. } if self.policy == PolicyKind::Tent => {
                    let flow = self.flows.get_mut(&flow).expect("waits");
                    assert_eq!(to, Level::SCAVENGER);
                    assert!(flow.is_hopeless(now), "{flow:?} could be in time at {now}");
                    flow.dropped = true;
                }
                Action::Moved { .. } => {}
            }
        }
        for flow in self.flows.values() {
            let scavenged = flow.spec.stage.is_scavenged();
            let late = flow.spec.deadline == Time::NEVER || flow.spec.deadline.0 <= now;
            let missed = !flow.promoted && !late && !scavenged && flow.slack_is_gone_at() <= now;
            assert!(self.policy != PolicyKind::TentEdf || !missed, "{flow:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn every_baseline_serves_the_smallest_key(steps in prop::collection::vec(step(), 1..150)) {
        for policy in [
            PolicyKind::Fair,
            PolicyKind::Sjf,
            PolicyKind::Edf,
            PolicyKind::EdfLow,
            PolicyKind::TwoClass,
            PolicyKind::TwoClass99,
            PolicyKind::TentEdf,
            PolicyKind::Tent,
            PolicyKind::KarunaWc,
        ] {
            let mut model = Model::new(policy);
            for step in &steps {
                model.apply(step);
            }
        }
    }
}
