//! Baselines in virtual time, against results worked out by hand: shares of time, and levels on the
//! wire. `baseline_oracle.rs` has the order.

use crate::virtual_time::{Port, at, flow, fluid};
use laxity_policy::{BatchId, FlowSpec, Granularity, Layer, Level, LinkConfig, PolicyKind, Stage};

fn due(id: u64, units: f64, deadline: f64) -> FlowSpec {
    FlowSpec { deadline: at(deadline), ..flow(id, Stage::P2d, units) }
}

fn near(got: f64, want: f64) -> bool {
    (got - want).abs() < 0.05
}

/// Returns when each flow finishes under max-min fairness. It recomputes the shares from scratch at
/// every arrival and departure.
fn fluid_fair(flows: &[(f64, f64)]) -> Vec<f64> {
    let mut left: Vec<f64> = flows.iter().map(|&(_, size)| size).collect();
    let mut finish = vec![f64::NAN; flows.len()];
    let mut now = 0.0;
    loop {
        let active: Vec<usize> =
            (0..flows.len()).filter(|&i| flows[i].0 <= now && left[i] > 1e-9).collect();
        let arrival = flows.iter().map(|f| f.0).filter(|&a| a > now).fold(f64::INFINITY, f64::min);
        let share = 1.0 / active.len() as f64;
        let soonest = active.iter().map(|&i| left[i] / share).fold(f64::INFINITY, f64::min);
        let span = soonest.min(arrival - now);
        if span.is_infinite() {
            return finish;
        }
        now += span;
        for &i in &active {
            left[i] -= span * share;
            if left[i] <= 1e-9 {
                finish[i] = now;
            }
        }
    }
}

#[test]
fn fair_is_max_min_as_flows_come_and_go() {
    let flows = [(0.0, 3.0), (0.0, 1.0), (0.5, 2.0), (2.25, 0.5), (6.0, 4.0), (20.0, 1.0)];
    let mut port = crate::virtual_time::port(PolicyKind::Fair);
    for (id, &(arrival, size)) in (0..).zip(&flows) {
        port.run_until(at(arrival));
        port.submit(flow(id, if id % 2 == 0 { Stage::KvReuse } else { Stage::P2d }, size));
    }
    port.run_out();
    for (id, want) in (0..).zip(fluid_fair(&flows)) {
        let got = port.finish(id);
        assert!((got - want).abs() < 0.1, "flow {id}: {got} instead of {want}");
    }
}

#[test]
fn fair_between_coflows_does_not_reward_many_flows() {
    let config =
        LinkConfig { policy: PolicyKind::Fair, granularity: Granularity::Coflow, ..fluid() };
    let mut port = Port::new(config);
    for id in 0..9 {
        // Eight flows are in one coflow, and one flow is in another.
        let batch = BatchId(1 + u64::from(id == 8));
        let units = if id == 8 { 2.0 } else { 0.5 };
        port.submit(FlowSpec { batch, layer: Layer(1), ..flow(id, Stage::KvReuse, units) });
    }
    port.run_out();
    assert!(near(port.finish(8), 4.0), "{}", port.finish(8));
}

/// Flows as `(arrival, flow)`, and when each finishes.
type Case = (PolicyKind, Vec<(f64, FlowSpec)>, Vec<f64>);

fn cases() -> Vec<Case> {
    let now = |specs: Vec<FlowSpec>| specs.into_iter().map(|spec| (0.0, spec)).collect::<Vec<_>>();
    let reuse = |id, units| flow(id, Stage::KvReuse, units);
    let collective = |id, units| flow(id, Stage::Collective, units);
    let background = flow(4, Stage::Background, 1.0);
    let dated_reuse = FlowSpec { deadline: at(1.0), ..reuse(3, 2.0) };
    vec![
        // A flow with a deadline finishes just in time, though the port is idle.
        (PolicyKind::Karuna, now(vec![due(1, 2.0, 10.0)]), vec![9.9]),
        // The flow with a deadline needs half of the port. The shortest flow gets the rest.
        (
            PolicyKind::Karuna,
            now(vec![due(1, 2.0, 4.0), reuse(2, 3.0), collective(3, 1.0)]),
            vec![3.9, 6.0, 2.0],
        ),
        // A flow with a deadline also gets what other flows leave.
        (PolicyKind::KarunaWc, now(vec![due(1, 2.0, 10.0)]), vec![2.0]),
        // A hopeless deadline does not hold the port.
        (PolicyKind::Karuna, now(vec![due(1, 5.0, 1.0), collective(2, 1.0)]), vec![6.0, 2.0]),
        (PolicyKind::KarunaWc, now(vec![due(1, 5.0, 1.0), collective(2, 1.0)]), vec![6.0, 2.0]),
        // Flows share inside a class, and classes don't share.
        (
            PolicyKind::TwoClass,
            now(vec![reuse(1, 1.0), due(2, 1.0, 1.0), collective(3, 1.0), collective(4, 1.0)]),
            vec![4.0, 4.0, 2.0, 2.0],
        ),
        // Ten parts in a thousand of the collective's time go to the others.
        (
            PolicyKind::TwoClass99,
            now(vec![reuse(1, 1.0), due(2, 1.0, 1.0), collective(3, 2.0), background]),
            vec![5.0, 5.0, 2.02, 5.0],
        ),
        // A last stage that cannot be in time is dropped, and no other flow is.
        (
            PolicyKind::Tent,
            now(vec![due(1, 5.0, 4.0), due(2, 1.0, 9.0), dated_reuse]),
            vec![8.0, 3.0, 2.0],
        ),
    ]
}

#[test]
fn each_baseline_serves_as_it_is_defined() {
    for (policy, flows, finishes) in cases() {
        let mut port = crate::virtual_time::port(policy);
        for (arrival, spec) in &flows {
            port.run_until(at(*arrival));
            port.submit(*spec);
        }
        port.run_out();
        for ((_, spec), want) in flows.iter().zip(finishes) {
            let got = port.finish(spec.flow.0);
            // Karuna's pace ends up to two chunks before the deadline.
            let grain = if policy == PolicyKind::Karuna { 0.11 } else { 0.05 };
            assert!((got - want).abs() < grain, "{policy}: {spec:?} finishes at {got}, not {want}");
        }
        let levels: Vec<Level> = port.bytes_by_level.keys().copied().collect();
        match policy {
            PolicyKind::TwoClass => assert_eq!(levels, [Level(2), Level(8)]),
            PolicyKind::TwoClass99 => assert_eq!(levels, [Level(2), Level::SCAVENGER]),
            PolicyKind::Tent => {
                let dropped = port.bytes_by_level.get(&Level::SCAVENGER);
                assert_eq!(dropped, Some(&flows[0].1.bytes));
            }
            _ => {}
        }
    }
}

#[test]
fn two_class_99_never_starves_what_strict_classes_starve() {
    let sent_beside_collectives = |kind| {
        let mut port = crate::virtual_time::port(kind);
        port.submit(flow(1, Stage::KvReuse, 0.05));
        port.submit(flow(2, Stage::Collective, 20.0));
        port.run_out();
        port.finish(1)
    };
    assert!(sent_beside_collectives(PolicyKind::TwoClass) > 20.0);
    assert!(sent_beside_collectives(PolicyKind::TwoClass99) < 8.0);
}

#[test]
fn karuna_paces_a_flow_that_is_no_larger_than_a_chunk() {
    let config = LinkConfig {
        policy: PolicyKind::Karuna,
        chunk_bytes: 4 << 20,
        window_bytes: 8 << 20,
        ..LinkConfig::default()
    };
    let mut link = laxity_policy::Link::new(config).expect("valid");
    let now = laxity_policy::Time(1);
    let spec = FlowSpec { bytes: 4 << 20, ..due(1, 1.0, 1000.0) };
    link.handle(now, laxity_policy::Event::FlowArrived(spec));
    let mut at_once = 0;
    while let Some(action) = link.poll_action(now) {
        if let laxity_policy::Action::Permit { bytes, .. } = action {
            at_once += bytes;
        }
    }
    assert_eq!(at_once, 256 << 10);
}

#[test]
fn a_change_of_policy_takes_effect_on_what_waits() {
    let mut port = crate::virtual_time::port(PolicyKind::Fair);
    port.submit(flow(1, Stage::KvReuse, 2.0));
    port.submit(flow(2, Stage::Collective, 2.0));
    port.run_until(at(1.0)); // half a unit of each
    let config = LinkConfig { policy: PolicyKind::TwoClass, ..fluid() };
    port.link.set_config(port.now, config).expect("valid");
    port.run_out();
    assert!(near(port.finish(2), 2.5) && near(port.finish(1), 4.0));
    assert!(port.link.set_config(port.now, LinkConfig { rate: 0, ..fluid() }).is_err());
    assert_eq!(port.link.config().policy, PolicyKind::TwoClass);
}
