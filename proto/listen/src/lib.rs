//! Sockets that anybody may connect to, served with a bounded share of the process.
//!
//! [`Places`] bounds connections, by holder and in total: whoever comes last is served, and the
//! holder with the most connections loses its oldest. [`http`] serves HTTP/1 with such places and
//! with a limit on each connection's time. [`LineLimit`] bounds log lines that others can cause.
#![forbid(unsafe_code)]

pub mod http;
mod lines;
mod places;

pub use lines::{AcceptErrors, LineLimit};
pub use places::{Place, Places};
