//! The serving model: requests pass through prefill units layer by layer and create the traffic.
//!
//! * A request is routed to a unit and a rank. Blocks of its prefix on other ranks are fetched
//!   layer by layer, some layers ahead (stage 1, MFS §2.2).
//! * A unit computes one batch at a time. Each layer waits for its blocks, computes attention, and
//!   exchanges tokens (stage 2). The layer's new and reused KV cache goes to the request's decode
//!   rank (stage 3).
//! * The first token is complete once all layers have computed and all KV cache has arrived.
//!
//! A unit's ranks run in lockstep, so a layer takes as long as on its slowest rank.

mod alone;
mod announce;
mod batch;
mod cache;
mod collective;
mod disciplines;
mod event;
mod exchange;
mod filling;
mod flow;
mod grants;
mod hosts;
mod layout;
mod line;
mod measure;
mod network_cost;
mod order;
mod prefixes;
#[cfg(test)]
mod regressions;
mod request;
mod residual;
#[cfg(test)]
mod routed;
mod router;
#[cfg(test)]
mod scheduled;
mod setup;
mod sketch;
#[cfg(test)]
mod tests;
mod transfer;
mod ungoverned;
mod unit;
mod world;

use std::collections::BTreeSet;

use crate::compute::{Compute, Gpu};
use crate::model::Model;
use crate::outcome::Outcome;
use crate::scenario::{Invalid, Scenario};
use crate::workload::{self, Requests, WorkloadError};

#[derive(Debug, thiserror::Error)]
pub enum SimError {
    #[error(transparent)]
    Invalid(#[from] Invalid),
    #[error("model.name: {0}")]
    Model(String),
    #[error("cluster.gpu: {0}")]
    Gpu(String),
    #[error("workload: {0}")]
    Workload(WorkloadError),
    #[error("policy: {0}")]
    Policy(String),
    #[error("{0}")]
    Mismatch(String),
}

// `#[from]` would add a source, and a printed chain of causes would repeat the text.
impl From<WorkloadError> for SimError {
    fn from(cause: WorkloadError) -> Self {
        Self::Workload(cause)
    }
}

/// Inputs of a run besides its scenario. They are read once for all policies on the same requests.
#[derive(Debug)]
pub struct Inputs {
    pub(crate) model: Model,
    pub(crate) gpu: Gpu,
    pub(crate) requests: Requests,
}

impl Inputs {
    /// Reads the files that `scenario` names.
    /// The error has the file, line and field that cannot be read.
    pub fn load(scenario: &Scenario) -> Result<Self, SimError> {
        let (model, gpu) = hardware(scenario)?;
        let gpus = f64::from(scenario.cluster.prefill_gpus());
        let rate = scenario.workload.rate_per_gpu * gpus;
        Ok(Self { model, gpu, requests: workload::load(&scenario.workload, rate, scenario.seed)? })
    }
}

fn hardware(scenario: &Scenario) -> Result<(Model, Gpu), SimError> {
    let cluster = &scenario.cluster;
    scenario.validate()?;
    let mut gpu = Gpu::named(&cluster.gpu).map_err(|cause| SimError::Gpu(cause.to_string()))?;
    if cluster.nvlink_gbytes > 0.0 {
        gpu.nvlink_bytes_per_second = cluster.nvlink_gbytes * 1e9;
    }
    let mut model =
        Model::named(&scenario.model.name).map_err(|cause| SimError::Model(cause.to_string()))?;
    if scenario.model.kv_bytes_per_value > 0.0 {
        model.kv_bytes_per_value = scenario.model.kv_bytes_per_value;
    }
    Ok((model, gpu))
}

/// Checks scenarios before the first of them is simulated: models, GPUs and whole traces must be
/// readable.
///
/// The error has the first file that cannot be read, with line and field.
pub fn check<'a>(scenarios: impl IntoIterator<Item = &'a Scenario>) -> Result<(), SimError> {
    let mut seen = BTreeSet::new();
    let mut traces = BTreeSet::new();
    for scenario in scenarios {
        let (model, workload) = (&scenario.model, &scenario.workload);
        if seen.insert((&model.name, &scenario.cluster.gpu, model.ep)) {
            let (described, _) = hardware(scenario)?;
            experts_suffice(scenario, &described)?;
        }
        if workload.source.is_recorded() && traces.insert((workload.source, &workload.file)) {
            workload::read(workload)?;
        }
    }
    Ok(())
}

fn experts_suffice(scenario: &Scenario, model: &Model) -> Result<(), SimError> {
    let ep = scenario.model.ep;
    if ep <= model.experts.max(1) {
        return Ok(());
    }
    let name = &model.name;
    Err(SimError::Mismatch(match model.experts {
        0 | 1 => format!("model.ep: {ep}, but {name} has no experts"),
        experts => format!("model.ep: {ep} ranks for the {experts} experts of {name}"),
    }))
}

/// Simulates one scenario.
/// Fails if fields of the scenario do not fit together, or a file cannot be read.
pub fn simulate(scenario: &Scenario) -> Result<Outcome, SimError> {
    simulate_with(scenario, &Inputs::load(scenario)?)
}

/// Simulates one scenario with the inputs of one with the same cluster, model, workload and seed.
/// Fails if fields of the scenario do not fit together.
pub fn simulate_with(scenario: &Scenario, inputs: &Inputs) -> Result<Outcome, SimError> {
    scenario.validate()?;
    experts_suffice(scenario, &inputs.model)?;
    let compute = Compute::new(&inputs.gpu, &inputs.model, scenario.model.tp);
    let mut world = world::World::new(scenario, inputs, compute)?;
    world.run();
    Ok(world.outcome())
}
