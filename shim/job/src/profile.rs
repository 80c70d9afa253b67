//! Job profiles: the stages of a program's transfers for which no hint and no registered memory
//! region has one (architecture §4.1).
//!
//! A profile is a small TOML file. [`Profile::load`] looks for `NAME` in this order:
//!
//! 1. if it contains a `/`, it is the path of a file;
//! 2. `$LAXITY_PROFILE_DIR/NAME.toml`;
//! 3. `/etc/laxity/profiles/NAME.toml`;
//! 4. the built-in profile of that name.
//!
//! `laxity run` reads profiles so that mistakes show before a job starts. The libraries read them
//! inside the application. Nothing here panics or waits, and a file larger than [`FILE_BYTES_MAX`]
//! is refused. [`Profile::default`] needs neither a file nor the parser.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use laxity_shm::layout::Mode;
use laxity_shm::record::Stage;
use serde::Deserialize;
use thiserror::Error;

use crate::file;

/// The variable that names a folder whose profiles precede those of [`FOLDER`].
pub const FOLDER_ENV: &str = "LAXITY_PROFILE_DIR";
/// The folder of a host's profiles.
pub const FOLDER: &str = "/etc/laxity/profiles";
/// Largest profile that is read, in bytes. Real profiles are a page of text.
pub const FILE_BYTES_MAX: u64 = 64 << 10;

/// The stages of a job's transfers, by opcode and queue pair, and other settings of the job.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Profile {
    /// The name under which the profile was loaded. For a path, the file's stem.
    #[serde(skip)]
    pub name: String,
    /// Where the profile was found.
    #[serde(skip)]
    pub origin: Origin,
    /// The profile's purpose in one line.
    #[serde(default)]
    pub description: String,
    /// Whether `laxity run` sets the class variables of libraries that are unset.
    #[serde(default)]
    pub class_variables: bool,
    /// Stages of work requests.
    pub stage: Stages,
    /// Settings of queue pairs.
    pub qp: QueuePairSettings,
    /// Objective on the time to first token, counted from the first sight of a request. `None` uses
    /// the daemon's. Never zero.
    #[serde(deserialize_with = "file::objective")]
    pub slo_ttft: Option<Duration>,
    /// Highest mode of the scheduler in this job. `None` uses the daemon's.
    #[serde(deserialize_with = "file::mode")]
    pub mode: Option<Mode>,
}

/// Stages of work requests for which no hint and no memory region has one, by opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Stages {
    /// Stage of RDMA WRITE, also with immediate.
    #[serde(deserialize_with = "file::stage")]
    pub write: Stage,
    /// Stage of RDMA READ.
    #[serde(deserialize_with = "file::stage")]
    pub read: Stage,
    /// Stage of SEND, also with immediate or invalidate.
    #[serde(deserialize_with = "file::stage")]
    pub send: Stage,
    /// Stage of compare-and-swap, fetch-and-add and atomic WRITE.
    #[serde(deserialize_with = "file::stage")]
    pub atomic: Stage,
}

/// Settings of a job's queue pairs.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct QueuePairSettings {
    /// The stage whose class a queue pair gets when it goes INIT→RTR.
    #[serde(deserialize_with = "file::stage")]
    pub stage: Stage,
    /// The library's default traffic class. [`QueuePairSettings::is_pin`] compares with it.
    #[serde(deserialize_with = "file::traffic_class")]
    pub default_traffic_class: u8,
    /// Environment variables by which an operator pins a class.
    #[serde(deserialize_with = "file::variables")]
    pub pin_variables: Vec<String>,
}

/// The origin of a profile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    /// The profile is compiled in.
    #[default]
    Builtin,
    /// The profile comes from this file.
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

/// The reason why a profile can't be used. The command line refuses to start the job. Inside an
/// application, log it and use [`Profile::default`].
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the texts say what the fields are")]
pub enum ProfileError {
    /// There is no file and no built-in profile of that name.
    #[error(
        "there is no profile `{name}`: looked for {looked}; the profiles here are {known}; `laxity \
         profiles` describes them"
    )]
    Unknown { name: String, looked: String, known: String },
    /// The file exists and can't be read.
    #[error("cannot read profile {path}: {cause}", path = .path.display())]
    Unreadable {
        path: PathBuf,
        /// The cause. It is not a source, because the text contains it.
        cause: laxity_files::ReadError,
    },
    /// The file is larger than [`FILE_BYTES_MAX`].
    #[error("{path} is larger than {FILE_BYTES_MAX} bytes: it is no \
        profile", path = .path.display())]
    TooLarge { path: PathBuf },
    /// The text is no valid profile.
    #[error("{origin}, line {line}{}: \
        {problem}", if key.is_empty() { String::new() } else { format!(", `{key}`") })]
    Malformed {
        origin: Origin,
        line: usize,
        /// Key with its table, such as `stage.write`. Empty if the error has no key.
        key: String,
        problem: String,
    },
}

impl Default for Profile {
    /// Returns the built-in profile `default`. Files are not considered.
    fn default() -> Self {
        Self {
            name: String::from("default"),
            origin: Origin::Builtin,
            description: String::from("any RDMA program"),
            class_variables: false,
            stage: Stages::default(),
            qp: QueuePairSettings::default(),
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

impl Default for QueuePairSettings {
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

impl QueuePairSettings {
    /// Reports whether the class that an application gave a queue pair is an operator's choice,
    /// which Laxity keeps. That is so if it differs from the library's default, or one of the
    /// variables is set. `is_set` reports whether an environment variable has a value.
    pub fn is_pin(&self, traffic_class: u8, is_set: impl FnMut(&str) -> bool) -> bool {
        traffic_class != self.default_traffic_class
            || self.pin_variables.iter().map(String::as_str).any(is_set)
    }
}

impl Profile {
    /// Parses the text of a profile.
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
        Ok(Self { name: name.to_owned(), origin, ..read })
    }
}
