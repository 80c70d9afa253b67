//! The scheduler of an engine, made from settings, and its latency model, which learns from
//! iterations.

use laxity_requests::Span;
use laxity_requests::Time;
use laxity_requests::baseline::{Fixed, LineOrder};
use laxity_requests::discipline::Discipline;
use laxity_requests::hmas::Agent;
use laxity_requests::hmas::cognition::Cognition;
use laxity_requests::hmas::perception::{self, Perception};
use laxity_requests::hmas::prediction::Prediction;
use laxity_requests::iteration::{Event, Load, Plan, Refusal};
use laxity_requests::job::Job;
use laxity_requests::kv::Pool;
use laxity_requests::latency::Latency;
use laxity_requests::learned::Learned;
use laxity_requests::qoserve::{QoServe, QoServeOptions};
use laxity_requests::replica::Replica;
use laxity_requests::request::RequestId;

use super::Room;
use super::settings::{Hmas, Policy, Settings};

/// A replica, and the latency model that learns from it.
#[derive(Debug)]
pub(super) struct Scheduler {
    replica: Replica,
    learned: Option<Learned>,
    /// The plan that is being computed, while the model can learn from it.
    under_way: Option<Plan>,
}

/// A model of the time that iterations take.
type LatencyModel = std::sync::Arc<dyn Latency + Send + Sync>;

fn discipline(settings: &Settings, latency: LatencyModel) -> Box<dyn Discipline + Send> {
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

fn agent(settings: &Settings, latency: LatencyModel) -> Agent {
    // Perception uses the lengths that applications generated so far, and answers at once. Nothing
    // else is known of a request here.
    let perception = Perception::new(perception::Rules::default(), Span::ZERO);
    let prediction = Prediction::new(latency, settings.tokens);
    let cognition = Cognition::new(perception, prediction);
    let config = Hmas::config(settings.tokens);
    Agent::new(settings.hmas.order, config, cognition)
}

impl Scheduler {
    pub(super) fn new(settings: &Settings, room: Room) -> Self {
        let learned = settings.predicts().then(Learned::default);
        // Without `learned`, no policy uses this model.
        let model: LatencyModel = std::sync::Arc::new(learned.clone().unwrap_or_default());
        let pool = Pool::new(room.blocks, room.block_tokens);
        Self {
            replica: Replica::new(pool, settings.watermark, discipline(settings, model)),
            learned,
            under_way: None,
        }
    }

    pub(super) fn handle(&mut self, now: Time, event: &Event) {
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
            Event::Arrived(_) | Event::Capacity(_) => {}
        }
        self.replica.handle(now, event);
    }

    pub(super) fn plan(&mut self, now: Time) -> Option<Plan> {
        let plan = self.replica.plan(now)?;
        if self.learned.is_some() {
            self.under_way = Some(plan.clone());
        }
        Some(plan)
    }

    pub(super) fn reserve(&mut self, request: RequestId, tokens: u32) -> bool {
        self.replica.reserve(request, tokens)
    }

    pub(super) fn poll_refusal(&mut self) -> Option<Refusal> {
        self.replica.poll_refusal()
    }

    pub(super) fn load(&self) -> Load {
        self.replica.load()
    }

    pub(super) fn job(&self, request: RequestId) -> Option<&Job> {
        self.replica.job(request)
    }

    /// Returns the number of iterations from which the latency model learned.
    pub(super) fn learned(&self) -> u64 {
        self.learned.as_ref().map_or(0, Learned::iterations)
    }
}
