//! The execution layer (H-MAS §3.5) and the loop over all layers (Appendix E.1, Algorithm 1), as a
//! discipline of a replica.
//!
//! Each iteration applies the answers of perception. Then prompts start in the agent's order
//! while the memory limit and the other limits permit.
//!
//! Departures from the paper:
//! * The memory limit (the paper's fence) sums blocks of `prompt + l_upper` of running requests. A
//!   request that exceeds its bound gets half as much again (Appendix C.2: "a conservative rolling
//!   estimate"). The sum thus usually stays an upper bound. The pool itself is never exceeded.
//! * If the first request in the queue doesn't fit, no request behind it starts. Requests that
//!   overtake it could keep it from ever fitting.
//! * If `B_token < N_run`, the jobs whose last token is oldest decode first. The paper doesn't
//!   define this case.
//! * A request always starts if no other runs, so that the memory limit can't stop the replica.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use rustc_hash::FxHashMap;

use super::Estimate;
use super::cognition::Cognition;
use super::pool::Kind;
use super::statera::{Bound, Calibration, Source, StateraConfig};
use crate::Time;
use crate::discipline::{Discipline, Rank, Reranked, View};
use crate::iteration::Event;
use crate::job::{Job, Phase};
use crate::kv::Pool;
use crate::request::{RequestId, Spec};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// Tokens in an iteration, decodes included, as in [`crate::baseline::Fixed`].
    pub chunk: u32,
    /// Least prompt tokens in an iteration, however many jobs decode.
    pub chunk_min: u32,
    /// The options of Statera. With `None`, only the KV pool limits requests.
    pub statera: Option<StateraConfig>,
}

impl Default for Config {
    fn default() -> Self {
        Self { chunk: 512, chunk_min: 64, statera: Some(StateraConfig::default()) }
    }
}

#[derive(Clone, Copy, Debug)]
struct Known {
    spec: Spec,
    estimate: Estimate,
    bound: Bound,
    /// Tokens that the memory limit counts for the request while it runs.
    promised: Option<u32>,
}

/// Counts over the requests that ended, for comparison with their bounds.
#[derive(Clone, Debug, Default)]
pub struct Log {
    pub fenced: u64,
    /// Number of ended requests that generated more than their bound.
    pub violations: u64,
    /// `fenced` and `violations` for the requests whose bound comes from their own bucket.
    pub fenced_own_bucket: (u64, u64),
    pub bound_tokens: u64,
    pub real_tokens: u64,
}

/// A log that is shared, because the replica owns the agent.
#[derive(Clone, Default)]
pub struct Journal(Arc<Mutex<Log>>);

impl Journal {
    fn note(&self, with: impl FnOnce(&mut Log)) {
        with(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub fn read(&self) -> Log {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

pub struct Agent {
    config: Config,
    cognition: Cognition,
    order: Kind,
    statera: Option<(StateraConfig, Calibration)>,
    jobs: FxHashMap<RequestId, Known>,
    /// A copy of [`Known::promised`] of running requests. Each token of each iteration looks it up,
    /// so the table is small.
    promises: FxHashMap<RequestId, u32>,
    running: u32,
    block_tokens: u32,
    promised_blocks: u64,
    reranked: VecDeque<RequestId>,
    now: Time,
    journal: Journal,
}

impl Agent {
    pub fn new(order: Kind, config: Config, cognition: Cognition) -> Self {
        Self {
            config,
            cognition,
            order,
            statera: config
                .statera
                .map(|of| (of, Calibration::new(of.epsilon, of.window, of.score))),
            jobs: FxHashMap::default(),
            promises: FxHashMap::default(),
            running: 0,
            block_tokens: 1,
            promised_blocks: 0,
            reranked: VecDeque::new(),
            now: Time::ZERO,
            journal: Journal::default(),
        }
    }

    pub fn journal(&self) -> Journal {
        self.journal.clone()
    }

    fn blocks(&self, tokens: u32) -> u64 {
        u64::from(tokens.div_ceil(self.block_tokens))
    }

    fn bound(&self, spec: &Spec, estimate: &Estimate) -> Bound {
        let (length, most) = (estimate.length, spec.output_max);
        match &self.statera {
            None => Bound { tokens: most, source: Source::Limit },
            Some((config, _)) if config.frozen => {
                Bound { tokens: length.clamp(1, most.max(1)), source: Source::Prediction }
            }
            Some((_, calibration)) => calibration.bound(spec.prompt, length, most),
        }
    }

    fn forget(&mut self, request: RequestId) -> Option<Known> {
        let known = self.jobs.remove(&request)?;
        self.promises.remove(&request);
        if let Some(tokens) = known.promised {
            self.running -= 1;
            self.promised_blocks -= self.blocks(tokens);
        }
        Some(known)
    }

    /// Marks a request as running, so that the memory limit counts it.
    fn run(&mut self, request: RequestId, held: u32) {
        let Some(known) = self.jobs.get(&request).copied() else { return };
        if known.promised.is_some() {
            return;
        }
        let bound = self.bound(&known.spec, &known.estimate);
        let tokens = known.spec.prompt.saturating_add(bound.tokens).max(held);
        self.running += 1;
        self.promised_blocks += self.blocks(tokens);
        if let Some(known) = self.jobs.get_mut(&request) {
            known.promised = Some(tokens);
            known.bound = bound;
        }
        self.promises.insert(request, tokens);
    }

    /// Raises the bound of a request that needs more tokens than the memory limit counts for it.
    fn outlived(&mut self, job: &Job, promised: u32) {
        let request = job.id();
        let Some(known) = self.jobs.get_mut(&request) else { return };
        let more = (known.bound.tokens / 2).max(self.block_tokens);
        let tokens = promised.saturating_add(more).min(known.spec.tokens_max());
        let tokens = tokens.max(job.context);
        known.promised = Some(tokens);
        self.promises.insert(request, tokens);
        self.promised_blocks += self.blocks(tokens);
        self.promised_blocks -= self.blocks(promised);
    }

    fn perceive(&mut self, now: Time) {
        while let Some((request, tags)) = self.cognition.perception.poll(now) {
            let Some(known) = self.jobs.get_mut(&request) else { continue };
            let understood =
                tags.and_then(|tags| self.cognition.understood(&known.spec, &tags, self.running));
            let Some(estimate) = understood else { continue };
            // A request that runs keeps its counted tokens.
            if known.promised.is_none() {
                known.estimate = estimate;
                self.reranked.push_back(request);
            }
        }
    }

    /// Reports whether the request fits into the memory limit (eq. 2 and 11).
    fn fits(&self, job: &Job, known: &Known, config: &StateraConfig, pool: &Pool) -> bool {
        let bound = self.bound(&known.spec, &known.estimate);
        let tokens = known.spec.prompt.saturating_add(bound.tokens);
        let blocks = self.blocks(tokens.max(job.target));
        let room = f64::from(pool.capacity()) * (1.0 - config.fragmentation);
        (self.promised_blocks + blocks) as f64 <= room
    }
}

impl Discipline for Agent {
    fn rank(&self, job: &Job) -> Rank {
        if job.phase == Phase::Decoding {
            let last = job.last_token.unwrap_or(job.spec.arrival);
            return Rank(i64::try_from(last.0).unwrap_or(i64::MAX));
        }
        match self.jobs.get(&job.id()) {
            Some(known) => self.order.rank(job, &known.estimate),
            None => self.order.rank(job, &self.cognition.prior(&job.spec, self.running)),
        }
    }

    fn observe(&mut self, now: Time, event: &Event, view: &dyn View) -> Reranked {
        self.now = now;
        self.block_tokens = view.pool().block_tokens();
        match event {
            Event::Arrived(spec) => {
                // The replica refuses a second request with the same id. The id still means the
                // first one.
                let known = self.jobs.contains_key(&spec.id);
                if !known {
                    let estimate = self.cognition.arrived(now, spec, self.running);
                    let (bound, spec) = (self.bound(spec, &estimate), *spec);
                    self.jobs.insert(spec.id, Known { spec, estimate, bound, promised: None });
                }
            }
            Event::Cancelled(request) => {
                self.forget(*request);
            }
            Event::Done { .. } => (),
        }
        self.perceive(now);
        Reranked::None
    }

    fn poll_reranked(&mut self) -> Option<RequestId> {
        self.reranked.pop_front()
    }

    fn began(&mut self, job: &Job) {
        self.run(job.id(), job.target);
    }

    fn dropped(&mut self, job: &Job) {
        let Some(known) = self.jobs.get_mut(&job.id()) else { return };
        let Some(tokens) = known.promised.take() else { return };
        self.promises.remove(&job.id());
        self.running -= 1;
        self.promised_blocks -= self.blocks(tokens);
    }

    fn progressed(&mut self, _: Time, job: &Job, _: u32) {
        let request = job.id();
        let promised = self.promises.get(&request).copied();
        if promised.is_none() {
            if !self.jobs.contains_key(&request) {
                return;
            }
            // The request's blocks were reserved before it arrived.
            self.run(request, job.context);
        }
        if let Some(promised) = promised.filter(|promised| job.context >= *promised) {
            self.outlived(job, promised);
        }
    }

    fn finished(&mut self, _: Time, job: &Job) {
        let Some(known) = self.forget(job.id()) else { return };
        let real = job.generated;
        self.cognition.finished(&job.spec, known.estimate.task, real);
        let Some((_, calibration)) = &mut self.statera else { return };
        calibration.learn(job.spec.prompt, known.estimate.length, real);
        let above = u64::from(real > known.bound.tokens);
        self.journal.note(|log| {
            log.fenced += 1;
            log.violations += above;
            if known.bound.source == Source::Bucket {
                log.fenced_own_bucket.0 += 1;
                log.fenced_own_bucket.1 += above;
            }
            log.bound_tokens += u64::from(known.bound.tokens);
            log.real_tokens += u64::from(real);
        });
    }

    fn refused(&mut self, request: RequestId) {
        self.forget(request);
    }

    fn budget(&mut self, _: Time, view: &dyn View) -> u32 {
        self.config.chunk.saturating_sub(view.decodes().decodes).max(self.config.chunk_min)
    }

    fn may_start(&mut self, _: Time, job: &Job, view: &dyn View) -> bool {
        let (Some(known), Some((config, _))) = (self.jobs.get(&job.id()), &self.statera) else {
            return true;
        };
        self.running == 0
            || (self.running < config.concurrency && self.fits(job, known, config, view.pool()))
    }

    fn begun_first(&self) -> bool {
        self.order == Kind::Fcfs
    }

    fn decodes_max(&self) -> usize {
        self.statera.as_ref().map_or(usize::MAX, |(config, _)| config.decodes.max(1) as usize)
    }
}
