//! The admission state machine against a naive, dense Algorithm 1 (MFS Appendix B).

use crate::admission_naive::{Naive, PORTS};
use laxity_policy::admission::{
    Admission, AdmissionAction, AdmissionConfig, AdmissionEvent, RequestLoad,
};
use laxity_policy::prune::Doomed;
use laxity_policy::{BatchId, PortId, RequestId, Span, Time};
use proptest::prelude::*;

/// Rate at which a byte takes a nanosecond.
const RATE: u64 = 1_000_000_000;

/// Generates loads from small ranges, so that ids repeat, loads tie and deadlines are missed.
fn load() -> impl Strategy<Value = RequestLoad> {
    let port = (0..PORTS as u32).prop_map(PortId);
    let bytes = prop_oneof![0..4_u64, 0..400_u64];
    let deadline = prop_oneof![
        8 => 0..1500_u64,
        1 => Just(u64::MAX),
        1 => u64::MAX - 3..u64::MAX,
    ];
    let ports = proptest::collection::vec((port, bytes), 0..5);
    (1..16_u64, deadline, ports, any::<bool>()).prop_map(|(request, deadline, ports, started)| {
        let (request, deadline) = (RequestId(request), Time(deadline));
        RequestLoad { request, deadline, ports, started }
    })
}

fn event() -> impl Strategy<Value = AdmissionEvent> {
    let batch = || (1..7_u64).prop_map(BatchId);
    let request = || (1..16_u64).prop_map(RequestId);
    let port = || (0..PORTS as u32).prop_map(PortId);
    let rate = prop_oneof![Just(0), Just(RATE / 3), Just(RATE), Just(3 * RATE)];
    prop_oneof![
        8 => (batch(), proptest::collection::vec(load(), 0..5), 0..300_u64).prop_map(
            |(batch, requests, compute)| AdmissionEvent::BatchArrived {
                batch,
                requests,
                compute: Span(compute)
            }
        ),
        4 => (batch(), load())
            .prop_map(|(batch, load)| AdmissionEvent::RequestJoined { batch, load }),
        1 => request().prop_map(|request| AdmissionEvent::RequestStarted { request }),
        2 => request().prop_map(|request| AdmissionEvent::RequestEnded { request }),
        2 => (request(), port(), 0..200_u64).prop_map(|(request, port, bytes)| {
            AdmissionEvent::BytesCompleted { request, port, bytes }
        }),
        1 => batch().prop_map(|batch| AdmissionEvent::BatchStarted { batch }),
        2 => batch().prop_map(|batch| AdmissionEvent::BatchDeparted { batch }),
        4 => (batch(), batch())
            .prop_map(|(batch, ahead)| AdmissionEvent::BatchQueued { batch, ahead }),
        2 => (batch(), 0..5_u16)
            .prop_map(|(batch, tenant)| AdmissionEvent::BatchTenant { batch, tenant }),
        1 => (port(), rate)
            .prop_map(|(port, bytes_per_second)| {
                AdmissionEvent::PortRate { port, bytes_per_second }
            }),
    ]
}

/// Generates events, the time before each, and whether the state machine is polled after it.
fn story() -> impl Strategy<Value = Vec<(u64, AdmissionEvent, bool)>> {
    proptest::collection::vec((0..60_u64, event(), any::<bool>()), 1..40)
}

/// Tenants 0 and 3 and those above share the common budget.
fn own_budgets() -> Vec<Option<usize>> {
    vec![None, Some(2), Some(0), None]
}

fn admission(budget: usize, doomed: Doomed) -> Admission {
    let config = AdmissionConfig {
        drop_budget: budget,
        tenant_drop_budgets: own_budgets(),
        doomed,
        default_rate: RATE,
        ..AdmissionConfig::default()
    };
    Admission::new(config).expect("the configuration is valid")
}

fn doomed() -> impl Strategy<Value = Doomed> {
    prop_oneof![Just(Doomed::Counted), Just(Doomed::SetAside)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn order_pruned_set_and_estimates_are_those_of_the_naive_algorithm(
        story in story(), budget in 0..8_usize, doomed in doomed(),
    ) {
        let mut subject = admission(budget, doomed);
        let mut oracle = Naive::new(budget, doomed == Doomed::SetAside, RATE);
        oracle.own_budgets = own_budgets();
        let (mut now, mut epoch) = (0, 0);
        for (passed, event, poll) in story {
            now += passed;
            oracle.handle(now, &event);
            subject.handle(Time(now), event);
            if !poll || subject.next_deadline().is_none() {
                continue;
            }
            let verdicts = oracle.run(now);
            let sigma: Vec<BatchId> = verdicts.iter().map(|v| BatchId(v.batch)).collect();
            let pruned: Vec<RequestId> = oracle.pruned.iter().map(|&r| RequestId(r)).collect();
            let changed = (&sigma, &pruned) != (&subject.order().sigma, &subject.order().pruned);
            let action = subject.poll_action(Time(now));
            prop_assert_eq!(action.is_some(), changed, "an order is issued when it differs");
            prop_assert_eq!(subject.poll_action(Time(now)), None);
            if let Some(AdmissionAction::OrderChanged(order)) = action {
                prop_assert_eq!(order.epoch, epoch + 1);
                epoch = order.epoch;
            }
            prop_assert_eq!(&subject.order().sigma, &sigma);
            prop_assert_eq!(&subject.order().pruned, &pruned);
            for (rank, verdict) in verdicts.iter().enumerate() {
                let said = subject.last_decision(BatchId(verdict.batch)).expect("it is active");
                prop_assert_eq!(said.rank, rank);
                prop_assert_eq!(said.red.loose, Time(verdict.limit));
                prop_assert_eq!(said.estimate.finish(), Time(verdict.finish));
                let bottleneck = said.estimate.bottleneck.map(|port| port.0 as usize);
                prop_assert_eq!(bottleneck, verdict.bottleneck);
                prop_assert_eq!(said.feasible, verdict.finish <= verdict.limit);
                let pruned: Vec<u64> = said.pruned.iter().map(|request| request.0).collect();
                prop_assert_eq!(&pruned, &verdict.pruned);
            }
        }
    }

    #[test]
    fn the_order_in_which_one_windows_events_come_in_does_not_matter(
        arrivals in proptest::collection::btree_map(
            1..9_u64,
            proptest::collection::vec(load(), 0..4),
            1..8,
        ),
        budget in 0..8_usize,
        doomed in doomed(),
    ) {
        let mut next = 0;
        let mut events: Vec<AdmissionEvent> = arrivals
            .into_iter()
            .map(|(batch, mut requests)| {
                for load in &mut requests {
                    next += 1;
                    load.request = RequestId(next);
                }
                AdmissionEvent::BatchArrived { batch: BatchId(batch), requests, compute: Span(50) }
            })
            .collect();
        let mut outcomes = Vec::new();
        for _ in 0..2 {
            let mut subject = admission(budget, doomed);
            events.iter().for_each(|event| subject.handle(Time(10), event.clone()));
            outcomes.push((subject.poll_action(Time(10)), subject.order().clone()));
            events.reverse();
        }
        prop_assert_eq!(&outcomes[0], &outcomes[1]);
    }
}
