//! Why a configuration can't be used.

use std::path::PathBuf;

use laxity_files::ReadError;
use thiserror::Error;

/// The file that is read if no other is named. It may be missing.
pub const FILE_DEFAULT: &str = "/etc/laxity/laxityd.toml";

/// A configuration that can't be used. The text names the file, the line and the remedy.
#[derive(Debug, Error)]
pub enum ConfigError {
    #[error("cannot read {path}: {cause}", path = .path.display())]
    Read {
        path: PathBuf,
        /// The cause. It is no `source`, because the text contains it.
        cause: ReadError,
    },
    #[error("cannot read {path}: no answer within {waited:?}; nothing has changed. Is the file on \
        a network file system?", path = .path.display())]
    Slow {
        path: PathBuf,
        /// How long the daemon waited.
        waited: std::time::Duration,
    },
    #[error(
        "{origin}:{line}: {problem}\n{excerpt}  fix it, then test with `laxityd --check-config`; \
         `laxityd --show-config` lists every key"
    )]
    File {
        /// The path of the file.
        origin: String,
        /// The number of the line, from 1.
        line: usize,
        problem: String,
        /// The line as written.
        excerpt: String,
    },
    #[error("--set {assignment}: {problem}")]
    Set { assignment: String, problem: String },
}
