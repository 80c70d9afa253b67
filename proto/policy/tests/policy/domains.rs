//! A hostile trust domain beside an honest one, in virtual time: whatever the hostile one does, the
//! honest one keeps its rate and waits for little.
//!
//! The honest domain sends flows one after another. Bytes leave a wire of the port's rate in the
//! order of their permits. A hostile domain claims what it likes of itself.

use std::collections::VecDeque;

use laxity_policy::domains::{ACTIVE_FOR, DOMAINS_MAX};
use laxity_policy::{
    Action, BatchId, BatchSpec, DomainId, Event, FlowId, FlowSpec, Layer, LinkConfig, Order,
    PeerId, RequestId, SharedLink, Span, Stage, Time,
};

const CHUNK: u64 = 64 << 10;
/// The honest domain's flows. Four chunks keep the wire busy, if the window lets them.
const FLOW: u64 = 4 * CHUNK;
const HONEST: DomainId = DomainId(0);
/// Flows of the hostile domain have higher numbers.
const HOSTILE_FROM: u64 = 1 << 32;
const BATCH: u64 = 7;
const REQUEST: u64 = 70;
const SHARE_MIN: f64 = 0.4;
const WAIT_MAX: Span = Span::from_millis(500);

/// The rate of the wire, in bytes per second: headers take 8 % of the port's.
const WIRE: u64 = 1_150_000_000;

fn config() -> LinkConfig {
    LinkConfig {
        rate: 1_250_000_000,
        chunk_bytes: CHUNK,
        window_bytes: 4 * CHUNK,
        peer_window_bytes: 4 * CHUNK,
        ..LinkConfig::default()
    }
}

/// What the hostile domain does, and whether it completes what it is permitted.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Attack {
    None,
    /// Collectives that are due in a moment, all the time.
    Urgent,
    /// Work requests of 2^60 bytes, which can't be cut, and that it completes at once.
    Endless,
    Silent,
    /// Completes a sixteenth of its bytes in flight now and then.
    Trickle,
    /// Sends without a permit, as on credit that it was not given.
    Launches,
    /// Thousands of batches and requests, each with a flow, and an order that prefers them.
    Floods,
    /// Ends, redefines, prunes and starts batches and requests with the honest domain's ids.
    Impersonates,
    /// Thousands of flows of many clients, one chunk each.
    Crowd,
    /// Work requests of 64 MiB that can't be cut, all of which cross the wire.
    Pieces,
    /// Flows to many peers, each of which may have a window.
    Peers,
}

struct Scene {
    link: SharedLink,
    hostile: DomainId,
    attack: Attack,
    now: Time,
    wire: VecDeque<(FlowId, u64)>,
    wire_free_at: Time,
    submitted: u64,
    hostile_waiting: usize,
    held: VecDeque<(FlowId, u64)>,
}

/// The honest domain's flows per second and its longest wait for a first permit.
#[derive(Debug)]
struct Outcome {
    flows_per_s: f64,
    longest_wait: Span,
}

impl Scene {
    fn new(attack: Attack, hostile: DomainId) -> Self {
        Self {
            link: SharedLink::new(config()).expect("a valid configuration"),
            hostile,
            attack,
            now: Time::ZERO,
            wire: VecDeque::new(),
            wire_free_at: Time::ZERO,
            submitted: HOSTILE_FROM,
            hostile_waiting: 0,
            held: VecDeque::new(),
        }
    }

    fn hint(&mut self, event: Event) {
        self.link.handle(self.now, self.hostile, event);
    }

    fn submit(&mut self, spec: FlowSpec) {
        self.submitted += 1;
        self.hostile_waiting += 1;
        let flow = FlowId(self.submitted);
        self.hint(Event::FlowArrived(FlowSpec { flow, ..spec }));
    }

    fn attacks(&mut self) {
        let soon = self.now + Span::from_millis(1);
        let urgent = |bytes| FlowSpec {
            deadline: soon,
            ..FlowSpec::anonymous(FlowId(0), Stage::Collective, bytes)
        };
        let flows = match self.attack {
            Attack::None => 0,
            Attack::Floods | Attack::Crowd => 5000,
            _ => 64,
        };
        while self.hostile_waiting < flows {
            let id = self.submitted;
            match self.attack {
                Attack::Endless => self.submit(FlowSpec { whole: true, ..urgent(1 << 60) }),
                Attack::Floods => {
                    let (batch, request) = (BatchId(id), RequestId(id));
                    let (layers, layer_time) = (1, Span(1));
                    self.hint(Event::BatchBegan(BatchSpec { batch, layers, layer_time }));
                    self.hint(Event::RequestJoined { batch, request, deadline: soon, bytes: 1 });
                    self.submit(FlowSpec { batch, request, ..urgent(CHUNK) });
                    let order = Order { epoch: id, sigma: vec![batch], pruned: vec![] };
                    self.hint(Event::OrderChanged(order));
                }
                Attack::Impersonates => {
                    let (batch, request) = (BatchId(BATCH), RequestId(REQUEST));
                    let deadline = Time(1);
                    self.hint(Event::RequestJoined { batch, request, deadline, bytes: u64::MAX });
                    self.hint(Event::LayerBegan { batch, layer: Layer(u16::MAX) });
                    self.hint(Event::RequestEnded { request });
                    self.hint(Event::BatchEnded { batch });
                    let pruned = vec![request];
                    self.hint(Event::OrderChanged(Order { epoch: id, sigma: vec![], pruned }));
                    self.submit(FlowSpec { batch, request, ..urgent(CHUNK) });
                }
                Attack::Pieces => self.submit(FlowSpec { whole: true, ..urgent(64 << 20) }),
                Attack::Crowd => self.submit(urgent(CHUNK)),
                Attack::Peers => {
                    self.submit(FlowSpec {
                        peer: PeerId(1 + id as u16 % 40),
                        ..urgent(16 * CHUNK)
                    });
                }
                _ => self.submit(urgent(16 * CHUNK)),
            }
        }
        if self.attack == Attack::Launches {
            let (now, level) = (self.now, self.link.link(self.hostile).credit_level(self.now));
            let unknown = (Stage::Collective, PeerId(0));
            self.link.add_in_flight(now, self.hostile, unknown, level, 1 << 40);
        }
    }

    /// Takes all permits. Bytes that the hostile domain only claims to have take no time on the
    /// wire.
    fn poll(&mut self) -> Option<(FlowId, Time)> {
        let mut first = None;
        while let Some(action) = self.link.poll_action(self.now) {
            let Action::Permit { flow, bytes, last, .. } = action else { continue };
            let honest = flow.0 < HOSTILE_FROM;
            self.hostile_waiting -= usize::from(!honest && last);
            if honest {
                first.get_or_insert((flow, self.now));
            }
            match self.attack {
                Attack::Silent | Attack::Trickle if !honest => self.held.push_back((flow, bytes)),
                Attack::Endless if !honest => self.complete(flow, bytes),
                _ => self.send(flow, bytes),
            }
        }
        first
    }

    fn send(&mut self, flow: FlowId, bytes: u64) {
        let free = self.wire_free_at.max(self.now);
        if self.wire.is_empty() {
            self.wire_free_at = free + Span::transfer(bytes, WIRE);
        }
        self.wire.push_back((flow, bytes));
    }

    fn complete(&mut self, flow: FlowId, bytes: u64) {
        for domain in [HONEST, self.hostile] {
            self.link.handle(self.now, domain, Event::BytesCompleted { flow, bytes });
        }
    }

    /// Lets the honest domain send flows for `length`.
    fn run(&mut self, length: Span, spec: &FlowSpec) -> Outcome {
        let (start, end) = (self.now, self.now + length);
        let (mut flows, mut longest_wait) = (0_u64, Span::ZERO);
        let mut pending: Option<(FlowId, u64, Time, bool)> = None;
        while self.now < end {
            self.attacks();
            let (flow, left, since, waits) = *pending.get_or_insert_with(|| {
                flows += 1;
                let flow = FlowId(flows);
                let spec = FlowSpec { flow, ..*spec };
                self.link.handle(self.now, HONEST, Event::FlowArrived(spec));
                (flow, spec.bytes, self.now, true)
            });
            let permitted = self.poll().is_some();
            let wait = self.now.since(since);
            longest_wait = if waits { longest_wait.max(wait) } else { longest_wait };
            pending = Some((flow, left, since, waits && !permitted));
            // Nothing else happens between the turns of the hostile domain, a tenth of a
            // millisecond.
            let turn = self.now + Span::from_micros(100);
            self.now = match self.wire.is_empty() {
                true => turn,
                false => turn.min(self.wire_free_at),
            };
            if self.wire_free_at <= self.now
                && let Some((done, bytes)) = self.wire.pop_front()
            {
                if let Some(&(_, next)) = self.wire.front() {
                    self.wire_free_at = self.now + Span::transfer(next, WIRE);
                }
                self.complete(done, bytes);
                if done == flow {
                    pending = (left > bytes).then_some((flow, left - bytes, since, false));
                }
            } else if self.attack == Attack::Trickle
                && let Some((held, bytes)) = self.held.pop_front()
            {
                self.complete(held, bytes / 16);
            }
        }
        flows -= u64::from(pending.is_some());
        let seconds = self.now.since(start).0 as f64 / 1e9;
        Outcome { flows_per_s: flows as f64 / seconds, longest_wait }
    }
}

/// What the honest domain sends: a KV cache of a request from prefill to decode (P2D), without a
/// deadline.
fn honest() -> FlowSpec {
    let (batch, request) = (BatchId(BATCH), RequestId(REQUEST));
    FlowSpec { batch, request, ..FlowSpec::anonymous(FlowId(0), Stage::P2d, FLOW) }
}

fn outcome(attack: Attack, hostile: DomainId) -> Outcome {
    Scene::new(attack, hostile).run(Span::from_millis(2000), &honest())
}

/// Reports whether the honest domain gets less than its bounds.
fn is_harmed(alone: &Outcome, beside: &Outcome) -> bool {
    beside.flows_per_s < SHARE_MIN * alone.flows_per_s || beside.longest_wait > WAIT_MAX
}

const ATTACKS: [Attack; 10] = [
    Attack::Urgent,
    Attack::Endless,
    Attack::Silent,
    Attack::Trickle,
    Attack::Launches,
    Attack::Floods,
    Attack::Impersonates,
    Attack::Crowd,
    Attack::Pieces,
    Attack::Peers,
];

/// Prints the table of docs/operating.md.
#[test]
fn whatever_another_domain_does_an_honest_one_keeps_its_rate_and_waits_for_little() {
    let alone = outcome(Attack::None, DomainId(1));
    println!("| attack | share of the rate alone | longest wait |\n|---|---|---|");
    for attack in ATTACKS {
        let beside = outcome(attack, DomainId(1));
        let share = beside.flows_per_s / alone.flows_per_s * 100.0;
        let wait_us = beside.longest_wait.0 / 1000;
        println!("| {attack:?} | {share:.0} % | {wait_us} µs |");
        assert!(!is_harmed(&alone, &beside), "{attack:?}: {beside:?} beside, {alone:?} alone");
    }
}

#[test]
fn inside_one_domain_the_same_attacks_harm_so_the_domains_are_what_helps() {
    let alone = outcome(Attack::None, DomainId(1));
    for attack in ATTACKS.into_iter().filter(|attack| *attack != Attack::Endless) {
        let beside = outcome(attack, HONEST);
        assert!(is_harmed(&alone, &beside), "{attack:?}: {beside:?} beside, {alone:?} alone");
    }
}

#[test]
fn a_domain_has_the_whole_window_again_after_the_others_went_quiet() {
    let mut scene = Scene::new(Attack::Urgent, DomainId(1));
    scene.run(Span::from_millis(10), &honest());
    let half = config().window_bytes / 2;
    assert_eq!(scene.link.link(HONEST).config().window_bytes, half);
    assert!(scene.link.is_limited(scene.hostile) && scene.link.has_others(HONEST));
    scene.attack = Attack::None;
    for flow in HOSTILE_FROM..=scene.submitted {
        scene.hint(Event::FlowCancelled { flow: FlowId(flow) });
    }
    scene.run(ACTIVE_FOR.times(2), &honest());
    assert_eq!(scene.link.link(HONEST).config().window_bytes, config().window_bytes);
    assert!(!scene.link.has_others(HONEST));
}

#[test]
fn background_work_of_one_domain_yields_to_the_levels_of_another_but_not_for_ever() {
    let mut link = SharedLink::new(config()).expect("valid");
    let background = FlowSpec::anonymous(FlowId(HOSTILE_FROM), Stage::Background, 1 << 40);
    let (mut now, mut sent) = (Time::ZERO, [0_u64; 2]);
    link.handle(now, DomainId(1), Event::FlowArrived(background));
    let busy = FlowSpec::anonymous(FlowId(1), Stage::Collective, 1 << 40);
    link.handle(now, HONEST, Event::FlowArrived(busy));
    assert_eq!(link.link(HONEST).config().window_bytes, config().window_bytes);
    for _ in 0..20_000 {
        if let Some(Action::Permit { flow, bytes, .. }) = link.poll_action(now) {
            sent[usize::from(flow.0 != 1)] += bytes;
            now = now + Span::transfer(bytes, config().rate);
            let domain = if flow.0 == 1 { HONEST } else { DomainId(1) };
            link.handle(now, domain, Event::BytesCompleted { flow, bytes });
        }
    }
    // Nothing completes any more. Once both windows are full, no turn is due.
    for _ in 0..8 {
        while link.poll_action(now).is_some() {}
        let Some(next) = link.next_deadline() else { break };
        assert!(next > now, "a busy loop");
        now = next;
    }
    assert_eq!(link.next_deadline(), None);
    let permille = sent[1] * 1000 / (sent[0] + sent[1]);
    assert!((8..=12).contains(&permille), "{permille} for {} configured", 10);
}

#[test]
fn whoever_holds_more_than_its_part_keeps_nobody_waiting_if_no_other_domain_waits() {
    let mut link = SharedLink::new(config()).expect("valid");
    let flow = |flow, bytes| FlowSpec::anonymous(FlowId(flow), Stage::Collective, bytes);
    let whole = FlowSpec { whole: true, ..flow(1, 8 * CHUNK) };
    link.handle(Time::ZERO, HONEST, Event::FlowArrived(whole));
    while link.poll_action(Time::ZERO).is_some() {}
    let other = DomainId(1);
    link.handle(Time::ZERO, other, Event::FlowArrived(flow(HOSTILE_FROM, CHUNK)));
    while link.poll_action(Time::ZERO).is_some() {}
    assert!(link.is_idle(other) && link.has_others(HONEST));
    assert!(!link.keeps_others_waiting(HONEST), "the other has room in its part");
    link.handle(Time::ZERO, other, Event::FlowArrived(flow(HOSTILE_FROM + 1, 8 * CHUNK)));
    while link.poll_action(Time::ZERO).is_some() {}
    assert!(link.keeps_others_waiting(HONEST));
}

#[test]
fn a_waiting_domain_wakes_when_the_part_of_another_ends() {
    let mut link = SharedLink::new(config()).expect("a valid configuration");
    let permitted = |link: &mut SharedLink, now| {
        let mut all = 0;
        while let Some(action) = link.poll_action(now) {
            if let Action::Permit { flow, bytes, .. } = action {
                all += if flow == FlowId(1) { bytes } else { 0 };
            }
        }
        all
    };
    let short = FlowSpec::anonymous(FlowId(2), Stage::P2d, CHUNK);
    link.handle(Time(1), DomainId(1), Event::FlowArrived(short));
    permitted(&mut link, Time(1));
    let completed = Event::BytesCompleted { flow: FlowId(2), bytes: CHUNK };
    link.handle(Time(2), DomainId(1), completed);
    let long = FlowSpec { flow: FlowId(1), bytes: 100 * CHUNK, ..honest() };
    link.handle(Time(2), HONEST, Event::FlowArrived(long));
    assert_eq!(permitted(&mut link, Time(2)), 2 * CHUNK, "its part");
    let ends = Time(1) + ACTIVE_FOR;
    assert_eq!(link.next_deadline(), Some(ends));
    assert_eq!(permitted(&mut link, ends), 2 * CHUNK, "the rest of the window");
}

#[test]
fn domains_beyond_the_last_number_share_it() {
    let mut link = SharedLink::new(config()).expect("valid");
    let spec = FlowSpec::anonymous(FlowId(1), Stage::Collective, 1);
    link.handle(Time::ZERO, DomainId(u8::MAX), Event::FlowArrived(spec));
    assert_eq!(link.link(DomainId(DOMAINS_MAX as u8 - 1)).waiting_flows(), 1);
    assert_eq!(link.waiting_flows(), 1);
}

#[test]
fn work_in_the_levels_that_waits_for_completions_keeps_scavenged_work_of_others_waiting() {
    let none_for_scavengers = LinkConfig { scavenger_permille: 0, ..config() };
    let mut link = SharedLink::new(none_for_scavengers).expect("a valid configuration");
    let (now, hostile) = (Time::ZERO, DomainId(1));
    let arrives =
        |flow, stage, bytes| Event::FlowArrived(FlowSpec::anonymous(FlowId(flow), stage, bytes));
    link.handle(now, hostile, arrives(1, Stage::Collective, 64 * CHUNK));
    while link.poll_action(now).is_some() {}
    assert!(!link.keeps_scavengers_waiting(hostile), "nobody else waits");
    link.handle(now, HONEST, arrives(2, Stage::Background, 64 * CHUNK));
    while link.poll_action(now).is_some() {}
    assert!(link.keeps_scavengers_waiting(hostile));
    assert!(!link.keeps_scavengers_waiting(HONEST));
    link.set_config(now, LinkConfig { scavenger_permille: 1, ..config() }).expect("valid");
    assert!(!link.keeps_scavengers_waiting(hostile), "the scavenger has a share");
    link.set_config(now, LinkConfig { scavenger_permille: 0, ..config() }).expect("valid");
    let bytes = link.link(hostile).in_flight_bytes();
    link.handle(now, hostile, Event::BytesWrittenOff { flow: FlowId(1), bytes });
    link.handle(now, hostile, Event::FlowHeld { flow: FlowId(1) });
    assert!(!link.keeps_scavengers_waiting(hostile), "its flow is held");
    assert!(link.poll_action(now).is_some(), "the scavenged work goes");
}

#[test]
fn a_hint_gives_a_new_deadline_to_so_many_flows_at_most_and_its_repetition_to_more() {
    const FLOWS: u64 = 10_000;
    let mut port = SharedLink::new(config()).expect("valid");
    let (domain, batch, request) = (DomainId(1), BatchId(BATCH), RequestId(REQUEST));
    // Another domain uses the port, too.
    let other = FlowSpec::anonymous(FlowId(0), Stage::P2d, 1);
    port.handle(Time::ZERO, HONEST, Event::FlowArrived(other));
    for flow in 0..FLOWS {
        let flow = FlowId(HOSTILE_FROM + flow);
        let spec = FlowSpec { batch, request, ..FlowSpec::anonymous(flow, Stage::P2d, 1 << 20) };
        port.handle(Time::ZERO, domain, Event::FlowArrived(spec));
    }
    let dated = |port: &SharedLink| {
        let is_dated = |flow: &u64| {
            let known = port.link(domain).explain(Time::ZERO, FlowId(HOSTILE_FROM + flow));
            known.is_some_and(|it| it.spec.deadline.0 == 1 << 40)
        };
        (0..FLOWS).filter(is_dated).count() as u64
    };
    for expected in [4096, 8192, FLOWS] {
        let deadline = Time(1 << 40);
        let joined = Event::RequestJoined { batch, request, deadline, bytes: 0 };
        port.handle(Time::ZERO, domain, joined);
        assert_eq!(dated(&port), expected);
    }
}

#[test]
fn an_order_moves_all_flows_of_a_request_that_it_prunes_however_many_they_are() {
    const FLOWS: u64 = 10_000;
    let mut port = SharedLink::new(config()).expect("valid");
    let (domain, request) = (DomainId(1), RequestId(REQUEST));
    for flow in 0..FLOWS {
        let flow = FlowId(HOSTILE_FROM + flow);
        let spec = FlowSpec { request, ..FlowSpec::anonymous(flow, Stage::P2d, 1 << 20) };
        port.handle(Time::ZERO, domain, Event::FlowArrived(spec));
    }
    let order = Order { epoch: 1, sigma: Vec::new(), pruned: vec![request] };
    port.handle(Time::ZERO, domain, Event::OrderChanged(order));
    let first = port.link(domain).snapshot().demotions;
    assert!(first < FLOWS, "{first} at once");
    while port.poll_action(Time::ZERO).is_some() {}
    assert_eq!(port.link(domain).snapshot().demotions, FLOWS);
}
