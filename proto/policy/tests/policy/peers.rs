//! The bound of `laxity` on bytes in flight by peer (`link/peers.rs`).

use std::collections::{BTreeMap, VecDeque};

use crate::virtual_time::{CHUNK, TICK, completed, flow, fluid};
use laxity_policy::link::explain::Obstacle;
use laxity_policy::link::{PEER_WINDOWS, PEERS_MAX};
use laxity_policy::{
    Action, Event, FlowId, FlowSpec, Link, LinkConfig, PeerId, PolicyKind, Span, Stage, Time,
};

const BUSY: PeerId = PeerId(1);
const IDLE: PeerId = PeerId(2);

/// Returns a port with a window of four chunks, and a bound of two chunks by peer if `bounded`.
fn link(bounded: bool) -> Link {
    of_bound(if bounded { 2 * CHUNK } else { 0 })
}

fn of_bound(peer_window_bytes: u64) -> Link {
    let window_bytes = 4 * CHUNK;
    let policy = PolicyKind::Laxity;
    Link::new(LinkConfig { policy, window_bytes, peer_window_bytes, ..fluid() })
        .expect("a valid configuration")
}

fn spec(peer: PeerId, id: u64, deadline: Time) -> FlowSpec {
    FlowSpec { peer, deadline, ..flow(id, Stage::P2d, 1.0) }
}

fn to(peer: PeerId, id: u64, deadline: Time) -> Event {
    Event::FlowArrived(spec(peer, id, deadline))
}

/// Takes all actions and adds the permitted bytes of each flow.
fn permit(link: &mut Link, now: Time, sent: &mut BTreeMap<u64, u64>) {
    while let Some(action) = link.poll_action(now) {
        if let Action::Permit { flow: FlowId(id), bytes, .. } = action {
            *sent.entry(id).or_default() += bytes;
        }
    }
}

/// Runs ten ticks. A receiver in `silent` completes nothing, and all others complete at once.
fn run(link: &mut Link, silent: &[u64]) -> BTreeMap<u64, u64> {
    let mut sent = BTreeMap::new();
    let mut done: BTreeMap<u64, u64> = BTreeMap::new();
    for step in 1..=1000 {
        let now = Time(step * TICK / 100);
        permit(link, now, &mut sent);
        for (&id, &bytes) in sent.iter().filter(|(id, _)| !silent.contains(id)) {
            let before = done.insert(id, bytes).unwrap_or(0);
            link.handle(now, completed(id, bytes - before));
        }
    }
    sent
}

#[test]
fn bytes_for_a_busy_receiver_do_not_hold_up_flows_to_an_idle_one() {
    let (soon, later) = (Time(500 * TICK), Time(900 * TICK));
    for (bounded, whole) in [(false, false), (true, true)] {
        let mut link = link(bounded);
        link.handle(Time(1), to(BUSY, 1, soon));
        link.handle(Time(1), to(IDLE, 2, later));
        let sent = run(&mut link, &[1]);
        let idle = sent.get(&2).copied().unwrap_or(0);
        assert_eq!(idle == 100 * CHUNK, whole, "bounded: {bounded}, {idle} to the idle receiver");
        let most = if bounded { 2 * CHUNK } else { 4 * CHUNK };
        assert_eq!(sent[&1], most, "to the busy receiver");
    }
}

#[test]
fn flows_to_a_busy_receiver_are_not_ahead_of_a_flow_to_an_idle_one() {
    let mut link = link(true);
    for (peer, id, ticks) in [(BUSY, 1, 500), (BUSY, 2, 501), (IDLE, 3, 600), (IDLE, 4, 900)] {
        link.handle(Time(1), to(peer, id, Time(ticks * TICK)));
    }
    let ahead = |link: &Link, id| link.explain(Time(1), FlowId(id)).expect("it waits").ahead.flows;
    assert_eq!((ahead(&link, 2), ahead(&link, 4)), (1, 3));
    let mut sent = BTreeMap::new();
    for _ in 0..2 {
        link.poll_action(Time(1)).expect("a permit");
    }
    assert_eq!((ahead(&link, 2), ahead(&link, 4)), (1, 1), "two chunks are in flight to BUSY");
    permit(&mut link, Time(1), &mut sent);
    assert_eq!(sent.get(&3), Some(&(2 * CHUNK)));
}

#[test]
fn a_flow_of_unknown_peer_has_no_bound_of_its_own() {
    for peer in [PeerId(0), PeerId(PEERS_MAX as u16), PeerId(u16::MAX)] {
        let mut link = link(true);
        link.handle(Time(1), to(peer, 1, Time(500 * TICK)));
        assert_eq!(run(&mut link, &[1])[&1], 4 * CHUNK, "{peer:?}");
    }
}

#[test]
fn only_a_flow_of_a_known_peer_is_said_to_wait_for_its_peer() {
    for (peer, obstacle) in [(BUSY, Obstacle::Peer), (PeerId(0), Obstacle::Window)] {
        let mut link = link(true);
        link.handle(Time(1), to(peer, 1, Time(500 * TICK)));
        permit(&mut link, Time(1), &mut BTreeMap::new());
        let told = link.explain(Time(1), FlowId(1)).expect("it waits");
        let bound = if obstacle == Obstacle::Peer { 2 * CHUNK } else { 4 * CHUNK };
        assert_eq!((told.obstacle, told.window), (obstacle, (bound, bound)), "{peer:?}");
    }
}

#[test]
fn an_urgent_flow_passes_bytes_that_wait_in_a_lower_class_for_the_same_receiver() {
    let mut link = link(true);
    let mut sent = BTreeMap::new();
    link.handle(Time(1), to(BUSY, 1, Time(5_000 * TICK)));
    permit(&mut link, Time(1), &mut sent);
    assert_eq!(sent[&1], 2 * CHUNK);
    link.handle(Time(2), to(BUSY, 2, Time(TICK + TICK / 100)));
    permit(&mut link, Time(2), &mut sent);
    assert_eq!(sent.get(&2), Some(&(2 * CHUNK)), "{sent:?}");
    assert_eq!(sent[&1], 2 * CHUNK, "the first flow has had its part");
}

#[test]
fn waiting_flows_of_a_receiver_go_on_when_its_bytes_complete_or_its_flow_ends() {
    for ends in [completed(1, CHUNK), Event::FlowCancelled { flow: FlowId(1) }] {
        let mut link = link(true);
        let mut sent = BTreeMap::new();
        link.handle(Time(1), to(BUSY, 1, Time(500 * TICK)));
        link.handle(Time(1), to(BUSY, 2, Time(900 * TICK)));
        permit(&mut link, Time(1), &mut sent);
        assert_eq!(sent.values().sum::<u64>(), 2 * CHUNK);
        assert_eq!(link.next_deadline(), None, "nothing to wait for but a completion");
        link.handle(Time(2), ends);
        permit(&mut link, Time(2), &mut sent);
        assert!(sent.values().sum::<u64>() > 2 * CHUNK, "{sent:?}");
    }
}

#[test]
fn silent_receivers_hold_a_bounded_number_of_windows_however_many_they_are() {
    let mut link = link(true);
    for peer in 1..=100 {
        link.handle(Time(1), to(PeerId(peer), u64::from(peer), Time(500 * TICK)));
    }
    let silent: Vec<u64> = (1..=100).collect();
    let sent = run(&mut link, &silent);
    let all = sent.values().sum::<u64>();
    assert_eq!(all, u64::from(PEER_WINDOWS) * 4 * CHUNK);
    assert_eq!(link.in_flight_bytes(), all);
}

#[test]
fn a_lone_peer_with_a_bound_of_one_window_gets_what_it_gets_without_a_bound() {
    let cases = [1, 2, 3, 4, 5, 9].map(|chunks| [(chunks, 1), (chunks, 2)]).concat();
    for (chunks, overcommit) in cases {
        let sent = [0, 4 * CHUNK * u64::from(overcommit)].map(|peer_window_bytes| {
            let mut link = of_bound(peer_window_bytes);
            let config = LinkConfig { overcommit, ..link.config().clone() };
            link.set_config(Time(0), config).expect("a valid configuration");
            for id in 0..40 {
                let bytes = chunks * CHUNK;
                let spec = FlowSpec { bytes, whole: true, ..spec(BUSY, id, Time(5000 * TICK)) };
                link.handle(Time(1), Event::FlowArrived(spec));
            }
            let (mut sent, mut done) = (BTreeMap::new(), BTreeMap::new());
            let mut history = Vec::new();
            for step in 1..=4000 {
                let now = Time(step * TICK / 100);
                permit(&mut link, now, &mut sent);
                // A piece completes at its end, and its end is known half a chunk later.
                let left = (step * CHUNK).saturating_sub(CHUNK / 2);
                for (ended, (&id, &bytes)) in sent.iter().enumerate() {
                    if (ended as u64 + 1) * bytes <= left && done.insert(id, bytes).is_none() {
                        link.handle(now, completed(id, bytes));
                    }
                }
                history.push(sent.values().sum::<u64>());
            }
            history
        });
        assert_eq!(sent[0], sent[1], "pieces of {chunks} chunks, overcommit {overcommit}");
        assert_eq!(sent[1].last(), Some(&(40 * chunks * CHUNK)));
    }
}

#[test]
fn scavenged_flows_and_those_of_unknown_peers_stay_within_the_window() {
    for (stage, peer) in [(Stage::Weights, BUSY), (Stage::P2d, PeerId(0))] {
        let mut link = of_bound(4 * CHUNK);
        for id in 1..=20 {
            let spec = FlowSpec { stage, ..spec(peer, id, Time(500 * TICK)) };
            link.handle(Time(1), Event::FlowArrived(spec));
        }
        let silent: Vec<u64> = (1..=20).collect();
        assert_eq!(run(&mut link, &silent).values().sum::<u64>(), 4 * CHUNK, "{stage:?}");
    }
}

#[test]
fn a_piece_above_the_window_goes_beside_windows_for_busy_receivers_and_holds_nobody_up() {
    let mut link = of_bound(4 * CHUNK);
    for (peer, id) in [(BUSY, 1), (IDLE, 2)] {
        let collective = FlowSpec { peer, ..flow(id, Stage::Collective, 1.0) };
        link.handle(Time(1), Event::FlowArrived(collective));
    }
    let mut sent = run(&mut link, &[1, 2]);
    assert_eq!((sent[&1], sent[&2]), (4 * CHUNK, 4 * CHUNK));
    let piece = FlowSpec { whole: true, bytes: 8 * CHUNK, ..spec(PeerId(3), 3, Time(500 * TICK)) };
    link.handle(Time(11 * TICK), Event::FlowArrived(piece));
    link.handle(Time(11 * TICK), to(PeerId(4), 4, Time(900 * TICK)));
    for step in 1..=1000 {
        permit(&mut link, Time(11 * TICK + step * TICK / 100), &mut sent);
    }
    assert_eq!(sent[&3], 8 * CHUNK);
    assert_eq!(sent[&4], 4 * CHUNK, "a window");
}

#[test]
fn a_port_that_is_faster_than_configured_does_not_wait_when_a_receiver_stops() {
    let mut link = of_bound(4 * CHUNK);
    let long = FlowSpec { bytes: 10_000 * CHUNK, ..spec(BUSY, 1, Time(50_000 * TICK)) };
    link.handle(Time(1), Event::FlowArrived(long));
    let mut sent = run(&mut link, &[]);
    assert!(sent[&1] >= 3000 * CHUNK, "the port took {} chunks", sent[&1] / CHUNK);
    permit(&mut link, Time(10 * TICK), &mut sent);
    link.handle(Time(10 * TICK), to(IDLE, 2, Time(900 * TICK)));
    for step in 1..=20 {
        permit(&mut link, Time(10 * TICK + step * TICK / 100), &mut sent);
    }
    assert!(sent.get(&2).is_some_and(|&bytes| bytes >= 2 * CHUNK), "{sent:?}");
}

#[test]
fn a_flow_passes_bytes_of_a_lower_class_for_its_receiver_when_its_time_runs_out() {
    let mut link = of_bound(4 * CHUNK);
    let mut sent = BTreeMap::new();
    link.handle(Time(1), to(BUSY, 1, Time(5_000 * TICK)));
    permit(&mut link, Time(1), &mut sent);
    let later = Time(30 * TICK);
    link.handle(Time(2), to(BUSY, 2, later));
    for step in 1..=3000 {
        permit(&mut link, Time(step * TICK / 100), &mut sent);
    }
    assert_eq!(sent.get(&2), Some(&(4 * CHUNK)), "{sent:?}");
}

#[test]
fn a_port_that_is_slower_than_configured_does_not_get_all_windows_at_once() {
    let mut link = of_bound(4 * CHUNK);
    let mut sent: BTreeMap<u64, u64> = BTreeMap::new();
    let (mut all, mut most) = (0, 0);
    for peer in 1..=40 {
        let spec = FlowSpec {
            bytes: 1000 * CHUNK,
            ..spec(PeerId(peer), u64::from(peer), Time(50_000 * TICK))
        };
        link.handle(Time(1), Event::FlowArrived(spec));
    }
    let mut queue = VecDeque::new();
    for step in 1..=10_000 {
        let now = Time(step * TICK / 100);
        while let Some(action) = link.poll_action(now) {
            if let Action::Permit { flow, bytes, .. } = action {
                queue.push_back((flow, bytes));
            }
        }
        // The NIC sends in order. Headers take 8 % of the line.
        let goodput = step * CHUNK * 92 / 100;
        while let Some(&(flow, bytes)) = queue.front().filter(|&&(_, bytes)| all + bytes <= goodput)
        {
            queue.pop_front();
            all += bytes;
            *sent.entry(flow.0).or_default() += bytes;
            link.handle(now, Event::BytesCompleted { flow, bytes });
        }
        most = most.max(link.in_flight_bytes());
    }
    assert!(all >= 9_000 * CHUNK, "the port idled: {} chunks", all / CHUNK);
    assert!(most <= 6 * CHUNK, "{} chunks in the NIC", most / CHUNK);
}

#[test]
fn beyond_the_window_bytes_are_permitted_at_the_ports_rate() {
    let mut link = link(true);
    let mut sent = BTreeMap::new();
    for peer in 1..=4 {
        link.handle(Time(1), to(PeerId(peer), u64::from(peer), Time(500 * TICK)));
    }
    permit(&mut link, Time(1), &mut sent);
    assert_eq!(sent.values().sum::<u64>(), 4 * CHUNK, "the window");
    let at = link.next_deadline().expect("more at the port's pace");
    permit(&mut link, at - Span(1), &mut sent);
    assert_eq!(sent.values().sum::<u64>(), 4 * CHUNK);
    permit(&mut link, at, &mut sent);
    assert_eq!(sent.values().sum::<u64>(), 5 * CHUNK);
}
