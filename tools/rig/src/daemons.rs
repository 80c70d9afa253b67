//! The `laxityd` of each host during one run: its configuration, and a supervisor. The supervisor
//! restarts a daemon one second after it died, like `Restart=always` of the systemd unit.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use laxity_wire::{ControlClient, Status};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use crate::config::LabConfig;
use crate::error::LabError;
use crate::fabric;
use crate::sandbox;
use crate::vllm;

const RESTART_AFTER: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(10);
const START_WITHIN: Duration = Duration::from_secs(10);
const STOP_WITHIN: Duration = Duration::from_secs(2);

/// Slots of a lane. It is large because a holder of hot prefixes has many flows waiting at once.
pub const LANE_SLOTS: u32 = 1024;

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
        "scheduler": { "spin_us": 0, "slots": LANE_SLOTS },
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

struct Supervised {
    pid: Arc<AtomicI32>,
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
            let log = log_path(folder, host);
            let (laxityd, pid) = (laxityd.to_owned(), Arc::<AtomicI32>::default());
            let (stop, restarts) = (Arc::clone(&daemons.stop), Arc::clone(&daemons.restarts));
            let (refused, shared_pid) = (Arc::clone(&daemons.refused), Arc::clone(&pid));
            let thread = std::thread::spawn(move || {
                let start = || start_one(&laxityd, &file, &log, host);
                if let Err(error) = supervise(start, &stop, &shared_pid, &restarts) {
                    *refused.lock().unwrap_or_else(PoisonError::into_inner) =
                        Some(error.to_string());
                }
            });
            daemons.supervised.push(Supervised { pid, thread });
        }
        let give_up = Instant::now() + START_WITHIN;
        while !(0..config.hosts()).all(|host| daemon_socket(folder, host).exists()) {
            let refused = daemons.refused.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let restarts = daemons.restarts.load(Ordering::Relaxed);
            if refused.is_some() || restarts > 0 || Instant::now() > give_up {
                let logs: String = (0..config.hosts())
                    .map(|host| tail(&log_path(folder, host)))
                    .find(|log| !log.is_empty())
                    .unwrap_or_default();
                daemons.stop();
                let refused = refused.unwrap_or_default();
                let how = format!("takes no clients with policy `{policy}`: {refused}{logs}");
                return Err(LabError::program("laxityd", how));
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(daemons)
    }

    /// Kills the daemon of a host, as a crash would. Its supervisor starts another.
    pub fn kill(&self, host: usize) {
        if let Some(daemon) = self.supervised.get(host) {
            signal(&daemon.pid, Signal::SIGKILL);
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

fn start_one(laxityd: &Path, config: &Path, log: &Path, host: usize) -> Result<Child, LabError> {
    let log = File::options().create(true).append(true).open(log);
    let log = log.map_err(LabError::system("opening the log of laxityd"))?;
    let errors = log.try_clone().map_err(LabError::system("sharing the log of laxityd"))?;
    sandbox::internal("in")
        .arg(fabric::namespace(host))
        .arg(laxityd)
        .arg("--config")
        .arg(config)
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(errors)
        .spawn()
        .map_err(LabError::start("laxityd"))
}

/// Sends a signal to a process if there is one. A process that just died is no error.
fn signal(pid: &AtomicI32, signal: Signal) {
    let pid = pid.load(Ordering::Acquire);
    if pid > 0 {
        let _ = kill(Pid::from_raw(pid), signal);
    }
}

fn supervise(
    start: impl Fn() -> Result<Child, LabError>,
    stop: &AtomicBool,
    pid: &AtomicI32,
    restarts: &AtomicU32,
) -> Result<(), LabError> {
    loop {
        let mut child = start()?;
        pid.store(child.id().cast_signed(), Ordering::Release);
        let mut stop_by = None;
        while child.try_wait().map_err(LabError::system("waiting for laxityd"))?.is_none() {
            if stop.load(Ordering::Acquire) {
                let now = Instant::now();
                let by = *stop_by.get_or_insert_with(|| {
                    signal(pid, Signal::SIGTERM);
                    now + STOP_WITHIN
                });
                if now > by {
                    signal(pid, Signal::SIGKILL);
                }
            }
            std::thread::sleep(LOOK_EVERY);
        }
        pid.store(0, Ordering::Release);
        let again_at = Instant::now() + RESTART_AFTER;
        while Instant::now() < again_at {
            if stop.load(Ordering::Acquire) {
                return Ok(());
            }
            std::thread::sleep(LOOK_EVERY);
        }
        restarts.fetch_add(1, Ordering::Relaxed);
    }
}

pub fn tail(log: &Path) -> String {
    const LINES: usize = 15;
    let Ok(text) = fs::read(log) else { return String::new() };
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(LINES)..];
    if last.is_empty() { String::new() } else { format!("\n  {}", last.join("\n  ")) }
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
        let (stop, pid) = (AtomicBool::new(false), AtomicI32::new(0));
        let restarts = AtomicU32::new(0);
        let start = || {
            let mut command = std::process::Command::new("sleep");
            command.arg("60").spawn().map_err(LabError::start("sleep"))
        };
        std::thread::scope(|scope| {
            scope.spawn(|| supervise(start, &stop, &pid, &restarts).unwrap());
            while pid.load(Ordering::Acquire) == 0 {
                std::thread::sleep(LOOK_EVERY);
            }
            signal(&pid, Signal::SIGKILL);
            while restarts.load(Ordering::Relaxed) == 0 || pid.load(Ordering::Acquire) == 0 {
                std::thread::sleep(LOOK_EVERY);
            }
            stop.store(true, Ordering::Release);
        });
        assert_eq!(pid.load(Ordering::Acquire), 0, "nothing is left running");
    }
}
