//! Baselines: the policies that papers compare with, and simple alternatives to the papers'
//! policies.

mod central_edf;
mod least_work;
mod line;
mod relegating;
mod round_robin;

pub use central_edf::CentralEdf;
pub use least_work::LeastWork;
pub use line::{Fixed, LineOrder};
pub use relegating::Relegating;
pub use round_robin::RoundRobin;
