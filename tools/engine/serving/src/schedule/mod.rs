//! The scheduler of the engine. `laxity-requests` decides which tokens of which sequences are
//! computed next. Its latency model learns from iterations.

pub mod settings;
#[cfg(test)]
mod tests;

use laxity_requests::baseline::{Fixed, LineOrder};
use laxity_requests::discipline::Discipline;
use laxity_requests::hmas::cognition::Cognition;
use laxity_requests::hmas::perception::{self, Perception};
use laxity_requests::hmas::prediction::Prediction;
use laxity_requests::hmas::statera::{Score, StateraConfig};
use laxity_requests::hmas::{self, Agent};
use laxity_requests::iteration::{Event, Load, Plan, Refusal};
use laxity_requests::job::Job;
use laxity_requests::kv::Pool;
use laxity_requests::learned::Learned;
use laxity_requests::qoserve::{QoServe, QoServeOptions};
use laxity_requests::replica::Replica;
use laxity_requests::request::RequestId;
use laxity_requests::{Span, Time};

pub use settings::{Policy, Settings};

/// Pause before a scheduler without a plan is asked again while requests wait, because its decision
/// may depend on the time.
const ASK_AGAIN: Span = Span::from_millis(20);

/// The size of the pool of blocks that a scheduler accounts for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    pub blocks: u32,
    pub block_tokens: u32,
}

/// A replica, and the latency model that learns from it.
pub struct Scheduler {
    replica: Replica,
    pub room: Room,
    learned: Option<Learned>,
    /// The plan that is being computed, while the model can learn from it.
    under_way: Option<Plan>,
    /// Whether an event came since the replica was last asked for a plan.
    asked_for: bool,
    ask_again: Option<Time>,
}

fn discipline(settings: &Settings, latency: Learned) -> Box<dyn Discipline + Send> {
    let fixed = |order| {
        let tokens = settings.tokens;
        Box::new(Fixed { order, tokens })
    };
    match settings.policy {
        Policy::Fcfs => fixed(LineOrder::Fcfs),
        Policy::Edf => fixed(LineOrder::Edf),
        Policy::Srpf => fixed(LineOrder::Srpf),
        Policy::Qoserve => Box::new(QoServe::new(QoServeOptions::default(), latency)),
        Policy::Hmas => Box::new(agent(settings, latency)),
    }
}

fn agent(settings: &Settings, latency: Learned) -> Agent {
    // Perception uses the lengths that applications generated so far, and answers at once. Nothing
    // else is known of a request here.
    let perception = Perception::new(perception::Rules::default(), Span::ZERO);
    let prediction = Prediction::new(latency, settings.tokens);
    let cognition = Cognition::new(perception, prediction);
    let chunk = settings.tokens;
    let config = hmas::Config {
        chunk,
        chunk_min: hmas::Config::default().chunk_min.min(chunk),
        // With errors in tokens, as in the paper, the fence does not keep its guarantee
        // (docs/requests/hmas.md).
        statera: Some(StateraConfig { score: Score::Relative, ..StateraConfig::default() }),
    };
    Agent::new(settings.hmas.order, config, cognition)
}

impl Scheduler {
    pub fn new(settings: &Settings, room: Room) -> Self {
        let predicts = matches!(settings.policy, Policy::Qoserve | Policy::Hmas);
        let learned = predicts.then(Learned::default);
        // Without `learned`, no policy uses this model.
        let model = learned.clone().unwrap_or_default();
        let pool = Pool::new(room.blocks, room.block_tokens);
        Self {
            replica: Replica::new(pool, settings.watermark, discipline(settings, model)),
            room,
            learned,
            under_way: None,
            asked_for: true,
            ask_again: None,
        }
    }

    pub fn handle(&mut self, now: Time, event: &Event) {
        match event {
            Event::Done { took, .. } => {
                if let (Some(learned), Some(plan)) = (&self.learned, self.under_way.take()) {
                    learned.ran(&plan.composition(), *took);
                }
            }
            // A failed iteration cancels all its requests, and its time is meaningless. Other
            // iterations cancel no request of theirs.
            Event::Cancelled(request) => {
                let within = |plan: &Plan| {
                    let mut chunks = plan.chunks.iter();
                    let mut steps = plan.steps.iter();
                    chunks.any(|chunk| chunk.request == *request)
                        || steps.any(|step| step.request == *request)
                };
                if self.under_way.as_ref().is_some_and(within) {
                    self.under_way = None;
                }
            }
            Event::Arrived(_) => {}
        }
        self.replica.handle(now, event);
        self.asked_for = true;
    }

    /// Returns the plan of the next iteration, if there is one.
    pub fn plan(&mut self, now: Time) -> Option<Plan> {
        let again = self.ask_again.is_some_and(|at| now >= at);
        if !std::mem::take(&mut self.asked_for) && !again {
            return None;
        }
        let plan = self.replica.plan(now);
        let load = self.load();
        let waits = load.waiting > 0 || load.running > 0;
        self.ask_again = (plan.is_none() && waits).then(|| now + ASK_AGAIN);
        if self.learned.is_some() && plan.is_some() {
            self.under_way.clone_from(&plan);
        }
        plan
    }

    /// Reserves blocks for a request that arrives with KV. Returns false if there are too few.
    pub fn reserve(&mut self, request: RequestId, tokens: u32) -> bool {
        self.replica.reserve(request, tokens)
    }

    /// Returns the requests that the scheduler refused since the last call.
    pub fn refusals(&mut self) -> Vec<Refusal> {
        std::iter::from_fn(|| self.replica.poll_refusal()).collect()
    }

    pub fn load(&self) -> Load {
        self.replica.load()
    }

    pub fn job(&self, request: RequestId) -> Option<&Job> {
        self.replica.job(request)
    }

    /// Reports whether a request is relegated, which means that it is served last.
    pub fn is_relegated(&self, request: RequestId) -> bool {
        self.job(request).is_some_and(|job| job.relegated)
    }

    /// Returns the number of iterations from which the latency model learned.
    pub fn learned(&self) -> u64 {
        self.learned.as_ref().map_or(0, Learned::iterations)
    }
}
