//! Random events, valid and invalid, and a shadow that keeps the simplest possible accounts.

use std::collections::BTreeMap;

use laxity_policy::link::PEER_WINDOWS;
use laxity_policy::{
    Action, BatchId, BatchSpec, Event, FlowId, FlowSpec, Layer, Level, Link, LinkConfig, Order,
    PeerId, PolicyKind, RequestId, Span, Stage, Time,
};
use proptest::prelude::*;

pub(crate) const CHUNK: u64 = 1000;
pub(crate) const WINDOW: u64 = 3500;
/// Maximum windows in flight while receivers hold bytes up.
const OVERCOMMIT: u32 = 3;

/// Returns a configuration with small chunks and short periods, for many events in microseconds.
pub(crate) fn config(policy: PolicyKind) -> LinkConfig {
    LinkConfig {
        policy,
        rate: 1_000_000_000,
        chunk_bytes: CHUNK,
        window_bytes: WINDOW,
        overcommit: OVERCOMMIT,
        promotion_period: Span::from_micros(2),
        load_time_constant: Span::from_micros(20),
        slack_threshold: Span::from_micros(5),
        ..LinkConfig::default()
    }
}

/// A random operation. Its numbers are reduced to what exists when it is applied.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Arrive { spec: FlowSpec, credit: bool },
    Complete { which: usize, bytes: u64 },
    Cancel { which: usize },
    Hold { which: usize },
    Release { which: usize },
    Hint(Event),
    Pass { ns: u64 },
    Reconfigure { policy: PolicyKind, levels: u8 },
}

fn batch_id() -> impl Strategy<Value = BatchId> {
    (0u64..6).prop_map(BatchId)
}

fn request_id() -> impl Strategy<Value = RequestId> {
    (0u64..9).prop_map(RequestId)
}

fn deadline() -> impl Strategy<Value = Time> {
    prop_oneof![2 => Just(Time::NEVER), 1 => Just(Time(0)), 7 => (0u64..200_000).prop_map(Time)]
}

fn layer() -> impl Strategy<Value = Layer> {
    prop_oneof![9 => (0u16..12).prop_map(Layer), 1 => any::<u16>().prop_map(Layer)]
}

/// Generates a random flow. It gets its id when it arrives.
pub(crate) fn flow() -> impl Strategy<Value = FlowSpec> {
    let bytes = prop_oneof![1 => Just(0u64), 5 => 1u64..1500, 4 => 1500u64..8000];
    let stage = (1u8..=5).prop_map(|n| Stage::from_number(n).expect("a stage"));
    (
        stage,
        batch_id(),
        request_id(),
        layer(),
        bytes,
        deadline(),
        prop::bool::weighted(0.2),
        (0u16..4).prop_map(PeerId),
    )
        .prop_map(|(stage, batch, request, layer, bytes, deadline, whole, peer)| FlowSpec {
            whole,
            peer,
            flow: FlowId(0),
            stage,
            batch,
            request,
            layer,
            bytes,
            deadline,
        })
}

fn hint() -> impl Strategy<Value = Event> {
    prop_oneof![
        (batch_id(), any::<u8>(), 0u64..5000).prop_map(|(batch, layers, ns)| {
            let (layers, layer_time) = (u16::from(layers % 16), Span(ns));
            Event::BatchBegan(BatchSpec { batch, layers, layer_time })
        }),
        (batch_id(), request_id(), deadline()).prop_map(|(batch, request, deadline)| {
            Event::RequestJoined { batch, request, deadline, bytes: 0 }
        }),
        request_id().prop_map(|request| Event::RequestEnded { request }),
        (batch_id(), batch_id()).prop_map(|(batch, ahead)| Event::BatchQueued { batch, ahead }),
        (batch_id(), layer()).prop_map(|(batch, layer)| Event::LayerBegan { batch, layer }),
        (batch_id(), layer()).prop_map(|(batch, layer)| Event::LayerBegan { batch, layer }),
        batch_id().prop_map(|batch| Event::ComputeFinished { batch }),
        batch_id().prop_map(|batch| Event::BatchEnded { batch }),
        (
            0u64..8,
            prop::collection::vec(batch_id(), 0..6),
            prop::collection::vec(request_id(), 0..4)
        )
            .prop_map(|(epoch, sigma, pruned)| {
                Event::OrderChanged(Order { epoch, sigma, pruned })
            }),
    ]
}

fn policy() -> impl Strategy<Value = PolicyKind> {
    prop::sample::select(PolicyKind::ALL.to_vec())
}

/// Generates any operation but a change of the configuration.
pub(crate) fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        10 => (flow(), prop::bool::weighted(0.1))
            .prop_map(|(spec, credit)| Op::Arrive { spec, credit }),
        8 => (any::<usize>(), 0u64..3000)
            .prop_map(|(which, bytes)| Op::Complete { which, bytes }),
        1 => any::<usize>().prop_map(|which| Op::Cancel { which }),
        1 => any::<usize>().prop_map(|which| Op::Hold { which }),
        1 => any::<usize>().prop_map(|which| Op::Release { which }),
        6 => hint().prop_map(Op::Hint),
        4 => (0u64..8000).prop_map(|ns| Op::Pass { ns }),
    ]
}

/// Generates any operation, including changes of the configuration.
pub(crate) fn op_or_reload() -> impl Strategy<Value = Op> {
    prop_oneof![
        40 => op(),
        1 => (policy(), 2u8..=16).prop_map(|(policy, levels)| Op::Reconfigure { policy, levels }),
    ]
}

/// The shadow's record of one flow.
#[derive(Clone, Debug)]
pub(crate) struct Account {
    pub(crate) spec: FlowSpec,
    pub(crate) permitted: u64,
    pub(crate) in_flight: u64,
    pub(crate) last: bool,
    pub(crate) credit: bool,
    /// The level of a flow that was sent with `Link::add_in_flight`, which the link does not store.
    pub(crate) launched: Option<Level>,
    pub(crate) cancelled: bool,
    pub(crate) held: bool,
    /// Whether the link queued the flow anew without an action, which may be in the scavenger.
    pub(crate) requeued: bool,
    pub(crate) wire: Option<Level>,
    pub(crate) host: Option<Level>,
}

impl Account {
    pub(crate) fn waits(&self) -> bool {
        self.has_more() && !self.held
    }

    /// Reports whether bytes of the flow are still to be permitted.
    fn has_more(&self) -> bool {
        !self.credit && !self.cancelled && !self.last
    }
}

/// A link with its shadow.
pub(crate) struct Shadowed {
    pub(crate) link: Link,
    pub(crate) now: Time,
    pub(crate) accounts: BTreeMap<FlowId, Account>,
    pub(crate) actions: Vec<Action>,
    /// Whether to use the fast path where the link offers it.
    pub(crate) fast: bool,
    /// When the port has sent all permitted bytes, at its rate.
    drained: Time,
    /// The same without what has completed.
    sent_by: Time,
    /// Bytes of pieces above the window since the bytes in flight were within it.
    oversized: u64,
    /// Bytes of pieces that don't count in the bound of their peer, since the bytes to it were few.
    oversized_to: BTreeMap<PeerId, u64>,
    arrivals: u64,
}

impl Shadowed {
    pub(crate) fn new(config: LinkConfig) -> Self {
        Self {
            link: Link::new(config).expect("a valid configuration"),
            now: Time::ZERO,
            accounts: BTreeMap::new(),
            actions: Vec::new(),
            fast: false,
            drained: Time::ZERO,
            sent_by: Time::ZERO,
            oversized: 0,
            oversized_to: BTreeMap::new(),
            arrivals: 0,
        }
    }

    /// Returns the bytes in flight at `level` or a higher one.
    fn in_flight_at_or_above(&self, level: Level) -> u64 {
        self.accounts
            .values()
            .filter(|account| account.wire.is_some_and(|wire| wire <= level))
            .map(|account| account.in_flight)
            .sum()
    }

    /// Returns the bytes in flight at `level` or a higher one to one peer.
    fn to_peer_at_or_above(&self, peer: PeerId, level: Level) -> u64 {
        let to_peer = |account: &&Account| {
            let level_on_wire = account.launched.or(account.wire);
            account.spec.peer == peer && level_on_wire.is_some_and(|wire| wire <= level)
        };
        self.accounts.values().filter(to_peer).map(|account| account.in_flight).sum()
    }

    /// Returns the bound on bytes to the peer of a flow, if there is one.
    fn peer_bound(&self, spec: &FlowSpec) -> Option<u64> {
        let config = self.link.config();
        let bounded = config.policy == PolicyKind::Laxity && config.peer_window_bytes != 0;
        let of_unknown = u64::from(config.overcommit) * config.window_bytes;
        let known = spec.peer != PeerId(0);
        bounded.then_some(if known { of_unknown.min(config.peer_window_bytes) } else { of_unknown })
    }

    pub(crate) fn in_flight(&self) -> u64 {
        self.accounts.values().map(|account| account.in_flight).sum()
    }

    /// Applies `op`, takes every action and checks the accounts.
    pub(crate) fn apply(&mut self, op: &Op) {
        match op {
            Op::Arrive { spec, credit } => {
                self.arrivals += 1;
                self.arrive(FlowSpec { flow: FlowId(self.arrivals), ..*spec }, *credit);
            }
            Op::Complete { which, bytes } => {
                let in_flight: Vec<FlowId> = self
                    .accounts
                    .iter()
                    .filter(|(_, account)| account.in_flight > 0)
                    .map(|(&id, _)| id)
                    .collect();
                if let Some(&flow) = in_flight.get(which % in_flight.len().max(1)) {
                    self.complete(flow, *bytes);
                } else {
                    let flow = FlowId(u64::MAX - 1);
                    self.link.handle(self.now, Event::BytesCompleted { flow, bytes: *bytes });
                }
            }
            Op::Cancel { which } => {
                let flow = FlowId(*which as u64 % (self.arrivals + 2));
                let account = self.accounts.get(&flow);
                if let Some((peer, level, bytes)) =
                    account.and_then(|a| Some((a.spec.peer, a.launched?, a.in_flight)))
                {
                    self.link.remove_in_flight(self.now, peer, level, bytes);
                } else {
                    self.link.handle(self.now, Event::FlowCancelled { flow });
                }
                if let Some(account) = self.accounts.get_mut(&flow) {
                    account.cancelled |= account.has_more();
                    account.in_flight = 0;
                }
            }
            Op::Hold { which } => {
                let flow = FlowId(*which as u64 % (self.arrivals + 2));
                self.link.handle(self.now, Event::FlowHeld { flow });
                if let Some(account) = self.accounts.get_mut(&flow) {
                    account.held = account.has_more();
                }
            }
            Op::Release { which } => {
                let held = self.accounts.iter().filter(|(_, account)| account.held);
                let held: Vec<FlowId> = held.map(|(&id, _)| id).collect();
                if let Some(&flow) = held.get(which % held.len().max(1)) {
                    self.release(flow);
                }
            }
            Op::Hint(event) => self.link.handle(self.now, event.clone()),
            Op::Pass { ns } => self.now = self.now + Span(*ns),
            Op::Reconfigure { policy, levels } => {
                let peer_window_bytes = self.link.config().peer_window_bytes;
                let config = LinkConfig { levels: *levels, peer_window_bytes, ..config(*policy) };
                self.link.set_config(self.now, config).expect("a valid configuration");
                for account in self.accounts.values_mut() {
                    account.host = None;
                    account.requeued = true;
                }
            }
        }
        self.drain();
        self.check_rest();
    }

    /// Reports `bytes` of `flow` as completed, which may be more than there are.
    pub(crate) fn complete(&mut self, flow: FlowId, bytes: u64) {
        let account = self.accounts.get_mut(&flow).expect("a flow that arrived");
        let landed = bytes.min(account.in_flight);
        account.in_flight -= landed;
        if let Some(level) = account.launched {
            self.link.remove_in_flight(self.now, account.spec.peer, level, landed);
        } else {
            self.link.handle(self.now, Event::BytesCompleted { flow, bytes });
        }
    }

    fn release(&mut self, flow: FlowId) {
        self.link.handle(self.now, Event::FlowReleased { flow });
        let account = self.accounts.get_mut(&flow).expect("a flow that arrived");
        account.held = false;
        account.requeued = true;
        // The link does not report the level: it is the old one, or that of an arrival.
        account.host = account.host.filter(|_| account.wire.is_some());
    }

    fn arrive(&mut self, spec: FlowSpec, credit: bool) {
        let bytes = spec.bytes;
        let account = Account {
            spec,
            permitted: if credit { bytes } else { 0 },
            in_flight: if credit { bytes } else { 0 },
            last: credit,
            credit,
            launched: credit.then(|| self.link.credit_level(self.now)),
            cancelled: false,
            held: false,
            requeued: false,
            wire: None,
            host: None,
        };
        self.accounts.insert(spec.flow, account);
        if credit {
            let level = self.link.credit_level(self.now);
            self.link.add_in_flight(self.now, spec.stage, spec.peer, level, bytes);
            self.note_sent(&spec, bytes);
            return;
        }
        if self.fast
            && let Some(permit) = self.link.peek_permit(self.now, &spec)
        {
            self.link.commit_permit(self.now, &spec, permit);
            let laxity_policy::Permit { bytes, level, last } = permit;
            self.accounts.get_mut(&spec.flow).expect("arrived").launched = last.then_some(level);
            self.note(Action::Permit { flow: spec.flow, bytes, level, last });
            return;
        }
        self.link.handle(self.now, Event::FlowArrived(spec));
    }

    /// Accounts for bytes that are in flight now.
    fn note_sent(&mut self, spec: &FlowSpec, bytes: u64) {
        let takes = |bytes| Span::transfer(bytes, self.link.config().rate);
        let all = self.now + takes(self.in_flight());
        self.drained = self.drained.max(self.now) + takes(bytes);
        self.sent_by = (self.sent_by.max(self.now) + takes(bytes)).min(all);
        if bytes > WINDOW {
            self.oversized += bytes;
        }
        if self.peer_bound(spec).is_some_and(|bound| bytes > bound.min(WINDOW)) {
            *self.oversized_to.entry(spec.peer).or_default() += bytes;
        }
    }

    /// Forgets pieces that completed, as far as the bytes in flight show it.
    fn forget_oversized(&mut self, flow: FlowId) {
        if self.in_flight() <= WINDOW {
            self.oversized = 0;
        }
        let spec = self.accounts[&flow].spec;
        let to_peer = self.to_peer_at_or_above(spec.peer, Level::SCAVENGER);
        if self.peer_bound(&spec).is_some_and(|bound| to_peer <= bound.min(WINDOW)) {
            self.oversized_to.remove(&spec.peer);
        }
    }

    pub(crate) fn drain(&mut self) {
        while let Some(action) = self.link.poll_action(self.now) {
            self.note(action);
        }
    }

    /// Accounts for one action and checks the properties of every policy.
    fn note(&mut self, action: Action) {
        self.actions.push(action);
        match action {
            Action::Permit { flow, bytes, level, last } => {
                self.forget_oversized(flow);
                let account = self.accounts.get_mut(&flow).expect("a flow that arrived");
                assert!(account.waits(), "permit for a flow that is done: {action:?}");
                account.permitted += bytes;
                account.in_flight += bytes;
                assert!(account.permitted <= account.spec.bytes, "too much: {action:?}");
                assert_eq!(last, account.permitted == account.spec.bytes, "{action:?}");
                account.last = last;
                if account.spec.whole {
                    assert!(last, "cut: {action:?}");
                } else {
                    assert!(bytes <= CHUNK, "{action:?}");
                }
                assert!(bytes > 0 || account.spec.bytes == 0, "{action:?}");
                let in_scavenger =
                    account.host.map_or(account.requeued, |it| it == Level::SCAVENGER);
                let scavenged = level == Level::SCAVENGER || in_scavenger;
                // A flow that left the scavenger after its first permit keeps that permit's level
                // on the wire.
                if let Some(host) = account.host.filter(|_| account.wire.is_none()) {
                    assert!(level != Level::SCAVENGER || host == Level::SCAVENGER);
                }
                assert_eq!(*account.wire.get_or_insert(level), level, "the wire level changed");
                // A flow that cannot be cut may exceed it by the bytes beyond a chunk.
                let excess = bytes.saturating_sub(CHUNK);
                // Scavenged work that was due for long may exceed it by a chunk (`scavenger.rs`). A
                // flow pruned after its first permit keeps that permit's level on the wire.
                let excess = excess + CHUNK * u64::from(scavenged);
                let in_window = bytes == 0 || self.in_flight_at_or_above(level) <= WINDOW + excess;
                // Beyond the window, the port must have had the time to send all permitted bytes
                // but a chunk.
                let rate = self.link.config().rate;
                let idles = self.sent_by <= self.now + Span::transfer(CHUNK, rate);
                let spec = self.accounts[&flow].spec;
                let bound = self.peer_bound(&spec);
                let most = |windows: u32| u64::from(windows) * WINDOW + excess;
                let windows = if bound.is_some() { PEER_WINDOWS } else { 1 };
                let overcommitted = self.in_flight() <= most(OVERCOMMIT)
                    || (self.oversized > 0 || bound.is_some())
                        && self.in_flight() <= most(windows) + self.oversized;
                let paced = idles && overcommitted;
                assert!(in_window || paced, "window exceeded by {action:?}");
                let by_turns = scavenged || self.accounts[&flow].requeued || bytes == 0;
                if let Some(bound) = bound.filter(|_| !by_turns) {
                    let to_peer = self.to_peer_at_or_above(spec.peer, level);
                    let pieces = self.oversized_to.get(&spec.peer).copied().unwrap_or(0);
                    let most = bound + pieces + excess;
                    assert!(to_peer <= most, "{to_peer} to the peer by {action:?}");
                }
                self.note_sent(&spec, bytes);
            }
            Action::Moved { flow, from, to } => {
                let account = self.accounts.get_mut(&flow).expect("a flow that arrived");
                assert!(account.waits(), "moved though it does not wait: {action:?}");
                if let Some(host) = account.host {
                    // Service can raise a level without an action. The next permit or move shows
                    // it.
                    let scavenged = (host == Level::SCAVENGER, from == Level::SCAVENGER);
                    let was_there = from <= host && scavenged.0 == scavenged.1;
                    assert!(was_there, "moved from {from:?}, was at {host:?}");
                }
                let rescued = from == Level::SCAVENGER && account.spec.stage == Stage::KvReuse;
                let up = to < from && (from != Level::SCAVENGER || rescued);
                assert!(up || (to == Level::SCAVENGER && from != to), "demoted: {action:?}");
                account.host = Some(to);
            }
        }
    }

    /// Checks the properties that hold when no action is left.
    pub(crate) fn check_rest(&self) {
        let link = &self.link;
        assert_eq!(link.in_flight_bytes(), self.in_flight());
        let waiting: Vec<&Account> = self.accounts.values().filter(|a| a.waits()).collect();
        assert_eq!(link.waiting_flows(), waiting.len());
        let bytes: u64 = waiting.iter().map(|a| a.spec.bytes - a.permitted).sum();
        let snapshot = link.snapshot();
        for rows in [&snapshot.waiting_by_level[..], &snapshot.waiting_by_stage[..]] {
            assert_eq!(rows.iter().map(|row| row.flows).sum::<u64>(), waiting.len() as u64);
            assert_eq!(rows.iter().map(|row| row.bytes).sum::<u64>(), bytes);
        }
        let held = self
            .accounts
            .values()
            .filter(|a| a.held && a.has_more())
            .map(|a| a.spec.bytes - a.permitted);
        assert_eq!(snapshot.held.bytes, held.clone().sum::<u64>());
        assert_eq!(snapshot.held.flows, held.count() as u64);
        if let Some(due) = link.next_deadline() {
            assert!(due > self.now, "a timer that is due was left: {due:?} at {:?}", self.now);
        }
        let idles = self.drained <= self.now + Span::transfer(CHUNK, link.config().rate);
        let most = if idles { u64::from(OVERCOMMIT) * WINDOW } else { WINDOW };
        let room = self.in_flight() + CHUNK <= most;
        let takes = |account: &&&Account| {
            let all = || self.to_peer_at_or_above(account.spec.peer, Level::SCAVENGER);
            self.peer_bound(&account.spec).is_none_or(|bound| all() + CHUNK <= bound)
        };
        if room && waiting.iter().any(|account| takes(&account)) {
            // Only Karuna delays work on an idle port, and only until a known time.
            assert_eq!(link.config().policy, PolicyKind::Karuna, "idle with work waiting");
            assert!(link.next_deadline().is_some());
        }
    }

    /// Completes all bytes and lets time pass as the link asks, until no flow waits.
    pub(crate) fn run_out(&mut self) {
        let held: Vec<FlowId> = self
            .accounts
            .iter()
            .filter(|(_, account)| account.held && account.has_more())
            .map(|(&id, _)| id)
            .collect();
        for flow in held {
            self.release(flow);
        }
        for _ in 0..100_000 {
            self.drain();
            self.check_rest();
            if self.link.waiting_flows() == 0 {
                return;
            }
            let in_flight: Vec<(FlowId, u64)> = self
                .accounts
                .iter()
                .filter(|(_, account)| account.in_flight > 0)
                .map(|(&id, account)| (id, account.in_flight))
                .collect();
            if in_flight.is_empty() {
                self.now = self.link.next_deadline().expect("held back until some time");
            }
            for (flow, bytes) in in_flight {
                self.complete(flow, bytes);
            }
        }
        panic!("flows wait for ever");
    }
}
