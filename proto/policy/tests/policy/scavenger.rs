//! Scavenged work: its flows, that it finishes, and its guaranteed share (MFS App. B step 3,
//! architecture §4.3).

use crate::virtual_time::{CHUNK, Port, TICK, UNIT, at, batch, flow, fluid, joined, layer_began};
use laxity_policy::{
    Action, BatchId, Event, FlowId, FlowSpec, Layer, Level, LinkConfig, Order, PolicyKind,
    RequestId, Span, Stage, Time,
};

const OURS: [PolicyKind; 2] = [PolicyKind::Mfs, PolicyKind::Laxity];

fn order(epoch: u64, pruned: &[u64]) -> Event {
    let pruned = pruned.iter().copied().map(RequestId).collect();
    Event::OrderChanged(Order { epoch, sigma: Vec::new(), pruned })
}

fn of_request(spec: FlowSpec, batch: u64, request: u64, layer: u16) -> FlowSpec {
    let (batch, request, layer) = (BatchId(batch), RequestId(request), Layer(layer));
    FlowSpec { batch, request, layer, ..spec }
}

fn level_of(port: &Port, id: u64) -> Option<Level> {
    port.actions.iter().rev().find_map(|(_, action)| match *action {
        Action::Moved { flow, to, .. } if flow == FlowId(id) => Some(to),
        Action::Permit { flow, level, .. } if flow == FlowId(id) => Some(level),
        _ => None,
    })
}

/// Keeps a port busy with collectives for ever. Returns the share of the bytes that a scavenged
/// flow of `units` got until it finished or `ticks` had passed, and whether it finished.
fn share_under_load(config: LinkConfig, units: f64, ticks: f64) -> (f64, bool) {
    let mut port = Port::new(config);
    port.submit(flow(1, Stage::Weights, units));
    let mut id = 2;
    while port.now < at(ticks) && !port.finished.contains_key(&FlowId(1)) {
        port.submit(flow(id, Stage::Collective, 1.0));
        id += 1;
        let until = port.now + Span(TICK / 10 * 9); // there is always a collective left
        port.run_until(until);
    }
    let bytes = |level: Level| port.bytes_by_level.get(&level).copied().unwrap_or(0) as f64;
    let scavenged = bytes(Level::SCAVENGER);
    let all: f64 = port.bytes_by_level.values().sum::<u64>() as f64;
    (scavenged / all, port.finished.contains_key(&FlowId(1)))
}

#[test]
fn scavenged_work_gets_its_share_of_a_port_that_never_idles_and_finishes() {
    for policy in OURS {
        for permille in [10, 100] {
            let config = LinkConfig { policy, scavenger_permille: permille, ..fluid() };
            let (share, finished) = share_under_load(config, 2.0, 400.0);
            let want = f64::from(permille) / 1000.0;
            assert!(finished, "{policy}: not finished");
            assert!((share - want).abs() < want * 0.1, "{policy} {permille}: {share}");
        }
        let config = LinkConfig { policy, scavenger_permille: 0, ..fluid() };
        let (_, finished) = share_under_load(config, 2.0, 100.0);
        assert!(!finished, "{policy}: no guarantee, no idle moment, yet it finished");
    }
}

#[test]
fn scavenged_work_has_an_idle_port_to_itself() {
    for policy in OURS {
        let mut port = crate::virtual_time::port(policy);
        port.submit(flow(1, Stage::Background, 2.0));
        port.run_out();
        assert!((port.finish(1) - 2.0).abs() < 1e-6);
    }
}

#[test]
fn pruning_takes_the_last_stage_and_what_has_not_started_and_nothing_else() {
    for policy in OURS {
        let mut port = crate::virtual_time::port(policy);
        port.tell(batch(1, 8, 1.0));
        port.tell(batch(2, 8, 1.0));
        port.tell(layer_began(1, 0));
        for (batch, request) in [(1, 1), (2, 2)] {
            port.tell(joined(batch, request, at(50.0)));
        }
        port.submit(flow(9, Stage::Collective, 1.0)); // holds the port while we look
        port.poll();
        port.submit(of_request(flow(1, Stage::KvReuse, 1.0), 1, 1, 3));
        port.submit(of_request(flow(2, Stage::P2d, 1.0), 1, 1, 0));
        port.submit(of_request(flow(3, Stage::Collective, 1.0), 1, 1, 0));
        port.submit(of_request(flow(4, Stage::KvReuse, 1.0), 2, 2, 0));
        port.tell(order(1, &[1, 2, 77]));
        port.poll();
        let moved: Vec<FlowId> = port
            .actions
            .iter()
            .filter_map(|(_, action)| match *action {
                Action::Moved { flow, to: Level::SCAVENGER, .. } => Some(flow),
                _ => None,
            })
            .collect();
        // `laxity` does not demote KV reuse, because the batch would stall on it.
        let reuse_gives_way = policy == PolicyKind::Mfs;
        let gave_way = if reuse_gives_way { vec![FlowId(2), FlowId(4)] } else { vec![FlowId(2)] };
        assert_eq!(moved, gave_way, "{policy}");
        // A later flow of a pruned request is pruned too.
        port.submit(of_request(flow(5, Stage::P2d, 1.0), 1, 1, 1));
        assert_eq!(
            port.link.snapshot().waiting_by_level[Level::SCAVENGER.row()].flows,
            1 + gave_way.len() as u64
        );
        port.run_out();
        for (early, late) in [(1, 2), (3, 4), (1, 5)] {
            assert!(port.finish(early) < port.finish(late), "{policy}: {early} before {late}");
        }
    }
}

#[test]
fn a_pruned_request_whose_batch_runs_after_all_gets_its_blocks_back() {
    let policy = PolicyKind::Mfs;
    let mut port = crate::virtual_time::port(policy);
    port.tell(batch(1, 8, 1.0));
    port.tell(joined(1, 1, at(50.0)));
    port.submit(flow(9, Stage::Collective, 1.0));
    port.poll();
    port.tell(order(1, &[1]));
    port.submit(of_request(flow(1, Stage::KvReuse, 1.0), 1, 1, 0));
    port.submit(flow(2, Stage::P2d, 3.0));
    assert_eq!(port.link.snapshot().waiting_by_level[Level::SCAVENGER.row()].flows, 1);
    port.tell(layer_began(1, 0));
    assert_eq!(port.link.snapshot().waiting_by_level[Level::SCAVENGER.row()].flows, 0);
    port.run_out();
    assert!(port.finish(1) < port.finish(2), "{policy}");
}

#[test]
fn an_overtaken_order_is_ignored() {
    let mut port = crate::virtual_time::port(PolicyKind::Mfs);
    port.tell(order(5, &[]));
    port.tell(order(4, &[1]));
    port.submit(of_request(flow(1, Stage::P2d, 1.0), 0, 1, 0));
    port.poll();
    assert_ne!(level_of(&port, 1), Some(Level::SCAVENGER));
}

#[test]
fn a_lost_deadline_yields_at_once_to_one_that_can_be_met() {
    for policy in OURS {
        let mut port = crate::virtual_time::port(policy);
        port.now = at(10.0);
        let late = |id: u64, deadline: Time| FlowSpec {
            deadline,
            ..of_request(flow(id, Stage::P2d, 1.0), 0, id, 0)
        };
        port.submit(late(1, at(9.0)));
        port.submit(late(2, at(20.0)));
        port.run_out();
        assert_eq!(level_of(&port, 1), Some(Level::SCAVENGER), "{policy}");
        assert!(port.finish(2) < port.finish(1), "{policy}");
        // The other flow lost only the scavenger's guaranteed share.
        assert!(port.finish(2) < 11.05, "{policy}: {}", port.finish(2));
    }
}

#[test]
fn a_request_that_cannot_make_it_is_given_up_as_a_whole() {
    // Three flows of one request need 3 ticks and have 2. Another request needs 1 and has 2.
    let mut port = crate::virtual_time::port(PolicyKind::Laxity);
    for (id, request) in [(1, 1), (2, 1), (3, 1), (4, 2)] {
        let spec = of_request(flow(id, Stage::P2d, 1.0), 0, request, id as u16);
        port.submit(FlowSpec { deadline: at(2.0), ..spec });
    }
    port.run_out();
    assert!(port.finish(4) <= 1.05, "{}", port.finish(4));
    assert_eq!(port.link.snapshot().demotions, 3);
}

#[test]
fn a_flow_that_fell_keeps_on_the_wire_the_level_of_its_first_permit() {
    let mut port = crate::virtual_time::port(PolicyKind::Mfs);
    port.submit(FlowSpec { deadline: at(1.0), ..flow(1, Stage::P2d, 2.0) });
    port.run_out();
    let levels: Vec<Level> = port
        .actions
        .iter()
        .filter_map(|(_, action)| match *action {
            Action::Permit { level, .. } => Some(level),
            Action::Moved { .. } => None,
        })
        .collect();
    assert_eq!(levels.len() as u64, 2 * UNIT / CHUNK);
    assert!(levels.iter().all(|&level| level == Level(1)));
    assert_eq!(port.link.snapshot().demotions, 1);
}
