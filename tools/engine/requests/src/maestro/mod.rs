//! Maestro, which schedules workflows of agents over clusters whose nodes share few GPUs among many
//! models (Wang et al., arXiv 2606.12950).
//!
//! | module | section | content |
//! |---|---|---|
//! | [`predict`] | III-B | the cost of a stage: its length |
//! | [`profile`] | III-D eq. 8 | the time of what follows a stage in its workflow |
//! | [`residency`] | III-C Algorithm 1 | weights on GPU, in host memory, on disk or remote |
//! | [`memory`] | III-C Algorithm 2, eq. 4 | the least harmful way to free memory |
//! | [`node`] | III-C | the state of a node: residency, permitted KV, stages |
//! | `transition` | III-C Algorithm 2, level 3 | weights that leave the GPU |
//! | [`fitness`] | III-D Algorithm 3, eq. 5, 6 | the choice of a stage's node |
//! | [`queue`] | III-D eq. 7 | the order of stages, and turns between stages |
//! | [`scheduler`] | III-A | the main loop over [`crate::workflow`]'s events |
//! | `placement` | III-D Algorithm 3 | the placement of waiting stages |
//!
//! Each order, boundary rule and comparison of nodes is an option. So baselines and ablations use
//! the same admission, memory and predictions.

pub mod estimate;
pub mod fitness;
pub mod memory;
pub mod node;
mod placement;
pub mod predict;
pub mod profile;
pub mod queue;
pub mod residency;
pub mod scheduler;
mod transition;

pub use estimate::{Estimator, LearnedEstimator};
pub use scheduler::{MaestroOptions, Scheduler};
