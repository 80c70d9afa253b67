//! How a replica makes a plan: which jobs are relegated, decode, compute prompts, or lose blocks.

use std::ops::Bound;

use super::state::WaitingKey;
use super::{Computed, Replica};
use crate::Time;
use crate::iteration::{Chunk, Dropped, Plan, Refusal, Refused, Step, Why};
use crate::job::{Job, Phase};
use crate::latency::Composition;

impl Replica {
    /// Returns the next plan, or `None` if a plan is running or there is nothing to compute.
    pub fn plan(&mut self, now: Time) -> Option<Plan> {
        if self.busy || self.state.slots.is_empty() {
            return None;
        }
        self.plans += 1;
        self.chunk_slots.clear();
        self.state.seen.clear();
        let mut plan = Plan::default();
        self.give_up(now, &mut plan);
        self.decode(&mut plan);
        self.prefill(now, &mut plan);
        if plan.chunks.is_empty() && plan.steps.is_empty() {
            self.go_on(&mut plan);
            // If the discipline starts no job, a lack of blocks must not stop the replica.
            let blocked = !self.state.decoding.is_empty() || self.pool().used() > 0;
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
        self.busy = true;
        self.computed.clear();
        let chunks = plan.chunks.iter().zip(&self.chunk_slots);
        self.computed.extend(chunks.map(|(chunk, slot)| Computed {
            slot: *slot,
            request: chunk.request,
            tokens: chunk.tokens,
            token: chunk.last,
        }));
        let steps = plan.steps.iter().zip(&self.state.seen);
        self.computed.extend(steps.map(|(step, slot)| Computed {
            slot: *slot,
            request: step.request,
            tokens: 1,
            token: true,
        }));
        Some(plan)
    }

    /// Takes all blocks of a job and puts the job back into the queue.
    fn drop_blocks(&mut self, slot: usize, why: Why, plan: &mut Plan) {
        let request = self.state.at(slot).job.id();
        self.state.release(slot);
        self.state.change(slot, &*self.discipline, Job::lost);
        self.discipline.dropped(&self.state.at(slot).job);
        plan.drops.push(Dropped { request, why });
    }

    fn give_up(&mut self, now: Time, plan: &mut Plan) {
        for request in self.discipline.relegate(now, &self.state) {
            let Some(slot) = self.state.slot(request) else { continue };
            let job = &self.state.at(slot).job;
            if job.relegated || job.phase == Phase::Decoding {
                continue;
            }
            self.state.change(slot, &*self.discipline, |job| job.relegated = true);
            if self.state.holds(slot) {
                self.drop_blocks(slot, Why::Relegated, plan);
            }
        }
    }

    /// Plans one token for each decoding job. A job without a free block takes those of the last
    /// job.
    fn decode(&mut self, plan: &mut Plan) {
        self.state.seen.clear();
        self.state.decodes = Composition::default();
        let order = self.state.take_decoding();
        let mut turns = core::mem::take(&mut self.state.turns);
        turns.clear();
        turns.extend(order.iter().take(self.discipline.decodes_max()).map(|place| place.3));
        let (mut at, mut end) = (0, turns.len());
        plan.steps.reserve(end);
        let mut some_lost = false;
        while at < end {
            let slot = turns[at];
            at += 1;
            let context = self.state.at(slot).job.context;
            let entering = !self.state.holds(slot);
            loop {
                if self.state.grow(slot, context + 1) {
                    let job = &self.state.at(slot).job;
                    if entering {
                        self.discipline.began(job);
                    }
                    let request = job.id();
                    plan.steps.push(Step { request, context });
                    self.state.decodes = self.state.decodes.with_decode(context);
                    self.state.seen.push(slot);
                    break;
                }
                if entering {
                    // The job brought its KV from another instance and waits for room.
                    break;
                }
                if let Some(victim) = self.state.last_prompt(None) {
                    self.drop_blocks(victim, Why::Memory, plan);
                } else if at < end {
                    end -= 1;
                    let victim = turns[end];
                    if self.state.holds(victim) {
                        self.drop_blocks(victim, Why::Memory, plan);
                        some_lost = true;
                    }
                } else {
                    self.drop_blocks(slot, Why::Memory, plan);
                    some_lost = true;
                    break;
                }
            }
        }
        self.state.turns = turns;
        self.state.put_back(order, some_lost);
    }

    /// Plans up to `budget` tokens of a prompt. Returns their number, or `None` without enough
    /// blocks.
    fn chunk(&mut self, slot: usize, budget: u32, plan: &mut Plan) -> Option<u32> {
        let place = self.state.place(slot);
        let job = self.state.at(slot).job;
        let running = !plan.chunks.is_empty() || !plan.steps.is_empty();
        let spare = if running && job.phase == Phase::Waiting { self.state.watermark } else { 0 };
        while self.pool().lacking(job.id(), job.target) + spare > self.pool().free() {
            // A victim must have begun, must be behind this job, and must not be part of this plan.
            let victim =
                self.state.last_prompt(Some(&place)).filter(|slot| !self.is_planned(*slot))?;
            self.drop_blocks(victim, Why::Memory, plan);
        }
        if !self.state.grow(slot, job.target) {
            return None;
        }
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
        self.chunk_slots.push(slot);
        self.state.at_mut(slot).planned = self.plans;
        Some(tokens)
    }

    /// Reports whether the plan in progress computes tokens of this prompt.
    fn is_planned(&self, slot: usize) -> bool {
        self.state.at(slot).planned == self.plans
    }

    /// Spends the discipline's budget on jobs in the queue, then on relegated jobs.
    fn prefill(&mut self, now: Time, plan: &mut Plan) {
        let mut budget = self.discipline.budget(now, &self.state);
        self.budget = budget;
        if budget == 0 {
            return;
        }
        let mut some = std::mem::take(&mut self.scratch);
        self.going_on(now, budget, &mut some);
        let left = self.go_through(&some, Phase::Prefilling, budget, plan);
        let left = left.and_then(|left| {
            budget = left;
            self.spend_in_line(now, budget, plan)
        });
        if let Some(left) = left.filter(|left| *left > 0) {
            some.clear();
            let mut tokens = u64::from(left);
            for place in &self.state.aside {
                if tokens == 0 {
                    break;
                }
                let prefill = self.state.at(place.3).job.prefill_left();
                tokens = tokens.saturating_sub(u64::from(prefill));
                some.push(place.3);
            }
            self.go_through(&some, Phase::Waiting, left, plan);
        }
        self.scratch = some;
    }

    /// Collects in `some` the begun jobs that go before the others. Stops when their tokens use up
    /// the budget, because further jobs would get none.
    fn going_on(&mut self, now: Time, budget: u32, some: &mut Vec<usize>) {
        some.clear();
        let all = self.discipline.begun_first();
        let mut tokens = u64::from(budget);
        for place in &self.state.begun {
            if tokens == 0 {
                break;
            }
            let job = &self.state.at(place.3).job;
            if all || self.discipline.goes_on(now, job) {
                tokens = tokens.saturating_sub(u64::from(job.prefill_left()));
                some.push(place.3);
            }
        }
    }

    /// Gives the budget to the jobs in `some`, in order. Returns the rest of the budget, or `None`
    /// without enough blocks. With `least` = `Prefilling`, jobs that lost their blocks meanwhile
    /// are skipped.
    fn go_through(
        &mut self,
        some: &[usize],
        least: Phase,
        mut budget: u32,
        plan: &mut Plan,
    ) -> Option<u32> {
        for slot in some {
            if budget == 0 {
                break;
            }
            if least == Phase::Prefilling && self.state.at(*slot).job.phase != least {
                continue;
            }
            budget -= self.chunk(*slot, budget, plan)?;
        }
        Some(budget)
    }

    /// Gives the budget to the jobs in the queue, in order. Returns the rest of the budget, or
    /// `None` without enough blocks.
    fn spend_in_line(&mut self, now: Time, mut budget: u32, plan: &mut Plan) -> Option<u32> {
        let mut after: Option<WaitingKey> = None;
        let mut closed = false;
        while budget > 0 {
            let beyond = after.map_or(Bound::Unbounded, Bound::Excluded);
            // Jobs that may not start don't hold up begun jobs.
            let line = if closed { &self.state.begun } else { &self.state.line };
            let next = line.range((beyond, Bound::Unbounded)).next().copied();
            let Some(place) = next else { break };
            after = Some(place);
            let slot = place.3;
            if self.is_planned(slot) {
                continue;
            }
            let job = &self.state.at(slot).job;
            if job.phase == Phase::Waiting && !self.discipline.may_start(now, job, &self.state) {
                closed = true;
                continue;
            }
            budget -= self.chunk(slot, budget, plan)?;
        }
        Some(budget)
    }

    /// Continues the first begun job that has enough blocks. Called if the discipline lets the
    /// first jobs wait and nothing was planned. Otherwise begun jobs would lose their blocks in
    /// vain.
    fn go_on(&mut self, plan: &mut Plan) {
        let begun: Vec<usize> = self.state.begun.iter().map(|place| place.3).collect();
        for slot in begun {
            if self.chunk(slot, self.budget.max(1), plan).is_some() {
                return;
            }
        }
    }

    /// Frees memory if there are jobs but nothing could be planned: takes the blocks of the last
    /// holder, or refuses a job that became larger than the pool. Returns whether anything changed.
    fn unblock(&mut self, plan: &mut Plan) -> bool {
        let holder = self.state.last_prompt(None);
        if let Some(slot) = holder.or_else(|| self.state.last_decoding()) {
            self.drop_blocks(slot, Why::Memory, plan);
            return true;
        }
        let pool = self.pool();
        let hopeless = self
            .state
            .jobs()
            .copied()
            .find(|job| pool.blocks(job.target.max(job.context + 1)) > pool.capacity());
        if let Some(job) = hopeless {
            self.state.remove(job.id());
            self.discipline.refused(job.id());
            self.refusals.push_back(Refusal { request: job.id(), why: Refused::TooLong });
            return true;
        }
        false
    }
}
