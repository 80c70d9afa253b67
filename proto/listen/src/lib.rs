//! Public sockets with a bounded share of the process.
//!
//! [`ConnectionSlots`] bounds connections by holder and in total: a new connection is served, and
//! the holder with the most connections loses its oldest one. [`http`] serves HTTP/1 with such
//! slots and time limits. [`LineLimit`] bounds log lines that others cause, and [`descriptors_max`]
//! is the bound that the system sets.
#![forbid(unsafe_code)]

mod descriptors;
pub mod http;
mod lines;
mod slots;

pub use descriptors::descriptors_max;
pub use lines::{AcceptErrors, LineLimit};
pub use slots::{ConnectionSlot, ConnectionSlots};
