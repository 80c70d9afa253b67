//! Places each request on the instance with the fewest requests (join the shortest queue). Equal
//! instances take turns. The policy needs neither reports nor a model.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::Time;
use crate::dispatch::{Decision, Dispatch, Event, Role};
use crate::request::{InstanceId, RequestId};

#[derive(Clone, Copy, Debug)]
struct Stand {
    role: Role,
    requests: u32,
    /// Value of [`Fewest::turns`] when the instance last got a request.
    turn: u64,
}

/// The policy that chooses the instance with the fewest requests.
#[derive(Clone, Debug, Default)]
pub struct Fewest {
    instances: BTreeMap<InstanceId, Stand>,
    held: VecDeque<(RequestId, bool)>,
    placed: HashMap<RequestId, InstanceId>,
    turns: u64,
}

impl Fewest {
    fn least(&self, decode: bool) -> Option<InstanceId> {
        self.instances
            .iter()
            .filter(|(_, stand)| (stand.role == Role::Decode) == decode)
            .min_by_key(|(instance, stand)| (stand.requests, stand.turn, **instance))
            .map(|(instance, _)| *instance)
    }

    /// Removes a request from its instance and from the requests that wait.
    fn leave(&mut self, request: RequestId) {
        if let Some(instance) = self.placed.remove(&request)
            && let Some(stand) = self.instances.get_mut(&instance)
        {
            stand.requests = stand.requests.saturating_sub(1);
        }
        self.held.retain(|(other, _)| *other != request);
    }
}

impl Dispatch for Fewest {
    fn handle(&mut self, _: Time, event: &Event) {
        match event {
            Event::Arrived(spec) => self.held.push_back((spec.id, false)),
            Event::Prefilled { spec, .. } => {
                self.leave(spec.id);
                self.held.push_back((spec.id, true));
            }
            Event::Up { instance, role } => {
                // An instance that changes its role still has requests of its former role.
                let requests = self.placed.values().filter(|at| *at == instance).count() as u32;
                self.instances.insert(*instance, Stand { role: *role, requests, turn: 0 });
            }
            Event::Down { instance, lost } => {
                self.instances.remove(instance);
                for spec in lost {
                    self.leave(spec.id);
                    self.held.push_back((spec.id, false));
                }
            }
            Event::Finished { request, .. } | Event::Cancelled(request) => self.leave(*request),
            Event::Load { .. } => (),
        }
    }

    fn poll_decision(&mut self, _: Time) -> Option<Decision> {
        let at = (0..self.held.len()).find(|at| self.least(self.held[*at].1).is_some())?;
        let (request, decode) = self.held.remove(at)?;
        let instance = self.least(decode)?;
        self.turns += 1;
        if let Some(stand) = self.instances.get_mut(&instance) {
            stand.requests += 1;
            stand.turn = self.turns;
        }
        self.placed.insert(request, instance);
        Some(Decision::Place { request, instance })
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
        let mut fewest = Fewest::default();
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
