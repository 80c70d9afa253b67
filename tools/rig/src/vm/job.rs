//! The commands to a guest and its answers.
//!
//! The host writes a [`GuestJob`] into the control folder before it starts the guest. The guest's
//! job process reads it, sets up the network, runs the [`VmJob`] and writes a [`VmAnswer`]. A boot
//! runs one job. A job that runs many programs is Rust code inside the guest, see
//! [`super::guest::Guest`].
//!
//! A new kind of job needs a variant of [`VmJob`] with a serializable configuration, and an arm in
//! [`run`].

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::counters::RouterCounters;
use super::exec;
use super::guest::Guest;
use super::network::NetworkConfig;
use super::qemu::Share;
use super::verbs::{self, VerbsConfig};
use crate::error::LabError;

pub const CONTROL_FOLDER: &str = "/run/lab";
pub const GUEST_JOB_FILE: &str = "guest_job.json";
pub const ANSWER_FILE: &str = "answer.json";

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum VmJob {
    Exec(Exec),
    Verbs(Box<VerbsConfig>),
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exec {
    pub argv: Vec<String>,
    /// Environment of the program. The lab adds its own variables.
    pub env: Vec<(String, String)>,
    pub cwd: PathBuf,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GuestJob {
    pub network: NetworkConfig,
    pub shares: Vec<Share>,
    /// Path of `lib/modules/RELEASE` of the guest's kernel, on the host.
    pub modules: PathBuf,
    pub release: String,
    pub job: VmJob,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    pub release: String,
    pub gid_index: u32,
    /// Rate of the router's ports, in Mbit/s. `None` without shaping.
    pub rate_mbit: Option<u32>,
    pub network_ms: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Finished {
    /// Exit code of the program, or 0 if the job succeeded.
    pub exit_code: i32,
    pub details: serde_json::Value,
    pub router: RouterCounters,
}

/// What a job came to, or why it could not be run.
pub type VmAnswer = Result<Finished, String>;

/// Runs a job and returns the exit code and the details of its [`Finished`].
pub fn run(job: &VmJob, guest: &mut Guest) -> Result<(i32, serde_json::Value), LabError> {
    match job {
        VmJob::Exec(config) => Ok((exec::run(config, guest)?, serde_json::Value::Null)),
        VmJob::Verbs(config) => {
            let report = verbs::run(guest, config)?;
            Ok((i32::from(!report.passed()), serde_json::to_value(&report)?))
        }
    }
}
