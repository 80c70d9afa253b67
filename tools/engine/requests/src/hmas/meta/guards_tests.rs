//! The guards: rollback, bypass, cadence, answers that are none.

use super::external::Mailbox;
use super::*;

const SECOND: u64 = 1_000_000_000;

/// Says each of these in turn, then nothing more.
struct Says(Vec<Answer>);

impl Selector for Says {
    fn name(&self) -> &'static str {
        "says"
    }

    fn select(&mut self, _: Time, _: &Long, _: Kind) -> Answer {
        if self.0.is_empty() {
            return Answer::Stay;
        }
        self.0.remove(0)
    }
}

fn meta(says: &[Answer]) -> Meta {
    let selector = Box::new(Says(says.to_vec()));
    Meta::new(selector, Guards::default(), Kind::Sjf, Hints::default())
}

fn decided(kind: Kind) -> Answer {
    Answer::Decided(kind.into())
}

fn short(violations: f64, count: u32, ttft_p99_ms: f64) -> Short {
    Short {
        violations,
        count,
        ttft_p99_ms,
        ..Short::default()
    }
}

/// Looks once a second up to a time: what was taken up.
fn until(meta: &mut Meta, from: u64, to: u64, short: Short, long: &Long) -> Vec<Switch> {
    (from..to)
        .filter_map(|second| meta.look(Time(second * SECOND), &short, || (long.clone(), 1.0)))
        .collect()
}

#[test]
fn what_made_things_worse_is_taken_back_and_not_tried_again_at_once() {
    let mut meta = meta(&[decided(Kind::Edf), decided(Kind::Edf), decided(Kind::Edf)]);
    let long = Long::default();
    let first = until(&mut meta, 0, 21, short(0.1, 200, 500.0), &long);
    assert_eq!(first.len(), 1);
    assert_eq!((first[0].to, first[0].why), (Kind::Edf, Why::Decided));
    let worse = until(&mut meta, 21, 61, short(0.4, 200, 900.0), &long);
    assert_eq!(worse.len(), 1, "{worse:?}");
    assert_eq!((worse[0].to, worse[0].why), (Kind::Sjf, Why::Rollback));
    // The selector says EDF again at 60 s.
    assert_eq!(meta.current(), Kind::Sjf);
}

#[test]
fn nothing_late_before_does_not_make_the_first_late_request_a_reason() {
    let mut meta = meta(&[decided(Kind::Edf)]);
    let long = Long::default();
    until(&mut meta, 0, 21, short(0.0, 200, 500.0), &long);
    let after = until(&mut meta, 21, 61, short(0.01, 200, 510.0), &long);
    assert!(after.is_empty(), "ν > ρ · 0 is no reason: {after:?}");
}

#[test]
fn a_window_with_few_requests_says_nothing() {
    let mut meta = meta(&[decided(Kind::Edf)]);
    let long = Long::default();
    until(&mut meta, 0, 21, short(0.1, 200, 500.0), &long);
    let few = until(&mut meta, 21, 41, short(1.0, 49, 9e9), &long);
    assert!(few.is_empty(), "{few:?}");
    let enough = until(&mut meta, 41, 61, short(1.0, 50, 9e9), &long);
    assert_eq!(enough.len(), 1);
}

#[test]
fn overload_bypasses_at_once_and_for_delta_t_at_least() {
    let mut meta = meta(&[]);
    let long = Long::default();
    let overload = Short {
        queue: 10_000,
        ..short(1.0, 500, 1e5)
    };
    let into = until(&mut meta, 0, 3, overload, &long);
    assert_eq!(into.len(), 1);
    assert_eq!((into[0].to, into[0].why), (Kind::Fcfs, Why::Bypass));
    assert!(meta.bypasses());
    let calm = until(&mut meta, 3, 20, short(0.0, 500, 100.0), &long);
    assert!(calm.is_empty() && meta.bypasses());
    let out = until(&mut meta, 20, 40, short(0.0, 500, 100.0), &long);
    assert_eq!(out.len(), 1);
    assert_eq!((out[0].to, out[0].why), (Kind::Sjf, Why::Cleared));
}

/// Short requests are late behind long ones: rules say two lanes.
fn behind_long_ones() -> Long {
    Long {
        ttft_violations: 0.3,
        total_cv: 2.0,
        total_p95_ms: 9_000.0,
        fairness: 1.0,
        ..Long::default()
    }
}

#[test]
fn rules_decide_where_an_answer_is_none() {
    let mut meta = meta(&[Answer::Invalid("no JSON".to_owned())]);
    let long = behind_long_ones();
    let switches = until(&mut meta, 0, 25, short(0.3, 200, 500.0), &long);
    assert_eq!(switches.len(), 1);
    assert_eq!(switches[0].to, Kind::TwoLane);
    assert_eq!(meta.hints().lane_split, Span::from_millis(9_000));
    assert_eq!(meta.take_rejected(), ["no JSON"]);
}

/// A controller that asks outside, and the end of who carries questions.
fn asking() -> (Meta, Mailbox) {
    let selector = External::new(&Kind::ALL);
    let mailbox = selector.mailbox();
    let meta = Meta::new(
        Box::new(selector),
        Guards::default(),
        Kind::Sjf,
        Hints::default(),
    );
    (meta, mailbox)
}

#[test]
fn rules_decide_where_no_answer_came_before_the_next_decision() {
    let (mut meta, mailbox) = asking();
    let long = behind_long_ones();
    let waits = until(&mut meta, 0, 40, short(0.3, 200, 500.0), &long);
    assert!(waits.is_empty(), "it may still answer: {waits:?}");
    let switches = until(&mut meta, 40, 41, short(0.3, 200, 500.0), &long);
    assert_eq!(switches.len(), 1);
    assert_eq!(
        (switches[0].to, switches[0].why),
        (Kind::TwoLane, Why::Decided)
    );
    assert_eq!(meta.take_rejected(), [UNANSWERED]);
    assert_eq!(
        mailbox.take().map(|q| q.number),
        Some(2),
        "it was asked again"
    );
}

#[test]
fn an_answer_that_comes_just_before_the_next_decision_is_acted_upon() {
    let (mut meta, mailbox) = asking();
    let long = behind_long_ones();
    until(&mut meta, 0, 40, short(0.3, 200, 500.0), &long);
    let number = mailbox.take().expect("a question").number;
    mailbox.answer(number, Ok(r#"{"policy": "wfq"}"#.to_owned()));
    let switches = until(&mut meta, 40, 41, short(0.3, 200, 500.0), &long);
    assert_eq!(switches.len(), 1);
    assert_eq!(switches[0].to, Kind::Wfq);
    assert!(meta.take_rejected().is_empty());
}
