//! Fault campaigns: real processes, thousands of faults from a seed, and an oracle outside of them.
//!
//! ```text
//! campaign ─ draws ─▶ schedule ─▶ round: laxityd ◀─lane─ worker ══ pipe ══▶ oracle
//!      ▲                            └─ SIGKILL, SIGSTOP, reload, hostile clients …
//!      └──── shrinks a schedule that went wrong, and writes it for `--replay`
//! ```
//!
//! `docs/faults.md` says what is checked and what the bounds are.

mod campaign;
mod client;
mod coordinator;
mod daemon;
mod engine;
mod engines;
mod frame;
mod hostile;
mod nccl;
mod oracle;
mod plant;
mod report;
mod round;
mod schedule;
mod setting;
mod soak;
mod task;
#[cfg(feature = "virtual-time")]
mod virtual_time;
mod worker;
mod workers;

use std::ffi::OsString;
use std::path::Path;

pub use campaign::{Campaign, Failure, Player, Report, replay, run};
pub use oracle::TransferCounts;
pub use plant::Plant;
pub(crate) use report::tables;
pub use report::{page, table};
pub use schedule::{Fault, FaultKind, Schedule};
pub use setting::{PATHS, PathPrograms, Setting};
pub use soak::{SoakPlan, SoakReport, run as soak, soak_page, soak_table};

use crate::error::LabError;

pub(crate) fn internal(part: &str, arguments: &[OsString]) -> Result<(), LabError> {
    let first = arguments.first().and_then(|argument| argument.to_str()).unwrap_or_default();
    match part {
        "faults-daemon" => {
            Err(daemon::become_daemon(Path::new(first), arguments.get(1..).unwrap_or_default()))
        }
        _ => worker::run(first),
    }
}
