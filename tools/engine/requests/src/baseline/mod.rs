//! What the papers are compared with, and what a sceptic would take instead.

mod least_loaded;
mod line;
mod round_robin;
mod silo;

pub use least_loaded::LeastLoaded;
pub use line::{Fixed, Order};
pub use round_robin::RoundRobin;
pub use silo::Silo;
