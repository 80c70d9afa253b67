//! Communicators and the stages of their sends (architecture §4.1).
//!
//! The stage that `LAXITY_NCCL_STAGES` declares for the communicator's name comes first. All other
//! sends are collectives, because GPUs wait for them in NCCL. This includes point-to-point
//! operations, since expert parallelism consists of them. The daemon takes batch, request and
//! deadline from the engine's hints of the same process (`daemon/src/driver/running.rs`).

use core::sync::atomic::{AtomicU32, Ordering};
use std::collections::HashMap;
use std::sync::Arc;

use laxity_client::Stage;
use parking_lot::Mutex;

use crate::origin::{Function, Operation};
use crate::settings::Settings;

/// The traffic class of a communicator that has none, `NCCL_NET_TRAFFIC_CLASS_UNDEF`.
pub const TRAFFIC_CLASS_UNSET: i32 = -1;
/// Largest number of communicators with a remembered stage.
const NAMES_MAX: usize = 4096;

/// Declared stages of communicators. The profiler interface provides the communicators' names:
/// since NCCL 2.27 at `init`, in 2.26 with each collective.
#[derive(Debug, Default)]
pub struct Names {
    stages: Mutex<HashMap<u64, Stage>>,
}

impl Names {
    /// Records the stage that a rule declares for the communicator of this name.
    pub fn tell(&self, communicator: u64, name: &str, settings: &Settings) {
        let Some(rule) = settings.stages.iter().find(|rule| rule.fits(name)) else { return };
        let mut stages = self.stages.lock();
        if stages.len() < NAMES_MAX {
            stages.insert(communicator, rule.stage);
        }
    }

    fn stage(&self, communicator: u64) -> Option<Stage> {
        let stages = self.stages.lock();
        stages.get(&communicator).copied()
    }
}

/// A communicator. Before v11, one context stands for all communicators without a traffic class,
/// and each connection with one has a context of its own.
#[derive(Debug)]
pub struct Context {
    /// NCCL's number of the communicator. 0 if NCCL doesn't provide it.
    communicator: u64,
    /// The communicator's traffic class, [`TRAFFIC_CLASS_UNSET`] if the application set none.
    traffic_class: i32,
    /// The last value of `ncclNetAttr.op`. Relaxed, because one thread sets and reads it.
    attribute: AtomicU32,
    names: Arc<Names>,
}

/// The stage of a send and the function that caused it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Purpose {
    pub stage: Stage,
    pub function: Function,
}

impl Context {
    pub fn new(communicator: u64, traffic_class: i32, names: Arc<Names>) -> Self {
        Self { communicator, traffic_class, attribute: AtomicU32::new(0), names }
    }

    /// Returns the communicator's context with another traffic class.
    #[must_use]
    pub fn with_class(&self, traffic_class: i32) -> Self {
        Self::new(self.communicator, traffic_class, Arc::clone(&self.names))
    }

    /// Returns the class that the application chose for the communicator, as a DSCP.
    #[must_use]
    pub fn pinned_dscp(&self) -> Option<u8> {
        let class = u8::try_from(self.traffic_class).ok()?;
        Some(class >> 2)
    }

    /// Returns the communicator's declared or default stage.
    #[must_use]
    pub fn stage(&self) -> Stage {
        self.names.stage(self.communicator).unwrap_or(Stage::Collective)
    }

    /// Records the operation that `setNetAttr` passes.
    pub fn set_attribute(&self, op: u32) {
        self.attribute.store(op, Ordering::Relaxed);
    }

    /// Returns the stage and the function of a send. `origin` comes from the profiler interface.
    pub fn purpose(&self, origin: Option<Operation>) -> Purpose {
        let attribute = Function::from_attribute(self.attribute.load(Ordering::Relaxed));
        let communicator = origin.map_or(self.communicator, |origin| origin.communicator);
        let told = origin.map_or(Function::Unknown, |origin| origin.function);
        // Some collectives consist of sends, and the profiler reports only those sends.
        let function = match (told, attribute) {
            (Function::Unknown, attribute) => attribute,
            (Function::Send | Function::Receive, Function::Unknown) => told,
            (Function::Send | Function::Receive, attribute) => attribute,
            (told, _) => told,
        };
        let stage = self.names.stage(communicator).unwrap_or(Stage::Collective);
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

    const SEND: Operation = Operation { communicator: 7, function: Function::Send };

    #[test]
    fn sends_are_collectives_unless_their_communicator_is_declared_otherwise() {
        let names = Arc::new(Names::default());
        let context = context(&names);
        assert_eq!(context.purpose(None).stage, Stage::Collective);
        assert_eq!(context.purpose(Some(SEND)).stage, Stage::Collective);
        let settings =
            Settings { stages: stage_rules("kv*=p2d").expect("a rule"), ..Settings::default() };
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
