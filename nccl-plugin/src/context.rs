//! What is known of a communicator, and what its sends are for (architecture §4.1).
//!
//! In order of preference: what `LAXITY_NCCL_STAGES` declares of a communicator of its name; else a
//! collective, since that is what a GPU waits for in NCCL (also point-to-point operations: expert
//! parallelism is made of them). Batch, request and deadline are not known here: the daemon takes
//! them from the engine's hints of the same process (`daemon/src/driver/running.rs`).

use core::sync::atomic::{AtomicU32, Ordering};
use std::collections::HashMap;
use std::sync::Arc;

use laxity_client::Stage;
use parking_lot::Mutex;

use crate::origin::{Function, Origin};
use crate::settings::Settings;

/// `NCCL_NET_TRAFFIC_CLASS_UNDEF`.
pub const TRAFFIC_CLASS_UNSET: i32 = -1;
/// Communicators whose names are remembered.
const NAMES_MAX: usize = 4096;

/// Names of communicators, as the profiler interface tells them (NCCL 2.27 and later; 2.26 with
/// each collective).
#[derive(Debug, Default)]
pub struct Names {
    stages: Mutex<HashMap<u64, Stage>>,
}

impl Names {
    /// A communicator has this name: its stage is declared if a rule fits.
    pub fn tell(&self, communicator: u64, name: &str, settings: &Settings) {
        let Some(rule) = settings.stages.iter().find(|rule| rule.fits(name)) else {
            return;
        };
        let mut stages = self.stages.lock();
        if stages.len() < NAMES_MAX {
            stages.insert(communicator, rule.stage);
        }
    }

    /// Whether it is known to be declared.
    fn stage(&self, communicator: u64) -> Option<Stage> {
        let stages = self.stages.lock();
        stages.get(&communicator).copied()
    }

    /// Whether no rule ever fitted: saves looking.
    fn is_empty(&self) -> bool {
        self.stages.lock().is_empty()
    }
}

/// A communicator, or, before v11, what all of them have in common.
#[derive(Debug)]
pub struct Context {
    /// NCCL's number of the communicator; 0 if it doesn't say.
    communicator: u64,
    /// Its traffic class, [`TRAFFIC_CLASS_UNSET`] if the application set none.
    traffic_class: i32,
    /// `ncclNetAttr.op` as last set. Relaxed: what the proxy thread itself said a moment ago.
    attribute: AtomicU32,
    names: Arc<Names>,
}

/// What a send is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Purpose {
    /// What it is for.
    pub stage: Stage,
    /// By which of NCCL's functions.
    pub function: Function,
}

impl Context {
    /// Of a communicator.
    #[must_use]
    pub fn new(communicator: u64, traffic_class: i32, names: Arc<Names>) -> Self {
        Self {
            communicator,
            traffic_class,
            attribute: AtomicU32::new(0),
            names,
        }
    }

    /// The class that the application chose for all of the communicator, as a DSCP.
    #[must_use]
    pub fn pinned_dscp(&self) -> Option<u8> {
        let class = u8::try_from(self.traffic_class).ok()?;
        Some(class >> 2)
    }

    /// What the communicator as a whole carries.
    #[must_use]
    pub fn stage(&self) -> Stage {
        self.names
            .stage(self.communicator)
            .unwrap_or(Stage::Collective)
    }

    /// `setNetAttr`.
    pub fn set_attribute(&self, op: u32) {
        self.attribute.store(op, Ordering::Relaxed);
    }

    /// What a send is, given what the profiler interface told of it, if anything.
    pub fn purpose(&self, origin: Option<Origin>) -> Purpose {
        let attribute = Function::from_attribute(self.attribute.load(Ordering::Relaxed));
        let communicator = origin.map_or(self.communicator, |origin| origin.communicator);
        let told = origin.map_or(Function::Unknown, |origin| origin.function);
        // Of a collective that is made of sends, the profiler knows the sends only.
        let function = match (told, attribute) {
            (Function::Unknown, attribute) => attribute,
            (Function::Send | Function::Receive, Function::Unknown) => told,
            (Function::Send | Function::Receive, attribute) => attribute,
            (told, _) => told,
        };
        let stage = if self.names.is_empty() {
            Stage::Collective
        } else {
            let stage = self.names.stage(communicator);
            stage.unwrap_or(Stage::Collective)
        };
        Purpose { stage, function }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::stage_rules;

    fn context(names: &Arc<Names>) -> Context {
        Context::new(7, TRAFFIC_CLASS_UNSET, Arc::clone(names))
    }

    const SEND: Origin = Origin {
        communicator: 7,
        function: Function::Send,
    };

    #[test]
    fn sends_are_collectives_unless_their_communicator_is_declared_otherwise() {
        let names = Arc::new(Names::default());
        let context = context(&names);
        assert_eq!(context.purpose(None).stage, Stage::Collective);
        assert_eq!(context.purpose(Some(SEND)).stage, Stage::Collective);
        let settings = Settings {
            stages: stage_rules("kv*=p2d").expect("a rule"),
            ..Settings::default()
        };
        names.tell(8, "kv_other", &settings);
        assert_eq!(context.purpose(None).stage, Stage::Collective);
        names.tell(7, "kv_p2p", &settings);
        assert_eq!(context.purpose(None).stage, Stage::P2d);
        assert_eq!(context.purpose(Some(SEND)).stage, Stage::P2d);
        assert_eq!(context.stage(), Stage::P2d);
    }

    #[test]
    fn an_all_to_all_is_told_from_its_sends_by_the_attribute() {
        let context = context(&Arc::default());
        assert_eq!(context.purpose(Some(SEND)).function, Function::Send);
        context.set_attribute(1 << 8);
        assert_eq!(context.purpose(Some(SEND)).function, Function::AllToAll);
        assert_eq!(context.purpose(None).function, Function::AllToAll);
    }

    #[test]
    fn a_pinned_class_is_one_only_if_it_is_set() {
        let pinned = |class| Context::new(1, class, Arc::default()).pinned_dscp();
        assert_eq!(pinned(TRAFFIC_CLASS_UNSET), None);
        assert_eq!(pinned(106), Some(26));
        assert_eq!(pinned(0), Some(0));
        assert_eq!(pinned(4000), None);
    }
}
