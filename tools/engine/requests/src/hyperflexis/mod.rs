//! HyperFlexis: requests wait in one queue until an instance can take them without a missed
//! objective.
//!
//! The source is *HyperFlexis: Joint Design of Algorithms and Systems for Multi-SLO Serving and
//! Fast Scaling*.
//!
//! | part | source | module |
//! |---|---|---|
//! | latency of a prefill and of a decode step | §3 eq. 1 and 2, appendix A | [`latency`] |
//! | token budget, maturity, admission probability | §5.1 eq. 5, appendix B eq. 7 | [`budget`] |
//! | dispatcher | §5.1 Algorithm 1 | [`dispatcher`] |
//! | migrator of disaggregated pools | §5.1 | [`migrator`] |
//! | priorities instead of objectives | §5.2 eq. 6, Algorithm 2 | [`priority`] |
//! | scaler, role transitions, weights from a peer | §6 Algorithm 3 | [`scaler`] |
//!
//! Each module names what the paper leaves open and what is done here.

pub mod budget;
pub mod dispatcher;
pub mod latency;
pub mod migrator;
pub mod priority;
pub mod scaler;
mod scan;

pub use dispatcher::{DispatcherOptions, HyperFlexis};
pub use latency::Linear;
pub use priority::Mapping;
pub use scaler::Scaler;
