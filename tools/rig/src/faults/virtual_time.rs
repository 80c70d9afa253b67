//! Fault campaigns in virtual time: a daemon, its clients and a port in one thread, from a seed.
//!
//! The scheduler, its policies, the records in shared memory, the client library, registration and
//! its packets, and the coordinator's stream are those of the product. A queue of events replaces
//! time, the port's wire and the processes. So a round is short, and a seed gives the same events
//! each time.
//!
//! ```text
//! world ─ next event ─▶ process: client library ─lane─▶ host: scheduler, one step
//!   ▲                      │ permitted bytes                      │ wait of at most …
//!   └──────────────────── port: bytes at a rate ◀─────────────────┘
//! ```

mod chaos;
mod clock;
mod cluster;
mod host;
mod port;
mod process;
mod queue;
mod settings;
mod world;

#[cfg(test)]
mod tests;

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::plant::Plant;
use super::round::Outcome;
use super::schedule::Schedule;
use crate::error::LabError;

/// Plays a schedule. Equal schedules give equal outcomes. A panic of the product is a violation.
pub(super) fn play(schedule: &Schedule, plant: Option<Plant>) -> Result<Outcome, LabError> {
    let played = catch_unwind(AssertUnwindSafe(|| world::play(schedule, plant)));
    played.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no text");
        Ok(Outcome { violations: vec![format!("a panic: {text}")], ..Outcome::default() })
    })
}
