//! Replicas of their own for each class (QoServe §2.2: what operators do today). Round robin inside
//! a silo.

use std::collections::{HashMap, VecDeque};

use crate::Time;
use crate::dispatch::{Decision, Dispatch, Event};
use crate::request::{ClassId, InstanceId, RequestId};

/// Instances by class: `shares[i]` instances, in the order in which they come up, for class `i`.
#[derive(Clone, Debug)]
pub struct Silo {
    shares: Vec<u32>,
    instances: Vec<Vec<InstanceId>>,
    next: Vec<usize>,
    held: VecDeque<(RequestId, ClassId)>,
    classes: HashMap<InstanceId, usize>,
}

impl Silo {
    /// So many instances for each class. Those that come up beyond the sum go to the last class.
    ///
    /// # Panics
    /// If there is no class.
    #[must_use]
    pub fn new(shares: &[u32]) -> Self {
        assert!(!shares.is_empty(), "a silo is for a class");
        Self {
            shares: shares.to_vec(),
            instances: vec![Vec::new(); shares.len()],
            next: vec![0; shares.len()],
            held: VecDeque::new(),
            classes: HashMap::new(),
        }
    }

    fn class(&self, class: ClassId) -> usize {
        usize::from(class.0).min(self.shares.len() - 1)
    }
}

impl Dispatch for Silo {
    fn name(&self) -> &'static str {
        "silo"
    }

    fn handle(&mut self, _: Time, event: &Event) {
        match event {
            Event::Arrived(spec) | Event::Prefilled { spec, .. } => {
                self.held.push_back((spec.id, spec.class));
            }
            Event::Up { instance, .. } => {
                let wanting = self
                    .shares
                    .iter()
                    .zip(&self.instances)
                    .position(|(share, some)| (some.len() as u32) < *share);
                let class = wanting.unwrap_or(self.shares.len() - 1);
                self.instances[class].push(*instance);
                self.classes.insert(*instance, class);
            }
            Event::Down { instance, lost } => {
                if let Some(class) = self.classes.remove(instance) {
                    self.instances[class].retain(|other| other != instance);
                    self.next[class] = 0;
                }
                self.held
                    .extend(lost.iter().map(|spec| (spec.id, spec.class)));
            }
            Event::Cancelled(request) => self.held.retain(|(other, _)| other != request),
            Event::Load { .. } | Event::Finished { .. } => (),
        }
    }

    fn poll_decision(&mut self, _: Time) -> Option<Decision> {
        let at = self
            .held
            .iter()
            .position(|(_, class)| !self.instances[self.class(*class)].is_empty())?;
        let (request, class) = self.held.remove(at)?;
        let class = self.class(class);
        let some = &self.instances[class];
        let instance = some[self.next[class] % some.len()];
        self.next[class] = (self.next[class] + 1) % some.len();
        Some(Decision::Place { request, instance })
    }

    fn next_deadline(&self) -> Option<Time> {
        None
    }

    fn waiting(&self) -> usize {
        self.held.len()
    }
}
