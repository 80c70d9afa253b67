//! The third tier: how many instances, and for what.

use serde::{Deserialize, Serialize};

use crate::Time;
use crate::dispatch::Role;
use crate::iteration::Load;
use crate::request::InstanceId;

/// An instance as a scaler sees it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Instance {
    /// Which.
    pub instance: InstanceId,
    /// For what.
    pub role: Role,
    /// What stands there.
    pub load: Load,
    /// Share of the window in which it computed, 0 to 1.
    pub busy: f64,
}

/// What a window of time saw.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Window {
    /// Instances that are ready.
    pub instances: Vec<Instance>,
    /// Instances that are starting.
    pub starting: u32,
    /// Requests that came.
    pub arrived: u32,
    /// Requests that wait for a place.
    pub waiting: u32,
    /// The longest that one of them has waited, as a share of the time within which its first token
    /// has to be there.
    #[serde(default)]
    pub wait: f64,
    /// Requests that ended.
    pub finished: u32,
    /// Of those, how many met their objective.
    pub met: u32,
}

/// Where a new instance's weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Weights {
    /// From another instance over the network, as `Weights` flows; from disk if that fails.
    Peer(InstanceId),
    /// From disk.
    Disk,
    /// They are there: a warm instance.
    Warm,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// One more.
    Start {
        /// For what.
        role: Role,
        /// Its weights.
        weights: Weights,
    },
    /// It takes no more, ends what it has, and goes.
    Stop(InstanceId),
    /// It ends what it has and goes on in another role.
    Turn {
        /// Which.
        instance: InstanceId,
        /// Into what.
        role: Role,
    },
}

/// Decides how many instances there are.
pub trait Scaling {
    /// How it is called on tables.
    fn name(&self) -> &'static str;
    /// Takes in what a window of time saw.
    fn handle(&mut self, now: Time, window: &Window);
    /// The next decision.
    fn poll_decision(&mut self, now: Time) -> Option<Decision>;
}

/// As many as there are: what operators provision.
#[derive(Clone, Copy, Debug, Default)]
pub struct Static;

impl Scaling for Static {
    fn name(&self) -> &'static str {
        "static"
    }

    fn handle(&mut self, _: Time, _: &Window) {}

    fn poll_decision(&mut self, _: Time) -> Option<Decision> {
        None
    }
}
