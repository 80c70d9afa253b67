//! Filling of batches: requests move from a unit's lines into batches, in the order and within the
//! budget of each line's discipline.
//!
//! The next batch is filled while another computes. A discipline therefore decides for the time at
//! which that batch can start, not for the present.

use laxity_policy::{RequestId, Span, Time};

use super::batch::{Member, pairs};
use super::line::{self, Cursor};
use super::world::World;

impl World<'_> {
    pub(super) fn enqueue(&mut self, unit: u32, request: u32) {
        let seat = self.seat(request);
        let state = &self.requests[request as usize];
        let (arrival, deadline) = (state.arrival, state.deadline);
        let spec = line::spec(request, arrival, deadline, state.prompt, state.reused);
        self.units[unit as usize].lines[seat].arrive(self.now, spec);
        self.fill(unit);
        if self.units[unit as usize].current.is_none() {
            self.start_batch(unit);
        }
    }

    pub(super) fn seat(&self, request: u32) -> usize {
        if self.setup.striped {
            0
        } else {
            (self.requests[request as usize].rank % self.setup.layout.ranks_per_unit) as usize
        }
    }

    fn next_start(&self, unit: u32) -> Time {
        let Some(current) = self.units[unit as usize].current else { return self.now };
        let batch = &self.batches[current];
        let computes = Span(batch.layer_ns * u64::from(self.setup.layers));
        batch.started.map_or(self.now, |at| at + computes).max(self.now)
    }

    pub(super) fn fill(&mut self, unit: u32) {
        let slot = self.next_batch(unit);
        let start = self.next_start(unit);
        let mut changed = false;
        for seat in 0..self.units[unit as usize].lines.len() {
            let given_up = self.units[unit as usize].lines[seat].give_up(start);
            for request in given_up {
                self.give_up(request);
            }
            let mut cursor = Cursor::default();
            while let Some(request) = self.units[unit as usize].lines[seat].next(start, &mut cursor)
            {
                let Some(member) = self.part((unit, slot), seat, request, start) else { break };
                self.take((unit, slot), seat, member);
                changed = true;
                if !member.last {
                    // Another batch computes the rest.
                    break;
                }
            }
        }
        if !changed && self.units[unit as usize].current.is_none() {
            changed = self.force(unit, slot);
        }
        self.grown(slot, changed);
    }

    /// Takes the first request of each line of an idle unit, although no discipline admits one.
    /// Otherwise the disciplines would never be queried again.
    fn force(&mut self, unit: u32, slot: u32) -> bool {
        if !self.batches[slot].members.is_empty() {
            return false;
        }
        let mut changed = false;
        for seat in 0..self.units[unit as usize].lines.len() {
            let Some(request) = self.units[unit as usize].lines[seat].first() else { continue };
            self.batches[slot].budgets[seat] = Some(self.setup.scenario.serving.token_budget);
            if let Some(member) = self.part((unit, slot), seat, request, self.now) {
                self.take((unit, slot), seat, member);
                changed = true;
            }
        }
        changed
    }

    /// Fills room that no other request needs in a starting batch with relegated requests.
    pub(super) fn fill_up(&mut self, unit: u32) {
        let slot = self.next_batch(unit);
        let mut changed = false;
        for seat in 0..self.units[unit as usize].lines.len() {
            let mut cursor = Cursor::default();
            while self.units[unit as usize].lines[seat].is_empty() {
                let Some(request) = self.units[unit as usize].lines[seat].next_aside(&mut cursor)
                else {
                    break;
                };
                let Some(member) = self.part((unit, slot), seat, request, self.now) else { break };
                self.take((unit, slot), seat, member);
                changed = true;
                if !member.last {
                    break;
                }
            }
        }
        self.grown(slot, changed);
    }

    fn take(&mut self, (unit, slot): (u32, u32), seat: usize, member: Member) {
        let line = &mut self.units[unit as usize].lines[seat];
        line.took(member.request, member.tokens, member.last);
        self.join(slot, seat, member);
    }

    fn grown(&mut self, slot: u32, changed: bool) {
        if changed {
            self.estimate(slot);
            self.announce(slot);
            self.fetch_ahead(slot);
        }
    }

    fn give_up(&mut self, request: u32) {
        self.requests[request as usize].relegated = true;
        self.measure.relegated += 1;
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.give_up(RequestId(u64::from(request) + 1));
        }
    }

    fn next_batch(&mut self, unit: u32) -> u32 {
        match self.units[unit as usize].next {
            Some(slot) => slot,
            None => self.open_batch(unit),
        }
    }

    fn part(
        &mut self,
        (unit, slot): (u32, u32),
        rank: usize,
        request: u32,
        start: Time,
    ) -> Option<Member> {
        let serving = &self.setup.scenario.serving;
        let line = &mut self.units[unit as usize].lines[rank];
        let budget = self.batches[slot].budgets[rank]
            .get_or_insert_with(|| line.budget(start).min(serving.token_budget));
        let budget = u64::from(*budget);
        let batch = &self.batches[slot];
        let state = &self.requests[request as usize];
        let computed = batch.tokens[rank];
        let room = budget.saturating_sub(computed) as u32;
        let cut = |member: &Member| member.request == request && !member.last;
        let in_it = batch.members.iter().any(cut);
        if batch.seats[rank] >= serving.requests_per_batch || in_it || room == 0 {
            return None;
        }
        let wanted = state.to_compute;
        let tokens = if wanted <= room {
            wanted
        } else if serving.chunked {
            room
        } else if computed == 0 {
            wanted
        } else {
            return None;
        };
        Some(Member {
            request,
            tokens,
            before: state.prompt - wanted,
            first: wanted == state.prompt - state.reused,
            last: tokens == wanted,
        })
    }

    fn open_batch(&mut self, unit: u32) -> u32 {
        let state = &mut self.units[unit as usize];
        let slot = self.batches.open(unit, state.lines.len(), self.setup.layers);
        self.batches[slot].ahead = state.current.map(|current| self.batches[current].policy_id());
        state.next = Some(slot);
        slot
    }

    fn join(&mut self, slot: u32, rank: usize, member: Member) {
        let batch = &mut self.batches[slot];
        batch.members.push(member);
        batch.tokens[rank] += u64::from(member.tokens);
        batch.pairs[rank] += pairs(member.tokens, member.before);
        batch.seats[rank] += 1;
        batch.context += u64::from(member.before + member.tokens);
        self.requests[member.request as usize].to_compute -= member.tokens;
        if self.batches[slot].fetched > 0 && member.first {
            // The first layers of the batch were already fetched for other members.
            for layer in 0..self.batches[slot].fetched {
                self.fetch(slot, member.request, layer);
            }
        }
    }
}
