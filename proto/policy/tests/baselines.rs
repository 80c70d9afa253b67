//! Each baseline in virtual time, against results worked out by hand.

mod virtual_time;

use laxity_policy::{
    BatchId, FlowSpec, Granularity, Layer, Level, LinkConfig, PolicyKind, Span, Stage,
};
use virtual_time::{Port, TICK, at, batch_ended, flow, fluid};

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
    let mut port = virtual_time::port(PolicyKind::Fair);
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

#[test]
fn sjf_preempts_for_what_is_shorter_than_the_rest_of_what_runs() {
    let mut port = virtual_time::port(PolicyKind::Sjf);
    port.submit(flow(1, Stage::KvReuse, 3.0));
    port.run_until(at(0.5)); // 2.5 left
    port.submit(flow(2, Stage::Collective, 1.0));
    port.submit(flow(3, Stage::P2d, 2.7));
    port.run_out();
    assert!(near(port.finish(2), 1.5) && near(port.finish(1), 4.0) && near(port.finish(3), 6.7));
}

#[test]
fn edf_serves_explicit_deadlines_in_their_order_and_lets_the_rest_share() {
    let mut port = virtual_time::port(PolicyKind::Edf);
    port.submit(flow(1, Stage::Collective, 1.0));
    port.submit(due(2, 1.0, 90.0));
    port.submit(due(3, 1.0, 80.0));
    port.submit(flow(4, Stage::KvReuse, 1.0));
    port.submit(flow(5, Stage::P2d, 1.0)); // a last stage without a deadline is not explicit
    port.run_out();
    let finish: Vec<f64> = (1..=5).map(|id| port.finish(id)).collect();
    assert!(near(finish[2], 1.0) && near(finish[1], 2.0), "{finish:?}");
    assert!(near(finish[0], 5.0) && near(finish[3], 5.0) && near(finish[4], 5.0), "{finish:?}");
}

#[test]
fn edf_low_is_edf_upside_down() {
    let mut port = virtual_time::port(PolicyKind::EdfLow);
    port.submit(due(1, 1.0, 90.0));
    port.submit(due(2, 1.0, 2.0));
    port.submit(flow(3, Stage::Collective, 1.0));
    port.run_out();
    assert!(near(port.finish(3), 1.0) && near(port.finish(2), 2.0) && near(port.finish(1), 3.0));
}

#[test]
fn karuna_finishes_a_deadline_flow_just_in_time_though_the_port_is_idle() {
    let mut port = virtual_time::port(PolicyKind::Karuna);
    port.submit(due(1, 2.0, 10.0));
    port.run_out();
    let finish = port.finish(1);
    assert!((9.8..=10.0).contains(&finish), "{finish}");
}

#[test]
fn karuna_meets_deadlines_under_load_and_gives_the_rest_to_the_shortest() {
    let mut port = virtual_time::port(PolicyKind::Karuna);
    port.submit(due(1, 2.0, 4.0)); // half of the port
    port.submit(flow(2, Stage::KvReuse, 3.0));
    port.submit(flow(3, Stage::Collective, 1.0));
    port.run_out();
    assert!((3.8..=4.0).contains(&port.finish(1)), "{}", port.finish(1));
    assert!(near(port.finish(3), 2.0) && near(port.finish(2), 6.0), "{}", port.finish(2));
}

#[test]
fn karuna_wc_gives_deadline_flows_what_nobody_else_wants() {
    let mut port = virtual_time::port(PolicyKind::KarunaWc);
    port.submit(due(1, 2.0, 10.0));
    port.run_out();
    assert!(near(port.finish(1), 2.0));
}

#[test]
fn karuna_with_a_hopeless_deadline_does_not_hold_the_port() {
    for policy in [PolicyKind::Karuna, PolicyKind::KarunaWc] {
        let mut port = virtual_time::port(policy);
        port.submit(due(1, 5.0, 1.0));
        port.submit(flow(2, Stage::Collective, 1.0));
        port.run_out();
        assert!(near(port.finish(2), 2.0), "{policy}: {}", port.finish(2));
    }
}

#[test]
fn two_class_shares_inside_a_class_and_nothing_between() {
    let mut port = virtual_time::port(PolicyKind::TwoClass);
    port.submit(flow(1, Stage::KvReuse, 1.0));
    port.submit(due(2, 1.0, 1.0));
    port.submit(flow(3, Stage::Collective, 1.0));
    port.submit(flow(4, Stage::Collective, 1.0));
    port.run_out();
    let finish: Vec<f64> = (1..=4).map(|id| port.finish(id)).collect();
    assert!(near(finish[2], 2.0) && near(finish[3], 2.0), "{finish:?}");
    assert!(near(finish[0], 4.0) && near(finish[1], 4.0), "{finish:?}");
    let levels: Vec<Level> = port.bytes_by_level.keys().copied().collect();
    assert_eq!(levels, [Level(2), Level(8)]);
}

#[test]
fn two_class_99_leaves_one_hundredth_to_all_that_is_no_collective() {
    let mut port = virtual_time::port(PolicyKind::TwoClass99);
    port.submit(flow(1, Stage::KvReuse, 1.0));
    port.submit(due(2, 1.0, 1.0));
    port.submit(flow(3, Stage::Collective, 2.0));
    port.submit(flow(4, Stage::Background, 1.0));
    port.run_out();
    let finish: Vec<f64> = (1..=4).map(|id| port.finish(id)).collect();
    // Ten parts in a thousand of the collective's time went to the others.
    assert!(near(finish[2], 2.02), "{finish:?}");
    assert!(near(finish[0], 5.0) && near(finish[1], 5.0) && near(finish[3], 5.0), "{finish:?}");
    let levels: Vec<Level> = port.bytes_by_level.keys().copied().collect();
    assert_eq!(levels, [Level(2), Level::SCAVENGER]);
}

#[test]
fn two_class_99_never_starves_what_strict_classes_starve() {
    let sent_beside_collectives = |kind| {
        let mut port = virtual_time::port(kind);
        port.submit(flow(1, Stage::KvReuse, 0.05));
        port.submit(flow(2, Stage::Collective, 20.0));
        port.run_out();
        port.finish(1)
    };
    assert!(sent_beside_collectives(PolicyKind::TwoClass) > 20.0);
    assert!(sent_beside_collectives(PolicyKind::TwoClass99) < 8.0);
}

#[test]
fn tent_serves_what_needs_most_of_its_time_left_and_not_who_is_due_first() {
    let mut port = virtual_time::port(PolicyKind::Tent);
    port.submit(due(1, 0.5, 4.0)); // an eighth of its time
    port.submit(due(2, 3.0, 6.0)); // half of its time
    port.run_out();
    // The first waits until its share of the time left is as large as what the other has left.
    assert!(port.finish(1) > 1.0, "{}", port.finish(1));
    assert!(port.finish(1) <= 4.0 && port.finish(2) <= 6.0);
    assert_eq!(port.link.snapshot().demotions, 0);
}

#[test]
fn tent_drops_what_cannot_be_in_time_and_only_of_the_last_stage() {
    let mut port = virtual_time::port(PolicyKind::Tent);
    port.submit(due(1, 5.0, 4.0));
    port.submit(due(2, 1.0, 9.0));
    port.submit(FlowSpec { deadline: at(1.0), ..flow(3, Stage::KvReuse, 2.0) });
    port.run_out();
    assert!(near(port.finish(3), 2.0) && near(port.finish(2), 3.0), "{}", port.finish(2));
    assert!(near(port.finish(1), 8.0), "{}", port.finish(1));
    let dropped = port.bytes_by_level.get(&Level::SCAVENGER);
    assert_eq!(dropped, Some(&flow(1, Stage::P2d, 5.0).bytes));
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
fn tent_edf_promotes_when_slack_falls_below_the_threshold() {
    let config =
        LinkConfig { policy: PolicyKind::TentEdf, slack_threshold: Span(TICK / 2), ..fluid() };
    let mut port = Port::new(config);
    port.submit(due(1, 1.0, 4.0)); // slack falls to a half at 2.5
    port.submit(flow(2, Stage::Collective, 10.0));
    port.run_out();
    assert!(near(port.finish(1), 3.5), "{}", port.finish(1));
    assert!(near(port.finish(2), 11.0));
    assert_eq!(port.link.snapshot().promotions, 1);
}

#[test]
fn tent_edf_orders_a_stage_by_deadline() {
    let mut port = virtual_time::port(PolicyKind::TentEdf);
    port.submit(due(1, 1.0, 90.0));
    port.submit(due(2, 1.0, 80.0));
    port.submit(flow(3, Stage::KvReuse, 1.0));
    port.run_out();
    assert!(near(port.finish(3), 1.0) && near(port.finish(2), 2.0) && near(port.finish(1), 3.0));
}

#[test]
fn a_change_of_policy_takes_effect_on_what_waits() {
    let mut port = virtual_time::port(PolicyKind::Fair);
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

#[test]
fn a_forgotten_batch_does_not_matter_to_a_baseline() {
    let mut port = virtual_time::port(PolicyKind::Sjf);
    port.tell(batch_ended(7));
    port.submit(FlowSpec { batch: BatchId(7), ..flow(1, Stage::KvReuse, 1.0) });
    port.run_out();
    assert!(near(port.finish(1), 1.0));
}
