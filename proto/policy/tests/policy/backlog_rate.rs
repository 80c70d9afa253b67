//! P2D that is cut is judged by the rate at which the port, or the peer, delivers while flows wait,
//! and counts what is in flight ahead of it (docs/notes/whole-transfers.md).

use std::collections::VecDeque;

use laxity_policy::{
    Action, Event, FlowId, FlowSpec, Level, Link, LinkConfig, PeerId, PolicyKind, Span, Stage, Time,
};
use proptest::prelude::*;

const CHUNK: u64 = 64 << 10;
const WINDOW: u64 = 16 * CHUNK;
const RATE: u64 = 12_500_000;
const LONG: u64 = 1 << 40;
const PEER: PeerId = PeerId(1);
const OTHER: PeerId = PeerId(2);

/// A port that delivers in order, and a flow without a deadline that always waits.
struct Port {
    link: Link,
    now: Time,
    in_flight: VecDeque<(FlowId, u64)>,
    next: u64,
}

impl Port {
    /// Bounds by peer are on if `by_peer`.
    fn new(by_peer: bool) -> Self {
        let config = LinkConfig {
            rate: RATE,
            chunk_bytes: CHUNK,
            window_bytes: WINDOW,
            peer_window_bytes: if by_peer { WINDOW } else { 0 },
            policy: PolicyKind::Laxity,
            ..LinkConfig::default()
        };
        let link = Link::new(config).expect("a valid configuration");
        Self { link, now: Time(1), in_flight: VecDeque::new(), next: 1 }
    }

    fn submit(&mut self, peer: PeerId, bytes: u64, deadline: Time) -> FlowId {
        let flow = FlowId(self.next);
        self.next += 1;
        let spec = FlowSpec { deadline, peer, ..FlowSpec::anonymous(flow, Stage::P2d, bytes) };
        self.link.handle(self.now, Event::FlowArrived(spec));
        flow
    }

    /// Takes all permits. Reports whether a flow is scavenged.
    fn poll(&mut self) -> bool {
        let mut scavenged = false;
        while let Some(action) = self.link.poll_action(self.now) {
            if let Action::Permit { flow, bytes, level, .. } = action {
                scavenged |= level == Level::SCAVENGER;
                self.in_flight.push_back((flow, bytes));
            }
        }
        scavenged || self.link.snapshot().waiting_by_level[Level::SCAVENGER.row()].flows > 0
    }

    /// Delivers so many chunks, each after `times` times its time at the port's rate.
    fn deliver(&mut self, chunks: usize, times: f64) {
        for _ in 0..chunks {
            self.poll();
            let Some((flow, bytes)) = self.in_flight.pop_front() else { return };
            let own = Span::transfer(bytes, RATE).0 as f64;
            self.now = self.now + Span((own * times) as u64);
            self.link.handle(self.now, Event::BytesCompleted { flow, bytes });
        }
        self.poll();
    }

    /// Reports whether a flow can be in time that is due after `times` times its time at the port's
    /// rate. It is four windows long.
    fn is_feasible(&mut self, peer: PeerId, times: f64) -> bool {
        let bytes = 4 * WINDOW;
        let own = Span::transfer(bytes, RATE).0 as f64;
        let flow = self.submit(peer, bytes, self.now + Span((own * times) as u64));
        let scavenged = self.poll();
        self.cancel(flow);
        !scavenged
    }

    fn cancel(&mut self, flow: FlowId) {
        self.link.handle(self.now, Event::FlowCancelled { flow });
        self.in_flight.retain(|&(id, _)| id != flow);
    }
}

proptest! {
    /// After four windows and more, the mean has followed.
    #[test]
    fn while_flows_wait_a_deadline_is_judged_by_the_rate_of_delivery(
        by_peer in any::<bool>(),
        times in 1.0..6.0,
        faster in 0.1..1.0,
        slack in 0.7..8.0,
    ) {
        let mut port = Port::new(by_peer);
        port.submit(PEER, LONG, Time::NEVER);
        // What was measured before does not matter, neither slow nor faster than the port.
        port.deliver(100, 2.0 * times);
        port.deliver(100, faster);
        port.deliver(800, times);
        // If both have the lowest level, a window is ahead. The fifth counts at the port's rate.
        prop_assume!(!(0.96 * times..1.04 * times + 0.25).contains(&slack));
        prop_assert_eq!(port.is_feasible(PEER, slack), slack > times);
    }
}

#[test]
fn a_port_without_waiting_flows_says_nothing_about_its_rate() {
    for by_peer in [false, true] {
        let mut port = Port::new(by_peer);
        for _ in 0..100 {
            port.submit(PEER, 4 * CHUNK, Time::NEVER);
            port.deliver(4, 20.0);
        }
        assert!(port.is_feasible(PEER, 1.04));
        // After a refusal, flows that fit together, and whose deliveries overlap.
        port.submit(PEER, WINDOW + 4 * CHUNK, Time::NEVER);
        port.deliver(15, 1.0);
        for _ in 0..100 {
            port.submit(PEER, 4 * CHUNK, Time::NEVER);
            port.deliver(5, 20.0);
            port.submit(PEER, CHUNK, Time::NEVER);
        }
        assert!(port.is_feasible(PEER, 1.04));
    }
}

#[test]
fn after_a_pause_the_port_counts_as_fast_again() {
    for by_peer in [false, true] {
        let mut port = Port::new(by_peer);
        let flow = port.submit(PEER, LONG, Time::NEVER);
        port.deliver(300, 3.0);
        assert!(!port.is_feasible(PEER, 2.9));
        port.cancel(flow);
        port.now = port.now + Span::transfer(4 * WINDOW, RATE / 3) + Span::from_millis(1);
        assert!(port.is_feasible(PEER, 1.04), "an idle port");
        port.submit(PEER, LONG, Time::NEVER);
        port.poll();
        assert!(port.is_feasible(PEER, 1.04));
    }
}

/// A window of bytes that the network serves last, or a long pause, is no reason to give a request
/// up that has time.
#[test]
fn scavenged_bytes_and_a_pause_of_the_network_say_little() {
    for by_peer in [false, true] {
        let mut port = Port::new(by_peer);
        let spec =
            FlowSpec { peer: PEER, ..FlowSpec::anonymous(FlowId(0), Stage::Background, LONG) };
        port.link.handle(port.now, Event::FlowArrived(spec));
        port.deliver(300, 5.0);
        let own = Span::transfer(4 * WINDOW, RATE).0 as f64;
        let flow = port.submit(PEER, 4 * WINDOW, port.now + Span((own * 1.04) as u64));
        let actions = std::iter::from_fn(|| port.link.poll_action(port.now));
        let permitted = actions.filter(|action| match *action {
            Action::Permit { flow: id, level, .. } => id == flow && level != Level::SCAVENGER,
            _ => false,
        });
        assert!(permitted.count() > 0, "by peer: {by_peer}");
        let mut port = Port::new(by_peer);
        port.submit(PEER, LONG, Time::NEVER);
        port.deliver(100, 1.0);
        port.deliver(1, 5_000.0);
        assert!(port.is_feasible(PEER, 1.1), "by peer: {by_peer}");
    }
}

/// What other hosts do later is not known.
#[test]
fn a_long_transfer_is_not_given_up_for_what_delivery_is_at_present() {
    for by_peer in [false, true] {
        let mut port = Port::new(by_peer);
        port.submit(PEER, LONG, Time::NEVER);
        port.deliver(300, 3.0);
        let own = Span::transfer(400 * WINDOW, RATE).0 as f64;
        port.submit(PEER, 400 * WINDOW, port.now + Span((own * 1.05) as u64));
        assert!(!port.poll(), "by peer: {by_peer}");
    }
}

/// Chunks that are reported in pairs, a moment apart, come at the port's rate.
#[test]
fn pairs_of_chunks_do_not_look_slow() {
    for by_peer in [false, true] {
        let mut port = Port::new(by_peer);
        port.submit(PEER, LONG, Time::NEVER);
        for _ in 0..200 {
            port.deliver(1, 1.999);
            port.deliver(1, 0.001);
        }
        assert!(port.is_feasible(PEER, 1.3), "by peer: {by_peer}");
    }
}

/// A receiver that is busy says nothing about the others, and their bytes are not ahead.
#[test]
fn a_slow_peer_does_not_make_others_look_slow() {
    let mut port = Port::new(true);
    port.submit(PEER, LONG, Time::NEVER);
    port.deliver(300, 5.0);
    assert!(!port.is_feasible(PEER, 4.8));
    assert!(port.is_feasible(OTHER, 1.04));
}

#[test]
fn bytes_in_flight_delay_a_flow_of_their_level_but_not_a_more_urgent_one() {
    for by_peer in [false, true] {
        let mut port = Port::new(by_peer);
        let bytes = 8 * CHUNK;
        let slack = |times: f64| Span((Span::transfer(bytes, RATE).0 as f64 * times) as u64);
        // A window of its own level is in flight, which takes twice as long as the flow.
        port.submit(PEER, WINDOW, port.now + slack(2.01));
        port.poll();
        let in_time = port.submit(PEER, bytes, port.now + slack(3.1));
        assert!(!port.poll());
        port.cancel(in_time);
        port.submit(PEER, bytes, port.now + slack(2.9));
        assert!(port.poll());
        // A window of the lowest level gives way in the network.
        let mut port = Port::new(by_peer);
        port.submit(PEER, WINDOW, Time::NEVER);
        port.poll();
        port.submit(PEER, bytes, port.now + slack(1.1));
        assert!(!port.poll());
    }
}
