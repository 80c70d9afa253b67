//! The schedulers of the engine. `laxity-requests` decides which tokens of which sequences are
//! computed next.

mod scheduler;
pub mod settings;
#[cfg(test)]
mod tests;

use laxity_requests::iteration::{Event, Load, Plan, Refusal};
use laxity_requests::job::Job;
use laxity_requests::request::RequestId;
use laxity_requests::{Span, Time};

use scheduler::Scheduler;
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

pub struct Schedulers {
    scheduler: Scheduler,
    room: Room,
    /// Whether an event came since the scheduler was last asked.
    asked_for: bool,
    ask_again: Option<Time>,
}

impl Schedulers {
    pub fn new(settings: &Settings, room: Room) -> Self {
        Self { scheduler: Scheduler::new(settings, room), room, asked_for: true, ask_again: None }
    }

    pub fn handle(&mut self, now: Time, event: &Event) {
        self.scheduler.handle(now, event);
        self.asked_for = true;
    }

    /// Returns the plan of the next iteration, if there is one.
    pub fn plan(&mut self, now: Time) -> Option<Plan> {
        let again = self.ask_again.is_some_and(|at| now >= at);
        if !std::mem::take(&mut self.asked_for) && !again {
            return None;
        }
        let plan = self.scheduler.plan(now);
        let idle = plan.is_none() && self.waits();
        self.ask_again = idle.then(|| now + ASK_AGAIN);
        plan
    }

    fn waits(&self) -> bool {
        let load = self.scheduler.load();
        load.waiting > 0 || load.running > 0
    }

    /// Reserves blocks for a request that arrives with KV. Returns false if there are too few.
    pub fn reserve(&mut self, request: RequestId, tokens: u32) -> bool {
        self.scheduler.reserve(request, tokens)
    }

    /// Returns the requests that the scheduler refused since the last call.
    pub fn refusals(&mut self) -> Vec<Refusal> {
        std::iter::from_fn(|| self.scheduler.poll_refusal()).collect()
    }

    pub fn load(&self) -> Load {
        self.scheduler.load()
    }

    pub fn job(&self, request: RequestId) -> Option<&Job> {
        self.scheduler.job(request)
    }

    /// Reports whether a request is relegated, which means that it is served last.
    pub fn is_relegated(&self, request: RequestId) -> bool {
        self.job(request).is_some_and(|job| job.relegated)
    }

    /// Returns the number of iterations from which the latency model learned.
    pub fn learned(&self) -> u64 {
        self.scheduler.learned()
    }

    pub const fn room(&self) -> Room {
        self.room
    }
}
