//! What a sending end needs of the process it is in.

use std::sync::Arc;
use std::time::Duration;

use laxity_client::{LEVEL_SCAVENGER, Permit};

use crate::arbiter::{Arbiter, SCAVENGER_CLASS};
use crate::backend::Classes;
use crate::context::Context;
use crate::report::Report;

/// See the file's header.
#[derive(Clone)]
pub struct Surroundings {
    /// Who permits.
    pub arbiter: Arc<dyn Arbiter>,
    /// Whose connection it is.
    pub context: Arc<Context>,
    /// Where it is counted.
    pub report: Arc<Report>,
    /// Longest wait for a permit.
    pub wait_max: Duration,
    /// Name of the NIC.
    pub nic: String,
    /// The connection's classes.
    pub classes: Classes,
}

impl Surroundings {
    /// Index of the class in which a message with this permit travels.
    pub(super) fn class_of(&self, permit: &Permit) -> usize {
        if permit.bypassed {
            return 0;
        }
        // What is to give way to all others must not travel higher.
        let unknown = if permit.level == LEVEL_SCAVENGER {
            SCAVENGER_CLASS.min(self.classes.len() - 1)
        } else {
            0
        };
        let named = |class: &u8| *class == permit.dscp;
        self.classes.iter().position(named).unwrap_or(unknown)
    }
}
