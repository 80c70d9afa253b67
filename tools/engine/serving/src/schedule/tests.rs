//! Tests of every policy: each decides otherwise than the others, and the same again. Time is
//! virtual, and iterations take uneven times.

use laxity_requests::hmas::pool::Kind;
use laxity_requests::iteration::{Event, Plan};
use laxity_requests::job::Phase;
use laxity_requests::request::{ApplicationId, ClassId, Importance, Slo, Spec};

use super::settings::Hmas;
use super::*;

const ROOM: Room = Room { blocks: 60, block_tokens: 8 };

fn spec(number: u64, at: Time) -> Spec {
    let number = number as u32;
    let ms = 1_000_000;
    Spec {
        id: RequestId(u64::from(number)),
        arrival: at,
        prompt: 10 + number * 37 % 150,
        output_max: 1 + number * 13 % 30,
        ready: 0,
        generated: 0,
        class: ClassId((number % 2) as u16),
        application: ApplicationId(number % 3),
        importance: if number.is_multiple_of(4) { Importance::Low } else { Importance::Important },
        slo: if number.is_multiple_of(2) {
            Slo::Interactive { ttft: (60 + u64::from(number) * 31 % 300) * ms, tbt: 15 * ms }
        } else {
            Slo::Batch { ttlt: (400 + u64::from(number) * 17 % 900) * ms }
        },
    }
}

#[derive(Debug, Default, PartialEq)]
struct Ran {
    plans: Vec<Plan>,
    ended: usize,
    relegated: usize,
    /// Number of times that a relegated request was seen waiting.
    aside: u64,
}

/// Runs requests in waves, more than are served in time. Some clients give up.
fn run(schedulers: &mut Scheduler, requests: u64) -> Ran {
    let mut ran = Ran::default();
    let (mut now, mut next, mut open) = (Time::ZERO, 0, std::collections::BTreeMap::new());
    let mut relegated = std::collections::BTreeSet::new();
    for step in 0..20_000_u64 {
        while next < requests && next * 9_000_000 <= now.0 {
            let spec = spec(next, now);
            open.insert(spec.id, spec.output_max);
            schedulers.handle(now, &Event::Arrived(spec));
            next += 1;
        }
        if step % 97 == 96
            && let Some((request, _)) = open.pop_last()
        {
            schedulers.handle(now, &Event::Cancelled(request));
        }
        assert_eq!(schedulers.refusals(), []);
        let Some(plan) = schedulers.plan(now) else {
            if open.is_empty() && next == requests {
                break;
            }
            now = now + Span::from_millis(5);
            continue;
        };
        let of = plan.composition();
        let tokens = u64::from(of.prefill_tokens + of.decodes);
        let took = Span((2_000_000 + tokens * 100_000) * (95 + step % 11) / 100);
        now = now + took;
        let last = plan.chunks.iter().filter(|chunk| chunk.last);
        let gave = last.map(|chunk| chunk.request);
        let gave = gave.chain(plan.steps.iter().map(|step| step.request));
        let mut finished = Vec::new();
        for request in gave {
            let left = open.get_mut(&request).expect("it is open");
            *left -= 1;
            // Some answers are shorter than allowed.
            if *left == 0 || (request.0 % 5 == 0 && *left % 4 == 1) {
                finished.push(request);
            }
        }
        // Relegated requests that wait are counted apart from others that wait.
        let aside = open.keys().filter(|request| {
            let job = schedulers.job(**request);
            job.is_some_and(|job| job.relegated && job.phase == Phase::Waiting)
        });
        let (aside, load) = (aside.count() as u32, schedulers.load());
        assert_eq!((load.relegated, load.in_line()), (aside, load.waiting - aside));
        ran.aside += u64::from(aside);
        relegated.extend(open.keys().filter(|request| schedulers.is_relegated(**request)).copied());
        for request in &finished {
            open.remove(request);
        }
        ran.ended += finished.len();
        schedulers.handle(now, &Event::Done { took, finished });
        ran.plans.push(plan);
    }
    assert!(open.is_empty(), "{} were never done", open.len());
    ran.relegated = relegated.len();
    ran
}

#[test]
fn every_policy_decides_the_same_again_and_otherwise_than_the_others() {
    let mut plans = Vec::new();
    let of = |policy| Settings { policy, tokens: 64, watermark: 2, ..Settings::default() };
    let (policy, hmas) = (Policy::Hmas, Hmas { order: Kind::Edf });
    let other = Settings { policy, hmas, tokens: 64, watermark: 0 };
    for settings in Policy::ALL.map(of).into_iter().chain([other]) {
        let run = || run(&mut Scheduler::new(&settings, ROOM), 150);
        let ran = run();
        assert!(ran.ended > 100, "{settings:?}: {}", ran.ended);
        assert_eq!(run(), ran, "{settings:?}");
        if settings.policy == Policy::Qoserve {
            assert!(ran.relegated > 0, "nobody was given up under {settings:?}");
            assert!(ran.aside > 0, "nobody waited aside under {settings:?}");
        } else {
            assert_eq!(ran.relegated, 0);
        }
        plans.push(ran.plans);
    }
    // Each setting has an effect: no two of them decide the same.
    for (at, one) in plans.iter().enumerate() {
        let same = plans[..at].iter().position(|other| other == one);
        assert_eq!(same, None, "setting {at}");
    }
}

#[test]
fn how_long_iterations_take_is_learned_where_a_policy_asks_for_it() {
    let settings = |policy| Settings { policy, tokens: 64, ..Settings::default() };
    for (policy, learns) in [(Policy::Fcfs, false), (Policy::Qoserve, true), (Policy::Hmas, true)] {
        let mut schedulers = Scheduler::new(&settings(policy), ROOM);
        let ran = run(&mut schedulers, 20);
        let expected = if learns { ran.plans.len() } else { 0 };
        assert_eq!(schedulers.learned(), expected as u64, "{policy:?}");
    }
}

#[test]
fn an_iteration_that_failed_teaches_nothing() {
    let settings = Settings { policy: Policy::Qoserve, ..Settings::default() };
    let mut schedulers = Scheduler::new(&settings, ROOM);
    schedulers.handle(Time(1), &Event::Arrived(spec(3, Time(1))));
    assert!(schedulers.plan(Time(2)).is_some());
    schedulers.handle(Time(3), &Event::Cancelled(RequestId(3)));
    let (took, finished) = (Span::from_millis(30_000), Vec::new());
    schedulers.handle(Time(4), &Event::Done { took, finished });
    assert_eq!(schedulers.learned(), 0);
}

#[test]
fn whoever_waits_is_asked_for_again_though_nothing_happens() {
    let mut schedulers = Scheduler::new(&Settings::default(), ROOM);
    let other = RequestId(900);
    assert!(schedulers.reserve(other, ROOM.blocks * ROOM.block_tokens));
    schedulers.handle(Time(1), &Event::Arrived(spec(3, Time(1))));
    assert_eq!(schedulers.plan(Time(2)), None, "there is no block");
    assert_eq!(schedulers.ask_again, Some(Time(2) + ASK_AGAIN));
    schedulers.handle(Time(3), &Event::Cancelled(other));
    assert!(schedulers.plan(Time(4)).is_some());
    assert_eq!(schedulers.ask_again, None);
}
