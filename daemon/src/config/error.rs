//! Why a configuration cannot be used.

use std::path::PathBuf;

use laxity_files::ReadError;
use thiserror::Error;

/// The file that is read if no other is named, and may be missing.
pub const FILE_DEFAULT: &str = "/etc/laxity/laxityd.toml";

/// A configuration that cannot be used. The text names the file, the line and what to do.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read. Create it, fix its permissions, or start without `--config`.
    #[error("cannot read {path}: {cause}", path = .path.display())]
    Read {
        /// Path of the file that the error is about.
        path: PathBuf,
        /// What the kernel said. Not a source: the text says it.
        cause: ReadError,
    },
    /// Reading the file does not end, as on a file system whose server is gone. Nothing changed.
    #[error("cannot read {path}: no answer within {waited:?}; nothing has changed. Is it on a \
        network file system?", path = .path.display())]
    Slow {
        /// Path of the file that the error is about.
        path: PathBuf,
        /// How long was waited.
        waited: std::time::Duration,
    },
    /// Something in the file is wrong: the place, the line itself, and what would be right.
    #[error(
        "{origin}:{line}: {problem}\n{excerpt}  fix it, then test with `laxityd --check-config`; \
         `laxityd --show-config` lists every key"
    )]
    File {
        /// Path of the file that the error is about.
        origin: String,
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        problem: String,
        /// The line as written.
        excerpt: String,
    },
    /// A `--set` is wrong.
    #[error("--set {assignment}: {problem}")]
    Set {
        /// As given.
        assignment: String,
        /// What is wrong.
        problem: String,
    },
}
