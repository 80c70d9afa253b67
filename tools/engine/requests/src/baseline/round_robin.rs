//! Gives each request to the next instance of its role in turn.

use std::collections::VecDeque;

use crate::Time;
use crate::dispatch::{Decision, Dispatch, Event, Role};
use crate::request::{InstanceId, RequestId};

/// The instances of one role, and the requests that wait because there is no such instance.
#[derive(Clone, Debug, Default)]
struct Ring {
    instances: Vec<InstanceId>,
    next: usize,
    held: VecDeque<RequestId>,
}

impl Ring {
    fn turn(&mut self) -> Option<InstanceId> {
        let count = self.instances.len();
        let instance = self.instances.get(self.next % count.max(1)).copied()?;
        self.next = (self.next + 1) % count;
        Some(instance)
    }
}

#[derive(Clone, Debug, Default)]
pub struct RoundRobin {
    first: Ring,
    decode: Ring,
}

impl Dispatch for RoundRobin {
    fn handle(&mut self, _: Time, event: &Event) {
        match event {
            Event::Arrived(spec) => self.first.held.push_back(spec.id),
            Event::Prefilled { spec, .. } => self.decode.held.push_back(spec.id),
            Event::Up { instance, role } => {
                let ring = match role {
                    Role::Decode => &mut self.decode,
                    Role::Whole | Role::Prefill => &mut self.first,
                };
                ring.instances.push(*instance);
            }
            Event::Down { instance, lost } => {
                for ring in [&mut self.first, &mut self.decode] {
                    let Some(at) = ring.instances.iter().position(|other| other == instance) else {
                        continue;
                    };
                    ring.instances.remove(at);
                    // The turn stays where it is, or the first instance would get more.
                    ring.next -= usize::from(at < ring.next);
                }
                let again = lost.iter().map(|spec| spec.id);
                self.first.held.extend(again);
            }
            Event::Cancelled(request) => {
                for ring in [&mut self.first, &mut self.decode] {
                    ring.held.retain(|other| other != request);
                }
            }
            Event::Load { .. } | Event::Finished { .. } => (),
        }
    }

    fn poll_decision(&mut self, _: Time) -> Option<Decision> {
        [&mut self.first, &mut self.decode].into_iter().find_map(|ring| {
            ring.held.front()?;
            let instance = ring.turn()?;
            let request = ring.held.pop_front()?;
            Some(Decision::Place { request, instance })
        })
    }

    fn waiting(&self) -> usize {
        self.first.held.len() + self.decode.held.len()
    }
}
