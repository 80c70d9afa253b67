//! The `laxity-coordinator` of a run, one for all hosts, and what their daemons say of it.
//!
//! It runs in the lab's own namespace and is reached over a network beside the fabric. No
//! supervisor: what is killed stays so, since what happens then is what the run is to show.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use laxity_wire::ClusterStatus;
use serde::{Deserialize, Serialize};

use crate::daemons::{status, tail};
use crate::fabric;

/// It has this long to get all daemons.
const ATTEND_WITHIN: Duration = Duration::from_secs(15);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// What came of it, by the word of the daemons, over all hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoordinatorRecord {
    /// It was killed.
    pub killed: bool,
    /// Daemons that followed its order at the end.
    pub following: u32,
    /// Orders that were applied.
    pub orders: u64,
    /// Orders that were refused, or dropped.
    pub refused_orders: u64,
    /// Reports that were sent.
    pub reports: u64,
    /// Events that it refused.
    pub refused_events: u64,
    /// Fetches that it could order ([`LabConfig::reads`](crate::config::LabConfig::reads)).
    pub fetches: u64,
    /// Times that one had to wait.
    pub fetches_held: u64,
    /// Fetches that waited for as long as they may.
    pub fetches_ahead: u64,
}

/// A running coordinator; ends with this.
#[derive(Debug)]
pub struct Coordinator {
    child: Child,
    killed: bool,
}

fn log_path(folder: &Path) -> PathBuf {
    folder.join("coordinator.log")
}

fn ask(folder: &Path, host: usize) -> Option<ClusterStatus> {
    status(folder, host)?.cluster
}

impl Coordinator {
    /// Starts it, with a configuration file if one is given.
    ///
    /// # Errors
    /// The program cannot be run.
    pub fn start(program: &Path, config: Option<&Path>, folder: &Path) -> anyhow::Result<Self> {
        let log = File::create(log_path(folder))?;
        let mut command = Command::new(program);
        if let Some(config) = config {
            command.arg("--config").arg(config);
        }
        let child = command
            .args(["--listen", &fabric::COORDINATOR.to_string(), "--insecure"])
            .env_remove("LAXITY_COORDINATOR_CONFIG")
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        Ok(Self {
            child,
            killed: false,
        })
    }

    /// Waits until all daemons have an order of it, so that runs do not differ by who came late.
    ///
    /// # Errors
    /// They have not after a while; its log is in the message.
    pub fn await_daemons(hosts: usize, folder: &Path) -> anyhow::Result<()> {
        let give_up = Instant::now() + ATTEND_WITHIN;
        for host in 0..hosts {
            while ask(folder, host).is_none_or(|said| said.orders == 0) {
                if Instant::now() > give_up {
                    bail!(
                        "the daemon of host {host} has no order of the coordinator after \
                         {ATTEND_WITHIN:?}{}",
                        tail(&log_path(folder))
                    );
                }
                std::thread::sleep(LOOK_EVERY);
            }
        }
        Ok(())
    }

    /// Kills it as a crash would, for good.
    pub fn kill(&mut self) {
        self.killed = true;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// What daemons say; then it ends.
    #[must_use]
    pub fn record(self, hosts: usize, folder: &Path) -> CoordinatorRecord {
        let mut record = CoordinatorRecord {
            killed: self.killed,
            ..CoordinatorRecord::default()
        };
        for said in (0..hosts).filter_map(|host| ask(folder, host)) {
            record.following += u32::from(said.order == "cluster");
            record.orders += said.orders;
            record.refused_orders += said.stale_orders + said.broken_orders;
            record.reports += said.reports;
            record.refused_events += said.refused_events;
            record.fetches += said.fetches;
            record.fetches_held += said.fetches_held;
            record.fetches_ahead += said.fetches_ahead;
        }
        record
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
