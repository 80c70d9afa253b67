//! Tests of single properties of the network. Ports carry 1 GB/s unless noted, so that a byte takes
//! a nanosecond.

use laxity_policy::Time;

use super::super::{CLASSES_MAX, Network, PortId, TransferId};

const GBYTE: f64 = 1e9;

/// Returns a network of `COUNT` ports.
fn network<const COUNT: usize>() -> (Network, [PortId; COUNT]) {
    let mut network = Network::new();
    let ports = [0; COUNT].map(|_| network.add_port(GBYTE));
    (network, ports)
}

/// Starts a transfer of weight 1.
fn start(net: &mut Network, ns: u64, path: &[PortId], bytes: u64, class: u8) -> TransferId {
    net.start(Time(ns), path, bytes, class, 1.0, 0)
}

/// Returns the end of each transfer from `now` on, in order.
fn ends(net: &mut Network, now_ns: u64) -> Vec<(u64, TransferId)> {
    let mut ends = Vec::new();
    let mut now = Time(now_ns);
    while let Some(next) = net.next_end(now) {
        net.check().expect("the network is sound");
        now = next;
        while let Some((id, _)) = net.pop_ended(now) {
            ends.push((now.0, id));
        }
    }
    ends
}

#[test]
fn alone_on_its_ports_a_transfer_gets_what_the_slowest_carries() {
    let mut net = Network::new();
    let path = [25e9, 5e9, 50e9, 10e9].map(|rate| net.add_port(rate));
    let id = start(&mut net, 7, &path, 1_000_000, 3);
    assert_eq!(net.next_end(Time(7)), Some(Time(200_007)));
    assert_eq!(net.rate(id), 5e9);
    assert_eq!(net.remaining(id, Time(100_007)), 500_000.0);
    assert_eq!(net.pop_ended(Time(200_006)), None);
    assert_eq!(net.pop_ended(Time(200_007)), Some((id, 0)));
    assert_eq!(net.next_end(Time(200_007)), None);
    for port in path {
        assert_eq!(net.carried(port, Time(200_007)), 1e6);
        assert_eq!(net.active(port), 0);
    }
}

#[test]
fn an_end_is_rounded_up_to_a_nanosecond() {
    let (mut net, [port]) = network();
    let mut third = Network::new();
    let slow = third.add_port(GBYTE / 3.0);
    start(&mut net, 0, &[port], 10, 0);
    start(&mut third, 0, &[slow], 10, 0);
    assert_eq!(net.next_end(Time(0)), Some(Time(10)));
    assert_eq!(third.next_end(Time(0)), Some(Time(30)));
    let faster = third.add_port(GBYTE / 2.999);
    start(&mut third, 0, &[faster], 10, 0);
    // Ten bytes take 29.99 ns, which is rounded up.
    assert_eq!(third.next_end(Time(0)), Some(Time(30)));
    let slower = third.add_port(GBYTE / 3.001);
    start(&mut third, 0, &[slower], 10, 0);
    let ends = ends(&mut third, 0);
    assert_eq!(ends.last().map(|end| end.0), Some(31));
}

#[test]
fn equals_share_and_the_one_that_stays_gets_all() {
    let (mut net, [port]) = network();
    let short = start(&mut net, 0, &[port], 1000, 0);
    let long = start(&mut net, 0, &[port], 3000, 0);
    assert_eq!(ends(&mut net, 0), [(2000, short), (4000, long)]);
}

#[test]
fn shares_are_in_proportion_to_weights() {
    let (mut net, [port]) = network();
    let light = net.start(Time(0), &[port], 1000, 0, 0.5, 0);
    let heavy = net.start(Time(0), &[port], 3000, 0, 1.5, 0);
    net.next_end(Time(0));
    assert_eq!((net.rate(light), net.rate(heavy)), (2.5e8, 7.5e8));
    assert_eq!(ends(&mut net, 0), [(4000, light), (4000, heavy)]);
}

#[test]
fn what_one_cannot_use_goes_to_the_others() {
    // Port `a` has two transfers and `b` three. One crosses both.
    let (mut net, [a, b]) = network();
    let both = start(&mut net, 0, &[a, b], 1 << 30, 0);
    let on_a = start(&mut net, 0, &[a], 1 << 30, 0);
    start(&mut net, 0, &[b], 1 << 30, 0);
    start(&mut net, 0, &[b], 1 << 30, 0);
    net.next_end(Time(0));
    assert!((net.rate(both) - 1e9 / 3.0).abs() < 1.0);
    assert!((net.rate(on_a) - 2e9 / 3.0).abs() < 1.0);
}

#[test]
fn a_higher_class_stops_a_lower_one_that_then_goes_on() {
    let (mut net, [a, b]) = network();
    let low = start(&mut net, 0, &[a, b], 10_000, 4);
    assert_eq!(net.next_end(Time(0)), Some(Time(10_000)));
    let high = start(&mut net, 3000, &[a], 5000, 1);
    assert_eq!(net.next_end(Time(3000)), Some(Time(8000)));
    assert_eq!((net.rate(low), net.rate(high)), (0.0, 1e9));
    assert_eq!(net.remaining(low, Time(8000)), 7000.0);
    assert_eq!(ends(&mut net, 3000), [(8000, high), (15_000, low)]);
}

#[test]
fn a_lower_class_gets_what_a_higher_one_leaves() {
    let mut net = Network::new();
    let (fast, slow) = (net.add_port(10e9), net.add_port(4e9));
    start(&mut net, 0, &[fast, slow], 1 << 40, 0);
    let low = start(&mut net, 0, &[fast], 6000, 1);
    assert_eq!(net.next_end(Time(0)), Some(Time(1000)));
    assert_eq!(net.rate(low), 6e9);
}

#[test]
fn one_that_waits_for_ever_has_no_end() {
    let mut net = Network::new();
    let (dead, port) = (net.add_port(0.0), net.add_port(GBYTE));
    start(&mut net, 0, &[port, dead], 10, 0);
    assert_eq!(net.next_end(Time(0)), None);
    // The stuck transfer takes nothing from others.
    start(&mut net, 0, &[port], 10, 0);
    assert_eq!(net.next_end(Time(0)), Some(Time(10)));
}

#[test]
fn dust_is_not_given_away() {
    let mut net = Network::new();
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
fn nothing_to_carry_ends_at_once() {
    let (mut net, [port]) = network();
    let some = start(&mut net, 5, &[port], 10, 0);
    let none = start(&mut net, 5, &[port], 0, 0);
    assert_eq!(net.next_end(Time(5)), Some(Time(5)));
    assert_eq!(ends(&mut net, 5), [(5, none), (15, some)]);
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
fn a_guaranteed_share_is_taken_only_where_and_while_it_is_wanted() {
    let (mut net, [from, to, other]) = network();
    net.guarantee(3, 0.01);
    let high = start(&mut net, 0, &[from, to], 990, 1);
    net.next_end(Time(0));
    assert_eq!(net.rate(high), GBYTE);
    let low = start(&mut net, 0, &[from, other], 1000, 3);
    net.next_end(Time(0));
    net.check().expect("the network is sound");
    assert_eq!((net.rate(high), net.rate(low)), (0.99 * GBYTE, 0.01 * GBYTE));
    // The high transfer takes 1000 ns and leaves 990 bytes of the low one.
    assert_eq!(ends(&mut net, 0), [(1000, high), (1990, low)]);
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
    let mut net = Network::new();
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
    net.start(Time(0), &[port], 10, 0, 0.0, 0);
}
