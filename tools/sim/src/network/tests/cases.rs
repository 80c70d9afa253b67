//! Tests of what scripts against the oracle do not reach. Ports carry 1 GB/s unless noted, so that
//! a byte takes a nanosecond.

use laxity_policy::Time;

use super::super::{CLASSES_MAX, Network, NewTransfer, PortId, TransferId};

const GBYTE: f64 = 1e9;

fn network<const COUNT: usize>() -> (Network, [PortId; COUNT]) {
    let mut network = Network::default();
    let ports = [0; COUNT].map(|_| network.add_port(GBYTE));
    (network, ports)
}

/// Starts a transfer of weight 1.
fn start(net: &mut Network, ns: u64, path: &[PortId], bytes: u64, class: u8) -> TransferId {
    net.start(Time(ns), path, NewTransfer { bytes, class, weight: 1.0, tag: 0 })
}

fn ends(net: &mut Network, now_ns: u64) -> Vec<(u64, TransferId)> {
    let mut ends = Vec::new();
    let mut now = Time(now_ns);
    while let Some(next) = net.next_end(now) {
        net.check();
        now = next;
        while let Some((id, _)) = net.pop_ended(now) {
            ends.push((now.0, id));
        }
    }
    ends
}

#[test]
fn one_that_waits_for_ever_has_no_end() {
    let mut net = Network::default();
    let (dead, port) = (net.add_port(0.0), net.add_port(GBYTE));
    start(&mut net, 0, &[port, dead], 10, 0);
    assert_eq!(net.next_end(Time(0)), None);
    // The stuck transfer takes nothing from others.
    start(&mut net, 0, &[port], 10, 0);
    assert_eq!(net.next_end(Time(0)), Some(Time(10)));
}

#[test]
fn dust_is_not_given_away() {
    let mut net = Network::default();
    let port = net.add_port(GBYTE);
    let nearly = net.add_port(GBYTE * (1.0 - 1e-11));
    start(&mut net, 0, &[port, nearly], 1000, 0);
    let low = start(&mut net, 0, &[port], 1, 1);
    net.next_end(Time(0));
    assert_eq!(net.rate(low), 0.0);
    let ends = ends(&mut net, 0);
    assert_eq!(ends.last(), Some(&(1001, low)));
}

#[test]
fn ends_at_the_same_time_come_in_the_order_of_starts() {
    let (mut net, ports) = network::<64>();
    let mut ids: Vec<TransferId> = Vec::new();
    for nth in 0..64 {
        // Each even port gets two transfers.
        let path = [ports[(nth * 37 % 64) & !1]];
        ids.push(start(&mut net, 0, &path, 100, 0));
    }
    let late = start(&mut net, 0, &[ports[1]], 200, 0);
    assert_eq!(net.next_end(Time(0)), Some(Time(200)));
    // A transfer of zero bytes that was started last is popped last.
    let none = start(&mut net, 200, &[ports[3]], 0, 0);
    ids.extend([late, none]);
    let order: Vec<TransferId> =
        std::iter::from_fn(|| net.pop_ended(Time(200))).map(|(id, _)| id).collect();
    assert_eq!(order, ids);
}

#[test]
fn rates_are_known_even_if_nobody_asked_for_the_next_end() {
    let (mut net, [port]) = network();
    let first = start(&mut net, 0, &[port], 1000, 0);
    let second = start(&mut net, 500, &[port], 1000, 0);
    assert_eq!(net.remaining(first, Time(500)), 500.0);
    assert_eq!(ends(&mut net, 500), [(1500, first), (2000, second)]);
}

#[test]
fn all_classes_there_are_come_one_after_the_other() {
    let (mut net, [port]) = network();
    let classes = (0..CLASSES_MAX).rev();
    let ids: Vec<TransferId> =
        classes.map(|class| start(&mut net, 0, &[port], 100, class)).collect();
    let expected: Vec<(u64, TransferId)> =
        (1..).map(|nth| nth * 100).zip(ids.into_iter().rev()).collect();
    assert_eq!(ends(&mut net, 0), expected);
    assert_eq!(net.active(port), 0);
}

#[test]
fn five_hundred_on_one_port_end_when_they_should() {
    let mut net = Network::default();
    let hot = net.add_port(GBYTE);
    let count = 500;
    let mut ids = Vec::new();
    for nth in 0..count {
        let own = net.add_port(GBYTE);
        // The longest transfer starts first.
        ids.push(start(&mut net, 0, &[hot, own], (count - nth) * 1000, 2));
    }
    // The k-th transfer shares the port with all that are left. It ends 1000 · (count - k + 1) ns
    // after the one before.
    let mut at_ns = 0;
    let mut expected = Vec::new();
    for (k, &id) in ids.iter().rev().enumerate() {
        at_ns += 1000 * (count - k as u64);
        expected.push((at_ns, id));
    }
    assert_eq!(ends(&mut net, 0), expected);
    assert_eq!(net.carried(hot, Time(at_ns)), (count * (count + 1) / 2 * 1000) as f64);
}

#[test]
fn a_port_that_is_never_idle_does_not_drift() {
    let (mut net, [port]) = network();
    // One transfer lasts for 100 s of busy time, beside a sequence of others.
    let long = start(&mut net, 0, &[port], 50_000_000_000, 0);
    let mut now = Time(0);
    let mut bytes = 0;
    let mut nth = 0_u64;
    start(&mut net, 0, &[port], 1_000_000, 0);
    loop {
        now = net.next_end(now).expect("one is under way");
        let mut done = false;
        while let Some((id, _)) = net.pop_ended(now) {
            done |= id == long;
        }
        if done {
            break;
        }
        nth += 1;
        // Odd sizes make most ends subject to rounding.
        let size = 1_000_000 + nth * 7919 % 999_983;
        bytes += size;
        start(&mut net, now.0, &[port], size, 0);
    }
    let carried = net.carried(port, now);
    // Each end loses at most a nanosecond at half the port's rate.
    let idle_ns = now.0 as f64 - carried;
    assert!((0.0..0.5 * nth as f64 + 2.0).contains(&idle_ns), "{idle_ns} of {nth}");
    assert!(carried > 50e9 && carried < 50e9 + (bytes + 1_000_000) as f64);
}

#[test]
#[should_panic(expected = "a path has 1 to 4 ports")]
fn a_path_has_ports() {
    let (mut net, []) = network();
    start(&mut net, 0, &[], 10, 0);
}

#[test]
#[should_panic(expected = "a weight cannot be 0")]
fn a_weight_is_positive() {
    let (mut net, [port]) = network();
    net.start(Time(0), &[port], NewTransfer { bytes: 10, class: 0, weight: 0.0, tag: 0 });
}
