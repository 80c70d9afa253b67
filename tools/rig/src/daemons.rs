//! The `laxityd` of each host during one run: its configuration, and a supervisor. The supervisor
//! restarts a daemon one second after it died. (The systemd unit does it after 200 ms.)

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use laxity_wire::{ControlClient, Status};
use nix::sys::signal::Signal;
use serde_json::json;

use crate::child::{Guarded, lock, poll, tail};
use crate::config::LabConfig;
use crate::error::LabError;
use crate::fabric;
use crate::sandbox;
use crate::vllm;

const RESTART_AFTER: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(10);
const START_WITHIN: Duration = Duration::from_secs(10);
const STOP_WITHIN: Duration = Duration::from_secs(2);

pub fn daemon_socket(folder: &Path, host: usize) -> PathBuf {
    folder.join(format!("laxityd{host}.sock"))
}

pub fn control_socket(folder: &Path, host: usize) -> PathBuf {
    folder.join(format!("control{host}.sock"))
}

const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// Returns the status of a host's daemon, or `None` if it doesn't answer.
pub fn status(folder: &Path, host: usize) -> Option<Status> {
    let mut control = ControlClient::connect(control_socket(folder, host), ANSWER_WITHIN).ok()?;
    control.status().ok()
}

pub fn daemon_toml(
    config: &LabConfig,
    policy: &str,
    folder: &Path,
    host: usize,
) -> Result<String, toml::ser::Error> {
    let mut daemon = json!({
        "mode": "enforce",
        "policy": policy,
        "socket": daemon_socket(folder, host),
        "control": control_socket(folder, host),
        "metrics": "",
        // Eight daemons and eight engines share two cores, so the scheduler thread must not spin.
        // A holder of hot prefixes has many flows waiting in its lanes at once.
        "scheduler": { "spin_us": 0, "slots": 1024 },
        "nic": [{
            "name": fabric::HOST_PORT,
            "rate": format!("{}Mbit", config.port_mbit),
            "chunk": config.chunk_bytes,
            "window": config.window_bytes,
        }],
        "levels": {
            "count": config.level_dscp.len(),
            "dscp": config.level_dscp,
            "scavenger_dscp": config.scavenger_dscp,
        },
        // Ten times the defaults, because the lab's layers take ten times as long.
        "tuning": { "load_time_constant": "100ms", "promotion_period": "10ms" },
        "residual": { "mode": if config.residual { "follow" } else { "measure" } },
    });
    if let Some(bytes) = config.peer_window_bytes {
        daemon["nic"][0]["peer_window"] = bytes.into();
    }
    if config.coordinator {
        daemon["coordinator"] = json!({
            "endpoint": format!("http://{}", fabric::COORDINATOR),
            "insecure": true,
            "host": config.host_name(host),
        });
    }
    toml::to_string(&toml::Table::try_from(daemon)?)
}

/// The daemon of a host, or `None` while its supervisor waits before it starts another.
type SharedDaemon = Arc<Mutex<Option<Guarded>>>;

struct Supervised {
    daemon: SharedDaemon,
    thread: JoinHandle<()>,
}

pub struct Daemons {
    stop: Arc<AtomicBool>,
    restarts: Arc<AtomicU32>,
    refused: Arc<Mutex<Option<String>>>,
    supervised: Vec<Supervised>,
}

impl Daemons {
    /// Starts one daemon per host and waits until all accept clients.
    pub fn start(
        config: &LabConfig,
        policy: &str,
        folder: &Path,
        laxityd: &Path,
    ) -> Result<Self, LabError> {
        let mut daemons = Self {
            stop: Arc::default(),
            restarts: Arc::default(),
            refused: Arc::default(),
            supervised: Vec::new(),
        };
        for host in 0..config.hosts() {
            let file = folder.join(format!("laxityd{host}.toml"));
            let (policy, _) = vllm::daemon_policy(policy);
            fs::write(&file, daemon_toml(config, policy, folder, host)?)
                .map_err(LabError::file("writing", &file))?;
            let (log, laxityd) = (log_path(folder, host), laxityd.to_owned());
            let daemon = SharedDaemon::default();
            let (stop, restarts) = (Arc::clone(&daemons.stop), Arc::clone(&daemons.restarts));
            let (refused, shared) = (Arc::clone(&daemons.refused), Arc::clone(&daemon));
            let thread = std::thread::spawn(move || {
                let start = || {
                    let mut command = sandbox::internal("in");
                    command.arg(fabric::namespace(host)).arg(&laxityd).arg("--config").arg(&file);
                    Guarded::start("laxityd", &mut command, &log)
                };
                if let Err(error) = supervise(start, &stop, &shared, &restarts) {
                    *lock(&refused) = Some(error.to_string());
                }
            });
            daemons.supervised.push(Supervised { daemon, thread });
        }
        let are_up = poll(START_WITHIN, LOOK_EVERY, || {
            if (0..config.hosts()).all(|host| daemon_socket(folder, host).exists()) {
                return Some(true);
            }
            let failed = lock(&daemons.refused).is_some() || daemons.restarts() > 0;
            failed.then_some(false)
        });
        if are_up != Some(true) {
            let logs: String = (0..config.hosts())
                .map(|host| tail(&log_path(folder, host)))
                .find(|log| !log.is_empty())
                .unwrap_or_default();
            let refused = lock(&daemons.refused).take().unwrap_or_default();
            daemons.stop();
            let how = format!("takes no clients with policy `{policy}`: {refused}{logs}");
            return Err(LabError::program("laxityd", how));
        }
        Ok(daemons)
    }

    /// Kills the daemon of a host, as a crash would. Its supervisor starts another.
    pub fn kill(&self, host: usize) {
        if let Some(supervised) = self.supervised.get(host)
            && let Some(daemon) = lock(&supervised.daemon).as_mut()
        {
            daemon.signal(Signal::SIGKILL);
        }
    }

    pub fn restarts(&self) -> u32 {
        self.restarts.load(Ordering::Relaxed)
    }

    pub fn stop(self) {
        self.stop.store(true, Ordering::Release);
        for daemon in self.supervised {
            // The supervisor ends its daemon when it sees the flag. It cannot panic.
            let _ = daemon.thread.join();
        }
    }
}

fn log_path(folder: &Path, host: usize) -> PathBuf {
    folder.join(format!("laxityd{host}.log"))
}

fn supervise(
    start: impl Fn() -> Result<Guarded, LabError>,
    stop: &AtomicBool,
    daemon: &Mutex<Option<Guarded>>,
    restarts: &AtomicU32,
) -> Result<(), LabError> {
    let is_over = || stop.load(Ordering::Acquire);
    loop {
        *lock(daemon) = Some(start()?);
        while lock(daemon).as_mut().is_some_and(|it| it.ended().is_none()) && !is_over() {
            std::thread::sleep(LOOK_EVERY);
        }
        if let Some(mut daemon) = lock(daemon).take()
            && is_over()
        {
            daemon.signal(Signal::SIGTERM);
            daemon.await_end(Instant::now() + STOP_WITHIN);
        }
        if poll(RESTART_AFTER, LOOK_EVERY, || is_over().then_some(())).is_some() {
            return Ok(());
        }
        restarts.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemons_configuration_names_its_policy_port_and_levels() {
        let config = LabConfig::default();
        let text = daemon_toml(&config, "mfs", Path::new("/run/lab/0"), 3).unwrap();
        let value: toml::Table = text.parse().unwrap();
        assert_eq!(value["policy"].as_str(), Some("mfs"));
        assert_eq!(value["socket"].as_str(), Some("/run/lab/0/laxityd3.sock"));
        assert_eq!(value["nic"][0]["rate"].as_str(), Some("200Mbit"));
        assert_eq!(value["levels"]["dscp"].as_array().unwrap().len(), 8);
    }

    #[test]
    fn a_program_that_dies_is_started_again_until_it_is_told_to_stop() {
        let (stop, daemon) = (AtomicBool::new(false), SharedDaemon::default());
        let restarts = AtomicU32::new(0);
        let start = || {
            let mut command = std::process::Command::new("sleep");
            Guarded::start("sleep", command.arg("60"), Path::new("/dev/null"))
        };
        std::thread::scope(|scope| {
            scope.spawn(|| supervise(start, &stop, &daemon, &restarts).unwrap());
            let await_one = || {
                let runs = || lock(&daemon).is_some().then_some(());
                poll(RESTART_AFTER * 30, LOOK_EVERY, runs).unwrap();
            };
            await_one();
            lock(&daemon).as_mut().unwrap().signal(Signal::SIGKILL);
            let again = || (restarts.load(Ordering::Relaxed) > 0).then_some(());
            poll(RESTART_AFTER * 30, LOOK_EVERY, again).unwrap();
            await_one();
            stop.store(true, Ordering::Release);
        });
        assert!(lock(&daemon).is_none(), "nothing is left running");
    }
}
