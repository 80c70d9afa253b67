//! What the daemon and the coordinator share: sockets whose users can take only a bounded part of
//! the process, and the log.
//!
//! [`ConnectionSlots`] bounds connections by holder and in total: a new connection is served, and
//! the holder with the most connections loses its oldest one. [`http`] serves HTTP/1 with such
//! slots and time limits, and [`page`] serves web pages over it, with a [`History`]. [`LineLimit`]
//! bounds log lines that others cause, and [`descriptors_max`] is the bound that the system sets.
//! [`start_log`] starts the log. [`InstallArgs`] prints manual pages.
#![forbid(unsafe_code)]

mod descriptors;
mod history;
pub mod http;
mod lines;
mod log;
mod manual;
pub mod page;
mod slots;

pub use descriptors::descriptors_max;
pub use history::{BUCKET, History};
pub use lines::{AcceptErrors, LineLimit};
pub use log::{LogError, LogFormat, SetLog, check_filter, start_log};
pub use manual::{InstallArgs, ServicePages};
pub use slots::{ConnectionSlot, ConnectionSlots};
