//! What policies of the first tier differ in: who is first, how many tokens, who may start, who is
//! given up. The mechanics that they share: [`crate::replica`].

use crate::Time;
use crate::iteration::Event;
use crate::job::{Job, Phase};
use crate::kv::Pool;
use crate::latency::Composition;

/// Where a job stands in line: smaller is earlier, ties by arrival and number. A rank must not
/// change but for what [`Discipline::observe`] announces and by progress of the job itself, so that
/// the line can be kept in order rather than be sorted for each iteration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank(pub i64);

/// Which ranks are others than before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reranked {
    /// None.
    #[default]
    None,
    /// Possibly all.
    All,
}

/// What a discipline may look at.
pub trait View {
    /// Jobs that decode, each with a token in the iteration that is being made, in the order of
    /// their ranks; none outside of one.
    fn decoding(&self) -> Box<dyn Iterator<Item = &Job> + '_>;
    /// What the decodes of this iteration come to.
    fn decodes(&self) -> Composition;
    /// Jobs with prompt tokens to compute, not relegated, in line.
    fn in_line(&self) -> Box<dyn Iterator<Item = &Job> + '_>;
    /// Those of them that have begun, in line.
    fn begun(&self) -> Box<dyn Iterator<Item = &Job> + '_> {
        Box::new(self.in_line().filter(|job| job.phase == Phase::Prefilling))
    }
    /// Relegated jobs, in the order in which they are served.
    fn aside(&self) -> Box<dyn Iterator<Item = &Job> + '_> {
        Box::new(std::iter::empty())
    }
    /// How many there are in line, and their prompt tokens in all.
    fn backlog(&self) -> (usize, u64);
    /// Relegated jobs.
    fn relegated(&self) -> usize;
    /// The book of blocks.
    fn pool(&self) -> &Pool;
}

/// Whether a job may have its first tokens computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Yes.
    Now,
    /// Not yet; those behind it in line may be asked for.
    Later,
    /// Not yet, and nobody behind it either.
    Nobody,
    /// Not yet, nor anybody before this rank: the next to be asked for is the first at or behind
    /// it.
    Skip(Rank),
}

/// A policy of the first tier.
pub trait Discipline {
    /// How it is called on tables.
    fn name(&self) -> &'static str;

    /// Where a job stands in line.
    fn rank(&self, job: &Job) -> Rank;

    /// Sees all that happens, before it is acted upon. `jobs` says how a job stands.
    fn observe(&mut self, now: Time, event: &Event, view: &dyn View) -> Reranked {
        let _ = (now, event, view);
        Reranked::None
    }

    /// A job gave out its last token, and is gone after this.
    fn finished(&mut self, now: Time, job: &Job) {
        let _ = (now, job);
    }

    /// Prompt tokens to compute in this iteration, beside the decodes. Asked once for each.
    fn budget(&mut self, now: Time, view: &dyn View) -> u32;

    /// Whether a job that waits may start. Asked for each in line until the budget is spent.
    fn start(&mut self, now: Time, job: &Job, view: &dyn View) -> Start {
        let _ = (now, job, view);
        Start::Now
    }

    /// It takes the place of another discipline. These jobs are here, in order of arrival; their
    /// ranks are asked for after this.
    fn takes_over(&mut self, jobs: &[Job], view: &dyn View) {
        let _ = (jobs, view);
    }

    /// A job holds blocks from now on: its first chunk is planned, or it came with its KV and goes
    /// on.
    fn began(&mut self, job: &Job) {
        let _ = job;
    }

    /// A job gave its blocks back, and is in line again.
    fn dropped(&mut self, job: &Job) {
        let _ = job;
    }

    /// So many tokens of a job were computed; called before [`Self::finished`].
    fn progressed(&mut self, now: Time, job: &Job, tokens: u32) {
        let _ = (now, job, tokens);
    }

    /// A request was turned away, on arrival or later.
    fn refused(&mut self, request: crate::request::RequestId) {
        let _ = request;
    }

    /// The next job whose rank is another than before, without progress of its own: where
    /// [`Reranked::All`] would be too much. Asked for after each [`Self::observe`] until there is
    /// none.
    fn poll_reranked(&mut self) -> Option<crate::request::RequestId> {
        None
    }

    /// Jobs to give up now: they are served when nothing else is to do. Called before the line is
    /// read.
    fn relegate(&mut self, now: Time, view: &dyn View) -> Vec<crate::request::RequestId> {
        let _ = (now, view);
        Vec::new()
    }

    /// A relegated job keeps what was computed of it. It does not by default: that would hold
    /// blocks which those need for whom it was given up (at 6 requests per second 27 % against 17 %
    /// missed their objective).
    fn relegated_keep_blocks(&self) -> bool {
        false
    }

    /// Whether those in line that have begun go on before those that come before them in line.
    /// Fixed-chunk schedulers of vLLM and Sarathi do; who preempts prompts for more urgent ones
    /// does not (QoServe §3.4).
    fn begun_first(&self) -> bool {
        true
    }

    /// Whether a job that has begun goes on before those that come before it in line, asked for
    /// each that has begun where [`Self::begun_first`] is not for all (QoServe §3.4: one that would
    /// miss its deadline if it waited for an iteration is not preempted).
    fn goes_on(&mut self, now: Time, job: &Job) -> bool {
        let _ = (now, job);
        false
    }

    /// Jobs that may decode in one iteration; those beyond, in the order of ranks, wait for the
    /// next.
    fn decodes_max(&self) -> usize {
        usize::MAX
    }
}
