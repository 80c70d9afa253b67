//! The admission state machine, one situation at a time (MFS §4.4.2, Appendix B; architecture
//! §4.4). One port moves a byte per nanosecond, so numbers of bytes are nanoseconds too.

use laxity_policy::admission::{
    Admission, AdmissionAction, AdmissionConfig, AdmissionEvent, Decision, QUEUE_MAX, RequestLoad,
};
use laxity_policy::event::Order;
use laxity_policy::prune::Doomed;
use laxity_policy::{BatchId, PolicyKind, PortId, RequestId, Span, Time};
use proptest::prelude::*;

const PORT: u32 = 1;

fn config() -> AdmissionConfig {
    AdmissionConfig { default_rate: 1_000_000_000, ..AdmissionConfig::default() }
}

fn admission(config: AdmissionConfig) -> Admission {
    Admission::new(config).expect("the configuration is valid")
}

fn load(request: u64, deadline: u64, ports: &[(u32, u64)]) -> RequestLoad {
    RequestLoad {
        request: RequestId(request),
        deadline: Time(deadline),
        ports: ports.iter().map(|&(port, bytes)| (PortId(port), bytes)).collect(),
        started: false,
    }
}

fn arrived(batch: u64, compute: u64, requests: Vec<RequestLoad>) -> AdmissionEvent {
    AdmissionEvent::BatchArrived { batch: BatchId(batch), requests, compute: Span(compute) }
}

/// Returns the arrival of a batch. Each request is `(id, deadline, bytes)`.
fn computing(batch: u64, compute: u64, requests: &[(u64, u64, u64)]) -> AdmissionEvent {
    let requests = requests.iter();
    let loads = requests.map(|&(id, deadline, bytes)| load(id, deadline, &[(PORT, bytes)]));
    arrived(batch, compute, loads.collect())
}

/// Returns the arrival of a batch whose computation takes no time.
fn arrival(batch: u64, requests: &[(u64, u64, u64)]) -> AdmissionEvent {
    computing(batch, 0, requests)
}

fn ended(request: u64) -> AdmissionEvent {
    let request = RequestId(request);
    AdmissionEvent::RequestEnded { request }
}

/// Returns what the last run decided about a batch.
fn decision(admission: &Admission, batch: u64) -> Decision {
    let decision = admission.last_decision(BatchId(batch));
    decision.expect("it was decided on")
}

fn departure(batch: u64) -> AdmissionEvent {
    AdmissionEvent::BatchDeparted { batch: BatchId(batch) }
}

/// Returns the order that a poll at `now` issues, if any.
fn order(admission: &mut Admission, now: u64) -> Option<Order> {
    admission.poll_action(Time(now)).map(|AdmissionAction::OrderChanged(order)| order)
}

fn ids(order: &Order) -> (Vec<u64>, Vec<u64>) {
    let sigma = order.sigma.iter().map(|batch| batch.0).collect();
    (sigma, order.pruned.iter().map(|request| request.0).collect())
}

/// Returns the order that a poll at `now` must issue.
fn issued(admission: &mut Admission, now: u64) -> (Vec<u64>, Vec<u64>) {
    ids(&order(admission, now).expect("an order"))
}

#[test]
fn the_ranking_has_the_red_of_each_batch_and_nobody_that_left_or_came_since_the_run() {
    let mut admission = admission(config());
    admission.handle(Time(0), arrival(1, &[(11, 900, 0)]));
    admission.handle(Time(0), arrival(2, &[(21, 500, 0)]));
    admission.handle(Time(0), arrival(3, &[(31, 700, 0)]));
    order(&mut admission, 0);
    let ranking = |admission: &Admission| {
        let ranking = admission.ranking();
        ranking.map(|(batch, red)| (batch.0, red.0)).collect::<Vec<_>>()
    };
    assert_eq!(ranking(&admission), [(2, 500), (3, 700), (1, 900)]);
    admission.handle(Time(0), departure(3));
    admission.handle(Time(0), arrival(4, &[(41, 100, 0)]));
    assert_eq!(ranking(&admission), [(2, 500), (1, 900)]);
}

#[test]
fn an_earlier_batch_that_loses_a_request_is_estimated_again() {
    let mut admission = admission(config());
    // Batch 1 alone is on time (900 by 1000). With it batch 2, due at 1050, would end at 1100.
    admission.handle(Time(0), arrival(1, &[(1, 1000, 600), (2, 1000, 300)]));
    admission.handle(Time(0), arrival(2, &[(3, 1050, 200)]));
    assert_eq!(issued(&mut admission, 0), (vec![1, 2], vec![1]));
    let finish = |batch| decision(&admission, batch).estimate.finish();
    assert_eq!((finish(1), finish(2)), (Time(300), Time(500)));
    assert_eq!(admission.prune_cause(RequestId(1)).map(|cause| cause.batch), Some(BatchId(2)));
}

/// Of equal bytes, a request that does not compute is pruned first.
#[test]
fn a_request_that_joins_a_started_batch_computes_from_the_next_layer_on() {
    for (late, idle) in [(10, 20), (20, 10)] {
        let mut admission = admission(config());
        let started = || AdmissionEvent::BatchStarted { batch: BatchId(1) };
        admission.handle(Time(0), arrival(1, &[(1, 1000, 0)]));
        admission.handle(Time(0), started());
        let load = load(late, 1000, &[(PORT, 450)]);
        admission.handle(Time(0), AdmissionEvent::RequestJoined { batch: BatchId(1), load });
        admission.handle(Time(0), started());
        admission.handle(Time(0), arrival(2, &[(idle, 900, 450)]));
        // Both before it would make this one late.
        admission.handle(Time(0), arrival(3, &[(30, 1001, 200)]));
        assert_eq!(issued(&mut admission, 0).1, [idle], "{late} computes");
    }
}

#[test]
fn the_paper_prunes_innocents_for_a_lost_batch_and_setting_aside_does_not() {
    let tell = |doomed| {
        let mut admission = admission(AdmissionConfig { doomed, ..config() });
        admission.handle(Time(0), arrival(1, &[(1, 1000, 300)]));
        admission.handle(Time(0), arrived(2, 2000, vec![load(2, 1100, &[(PORT, 100)])]));
        let order = order(&mut admission, 0).expect("batches arrived");
        let cause = admission.prune_cause(RequestId(2));
        (ids(&order).1, cause.and_then(|cause| cause.port))
    };
    assert_eq!(tell(Doomed::Counted), (vec![1, 2], Some(PortId(PORT))));
    assert_eq!(tell(Doomed::SetAside), (vec![2], None));
}

fn queued(batch: u64, ahead: u64) -> AdmissionEvent {
    AdmissionEvent::BatchQueued { batch: BatchId(batch), ahead: BatchId(ahead) }
}

fn ready(admission: &mut Admission, now: u64, batch: u64) -> u64 {
    // This arrival triggers a run, which also takes all events that trigger none.
    admission.handle(Time(now), arrival(99, &[]));
    order(admission, now);
    let said = decision(admission, batch);
    said.estimate.ready.0
}

#[test]
fn being_queued_triggers_a_run_if_it_says_something_new() {
    let mut admission = admission(config());
    admission.handle(Time(0), computing(1, 800, &[(1, 5000, 100)]));
    admission.handle(Time(0), computing(2, 300, &[(2, 1000, 100)]));
    order(&mut admission, 0);
    admission.handle(Time(5), queued(2, 1));
    assert_eq!(admission.next_deadline(), Some(Time(5)));
    assert_eq!(issued(&mut admission, 5).1, [2]);
    let ignored = admission.counters().events_ignored;
    admission.handle(Time(6), queued(2, 1));
    admission.handle(Time(6), queued(2, 2));
    admission.handle(Time(6), queued(1, 2));
    admission.handle(Time(6), queued(2, 77));
    admission.handle(Time(6), queued(77, 2));
    assert_eq!(admission.next_deadline(), None);
    assert_eq!(admission.counters().events_ignored, ignored + 4);
}

#[test]
fn a_long_queue_is_counted_as_far_as_the_bound_and_a_ring_is_cut() {
    let mut admission = admission(config());
    let batches = 3 * QUEUE_MAX as u64;
    for batch in 1..=batches {
        admission.handle(Time(0), computing(batch, 10, &[]));
    }
    for batch in 2..=batches {
        admission.handle(Time(0), queued(batch, batch - 1));
    }
    assert_eq!(ready(&mut admission, 0, 3), 30);
    let whole = (QUEUE_MAX as u64 + 1) * 10;
    assert_eq!(ready(&mut admission, 0, batches), whole);
    // This cycle is too long to be noticed, so it is accepted. Estimates end anyway.
    admission.handle(Time(0), queued(1, batches));
    assert_eq!(ready(&mut admission, 0, 1), whole);
}

#[test]
fn triggers_within_the_debounce_are_covered_by_one_run() {
    let mut admission = admission(AdmissionConfig { debounce: Span(100), ..config() });
    assert_eq!(admission.next_deadline(), None);
    admission.handle(Time(10), arrival(1, &[(1, 500, 1)]));
    admission.handle(Time(90), arrival(2, &[(2, 400, 1)]));
    assert_eq!(admission.next_deadline(), Some(Time(110)), "the second does not postpone the run");
    assert_eq!(order(&mut admission, 109), None);
    assert_eq!(issued(&mut admission, 110).0, [2, 1]);
    assert_eq!(admission.next_deadline(), None);
    assert_eq!(admission.counters().runs, 1);
}

#[test]
fn progress_and_ends_wait_for_the_next_trigger() {
    let mut admission = admission(config());
    admission.handle(Time(0), arrival(1, &[(1, 1000, 700)]));
    order(&mut admission, 0);
    let (request, port) = (RequestId(1), PortId(PORT));
    admission.handle(Time(0), AdmissionEvent::BytesCompleted { request, port, bytes: 600 });
    admission.handle(Time(0), ended(1));
    assert_eq!(admission.next_deadline(), None);
}

#[test]
fn an_order_is_issued_only_when_it_differs() {
    let mut admission = admission(config());
    admission.handle(Time(0), arrival(1, &[(1, 500, 1)]));
    assert_eq!(order(&mut admission, 0).expect("a batch arrived").epoch, 1);
    admission.handle(Time(5), arrival(1, &[(1, 600, 2)]));
    assert_eq!(order(&mut admission, 5), None, "the same batch alone, announced again");
    admission.handle(Time(6), departure(1));
    let order = order(&mut admission, 6).expect("it departed");
    assert_eq!((order.epoch, ids(&order)), (2, (vec![], vec![])));
    assert_eq!((admission.counters().runs, admission.counters().orders), (3, 2));
}

#[test]
fn the_oldest_batch_makes_room_for_the_newest() {
    let mut admission = admission(AdmissionConfig { batches_max: 2, ..config() });
    for batch in [7, 3, 5] {
        admission.handle(Time(0), arrival(batch, &[(batch, 100 * batch, 1)]));
    }
    assert_eq!(issued(&mut admission, 0).0, [3, 5]);
    assert_eq!(admission.counters().batches_forgotten, 1);
    assert_eq!(admission.last_decision(BatchId(7)), None);
}

#[test]
fn a_request_that_alone_exceeds_a_cap_is_refused_and_pushes_nobody_out() {
    let mut admission = admission(AdmissionConfig { loads_max: 3, ..config() });
    admission.handle(Time(0), arrival(1, &[(1, 100, 1)]));
    let requests = vec![load(2, 100, &[(1, 1), (2, 1), (3, 1), (4, 1)])];
    admission.handle(Time(0), arrived(2, 0, requests));
    assert_eq!(admission.active_batches(), 2);
    assert_eq!(admission.counters().loads_refused, 1);
}

#[test]
fn estimates_follow_what_was_observed_if_they_are_asked_to() {
    let mut admission = admission(AdmissionConfig { correction_permille: 500, ..config() });
    admission.handle(Time(0), arrival(1, &[(1, 10_000, 1000)]));
    order(&mut admission, 0);
    // The batch took twice its estimate, so the next estimate is multiplied by 1.5.
    admission.handle(Time(2000), ended(1));
    admission.handle(Time(2000), departure(1));
    admission.handle(Time(2000), arrival(2, &[(2, 10_000, 1000)]));
    order(&mut admission, 2000);
    let said = decision(&admission, 2);
    assert_eq!(said.estimate.finish(), Time(3500));
    // An aborted batch does not change the correction.
    admission.handle(Time(9000), departure(2));
    admission.handle(Time(9000), arrival(3, &[(3, 20_000, 1000)]));
    order(&mut admission, 9000);
    let said = decision(&admission, 3);
    assert_eq!(said.estimate.finish(), Time(10_500));
}

#[test]
fn a_new_configuration_takes_effect_and_a_senseless_one_does_not() {
    let mut admission = admission(AdmissionConfig { drop_budget: 0, ..config() });
    admission.handle(Time(0), arrival(1, &[(1, 100, 200)]));
    assert!(issued(&mut admission, 0).1.is_empty());
    let senseless = AdmissionConfig { default_rate: 0, ..config() };
    let error = admission.set_config(Time(1), senseless).expect_err("no port is that slow");
    assert_eq!(error.field, "default_rate");
    admission.set_config(Time(1), config()).expect("it is valid");
    assert_eq!(issued(&mut admission, 1).1, [1]);
}

#[test]
fn the_paper_is_followed_to_the_letter_under_mfs_alone() {
    for policy in PolicyKind::ALL {
        let config = AdmissionConfig::for_policy(policy);
        assert_eq!(config.doomed == Doomed::Counted, policy == PolicyKind::Mfs);
        assert_eq!(config.validate(), Ok(()));
    }
}

/// Generates any event that another process could send.
fn garbage() -> impl Strategy<Value = AdmissionEvent> {
    let number = || prop_oneof![0..4_u64, u64::MAX - 2..=u64::MAX, any::<u64>()];
    let batch = move || number().prop_map(BatchId);
    let request = move || number().prop_map(RequestId);
    let port = || prop_oneof![0..4_u32, any::<u32>()].prop_map(PortId);
    let load = move || {
        let ports = proptest::collection::vec((port(), number()), 0..6);
        (request(), number(), ports, any::<bool>()).prop_map(
            |(request, deadline, ports, started)| RequestLoad {
                request,
                deadline: Time(deadline),
                ports,
                started,
            },
        )
    };
    prop_oneof![
        4 => (batch(), proptest::collection::vec(load(), 0..6), number()).prop_map(
            |(batch, requests, compute)| AdmissionEvent::BatchArrived {
                batch,
                requests,
                compute: Span(compute)
            }
        ),
        2 => (batch(), load())
            .prop_map(|(batch, load)| AdmissionEvent::RequestJoined { batch, load }),
        1 => request().prop_map(|request| AdmissionEvent::RequestStarted { request }),
        1 => request().prop_map(|request| AdmissionEvent::RequestEnded { request }),
        1 => (request(), port(), number()).prop_map(|(request, port, bytes)| {
            AdmissionEvent::BytesCompleted { request, port, bytes }
        }),
        1 => batch().prop_map(|batch| AdmissionEvent::BatchStarted { batch }),
        1 => batch().prop_map(|batch| AdmissionEvent::BatchDeparted { batch }),
        1 => (batch(), batch())
            .prop_map(|(batch, ahead)| AdmissionEvent::BatchQueued { batch, ahead }),
        1 => (port(), number()).prop_map(|(port, bytes_per_second)| AdmissionEvent::PortRate {
            port,
            bytes_per_second
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn garbage_neither_panics_nor_grows_without_bound(
        events in proptest::collection::vec((any::<u64>(), garbage()), 0..80),
        tight in any::<bool>(),
        correction_permille in 0..=1000_u16,
        budget in 0..4_usize,
    ) {
        let caps = AdmissionConfig {
            batches_max: 3, requests_max: 4, loads_max: 9, ports_max: 5, ..config()
        };
        let mut admission = admission(AdmissionConfig {
            drop_budget: budget,
            correction_permille,
            ..if tight { caps } else { config() }
        });
        let mut epoch = 0;
        for (now, event) in events {
            // Even the time need not be monotonic.
            admission.handle(Time(now), event);
            if let Some(order) = order(&mut admission, u64::MAX) {
                prop_assert!(order.epoch > epoch, "epochs increase");
                epoch = order.epoch;
                prop_assert!(order.pruned.is_sorted() && order.pruned.len() <= budget);
                for &batch in &order.sigma {
                    let said = admission.last_decision(batch).expect("it was decided on");
                    prop_assert!(said.estimate.finish() >= said.estimate.ready);
                }
            }
            prop_assert!(!tight || admission.active_batches() <= 3);
        }
    }
}
