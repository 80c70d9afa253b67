//! The mechanics of a replica under any [`Discipline`]: continuous batching with chunked prefill.
//!
//! A plan is made in four steps. First, the jobs that the discipline relegates are marked. Then
//! each decoding job gets a token if memory permits. Then jobs in the queue get prompt tokens up to
//! the discipline's budget. Relegated jobs get the rest of the budget.
//!
//! If memory is short, the last jobs lose their blocks: first relegated ones, then prompts at the
//! end of the queue, then the last decoding jobs by rank. Each computes its KV again later.
//! The first job can always continue, because every admitted request fits alone.
//!
//! This module handles events. Module `plan` makes plans, and module `state` holds the jobs.

mod plan;
mod state;

use std::collections::VecDeque;

use self::state::State;
use crate::Time;
use crate::discipline::{Discipline, Reranked};
use crate::iteration::{Event, Load, Refusal, Refused};
use crate::job::{Job, Phase};
use crate::kv::Pool;
use crate::request::{RequestId, Spec};

/// The part of a job that the current plan computes.
#[derive(Clone, Copy, Debug)]
struct Computed {
    slot: usize,
    request: RequestId,
    tokens: u32,
    token: bool,
}

pub struct Replica {
    discipline: Box<dyn Discipline + Send>,
    state: State,
    busy: bool,
    /// The work of the running plan. This vector and the next two are kept to save allocations.
    computed: Vec<Computed>,
    chunk_slots: Vec<usize>,
    scratch: Vec<usize>,
    plans: u64,
    /// Requests that were cancelled while a plan computes them. Their blocks are freed after it.
    abandoned: Vec<RequestId>,
    refusals: VecDeque<Refusal>,
    budget: u32,
}

impl std::fmt::Debug for Replica {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replica").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Replica {
    /// Creates a replica. A prompt may start while others run only if `watermark` blocks stay free.
    pub fn new(pool: Pool, watermark: u32, discipline: Box<dyn Discipline + Send>) -> Self {
        Self {
            discipline,
            state: State::new(pool, watermark),
            busy: false,
            computed: Vec::new(),
            chunk_slots: Vec::new(),
            scratch: Vec::new(),
            plans: 0,
            abandoned: Vec::new(),
            refusals: VecDeque::new(),
            budget: 0,
        }
    }

    pub fn job(&self, request: RequestId) -> Option<&Job> {
        let slot = self.state.slot(request)?;
        Some(&self.state.at(slot).job)
    }

    pub fn pool(&self) -> &Pool {
        &self.state.pool
    }

    /// Reserves blocks for a request whose KV is on its way. It arrives later or is cancelled.
    /// Returns whether enough blocks were free.
    pub fn reserve(&mut self, request: RequestId, tokens: u32) -> bool {
        self.state.reserve(request, tokens)
    }

    /// Reports whether all sums and lists agree with the jobs. For tests.
    pub fn is_balanced(&self) -> bool {
        self.state.is_balanced()
    }

    fn arrive(&mut self, spec: &Spec) {
        let refuse = |why| Some(Refusal { request: spec.id, why });
        let pool = self.pool();
        let known = self.state.slot(spec.id).is_some();
        let refusal = if known || self.abandoned.contains(&spec.id) {
            refuse(Refused::Known)
        } else if spec.prompt == 0
            || spec.output_max <= spec.generated
            || spec.ready > spec.prompt.saturating_add(spec.generated)
        {
            refuse(Refused::Senseless)
        } else if spec.prompt.checked_add(spec.output_max).is_none()
            || pool.blocks(spec.tokens_max()) > pool.capacity()
        {
            refuse(Refused::TooLong)
        } else {
            None
        };
        if let Some(refusal) = refusal {
            // The discipline would take a refusal of a known id for the job that is already here.
            if !known {
                self.discipline.refused(spec.id);
            }
            self.refusals.push_back(refusal);
            return;
        }
        let job = Job::new(*spec);
        let rank = self.discipline.rank(&job);
        self.state.add(job, rank);
    }

    fn cancel(&mut self, request: RequestId) {
        let mut computed = self.computed.iter();
        let computed = self.busy && computed.any(|computed| computed.request == request);
        let known = self.state.remove(request).is_some();
        if computed && known {
            self.abandoned.push(request);
        } else if !computed {
            self.state.pool.release(request);
        }
    }

    fn done(&mut self, now: Time, finished: &[RequestId]) {
        if !std::mem::take(&mut self.busy) {
            return;
        }
        let Self { state, discipline, computed, abandoned, .. } = self;
        for request in abandoned.drain(..) {
            state.pool.release(request);
        }
        for request in finished {
            if let Some(slot) = state.slot(*request) {
                state.at_mut(slot).ends = true;
            }
        }
        for of in computed.drain(..) {
            let Some(entry) = state.still_at(of.slot, of.request) else { continue };
            let ends = entry.ends;
            let decodes = entry.job.phase == Phase::Decoding;
            let mut last = false;
            let progress = |job: &mut Job| {
                job.context += of.tokens;
                job.phase = Phase::Prefilling;
                if of.token {
                    last = job.gave_token(now) || ends;
                }
            };
            if decodes {
                state.step(of.slot, &**discipline, progress);
            } else {
                state.change(of.slot, &**discipline, progress);
            }
            discipline.progressed(now, &state.at(of.slot).job, of.tokens);
            if last && let Some(job) = state.remove(of.request) {
                state.pool.release(of.request);
                discipline.finished(now, &job);
            }
        }
        // A request that generated no token in this iteration can't have finished.
        for request in finished {
            if let Some(slot) = state.slot(*request) {
                state.at_mut(slot).ends = false;
            }
        }
    }

    pub fn handle(&mut self, now: Time, event: &Event) {
        self.state.seen.clear();
        if self.discipline.observe(now, event, &self.state) == Reranked::All {
            self.state.rerank(&*self.discipline);
        }
        while let Some(request) = self.discipline.poll_reranked() {
            if let Some(slot) = self.state.slot(request) {
                self.state.change(slot, &*self.discipline, |_| ());
            }
        }
        match event {
            Event::Arrived(spec) => self.arrive(spec),
            Event::Cancelled(request) => self.cancel(*request),
            Event::Done { finished, .. } => self.done(now, finished),
        }
    }

    pub fn poll_refusal(&mut self) -> Option<Refusal> {
        self.refusals.pop_front()
    }

    pub fn load(&self) -> Load {
        self.state.load()
    }
}
