//! Places each request on the instance with the least load: prompt tokens to compute, or KV tokens
//! on decode instances. Placements since the last report count. Ties go to the lower id.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::Time;
use crate::dispatch::{Decision, Dispatch, Event, Role};
use crate::request::{InstanceId, RequestId, Spec};

#[derive(Clone, Copy, Debug)]
struct Stand {
    role: Role,
    reported: u64,
    placed: u64,
}

/// The policy that chooses the least loaded instance.
#[derive(Clone, Debug, Default)]
pub struct LeastLoaded {
    instances: BTreeMap<InstanceId, Stand>,
    held: VecDeque<(RequestId, bool)>,
    specs: HashMap<RequestId, Spec>,
}

impl LeastLoaded {
    fn least(&self, decode: bool) -> Option<InstanceId> {
        self.instances
            .iter()
            .filter(|(_, stand)| (stand.role == Role::Decode) == decode)
            .min_by_key(|(_, stand)| stand.reported + stand.placed)
            .map(|(instance, _)| *instance)
    }
}

impl Dispatch for LeastLoaded {
    fn name(&self) -> &'static str {
        "least_loaded"
    }

    fn handle(&mut self, _: Time, event: &Event) {
        match event {
            Event::Arrived(spec) => {
                self.specs.insert(spec.id, *spec);
                self.held.push_back((spec.id, false));
            }
            Event::Prefilled { spec, .. } => {
                self.specs.insert(spec.id, *spec);
                self.held.push_back((spec.id, true));
            }
            Event::Up { instance, role } => {
                let stand = Stand { role: *role, reported: 0, placed: 0 };
                self.instances.insert(*instance, stand);
            }
            Event::Down { instance, lost } => {
                self.instances.remove(instance);
                for spec in lost {
                    self.specs.insert(spec.id, *spec);
                    self.held.push_back((spec.id, false));
                }
            }
            Event::Load { instance, load, .. } => {
                if let Some(stand) = self.instances.get_mut(instance) {
                    // On an instance with both phases, one decode counts as much as one prompt
                    // token.
                    stand.reported = match stand.role {
                        Role::Decode => load.decode_context,
                        Role::Whole => load.prefill_tokens + u64::from(load.decoding),
                        Role::Prefill => load.prefill_tokens,
                    };
                    stand.placed = 0;
                }
            }
            Event::Finished { request, .. } | Event::Cancelled(request) => {
                self.specs.remove(request);
                self.held.retain(|(other, _)| other != request);
            }
        }
    }

    fn poll_decision(&mut self, _: Time) -> Option<Decision> {
        let at = (0..self.held.len()).find(|at| self.least(self.held[*at].1).is_some())?;
        let (request, decode) = self.held.remove(at)?;
        let instance = self.least(decode)?;
        let tokens = self.specs.remove(&request).map_or(0, |spec| spec.prompt);
        if let Some(stand) = self.instances.get_mut(&instance) {
            stand.placed += u64::from(tokens);
        }
        Some(Decision::Place { request, instance })
    }

    fn next_deadline(&self) -> Option<Time> {
        None
    }

    fn waiting(&self) -> usize {
        self.held.len()
    }
}
