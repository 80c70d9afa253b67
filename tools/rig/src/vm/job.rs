//! What a guest is told to do, and what it answers.
//!
//! The host writes a [`GuestJob`] into the control folder before it starts the guest; the guest's
//! job process reads it, sets up the network, runs the [`Job`] and writes an [`Answer`]. One boot,
//! one job. A job that runs many programs is Rust inside the guest: see [`super::guest::Guest`].
//!
//! A new kind of job is a variant of [`Job`] with a configuration that serde can carry, and an arm
//! in [`run`].

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::counters::RouterCounters;
use super::exec;
use super::guest::Guest;
use super::network::NetworkConfig;
use super::qemu::Share;
use super::verbs::{self, VerbsConfig};

/// Folder in the guest that shares orders and answers with the host.
pub const CONTROL_FOLDER: &str = "/run/lab";

/// The [`GuestJob`], in the control folder.
pub const GUEST_JOB_FILE: &str = "guest_job.json";

/// The answer, in the control folder.
pub const ANSWER_FILE: &str = "answer.json";

/// What to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Job {
    /// Run one program, its standard streams connected to the host's.
    Exec(Exec),
    /// Run unmodified RDMA programs under the scheduler, and account for all that they do.
    Verbs(Box<VerbsConfig>),
}

/// One program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exec {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Its environment; the lab's own variables are added.
    pub env: Vec<(String, String)>,
    /// Where it runs.
    pub cwd: PathBuf,
}

/// Everything that the guest is told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GuestJob {
    /// The network to build.
    pub network: NetworkConfig,
    /// Folders to mount writable, at the path that they have on the host.
    pub shares: Vec<Share>,
    /// `lib/modules/RELEASE` of the guest's kernel, on the host.
    pub modules: PathBuf,
    /// The kernel's release.
    pub release: String,
    /// What to do then.
    pub job: Job,
}

/// What a guest is, once it can be used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// The kernel's release.
    pub release: String,
    /// Index of the IPv4 RoCEv2 GID, the same on both devices.
    pub gid_index: u32,
    /// Rate of the router's ports, Mbit/s.
    pub rate_mbit: Option<u32>,
    /// Time that the set-up of network and devices took, ms.
    pub network_ms: u64,
}

/// What a job comes to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Finished {
    /// Exit code of the program, or 0 if the job did what it was told.
    pub exit_code: i32,
    /// What the job has to say, in its own form.
    pub details: serde_json::Value,
    /// What the router has counted, all in all.
    pub router: RouterCounters,
}

/// The answer to a [`GuestJob`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// It was done; this came of it.
    Finished(Finished),
    /// It could not be done: why.
    Failed(String),
}

/// Runs a job; the exit code and the details of its [`Finished`].
///
/// # Errors
/// The job could not be run, and why.
pub fn run(job: &Job, guest: &mut Guest) -> anyhow::Result<(i32, serde_json::Value)> {
    match job {
        Job::Exec(config) => Ok((exec::run(config, guest)?, serde_json::Value::Null)),
        Job::Verbs(config) => {
            let report = verbs::run(guest, config)?;
            Ok((i32::from(!report.passed()), serde_json::to_value(&report)?))
        }
    }
}
