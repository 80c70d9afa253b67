//! What a replica has to do, without who decides: where each job stands, in what order, and the
//! sums that are asked for in each iteration.
//!
//! Made for 256 that decode and 10 000 in line at 20 µs an iteration
//! (docs/notes/request-decision-costs.md):
//!
//! * A job is a slot of a table. Numbers of requests are looked up when they come from outside, and
//!   not for each token.
//! * How many blocks a job holds is kept beside it; the pool's book is only opened where that
//!   changes, once in a block of tokens.
//! * Whoever holds blocks and does not decode is listed apart: where memory is short, the victim is
//!   found without a walk through the line.
//! * Those that decode are kept in the order of the last iteration, which nearly always is the
//!   order of this one.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use crate::Time;
use crate::discipline::{Discipline, Rank};
use crate::iteration::Load;
use crate::job::{Job, Phase};
use crate::kv::{Pool, Short};
use crate::latency::Composition;
use crate::request::RequestId;

/// How often prompts that come before it may take a prompt's blocks. Under an order that progress
/// changes (least laxity first), two that don't fit together would take them from each other for
/// ever.
const ROBBED_MOST: u32 = 3;

/// A place in line. Relegated jobs have a line of their own.
pub(super) type WaitingKey = (Rank, Time, RequestId, usize);

#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) job: Job,
    pub(super) rank: Rank,
    /// Blocks that it holds, as the pool has it.
    held: u32,
    /// Among those that decode, who came later has the larger number.
    joined: u64,
    /// The last plan that computes something of it.
    pub(super) planned: u64,
    /// The token that is being computed is its last.
    pub(super) ends: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct State {
    pub(super) pool: Pool,
    /// Blocks that a prompt which starts leaves for those that decode.
    pub(super) watermark: u32,
    entries: Vec<Option<Entry>>,
    vacant: Vec<usize>,
    slots: FxHashMap<RequestId, usize>,
    pub(super) line: BTreeSet<WaitingKey>,
    /// Of those in line, the ones that have begun.
    pub(super) begun: BTreeSet<WaitingKey>,
    pub(super) aside: BTreeSet<WaitingKey>,
    /// Of those in line, the ones that hold blocks; the same of those aside.
    holders: BTreeSet<WaitingKey>,
    aside_holders: BTreeSet<WaitingKey>,
    /// Those that decode. Their ranks are as they were when the last plan was made.
    decoding: Vec<WaitingKey>,
    /// Who joined them last.
    joined: u64,
    /// Prompt tokens of those in line.
    pub(super) backlog: u64,
    aside_backlog: u64,
    /// Of those aside, how many wait.
    aside_waiting: usize,
    /// Tokens of KV of those that decode.
    context: u64,
    /// Jobs that decode in the iteration that is being made, in the order of their ranks.
    pub(super) seen: Vec<usize>,
    /// Whose turn it is to decode, by slot: room for one iteration.
    pub(super) turns: Vec<usize>,
    pub(super) decodes: Composition,
}

impl State {
    pub(super) fn new(pool: Pool, watermark: u32) -> Self {
        Self {
            pool,
            watermark,
            entries: Vec::new(),
            vacant: Vec::new(),
            slots: FxHashMap::default(),
            line: BTreeSet::new(),
            begun: BTreeSet::new(),
            aside: BTreeSet::new(),
            holders: BTreeSet::new(),
            aside_holders: BTreeSet::new(),
            decoding: Vec::new(),
            joined: 0,
            backlog: 0,
            aside_backlog: 0,
            aside_waiting: 0,
            context: 0,
            seen: Vec::new(),
            turns: Vec::new(),
            decodes: Composition::default(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Where a request is.
    pub(super) fn slot(&self, request: RequestId) -> Option<usize> {
        self.slots.get(&request).copied()
    }

    pub(super) fn at(&self, slot: usize) -> &Entry {
        self.entries[slot]
            .as_ref()
            .expect("a slot in a line has a job")
    }

    pub(super) fn at_mut(&mut self, slot: usize) -> &mut Entry {
        self.entries[slot]
            .as_mut()
            .expect("a slot in a line has a job")
    }

    /// What is in a slot, if that still is this request.
    pub(super) fn still_at(&mut self, slot: usize, request: RequestId) -> Option<&mut Entry> {
        let entry = self.entries.get_mut(slot)?.as_mut()?;
        (entry.job.id() == request).then_some(entry)
    }

    /// All that are here.
    pub(super) fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.entries.iter().flatten().map(|entry| &entry.job)
    }

    pub(super) fn place(&self, slot: usize) -> WaitingKey {
        let Entry { job, rank, .. } = self.at(slot);
        (*rank, job.spec.arrival, job.id(), slot)
    }

    /// Puts a job where it belongs: in line, aside, or among those that decode.
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
        let left = u64::from(job.prefill_left());
        let holders = if job.relegated {
            self.aside.insert(place);
            self.aside_backlog += left;
            self.aside_waiting += usize::from(job.phase == Phase::Waiting);
            &mut self.aside_holders
        } else {
            self.line.insert(place);
            if job.phase == Phase::Prefilling {
                self.begun.insert(place);
            }
            self.backlog += left;
            &mut self.holders
        };
        if held > 0 {
            holders.insert(place);
        }
    }

    /// Takes a job out of where it is, as [`Self::enter`] has put it.
    fn withdraw(&mut self, slot: usize) {
        let place = self.place(slot);
        let Entry { job, held, .. } = *self.at(slot);
        if job.phase == Phase::Decoding {
            // While those that decode are gone through, they are taken out of here as a whole.
            if let Some(at) = self.decoding.iter().position(|other| other.3 == slot) {
                self.decoding.remove(at);
            }
            self.context -= u64::from(job.context);
            return;
        }
        let left = u64::from(job.prefill_left());
        let holders = if job.relegated {
            self.aside.remove(&place);
            self.aside_backlog -= left;
            self.aside_waiting -= usize::from(job.phase == Phase::Waiting);
            &mut self.aside_holders
        } else {
            self.line.remove(&place);
            if job.phase == Phase::Prefilling {
                self.begun.remove(&place);
            }
            self.backlog -= left;
            &mut self.holders
        };
        if held > 0 {
            holders.remove(&place);
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

    /// Changes a job that is in a line, which may change its place.
    pub(super) fn change(
        &mut self,
        slot: usize,
        discipline: &dyn Discipline,
        with: impl FnOnce(&mut Job),
    ) {
        let Entry { job: old, rank, .. } = *self.at(slot);
        let mut job = old;
        with(&mut job);
        let next = discipline.rank(&job);
        let decodes = old.phase == Phase::Decoding || job.phase == Phase::Decoding;
        let stays = next == rank && old.phase == job.phase && old.relegated == job.relegated;
        if stays && !decodes {
            let backlog = if job.relegated {
                &mut self.aside_backlog
            } else {
                &mut self.backlog
            };
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

    /// A job that decodes has a token more: `with` says what that changes. Its place does not
    /// change: none of those that decode is in line.
    pub(super) fn step(
        &mut self,
        slot: usize,
        discipline: &dyn Discipline,
        with: impl FnOnce(&mut Job),
    ) {
        let entry = self.at_mut(slot);
        let before = entry.job.context;
        with(&mut entry.job);
        entry.rank = discipline.rank(&entry.job);
        let more = entry.job.context - before;
        self.context += u64::from(more);
    }

    /// All ranks are others.
    pub(super) fn rerank(&mut self, discipline: &dyn Discipline) {
        let mut moved = false;
        for entry in self.entries.iter_mut().flatten() {
            let rank = discipline.rank(&entry.job);
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
        for which in 0..5 {
            let line = [
                &self.line,
                &self.begun,
                &self.aside,
                &self.holders,
                &self.aside_holders,
            ][which];
            // Built at once: a tree of ten thousand places that is changed one by one takes
            // milliseconds.
            let sorted: BTreeSet<WaitingKey> =
                line.iter().map(|place| self.place(place.3)).collect();
            *[
                &mut self.line,
                &mut self.begun,
                &mut self.aside,
                &mut self.holders,
                &mut self.aside_holders,
            ][which] = sorted;
        }
    }

    pub(super) fn holds(&self, slot: usize) -> bool {
        self.at(slot).held > 0
    }

    /// Lets a job hold so many tokens. Whether it does.
    pub(super) fn grow(&mut self, slot: usize, tokens: u32) -> bool {
        let Entry { job, held, .. } = self.at(slot);
        let reach = u64::from(*held) * u64::from(self.pool.block_tokens());
        if u64::from(tokens) <= reach {
            return true;
        }
        let request = job.id();
        let grown = self.pool.grow(request, tokens).is_ok();
        if grown {
            self.note(slot);
        }
        grown
    }

    /// Keeps blocks for a request that is here or on its way.
    pub(super) fn reserve(&mut self, request: RequestId, tokens: u32) -> Result<(), Short> {
        self.pool.grow(request, tokens)?;
        if let Some(slot) = self.slot(request) {
            self.note(slot);
        }
        Ok(())
    }

    /// A request that is here no more gives back what it holds.
    pub(super) fn forget(&mut self, request: RequestId) {
        self.pool.release(request);
    }

    /// A job that stays here gives back what it holds.
    pub(super) fn release(&mut self, slot: usize) {
        let request = self.at(slot).job.id();
        self.pool.release(request);
        self.note(slot);
    }

    pub(super) fn resize(&mut self, blocks: u32) {
        self.pool.resize(blocks);
    }

    /// What a job holds is another number than before.
    fn note(&mut self, slot: usize) {
        let place = self.place(slot);
        let held = self.pool.held(place.2);
        let entry = self.at_mut(slot);
        let before = std::mem::replace(&mut entry.held, held);
        let (decodes, relegated) = (entry.job.phase == Phase::Decoding, entry.job.relegated);
        if decodes || (before > 0) == (held > 0) {
            return;
        }
        let holders = if relegated {
            &mut self.aside_holders
        } else {
            &mut self.holders
        };
        if held > 0 {
            holders.insert(place);
        } else {
            holders.remove(&place);
        }
    }

    /// Who loses its blocks next, of those behind `before` in line: whoever was given up, then the
    /// end of the line. For a job that decodes all prompts are behind.
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

    /// Of those that decode and hold blocks, the one that came last.
    pub(super) fn last_decoding(&self) -> Option<usize> {
        let held = self.decoding.iter().filter(|place| self.holds(place.3));
        held.max_by_key(|place| self.at(place.3).joined)
            .map(|place| place.3)
    }

    /// Some decode.
    pub(super) fn decodes_any(&self) -> bool {
        !self.decoding.is_empty()
    }

    /// Those that decode, by rank; to be given back by [`Self::put_back`].
    pub(super) fn take_decoding(&mut self) -> Vec<WaitingKey> {
        let mut order = std::mem::take(&mut self.decoding);
        for place in &mut order {
            place.0 = self.at(place.3).rank;
        }
        // Where ranks follow the last token, those that had one last time are behind the others
        // now.
        if let Some(at) = order.windows(2).position(|pair| pair[0] > pair[1]) {
            order.rotate_left(at + 1);
            if !order.is_sorted() {
                order.sort_unstable();
            }
        }
        order
    }

    /// See [`Self::take_decoding`]. Those that lost their blocks meanwhile are in line.
    pub(super) fn put_back(&mut self, mut order: Vec<WaitingKey>, some_lost: bool) {
        if some_lost {
            order.retain(|place| self.at(place.3).job.phase == Phase::Decoding);
        }
        self.decoding = order;
    }

    pub(super) fn load(&self) -> Load {
        let waiting = self.line.len() - self.begun.len() + self.aside_waiting;
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

    /// Everything that is summed or listed apart is what a walk over all jobs gives. For tests.
    pub(super) fn is_balanced(&self) -> bool {
        let mut again = Self::new(self.pool.clone(), self.watermark);
        for (slot, entry) in self.entries.iter().enumerate() {
            again.entries.push(*entry);
            let Some(Entry { job, held, .. }) = entry else {
                continue;
            };
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
            && decoding
                .into_iter()
                .eq(again.decoding.iter().map(|place| place.3))
            && [&self.line, &self.begun, &self.aside] == [&again.line, &again.begun, &again.aside]
            && [&self.holders, &self.aside_holders] == [&again.holders, &again.aside_holders]
    }
}
