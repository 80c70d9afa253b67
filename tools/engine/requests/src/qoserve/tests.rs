//! Tests of QoServe on a replica: each part alone, and the points that the paper leaves open.

use super::*;
use crate::iteration::Plan;
use crate::kv::Pool;
use crate::replica::Replica;
use crate::request::{Slo, Spec};

/// A latency model with 100 µs per token and 5 ms per iteration.
#[derive(Clone, Copy, Debug)]
struct Slow;

impl Latency for Slow {
    fn iteration(&self, of: &Composition) -> Span {
        Span(5_000_000 + u64::from(of.prefill_tokens + of.decodes) * 100_000)
    }
}

const MS: u64 = 1_000_000;

const CHAT: Slo = Slo::Interactive { ttft: 6_000 * MS, tbt: 50 * MS };
const MINUTES: Slo = Slo::Batch { ttlt: 600_000 * MS };

struct Bench {
    replica: Replica,
    now: Time,
    next: u64,
}

impl Bench {
    fn new(options: QoServeOptions) -> Self {
        let policy = QoServe::new(options, Slow);
        Self {
            replica: Replica::new(Pool::new(20_000, 16), 0, Box::new(policy)),
            now: Time::ZERO,
            next: 0,
        }
    }

    fn arrive(&mut self, prompt: u32, slo: Slo, importance: Importance) -> RequestId {
        let id = RequestId(self.next);
        self.next += 1;
        let spec = Spec {
            id,
            arrival: self.now,
            prompt,
            output_max: 1_000,
            importance,
            slo,
            ..Spec::default()
        };
        self.replica.handle(self.now, &Event::Arrived(spec));
        id
    }

    fn important(&mut self, prompt: u32, slo: Slo) -> RequestId {
        self.arrive(prompt, slo, Importance::Important)
    }

    /// Runs one plan for as long as the model predicts.
    fn step(&mut self) -> Plan {
        let plan = self.replica.plan(self.now).expect("there is work");
        let took = Slow.iteration(&plan.composition());
        self.now = self.now + took;
        let finished = Vec::new();
        self.replica.handle(self.now, &Event::Done { took, finished });
        plan
    }

    fn whose(plan: &Plan) -> Vec<RequestId> {
        plan.chunks.iter().map(|chunk| chunk.request).collect()
    }

    fn relegated(&self, request: RequestId) -> bool {
        self.replica.job(request).is_some_and(|job| job.relegated)
    }
}

#[test]
fn without_decodes_a_chunk_is_the_largest_and_with_them_what_they_can_wait_for() {
    let mut bench = Bench::new(QoServeOptions::default());
    let chat = bench.important(500, CHAT);
    bench.important(250_000, MINUTES);
    let plan = bench.step();
    let tokens: u32 = plan.chunks.iter().map(|chunk| chunk.tokens).sum();
    assert_eq!(tokens, 2_500);
    assert_eq!(Bench::whose(&plan)[0], chat, "the earlier deadline first");
    // The first token came at 0.26 s of 6 s. All slack may be spent at once, and it is more than
    // the largest chunk takes.
    assert_eq!(bench.step().chunks[0].tokens, 2_499);
    let mut least = u32::MAX;
    for _ in 0..100 {
        let chunk = bench.step().chunks[0].tokens;
        let next = bench.replica.job(chat).unwrap().next_deadline();
        assert!(bench.now.0 < next.0, "a token came too late");
        least = least.min(chunk);
    }
    // 50 ms per token permit 400 prompt tokens on average.
    assert!((300..=450).contains(&least), "{least}");
}

#[test]
fn hybrid_priority_prefers_the_shorter_of_two_with_like_deadlines() {
    for (alpha, first) in [(0, 0), (8 * MS, 1)] {
        let mut bench = Bench::new(QoServeOptions { alpha, ..QoServeOptions::default() });
        let long = bench.important(5_000, CHAT);
        bench.now = Time(100 * MS);
        let short = bench.important(100, CHAT);
        assert_eq!(Bench::whose(&bench.step())[0], [long, short][first]);
    }
}

#[test]
fn who_cannot_make_it_is_given_up_before_more_is_spent_on_it_and_served_when_nothing_else_is_to_do()
{
    let mut bench = Bench::new(QoServeOptions::default());
    let lost = bench.important(1_000, CHAT);
    bench.now = Time(5_950 * MS);
    let fresh = bench.important(3_000, CHAT);
    let plan = bench.step();
    assert_eq!(Bench::whose(&plan), [fresh]);
    assert!(bench.relegated(lost));
    let mut served = false;
    for _ in 0..10 {
        served |= Bench::whose(&bench.step()).contains(&lost);
    }
    assert!(served);
    // Under the strict rule a job isn't late 50 ms before its deadline.
    let mut bench =
        Bench::new(QoServeOptions { relegation: Relegation::Strict, ..QoServeOptions::default() });
    let lost = bench.important(1_000, CHAT);
    // An iteration with the largest chunk takes 255 ms.
    bench.now = Time(5_700 * MS);
    bench.step();
    assert!(!bench.relegated(lost));
}

#[test]
fn an_iteration_with_little_to_do_says_nothing_about_how_fast_prompts_are() {
    const SECOND: Slo = Slo::Interactive { ttft: 1_000 * MS, tbt: 50 * MS };
    // With 5 ms and 100 µs per token, 7500 tokens take 765 ms in chunks of 2500. The result must
    // not depend on earlier small iterations.
    let given_up = |before: &[u32], waited_ms: u64| {
        let mut bench = Bench::new(QoServeOptions::default());
        for tokens in before {
            bench.important(*tokens, MINUTES);
            bench.step();
        }
        let request = bench.important(7_500, SECOND);
        bench.now = bench.now + Span::from_millis(waited_ms);
        bench.step();
        bench.relegated(request)
    };
    for before in [&[][..], &[2_500], &[100], &[100, 100]] {
        let late = [230, 240].map(|waited| given_up(before, waited));
        assert_eq!(late, [false, true], "after {before:?}");
    }
}

#[test]
fn with_hints_unimportant_ones_are_given_up_for_an_important_one_in_need() {
    for (hints, given_up) in [(Some(0.25), true), (None, false)] {
        let mut bench = Bench::new(QoServeOptions { hints, ..QoServeOptions::default() });
        let mut low = Vec::new();
        let important = bench.important(3_000, CHAT);
        for _ in 0..5 {
            low.push(bench.arrive(4_000, CHAT, Importance::Low));
        }
        bench.step();
        assert!(!low.iter().any(|id| bench.relegated(*id)), "no need yet");
        bench.now = Time(5_000 * MS);
        let needy = bench.important(3_000, CHAT);
        assert!(!bench.relegated(needy));
        bench.step();
        assert!(!bench.relegated(important));
        assert_eq!(low.iter().any(|id| bench.relegated(*id)), given_up);
    }
}

#[test]
fn an_important_one_that_is_given_up_itself_asks_for_room_for_those_like_it() {
    for (importance, given_up) in [(Importance::Important, true), (Importance::Low, false)] {
        let mut bench = Bench::new(QoServeOptions::default());
        let lost = bench.arrive(3_000, CHAT, importance);
        bench.now = Time(5_900 * MS);
        let low = bench.arrive(4_000, CHAT, Importance::Low);
        bench.step();
        assert!(bench.relegated(lost));
        assert_eq!(bench.relegated(low), given_up, "{importance:?}");
    }
}

#[test]
fn a_prompt_that_would_be_late_for_it_is_not_preempted() {
    let mut bench = Bench::new(QoServeOptions::default());
    let long = bench.important(4_000, CHAT);
    bench.step();
    // 1500 tokens take 155 ms, so the long job has 45 ms to spare, less than an iteration. The
    // other job is shorter and comes first.
    bench.now = Time(5_800 * MS);
    bench.important(20, CHAT);
    assert_eq!(Bench::whose(&bench.step())[0], long);
    // With time to spare the long job is preempted.
    let mut bench = Bench::new(QoServeOptions::default());
    bench.important(4_000, CHAT);
    bench.step();
    let short = bench.important(20, CHAT);
    assert_eq!(Bench::whose(&bench.step())[0], short);
}
