//! Why a command of `laxity lab` failed. The texts contain their causes.

use std::io;
use std::path::{Path, PathBuf};

use laxity_cli::library::LibraryError;
use laxity_cli::output::OutputError;
use laxity_files::ReadError;
use laxity_rig::config::InvalidLab;
use laxity_rig::error::LabError;
use laxity_rig::vm::network::BadNetwork;
#[cfg(feature = "clusters")]
use laxity_trial::certs::CertsError;
#[cfg(feature = "clusters")]
use laxity_trial::load::LoadError;
use thiserror::Error;

#[derive(Debug, Error)]
pub(crate) enum CommandError {
    #[error(transparent)]
    Lab(#[from] LabError),
    #[error(transparent)]
    Config(#[from] InvalidLab),
    #[error(transparent)]
    Network(#[from] BadNetwork),
    #[error(transparent)]
    Library(#[from] LibraryError),
    #[error(transparent)]
    Output(#[from] OutputError),
    #[cfg(feature = "clusters")]
    #[error(transparent)]
    Load(#[from] LoadError),
    #[cfg(feature = "clusters")]
    #[error("no certificates in {folder}: {cause}", folder = .folder.display())]
    Certs { folder: PathBuf, cause: CertsError },
    /// An option is wrong, or doesn't fit the others. The text says what to change.
    #[error("{0}")]
    Usage(String),
    #[error("cannot read {path}: {cause}", path = .path.display())]
    Read { path: PathBuf, cause: ReadError },
    #[error("{path} is no lab configuration: {cause}", path = .path.display())]
    NotAConfig { path: PathBuf, cause: toml::de::Error },
    #[error("cannot show the configuration: {0}")]
    Toml(#[from] toml::ser::Error),
    #[error("{0}")]
    CannotRun(String),
    #[error("cannot {doing} {path}: {cause}", path = .path.display())]
    File { doing: &'static str, path: PathBuf, cause: io::Error },
    #[error("cannot {doing}: {cause}")]
    System { doing: &'static str, cause: io::Error },
    #[error("{doing}: {cause}")]
    Json { doing: &'static str, cause: serde_json::Error },
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
