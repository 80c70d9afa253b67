//! Tests of a trace, from its events to the file.

use std::collections::{BTreeMap, BTreeSet};

use laxity_wire::trace::{SubmitOutcome, TraceEvent, TraceKind, TracedFlow};
use serde_json::Value;

use super::lives::{FlowEnd, lives};
use super::otlp::spans;
use super::parts::{Parts, ended, line, parts};
use super::rows::picture;
use super::why::{PermittedByKind, why};

fn flow(number: u64, stage: &str, bytes: u64, standing: SubmitOutcome) -> TracedFlow {
    TracedFlow {
        flow: number,
        pid: 42,
        nic: 0,
        ingress: false,
        stage: stage.to_owned(),
        layer: 3,
        batch: 7,
        request: number,
        bytes,
        deadline_ns: 0,
        standing,
        permitted: 0,
        level: 0,
        in_flight_bytes: 1 << 20,
        window_bytes: 1 << 20,
        ahead: 2,
    }
}

fn at(at_ns: u64, what: TraceKind) -> TraceEvent {
    TraceEvent { at_ns, what }
}

fn permit(flow: u64, bytes: u64, level: u8, last: bool) -> TraceKind {
    TraceKind::Permitted { flow, bytes, level, last }
}

/// Returns events in which a p2d flow waits behind a collective, and then goes in two parts, late.
fn story() -> Vec<TraceEvent> {
    let waits =
        TracedFlow { deadline_ns: 8_000, ..flow(1, "p2d", 3000, SubmitOutcome::BehindOthers) };
    let goes = TracedFlow {
        permitted: 2048,
        level: 2,
        ..flow(2, "collective", 2048, SubmitOutcome::AtOnce)
    };
    vec![
        at(500, TraceKind::RequestJoin { batch: 7, request: 1, deadline_ns: 8_000 }),
        at(600, TraceKind::LayerBegin { batch: 7, layer: 3 }),
        at(1_000, TraceKind::Submitted(waits)),
        at(2_000, TraceKind::Submitted(goes)),
        at(3_000, TraceKind::Completed { flow: 2, bytes: 2048 }),
        at(4_000, permit(1, 1000, 5, false)),
        at(5_000, TraceKind::LayerBegin { batch: 7, layer: 4 }),
        at(6_000, permit(1, 2000, 5, true)),
        at(9_000, TraceKind::Completed { flow: 1, bytes: 3000 }),
        at(9_500, TraceKind::ComputeEnd { batch: 7 }),
        at(9_600, TraceKind::Completed { flow: 99, bytes: 1 }),
    ]
}

#[test]
fn flows_and_spells_are_put_together_from_their_events() {
    let lives = lives(&story());
    assert_eq!((lives.flows.len(), lives.strays), (2, 1));
    let first = &lives.flows[0];
    assert_eq!(first.permits.len(), 2);
    assert_eq!(first.ended, Some(FlowEnd::Complete(9_000)));
    assert_eq!(lives.flows[1].ended, Some(FlowEnd::Complete(3_000)));
    // There are two layers, and the request, which did not end.
    assert_eq!(lives.spells.len(), 3);
    assert_eq!(lives.spells.last().map(|spell| spell.end_ns), Some(9_600));
}

#[test]
fn a_permit_says_what_went_in_its_place() {
    let lives = lives(&story());
    let ledger = PermittedByKind::of(&lives);
    assert_eq!(
        why(&ledger, &lives.flows[0], 0),
        "3 µs: 2 flows waited before it, 1 MiB of 1 MiB were in flight; meanwhile went 2 KiB of \
         collective at P2"
    );
    assert_eq!(
        why(&ledger, &lives.flows[0], 1),
        "2 µs after its last permit; nothing else got a permit meanwhile"
    );
    assert_eq!(why(&ledger, &lives.flows[1], 0), "nothing was in its way");
}

/// Returns the parts of each request.
fn parts_of(events: &[TraceEvent]) -> BTreeMap<u64, Parts> {
    let lives = lives(events);
    ended(&lives).iter().map(|ended| (ended.request, parts(ended, lives.last_ns))).collect()
}

fn with<'a>(picture: &'a Value, key: &str, value: &str) -> Vec<&'a Value> {
    let events = picture["traceEvents"].as_array().expect("events");
    events.iter().filter(|event| event[key] == value).collect()
}

#[test]
fn there_is_a_row_for_each_stage_layer_and_level_and_slices_lie_inside_each_other() {
    let picture = picture(&lives(&story()), &BTreeMap::new(), &["eth0".to_owned()], 4);
    let names: Vec<_> = with(&picture, "name", "thread_name")
        .iter()
        .map(|event| event["args"]["name"].as_str().expect("a name").to_owned())
        .collect();
    assert_eq!(names, ["batch 7", "request 1", "collective · layer 3 · P2", "p2d · layer 3 · P5"]);
    let processes: Vec<_> = with(&picture, "name", "process_name")
        .iter()
        .map(|event| event["args"]["name"].clone())
        .collect();
    assert_eq!(processes, ["engine", "eth0 egress"]);
    let flows = with(&picture, "cat", "flow");
    assert_eq!(flows.len(), 2);
    let p2d = flows.iter().find(|event| event["args"]["request"] == 1).expect("the p2d flow");
    assert_eq!((&p2d["ts"], &p2d["dur"]), (&0.5.into(), &8.0.into()));
    assert_eq!(p2d["args"]["flow"], "1");
    assert_eq!(p2d["args"]["outcome"], "late");
    assert_eq!(p2d["args"]["waited_us"], 3.0);
    let waits = with(&picture, "cat", "wait");
    assert_eq!((waits.len(), &waits[0]["dur"]), (1, &3.0.into()));
    assert_eq!(with(&picture, "cat", "permit").len(), 3);
    assert_eq!(picture["otherData"]["lost_events"], 4);
}

#[test]
fn what_did_not_end_lasts_until_the_trace_does_and_a_number_may_be_used_again() {
    let again = [
        at(10, TraceKind::Submitted(flow(1, "p2d", 5, SubmitOutcome::WindowFull))),
        at(20, TraceKind::Cancelled { flow: 1 }),
        at(30, TraceKind::Submitted(flow(1, "p2d", 5, SubmitOutcome::Observed))),
        at(40, TraceKind::Submitted(flow(2, "p2d", 0, SubmitOutcome::OnCredit))),
    ];
    let lives = lives(&again);
    assert_eq!(lives.flows[0].ended, Some(FlowEnd::Cancelled(20)));
    assert_eq!(lives.flows[1].ended, None);
    assert_eq!(lives.flows[1].end_ns(lives.last_ns), 40);
    assert_eq!(lives.flows[2].ended, Some(FlowEnd::Complete(40)));
    let picture = picture(&lives, &BTreeMap::new(), &[], 0);
    assert_eq!(with(&picture, "cat", "flow").len(), 3);
}

#[test]
fn the_time_of_a_request_divides_into_what_it_waited_for() {
    let of = |number, stage, layer, request| TracedFlow {
        request,
        layer,
        ..flow(number, stage, 10, SubmitOutcome::BehindOthers)
    };
    let done = |flow| TraceKind::Completed { flow, bytes: 10 };
    let layer = |layer| TraceKind::LayerBegin { batch: 7, layer };
    let join = |batch, request| TraceKind::RequestJoin { batch, request, deadline_ns: 0 };
    let events = [
        at(0, join(0, 1)),
        at(0, join(0, 2)),
        at(100, TraceKind::Submitted(of(1, "kv_reuse", 0, 1))),
        at(110, permit(1, 10, 3, true)),
        at(130, done(1)),
        at(140, TraceKind::Submitted(of(2, "kv_reuse", 1, 1))),
        at(150, join(7, 1)),
        at(150, permit(2, 10, 3, true)),
        at(200, layer(0)),
        // The batch's collective names no request, so it counts for each member.
        at(250, TraceKind::Submitted(of(3, "collective", 0, 0))),
        at(255, permit(3, 10, 1, true)),
        at(280, done(3)),
        at(300, layer(1)),
        at(320, done(2)),
        at(350, TraceKind::Submitted(of(4, "p2d", 0, 1))),
        at(400, TraceKind::ComputeEnd { batch: 7 }),
        at(430, permit(4, 10, 5, true)),
        at(470, done(4)),
        at(475, TraceKind::RequestEnd { request: 1 }),
    ];
    let parts = parts_of(&events);
    // Request 2 did not end. Of the second block's time, 60 passed before the first layer.
    let expected = [20 + 50 + 20, 10 + 10, 25, 5, 40, 30, 150, 110, 5];
    assert_eq!(expected.iter().sum::<u64>(), 475);
    assert_eq!(parts.into_iter().collect::<Vec<_>>(), [(1, expected)]);
    assert_eq!(line(&BTreeMap::new()), None);
    let in_ms = [1_000_000, 0, 500_000, 0, 0, 0, 2_000_000, 500_000, 0];
    assert_eq!(
        line(&BTreeMap::from([(1, in_ms), (2, in_ms)])).as_deref(),
        Some(
            "2 requests of 4.0 ms on average: kv reuse network 25 %, kv reuse permit 0 %, \
             collective network 12 %, collective permit 0 %, p2d network 0 %, p2d permit 0 %, \
             compute 50 %, queue 12 %, rest 0 %"
        )
    );
}

#[test]
fn a_request_in_two_batches_queues_between_them_and_one_without_layers_waits_for_all_its_flows() {
    let join = |batch, request| TraceKind::RequestJoin { batch, request, deadline_ns: 0 };
    let p2d = TracedFlow { request: 2, ..flow(1, "p2d", 10, SubmitOutcome::BehindOthers) };
    let observed = TracedFlow { request: 3, ..flow(2, "p2d", 10, SubmitOutcome::Observed) };
    let events = [
        at(0, join(7, 1)),
        at(10, TraceKind::LayerBegin { batch: 7, layer: 0 }),
        at(10, join(0, 2)),
        at(20, TraceKind::Submitted(p2d)),
        at(30, TraceKind::ComputeEnd { batch: 7 }),
        at(30, join(8, 1)),
        at(40, permit(1, 10, 5, true)),
        at(45, TraceKind::LayerBegin { batch: 8, layer: 0 }),
        at(70, TraceKind::ComputeEnd { batch: 8 }),
        at(75, TraceKind::RequestEnd { request: 1 }),
        at(80, TraceKind::Completed { flow: 1, bytes: 10 }),
        // Request 3 joins after all layers of its batch, and nobody asks before its flow is sent.
        at(82, join(7, 3)),
        at(84, TraceKind::Submitted(observed)),
        at(88, TraceKind::Completed { flow: 2, bytes: 10 }),
        at(90, TraceKind::RequestEnd { request: 2 }),
        at(92, TraceKind::RequestEnd { request: 3 }),
    ];
    let parts = parts_of(&events);
    assert_eq!(parts[&1], [0, 0, 0, 0, 0, 0, 20 + 25, 10 + 15, 5]);
    assert_eq!(parts[&2], [0, 0, 0, 0, 40, 20, 0, 10 + 10, 0]);
    assert_eq!(parts[&3], [0, 0, 0, 0, 4, 0, 0, 2 + 4, 0]);
}

#[test]
fn a_request_is_a_trace_with_its_layers_and_flows_below_it_and_each_permit_says_why() {
    let mut events = story();
    events.push(at(9_700, TraceKind::RequestEnd { request: 1 }));
    let lives = lives(&events);
    let (ended, parts) = (ended(&lives), parts_of(&events));
    let otlp = spans(&lives, &ended, &parts, &["eth0".to_owned()], 1_000_000);
    let spans = otlp["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().expect("spans");
    let names: Vec<_> = spans.iter().map(|span| span["name"].as_str().expect("a name")).collect();
    assert_eq!(names, ["request", "layer", "layer", "p2d"]);
    let (root, p2d) = (&spans[0], &spans[3]);
    assert_eq!(root["traceId"], format!("{:016x}{:016x}", 1_000_500, 1));
    assert_eq!(root["startTimeUnixNano"], "1000500");
    assert_eq!(root["endTimeUnixNano"], "1009700");
    assert_eq!(root["status"]["code"], 2, "its deadline was 8000");
    let of = |span: &Value, key: &str| {
        let attributes = span["attributes"].as_array().expect("attributes").clone();
        attributes.into_iter().find(|one| one["key"] == key).expect("it is there")["value"].clone()
    };
    assert_eq!(of(root, "laxity.request")["intValue"], "1");
    let whole: u64 = parts[&1].iter().sum();
    assert_eq!((whole, &of(root, "laxity.queue_ns")["intValue"]), (9_200, &"100".into()));
    assert!(root["parentSpanId"].is_null() && p2d["parentSpanId"] == root["spanId"]);
    assert_eq!(of(p2d, "laxity.port")["stringValue"], "eth0 egress");
    assert_eq!(of(p2d, "laxity.waited_ns")["intValue"], "3000");
    let permits = p2d["events"].as_array().expect("events");
    assert_eq!((permits.len(), &permits[1]["timeUnixNano"]), (2, &"1006000".into()));
    assert!(permits[0]["attributes"].to_string().contains("2 KiB of collective at P2"));
}

#[test]
fn a_request_of_an_engines_trace_is_below_the_span_that_called_the_engine() {
    let mut events = story();
    let trace_id = "0af7651916cd43dd8448eb211c80319c".to_owned();
    let span_id = "b7ad6b7169203331".to_owned();
    events.push(at(
        9_600,
        TraceKind::RequestTrace {
            request: 1,
            trace_id: trace_id.clone(),
            span_id: span_id.clone(),
        },
    ));
    events.push(at(9_700, TraceKind::RequestEnd { request: 1 }));
    let lives = lives(&events);
    let (ended, parts) = (ended(&lives), parts_of(&events));
    let spans_from = |epoch_ns| {
        let otlp = spans(&lives, &ended, &parts, &[], epoch_ns);
        otlp["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().expect("spans").clone()
    };
    let here = spans_from(1_000_000);
    assert!(here.iter().all(|span| span["traceId"] == trace_id.as_str()));
    assert_eq!(here[0]["parentSpanId"], span_id.as_str());
    assert!(here[1..].iter().all(|span| span["parentSpanId"] == here[0]["spanId"]));
    let ids = |spans: &[Value]| -> BTreeSet<String> {
        spans.iter().map(|span| span["spanId"].as_str().expect("an id").to_owned()).collect()
    };
    let (here, there) = (ids(&here), ids(&spans_from(1_000_001)));
    assert!(here.len() == 4 && here.is_disjoint(&there), "another host's spans differ");
    let picture = picture(&lives, &parts, &[], 0);
    assert!(picture["traceEvents"].to_string().contains(&trace_id));
}

#[test]
fn a_flow_of_a_whole_batch_is_written_once_however_many_requests_waited_for_it() {
    let join = |request| TraceKind::RequestJoin { batch: 7, request, deadline_ns: 0 };
    let shared = TracedFlow { request: 0, ..flow(9, "collective", 10, SubmitOutcome::AtOnce) };
    let events = [
        at(0, join(1)),
        at(0, join(2)),
        at(10, TraceKind::Submitted(shared)),
        at(20, TraceKind::Completed { flow: 9, bytes: 10 }),
        at(30, TraceKind::RequestEnd { request: 1 }),
        at(30, TraceKind::RequestEnd { request: 2 }),
    ];
    let lives = lives(&events);
    let otlp = spans(&lives, &ended(&lives), &parts_of(&events), &[], 0);
    let written = otlp["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().expect("spans");
    let names: Vec<_> = written.iter().map(|span| span["name"].as_str().expect("name")).collect();
    assert_eq!(names, ["request", "collective", "request"]);
}
