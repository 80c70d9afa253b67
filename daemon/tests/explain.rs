//! What the daemon tells an operator about single flows.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

mod support;

use std::time::{Duration, Instant};

use laxity_client::{Flow, Hint, Stage};
use laxity_shm::sleep::now_ns;
use laxity_wire::explain::{EXPLAINED_MAX, FlowQuery};
use laxity_wire::trace::{SubmitOutcome, TraceKind};
use support::{Laxityd, SMALL, finish, flow, take, until};

const WINDOW: u64 = 256 << 10;

fn explain(daemon: &Laxityd, wanted: FlowQuery) -> laxity_wire::explain::Explanation {
    daemon.control().explain(wanted).unwrap()
}

#[test]
fn a_flow_that_waits_is_explained_by_its_number_its_request_and_its_process() {
    let daemon = Laxityd::start(SMALL);
    let client = daemon.client("decode");
    let mut lane = client.lane();
    assert!(explain(&daemon, FlowQuery::default()).flows.is_empty());
    let deadline_ns = now_ns() + 3_600_000_000_000;
    let large =
        Flow { request: 7, batch: 3, layer: 12, deadline_ns, ..flow(Stage::P2d, 2 * WINDOW) };
    let mut ticket = lane.submit(&large);
    take(&mut lane, &mut ticket, WINDOW);
    let mut behind = client.lane();
    let second = Flow { request: 8, deadline_ns: deadline_ns + 1_000_000, ..large };
    let mut waiting = behind.submit(&second);
    until("both wait", || explain(&daemon, FlowQuery::default()).count == 2);
    let told = explain(&daemon, FlowQuery { request: Some(7), ..FlowQuery::default() });
    assert_eq!(told.count, 1);
    let first = &told.flows[0];
    let status = daemon.status();
    assert_eq!((first.client, first.flow.pid), (status.clients[0].id, std::process::id()));
    assert_eq!((first.flow.batch, first.flow.layer, first.flow.request), (3, 12, 7));
    assert_eq!((first.flow.bytes, first.flow.permitted), (2 * WINDOW, WINDOW));
    assert_eq!((first.flow.deadline_ns, first.completed_bytes), (deadline_ns, 0));
    assert_eq!((first.flow.in_flight_bytes, first.flow.window_bytes), (WINDOW, WINDOW));
    let why = first.wait.as_ref().unwrap();
    assert_eq!((why.obstacle.as_str(), why.rule.as_str()), ("window", "laxity"));
    assert!(why.begin_by_ns > told.now_ns && why.begin_by_ns < deadline_ns, "{why:?}");

    let pid = Some(std::process::id());
    for wanted in [
        FlowQuery { batch: Some(3), ..FlowQuery::default() },
        FlowQuery { pid, ..FlowQuery::default() },
    ] {
        assert_eq!(explain(&daemon, wanted).count, 2, "{wanted:?}");
    }
    let told = explain(&daemon, FlowQuery { request: Some(8), pid, ..FlowQuery::default() });
    let second = &told.flows[0];
    let why = second.wait.as_ref().unwrap();
    assert_eq!((why.obstacle.as_str(), second.flow.ahead), ("order", 1));
    assert_eq!(why.ahead_bytes, WINDOW);
    let number = FlowQuery { flow: Some(second.flow.flow), ..FlowQuery::default() };
    assert_eq!(explain(&daemon, number).flows[0].flow.request, 8);

    lane.complete(&ticket, WINDOW);
    finish(&mut lane, &mut ticket);
    finish(&mut behind, &mut waiting);
    until("it has ended", || explain(&daemon, number).count == 0);
    for wanted in [u64::MAX, 0] {
        let unknown = FlowQuery { flow: Some(wanted), ..FlowQuery::default() };
        assert_eq!(explain(&daemon, unknown).count, 0, "{wanted}");
    }
}

#[test]
fn a_flow_with_all_permits_is_found_but_does_not_wait() {
    let daemon = Laxityd::start(SMALL);
    let client = daemon.client("decode");
    let mut lane = client.lane();
    let mut ticket = lane.submit(&Flow { request: 7, ..flow(Stage::P2d, 1000) });
    take(&mut lane, &mut ticket, 1000);
    let of_request = FlowQuery { request: Some(7), ..FlowQuery::default() };
    let told = explain(&daemon, of_request);
    assert_eq!((told.count, explain(&daemon, FlowQuery::default()).count), (1, 0));
    assert_eq!(told.flows[0].wait, None);
    assert_eq!(told.flows[0].flow.standing, SubmitOutcome::AtOnce);
}

#[test]
fn many_flows_are_counted_and_the_oldest_are_explained_while_permits_go_on() {
    let daemon = Laxityd::start(SMALL);
    let client = daemon.client("decode");
    let mut first = client.lane();
    let mut ticket = first.submit(&flow(Stage::P2d, WINDOW));
    take(&mut first, &mut ticket, WINDOW);
    let mut lanes: Vec<_> = (0..12).map(|_| client.lane()).collect();
    let mut tickets = Vec::new();
    for lane in &mut lanes {
        for request in 1..=100 {
            tickets.push(lane.submit(&Flow { request, ..flow(Stage::P2d, WINDOW) }));
        }
    }
    let all = 12 * 100;
    let wanted = FlowQuery::default();
    until("all wait", || explain(&daemon, wanted).count == all);
    let told = explain(&daemon, wanted);
    assert_eq!(told.flows.len(), EXPLAINED_MAX);
    assert!(told.flows.is_sorted_by_key(|flow| flow.since_ns));
    assert!(told.flows.iter().all(|flow| flow.flow.ahead <= 256));
    // Another port's flows get their permits meanwhile.
    let began = Instant::now();
    let mut other = client.lane();
    let ingress =
        Flow { direction: laxity_client::Direction::Ingress, ..flow(Stage::Collective, 1000) };
    for _ in 0..50 {
        explain(&daemon, wanted);
        support::send(&mut other, &ingress);
    }
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

#[test]
fn the_trace_of_a_request_is_in_explanations_traces_and_the_log() {
    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    let mut daemon = Laxityd::start(SMALL);
    let client = daemon.client("decode");
    let mut lane = client.lane();
    let header = format!("00-{TRACE}-b7ad6b7169203331-01");
    lane.hint(Hint::RequestJoin { batch: 3, request: 7, deadline_ns: 0, bytes: 0 });
    lane.hint(Hint::of_traceparent(7, &header).unwrap());
    let deadline_ns = now_ns() + 50_000_000;
    let late = Flow { request: 7, deadline_ns, ..flow(Stage::P2d, 1000) };
    let mut ticket = lane.submit(&late);
    take(&mut lane, &mut ticket, 1000);
    let of_request = FlowQuery { request: Some(7), ..FlowQuery::default() };
    assert_eq!(explain(&daemon, of_request).flows[0].trace_id, TRACE);

    // The trace begins after the hint.
    let mut operator = daemon.control();
    operator.trace_start(60, 1000).unwrap();
    std::thread::sleep(Duration::from_millis(60));
    lane.complete(&ticket, 1000);
    lane.hint(Hint::RequestEnd { request: 7 });
    let line = daemon.await_log("missed its deadline");
    assert!(line.contains(TRACE) && line.contains("request=7"), "{line}");
    let mut events = Vec::new();
    until("the end is recorded", || {
        events.extend(operator.trace_read().unwrap().events);
        events.iter().any(|event| event.what == TraceKind::RequestEnd { request: 7 })
    });
    let span_id = "b7ad6b7169203331".to_owned();
    let named = TraceKind::RequestTrace { request: 7, trace_id: TRACE.to_owned(), span_id };
    assert!(events.iter().any(|event| event.what == named), "{events:?}");
    let mut again = lane.submit(&Flow { deadline_ns: 0, ..late });
    take(&mut lane, &mut again, 1000);
    assert_eq!(explain(&daemon, of_request).flows[0].trace_id, "", "the request has ended");
}
