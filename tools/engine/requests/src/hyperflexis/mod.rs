//! HyperFlexis: requests wait in one line until an instance can take them without breaking a
//! promise.
//!
//! After *HyperFlexis: Joint Design of Algorithms and Systems for Multi-SLO Serving and Fast
//! Scaling*.
//!
//! | part | source | here |
//! |---|---|---|
//! | latency of a prefill and of a decode step | §3 eq. 1 and 2, appendix A | [`latency`] |
//! | token budget, maturity, admission probability | §5.1 eq. 5, appendix B eq. 7 | [`budget`] |
//! | dispatcher | §5.1 Algorithm 1 | [`dispatcher`] |
//! | migrator of disaggregated pools | §5.1 | [`migrator`] |
//! | priorities instead of objectives | §5.2 eq. 6, Algorithm 2 | [`priority`] |
//! | scaler, role transitions, warm pool, weights from a peer | §6 Algorithm 3 | [`scaler`] |
//!
//! Each file says where the paper leaves a hole and how it is filled here.

pub mod budget;
pub mod dispatcher;
pub mod latency;
pub mod migrator;
pub mod priority;
pub mod scaler;
mod scan;

pub use dispatcher::{HyperFlexis, Options};
pub use latency::Linear;
pub use priority::Mapping;
pub use scaler::Scaler;
