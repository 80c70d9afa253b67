//! The parts of the process that a sending end uses.

use std::sync::Arc;
use std::time::Duration;

use laxity_client::{LEVEL_SCAVENGER, Permit};

use crate::arbiter::{Arbiter, SCAVENGER_CLASS};
use crate::backend::TrafficClasses;
use crate::context::Context;
use crate::report::Report;

#[derive(Clone)]
pub struct Surroundings {
    pub arbiter: Arc<dyn Arbiter>,
    pub context: Arc<Context>,
    /// The report that counts the connection's messages.
    pub report: Arc<Report>,
    pub wait_max: Duration,
    pub nic: String,
    pub classes: TrafficClasses,
}

impl Surroundings {
    /// Returns the index of the class in which a message with this permit travels.
    pub(super) fn class_of(&self, permit: &Permit) -> usize {
        if permit.bypassed {
            return 0;
        }
        // A scavenger flow gives way to all others, so it must not travel in a higher class.
        let unknown = if permit.level == LEVEL_SCAVENGER {
            SCAVENGER_CLASS.min(self.classes.len() - 1)
        } else {
            0
        };
        let named = |class: &u8| *class == permit.dscp;
        self.classes.iter().position(named).unwrap_or(unknown)
    }
}
