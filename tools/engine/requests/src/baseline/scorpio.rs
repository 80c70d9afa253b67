//! SCORPIO's two guards inside an instance (Tang et al., arXiv 2505.23022), with which HyperFlexis
//! compares itself in figure 3; its authors put round robin in front of it, as it is made for one
//! instance.
//!
//! * *TTFT guard*: the earliest deadline of a first token goes first; who can't make it behind
//!   those before it in line is rejected.
//! * *TPOT guard*: a request with a looser time per token than the tightest here needs fewer of the
//!   steps, `r = TPOT_min / TPOT` of them. It gathers that much credit in each step and has a token
//!   when it has a whole one. The *virtual batch size* is `V = Σ r`: a prompt is admitted if a step
//!   of `V` requests, it among them, takes no longer than the tightest time per token.
//!
//! Departures. Who is rejected there is served when nothing else is to do (it has missed its
//! objective in either case). Step times come from eq. 1 and 2 of HyperFlexis, as for all that are
//! compared. Its predictor of lengths is not there: without it the guard looks at the step that
//! follows, and not at those that come until requests end. Requests that decode are never rejected.

use rustc_hash::FxHashMap;

use crate::Time;
use crate::discipline::{Discipline, Rank, Reranked, Start, View};
use crate::hyperflexis::Linear;
use crate::iteration::Event;
use crate::job::{Job, Phase};
use crate::ledger::Targets;
use crate::request::RequestId;

/// A request that decodes.
#[derive(Clone, Copy, Debug)]
struct Decoding {
    tpot: f64,
    context: f64,
    credit: f64,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Scorpio {
    model: Linear,
    tokens: u32,
    decoding: FxHashMap<RequestId, Decoding>,
    /// The tightest time per token of those that decode, ns.
    tightest: f64,
    /// `Σ r` of them, and `Σ r · context`.
    batch: f64,
    context: f64,
}

fn tpot(job: &Job) -> f64 {
    Targets::of(&job.spec).tpot.max(1) as f64
}

impl Scorpio {
    /// Iterations of so many tokens at most, which take what `model` says.
    #[must_use]
    pub fn new(model: Linear, tokens: u32) -> Self {
        Self {
            model,
            tokens,
            decoding: FxHashMap::default(),
            tightest: f64::INFINITY,
            batch: 0.0,
            context: 0.0,
        }
    }

    /// The virtual batch anew.
    fn sum(&mut self) {
        let all = self.decoding.values();
        self.tightest = all.map(|one| one.tpot).fold(f64::INFINITY, f64::min);
        (self.batch, self.context) = (0.0, 0.0);
        for one in self.decoding.values() {
            let share = self.tightest / one.tpot;
            self.batch += share;
            self.context += share * one.context;
        }
    }

    /// A step of all that decode and of a prompt of so many tokens with such a time per token keeps
    /// the tightest.
    fn admits(&self, tpot: f64, context: f64) -> bool {
        if self.decoding.is_empty() {
            return true;
        }
        let tightest = self.tightest.min(tpot);
        // With a tighter one the others need fewer steps still.
        let scale = tightest / self.tightest;
        let batch = self.batch * scale + tightest / tpot;
        let context = self.context * scale + context * tightest / tpot;
        self.model.decode_ns(batch, context) <= tightest
    }

    fn forget(&mut self, request: RequestId) {
        if self.decoding.remove(&request).is_some() {
            self.sum();
        }
    }
}

impl Discipline for Scorpio {
    fn name(&self) -> &'static str {
        "scorpio"
    }

    fn rank(&self, job: &Job) -> Rank {
        Rank(i64::try_from(job.spec.first_deadline().0).unwrap_or(i64::MAX))
    }

    fn observe(&mut self, _: Time, event: &Event, _: &dyn View) -> Reranked {
        if let Event::Cancelled(request) = event {
            self.forget(*request);
        }
        Reranked::None
    }

    fn budget(&mut self, _: Time, view: &dyn View) -> u32 {
        self.tokens.saturating_sub(view.decodes().decodes)
    }

    fn start(&mut self, _: Time, job: &Job, _: &dyn View) -> Start {
        if self.admits(tpot(job), f64::from(job.target)) {
            Start::Now
        } else {
            Start::Later
        }
    }

    fn progressed(&mut self, _: Time, job: &Job, _: u32) {
        if job.phase == Phase::Decoding {
            let one = self.decoding.entry(job.id()).or_insert(Decoding {
                tpot: tpot(job),
                context: 0.0,
                credit: 0.0,
            });
            one.context = f64::from(job.context);
        }
    }

    fn takes_token(&mut self, job: &Job) -> bool {
        let tightest = self.tightest;
        let Some(one) = self.decoding.get_mut(&job.id()) else {
            return true;
        };
        one.credit += (tightest / one.tpot).min(1.0);
        // Shares are no binary fractions: ten tenths are a little less than one.
        let whole = one.credit >= 1.0 - 1e-9;
        if whole {
            one.credit -= 1.0;
        }
        whole
    }

    fn finished(&mut self, _: Time, job: &Job) {
        self.forget(job.id());
    }

    fn dropped(&mut self, job: &Job) {
        self.forget(job.id());
    }

    fn relegate(&mut self, now: Time, view: &dyn View) -> Vec<RequestId> {
        // Called once before each iteration: what progressed is in.
        self.sum();
        let mut ahead = 0.0;
        let mut rejected = Vec::new();
        for job in view.in_line() {
            let tokens = f64::from(job.prefill_left());
            let all = self.model.prefill_ns(ahead + tokens, 0.0);
            if job.generated == 0 && now.0 as f64 + all > job.spec.first_deadline().0 as f64 {
                rejected.push(job.id());
            } else {
                ahead += tokens;
            }
        }
        rejected
    }

    fn begun_first(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Span;
    use crate::iteration::Iteration as _;
    use crate::kv::Pool;
    use crate::replica::Replica;
    use crate::request::{ApplicationId, ClassId, Importance, Slo, Spec};

    /// A step takes a µs, a prompt's token one ns, a request that decodes 1 ms.
    const MODEL: Linear = Linear {
        prefill: [1e3, 1.0, 0.0],
        decode: [1e3, 0.0, 1e6],
    };

    fn spec(number: u64, prompt: u32, ttft: u64, tbt: u64) -> Spec {
        Spec {
            id: RequestId(number),
            arrival: Time::ZERO,
            prompt,
            output_max: 1_000,
            ready: 0,
            generated: 0,
            class: ClassId(0),
            application: ApplicationId(0),
            importance: Importance::Important,
            slo: Slo::Interactive { ttft, tbt },
        }
    }

    fn replica(specs: &[Spec]) -> Replica {
        let pool = Pool::new(10_000, 16);
        let mut replica = Replica::new(pool, 0, Box::new(Scorpio::new(MODEL, 2_048)));
        for spec in specs {
            replica.handle(Time::ZERO, &Event::Arrived(*spec));
        }
        replica
    }

    /// Runs so many iterations of 1 µs; tokens after the first, by request, and who had its prompt
    /// computed in which.
    fn run(mut replica: Replica, count: u64) -> (Vec<u32>, Vec<(u64, u64)>) {
        let (mut tokens, mut firsts) = (vec![0; 8], Vec::new());
        for at in 0..count {
            let now = Time(at * 1_000);
            let Some(plan) = replica.plan(now) else { break };
            for step in &plan.steps {
                tokens[step.request.0 as usize] += 1;
            }
            let last = plan.chunks.iter().filter(|chunk| chunk.last);
            firsts.extend(last.map(|chunk| (chunk.request.0, at)));
            let done = Event::Done {
                took: Span(1_000),
                finished: Vec::new(),
            };
            replica.handle(Time((at + 1) * 1_000), &done);
        }
        (tokens, firsts)
    }

    #[test]
    fn who_may_take_four_times_as_long_for_a_token_has_a_quarter_of_the_steps() {
        let specs = [
            spec(0, 10, 1 << 40, 10_000_000),
            spec(1, 10, 1 << 40, 40_000_000),
        ];
        let (tokens, _) = run(replica(&specs), 101);
        assert_eq!(&tokens[..2], [100, 25]);
    }

    #[test]
    fn a_prompt_whose_virtual_batch_is_too_slow_waits() {
        // A ms for each that decodes, and no more than 2.5 ms for a token: two at a time, or one
        // and all that are ten times as loose.
        let tight = |number| spec(number, 10, 1 << 40, 2_500_000);
        let (_, firsts) = run(replica(&[tight(0), tight(1), tight(2)]), 20);
        // All three come while nobody decodes.
        assert_eq!(firsts.len(), 3);
        let mut later = replica(&[tight(0), tight(1)]);
        let plan = later.plan(Time::ZERO).expect("prompts");
        assert_eq!(plan.chunks.len(), 2);
        let done = Event::Done {
            took: Span(1_000),
            finished: Vec::new(),
        };
        later.handle(Time(1_000), &done);
        later.handle(Time(1_000), &Event::Arrived(tight(2)));
        later.handle(
            Time(1_000),
            &Event::Arrived(spec(3, 10, 1 << 40, 25_000_000)),
        );
        let plan = later.plan(Time(1_000)).expect("tokens");
        let started: Vec<u64> = plan.chunks.iter().map(|chunk| chunk.request.0).collect();
        assert_eq!(started, [3]);
    }

    #[test]
    fn who_cannot_make_it_behind_those_before_it_is_served_at_last() {
        // 2000 tokens are 3 µs with the constant: the second is too late behind the first, and
        // would not be alone.
        let specs = [
            spec(0, 2_000, 3_500, 1 << 30),
            spec(1, 2_000, 4_000, 1 << 30),
            spec(2, 40, 1 << 30, 1 << 30),
        ];
        let (_, firsts) = run(replica(&specs), 8);
        let order: Vec<u64> = firsts.iter().map(|(request, _)| *request).collect();
        assert_eq!(order, [0, 2, 1]);
    }
}
