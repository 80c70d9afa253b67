//! What the embedding program, or the environment, may set.

use std::path::PathBuf;
use std::time::Duration;

use laxity_profile::Job;
use laxity_shm::layout::Mode;
use laxity_shm::registration;

/// How a client attaches and when it gives up on the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Socket of laxityd.
    pub socket: PathBuf,
    /// Name shown to people, at most 32 bytes.
    pub name: String,
    /// How far the scheduler may go in this process; the daemon's own mode may be lower.
    pub mode: Mode,
    /// A daemon that gives no sign of life for this long while a flow waits is given up.
    pub stall_timeout: Duration,
    /// Time between attempts to attach when there is no daemon.
    pub reattach_every: Duration,
    /// How long [`Client::attach`](crate::Client::attach) waits for the daemon's answer. Later
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
            reattach_every: Duration::from_secs(1),
            attach_timeout: Duration::from_millis(100),
        }
    }
}

impl Options {
    /// The defaults, overridden by `LAXITY_SOCKET`, `LAXITY_NAME`, `LAXITY_STALL_MS` and
    /// `LAXITY_ATTACH_MS`. Without a name, that of the executable. The mode is that of the [`Job`]:
    /// the lower of `LAXITY_MODE` and the profile's.
    #[must_use]
    pub fn from_env() -> Self {
        let text = |key| std::env::var(key).ok().filter(|value| !value.is_empty());
        let job = Job::of_this_process();
        job.complain();
        let mut options = Self {
            socket: registration::socket_path(),
            mode: job.mode,
            ..Self::default()
        };
        if let Some(name) = text("LAXITY_NAME").or_else(executable) {
            options.name = name;
        }
        for (key, time) in [
            ("LAXITY_STALL_MS", &mut options.stall_timeout),
            ("LAXITY_ATTACH_MS", &mut options.attach_timeout),
        ] {
            if let Some(millis) = text(key).and_then(|value| value.parse().ok()) {
                *time = Duration::from_millis(millis);
            }
        }
        options
    }
}

fn executable() -> Option<String> {
    let path = std::env::current_exe().ok()?;
    Some(path.file_name()?.to_string_lossy().into_owned())
}
