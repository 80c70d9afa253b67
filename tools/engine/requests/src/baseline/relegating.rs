//! A fixed budget under an order, with eager relegation as the only part of QoServe (§3.4). A
//! simple extension of EDF.
//!
//! A job is relegated if the rest of its prompt, computed alone from now on, ends after the
//! deadline of its first token. Jobs ahead of it don't count, so no job is relegated that could
//! still be in time. Each iteration checks the whole queue. That is too slow for an engine with
//! thousands of waiting jobs, so this policy is for comparison only.

use crate::baseline::Fixed;
use crate::discipline::{Discipline, Rank, View};
use crate::job::Job;
use crate::latency::{Composition, Latency};
use crate::request::RequestId;
use crate::{Span, Time};

pub struct Relegating<L> {
    pub inner: Fixed,
    pub latency: L,
}

impl<L: Latency> Relegating<L> {
    /// Returns how long the rest of a prompt takes, in chunks of the budget.
    fn rest(&self, job: &Job) -> Span {
        let mut prefix = job.context;
        let mut takes = Span::ZERO;
        while prefix < job.target {
            let tokens = (job.target - prefix).min(self.inner.tokens.max(1));
            let chunk = Composition::default().with_chunk(prefix, tokens);
            takes = Span(takes.0.saturating_add(self.latency.iteration(&chunk).0));
            prefix += tokens;
        }
        takes
    }
}

impl<L: Latency> Discipline for Relegating<L> {
    fn rank(&self, job: &Job) -> Rank {
        self.inner.rank(job)
    }

    fn budget(&mut self, now: Time, view: &dyn View) -> u32 {
        self.inner.budget(now, view)
    }

    fn begun_first(&self) -> bool {
        self.inner.begun_first()
    }

    fn relegate(&mut self, now: Time, view: &dyn View) -> Vec<RequestId> {
        view.in_line()
            // The first token of a job with generated tokens can't become late any more.
            .filter(|job| job.generated == 0 && now + self.rest(job) > job.spec.first_deadline())
            .map(Job::id)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::baseline::LineOrder;
    use crate::iteration::Event;
    use crate::kv::Pool;
    use crate::replica::Replica;
    use crate::request::{Slo, Spec};

    struct PerToken;

    impl Latency for PerToken {
        fn iteration(&self, of: &Composition) -> Span {
            Span(u64::from(of.prefill_tokens + of.decodes))
        }
    }

    #[test]
    fn who_cannot_be_in_time_lets_the_others_pass_and_is_served_at_last() {
        let inner = Fixed { order: LineOrder::Edf, tokens: 100 };
        let latency = PerToken;
        let pool = Pool::new(1_000, 16);
        let mut replica = Replica::new(pool, 0, Box::new(Relegating { inner, latency }));
        for (number, prompt, ttft) in [(0, 300, 299), (1, 100, 500), (2, 100, 400)] {
            let spec = Spec {
                id: RequestId(number),
                prompt,
                output_max: 1,
                slo: Slo::Interactive { ttft, tbt: 0 },
                ..Spec::default()
            };
            replica.handle(Time::ZERO, &Event::Arrived(spec));
        }
        let mut served = Vec::new();
        let mut now = Time::ZERO;
        while let Some(plan) = replica.plan(now) {
            let took = PerToken.iteration(&plan.composition());
            now = now + took;
            let last = plan.chunks.iter().filter(|chunk| chunk.last);
            served.extend(last.map(|chunk| chunk.request.0));
            let finished = Vec::new();
            replica.handle(now, &Event::Done { took, finished });
        }
        assert_eq!(served, [2, 1, 0]);
    }
}
