//! Transfers that exceed the window, in one piece or cut into chunks, on a port of which they reach
//! a share only (docs/notes/whole-transfers.md).
//!
//! The model is that of `tools/sim/fits/whole_transfers.py`, but the subject is a real [`Link`].
//! About sixty requests arrive at random, with one transfer each. Transfers in flight share the
//! port, and none gets more than the share `s`. A transfer begins `L` after its permit. A request
//! is in time if its transfer ends by its deadline. That is three times the request's time alone
//! after the request's arrival, less the time of a first token. `--nocapture` prints the note's
//! tables.
//!
//! Cut transfers of one host have half of the arrivals, and all of them together get the share `s`.
//! With two hosts, each has a [`Link`] of its own, and the port that they write to gives each half
//! while both do.

use std::collections::{BTreeMap, VecDeque};
use std::f64::consts::TAU;

use laxity_policy::{
    Action, Event, FlowId, FlowSpec, Level, Link, LinkConfig, PeerId, PolicyKind, RequestId, Span,
    Stage, Time,
};
use proptest::prelude::*;

/// The port's rate in bytes per second. [`GOODPUT`] is the payload that it carries.
const RATE: f64 = 12.5e6;
const GOODPUT: f64 = 0.95 * RATE;
/// Mean rate at which requests arrive at random, per second.
const ARRIVALS: f64 = 2.03;
const SPAN_S: f64 = 30.0;
const PREFILL_S: f64 = 0.14;
/// Time from the end of a transfer to the first token.
const TOKEN_S: f64 = 0.1;
const BLOCK_BYTES: f64 = 128.0 * 16384.0;
const SEEDS: u64 = 30;
/// Values of `L`.
const BEGINS_S: [f64; 3] = [0.0, 0.05, 0.12];

/// Deterministic pseudo-random numbers in (0, 1).
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (((z ^ (z >> 31)) >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    fn exponential(&mut self, rate: f64) -> f64 {
        -self.next().ln() / rate
    }

    fn normal(&mut self) -> f64 {
        (-2.0 * self.next().ln()).sqrt() * (TAU * self.next()).cos()
    }
}

/// The port, and how fast its transfers are.
#[derive(Clone, Copy)]
struct Wire {
    share: f64,
    begin_s: f64,
    is_cut: bool,
    /// Hosts that send to the port.
    hosts: u64,
}

impl Wire {
    fn arrivals(self) -> f64 {
        if self.is_cut { ARRIVALS / 2.0 * self.hosts as f64 } else { ARRIVALS }
    }

    /// Returns the bytes per second that a lone transfer reaches.
    fn alone(self) -> f64 {
        if self.is_cut { GOODPUT } else { GOODPUT * self.share }
    }

    /// Returns the bytes per second of each of so many transfers.
    fn speed(self, moving: usize) -> f64 {
        let equal = 1.0 / moving.max(1) as f64;
        GOODPUT * if self.is_cut { self.share * equal } else { self.share.min(equal) }
    }
}

/// A request's transfer: when it is ready, its bytes, and when it has to end.
#[derive(Clone, Copy)]
struct Transfer {
    ready: f64,
    bytes: f64,
    due: f64,
}

fn transfers(seed: u64, wire: Wire) -> Vec<Transfer> {
    let mut draw = SplitMix(seed);
    let (mut at, mut made) = (draw.exponential(wire.arrivals()), Vec::new());
    while at <= SPAN_S {
        let tokens = (5.4 + 0.6 * draw.normal()).exp().clamp(64.0, 768.0);
        let bytes = ((tokens / 128.0).floor() + 1.0) * BLOCK_BYTES;
        let alone = PREFILL_S + bytes / wire.alone() + wire.begin_s;
        let ready = at + PREFILL_S * (0.8 + 1.2 * draw.next());
        made.push(Transfer { ready, bytes, due: at + 3.0 * alone - TOKEN_S });
        at += draw.exponential(wire.arrivals());
    }
    made.sort_by(|a, b| a.ready.total_cmp(&b.ready));
    made
}

fn time(seconds: f64) -> Time {
    Time((seconds * 1e9).ceil() as u64)
}

fn port(rate: f64, window_bytes: u64, peer_window_bytes: u64) -> Link {
    let config = LinkConfig {
        rate: rate as u64,
        chunk_bytes: 64 << 10,
        window_bytes,
        policy: PolicyKind::Laxity,
        peer_window_bytes,
        ..LinkConfig::default()
    };
    Link::new(config).expect("a valid configuration")
}

/// A transfer with permits: when its bytes begin to flow, and what is left of each permit.
struct Flight {
    begins: f64,
    left: VecDeque<Permitted>,
}

/// The bytes of a permit, and those of them that are left.
struct Permitted {
    bytes: u64,
    left: f64,
}

impl Flight {
    /// Returns what moves next.
    fn moves(&self, now: f64) -> Option<&Permitted> {
        self.left.front().filter(|_| self.begins <= now)
    }
}

struct Run {
    links: Vec<Link>,
    wire: Wire,
    now: f64,
    flights: BTreeMap<u64, Flight>,
    /// Bytes of each transfer that arrived.
    arrived: BTreeMap<u64, u64>,
    ends: BTreeMap<u64, f64>,
}

impl Run {
    fn new(wire: Wire) -> Self {
        let (flights, arrived, ends) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let (window_bytes, by_peer) = if wire.is_cut { (1 << 20, 1 << 20) } else { (128 << 10, 0) };
        let links = (0..wire.hosts).map(|_| port(RATE, window_bytes, by_peer)).collect();
        Self { links, wire, now: 0.0, flights, arrived, ends }
    }

    fn submit(&mut self, id: u64, transfer: &Transfer, stage: Stage, hinted: bool) {
        let spec = FlowSpec {
            request: RequestId(id),
            deadline: if hinted { time(transfer.due) } else { Time::NEVER },
            whole: !self.wire.is_cut,
            peer: PeerId(1),
            ..FlowSpec::anonymous(FlowId(id), stage, transfer.bytes as u64)
        };
        let host = self.host(id);
        self.links[host].handle(time(self.now), Event::FlowArrived(spec));
    }

    /// Returns the host that sends a transfer.
    fn host(&self, id: u64) -> usize {
        (id % self.wire.hosts) as usize
    }

    /// Returns the bytes per second of each transfer of each host.
    fn speeds(&self) -> Vec<f64> {
        let mut moving = vec![0; self.links.len()];
        for (&id, flight) in &self.flights {
            moving[self.host(id)] += usize::from(flight.moves(self.now).is_some());
        }
        let sending = moving.iter().filter(|&&count| count > 0).count().max(1) as f64;
        moving.iter().map(|&count| self.wire.speed(count) / sending).collect()
    }

    fn poll(&mut self) {
        let begins = self.now + self.wire.begin_s;
        for link in &mut self.links {
            while let Some(action) = link.poll_action(time(self.now)) {
                if let Action::Permit { flow, bytes, .. } = action {
                    let none = || Flight { begins, left: VecDeque::new() };
                    let flight = self.flights.entry(flow.0).or_insert_with(none);
                    flight.left.push_back(Permitted { bytes, left: bytes as f64 });
                }
            }
        }
    }

    /// Lets time pass until `until`, a timer, or the end or beginning of a permitted piece.
    fn step(&mut self, until: f64, sizes: &[Transfer]) {
        self.poll();
        let now = self.now;
        let (speeds, hosts) = (self.speeds(), self.wire.hosts);
        let speed = |id: u64| speeds[(id % hosts) as usize];
        let timers = self.links.iter().filter_map(Link::next_deadline);
        let timers = timers.map(|at| (at.0 as f64 / 1e9).max(now + 1e-9));
        let ends = self.flights.iter().filter_map(|(&id, flight)| match flight.begins > now {
            true => Some(flight.begins),
            false => flight.moves(now).map(|piece| now + piece.left / speed(id)),
        });
        let then = ends.chain(timers).fold(until, f64::min);
        let mut done = Vec::new();
        for (&id, flight) in self.flights.iter_mut().filter(|(_, flight)| flight.begins <= now) {
            let Some(piece) = flight.left.front_mut() else { continue };
            piece.left -= speed(id) * (then - now);
            if piece.left <= 1.0 {
                done.push((id, piece.bytes));
                flight.left.pop_front();
            }
        }
        self.now = then;
        for (id, bytes) in done {
            let arrived = self.arrived.entry(id).or_default();
            *arrived += bytes;
            let is_over = *arrived >= sizes[id as usize - 1].bytes as u64;
            let host = self.host(id);
            let link = &mut self.links[host];
            link.handle(time(then), Event::BytesCompleted { flow: FlowId(id), bytes });
            if is_over {
                self.flights.remove(&id);
                self.ends.insert(id, then);
                link.handle(time(then), Event::RequestEnded { request: RequestId(id) });
            }
        }
    }
}

/// Returns the share of requests that are in time.
fn in_time(wire: Wire, stage: Stage, hinted: bool, seed: u64) -> f64 {
    let plan = transfers(seed, wire);
    let mut run = Run::new(wire);
    for (id, transfer) in (1..).zip(&plan) {
        while run.now < transfer.ready {
            run.step(transfer.ready, &plan);
        }
        run.submit(id, transfer, stage, hinted);
    }
    while run.ends.len() < plan.len() {
        assert!(run.now < 1e4, "some transfer never ends");
        run.step(f64::INFINITY, &plan);
    }
    let met = (1..).zip(&plan).filter(|(id, transfer)| run.ends[id] <= transfer.due);
    met.count() as f64 / plan.len() as f64
}

/// Returns the percentage in time for each `L`, mean of all seeds. Transfers are cut if there are
/// hosts that cut them.
fn percent(share: f64, cut_by: Option<u64>, stage: Stage, hinted: bool) -> Vec<f64> {
    let (is_cut, hosts) = (cut_by.is_some(), cut_by.unwrap_or(1));
    let mean = |begin_s| {
        let wire = Wire { share, begin_s, is_cut, hosts };
        let runs = (0..SEEDS).map(|seed| in_time(wire, stage, hinted, seed));
        runs.sum::<f64>() / SEEDS as f64 * 100.0
    };
    BEGINS_S.map(mean).to_vec()
}

#[test]
fn deadlines_gain_whatever_share_of_the_port_a_lone_transfer_reaches() {
    for stage in [Stage::P2d, Stage::KvReuse] {
        for share in [1.0, 0.75, 0.5, 0.25] {
            let [off, on] = [false, true].map(|hinted| percent(share, None, stage, hinted));
            println!("{stage:?}, s = {share}: hints off {off:.0?}, hints on {on:.0?}");
            for (off, on) in off.iter().zip(&on) {
                assert!(on > &(off + 1.0), "{stage:?}, s = {share}: {on} after {off}");
            }
        }
    }
}

/// Least laxity would take turns among transfers of equal laxity, and all of them would be late.
#[test]
fn deadlines_do_not_make_cut_transfers_take_turns() {
    for share in [1.0, 0.75, 0.6, 0.5] {
        let [off, on] = [false, true].map(|hinted| percent(share, Some(1), Stage::P2d, hinted));
        println!("cut, s = {share}: hints off {off:.0?}, hints on {on:.0?}");
        for (off, on) in off.iter().zip(&on) {
            let gain = if share < 0.7 { 1.0 } else { -1.0 };
            assert!(on > &(off + gain), "s = {share}: {on} after {off}");
        }
    }
}

/// Each host sees only its own bytes.
#[test]
fn deadlines_gain_where_two_hosts_write_to_a_port() {
    let [off, on] = [false, true].map(|hinted| percent(1.0, Some(2), Stage::P2d, hinted));
    println!("two hosts: hints off {off:.0?}, hints on {on:.0?}");
    for (off, on) in off.iter().zip(&on) {
        assert!(on > &(off + 2.0), "{on} after {off}");
    }
}

/// A port on which pieces go one after the other, and the id of the next.
struct Pieces {
    link: Link,
    now: Time,
    next: u64,
}

impl Pieces {
    fn new() -> Self {
        Self { link: port(RATE, 128 << 10, 0), now: Time(1), next: 1 }
    }

    /// Returns a piece of the last stage with these bytes, due after `slack`.
    fn piece(&mut self, bytes: u64, slack: Option<Span>) -> FlowSpec {
        let flow = FlowId(self.next);
        self.next += 1;
        let deadline = slack.map_or(Time::NEVER, |slack| self.now + slack);
        FlowSpec { deadline, whole: true, ..FlowSpec::anonymous(flow, Stage::P2d, bytes) }
    }

    /// Returns the level of the only piece that waits, and permits it.
    fn permit(&mut self, spec: FlowSpec) -> Level {
        self.link.handle(self.now, Event::FlowArrived(spec));
        let mut actions = std::iter::from_fn(|| self.link.poll_action(self.now));
        let level = actions.find_map(|action| match action {
            Action::Permit { level, .. } => Some(level),
            _ => None,
        });
        level.expect("nothing else is in flight")
    }

    /// Sends a piece that ends after `took`.
    fn send(&mut self, spec: FlowSpec, took: Span) {
        self.permit(spec);
        self.now = self.now + took;
        let (flow, bytes) = (spec.flow, spec.bytes);
        self.link.handle(self.now, Event::BytesCompleted { flow, bytes });
    }

    /// Sends pieces at a quarter of the port's rate until that is the mean rate.
    fn slow_down(&mut self) {
        for _ in 0..50 {
            let slow = self.piece(MIB, None);
            self.send(slow, own(MIB, 4));
        }
    }

    /// Sends a piece by the fast path. It ends after `took`, delivered or not.
    fn send_at_once(&mut self, spec: FlowSpec, took: Span, delivered: bool) {
        let permit = self.link.peek_permit(self.now, &spec).expect("nothing is in flight");
        self.link.commit_permit(self.now, &spec, permit);
        self.now = self.now + took;
        match delivered {
            true => self.link.remove_in_flight(self.now, PeerId(0), permit.level, spec.bytes),
            false => self.link.write_off(self.now, PeerId(0), permit.level, spec.bytes),
        }
    }

    /// Returns the flow that is next when `spec` has arrived and `first` is cancelled.
    fn permit_after(&mut self, first: FlowSpec, spec: FlowSpec) -> FlowId {
        self.link.handle(self.now, Event::FlowArrived(spec));
        self.link.handle(self.now, Event::FlowCancelled { flow: first.flow });
        let mut actions = std::iter::from_fn(|| self.link.poll_action(self.now));
        let next = actions.find_map(|action| match action {
            Action::Permit { flow, .. } => Some(flow),
            _ => None,
        });
        next.expect("nothing is in flight")
    }

    /// Reports whether a piece is feasible if it is due after `times` times its transfer time at
    /// the port's rate.
    fn is_feasible(&mut self, times: f64) -> bool {
        let own = Span::transfer(MIB, RATE as u64).0 as f64;
        let spec = self.piece(MIB, Some(Span((own * times) as u64)));
        let level = self.permit(spec);
        self.link.handle(self.now, Event::FlowCancelled { flow: spec.flow });
        level != Level::SCAVENGER
    }
}

const MIB: u64 = 1 << 20;

/// Returns `times` times the transfer time of `bytes` at the port's rate.
fn own(bytes: u64, times: u64) -> Span {
    Span::transfer(bytes, RATE as u64).times(times)
}

proptest! {
    /// The oracle is the equation in `link/piece_rate.rs`.
    #[test]
    fn a_deadline_is_feasible_at_the_mean_rate_of_earlier_pieces(
        pieces in prop::collection::vec((MIB / 4..16 * MIB, 0.5..8.0, any::<bool>()), 0..40),
        slack in 0.9..10.0,
    ) {
        let (mut port, mut mean) = (Pieces::new(), RATE);
        for (bytes, times, at_once) in pieces {
            let took: f64 = bytes as f64 / RATE * times;
            mean += ((bytes as f64 / took).min(RATE) - mean) / 8.0;
            let (spec, took) = (port.piece(bytes, None), Span((took * 1e9) as u64));
            match at_once {
                true => port.send_at_once(spec, took, true),
                false => port.send(spec, took),
            }
        }
        let needed: f64 = RATE / mean;
        prop_assume!(f64::abs(slack / needed - 1.0) > 1e-3);
        prop_assert_eq!(port.is_feasible(slack), slack > needed);
    }
}

#[test]
fn pieces_that_fit_the_window_or_never_end_say_nothing_about_the_rate() {
    let mut port = Pieces::new();
    for _ in 0..50 {
        let fits = port.piece(128 << 10, None);
        port.send(fits, own(128 << 10, 50));
        let lost = port.piece(MIB, None);
        port.send_at_once(lost, own(MIB, 50), false);
        let cancelled = port.piece(MIB, None);
        port.permit(cancelled);
        port.now = port.now + own(MIB, 50);
        port.link.handle(port.now, Event::FlowCancelled { flow: cancelled.flow });
    }
    assert!(port.is_feasible(1.01));
}

#[test]
fn a_flow_that_fits_the_window_is_feasible_at_the_rate_of_the_port() {
    let mut port = Pieces::new();
    port.slow_down();
    assert!(!port.is_feasible(3.9));
    for whole in [false, true] {
        let bytes = if whole { 128 << 10 } else { MIB };
        let slack = Span(own(bytes, 1).0 + 1000);
        let spec = FlowSpec { whole, ..port.piece(bytes, Some(slack)) };
        assert_ne!(port.permit(spec), Level::SCAVENGER);
        port.link.handle(port.now, Event::FlowCancelled { flow: spec.flow });
    }
}

#[test]
fn scavenged_pieces_raise_the_rate_and_never_lower_it() {
    let mut port = Pieces::new();
    let doomed = |port: &mut Pieces| port.piece(MIB, Some(Span(1)));
    for _ in 0..50 {
        let slow = doomed(&mut port);
        port.send(slow, own(MIB, 50));
    }
    assert!(port.is_feasible(1.01));
    port.slow_down();
    assert!(!port.is_feasible(3.9));
    for _ in 0..50 {
        let fast = doomed(&mut port);
        port.send(fast, own(MIB, 1));
    }
    assert!(port.is_feasible(1.1));
}

#[test]
fn pieces_that_are_late_leave_room_for_one_that_can_be_in_time() {
    let mut port = Pieces::new();
    let late: Vec<FlowSpec> = (0..3).map(|_| port.piece(MIB, Some(Span(1)))).collect();
    let permitted = |port: &mut Pieces| -> Vec<FlowId> {
        let actions = std::iter::from_fn(|| port.link.poll_action(port.now));
        let permits = actions.filter_map(|action| match action {
            Action::Permit { flow, .. } => Some(flow),
            _ => None,
        });
        permits.collect()
    };
    for spec in &late {
        port.link.handle(port.now, Event::FlowArrived(*spec));
    }
    assert_eq!(permitted(&mut port), [late[0].flow]);
    port.now = port.now + own(MIB, 1);
    assert_eq!(permitted(&mut port), [late[1].flow], "the first does not fill the port");
    port.now = port.now + own(MIB, 50);
    assert_eq!(permitted(&mut port), [], "two of them are in flight");
    let timely = port.piece(MIB, Some(own(MIB, 50)));
    port.link.handle(port.now, Event::FlowArrived(timely));
    assert_eq!(permitted(&mut port), [timely.flow]);
    for ended in [late[0], late[1]] {
        port.link.handle(port.now, Event::BytesCompleted { flow: ended.flow, bytes: MIB });
    }
    port.now = port.now + own(MIB, 1);
    assert_eq!(permitted(&mut port), [late[2].flow], "one is in flight");
}

#[test]
fn kv_reuse_that_pieces_are_too_slow_for_goes_behind_the_rest() {
    let mut port = Pieces::new();
    port.slow_down();
    let first = port.piece(MIB, None);
    port.permit(first);
    let reuse = |spec| FlowSpec { stage: Stage::KvReuse, ..spec };
    let [doomed, later] = [3, 30].map(|times| reuse(port.piece(MIB, Some(own(MIB, times)))));
    port.link.handle(port.now, Event::FlowArrived(doomed));
    assert_eq!(port.permit_after(first, later), later.flow);
}
