//! What a port tells an operator about a flow that waits.

use crate::virtual_time::{CHUNK, Port, UNIT, at, batch, flow, fluid, held, joined, layer_began};
use laxity_policy::link::LevelRule;
use laxity_policy::link::explain::{AHEAD_MAX, Obstacle, WaitingFlow};
use laxity_policy::{
    BatchId, DomainId, Event, FlowId, FlowSpec, Layer, Level, Order, PolicyKind, RequestId,
    SharedLink, Stage, Time,
};

fn busy(policy: PolicyKind) -> Port {
    let mut port = crate::virtual_time::port(policy);
    // A chunk in flight fills the window, so that later flows wait.
    port.submit(flow(1000, Stage::Collective, 0.01));
    port.poll();
    port
}

fn p2d(id: u64, request: u64, units: f64, deadline: Time) -> FlowSpec {
    FlowSpec { request: RequestId(request), deadline, ..flow(id, Stage::P2d, units) }
}

fn explain(port: &Port, id: u64) -> WaitingFlow {
    port.link.explain(port.now, FlowId(id)).expect("it waits")
}

#[test]
fn a_flow_alone_before_a_full_window_has_nothing_ahead() {
    let mut port = busy(PolicyKind::Laxity);
    port.submit(p2d(1, 7, 1.0, at(100.0)));
    let told = explain(&port, 1);
    assert_eq!((told.obstacle, told.ahead.flows), (Obstacle::Window, 0));
    assert_eq!(told.window, (CHUNK, CHUNK));
    assert_eq!(told.rule, LevelRule::Laxity);
    assert_eq!((told.spec.deadline, told.begin_by), (at(100.0), at(99.0)), "a tick for its bytes");
    assert!(port.link.explain(port.now, FlowId(1000)).is_none(), "it has all its permits");
    assert!(port.link.explain(port.now, FlowId(5)).is_none(), "nobody knows it");
}

#[test]
fn flows_of_better_groups_and_earlier_members_are_ahead_and_others_are_not() {
    let mut port = busy(PolicyKind::Laxity);
    port.submit(p2d(1, 7, 1.0, at(100.0)));
    port.submit(p2d(2, 7, 2.0, at(100.0)));
    port.submit(flow(3, Stage::Collective, 4.0));
    port.submit(p2d(4, 8, 8.0, at(500.0)));
    let told = explain(&port, 2);
    assert_eq!((told.obstacle, told.ahead.flows), (Obstacle::Order, 2));
    assert_eq!(told.ahead.bytes, 5 * UNIT);
    assert_eq!(port.link.batch_of(FlowId(2)), Some(BatchId(0)));
    for id in 0..2 * AHEAD_MAX as u64 {
        port.submit(flow(2000 + id, Stage::Collective, 0.1));
    }
    assert_eq!(explain(&port, 2).ahead.flows, AHEAD_MAX as u64, "the count is bounded");
}

#[test]
fn a_held_flow_waits_for_its_own_client() {
    let mut port = busy(PolicyKind::Laxity);
    port.submit(p2d(1, 7, 1.0, at(100.0)));
    port.link.handle(port.now, held(1));
    assert_eq!(explain(&port, 1).obstacle, Obstacle::Held);
}

#[test]
fn the_rule_of_kv_reuse_is_its_layer_and_far_from_it_the_laxity_of_its_batch() {
    let mut port = busy(PolicyKind::Laxity);
    port.link.handle(port.now, batch(3, 40, 1.0));
    port.link.handle(port.now, joined(3, 7, at(100.0)));
    port.link.handle(port.now, layer_began(3, 0));
    for (id, layer) in [(1, 1), (2, 39)] {
        let spec =
            FlowSpec { batch: BatchId(3), layer: Layer(layer), ..flow(id, Stage::KvReuse, 1.0) };
        port.submit(spec);
    }
    assert_eq!(explain(&port, 1).rule, LevelRule::Rli);
    let far = explain(&port, 2);
    assert_eq!((far.rule, far.begin_by), (LevelRule::Laxity, at(60.0)), "40 layers are left");
    assert_eq!(explain(&busy_mfs(), 1).rule, LevelRule::Mlu);
}

fn busy_mfs() -> Port {
    let mut port = busy(PolicyKind::Mfs);
    port.submit(p2d(1, 7, 1.0, at(100.0)));
    port
}

#[test]
fn the_scavenger_has_a_reason_and_the_flow_remembers_where_it_came_from() {
    let mut port = busy(PolicyKind::Laxity);
    port.submit(flow(1, Stage::Weights, 1.0));
    port.submit(p2d(2, 7, 1.0, at(100.0)));
    port.submit(p2d(3, 8, 1.0, at(3.0)));
    let before = explain(&port, 2).level;
    assert_eq!(explain(&port, 1).rule, LevelRule::Undated);
    let pruned = vec![RequestId(7)];
    port.link.handle(port.now, Event::OrderChanged(Order { epoch: 1, sigma: Vec::new(), pruned }));
    let told = explain(&port, 2);
    assert_eq!((told.rule, told.level), (LevelRule::Pruned, Level::SCAVENGER));
    assert_eq!(told.moved.map(|(when, _)| when), Some(port.now));
    assert!(before < Level::SCAVENGER);
}

#[test]
fn a_policy_without_levels_of_its_own_says_only_that() {
    let mut port = busy(PolicyKind::Fair);
    port.submit(flow(1, Stage::KvReuse, 1.0));
    let told = explain(&port, 1);
    assert_eq!((told.rule, told.begin_by), (LevelRule::Policy, Time::NEVER));
}

#[test]
fn a_domain_that_rests_after_a_large_piece_waits_for_the_turn_of_others() {
    let mut shared = SharedLink::new(fluid()).expect("valid");
    let (own, other) = (DomainId(0), DomainId(1));
    let large = FlowSpec { whole: true, ..flow(1, Stage::KvReuse, 10.0) };
    let permit = shared.peek_permit(at(0.0), own, &large).expect("an idle port");
    shared.commit_permit(at(0.0), own, &large, permit);
    shared.handle(at(0.0), other, Event::FlowArrived(flow(2, Stage::KvReuse, 1.0)));
    shared.handle(at(0.0), own, Event::FlowArrived(flow(3, Stage::KvReuse, 1.0)));
    let told = shared.explain(at(0.1), own, FlowId(3)).expect("it waits");
    assert_eq!(told.obstacle, Obstacle::Turn);
}
