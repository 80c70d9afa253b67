//! Places each request on the instance with the least predicted work. A simple alternative to
//! HyperFlexis.
//!
//! The work of a request is the time that it adds on its instance. For the prompt this is a prefill
//! step (eq. 1) without the constant, which a batch shares. For each expected token it is the
//! request's part of a decode step (eq. 2: `b' · its tokens + c'`). The expected number of tokens
//! is the mean of the application so far. Each request is placed on arrival.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::Time;
use crate::dispatch::{Dispatch, DispatchDecision, DispatchEvent, Role};
use crate::hyperflexis::Linear;
use crate::request::{ApplicationId, InstanceId, RequestId, Spec};

struct Placed {
    instance: InstanceId,
    work: f64,
    application: ApplicationId,
}

/// Sums over the requests of an application that ended, for the mean number of tokens.
#[derive(Clone, Copy, Debug, Default)]
struct History {
    requests: f64,
    tokens: f64,
}

#[derive(Default)]
pub struct LeastWork {
    model: Linear,
    work: BTreeMap<InstanceId, (Role, f64)>,
    held: VecDeque<(Spec, bool)>,
    placed: BTreeMap<RequestId, Placed>,
    history: HashMap<ApplicationId, History>,
}

impl LeastWork {
    pub fn new(model: Linear) -> Self {
        Self { model, ..Self::default() }
    }

    /// Returns the expected number of tokens of a request. While no request of the application has
    /// ended, it is half of the request's limit.
    fn tokens(&self, spec: &Spec) -> f64 {
        let most = f64::from(spec.output_max);
        let history = self.history.get(&spec.application).copied();
        history
            .filter(|history| history.requests > 0.0)
            .map_or(most / 2.0, |history| history.tokens / history.requests)
            .min(most)
    }

    fn work(&self, spec: &Spec, role: Role) -> f64 {
        let prompt = f64::from(spec.prompt.saturating_add(spec.generated));
        let left = (prompt - f64::from(spec.ready)).max(0.0);
        let [_, b, c] = self.model.prefill;
        let prefill = b * left + c * left * prompt;
        let tokens = (self.tokens(spec) - f64::from(spec.generated)).max(1.0);
        let [_, context, request] = self.model.decode;
        let decode = tokens * (request + context * (prompt + tokens / 2.0));
        match role {
            Role::Prefill => prefill,
            Role::Decode => decode,
            Role::Whole => prefill + decode,
        }
    }

    fn least(&self, decode: bool) -> Option<(InstanceId, Role)> {
        self.work
            .iter()
            .filter(|(_, (role, _))| (*role == Role::Decode) == decode)
            .min_by(|x, y| x.1.1.total_cmp(&y.1.1))
            .map(|(instance, (role, _))| (*instance, *role))
    }

    fn leave(&mut self, request: RequestId) -> Option<Placed> {
        let placed = self.placed.remove(&request)?;
        if let Some((_, work)) = self.work.get_mut(&placed.instance) {
            *work = (*work - placed.work).max(0.0);
        }
        Some(placed)
    }
}

impl Dispatch for LeastWork {
    fn handle(&mut self, _: Time, event: &DispatchEvent) {
        match event {
            DispatchEvent::Arrived(spec) => self.held.push_back((*spec, false)),
            DispatchEvent::Prefilled { spec, .. } => {
                self.leave(spec.id);
                self.held.push_back((*spec, true));
            }
            DispatchEvent::Up { instance, role } => {
                // An instance that changes its role still has requests of its former role.
                let here = self.placed.values().filter(|placed| placed.instance == *instance);
                let work = here.map(|placed| placed.work).sum();
                self.work.insert(*instance, (*role, work));
            }
            DispatchEvent::Down { instance, lost } => {
                self.work.remove(instance);
                for spec in lost {
                    self.leave(spec.id);
                    self.held.retain(|(other, _)| other.id != spec.id);
                    self.held.push_back((*spec, false));
                }
            }
            DispatchEvent::Finished { request, generated, .. } => {
                if let Some(placed) = self.leave(*request) {
                    let history = self.history.entry(placed.application).or_default();
                    history.requests += 1.0;
                    history.tokens += f64::from(*generated);
                }
            }
            DispatchEvent::Cancelled(request) => {
                self.leave(*request);
                self.held.retain(|(other, _)| other.id != *request);
            }
            DispatchEvent::Load { .. } => (),
        }
    }

    fn poll_decision(&mut self, _: Time) -> Option<DispatchDecision> {
        let targets = [false, true].map(|decode| self.least(decode));
        let at =
            self.held.iter().position(|(_, decode)| targets[usize::from(*decode)].is_some())?;
        let (spec, decode) = self.held.remove(at)?;
        let (instance, role) = targets[usize::from(decode)]?;
        let work = self.work(&spec, role);
        if let Some((_, sum)) = self.work.get_mut(&instance) {
            *sum += work;
        }
        let (request, application) = (spec.id, spec.application);
        self.placed.insert(request, Placed { instance, work, application });
        Some(DispatchDecision::Place { request, instance })
    }

    fn waiting(&self) -> usize {
        self.held.len()
    }
}
