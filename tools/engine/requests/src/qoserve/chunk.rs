//! Dynamic chunking (QoServe §3.3, Algorithm 1 lines 2 to 7): an iteration computes as many prompt
//! tokens as the next tokens of decoding requests permit.
//!
//! The slack of a decoding request is the time until its next token is due (eq. 2). The paper
//! leaves these points open:
//!
//! * The tokens of a batch request have no deadlines. Each gets `(D_total − now) / tokens left`. A
//!   late batch request has no slack and is ignored.
//! * An interactive request with a late first token has missed all later ones under eq. 2. It would
//!   keep all chunks at the minimum. Its deadlines count from the actual first token instead.
//! * The time of an iteration depends on the prefixes of its chunks, too, and not only on decodes
//!   (the arguments of `GET_PREFILL_BUDGET`). So the prompts that would get the budget are an
//!   argument here.

use crate::Time;
use crate::job::Job;
use crate::latency::{Composition, Latency};
use crate::request::Slo;

/// The number of prompt tokens in an iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunking {
    /// A fixed number of tokens, decodes included, as in Sarathi.
    Fixed(u32),
    Dynamic {
        /// Prompt tokens without any slack. With 256, a missed deadline costs a third of the
        /// throughput. With 0, prompts would starve.
        least: u32,
        /// Maximum number of tokens, decodes included. Throughput saturates there (§4.1.4).
        most: u32,
        step: u32,
    },
}

impl Default for Chunking {
    fn default() -> Self {
        Self::Dynamic { least: 64, most: 2500, step: 32 }
    }
}

/// Returns how long a job can wait for its next token in ns, or a negative value if the token is
/// late. Returns `None` for a late batch request.
pub(super) fn slack(now: Time, job: &Job, tokens_left: u32) -> Option<i64> {
    match job.spec.slo {
        Slo::Interactive { tbt, .. } => {
            let due = job.next_deadline();
            let rebased = match job.first_token {
                Some(first) if first > job.spec.first_deadline() => {
                    Time(first.0.saturating_add(tbt.saturating_mul(job.generated.into())))
                }
                _ => due,
            };
            Some(rebased.max(due).remaining_ns(now))
        }
        Slo::Batch { .. } => {
            let left = job.next_deadline().remaining_ns(now);
            (left > 0).then(|| left / i64::from(tokens_left.max(1)))
        }
    }
}

/// Returns the largest number of prompt tokens, in steps from `least`, with which an iteration fits
/// into `slack_ns`, or `least` if none fits. `line` has the prefix and the remaining tokens of each
/// prompt. `decodes` run in the same iteration. The search assumes that times grow with tokens. For
/// a model where they don't, the result still fits.
pub(super) fn fitting(
    latency: &dyn Latency,
    margin: f64,
    decodes: Composition,
    line: &[(u32, u32)],
    [least, most, step]: [u32; 3],
    slack_ns: i64,
) -> u32 {
    let fits = |tokens: u32| {
        let mut left = tokens;
        let mut of = decodes;
        for (prefix, want) in line {
            let some = left.min(*want);
            if some == 0 {
                break;
            }
            of = of.with_chunk(*prefix, some);
            left -= some;
        }
        latency.iteration(&of).0 as f64 * (1.0 + margin) <= slack_ns as f64
    };
    let least = least.min(most);
    if slack_ns <= 0 {
        return least;
    }
    if fits(most) {
        return most;
    }
    // `below` steps fit or are 0. `above` steps don't fit.
    let step = step.max(1);
    let (mut below, mut above) = (0, (most - least).div_ceil(step));
    while above - below > 1 {
        let middle = below + (above - below) / 2;
        if fits(least + middle * step) {
            below = middle;
        } else {
            above = middle;
        }
    }
    least + below * step
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Span;
    use crate::request::{RequestId, Spec};
    use proptest::prelude::*;

    /// A latency model with 10 µs per token and 1 ns per pair.
    struct Line;

    impl Latency for Line {
        fn iteration(&self, of: &Composition) -> Span {
            Span(u64::from(of.prefill_tokens + of.decodes) * 10_000 + of.prefill_pairs)
        }
    }

    fn decoding(slo: Slo, generated: u32, first_ms: u64) -> Job {
        let mut job = Job::new(Spec {
            id: RequestId(1),
            prompt: 10,
            output_max: 100,
            slo,
            ..Spec::default()
        });
        job.generated = generated;
        job.first_token = Some(Time(first_ms * 1_000_000));
        job
    }

    const MS: i64 = 1_000_000;

    #[test]
    fn tokens_that_came_early_can_be_waited_for_longer() {
        let slo = Slo::Interactive { ttft: 6_000_000_000, tbt: 50_000_000 };
        let job = decoding(slo, 3, 1_000);
        // Token 3, counted from 0, is due at 6.15 s.
        assert_eq!(slack(Time(1_100_000_000), &job, 9), Some(6_150 * MS - 1_100 * MS));
    }

    #[test]
    fn a_late_first_token_moves_the_deadlines_of_the_others() {
        let slo = Slo::Interactive { ttft: 6_000_000_000, tbt: 50_000_000 };
        let job = decoding(slo, 2, 8_000);
        assert_eq!(slack(Time(8_040_000_000), &job, 9), Some(60 * MS));
    }

    #[test]
    fn a_batch_request_shares_its_time_among_its_tokens_until_it_is_late() {
        let job = decoding(Slo::Batch { ttlt: 10_000_000_000 }, 2, 8_000);
        assert_eq!(slack(Time(9_000_000_000), &job, 10), Some(100 * MS));
        assert_eq!(slack(Time(9_000_000_000), &job, 0), Some(1_000 * MS));
        assert_eq!(slack(Time(10_000_000_001), &job, 10), None);
    }

    #[test]
    fn the_prefix_of_a_prompt_makes_its_chunk_smaller() {
        let chunk = |prefix| {
            fitting(&Line, 0.0, Composition::default(), &[(prefix, 5_000)], [64, 2_500, 1], 20 * MS)
        };
        assert!(chunk(0) > 1_000 && chunk(20_000) < chunk(0), "{} {}", chunk(0), chunk(20_000));
    }

    proptest! {
        #[test]
        fn a_chunk_fits_or_is_the_least_and_the_next_larger_does_not(
            line in prop::collection::vec((0..8_000_u32, 1..3_000_u32), 0..6),
            decodes in 0..200_u32, slack_us in -1_000..60_000_i64,
            least in 1..300_u32, more in 0..3_000_u32, step in 1..100_u32,
        ) {
            let mut of = Composition::default();
            for _ in 0..decodes {
                of = of.with_decode(100);
            }
            let most = least + more;
            let slack_ns = slack_us * 1_000;
            let found = fitting(&Line, 0.05, of, &line, [least, most, step], slack_ns);
            let time = |tokens: u32| {
                let (mut of, mut left) = (of, tokens);
                for (prefix, want) in &line {
                    let some = left.min(*want);
                    if some > 0 {
                        of = of.with_chunk(*prefix, some);
                    }
                    left -= some;
                }
                Line.iteration(&of).0 as f64 * 1.05
            };
            prop_assert!((least..=most).contains(&found));
            prop_assert!(found == least || time(found) <= slack_ns as f64);
            let next = (found + step).min(most);
            prop_assert!(found == most || time(next) > slack_ns as f64);
        }
    }
}
