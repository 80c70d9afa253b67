//! Maestro: workflows of agents over clusters of nodes that share few GPUs among many models (Wang
//! et al., arXiv 2606.12950).
//!
//! | file | section | what |
//! |---|---|---|
//! | [`predict`], [`regressor`], [`isotonic`] | III-B | what a stage will cost: tool intent, then length |
//! | [`profile`] | III-D eq. 8 | what follows it in its workflow |
//! | [`residency`] | III-C Algorithm 1 | weights on GPU, in host memory, on disk, elsewhere |
//! | [`memory`] | III-C Algorithm 2, eq. 4 | freeing memory at the least harm |
//! | [`node`] | III-C | a node's books: residency, promised KV, who runs |
//! | `transition` | III-C Algorithm 2, level 3 | weights on their way out |
//! | [`fitness`] | III-D Algorithm 3, eq. 5, 6 | where a stage runs |
//! | [`queue`] | III-D eq. 7 | who is first; turns between stages |
//! | [`scheduler`] | III-A | the loop around them, a [`crate::workflow::Workflow`] |
//! | `placement` | III-D Algorithm 3 | who gets which place |
//! | [`options`] | | what can be set |
//!
//! Each order, boundary rule and comparison of nodes is an option, so that baselines and ablations
//! run on the same mechanics: the same admission, the same memory, the same predictions.

pub mod estimate;
pub mod fitness;
pub mod isotonic;
pub mod memory;
pub mod node;
pub mod options;
mod placement;
pub mod predict;
pub mod profile;
pub mod queue;
pub mod regressor;
pub mod residency;
pub mod scheduler;
mod transition;

pub use estimate::{Estimator, Learned};
pub use options::Options;
pub use scheduler::Scheduler;
