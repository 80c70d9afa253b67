//! Tests of HyperFlexis' dispatcher case by case. `dispatch.rs` tests properties of every
//! dispatcher.

use laxity_requests::dispatch::{Dispatch as _, DispatchDecision, DispatchEvent, Role};
use laxity_requests::hyperflexis::{DispatcherOptions, HyperFlexis, Linear};
use laxity_requests::iteration::Load;
use laxity_requests::request::{InstanceId, RequestId, Slo, Spec};
use laxity_requests::{Span, Time};

/// A prefill takes 10 ms and 0.1 ms per token, and a step 10 ms and 10 µs per request.
const MODEL: Linear = Linear { prefill: [10e6, 100_000.0, 0.0], decode: [10e6, 0.0, 10_000.0] };
const START: Time = Time(10_000_000_000);

fn spec(id: u64, arrival: Time, prompt: u32, (ttft, tbt): (u64, u64)) -> Spec {
    Spec {
        id: RequestId(id),
        arrival,
        prompt,
        output_max: 100,
        slo: Slo::Interactive { ttft: ttft * 1_000_000, tbt: tbt * 1_000_000 },
        ..Spec::default()
    }
}

fn dispatch(roles: &[Role], options: DispatcherOptions) -> HyperFlexis {
    let mut dispatch = HyperFlexis::new(options);
    for (at, role) in roles.iter().enumerate() {
        let instance = InstanceId(at as u32);
        let role = *role;
        dispatch.handle(START, &DispatchEvent::Up { instance, role });
    }
    dispatch
}

fn placed(dispatch: &mut HyperFlexis, now: Time) -> Vec<(u64, u32)> {
    std::iter::from_fn(|| dispatch.poll_decision(now))
        .map(|decision| match decision {
            DispatchDecision::Place { request, instance } => (request.0, instance.0),
            DispatchDecision::Refuse(request) => panic!("{request:?} is refused"),
        })
        .collect()
}

fn load(decoding: u32, prefill_tokens: u64) -> Load {
    Load {
        waiting: u32::from(prefill_tokens > 0),
        running: decoding,
        decoding,
        prefill_tokens,
        decode_context: u64::from(decoding) * 100,
        blocks: 10_000,
        blocks_free: 9_000,
        ..Load::default()
    }
}

fn report(at: u32, load: Load) -> DispatchEvent {
    DispatchEvent::Load { instance: InstanceId(at), load, took: 10_000_000 }
}

#[test]
fn an_instance_takes_the_tightest_first_up_to_its_budget_and_the_rest_when_it_is_mature() {
    let mut dispatch = dispatch(&[Role::Whole], DispatcherOptions::new(MODEL, 16));
    // Half of 1 s permits about 4400 tokens: 500 ms · (1 − 10 / 100) less 10 ms.
    for id in 0..4 {
        let targets = if id == 2 { (1_000, 100) } else { (5_000, 200) };
        dispatch.handle(START, &DispatchEvent::Arrived(spec(id, START, 2_000, targets)));
    }
    assert_eq!(placed(&mut dispatch, START), [(2, 0), (0, 0)]);
    assert_eq!(dispatch.waiting(), 2);
    let mature = dispatch.next_deadline().expect("somebody waits");
    // The prompts take 410 ms, and then there are 410 / 90 steps of 10 ms.
    let expected = START + Span::from_millis(455);
    let off = expected.since(mature) + mature.since(expected);
    assert!(off < Span::from_millis(2), "{mature:?}");
    let soon = START + Span::from_millis(410);
    dispatch.handle(soon, &report(0, load(2, 0)));
    assert_eq!(placed(&mut dispatch, soon), []);
    let mature = dispatch.next_deadline().expect("somebody waits");
    assert_eq!(placed(&mut dispatch, mature), [(1, 0), (3, 0)]);
}

#[test]
fn an_instance_with_nothing_to_do_takes_one_prompt_above_every_budget() {
    let mut dispatch = dispatch(&[Role::Whole], DispatcherOptions::new(MODEL, 16));
    for id in 0..2 {
        let long = spec(id, START, 9_000, (950, 100));
        dispatch.handle(START, &DispatchEvent::Arrived(long));
    }
    assert_eq!(placed(&mut dispatch, START), [(0, 0)]);
    let end = START + Span::from_millis(2_000);
    dispatch.handle(end, &report(0, load(1, 0)));
    assert_eq!(placed(&mut dispatch, end), [], "one that decodes is not idle");
    dispatch.handle(end, &report(0, load(0, 0)));
    assert_eq!(placed(&mut dispatch, end), [(1, 0)]);
}

#[test]
fn who_cannot_be_in_time_any_more_lets_all_others_pass() {
    let mut dispatch = dispatch(&[Role::Whole], DispatcherOptions::new(MODEL, 16));
    let now = START + Span::from_millis(990);
    dispatch.handle(now, &DispatchEvent::Arrived(spec(0, now, 3_000, (1_000, 50))));
    assert_eq!(placed(&mut dispatch, now).len(), 1);
    // The request is late by then and has the tightest target, so it would be first in the queue.
    dispatch.handle(now, &DispatchEvent::Arrived(spec(1, START, 500, (1_000, 20))));
    dispatch.handle(now, &DispatchEvent::Arrived(spec(2, now, 500, (5_000, 100))));
    assert_eq!(placed(&mut dispatch, now), []);
    let computed = now + Span::from_millis(310);
    dispatch.handle(computed, &report(0, load(1, 0)));
    let later = now + Span::from_millis(800);
    let order = placed(&mut dispatch, later);
    assert_eq!(order, [(2, 0)]);
    let computed = later + Span::from_millis(70);
    dispatch.handle(computed, &report(0, load(2, 0)));
    let last = later + Span::from_millis(1_000);
    assert_eq!(placed(&mut dispatch, last), [(1, 0)]);
}

#[test]
fn where_a_request_decodes_is_decided_when_its_prompt_is_computed() {
    let roles = [Role::Prefill, Role::Decode, Role::Decode];
    let mut dispatch = dispatch(&roles, DispatcherOptions::new(MODEL, 16));
    let asked = spec(0, START, 1_000, (1_000, 12));
    dispatch.handle(START, &DispatchEvent::Arrived(asked));
    assert_eq!(placed(&mut dispatch, START), [(0, 0)]);
    // By then a decode step of the first instance takes longer than this request's tokens may.
    dispatch.handle(START, &report(1, load(400, 0)));
    let now = START + Span::from_millis(110);
    let computed = Spec { ready: 1_000, generated: 1, ..asked };
    dispatch.handle(now, &DispatchEvent::Prefilled { spec: computed, instance: InstanceId(0) });
    assert_eq!(placed(&mut dispatch, now), [(0, 2)]);
}

#[test]
fn without_any_report_prompts_count_as_computed_when_their_instance_is_mature() {
    let monitor = Span::from_millis(60_000);
    let options = DispatcherOptions { monitor, ..DispatcherOptions::new(MODEL, 16) };
    let mut dispatch = dispatch(&[Role::Whole], options);
    let mut now = START;
    for round in 0..20 {
        dispatch.handle(now, &DispatchEvent::Arrived(spec(round, now, 3_000, (1_000, 100))));
        assert_eq!(placed(&mut dispatch, now), [(round, 0)], "round {round}");
        now = now + Span::from_millis(400);
    }
}
