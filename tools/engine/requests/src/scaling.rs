//! The third tier, which decides how many instances there are and in which roles.

use crate::Time;
use crate::dispatch::Role;
use crate::iteration::Load;
use crate::request::InstanceId;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Instance {
    pub instance: InstanceId,
    pub role: Role,
    pub load: Load,
    /// Share of the window in which the instance computed, 0 to 1.
    pub busy: f64,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScalingWindow {
    pub instances: Vec<Instance>,
    pub starting: u32,
    pub arrived: u32,
    pub waiting: u32,
    /// Longest wait of a request without an instance, as a share of the request's TTFT objective.
    pub wait: f64,
    pub finished: u32,
    pub met: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScalingDecision {
    /// Start an instance with the weights of another one, or without one from disk.
    Start { role: Role, from: Option<InstanceId> },
    /// Stop an instance after its current requests. It gets no new ones.
    Stop(InstanceId),
    /// Change the role of an instance after its current requests.
    Turn { instance: InstanceId, role: Role },
}

pub trait Scaling {
    fn handle(&mut self, now: Time, window: &ScalingWindow);
    fn poll_decision(&mut self, now: Time) -> Option<ScalingDecision>;
}
