//! The mechanics of a replica, the same under every [`Discipline`]: continuous batching with chunked prefill.
//!
//! An iteration is made in this order: give up whom the discipline gives up; a token for each that decodes,
//! memory permitting; prompt tokens in line, up to the discipline's budget; what is left of the budget for those that were given up.
//!
//! Where memory is short, blocks are taken from whoever comes last: those given up, then prompts at the end of the line, then
//! decodes of the latest rank. Each lost its work and computes it again. Since nobody is let in who would not fit
//! alone, whoever is first always gets on.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Bound;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::Time;
use crate::discipline::{Discipline, Rank, Reranked, Start, View};
use crate::iteration::{Chunk, Drop, Event, Iteration, Load, Plan, Refusal, Refused, Step, Why};
use crate::job::{Job, Phase};
use crate::kv::Pool;
use crate::latency::Composition;
use crate::request::{RequestId, Spec};

/// How often prompts that come before it may take a prompt's blocks. Under an order that progress changes (least laxity first), two that
/// don't fit together would take them from each other for ever.
const ROBBED_MOST: u32 = 3;

/// A place in line. Relegated jobs have a line of their own.
type Place = (Rank, Time, RequestId, usize);

#[derive(Clone, Copy, Debug)]
struct Entry {
    job: Job,
    rank: Rank,
}

/// What a replica has to do, without who decides.
#[derive(Debug)]
struct State {
    pool: Pool,
    /// Blocks that a prompt which starts leaves for those that decode.
    watermark: u32,
    entries: Vec<Option<Entry>>,
    vacant: Vec<usize>,
    slots: FxHashMap<RequestId, usize>,
    line: BTreeSet<Place>,
    /// Of those in line, the ones that have begun.
    begun: BTreeSet<Place>,
    aside: BTreeSet<Place>,
    decoding: Vec<usize>,
    /// Prompt tokens of those in line.
    backlog: u64,
    aside_backlog: u64,
    /// Jobs that decode in the iteration that is being made, in the order of their ranks.
    seen: Vec<Job>,
    decodes: Composition,
}

/// A replica under a discipline.
pub struct Replica {
    discipline: Box<dyn Discipline + Send>,
    state: State,
    under_way: Option<Plan>,
    /// Cancelled while they were computed: their blocks come back when that ends.
    abandoned: Vec<RequestId>,
    refusals: VecDeque<Refusal>,
    /// What the discipline allowed last.
    budget: u32,
}

impl std::fmt::Debug for Replica {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replica")
            .field("discipline", &self.discipline.name())
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl View for State {
    fn decoding(&self) -> &[Job] {
        &self.seen
    }

    fn decodes(&self) -> Composition {
        self.decodes
    }

    fn in_line(&self) -> Box<dyn Iterator<Item = &Job> + '_> {
        Box::new(self.line.iter().map(|place| &self.at(place.3).job))
    }

    fn begun(&self) -> Box<dyn Iterator<Item = &Job> + '_> {
        Box::new(self.begun.iter().map(|place| &self.at(place.3).job))
    }

    fn aside(&self) -> Box<dyn Iterator<Item = &Job> + '_> {
        Box::new(self.aside.iter().map(|place| &self.at(place.3).job))
    }

    fn backlog(&self) -> (usize, u64) {
        (self.line.len(), self.backlog)
    }

    fn relegated(&self) -> usize {
        self.aside.len()
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }
}

impl State {
    fn at(&self, slot: usize) -> &Entry {
        self.entries[slot]
            .as_ref()
            .expect("a slot in a line has a job")
    }

    fn at_mut(&mut self, slot: usize) -> &mut Entry {
        self.entries[slot]
            .as_mut()
            .expect("a slot in a line has a job")
    }

    fn place(&self, slot: usize) -> Place {
        let Entry { job, rank } = self.at(slot);
        (*rank, job.spec.arrival, job.id(), slot)
    }

    /// Puts a job where it belongs: in line, aside, or among those that decode.
    fn enter(&mut self, slot: usize) {
        let job = self.at(slot).job;
        if job.phase == Phase::Decoding {
            self.decoding.push(slot);
            return;
        }
        let place = self.place(slot);
        let left = u64::from(job.prefill_left());
        if job.relegated {
            self.aside.insert(place);
            self.aside_backlog += left;
        } else {
            self.line.insert(place);
            if job.phase == Phase::Prefilling {
                self.begun.insert(place);
            }
            self.backlog += left;
        }
    }

    /// Takes a job out of where it is, as [`Self::enter`] has put it.
    fn withdraw(&mut self, slot: usize) {
        let job = self.at(slot).job;
        if job.phase == Phase::Decoding {
            self.decoding.retain(|other| *other != slot);
            return;
        }
        let place = self.place(slot);
        let left = u64::from(job.prefill_left());
        if job.relegated {
            self.aside.remove(&place);
            self.aside_backlog -= left;
        } else {
            self.line.remove(&place);
            self.begun.remove(&place);
            self.backlog -= left;
        }
    }

    fn add(&mut self, job: Job, rank: Rank) {
        let entry = Some(Entry { job, rank });
        let slot = match self.vacant.pop() {
            Some(slot) => {
                self.entries[slot] = entry;
                slot
            }
            None => {
                self.entries.push(entry);
                self.entries.len() - 1
            }
        };
        self.slots.insert(job.id(), slot);
        self.enter(slot);
    }

    fn remove(&mut self, request: RequestId) -> Option<Job> {
        let slot = *self.slots.get(&request)?;
        self.withdraw(slot);
        self.slots.remove(&request);
        self.vacant.push(slot);
        self.entries[slot].take().map(|entry| entry.job)
    }

    /// Changes a job that is in a line, which may change its place.
    fn change(&mut self, slot: usize, discipline: &dyn Discipline, with: impl FnOnce(&mut Job)) {
        self.withdraw(slot);
        let entry = self.at_mut(slot);
        with(&mut entry.job);
        entry.rank = discipline.rank(&entry.job);
        self.enter(slot);
    }

    fn holds(&self, slot: usize) -> bool {
        self.pool.held(self.at(slot).job.id()) > 0
    }

    /// Who loses its blocks next, of those behind `before` in line: whoever was given up, then the end of the line.
    /// For a job that decodes all prompts are behind.
    fn last_prompt(&self, before: Option<&Place>) -> Option<usize> {
        let aside = self.aside.iter().rev();
        let line = self
            .line
            .iter()
            .rev()
            .take_while(|place| before.is_none_or(|before| *place > before));
        let past_aside = before.is_none_or(|before| !self.aside.contains(before));
        let spared = |place: &&Place| before.is_some() && self.at(place.3).job.drops >= ROBBED_MOST;
        let aside = aside.filter(|place| {
            past_aside || before.is_some_and(|before| *place > before) && !spared(place)
        });
        let line = line.filter(|place| past_aside && !spared(place));
        aside
            .chain(line)
            .map(|place| place.3)
            .find(|slot| self.holds(*slot))
    }
}

impl Replica {
    /// A replica with such a pool. `watermark` blocks are left free when a prompt starts while others run.
    #[must_use]
    pub fn new(pool: Pool, watermark: u32, discipline: Box<dyn Discipline + Send>) -> Self {
        Self {
            discipline,
            state: State {
                pool,
                watermark,
                entries: Vec::new(),
                vacant: Vec::new(),
                slots: FxHashMap::default(),
                line: BTreeSet::new(),
                begun: BTreeSet::new(),
                aside: BTreeSet::new(),
                decoding: Vec::new(),
                backlog: 0,
                aside_backlog: 0,
                seen: Vec::new(),
                decodes: Composition::default(),
            },
            under_way: None,
            abandoned: Vec::new(),
            refusals: VecDeque::new(),
            budget: 0,
        }
    }

    /// Goes on under another discipline: all ranks are made anew, whoever was given up stays so, nothing is lost
    /// (H-MAS §4.3, rebuild in place).
    pub fn exchange(
        &mut self,
        discipline: Box<dyn Discipline + Send>,
    ) -> Box<dyn Discipline + Send> {
        let before = std::mem::replace(&mut self.discipline, discipline);
        let mut jobs: Vec<Job> = self.state.entries.iter().flatten().map(|e| e.job).collect();
        jobs.sort_unstable_by_key(|job| (job.spec.arrival, job.id()));
        self.discipline.takes_over(&jobs, &self.state);
        self.rerank();
        before
    }

    /// What is decided by.
    #[must_use]
    pub fn discipline(&self) -> &dyn Discipline {
        &*self.discipline
    }

    /// What is decided by, to tell it what is no event.
    pub fn discipline_mut(&mut self) -> &mut (dyn Discipline + Send) {
        &mut *self.discipline
    }

    /// How a request stands here.
    #[must_use]
    pub fn job(&self, request: RequestId) -> Option<&Job> {
        let slot = self.state.slots.get(&request)?;
        Some(&self.state.at(*slot).job)
    }

    /// The book of blocks.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.state.pool
    }

    /// Keeps blocks for a request whose KV is on its way here. It arrives later, or is cancelled.
    ///
    /// # Errors
    /// If too few are free.
    pub fn reserve(&mut self, request: RequestId, tokens: u32) -> Result<(), crate::kv::Short> {
        self.state.pool.grow(request, tokens)
    }

    fn rerank(&mut self) {
        let state = &mut self.state;
        for slot in 0..state.entries.len() {
            if state.entries[slot].is_some() {
                state.change(slot, &*self.discipline, |_| ());
            }
        }
    }

    fn arrive(&mut self, spec: &Spec) {
        let refuse = |why| {
            Some(Refusal {
                request: spec.id,
                why,
            })
        };
        let pool = &self.state.pool;
        let refusal =
            if self.state.slots.contains_key(&spec.id) || self.abandoned.contains(&spec.id) {
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
            // The one that is here already is not meant.
            if !self.state.slots.contains_key(&spec.id) {
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
        let computed = self.under_way.as_ref().is_some_and(|plan| {
            plan.chunks.iter().any(|chunk| chunk.request == request)
                || plan.steps.iter().any(|step| step.request == request)
        });
        let known = self.state.remove(request).is_some();
        if computed && known {
            self.abandoned.push(request);
        } else if !computed {
            self.state.pool.release(request);
        }
    }

    fn done(&mut self, now: Time, finished: &[RequestId]) {
        let Some(plan) = self.under_way.take() else {
            return;
        };
        for request in self.abandoned.drain(..) {
            self.state.pool.release(request);
        }
        let finished: FxHashSet<&RequestId> = finished.iter().collect();
        let Self {
            state, discipline, ..
        } = self;
        let chunks = plan.chunks.iter().map(|c| (c.request, c.tokens, c.last));
        let steps = plan.steps.iter().map(|step| (step.request, 1, true));
        for (request, tokens, token) in chunks.chain(steps) {
            let Some(&slot) = state.slots.get(&request) else {
                continue;
            };
            let mut last = false;
            let mut progress = |job: &mut Job| {
                job.context += tokens;
                job.phase = Phase::Prefilling;
                if token {
                    last = job.gave_token(now) || finished.contains(&request);
                }
            };
            if state.at(slot).job.phase == Phase::Decoding {
                // Its place does not change: none of those that decode is in line.
                progress(&mut state.at_mut(slot).job);
                let entry = state.at_mut(slot);
                entry.rank = discipline.rank(&entry.job);
            } else {
                state.change(slot, &**discipline, progress);
            }
            discipline.progressed(now, &state.at(slot).job, tokens);
            if last && let Some(job) = state.remove(request) {
                state.pool.release(request);
                discipline.finished(now, &job);
            }
        }
    }

    /// Takes the blocks of a job, which goes back into line.
    fn drop_blocks(&mut self, slot: usize, why: Why, plan: &mut Plan) {
        let request = self.state.at(slot).job.id();
        self.state.pool.release(request);
        self.state.change(slot, &*self.discipline, Job::lost);
        self.discipline.dropped(&self.state.at(slot).job);
        plan.drops.push(Drop { request, why });
    }

    fn give_up(&mut self, now: Time, plan: &mut Plan) {
        for request in self.discipline.relegate(now, &self.state) {
            let Some(&slot) = self.state.slots.get(&request) else {
                continue;
            };
            let job = self.state.at(slot).job;
            if job.relegated || job.phase == Phase::Decoding {
                continue;
            }
            self.state
                .change(slot, &*self.discipline, |job| job.relegated = true);
            if self.state.holds(slot) && !self.discipline.relegated_keep_blocks() {
                self.drop_blocks(slot, Why::Relegated, plan);
            }
        }
    }

    /// Decides who decodes a token. Whoever finds no block takes those of the last.
    fn decode(&mut self, plan: &mut Plan) {
        let mut order: Vec<Place> = self
            .state
            .decoding
            .iter()
            .map(|slot| self.state.place(*slot))
            .collect();
        order.sort_unstable();
        order.truncate(self.discipline.decodes_max());
        let (order, later): (Vec<Place>, Vec<Place>) = order
            .into_iter()
            .partition(|place| self.discipline.takes_token(&self.state.at(place.3).job));
        let mut order: VecDeque<usize> = order.into_iter().map(|place| place.3).collect();
        let mut later = later.into_iter().map(|place| place.3);
        self.state.seen.clear();
        self.state.decodes = Composition::default();
        // Whoever is to wait goes on if nobody else does: an iteration without tokens would be the last.
        while let Some(slot) = order.pop_front().or_else(|| {
            let nobody = plan.steps.is_empty();
            nobody.then(|| later.next()).flatten()
        }) {
            let job = self.state.at(slot).job;
            let entering = !self.state.holds(slot);
            loop {
                if self.state.pool.grow(job.id(), job.context + 1).is_ok() {
                    if entering {
                        self.discipline.began(&job);
                    }
                    plan.steps.push(Step {
                        request: job.id(),
                        context: job.context,
                    });
                    self.state.decodes = self.state.decodes.with_decode(job.context);
                    self.state.seen.push(job);
                    break;
                }
                if entering {
                    // It came with its KV from elsewhere and waits for room.
                    break;
                }
                if let Some(victim) = self.state.last_prompt(None) {
                    self.drop_blocks(victim, Why::Memory, plan);
                } else if let Some(victim) = order.pop_back() {
                    if self.state.holds(victim) {
                        self.drop_blocks(victim, Why::Memory, plan);
                    }
                } else {
                    self.drop_blocks(slot, Why::Memory, plan);
                    break;
                }
            }
        }
    }

    /// Puts tokens of a prompt into the plan: how many, `None` if no block can be had.
    fn chunk(&mut self, slot: usize, budget: u32, plan: &mut Plan) -> Option<u32> {
        let place = self.state.place(slot);
        let job = self.state.at(slot).job;
        let running = !plan.chunks.is_empty() || !plan.steps.is_empty();
        let spare = if running && job.phase == Phase::Waiting {
            self.state.watermark
        } else {
            0
        };
        while self.state.pool.lacking(job.id(), job.target) + spare > self.state.pool.free() {
            // Only those that begun may be robbed, only by one before them, and never of what this plan computes.
            let planned = |slot: &usize| {
                let request = self.state.at(*slot).job.id();
                plan.chunks.iter().any(|chunk| chunk.request == request)
            };
            let victim = self
                .state
                .last_prompt(Some(&place))
                .filter(|slot| !planned(slot))?;
            self.drop_blocks(victim, Why::Memory, plan);
        }
        self.state.pool.grow(job.id(), job.target).ok()?;
        if job.phase == Phase::Waiting {
            self.discipline.began(&job);
        }
        let tokens = budget.min(job.prefill_left());
        plan.chunks.push(Chunk {
            request: job.id(),
            prefix: job.context,
            tokens,
            last: tokens == job.prefill_left(),
        });
        Some(tokens)
    }

    /// Spends the budget in line.
    fn prefill(&mut self, now: Time, plan: &mut Plan) {
        let mut budget = self.discipline.budget(now, &self.state);
        self.budget = budget;
        if budget == 0 {
            return;
        }
        // Those who would not get a token anyway need not be asked for.
        let all = self.discipline.begun_first();
        let mut tokens = u64::from(budget);
        let mut first = Vec::new();
        for place in &self.state.begun {
            if tokens == 0 {
                break;
            }
            let job = &self.state.at(place.3).job;
            if all || self.discipline.goes_on(now, job) {
                tokens = tokens.saturating_sub(u64::from(job.prefill_left()));
                first.push(place.3);
            }
        }
        for slot in first {
            if budget == 0 {
                return;
            }
            // A victim of one before it has not begun any more.
            if self.state.at(slot).job.phase != Phase::Prefilling {
                continue;
            }
            match self.chunk(slot, budget, plan) {
                Some(tokens) => budget -= tokens,
                None => return,
            }
        }
        let mut after: Option<Place> = None;
        let mut closed = false;
        while budget > 0 {
            let beyond = after.map_or(Bound::Unbounded, Bound::Excluded);
            // Who may not start keeps nobody from going on.
            let line = if closed {
                &self.state.begun
            } else {
                &self.state.line
            };
            let next = line.range((beyond, Bound::Unbounded)).next().copied();
            let Some(place) = next else { break };
            after = Some(place);
            let slot = place.3;
            let job = self.state.at(slot).job;
            if plan.chunks.iter().any(|chunk| chunk.request == job.id()) {
                continue;
            }
            if job.phase == Phase::Waiting {
                match self.discipline.start(now, &job, &self.state) {
                    Start::Now => (),
                    Start::Later => continue,
                    Start::Nobody => {
                        closed = true;
                        continue;
                    }
                    Start::Skip(rank) => {
                        let before = Rank(rank.0.saturating_sub(1));
                        let last = (before, Time(u64::MAX), RequestId(u64::MAX), usize::MAX);
                        after = after.max(Some(last));
                        continue;
                    }
                }
            }
            match self.chunk(slot, budget, plan) {
                Some(tokens) => budget -= tokens,
                None => return,
            }
        }
        let mut tokens = u64::from(budget);
        let mut aside = Vec::new();
        for place in &self.state.aside {
            if tokens == 0 {
                break;
            }
            let left = self.state.at(place.3).job.prefill_left();
            tokens = tokens.saturating_sub(u64::from(left));
            aside.push(place.3);
        }
        for slot in aside {
            if budget == 0 {
                return;
            }
            match self.chunk(slot, budget, plan) {
                Some(tokens) => budget -= tokens,
                None => return,
            }
        }
    }

    /// Nothing was planned, since the discipline lets those wait that come first: whoever has begun goes on. Otherwise their blocks would
    /// be taken in vain, and they would begin anew for ever.
    fn go_on(&mut self, plan: &mut Plan) {
        let begun: Vec<usize> = self.state.begun.iter().map(|place| place.3).collect();
        for slot in begun {
            if self.chunk(slot, self.budget.max(1), plan).is_some() {
                return;
            }
        }
    }

    /// Nothing could be planned though there are jobs: whoever holds blocks keeps the first from going on, or
    /// capacity shrank below what the first needs.
    fn unblock(&mut self, plan: &mut Plan) -> bool {
        let holder = self.state.last_prompt(None).or_else(|| {
            let mut held = self.state.decoding.iter().rev();
            held.find(|slot| self.state.holds(**slot)).copied()
        });
        if let Some(slot) = holder {
            self.drop_blocks(slot, Why::Memory, plan);
            return true;
        }
        let capacity = self.state.pool.capacity();
        let hopeless = self
            .state
            .entries
            .iter()
            .flatten()
            .map(|entry| entry.job)
            .find(|job| self.state.pool.blocks(job.target.max(job.context + 1)) > capacity);
        if let Some(job) = hopeless {
            self.state.remove(job.id());
            self.discipline.refused(job.id());
            self.refusals.push_back(Refusal {
                request: job.id(),
                why: Refused::TooLong,
            });
            return true;
        }
        false
    }
}

impl Iteration for Replica {
    fn handle(&mut self, now: Time, event: &Event) {
        if self.discipline.observe(now, event, &self.state) == Reranked::All {
            self.rerank();
        }
        while let Some(request) = self.discipline.poll_reranked() {
            if let Some(&slot) = self.state.slots.get(&request) {
                self.state.change(slot, &*self.discipline, |_| ());
            }
        }
        match event {
            Event::Arrived(spec) => self.arrive(spec),
            Event::Cancelled(request) => self.cancel(*request),
            Event::Done { finished, .. } => self.done(now, finished),
            Event::Capacity(blocks) => self.state.pool.resize(*blocks),
        }
    }

    fn plan(&mut self, now: Time) -> Option<Plan> {
        if self.under_way.is_some() || self.state.slots.is_empty() {
            return None;
        }
        let mut plan = Plan::default();
        self.give_up(now, &mut plan);
        self.decode(&mut plan);
        self.prefill(now, &mut plan);
        if plan.chunks.is_empty() && plan.steps.is_empty() {
            self.go_on(&mut plan);
            // A discipline may let nobody start; blocks are no reason to stand still.
            let blocked = !self.state.decoding.is_empty() || self.state.pool.used() > 0;
            while plan.chunks.is_empty() && plan.steps.is_empty() && blocked {
                if !self.unblock(&mut plan) {
                    break;
                }
                self.decode(&mut plan);
                self.prefill(now, &mut plan);
            }
        }
        if plan.chunks.is_empty() && plan.steps.is_empty() && plan.drops.is_empty() {
            return None;
        }
        self.under_way = Some(plan.clone());
        Some(plan)
    }

    fn poll_refusal(&mut self) -> Option<Refusal> {
        self.refusals.pop_front()
    }

    fn next_deadline(&self) -> Option<Time> {
        None
    }

    fn load(&self) -> Load {
        let state = &self.state;
        let waiting = state
            .line
            .iter()
            .chain(&state.aside)
            .filter(|place| state.at(place.3).job.phase == Phase::Waiting)
            .count();
        let context = |slot: &usize| u64::from(state.at(*slot).job.context);
        Load {
            waiting: waiting as u32,
            running: (state.slots.len() - waiting) as u32,
            decoding: state.decoding.len() as u32,
            prefill_tokens: state.backlog + state.aside_backlog,
            decode_context: state.decoding.iter().map(context).sum(),
            blocks: state.pool.capacity(),
            blocks_free: state.pool.free(),
        }
    }
}
