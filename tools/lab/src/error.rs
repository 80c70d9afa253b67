//! Why a command of `laxity lab` failed. The texts contain their causes.

use std::io;
use std::path::{Path, PathBuf};

use laxity_cli::library::LibraryError;
use laxity_cli::output::OutputError;
use laxity_files::ReadError;
use laxity_rig::config::InvalidLab;
use laxity_rig::error::LabError;
use laxity_rig::vm::network::BadNetwork;
use laxity_trial::certs::CertsError;
use laxity_trial::load::LoadError;
use thiserror::Error;

/// The reason why a command failed.
#[derive(Debug, Error)]
pub(crate) enum CommandError {
    /// A part of the lab failed.
    #[error(transparent)]
    Lab(#[from] LabError),
    /// A field of the configuration is invalid.
    #[error(transparent)]
    Config(#[from] InvalidLab),
    /// The guest's network can't be built as asked.
    #[error(transparent)]
    Network(#[from] BadNetwork),
    /// The preload library can't be found.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// A result can't be printed or written.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// The load on a coordinator can't be made, or ended early.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Certificates can't be made.
    #[error("no certificates in {folder}: {cause}", folder = .folder.display())]
    Certs { folder: PathBuf, cause: CertsError },
    /// An option is wrong, or doesn't fit the others. The text says what to change.
    #[error("{0}")]
    Usage(String),
    /// A configuration file can't be read.
    #[error("cannot read {path}: {cause}", path = .path.display())]
    Read { path: PathBuf, cause: ReadError },
    /// A configuration file doesn't have the form of one.
    #[error("{path} is no lab configuration: {cause}", path = .path.display())]
    NotAConfig {
        path: PathBuf,
        /// The place in the file, and what is wrong there.
        cause: toml::de::Error,
    },
    /// The configuration can't be written as TOML.
    #[error("cannot show the configuration: {0}")]
    Toml(#[from] toml::ser::Error),
    /// This machine lacks something.
    #[error("{0}")]
    CannotRun(String),
    /// A file or folder can't be used.
    #[error("cannot {doing} {path}: {cause}", path = .path.display())]
    File {
        /// What was to be done with it.
        doing: &'static str,
        path: PathBuf,
        cause: io::Error,
    },
    /// The system refused a call.
    #[error("cannot {doing}: {cause}")]
    System {
        /// What the call was for.
        doing: &'static str,
        cause: io::Error,
    },
    /// A report can't be read or written as JSON.
    #[error("{doing}: {cause}")]
    Json {
        /// What can't be done.
        doing: &'static str,
        cause: serde_json::Error,
    },
    /// The runs ended, and their results contradict what Laxity promises.
    #[error("{0}")]
    Broken(String),
}

impl CommandError {
    pub(crate) fn file(
        doing: &'static str,
        path: &(impl AsRef<Path> + ?Sized),
    ) -> impl FnOnce(io::Error) -> Self {
        move |cause| Self::File { doing, path: path.as_ref().to_owned(), cause }
    }

    pub(crate) fn system(doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |cause| Self::System { doing, cause }
    }

    pub(crate) fn json(doing: &'static str) -> impl FnOnce(serde_json::Error) -> Self {
        move |cause| Self::Json { doing, cause }
    }
}
