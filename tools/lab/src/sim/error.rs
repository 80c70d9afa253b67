//! Why a command of `laxity sim` failed. The texts contain their causes.

use std::io;
use std::path::{Path, PathBuf};

use laxity_cli::output::OutputError;
use laxity_sim::SimError;
use laxity_sim::advise::AdviseError;
use laxity_sim::model::FileError;
use laxity_sim::plan::PlanError;
use laxity_sim::report::findings::PageError;
use laxity_sim::report::map::MapError;
use laxity_sim::requests::PaperError;
use laxity_sim::run::RunError;
use laxity_sim::workload::WorkloadError;
use thiserror::Error;

/// The reason why a command failed.
#[derive(Debug, Error)]
pub(crate) enum SimCommandError {
    /// A plan can't be read, or one of its values is wrong.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A scenario can't be simulated.
    #[error(transparent)]
    Scenario(#[from] SimError),
    /// A run can't be begun or continued.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A model or a GPU is unknown, or its file is wrong.
    #[error(transparent)]
    Model(#[from] FileError),
    /// A workload can't be made or read.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    /// The claims of a paper can't be checked.
    #[error(transparent)]
    Paper(#[from] PaperError),
    /// The question about a cluster has no answer.
    #[error(transparent)]
    Advise(Box<AdviseError>),
    /// A plan has no map.
    #[error(transparent)]
    Map(#[from] MapError),
    /// A result can't be printed or written.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// A page of findings is wrong.
    #[error("{page}: {cause}", page = .page.display())]
    Page {
        /// Path of the page.
        page: PathBuf,
        /// The line, and what is wrong there.
        cause: PageError,
    },
    /// An option is wrong, or doesn't fit the others. The text says what to change.
    #[error("{0}")]
    Usage(String),
    /// A file or folder can't be used.
    #[error("cannot {doing} {path}: {cause}", path = .path.display())]
    File {
        /// What was to be done with it.
        doing: &'static str,
        /// Its path.
        path: PathBuf,
        /// The cause.
        cause: io::Error,
    },
    /// JSON can't be written, or a file does not have the expected form.
    #[error("JSON: {0}")]
    Json(#[from] serde_json::Error),
}

impl SimCommandError {
    pub(super) fn file(
        doing: &'static str,
        path: &(impl AsRef<Path> + ?Sized),
    ) -> impl FnOnce(io::Error) -> Self {
        move |cause| Self::File { doing, path: path.as_ref().to_owned(), cause }
    }
}

impl From<AdviseError> for SimCommandError {
    fn from(error: AdviseError) -> Self {
        Self::Advise(Box::new(error))
    }
}
