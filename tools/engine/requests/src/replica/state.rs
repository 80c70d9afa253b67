//! The state of a replica without its policy: the jobs, their queues, and sums for each iteration.
//!
//! The design target is 20 µs an iteration with 256 decoding jobs and 10 000 queued ones
//! (docs/notes/request-decision-costs.md):
//!
//! * A job is a slot of a table. Request ids are looked up for events, but not for each token.
//! * Each entry has the job's number of blocks. The pool is used only when that number changes.
//! * Jobs that hold blocks and don't decode are listed apart, so that a victim is found without a
//!   search through the queue.
//! * Decoding jobs stay in the order of the last iteration, which is usually the next order, too.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use crate::Time;
use crate::discipline::{Discipline, Rank, View};
use crate::iteration::Load;
use crate::job::{Job, Phase};
use crate::kv::Pool;
use crate::latency::Composition;
use crate::request::RequestId;

/// How often jobs ahead of a prompt may take its blocks. Under least laxity first, progress changes
/// the order. Two jobs that don't fit together could otherwise take each other's blocks for ever.
const ROBBED_MOST: u32 = 3;

/// The place of a job in a queue. Relegated jobs have their own queue.
pub(super) type WaitingKey = (Rank, Time, RequestId, usize);

#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) job: Job,
    pub(super) rank: Rank,
    /// Number of blocks that the job holds, as in the pool.
    held: u32,
    /// Sequence number of the job's entry among the decoding jobs.
    joined: u64,
    /// Number of the last plan that computes tokens of the job's prompt.
    pub(super) planned: u64,
    /// Whether the token in computation is the job's last.
    pub(super) ends: bool,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) pool: Pool,
    /// Number of blocks that a starting prompt must leave free for decoding jobs.
    pub(super) watermark: u32,
    entries: Vec<Option<Entry>>,
    vacant: Vec<usize>,
    pub(super) slots: FxHashMap<RequestId, usize>,
    pub(super) line: BTreeSet<WaitingKey>,
    /// The jobs of `line` that have begun.
    pub(super) begun: BTreeSet<WaitingKey>,
    pub(super) aside: BTreeSet<WaitingKey>,
    /// The jobs of `line` that hold blocks. `aside_holders` has those of `aside`.
    holders: BTreeSet<WaitingKey>,
    aside_holders: BTreeSet<WaitingKey>,
    /// The decoding jobs, with their ranks at the time of the last plan.
    pub(super) decoding: Vec<WaitingKey>,
    /// The last value that was given to [`Entry::joined`].
    joined: u64,
    /// Prompt tokens that the jobs of `line` have to compute.
    pub(super) backlog: u64,
    aside_backlog: u64,
    /// Number of jobs in `aside` without computed tokens.
    aside_waiting: u64,
    context: u64,
    /// Slots of the jobs that decode in the iteration that is being planned, by rank.
    pub(super) seen: Vec<usize>,
    /// Slots of the jobs that may decode in this iteration. Kept to save allocations.
    pub(super) turns: Vec<usize>,
    pub(super) decodes: Composition,
}

impl State {
    pub(super) fn new(pool: Pool, watermark: u32) -> Self {
        Self { pool, watermark, ..Self::default() }
    }

    pub(super) fn slot(&self, request: RequestId) -> Option<usize> {
        self.slots.get(&request).copied()
    }

    pub(super) fn at(&self, slot: usize) -> &Entry {
        self.entries[slot].as_ref().expect("a slot in a line has a job")
    }

    pub(super) fn at_mut(&mut self, slot: usize) -> &mut Entry {
        self.entries[slot].as_mut().expect("a slot in a line has a job")
    }

    /// Returns the entry in a slot if it still belongs to `request`.
    pub(super) fn still_at(&mut self, slot: usize, request: RequestId) -> Option<&mut Entry> {
        let entry = self.entries.get_mut(slot)?.as_mut()?;
        (entry.job.id() == request).then_some(entry)
    }

    pub(super) fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.entries.iter().flatten().map(|entry| &entry.job)
    }

    pub(super) fn place(&self, slot: usize) -> WaitingKey {
        let Entry { job, rank, .. } = self.at(slot);
        (*rank, job.spec.arrival, job.id(), slot)
    }

    /// Inserts a job into its queue: `line`, `aside` or `decoding`.
    fn enter(&mut self, slot: usize) {
        let place = self.place(slot);
        let Entry { job, held, .. } = *self.at(slot);
        if job.phase == Phase::Decoding {
            self.joined += 1;
            self.at_mut(slot).joined = self.joined;
            self.decoding.push(place);
            self.context += u64::from(job.context);
            return;
        }
        self.list(place, &job, held, true);
    }

    /// Removes a job from the queue into which [`Self::enter`] put it.
    fn withdraw(&mut self, slot: usize) {
        let place = self.place(slot);
        let Entry { job, held, .. } = *self.at(slot);
        if job.phase == Phase::Decoding {
            // Between `take_decoding` and `put_back` the list is empty.
            if let Some(at) = self.decoding.iter().position(|other| other.3 == slot) {
                self.decoding.remove(at);
            }
            self.context -= u64::from(job.context);
            return;
        }
        self.list(place, &job, held, false);
    }

    /// Adds a prompt to the lists and sums of its queue, or takes it out.
    fn list(&mut self, place: WaitingKey, job: &Job, held: u32, enters: bool) {
        let put = |list: &mut BTreeSet<WaitingKey>| {
            if enters {
                list.insert(place)
            } else {
                list.remove(&place)
            };
        };
        let sum = |was: u64, part: u64| if enters { was + part } else { was - part };
        let left = u64::from(job.prefill_left());
        if job.relegated {
            put(&mut self.aside);
            self.aside_backlog = sum(self.aside_backlog, left);
            self.aside_waiting = sum(self.aside_waiting, u64::from(job.phase == Phase::Waiting));
        } else {
            put(&mut self.line);
            if job.phase == Phase::Prefilling {
                put(&mut self.begun);
            }
            self.backlog = sum(self.backlog, left);
        }
        if held > 0 {
            put(if job.relegated { &mut self.aside_holders } else { &mut self.holders });
        }
    }

    pub(super) fn add(&mut self, job: Job, rank: Rank) {
        let entry = Some(Entry {
            job,
            rank,
            held: self.pool.held(job.id()),
            joined: 0,
            planned: 0,
            ends: false,
        });
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

    pub(super) fn remove(&mut self, request: RequestId) -> Option<Job> {
        let slot = *self.slots.get(&request)?;
        self.withdraw(slot);
        self.slots.remove(&request);
        self.vacant.push(slot);
        self.entries[slot].take().map(|entry| entry.job)
    }

    /// Changes a job that is in a queue and moves it if its place changes.
    pub(super) fn change(&mut self, slot: usize, by: &dyn Discipline, with: impl FnOnce(&mut Job)) {
        let Entry { job: old, rank, .. } = *self.at(slot);
        let mut job = old;
        with(&mut job);
        let next = by.rank(&job);
        let decodes = old.phase == Phase::Decoding || job.phase == Phase::Decoding;
        let stays = next == rank && old.phase == job.phase && old.relegated == job.relegated;
        if stays && !decodes {
            let backlog = if job.relegated { &mut self.aside_backlog } else { &mut self.backlog };
            *backlog -= u64::from(old.prefill_left());
            *backlog += u64::from(job.prefill_left());
            self.at_mut(slot).job = job;
            return;
        }
        self.withdraw(slot);
        let entry = self.at_mut(slot);
        (entry.job, entry.rank) = (job, next);
        self.enter(slot);
    }

    /// Changes a decoding job that generated a token. Its place stays the same, because decoding
    /// jobs aren't in `line`.
    pub(super) fn step(&mut self, slot: usize, by: &dyn Discipline, with: impl FnOnce(&mut Job)) {
        let entry = self.at_mut(slot);
        let before = entry.job.context;
        with(&mut entry.job);
        entry.rank = by.rank(&entry.job);
        let more = entry.job.context - before;
        self.context += u64::from(more);
    }

    pub(super) fn rerank(&mut self, by: &dyn Discipline) {
        let mut moved = false;
        for entry in self.entries.iter_mut().flatten() {
            let rank = by.rank(&entry.job);
            moved |= rank != entry.rank && entry.job.phase != Phase::Decoding;
            entry.rank = rank;
            if entry.job.phase == Phase::Decoding {
                self.joined += 1;
                entry.joined = self.joined;
            }
        }
        if !moved {
            return;
        }
        let Self { entries, line, begun, aside, holders, aside_holders, .. } = self;
        let at = |slot: usize| entries[slot].as_ref().expect("a slot in a line has a job");
        for line in [line, begun, aside, holders, aside_holders] {
            // Each tree is built at once. Ten thousand single changes of a tree take milliseconds.
            *line =
                line.iter().map(|place| (at(place.3).rank, place.1, place.2, place.3)).collect();
        }
    }

    pub(super) fn holds(&self, slot: usize) -> bool {
        self.at(slot).held > 0
    }

    /// Gives a job blocks for `tokens` tokens. Returns whether there were enough.
    pub(super) fn grow(&mut self, slot: usize, tokens: u32) -> bool {
        let Entry { job, held, .. } = self.at(slot);
        let reach = u64::from(*held) * u64::from(self.pool.block_tokens());
        if u64::from(tokens) <= reach {
            return true;
        }
        let request = job.id();
        let grown = self.pool.grow(request, tokens);
        if grown {
            self.note(slot);
        }
        grown
    }

    /// Reserves blocks for a request that is here or on its way.
    pub(super) fn reserve(&mut self, request: RequestId, tokens: u32) -> bool {
        let grown = self.pool.grow(request, tokens);
        if let Some(slot) = self.slot(request).filter(|_| grown) {
            self.note(slot);
        }
        grown
    }

    pub(super) fn release(&mut self, slot: usize) {
        let request = self.at(slot).job.id();
        self.pool.release(request);
        self.note(slot);
    }

    /// Updates an entry after the pool changed the number of its blocks.
    fn note(&mut self, slot: usize) {
        let place = self.place(slot);
        let held = self.pool.held(place.2);
        let entry = self.at_mut(slot);
        let before = std::mem::replace(&mut entry.held, held);
        let (decodes, relegated) = (entry.job.phase == Phase::Decoding, entry.job.relegated);
        if decodes || (before > 0) == (held > 0) {
            return;
        }
        let holders = if relegated { &mut self.aside_holders } else { &mut self.holders };
        if held > 0 {
            holders.insert(place);
        } else {
            holders.remove(&place);
        }
    }

    /// Returns the job behind `before` that loses its blocks next: the last relegated job, then the
    /// last of the queue. With `None`, for a decoding job, all prompts are candidates.
    pub(super) fn last_prompt(&self, before: Option<&WaitingKey>) -> Option<usize> {
        let line = self
            .holders
            .iter()
            .rev()
            .take_while(|place| before.is_none_or(|before| *place > before));
        let past_aside = before.is_none_or(|before| !self.aside.contains(before));
        let spared =
            |place: &&WaitingKey| before.is_some() && self.at(place.3).job.drops >= ROBBED_MOST;
        let aside = self.aside_holders.iter().rev().filter(|place| {
            past_aside || before.is_some_and(|before| *place > before) && !spared(place)
        });
        let line = line.filter(|place| past_aside && !spared(place));
        aside.chain(line).map(|place| place.3).next()
    }

    pub(super) fn last_decoding(&self) -> Option<usize> {
        let held = self.decoding.iter().filter(|place| self.holds(place.3));
        held.max_by_key(|place| self.at(place.3).joined).map(|place| place.3)
    }

    /// Takes the list of decoding jobs, sorted by rank. [`Self::put_back`] returns it.
    pub(super) fn take_decoding(&mut self) -> Vec<WaitingKey> {
        let mut order = std::mem::take(&mut self.decoding);
        for place in &mut order {
            place.0 = self.at(place.3).rank;
        }
        // If ranks follow the last token, jobs with a token in the last iteration are now behind
        // the others.
        if let Some(at) = order.windows(2).position(|pair| pair[0] > pair[1]) {
            order.rotate_left(at + 1);
            if !order.is_sorted() {
                order.sort_unstable();
            }
        }
        order
    }

    /// Returns the list of [`Self::take_decoding`], without jobs that lost their blocks meanwhile.
    pub(super) fn put_back(&mut self, mut order: Vec<WaitingKey>, some_lost: bool) {
        if some_lost {
            order.retain(|place| self.at(place.3).job.phase == Phase::Decoding);
        }
        self.decoding = order;
    }

    pub(super) fn load(&self) -> Load {
        let waiting = self.line.len() - self.begun.len() + self.aside_waiting as usize;
        Load {
            waiting: waiting as u32,
            relegated: self.aside_waiting as u32,
            running: (self.slots.len() - waiting) as u32,
            decoding: self.decoding.len() as u32,
            prefill_tokens: self.backlog + self.aside_backlog,
            decode_context: self.context,
            blocks: self.pool.capacity(),
            blocks_free: self.pool.free(),
        }
    }

    /// Reports whether all sums and lists agree with the jobs. For tests.
    pub(super) fn is_balanced(&self) -> bool {
        let mut again = Self::new(self.pool.clone(), self.watermark);
        for (slot, entry) in self.entries.iter().enumerate() {
            again.entries.push(*entry);
            let Some(Entry { job, held, .. }) = entry else { continue };
            if *held != self.pool.held(job.id()) || self.slot(job.id()) != Some(slot) {
                return false;
            }
            again.slots.insert(job.id(), slot);
            again.enter(slot);
        }
        let mut decoding: Vec<usize> = self.decoding.iter().map(|place| place.3).collect();
        decoding.sort_unstable();
        self.load() == again.load()
            && self.backlog == again.backlog
            && decoding.into_iter().eq(again.decoding.iter().map(|place| place.3))
            && [&self.line, &self.begun, &self.aside] == [&again.line, &again.begun, &again.aside]
            && [&self.holders, &self.aside_holders] == [&again.holders, &again.aside_holders]
    }
}

impl View for State {
    fn decoding(&self) -> Box<dyn Iterator<Item = &Job> + '_> {
        Box::new(self.seen.iter().map(|slot| &self.at(*slot).job))
    }

    fn decodes(&self) -> Composition {
        self.decodes
    }

    fn in_line(&self) -> Box<dyn Iterator<Item = &Job> + '_> {
        Box::new(self.line.iter().map(|place| &self.at(place.3).job))
    }

    fn aside(&self) -> Box<dyn Iterator<Item = &Job> + '_> {
        Box::new(self.aside.iter().map(|place| &self.at(place.3).job))
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }
}
