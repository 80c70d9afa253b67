//! Places each request on the instance with the least load: prompt tokens to compute, or KV tokens
//! on decode instances, those on their way included. Or the load is the number of requests (join
//! the shortest queue), which needs no reports. Equal instances take turns.

use std::collections::{BTreeMap, VecDeque};

use crate::Time;
use crate::dispatch::{Decision, Dispatch, Event, Role};
use crate::ledger::{InstanceTable, Row, Targets};
use crate::request::{InstanceId, RequestId, Spec};

/// The policy that chooses the least loaded instance.
#[derive(Clone, Debug, Default)]
pub struct LeastLoaded {
    /// Whether the load is the number of requests.
    by_requests: bool,
    ledger: InstanceTable,
    held: VecDeque<(Spec, bool)>,
    /// When each instance last got a request, in placements.
    turns: BTreeMap<InstanceId, u64>,
    placements: u64,
}

impl LeastLoaded {
    /// Creates the policy that chooses the instance with the fewest requests.
    pub fn by_requests() -> Self {
        Self { by_requests: true, ..Self::default() }
    }

    fn least(&self, decode: bool) -> Option<InstanceId> {
        // On an instance with both phases, one decode counts as much as one prompt token.
        let load = |row: &Row| match row.role {
            _ if self.by_requests => f64::from(row.requests()),
            Role::Decode => row.decodes().1,
            Role::Whole => row.prompts().tokens + row.decodes().0,
            Role::Prefill => row.prompts().tokens,
        };
        let turn = |instance| self.turns.get(&instance).copied().unwrap_or(0);
        self.ledger
            .rows()
            .filter(|(_, row)| (row.role == Role::Decode) == decode)
            .min_by(|(x, a), (y, b)| load(a).total_cmp(&load(b)).then(turn(*x).cmp(&turn(*y))))
            .map(|(instance, _)| instance)
    }

    fn leave(&mut self, request: RequestId) {
        self.ledger.leave(request);
        self.held.retain(|(other, _)| other.id != request);
    }
}

impl Dispatch for LeastLoaded {
    fn handle(&mut self, now: Time, event: &Event) {
        match event {
            Event::Arrived(spec) => self.held.push_back((*spec, false)),
            Event::Prefilled { spec, .. } => {
                self.ledger.leave(spec.id);
                self.held.push_back((*spec, true));
            }
            Event::Up { instance, role } => self.ledger.up(now, *instance, *role),
            Event::Down { instance, lost } => {
                self.ledger.down(*instance, lost);
                for spec in lost {
                    self.leave(spec.id);
                    self.held.push_back((*spec, false));
                }
            }
            Event::Load { instance, load, .. } => self.ledger.report(now, *instance, *load),
            Event::Finished { request, .. } | Event::Cancelled(request) => self.leave(*request),
        }
    }

    fn poll_decision(&mut self, _: Time) -> Option<Decision> {
        let at = (0..self.held.len()).find(|at| self.least(self.held[*at].1).is_some())?;
        let (spec, decode) = self.held.remove(at)?;
        let instance = self.least(decode)?;
        self.ledger.place(&spec, Targets::of(&spec).tpot, instance);
        self.placements += 1;
        self.turns.insert(instance, self.placements);
        Some(Decision::Place { request: spec.id, instance })
    }

    fn waiting(&self) -> usize {
        self.held.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Spec;

    fn spec(number: u64) -> Spec {
        Spec { id: RequestId(number), prompt: 10, output_max: 1, ..Spec::default() }
    }

    #[test]
    fn the_shortest_queue_is_joined_and_equals_take_turns() {
        let mut fewest = LeastLoaded::by_requests();
        let up = |instance| Event::Up { instance: InstanceId(instance), role: Role::Prefill };
        fewest.handle(Time::ZERO, &Event::Arrived(spec(0)));
        assert_eq!(fewest.poll_decision(Time::ZERO), None, "nobody is there");
        (0..3).for_each(|instance| fewest.handle(Time::ZERO, &up(instance)));
        (1..5).for_each(|number| fewest.handle(Time::ZERO, &Event::Arrived(spec(number))));
        let mut placed = Vec::new();
        while let Some(Decision::Place { instance, .. }) = fewest.poll_decision(Time::ZERO) {
            placed.push(instance.0);
        }
        assert_eq!(placed, [0, 1, 2, 0, 1]);
        // Two requests leave instance 1, which is empty afterwards.
        fewest.handle(Time::ZERO, &Event::Cancelled(RequestId(1)));
        fewest.handle(Time::ZERO, &Event::Cancelled(RequestId(4)));
        fewest.handle(Time::ZERO, &Event::Arrived(spec(5)));
        let next = fewest.poll_decision(Time::ZERO);
        let place = |request, instance| {
            let (request, instance) = (RequestId(request), InstanceId(instance));
            Some(Decision::Place { request, instance })
        };
        assert_eq!(next, place(5, 1));
        // A request that is lost with an instance is placed again.
        let down = Event::Down { instance: InstanceId(1), lost: vec![spec(5)] };
        fewest.handle(Time::ZERO, &down);
        assert_eq!(fewest.poll_decision(Time::ZERO), place(5, 2));
        assert_eq!(fewest.waiting(), 0);
    }
}
