//! `mfs` and `laxity` against a naive model that recomputes every key from scratch, O(n), at every
//! permit. The served flow must be one that the rules put first, and promotion must be neither
//! early, nor late, nor downwards.
//!
//! The model shares no code with the policies. Its only inputs are the events and, from the link,
//! the level of a last-stage flow between two `Moved`s. It checks each `Moved`.

use std::collections::{BTreeMap, BTreeSet};

use crate::random_events::{config, flow};
use laxity_policy::{
    Action, BatchId, BatchSpec, Event, FlowId, FlowSpec, Layer, Level, Link, LinkConfig, Order,
    PolicyKind, RequestId, Span, Stage, Time,
};
use proptest::prelude::*;

const BATCHES: u64 = 4;
const LAYERS: u16 = 12;
const LAYER_NS: u64 = 3000;
const PERIOD_NS: u64 = 2000;
const RATE: u64 = 1_000_000_000;
const K: u8 = 8;
/// Key of a flow without a deadline: after all that have one, before what is late.
const NO_DEADLINE: u64 = u64::MAX - 1;

#[derive(Clone, Debug)]
enum Step {
    Arrive(FlowSpec),
    CompleteAll,
    NextLayer(u64),
    /// `σ`, and the pruned requests: this many from the front of the second list.
    Order(Vec<u64>, Vec<u64>),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => flow().prop_map(Step::Arrive),
        6 => Just(Step::CompleteAll),
        3 => (1..=BATCHES).prop_map(Step::NextLayer),
        1 => (
            prop::collection::vec(1..=BATCHES, 0..5),
            prop::collection::vec(1..=2 * BATCHES, 0..4),
        )
            .prop_map(|(sigma, pruned)| Step::Order(sigma, pruned)),
        4 => (0u64..6000).prop_map(Step::Pass),
    ]
}

#[derive(Clone, Debug)]
struct Waiting {
    spec: FlowSpec,
    seq: u64,
    arrived: u64,
    left: u64,
    level: u8,
    scavenged: bool,
}

#[derive(Clone, Debug, Default)]
struct Batch {
    current: u16,
    started: bool,
    finished: bool,
    boundary: u64,
    ahead: Option<u64>,
    members: Vec<u64>,
    sigma: Option<usize>,
}

/// The settings that differ between the tested ports.
#[derive(Clone, Copy, Debug)]
struct Setting {
    policy: PolicyKind,
    /// Time constant of the EWMA of `ρ`. With `None`, `ρ` stays 0 and crossings are exact.
    tau_ns: Option<u64>,
    scavenger_permille: u64,
}

/// The mean rate of delivery while flows wait, by the equation in `link/backlog_rate.rs`.
#[derive(Default)]
struct Backlog {
    /// When the interval began.
    since: Option<u64>,
    /// When a flow was refused last, and when bytes were delivered last.
    last: (u64, u64),
    delivered: u64,
    rate: u64,
}

impl Backlog {
    /// The weight of so many bytes is 1.
    const ALL: u64 = 4 * crate::random_events::WINDOW;

    fn is_known(&self, now: u64) -> bool {
        let age = self.since.map(|since| now - since.max(self.last.1));
        age.is_some_and(|age| age <= (Self::ALL * 1_000_000_000).div_ceil(self.rate))
    }

    fn refused(&mut self, now: u64) {
        match self.since {
            Some(since) if self.is_known(now) => {
                let took = self.last.1.saturating_sub(since);
                self.last.0 = now;
                if self.delivered >= crate::random_events::WINDOW / 2 && took > 0 {
                    let rate = (self.delivered * 1_000_000_000 / took).min(RATE) as i64;
                    let weight = self.delivered.min(Self::ALL) as i64;
                    let change = (rate - self.rate as i64) * weight / Self::ALL as i64;
                    self.rate = (self.rate as i64 + change).max(1) as u64;
                    (self.since, self.delivered) = (Some(now), 0);
                }
            }
            _ => *self = Self { since: Some(now), last: (now, 0), delivered: 0, rate: RATE },
        }
    }

    fn delivered(&mut self, now: u64, bytes: u64) {
        let (refused, delivered) = self.last;
        self.since = self.since.filter(|_| refused >= delivered || delivered >= now);
        if self.since.is_some() {
            self.last.1 = now;
            self.delivered += bytes;
        }
    }

    fn rate(&self, now: u64) -> u64 {
        if self.is_known(now) { self.rate } else { RATE }
    }
}

struct Model {
    setting: Setting,
    backlog: Backlog,
    /// Permitted bytes of early stages, with the time of each permit.
    early: Vec<(u64, u64)>,
    /// `ρ` at `now`.
    rho: f64,
    /// Bytes that the scavenger may send before the levels, in thousandths.
    credit: u64,
    debt: u64,
    pruned: Vec<u64>,
    link: Link,
    policy: PolicyKind,
    now: u64,
    seq: u64,
    flows: BTreeMap<FlowId, Waiting>,
    in_flight: BTreeMap<FlowId, u64>,
    /// Pieces in flight that exceed the window: when each was permitted, and its bytes.
    pieces: Vec<(u64, u64)>,
    /// Flows that had their first permit from the scavenger.
    low: BTreeSet<FlowId>,
    /// Mean rate of the pieces that ended.
    piece_rate: u64,
    batches: BTreeMap<u64, Batch>,
    lost: Vec<RequestId>,
}

/// Returns the deadline of a request. Deadlines are spread over the run, and one is long past.
fn member_deadline(request: u64) -> u64 {
    [1, 20_000, 45_000, 60_000, 90_000, 120_000, 200_000, 400_000][request as usize % 8]
}

impl Model {
    fn new(setting: Setting) -> Self {
        let Setting { policy, .. } = setting;
        let config = LinkConfig {
            policy,
            levels: K,
            scavenger_permille: setting.scavenger_permille as u16,
            load_time_constant: Span(setting.tau_ns.unwrap_or(u64::MAX / 2)),
            promotion_period: Span(PERIOD_NS),
            ..config(policy)
        };
        let mut model = Self {
            setting,
            early: Vec::new(),
            rho: 0.0,
            credit: 0,
            debt: 0,
            pruned: Vec::new(),
            link: Link::new(config).expect("valid"),
            policy,
            now: 1000,
            seq: 0,
            flows: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            backlog: Backlog::default(),
            pieces: Vec::new(),
            low: BTreeSet::new(),
            piece_rate: RATE,
            batches: BTreeMap::new(),
            lost: Vec::new(),
        };
        for b in 1..=BATCHES {
            let mut batch = Batch::default();
            model.tell(Event::BatchBegan(BatchSpec {
                batch: BatchId(b),
                layers: LAYERS,
                layer_time: Span(LAYER_NS),
            }));
            for r in [2 * b - 1, 2 * b] {
                batch.members.push(member_deadline(r));
                model.tell(Event::RequestJoined {
                    batch: BatchId(b),
                    request: RequestId(r),
                    deadline: Time(member_deadline(r)),
                    bytes: 0,
                });
            }
            // Batch 3 waits behind batch 2, and batch 4 behind batch 3.
            if b >= 3 {
                batch.ahead = Some(b - 1);
                model.tell(Event::BatchQueued { batch: BatchId(b), ahead: BatchId(b - 1) });
            }
            model.batches.insert(b, batch);
        }
        model
    }

    fn tell(&mut self, event: Event) {
        self.link.handle(Time(self.now), event);
    }

    fn layers_left(&self, b: u64) -> u64 {
        let batch = &self.batches[&b];
        if batch.finished { 0 } else { u64::from(LAYERS - batch.current) }
    }

    /// Returns the number of layers before layer 0 of `b`, less the batch's own progress.
    fn layers_before(&self, b: u64) -> i64 {
        let mut before = 0;
        let mut ahead = self.batches[&b].ahead;
        while let Some(a) = ahead {
            before += self.layers_left(a) as i64;
            ahead = self.batches[&a].ahead;
        }
        before - i64::from(self.batches[&b].current)
    }

    fn rli(&self, spec: &FlowSpec) -> u64 {
        let before = if spec.batch.0 == 0 { 0 } else { self.layers_before(spec.batch.0) };
        (i64::from(spec.layer.0) + before).max(0) as u64
    }

    fn mlu(&self, flow: &Waiting) -> f64 {
        let left_s = (flow.spec.deadline.0 as f64 - self.now as f64) / 1e9;
        flow.left as f64 / (left_s * RATE as f64 * (1.0 - self.rho.min(0.95)))
    }

    /// Computes `ρ` from the permits alone: each past step of an eighth of the time constant moves
    /// the average by an eighth towards the load of the step.
    fn measure(&mut self) {
        let Some(tau) = self.setting.tau_ns else { return };
        let step = tau / 8;
        let capacity = RATE as f64 * step as f64 / 1e9;
        self.rho = (0..self.now / step).fold(0.0, |average, k| {
            let within = self.early.iter().filter(|(at, _)| at / step == k);
            let load = within.map(|(_, bytes)| bytes).sum::<u64>() as f64 / capacity;
            average + (load - average) / 8.0
        });
        self.rho = self.rho.min(1.0);
    }

    /// Reports whether rounding may make the model and the link disagree about the level.
    fn on_the_edge(&self, flow: &Waiting) -> bool {
        self.mfs_level(flow, 1.0 - 1e-9) != self.mfs_level(flow, 1.0 + 1e-9)
    }

    /// Returns `1 + #{i : mlu < Q_i}`, with the last bits of `mlu` pushed up or down.
    fn mfs_level(&self, flow: &Waiting, push: f64) -> u8 {
        if flow.spec.deadline == Time::NEVER || flow.left == 0 {
            return K;
        }
        let mlu = self.mlu(flow) * push;
        1 + (1..K).filter(|&i| mlu < 0.5 * 4f64.powi(-i32::from(i))).count() as u8
    }

    fn ns(bytes: u64) -> u64 {
        (bytes * 1_000_000_000).div_ceil(RATE)
    }

    /// The next four windows go at the rate of delivery, the rest at the port's.
    fn delivery_ns(&self, bytes: u64) -> u64 {
        let next = bytes.min(Backlog::ALL);
        (next * 1_000_000_000).div_ceil(self.backlog.rate(self.now)) + Self::ns(bytes - next)
    }

    /// Returns how long a flow takes by itself: one in a piece that exceeds the window does not get
    /// the port's rate.
    fn own_ns(&self, flow: &Waiting) -> u64 {
        let is_oversized = flow.spec.whole && flow.left > crate::random_events::WINDOW;
        let rate = if is_oversized { self.piece_rate } else { RATE };
        (flow.left * 1_000_000_000).div_ceil(rate)
    }

    /// Removes bytes from those in flight. A piece that exceeds the window is found by its size.
    fn complete(&mut self, flow: FlowId, bytes: u64) {
        self.backlog.delivered(self.now, bytes);
        if let Some(at) = self.pieces.iter().position(|&(_, size)| size == bytes) {
            let took = u128::from(self.now - self.pieces.remove(at).0).max(1);
            self.backlog.since = None;
            let rate = (u128::from(bytes) * 1_000_000_000 / took).clamp(1, RATE.into()) as u64;
            if rate > self.piece_rate || !self.low.contains(&flow) {
                self.piece_rate = self.piece_rate - self.piece_rate / 8 + rate / 8;
            }
        }
        self.tell(Event::BytesCompleted { flow, bytes });
    }

    fn complete_all(&mut self) {
        for (flow, bytes) in core::mem::take(&mut self.in_flight) {
            self.complete(flow, bytes);
        }
    }

    /// Returns the bytes of the flow's request that wait in the last stage and are not scavenged.
    fn with_request(&self, flow: &Waiting) -> u64 {
        if flow.spec.request == RequestId(0) {
            return flow.left;
        }
        let same = |other: &&Waiting| {
            other.spec.request == flow.spec.request
                && other.spec.stage == Stage::P2d
                && !other.scavenged
        };
        self.flows.values().filter(same).map(|other| other.left).sum()
    }

    /// Returns the key of a flow's batch. A flow without a batch has its own deadline. The deadline
    /// of a flow without a request counts for its batch.
    fn batch_key(&self, spec: &FlowSpec) -> u64 {
        let b = spec.batch.0;
        if b == 0 {
            return match spec.deadline {
                Time::NEVER => NO_DEADLINE,
                deadline if deadline.0 < self.now => u64::MAX,
                deadline => deadline.0,
            };
        }
        let compute = (self.layers_left(b)
            + (self.layers_before(b) + i64::from(self.batches[&b].current)) as u64)
            * LAYER_NS;
        let members = self.batches[&b].members.iter().copied();
        let anonymous = self.flows.values().map(|flow| &flow.spec).filter(|other| {
            other.batch == spec.batch
                && other.request == RequestId(0)
                && other.deadline != Time::NEVER
        });
        let tightest = members
            .chain(anonymous.map(|other| other.deadline.0))
            .filter(|d| *d >= self.now + compute)
            .min();
        tightest.map_or(u64::MAX, |d| d - compute)
    }

    /// Returns the rank under the rules as one comparable key, without the last tie (arrival).
    fn key(&self, flow: &Waiting) -> [u64; 5] {
        let spec = &flow.spec;
        if flow.scavenged {
            return [9, 0, 0, 0, 0];
        }
        if self.policy == PolicyKind::Mfs {
            let batch = self.batches.get(&spec.batch.0);
            let sigma = batch.and_then(|b| b.sigma).map_or(u64::MAX, |s| s as u64);
            let early = |rli: u64| (1 + (1 + rli).min(u64::from(K) - 1), rli);
            let (level, rli) = match spec.stage {
                Stage::Collective => early(0),
                Stage::KvReuse => early(self.rli(spec)),
                _ => (u64::from(flow.level), 0),
            };
            return match spec.stage {
                Stage::P2d if flow.level == 1 => [0, 0, 0, 0, sigma],
                Stage::P2d => [2, level, 1, 0, sigma],
                _ => [1, level, 0, rli, sigma],
            };
        }
        let undated = spec.deadline == Time::NEVER && spec.batch.0 == 0;
        match spec.stage {
            Stage::Collective => [1, self.batch_key(spec), 0, 0, 0],
            Stage::KvReuse | Stage::P2d if undated => {
                [2, NO_DEADLINE, 1, flow.arrived + 32 * Self::ns(spec.bytes), 0]
            }
            Stage::KvReuse if spec.batch.0 == 0 => {
                let key = self.batch_key(spec);
                [2, key, u64::from(key >= NO_DEADLINE), 0, 0]
            }
            Stage::KvReuse => [2, self.batch_key(spec), 0, self.rli(spec), 0],
            _ => [2, spec.deadline.0, 1, 0, 0],
        }
    }

    /// Reports whether a flow misses its deadline if `ahead` of the bytes in flight go before it.
    /// Which ones do is a matter of levels, which the model does not know. So it has two bounds.
    fn hopeless(&self, flow: &Waiting, ahead: u64) -> bool {
        if flow.spec.deadline == Time::NEVER || flow.left == 0 {
            return false;
        }
        let deadline = flow.spec.deadline.0;
        match self.policy {
            PolicyKind::Mfs => deadline <= self.now,
            _ if flow.spec.whole && flow.left > crate::random_events::WINDOW => {
                deadline < self.now + Self::ns(self.with_request(flow)).max(self.own_ns(flow))
            }
            _ => {
                let bytes = self.with_request(flow) + ahead.min(crate::random_events::WINDOW);
                deadline < self.now + self.delivery_ns(bytes)
            }
        }
    }

    fn all_in_flight(&self) -> u64 {
        self.in_flight.values().sum()
    }

    /// Reports whether the flow is demoted because its request is pruned: the last stage always, KV
    /// reuse in `mfs` unless its batch computes.
    fn pruning_takes(&self, spec: &FlowSpec) -> bool {
        let started = self.batches.get(&spec.batch.0).is_none_or(|b| b.started);
        self.pruned.contains(&spec.request.0)
            && match spec.stage {
                Stage::P2d => true,
                Stage::KvReuse => self.policy == PolicyKind::Mfs && !started,
                _ => false,
            }
    }

    fn scavenger_head(&self) -> Option<&Waiting> {
        let scavenged = self.flows.values().filter(|flow| flow.scavenged);
        scavenged.min_by_key(|flow| flow.seq)
    }

    fn price(&self, bytes: u64) -> u64 {
        bytes * (1000 - self.setting.scavenger_permille)
    }

    /// Reports whether the scavenger has earned a piece of `bytes`.
    fn is_due(&self, bytes: u64) -> bool {
        let permille = self.setting.scavenger_permille;
        permille > 0 && self.debt == 0 && self.credit >= self.price(bytes)
    }

    /// Checks that the scavenger comes last, except for its share, and serves by arrival.
    fn check_share(&mut self, flow: &Waiting, bytes: u64) {
        let permille = self.setting.scavenger_permille;
        let Some(head) = self.scavenger_head() else { return };
        if flow.scavenged {
            assert_eq!(flow.seq, head.seq, "not the first that was scavenged");
            let by_right = self.is_due(bytes.min(crate::random_events::CHUNK));
            let idle = self.flows.values().all(|other| other.scavenged);
            assert!(by_right || idle, "scavenged work precedes the levels");
            let price = self.price(bytes);
            if by_right {
                self.debt = price.saturating_sub(self.credit);
            }
            self.credit = self.credit.saturating_sub(price);
        } else {
            let chunk = head.left.min(crate::random_events::CHUNK);
            let fits = chunk == 0 || self.all_in_flight() + chunk <= crate::random_events::WINDOW;
            let by_right = self.is_due(chunk) && fits;
            assert!(!by_right, "the scavenger was denied its share");
            let earned = bytes * permille;
            let paid = earned.min(self.debt);
            self.debt -= paid;
            self.credit = (self.credit + earned - paid).min(crate::random_events::CHUNK * 1000);
        }
    }

    fn arrive(&mut self, spec: FlowSpec) {
        self.seq += 1;
        // Members keep the deadline with which they joined, as a request has only one.
        let batch = BatchId(spec.batch.0.min(BATCHES));
        let (request, deadline) = match (spec.stage, batch.0) {
            (Stage::Collective, _) | (_, 0) => (RequestId(0), spec.deadline),
            (_, b) => {
                let request = RequestId(2 * b - spec.request.0 % 2);
                (request, Time(member_deadline(request.0)))
            }
        };
        let layer = Layer(spec.layer.0 % LAYERS);
        // KV reuse without a batch that was late by the rate of pieces stays behind, though the
        // rate may rise. `whole_transfers.rs` tests it.
        let lone = spec.stage == Stage::KvReuse && batch.0 == 0 && deadline != Time::NEVER;
        let whole = spec.whole && !(lone && spec.bytes > crate::random_events::WINDOW);
        let flow = FlowId(self.seq);
        let spec = FlowSpec { flow, batch, request, deadline, layer, whole, ..spec };
        let mut flow = Waiting {
            spec,
            seq: self.seq,
            arrived: self.now,
            left: spec.bytes,
            level: K,
            scavenged: false,
        };
        flow.scavenged = match spec.stage {
            stage if stage.is_scavenged() => true,
            Stage::P2d if self.lost.contains(&request) => true,
            Stage::P2d | Stage::KvReuse if self.pruning_takes(&spec) => true,
            Stage::P2d => {
                // Where it matters which bytes in flight go before the flow, none are.
                let ahead = self.all_in_flight().min(crate::random_events::WINDOW);
                let needs = [0, ahead].map(|ahead| self.delivery_ns(flow.left + ahead));
                let late = needs.map(|needs| deadline.0 < self.now + needs);
                if self.policy == PolicyKind::Laxity && late[0] != late[1] {
                    self.complete_all();
                }
                let alone = flow.left > 0 && deadline != Time::NEVER;
                let margin = match self.policy {
                    PolicyKind::Mfs => 1,
                    _ if spec.whole && spec.bytes > crate::random_events::WINDOW => {
                        self.own_ns(&flow)
                    }
                    _ => self.delivery_ns(flow.left),
                };
                alone && deadline.0 < self.now + margin
            }
            _ => false,
        };
        while self.policy == PolicyKind::Mfs && self.on_the_edge(&flow) {
            self.now += 1;
            self.measure();
        }
        if self.policy == PolicyKind::Mfs && !flow.scavenged {
            flow.level = self.mfs_level(&flow, 1.0);
        }
        self.flows.insert(spec.flow, flow);
        self.tell(Event::FlowArrived(spec));
    }

    fn note(&mut self, action: Action) {
        match action {
            Action::Permit { flow: id, bytes, level, last } => {
                let flow = self.flows[&id].clone();
                self.check_share(&flow, bytes);
                let rivals = self.flows.values().filter(|f| !flow.scavenged || f.scavenged);
                let best = rivals.map(|flow| self.key(flow)).min();
                assert_eq!(Some(self.key(&flow)), best, "{} served {flow:?}", self.policy);
                for other in self.flows.values() {
                    let equal = other.spec.batch == flow.spec.batch
                        && other.spec.stage == flow.spec.stage
                        && other.spec.layer == flow.spec.layer
                        && self.key(other) == self.key(&flow)
                        && !flow.scavenged
                        && flow.spec.stage != Stage::P2d;
                    assert!(!equal || other.seq >= flow.seq, "{other:?} came before {flow:?}");
                }
                assert!(
                    flow.scavenged || flow.spec.stage != Stage::P2d || !self.hopeless(&flow, 0)
                );
                *self.in_flight.entry(id).or_default() += bytes;
                if bytes > crate::random_events::WINDOW {
                    self.pieces.push((self.now, bytes));
                }
                if level == Level::SCAVENGER {
                    self.low.insert(id);
                }
                if matches!(flow.spec.stage, Stage::Collective | Stage::KvReuse) {
                    self.early.push((self.now, bytes));
                }
                let flow = self.flows.get_mut(&id).expect("waits");
                flow.left -= bytes;
                if last {
                    self.flows.remove(&id);
                }
            }
            Action::Moved { flow: id, from, to } => {
                let flow = self.flows[&id].clone();
                if from == Level::SCAVENGER {
                    assert_eq!(flow.spec.stage, Stage::KvReuse, "only stage 1 comes back");
                    assert!(!flow.scavenged, "nobody rescued {flow:?}");
                    return;
                }
                if to == Level::SCAVENGER && flow.scavenged {
                    assert!(self.pruning_takes(&flow.spec), "not pruned: {flow:?}");
                    return;
                }
                assert_eq!(flow.spec.stage, Stage::P2d, "only the last stage moves here");
                if to == Level::SCAVENGER {
                    let lost = self.lost.contains(&flow.spec.request);
                    let hopeless = self.hopeless(&flow, self.all_in_flight());
                    assert!(lost || hopeless, "{flow:?} at {}", self.now);
                    if self.policy == PolicyKind::Laxity && flow.spec.request != RequestId(0) {
                        self.lost.push(flow.spec.request);
                    }
                    self.flows.get_mut(&id).expect("waits").scavenged = true;
                    return;
                }
                assert_eq!(self.policy, PolicyKind::Mfs, "`laxity` promotes no P2D: {flow:?}");
                assert!(to.0 < flow.level, "demoted from {} to {to}", flow.level);
                let right = [1.0 - 1e-9, 1.0 + 1e-9].map(|push| self.mfs_level(&flow, push));
                assert!(right.contains(&to.0), "to {to} instead of {right:?}: {flow:?}");
                self.flows.get_mut(&id).expect("waits").level = to.0;
            }
        }
    }

    /// Checks that no waiting flow should have been promoted before.
    fn check_promotions(&self) {
        if self.setting.tau_ns.is_some() {
            return; // the crossing moves with ρ
        }
        for flow in self.flows.values() {
            if flow.spec.stage != Stage::P2d || flow.scavenged || self.policy != PolicyKind::Mfs {
                continue;
            }
            if flow.level == 1 || flow.spec.deadline == Time::NEVER || flow.left == 0 {
                continue;
            }
            let threshold = 0.5 * 4f64.powi(1 - i32::from(flow.level));
            let needs = flow.left as f64 / (threshold * RATE as f64) * 1e9;
            let crossing = flow.spec.deadline.0 as f64 - needs;
            let batch = self.batches.get(&flow.spec.batch.0);
            let by = match batch {
                Some(b) if b.started && !b.finished => b.boundary,
                _ => self.now,
            } as f64
                - PERIOD_NS as f64
                - 1.0;
            assert!(crossing > by, "not promoted though it crossed at {crossing}: {flow:?}");
        }
    }

    fn next_layer(&mut self, b: u64) {
        let now = self.now;
        let batch = self.batches.get_mut(&b).expect("known");
        if batch.finished {
            return;
        }
        if batch.started && batch.current + 1 == LAYERS {
            batch.finished = true;
            self.tell(Event::ComputeFinished { batch: BatchId(b) });
            return;
        }
        let ran = batch.started;
        batch.current += u16::from(ran);
        batch.started = true;
        batch.boundary = now;
        batch.ahead = None;
        let layer = Layer(batch.current);
        for flow in self.flows.values_mut() {
            let spec = &flow.spec;
            let rescued = !ran && spec.batch.0 == b && self.pruned.contains(&spec.request.0);
            flow.scavenged &= !(rescued && spec.stage == Stage::KvReuse);
        }
        self.tell(Event::LayerBegan { batch: BatchId(b), layer });
    }

    fn apply(&mut self, step: &Step, epoch: u64) {
        match step {
            Step::Arrive(spec) => self.arrive(*spec),
            Step::CompleteAll => self.complete_all(),
            Step::NextLayer(b) => self.next_layer(*b),
            Step::Order(order, pruned) => {
                self.pruned.clone_from(pruned);
                let mut flows = core::mem::take(&mut self.flows);
                for flow in flows.values_mut() {
                    flow.scavenged |= self.pruning_takes(&flow.spec);
                }
                self.flows = flows;
                for (&b, batch) in &mut self.batches {
                    batch.sigma = order.iter().position(|&other| other == b);
                }
                let sigma = order.iter().copied().map(BatchId).collect();
                self.tell(Event::OrderChanged(Order {
                    epoch,
                    sigma,
                    pruned: pruned.iter().copied().map(RequestId).collect(),
                }));
            }
            Step::Pass(ns) => {
                self.now += ns;
                self.measure();
            }
        }
        while let Some(action) = self.link.poll_action(Time(self.now)) {
            self.note(action);
        }
        // If flows still wait above the scavenger, the window has no room.
        if self.flows.values().any(|flow| !flow.scavenged) {
            self.backlog.refused(self.now);
        }
        self.check_promotions();
    }
}

fn follow(setting: Setting, steps: &[Step]) {
    let mut model = Model::new(setting);
    for (step, epoch) in steps.iter().zip(1..) {
        model.apply(step, epoch);
    }
}

/// Generates settings with and without the scavenger's share.
fn setting(policy: PolicyKind) -> impl Strategy<Value = Setting> {
    prop::sample::select(vec![0, 0, 10, 300]).prop_map(move |scavenger_permille| Setting {
        policy,
        tau_ns: None,
        scavenger_permille,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn mfs_serves_by_the_rules_of_section_4_5(
        setting in setting(PolicyKind::Mfs),
        steps in prop::collection::vec(step(), 1..150),
    ) {
        follow(setting, &steps);
    }

    #[test]
    fn mfs_is_as_urgent_as_the_load_of_the_port_makes_it(
        setting in setting(PolicyKind::Mfs),
        tau_ns in prop::sample::select(vec![8_000u64, 20_000, 100_000]),
        steps in prop::collection::vec(step(), 1..150),
    ) {
        follow(Setting { tau_ns: Some(tau_ns), ..setting }, &steps);
    }

    #[test]
    fn laxity_serves_batches_by_least_laxity_and_the_last_stage_by_deadline(
        setting in setting(PolicyKind::Laxity),
        steps in prop::collection::vec(step(), 1..150),
    ) {
        follow(setting, &steps);
    }
}
