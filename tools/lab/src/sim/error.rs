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

#[derive(Debug, Error)]
pub(crate) enum SimCommandError {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Scenario(#[from] SimError),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(transparent)]
    Model(#[from] FileError),
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    #[error(transparent)]
    Paper(#[from] PaperError),
    #[error(transparent)]
    Advise(Box<AdviseError>),
    #[error(transparent)]
    Map(#[from] MapError),
    #[error(transparent)]
    Output(#[from] OutputError),
    #[error("{page}: {cause}", page = .page.display())]
    Page { page: PathBuf, cause: PageError },
    #[error("{0}")]
    Usage(String),
    #[error("cannot {doing} {path}: {cause}", path = .path.display())]
    File { doing: &'static str, path: PathBuf, cause: io::Error },
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
