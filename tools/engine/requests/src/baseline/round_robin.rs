//! Gives each request to the next instance of its role in turn.

use std::collections::VecDeque;

use crate::Time;
use crate::dispatch::{Dispatch, DispatchDecision, DispatchEvent, Role};
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
    fn handle(&mut self, _: Time, event: &DispatchEvent) {
        match event {
            DispatchEvent::Arrived(spec) => self.first.held.push_back(spec.id),
            DispatchEvent::Prefilled { spec, .. } => self.decode.held.push_back(spec.id),
            DispatchEvent::Up { instance, role } => {
                let ring = match role {
                    Role::Decode => &mut self.decode,
                    Role::Whole | Role::Prefill => &mut self.first,
                };
                ring.instances.push(*instance);
            }
            DispatchEvent::Down { instance, lost } => {
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
            DispatchEvent::Cancelled(request) => {
                for ring in [&mut self.first, &mut self.decode] {
                    ring.held.retain(|other| other != request);
                }
            }
            DispatchEvent::Load { .. } | DispatchEvent::Finished { .. } => (),
        }
    }

    fn poll_decision(&mut self, _: Time) -> Option<DispatchDecision> {
        [&mut self.first, &mut self.decode].into_iter().find_map(|ring| {
            ring.held.front()?;
            let instance = ring.turn()?;
            let request = ring.held.pop_front()?;
            Some(DispatchDecision::Place { request, instance })
        })
    }

    fn waiting(&self) -> usize {
        self.first.held.len() + self.decode.held.len()
    }
}
