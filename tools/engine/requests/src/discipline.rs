//! The decisions in which policies of the first tier differ. [`crate::replica`] has what they
//! share.

use crate::Time;
use crate::iteration::Event;
use crate::job::Job;
use crate::kv::Pool;
use crate::latency::Composition;
use crate::request::RequestId;

/// The place of a job in the queue. Smaller ranks are first. Ties are broken by arrival and then by
/// id. A rank changes only by progress of the job or as [`Discipline::observe`] reports, so that
/// the queue stays sorted and isn't sorted for each iteration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank(pub i64);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reranked {
    #[default]
    None,
    /// Any rank may have changed.
    All,
}

pub trait View {
    /// Returns the jobs that decode in the iteration that is being planned, by rank. Empty at other
    /// times.
    fn decoding(&self) -> Box<dyn Iterator<Item = &Job> + '_>;
    /// Returns the sums of all decode steps in this iteration.
    fn decodes(&self) -> Composition;
    /// Returns the jobs in the queue, in order. They have prompt tokens to compute and aren't
    /// relegated.
    fn in_line(&self) -> Box<dyn Iterator<Item = &Job> + '_>;
    /// Returns the relegated jobs in the order in which they are served.
    fn aside(&self) -> Box<dyn Iterator<Item = &Job> + '_> {
        Box::new(std::iter::empty())
    }
    fn pool(&self) -> &Pool;
}

pub trait Discipline {
    fn rank(&self, job: &Job) -> Rank;

    /// Updates the state with an event before the replica applies it. Returns which ranks changed.
    fn observe(&mut self, _now: Time, _event: &Event, _view: &dyn View) -> Reranked {
        Reranked::None
    }

    /// Updates the state after a job's last token. The replica removes the job afterwards.
    fn finished(&mut self, _now: Time, _job: &Job) {}

    /// Returns how many prompt tokens this iteration may compute. Called once for each iteration.
    fn budget(&mut self, now: Time, view: &dyn View) -> u32;

    /// Decides whether a waiting job may compute its first tokens. If not, no job behind it may
    /// either. Called for each job in order while budget remains.
    fn may_start(&mut self, _now: Time, _job: &Job, _view: &dyn View) -> bool {
        true
    }

    /// Reports that a job holds blocks: its first chunk was planned, or it came with its KV and
    /// decodes.
    fn began(&mut self, _job: &Job) {}

    /// Reports that a job lost its blocks and is in the queue again.
    fn dropped(&mut self, _job: &Job) {}

    /// Reports that `tokens` tokens of a job were computed. Called before [`Self::finished`].
    fn progressed(&mut self, _now: Time, _job: &Job, _tokens: u32) {}

    /// Reports that the replica refused a request, on arrival or later.
    fn refused(&mut self, _request: RequestId) {}

    /// Returns the next job whose rank changed without progress of its own. It avoids the cost of
    /// [`Reranked::All`]. Called after each [`Self::observe`] until it returns `None`.
    fn poll_reranked(&mut self) -> Option<RequestId> {
        None
    }

    /// Returns the jobs to relegate now. They are served when nothing else is to do. Called before
    /// jobs of the queue are planned.
    fn relegate(&mut self, _now: Time, _view: &dyn View) -> Vec<RequestId> {
        Vec::new()
    }

    /// Whether all jobs that have begun go before those ahead of them in the queue. The fixed-chunk
    /// schedulers of vLLM and Sarathi do so. Schedulers that preempt prompts for more urgent ones
    /// don't (QoServe §3.4).
    fn begun_first(&self) -> bool {
        true
    }

    /// Whether a begun job goes before those ahead of it in the queue. Called for each begun job if
    /// [`Self::begun_first`] is false. QoServe §3.4 doesn't preempt a job that would miss its
    /// deadline by a wait of one iteration.
    fn goes_on(&mut self, _now: Time, _job: &Job) -> bool {
        false
    }

    /// Returns how many jobs may decode in one iteration. The others, by rank, wait for the next.
    fn decodes_max(&self) -> usize {
        usize::MAX
    }
}
