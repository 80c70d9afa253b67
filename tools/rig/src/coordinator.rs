//! The `laxity-coordinator` of a run, which serves all hosts, and the daemons' counters about it.
//!
//! The coordinator runs in the lab's own namespace and uses a network of its own beside the fabric.
//! Nothing restarts a killed coordinator, because a run shows what happens without it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use laxity_wire::ClusterStatus;
use serde::{Deserialize, Serialize};

use crate::child::{Guarded, poll, tail};
use crate::daemons::status;
use crate::error::LabError;
use crate::fabric;

/// Longest time until all daemons have a cluster order.
const ATTEND_WITHIN: Duration = Duration::from_secs(15);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The daemons' counters about the coordinator, over all hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoordinatorRecord {
    pub killed: bool,
    pub following: u32,
    pub orders: u64,
    pub refused_orders: u64,
    pub reports: u64,
    pub refused_events: u64,
    pub fetches: u64,
}

/// A running coordinator. Dropping it kills the process.
#[derive(Debug)]
pub struct Coordinator {
    process: Guarded,
    killed: bool,
}

fn log_path(folder: &Path) -> PathBuf {
    folder.join("coordinator.log")
}

fn ask(folder: &Path, host: usize) -> Option<ClusterStatus> {
    status(folder, host)?.cluster
}

impl Coordinator {
    /// Starts the coordinator, with a configuration file if one is given.
    pub fn start(program: &Path, config: Option<&Path>, folder: &Path) -> Result<Self, LabError> {
        let mut command = Command::new(program);
        if let Some(config) = config {
            command.arg("--config").arg(config);
        }
        command
            .args(["--listen", &fabric::COORDINATOR.to_string(), "--insecure"])
            .env_remove("LAXITY_COORDINATOR_CONFIG");
        let process = Guarded::start(program.display(), &mut command, &log_path(folder))?;
        Ok(Self { process, killed: false })
    }

    /// Waits until all daemons have a cluster order, so that all runs start in the same state.
    pub fn await_daemons(hosts: usize, folder: &Path) -> Result<(), LabError> {
        let give_up = Instant::now() + ATTEND_WITHIN;
        for host in 0..hosts {
            let order = || ask(folder, host).filter(|said| said.orders > 0);
            let left = give_up.saturating_duration_since(Instant::now());
            if poll(left, LOOK_EVERY, order).is_none() {
                return Err(LabError::Timeout {
                    what: format!("the daemon of host {host} has no order of the coordinator"),
                    within: ATTEND_WITHIN,
                    said: tail(&log_path(folder)),
                });
            }
        }
        Ok(())
    }

    /// Kills the coordinator, as a crash would. It is not restarted.
    pub fn kill(&mut self) {
        self.killed = true;
        self.process.kill();
    }

    pub fn record(self, hosts: usize, folder: &Path) -> CoordinatorRecord {
        let mut record = CoordinatorRecord { killed: self.killed, ..CoordinatorRecord::default() };
        for said in (0..hosts).filter_map(|host| ask(folder, host)) {
            record.following += u32::from(said.order == "cluster");
            record.orders += said.orders;
            record.refused_orders += said.stale_orders + said.broken_orders;
            record.reports += said.reports;
            record.refused_events += said.refused_events;
            record.fetches += said.fetches;
        }
        record
    }
}
