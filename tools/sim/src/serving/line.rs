//! The queue of requests, called *line*, before a rank of a prefill unit. A [`Discipline`] of
//! `laxity-requests` chooses requests for the next batch and relegates requests.
//!
//! A [`laxity_requests::replica::Replica`] models a whole replica with memory, decodes and one plan
//! at a time. Units here only prefill and fill the next batch while one computes, so that reused
//! blocks can be fetched ahead. A line keeps the replica's order: requests that have begun (if the
//! discipline continues them), waiting requests, relegated requests. It differs from a replica:
//!
//! * a request in the next batch stays there, even if a more urgent one comes before the start;
//! * memory is not modelled: reused blocks are in the unit's cache, and others are not counted;
//! * relegated requests join a batch only when it starts, because they would take the room of
//!   requests that arrive before.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Bound;

use laxity_policy::{Span, Time};
use laxity_requests::discipline::{Discipline, Rank, Reranked, View};
use laxity_requests::iteration::Event;
use laxity_requests::job::{Job, Phase};
use laxity_requests::kv::Pool;
use laxity_requests::latency::Composition;
use laxity_requests::request::{ApplicationId, ClassId, Importance, RequestId, Slo, Spec};

type WaitingKey = (Rank, Time, RequestId);

/// The state that a discipline may read.
#[derive(Default)]
struct LineState {
    jobs: BTreeMap<RequestId, (Job, Rank)>,
    /// Waiting requests that have not begun. `begun` holds those that have.
    line: BTreeSet<WaitingKey>,
    begun: BTreeSet<WaitingKey>,
    aside: BTreeSet<WaitingKey>,
    pool: Pool,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cursor {
    begun: Option<WaitingKey>,
    line: Option<WaitingKey>,
}

pub(super) struct WaitingRequests {
    discipline: Box<dyn Discipline + Send>,
    state: LineState,
}

impl fmt::Debug for WaitingRequests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitingRequests")
            .field("waiting", &self.state.in_line().count())
            .finish_non_exhaustive()
    }
}

impl View for LineState {
    fn decoding(&self) -> Box<dyn Iterator<Item = &Job> + '_> {
        Box::new(std::iter::empty())
    }

    fn decodes(&self) -> Composition {
        Composition::default()
    }

    fn in_line(&self) -> Box<dyn Iterator<Item = &Job> + '_> {
        // Merges two sorted sets.
        let (mut line, mut begun) = (self.line.iter().peekable(), self.begun.iter().peekable());
        Box::new(
            std::iter::from_fn(move || match (line.peek(), begun.peek()) {
                (Some(waits), Some(began)) if waits < began => line.next(),
                (Some(_), None) => line.next(),
                (_, Some(_)) => begun.next(),
                (None, None) => None,
            })
            .map(|place| &self.jobs[&place.2].0),
        )
    }

    fn aside(&self) -> Box<dyn Iterator<Item = &Job> + '_> {
        Box::new(self.aside.iter().map(|place| &self.jobs[&place.2].0))
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }
}

impl LineState {
    fn set_of(&mut self, job: &Job) -> &mut BTreeSet<WaitingKey> {
        match (job.relegated, job.phase) {
            (true, _) => &mut self.aside,
            (false, Phase::Waiting) => &mut self.line,
            (false, _) => &mut self.begun,
        }
    }

    fn enter(&mut self, job: Job, rank: Rank) {
        self.set_of(&job).insert((rank, job.spec.arrival, job.id()));
        self.jobs.insert(job.id(), (job, rank));
    }

    fn withdraw(&mut self, request: RequestId) -> Option<Job> {
        let (job, rank) = self.jobs.remove(&request)?;
        self.set_of(&job).remove(&(rank, job.spec.arrival, request));
        Some(job)
    }
}

/// Returns the spec of a request for a discipline. Only the deadline of the first token counts.
pub(super) fn spec(number: u32, arrival: Time, deadline: Time, prompt: u32, reused: u32) -> Spec {
    let Span(ttft) = deadline.since(arrival);
    Spec {
        id: RequestId(u64::from(number)),
        arrival,
        prompt,
        output_max: 1,
        ready: reused,
        generated: 0,
        class: ClassId(0),
        application: ApplicationId(0),
        importance: Importance::Important,
        slo: Slo::Interactive { ttft, tbt: 0 },
    }
}

impl WaitingRequests {
    pub(super) fn new(discipline: Box<dyn Discipline + Send>) -> Self {
        Self {
            discipline,
            state: LineState { pool: Pool::new(u32::MAX, 16), ..LineState::default() },
        }
    }

    fn observe(&mut self, now: Time, event: &Event) {
        if self.discipline.observe(now, event, &self.state) == Reranked::All {
            let waiting: Vec<RequestId> = self.places().map(|place| place.2).collect();
            for request in waiting {
                if let Some(job) = self.state.withdraw(request) {
                    let rank = self.discipline.rank(&job);
                    self.state.enter(job, rank);
                }
            }
        }
    }

    fn places(&self) -> impl Iterator<Item = &WaitingKey> {
        let LineState { line, begun, aside, .. } = &self.state;
        begun.iter().chain(line).chain(aside)
    }

    pub(super) fn arrive(&mut self, now: Time, spec: Spec) {
        self.observe(now, &Event::Arrived(spec));
        let job = Job::new(spec);
        let rank = self.discipline.rank(&job);
        self.state.enter(job, rank);
    }

    pub(super) fn give_up(&mut self, start: Time) -> Vec<u32> {
        let mut given_up = self.discipline.relegate(start, &self.state);
        given_up.retain(|&request| {
            let stands = self.places().any(|place| place.2 == request);
            if stands && let Some(mut job) = self.state.withdraw(request) {
                let again = job.relegated;
                job.relegated = true;
                let rank = self.discipline.rank(&job);
                self.state.enter(job, rank);
                return !again;
            }
            false
        });
        given_up.into_iter().map(|RequestId(number)| number as u32).collect()
    }

    /// Returns the prompt tokens of this line that a batch may compute.
    pub(super) fn budget(&mut self, start: Time) -> u32 {
        self.discipline.budget(start, &self.state)
    }

    /// Reports whether no request waits, not counting relegated ones.
    pub(super) fn is_empty(&self) -> bool {
        self.state.line.is_empty() && self.state.begun.is_empty()
    }

    /// Returns the next request that may join a batch which starts at `start`.
    pub(super) fn next(&mut self, start: Time, cursor: &mut Cursor) -> Option<u32> {
        let beyond = |set: &BTreeSet<WaitingKey>, place: Option<WaitingKey>| {
            let from = place.map_or(Bound::Unbounded, Bound::Excluded);
            set.range((from, Bound::Unbounded)).next().copied()
        };
        let number = |place: WaitingKey| place.2.0 as u32;
        let begun = beyond(&self.state.begun, cursor.begun);
        let waits = beyond(&self.state.line, cursor.line);
        let first = begun.filter(|began| {
            let job = self.state.jobs[&began.2].0;
            self.discipline.begun_first()
                || waits.is_none_or(|waits| *began < waits)
                || self.discipline.goes_on(start, &job)
        });
        if let Some(place) = first {
            cursor.begun = Some(place);
            return Some(number(place));
        }
        let place = waits?;
        cursor.line = Some(place);
        let job = self.state.jobs[&place.2].0;
        let starts = self.discipline.may_start(start, &job, &self.state);
        starts.then(|| number(place))
    }

    pub(super) fn first(&self) -> Option<u32> {
        let LineState { line, begun, .. } = &self.state;
        let place = begun.first().into_iter().chain(line.first()).min()?;
        Some(place.2.0 as u32)
    }

    pub(super) fn next_aside(&self, after: &mut Cursor) -> Option<u32> {
        let from = after.line.map_or(Bound::Unbounded, Bound::Excluded);
        let place = *self.state.aside.range((from, Bound::Unbounded)).next()?;
        after.line = Some(place);
        Some(place.2.0 as u32)
    }

    /// Records that a batch takes `tokens` of a request, which may be `all` that are left.
    pub(super) fn took(&mut self, request: u32, tokens: u32, all: bool) {
        let Some(mut job) = self.state.withdraw(RequestId(u64::from(request))) else { return };
        job.context += tokens;
        job.phase = Phase::Prefilling;
        let rank = self.discipline.rank(&job);
        if all {
            // The request computes and no longer waits.
            self.state.jobs.insert(job.id(), (job, rank));
        } else {
            self.state.enter(job, rank);
        }
    }

    pub(super) fn done(&mut self, now: Time, took: Span, finished: &[u32]) {
        let finished = finished.iter().map(|&n| RequestId(u64::from(n))).collect();
        let event = Event::Done { took, finished };
        self.observe(now, &event);
        let Event::Done { finished, .. } = event else { return };
        for request in finished {
            if let Some((mut job, _)) = self.state.jobs.remove(&request) {
                job.phase = Phase::Decoding;
                job.generated = 1;
                (job.first_token, job.last_token) = (Some(now), Some(now));
                self.discipline.finished(now, &job);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use laxity_requests::baseline::{Fixed, LineOrder};

    use super::*;

    fn line(order: LineOrder) -> WaitingRequests {
        WaitingRequests::new(Box::new(Fixed { order, tokens: 100 }))
    }

    fn order_of(line: &mut WaitingRequests) -> Vec<u32> {
        let mut cursor = Cursor::default();
        std::iter::from_fn(|| line.next(Time::ZERO, &mut cursor)).collect()
    }

    fn fill(line: &mut WaitingRequests) {
        for (number, prompt, due) in [(0, 50, 900), (1, 10, 1_000), (2, 30, 300)] {
            let arrival = Time(u64::from(number));
            line.arrive(arrival, spec(number, arrival, Time(due), prompt, 0));
        }
    }

    #[test]
    fn each_order_has_its_own_first() {
        for (order, wanted) in [
            (LineOrder::Fcfs, [0, 1, 2]),
            (LineOrder::Edf, [2, 0, 1]),
            (LineOrder::Srpf, [1, 2, 0]),
        ] {
            let mut line = line(order);
            fill(&mut line);
            assert_eq!(order_of(&mut line), wanted, "{order:?}");
        }
    }

    #[test]
    fn a_prompt_that_was_cut_stands_by_what_is_left_of_it() {
        let mut line = line(LineOrder::Srpf);
        fill(&mut line);
        line.took(0, 45, false);
        assert_eq!(order_of(&mut line), [0, 1, 2], "five tokens are left");
        line.took(0, 5, true);
        assert_eq!(order_of(&mut line), [1, 2]);
        line.done(Time(9), Span(9), &[0]);
        assert_eq!(line.state.jobs.len(), 2);
    }

    struct GivesUp(Vec<u64>);

    impl Discipline for GivesUp {
        fn rank(&self, _: &Job) -> Rank {
            Rank(0)
        }

        fn budget(&mut self, _: Time, _: &dyn View) -> u32 {
            100
        }

        fn relegate(&mut self, _: Time, _: &dyn View) -> Vec<RequestId> {
            self.0.iter().copied().map(RequestId).collect()
        }
    }

    #[test]
    fn who_is_given_up_is_told_once_and_is_not_in_line() {
        let mut line = WaitingRequests::new(Box::new(GivesUp(vec![1, 7])));
        fill(&mut line);
        assert_eq!(line.give_up(Time(5)), [1], "there is no seventh");
        assert_eq!(line.give_up(Time(6)), [0_u32; 0]);
        assert_eq!(order_of(&mut line), [0, 2]);
        assert_eq!(line.next_aside(&mut Cursor::default()), Some(1));
    }
}
