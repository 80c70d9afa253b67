//! Job profiles: what a program's transfers are for when no hint and no registered memory region
//! says more (architecture §4.1).
//!
//! A profile is a small TOML file. [`Profile::load`] looks for `NAME` in this order, and the first
//! hit counts:
//!
//! 1. if it contains a `/`, it is the path of a file;
//! 2. `$LAXITY_PROFILE_DIR/NAME.toml`;
//! 3. `/etc/laxity/profiles/NAME.toml`;
//! 4. the built-in profile of that name.
//!
//! `laxity run` reads profiles so that mistakes show before a job starts. The libraries read them
//! inside the application. Nothing here panics or waits, a file is read up to [`FILE_BYTES_MAX`],
//! and [`Profile::default`] needs neither file nor parser.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use laxity_shm::layout::Mode;
use laxity_shm::record::Stage;
use serde::Deserialize;
use thiserror::Error;

use crate::file;

/// Names a folder whose profiles come before those of [`FOLDER`].
pub const FOLDER_ENV: &str = "LAXITY_PROFILE_DIR";
/// Where the profiles of a host are.
pub const FOLDER: &str = "/etc/laxity/profiles";
/// Largest profile that is read. Real ones are a page of text; what is larger is something else.
pub const FILE_BYTES_MAX: u64 = 64 << 10;

/// What a job's transfers are for, by opcode and queue pair.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Profile {
    /// The name it was asked for by; of a path, the file's name without its ending.
    #[serde(skip)]
    pub name: String,
    /// Where it was found.
    #[serde(skip)]
    pub origin: Origin,
    /// What it is for, one line for people.
    #[serde(default)]
    pub description: String,
    /// Stages of work requests.
    pub stage: Stages,
    /// What holds for a whole queue pair.
    pub qp: QueuePairs,
    /// Objective on the time to first token, counted from the first sight of a request; `None`
    /// leaves it to the daemon. Never zero.
    #[serde(deserialize_with = "file::objective")]
    pub slo_ttft: Option<Duration>,
    /// How far the scheduler may go in this job; `None` leaves it to the daemon.
    #[serde(deserialize_with = "file::mode")]
    pub mode: Option<Mode>,
}

/// Stage of a work request that no hint and no memory region says more about, by its opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Stages {
    /// RDMA WRITE, also with immediate.
    #[serde(deserialize_with = "file::stage")]
    pub write: Stage,
    /// RDMA READ.
    #[serde(deserialize_with = "file::stage")]
    pub read: Stage,
    /// SEND, also with immediate or invalidate.
    #[serde(deserialize_with = "file::stage")]
    pub send: Stage,
    /// Compare-and-swap, fetch-and-add.
    #[serde(deserialize_with = "file::stage")]
    pub atomic: Stage,
}

/// What holds for the queue pairs of a job.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct QueuePairs {
    /// The stage whose class a queue pair gets when it goes INIT→RTR.
    #[serde(deserialize_with = "file::stage")]
    pub stage: Stage,
    /// Traffic class that the library sets by itself when nobody asked it to. See
    /// [`QueuePairs::is_pin`].
    #[serde(deserialize_with = "file::traffic_class")]
    pub default_traffic_class: u8,
    /// Environment variables by which an operator pins a class.
    #[serde(deserialize_with = "file::variables")]
    pub pin_variables: Vec<String>,
}

/// Where a profile came from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    /// Compiled in.
    #[default]
    Builtin,
    /// This file.
    File(PathBuf),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Builtin => f.write_str("built-in"),
            Self::File(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Why a profile can't be used. The command line refuses to start the job; inside an application,
/// log it and go on with [`Profile::default`].
#[derive(Debug, Error)]
pub enum ProfileError {
    /// No file and no built-in profile of that name.
    #[error(
        "there is no profile `{name}`: looked for {looked}; the profiles here are {known}; `laxity \
         profiles` describes them"
    )]
    Unknown {
        /// What was asked for.
        name: String,
        /// Where it was looked for.
        looked: String,
        /// What there is.
        known: String,
    },
    /// The file is there and can't be read.
    #[error("cannot read profile {path}: {cause}", path = .path.display())]
    Unreadable {
        /// Path of the file that the error is about.
        path: PathBuf,
        /// Why. Not a source: the text says it.
        cause: laxity_files::ReadError,
    },
    /// Larger than [`FILE_BYTES_MAX`].
    #[error("{path} is larger than {FILE_BYTES_MAX} bytes: it is no \
        profile", path = .path.display())]
    TooLarge {
        /// Path of the file that the error is about.
        path: PathBuf,
    },
    /// It is no profile: the line, the key, and what may stand there.
    #[error("{origin}, line {line}{}: \
        {problem}", if key.is_empty() { String::new() } else { format!(", `{key}`") })]
    Malformed {
        /// Path of the file that the error is about.
        origin: Origin,
        /// Line, from 1.
        line: usize,
        /// Key with its table, such as `stage.write`; empty if it is not about a key.
        key: String,
        /// What is wrong and what to write instead.
        problem: String,
    },
}

impl Default for Profile {
    /// The built-in profile `default`, whatever files there are.
    fn default() -> Self {
        Self {
            name: String::from("default"),
            origin: Origin::Builtin,
            description: String::from("any RDMA program"),
            stage: Stages::default(),
            qp: QueuePairs::default(),
            slo_ttft: None,
            mode: None,
        }
    }
}

impl Default for Stages {
    fn default() -> Self {
        Self {
            write: Stage::P2d,
            read: Stage::KvReuse,
            send: Stage::Background,
            atomic: Stage::Background,
        }
    }
}

impl Default for QueuePairs {
    fn default() -> Self {
        Self {
            stage: Stage::P2d,
            default_traffic_class: 0,
            pin_variables: ["MC_IB_TC", "NCCL_IB_TC", "UCX_IB_TRAFFIC_CLASS"]
                .map(String::from)
                .to_vec(),
        }
    }
}

impl QueuePairs {
    /// Whether the class that an application gave a queue pair is an operator's choice, which
    /// Laxity keeps: it differs from what the library would set by itself, or one of the variables
    /// is set. `is_set` tells whether an environment variable has a value.
    #[must_use]
    pub fn is_pin(&self, traffic_class: u8, is_set: impl FnMut(&str) -> bool) -> bool {
        traffic_class != self.default_traffic_class
            || self.pin_variables.iter().map(String::as_str).any(is_set)
    }
}

impl Profile {
    /// The profile that `text` says.
    ///
    /// # Errors
    /// [`ProfileError::Malformed`].
    pub fn parse(name: &str, origin: Origin, text: &str) -> Result<Self, ProfileError> {
        let read: Self = toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            let (line, key) = file::place(text, at);
            ProfileError::Malformed {
                origin: origin.clone(),
                line,
                key,
                problem: error.message().replace('\n', "; "),
            }
        })?;
        Ok(Self {
            name: name.to_owned(),
            origin,
            ..read
        })
    }
}
