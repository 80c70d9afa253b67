//! Options of a client, set by the program or the environment.

use std::path::PathBuf;
use std::time::Duration;

use laxity_job::Job;
use laxity_shm::layout::Mode;
use laxity_shm::registration;

/// How a client attaches, and when it considers the daemon lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Path of laxityd's socket.
    pub socket: PathBuf,
    /// Name shown to people, at most 27 bytes. A longer one is cut.
    pub name: String,
    /// Highest mode of the scheduler in this process. The daemon's own mode may be lower.
    pub mode: Mode,
    /// Time without a sign of life, while a flow waits, after which the daemon counts as lost.
    pub stall_timeout: Duration,
    /// Time between attempts to attach when there is no daemon.
    pub reattach_every: Duration,
    /// Longest wait of [`Client::attach`](crate::Client::attach) for the daemon's answer. Later
    /// attempts never wait.
    pub attach_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            socket: PathBuf::from(registration::DEFAULT_SOCKET),
            name: String::from("unnamed"),
            mode: Mode::Enforce,
            stall_timeout: Duration::from_millis(100),
            reattach_every: Duration::from_millis(250),
            attach_timeout: Duration::from_millis(100),
        }
    }
}

impl Options {
    /// Returns the defaults, overridden by the settings of the [`Job`], `LAXITY_SOCKET` and
    /// `LAXITY_NAME`. Without a name, the executable's is used.
    pub fn from_env() -> Self {
        let job = Job::of_this_process();
        job.complain();
        let defaults = Self::default();
        Self {
            socket: registration::socket_path(),
            name: laxity_job::process_name().unwrap_or(defaults.name),
            mode: job.mode,
            stall_timeout: job.stall_timeout.unwrap_or(defaults.stall_timeout),
            attach_timeout: job.attach_timeout.unwrap_or(defaults.attach_timeout),
            ..defaults
        }
    }
}
