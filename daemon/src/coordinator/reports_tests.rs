//! Tests of the report state, and the property that all reports together equal the state.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

use std::collections::BTreeMap;

use super::*;
use crate::coordinator::outgoing::EVENTS_MAX;
use proptest::prelude::*;

const MS: Span = Span::from_millis(1);

fn attended() -> ReportState {
    let mut state = ReportState::new(0);
    state.attend();
    let first = state.next_report(Time(0), 10).unwrap();
    assert_eq!(
        (first.piece, first.events.len()),
        (SnapshotPiece::End, 0),
        "a host that knows nothing says so"
    );
    state
}

fn kinds(report: &OutgoingReport) -> Vec<Kind> {
    let kinds = report.events.iter();
    kinds.map(|event| event.event.clone().unwrap()).collect()
}

#[test]
fn an_arrival_is_one_event_with_its_requests_and_deadlines_are_what_remains() {
    let mut state = attended();
    state.batch_began(7, 8, MS);
    state.joined(7, 70, Time(5_000), 1 << 20);
    state.joined(7, 71, Time::NEVER, 0);
    state.joined(7, 72, Time(1_000), 5);
    assert_eq!(state.urgency(), Urgency::Now);
    let mut told = state.next_report(Time(2_000), 100).unwrap();
    let [Kind::BatchArrived(batch)] = &kinds(&told)[..] else { panic!("{told:?}") };
    assert_eq!((batch.batch, batch.compute_ns, batch.layers), (7, 8_000_000, 8));
    let left: Vec<_> = batch.requests.iter().map(|r| r.remaining_ns).collect();
    assert_eq!(left, [Some(3_000), None, Some(-1_000)]);
    assert_eq!(batch.requests[0].loads, [PortBytes { port: 0, bytes: 1 << 20 }]);
    assert!(batch.requests[1].loads.is_empty());
    assert_eq!(state.urgency(), Urgency::Nothing);
    assert_eq!(state.next_report(Time(2_000), 100), None);

    told.age_to(Time(2_500));
    let [Kind::BatchArrived(batch)] = &kinds(&told)[..] else { panic!("{told:?}") };
    assert_eq!(batch.requests[0].remaining_ns, Some(2_500));
    assert_eq!(batch.compute_ns, 8_000_000, "it does not compute yet");
}

#[test]
fn progress_and_bytes_are_coarse_and_can_wait() {
    let mut state = attended();
    state.batch_began(7, 80, MS);
    state.joined(7, 70, Time(5_000), 1000);
    state.layer(Time(0), 7, 0);
    state.next_report(Time(0), 100).unwrap();
    let mut reports = 0;
    for layer in 1..80 {
        state.layer(Time(0), 7, layer);
        assert!(state.urgency() <= Urgency::Later);
        reports += usize::from(state.next_report(Time(0), 100).is_some());
    }
    assert_eq!(reports, 3, "at a quarter, a half and three quarters");
    for _ in 0..10 {
        state.completed(70, 0, 40);
        state.completed(70, 1, 40);
    }
    assert_eq!(state.urgency(), Urgency::Later);
    let told = kinds(&state.next_report(Time(0), 100).unwrap());
    let sum = BytesCompleted { request: 70, port: 0, bytes: 400 };
    assert_eq!(told, [Kind::BytesCompleted(sum)]);
}

#[test]
fn a_new_stream_is_told_how_far_a_batch_is() {
    let mut state = attended();
    state.batch_began(7, 80, MS);
    state.joined(7, 70, Time(5_000), 1000);
    state.layer(Time(0), 7, 0);
    state.layer(Time(0), 7, 60);
    while state.next_report(Time(0), 100).is_some() {}
    state.attend();
    let mut layers = Vec::new();
    while let Some(report) = state.next_report(Time(0), 100) {
        layers.extend(kinds(&report).iter().filter_map(|kind| match kind {
            Kind::BatchProgress(progress) => Some(progress.layer),
            _ => None,
        }));
    }
    assert_eq!(layers, [60]);
}

#[test]
fn what_nobody_was_told_of_is_not_taken_back() {
    let mut state = attended();
    state.batch_began(7, 8, MS);
    state.joined(7, 70, Time(5_000), 1000);
    state.ended(70);
    state.batch_ended(7);
    assert_eq!(state.next_report(Time(0), 100), None);
    state.batch_began(8, 8, MS);
    state.joined(8, 80, Time(5_000), 1000);
    state.next_report(Time(0), 100).unwrap();
    state.ended(80);
    state.batch_ended(8);
    let told = kinds(&state.next_report(Time(0), 100).unwrap());
    let ends = [
        Kind::RequestEnded(RequestEnded { request: 80 }),
        Kind::BatchFinished(BatchFinished { batch: 8 }),
    ];
    assert_eq!(told, ends);
}

#[test]
fn without_anybody_to_tell_nothing_piles_up() {
    let mut state = ReportState::new(0);
    for batch in 1..100_000_u64 {
        state.batch_began(batch, 8, MS);
        state.joined(batch, batch, Time(5_000), 1000);
        state.completed(batch, 0, 10);
        state.batch_ended(batch);
    }
    assert!(state.batches.is_empty() && state.requests.is_empty() && state.names.is_empty());
    assert!(state.stirred.is_empty() && state.parting.is_empty());
    assert_eq!(state.next_report(Time(0), 100), None);
}

#[test]
fn a_coordinator_that_does_not_read_costs_bounded_memory() {
    let mut state = attended();
    for batch in 1..50_000_u64 {
        state.batch_began(batch, 8, MS);
        for request in 0..20 {
            state.joined(batch, batch * 100 + request, Time(5_000), 1000);
        }
        if batch.is_multiple_of(3) {
            state.batch_ended(batch);
        }
    }
    assert!(state.batches.len() <= BATCHES_MAX && state.requests.len() <= REQUESTS_MAX);
    assert!(state.names.len() == state.batches.len() && state.parting.len() <= PARTING_MAX);
    assert!(state.stirred.len() <= BATCHES_MAX);
    // Then the coordinator reads: reports stay small and come to an end.
    let mut reports = 0;
    while let Some(report) = state.next_report(Time(0), usize::MAX) {
        reports += 1;
        assert!(report.events.len() <= EVENTS_MAX && reports < 10_000);
    }
}

#[test]
fn a_request_that_moved_to_a_batch_that_ends_untold_is_ended_where_it_was() {
    let mut state = attended();
    state.batch_began(5, 8, MS);
    state.joined(5, 3, Time(9), 1000);
    state.next_report(Time(0), 100).unwrap();
    state.batch_began(1, 8, MS);
    state.joined(1, 3, Time(9), 1000);
    state.batch_ended(1);
    let told = kinds(&state.next_report(Time(0), 100).unwrap());
    assert_eq!(told, [Kind::RequestEnded(RequestEnded { request: 3 })]);
}

/// The coordinator's view after some reports: batches with the bytes left of their requests.
#[derive(Debug, Default)]
struct Reader {
    batches: BTreeMap<u64, BTreeMap<u64, u64>>,
    snapshot: Option<BTreeMap<u64, BTreeMap<u64, u64>>>,
}

impl Reader {
    fn read(&mut self, report: &OutgoingReport) {
        if report.piece != SnapshotPiece::Unspecified && self.snapshot.is_none() {
            self.snapshot = Some(BTreeMap::new());
        }
        let into = self.snapshot.as_mut().unwrap_or(&mut self.batches);
        for kind in kinds(report) {
            match kind {
                Kind::BatchArrived(said) => {
                    for load in &said.requests {
                        for batch in into.values_mut() {
                            batch.remove(&load.request);
                        }
                    }
                    let batch = into.entry(said.batch).or_default();
                    for load in said.requests {
                        let bytes = load.loads.iter().map(|load| load.bytes).sum();
                        batch.insert(load.request, bytes);
                    }
                }
                Kind::BatchFinished(said) => drop(into.remove(&said.batch)),
                Kind::RequestEnded(said) => {
                    for batch in into.values_mut() {
                        batch.remove(&said.request);
                    }
                }
                Kind::BytesCompleted(said) => {
                    for batch in into.values_mut() {
                        if let Some(left) = batch.get_mut(&said.request) {
                            *left -= said.bytes;
                        }
                    }
                }
                _ => {}
            }
        }
        if report.piece == SnapshotPiece::End {
            self.batches = self.snapshot.take().unwrap();
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Begin(u64),
    Join(u64, u64),
    End(u64),
    Finish(u64),
    Bytes(u64, u64),
    Read(usize),
    Restate,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (1..6_u64).prop_map(Step::Begin),
        (1..6_u64, 1..12_u64).prop_map(|(batch, request)| Step::Join(batch, request)),
        (1..12_u64).prop_map(Step::End),
        (1..6_u64).prop_map(Step::Finish),
        (1..12_u64, 1..200_u64).prop_map(|(request, bytes)| Step::Bytes(request, bytes)),
        (1..4_usize).prop_map(Step::Read),
        Just(Step::Restate),
    ]
}

#[test]
fn a_dispatch_holds_no_more_requests_than_the_coordinator_takes_events() {
    let mut state = attended();
    state.batch_began(1, 8, MS);
    for request in 1..=95 {
        state.joined(1, request, Time(9), 1000);
    }
    let mut told = 0;
    while let Some(report) = state.next_report(Time(1), 10) {
        let requests: usize = report
            .events
            .iter()
            .map(|event| match &event.event {
                Some(Kind::BatchArrived(batch)) => batch.requests.len(),
                _ => 0,
            })
            .sum();
        assert!(requests <= 10 && report.events.len() <= 10);
        told += requests;
    }
    assert_eq!(told, 95);
}

proptest! {
    #[test]
    fn whoever_reads_all_reports_knows_what_the_ledger_knows(
        steps in prop::collection::vec(step(), 0..120)
    ) {
        let mut state = attended();
        let mut reader = Reader::default();
        for step in steps {
            match step {
                Step::Begin(batch) => state.batch_began(batch, 8, MS),
                Step::Join(batch, request) => state.joined(batch, request, Time(9), 1000),
                Step::End(request) => state.ended(request),
                Step::Finish(batch) => state.batch_ended(batch),
                Step::Bytes(request, bytes) => state.completed(request, 0, bytes),
                Step::Read(most) => {
                    if let Some(report) = state.next_report(Time(1), most) {
                        reader.read(&report);
                    }
                }
                Step::Restate => state.restate(),
            }
        }
        while let Some(report) = state.next_report(Time(1), 3) {
            reader.read(&report);
        }
        let known: BTreeMap<u64, BTreeMap<u64, u64>> = state
            .batches
            .values()
            .map(|batch| {
                let left = |id: &u64| (*id, state.requests[id].left);
                (batch.id, batch.requests.iter().map(left).collect())
            })
            .collect();
        prop_assert_eq!(reader.batches, known);
    }
}
