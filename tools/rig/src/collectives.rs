//! Collectives beside vLLM (stage 2): one process at each prefill host, which drives the NCCL
//! plugin as NCCL does.
//!
//! The lab's vLLM has no experts, and its prefill processes are whole. So what experts on other
//! hosts would cause is modelled, and the traffic of it is real. When a worker has computed the
//! attention of a layer, it asks the process of its host for an exchange, and waits for its end.
//! The process sends rows of all tokens of the batch to the other prefill hosts (dispatch). A host
//! that has received all rows of an exchange sends as many bytes back (combine).
//!
//! ```text
//! vLLM worker ──unix socket──▶ process ═══ dispatch, over the shaped port ═══▶ process of the peer
//!      ▲ waits for the end        ▲ ═══════ combine ═══════════════════════════════╯
//! ```
//!
//! Prefill hosts compute batches independently of each other, so an exchange is no collective in
//! which all ranks take part at the same time: that would wait for a batch of the other host, which
//! may never come. The peer's process answers at any time instead, whatever its own engine does.
//!
//! The plugin is in another process than the engine's hints. So the daemon assigns no batch to the
//! flows. Part of what a host sends are rows that it sends back, which belong to batches of other
//! hosts and not to the one that this host computes.

mod counters;
mod failure;
mod ledger;
mod peer;
mod process;
mod rows;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::carriage;
use crate::child::Guarded;
use crate::config::LabConfig;
use crate::counts::Counts;
use crate::error::LabError;
use crate::processes::Process;
use crate::sandbox;

pub use counters::{Counters, socket};
pub use failure::first_cause;
pub use ledger::ExchangeLedger;
pub use process::run;

/// Name of the environment variable that names the socket for a worker.
pub const SOCKET_VARIABLE: &str = "LAB_COLLECTIVES";

/// Longest time that a message waits for its permit, in ms. The plugin's default is short, because
/// a GPU spins meanwhile. On a busy machine messages would then go without a permit, and the daemon
/// doesn't count their bytes.
const PERMIT_WITHIN_MS: &str = "5000";

/// What the process of a host is told.
#[derive(Debug, Serialize, Deserialize)]
struct CollectivesSpec {
    plugin: PathBuf,
    folder: PathBuf,
    host: usize,
    /// Number of prefill hosts, which are the first hosts.
    prefills: usize,
    token_bytes: u32,
}

/// Reports whether the lab has these processes.
pub fn wanted(config: &LabConfig) -> bool {
    config.vllm.as_ref().is_some_and(|vllm| vllm.collectives)
}

/// Starts the process of a prefill host.
pub(crate) fn start(
    config: &LabConfig,
    folder: &Path,
    host: usize,
    scheduled: bool,
    plugin: &Path,
) -> Result<Process, LabError> {
    let spec = CollectivesSpec {
        plugin: plugin.to_owned(),
        folder: folder.to_owned(),
        host,
        prefills: config.prefills(),
        token_bytes: config.vllm.as_ref().map_or(0, |vllm| vllm.collective_token_bytes),
    };
    let log = folder.join(format!("collectives{host}.log"));
    let mut command = sandbox::internal("collectives");
    command
        .arg(serde_json::to_string(&spec)?)
        .envs(carriage::environment(config, folder, host, scheduled))
        .env("LAXITY_NCCL_WAIT_MS", PERMIT_WITHIN_MS);
    let guarded = Guarded::start_group("the collectives of a host", &mut command, &log)?;
    Ok(Process { host, guarded })
}

/// Adds what each prefill host's process counted to the counters of the host.
pub fn add_counts(
    config: &LabConfig,
    folder: &Path,
    counts: &mut [Counts],
) -> Result<(), LabError> {
    for (host, counts) in counts.iter_mut().enumerate().take(config.prefills()) {
        Counters::ask(folder, host)?.add_to(counts);
    }
    Ok(())
}
