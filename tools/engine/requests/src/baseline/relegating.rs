//! A fixed budget under an order, that gives up whoever can't be in time any more (QoServe §3.4,
//! eager relegation, without anything else of it): what a sceptic would add to EDF.
//!
//! A job is given up when computing the rest of its prompt alone, from now on, ends after the
//! deadline of its first token. Those before it in line are not counted: nobody is given up who
//! could have made it. The whole line is looked at for each iteration, which takes longer than a
//! decision may once thousands wait: it is a yardstick, not for an engine.

use crate::baseline::Fixed;
use crate::discipline::{Discipline, Rank, View};
use crate::job::Job;
use crate::latency::{Composition, Latency};
use crate::request::RequestId;
use crate::{Span, Time};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Relegating<L> {
    /// The order and its budget.
    pub inner: Fixed,
    /// What is asked how long the rest of a prompt takes.
    pub latency: L,
}

impl<L: Latency> Relegating<L> {
    /// How long the rest of a prompt takes, in chunks of the budget.
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
    fn name(&self) -> &'static str {
        match self.inner.order {
            crate::baseline::LineOrder::Fcfs => "fcfs_relegate",
            crate::baseline::LineOrder::Edf => "edf_relegate",
            crate::baseline::LineOrder::Srpf => "srpf_relegate",
        }
    }

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
            // What gave out a token is late or not by now.
            .filter(|job| job.generated == 0 && now + self.rest(job) > job.spec.first_deadline())
            .map(Job::id)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::baseline::LineOrder;
    use crate::iteration::{Event, Iteration as _};
    use crate::kv::Pool;
    use crate::replica::Replica;
    use crate::request::{ApplicationId, ClassId, Importance, Slo, Spec};

    /// One ns per token.
    #[derive(Clone, Copy, Debug)]
    struct PerToken;

    impl Latency for PerToken {
        fn iteration(&self, of: &Composition) -> Span {
            Span(u64::from(of.prefill_tokens + of.decodes))
        }
    }

    #[test]
    fn who_cannot_be_in_time_lets_the_others_pass_and_is_served_at_last() {
        let inner = Fixed {
            order: LineOrder::Edf,
            tokens: 100,
        };
        let latency = PerToken;
        let pool = Pool::new(1_000, 16);
        let mut replica = Replica::new(pool, 0, Box::new(Relegating { inner, latency }));
        for (number, prompt, ttft) in [(0, 300, 299), (1, 100, 500), (2, 100, 400)] {
            let spec = Spec {
                id: RequestId(number),
                arrival: Time::ZERO,
                prompt,
                output_max: 1,
                ready: 0,
                generated: 0,
                class: ClassId(0),
                application: ApplicationId(0),
                importance: Importance::Important,
                slo: Slo::Interactive { ttft, tbt: 0 },
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
