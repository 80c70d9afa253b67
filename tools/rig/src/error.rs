//! Why a part of the lab failed.
//!
//! The reader is a person at a terminal. Each variant of [`LabError`] is a cause that needs its own
//! remedy. The texts contain their causes, so a cause is no source as well.

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use laxity_wire::ControlError;
use thiserror::Error;

use crate::config::InvalidLab;
use crate::probe::CannotRun;
use crate::trace::TraceError;
use crate::vm::network::BadNetwork;
use crate::vm::task::TaskError;

#[derive(Debug, Error)]
pub enum LabError {
    #[error(transparent)]
    CannotRun(#[from] CannotRun),
    #[error(transparent)]
    Config(#[from] InvalidLab),
    #[error(transparent)]
    Network(#[from] BadNetwork),
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// What was asked for does not exist, or does not fit the rest. The text says what to change.
    #[error("{0}")]
    Plan(String),
    #[error("{what} is missing; {next_step}")]
    Missing { what: String, next_step: &'static str },
    #[error("starting {program}: {cause}")]
    Start { program: String, cause: io::Error },
    #[error("{program} {how}")]
    Program { program: String, how: String },
    #[error(transparent)]
    Task(#[from] TaskError),
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error("{what} after {within:?}{said}")]
    Timeout {
        /// What is still not so.
        what: String,
        within: Duration,
        /// The last lines of a log, if there is one.
        said: String,
    },
    #[error("{doing} {path}: {cause}", path = .path.display())]
    File { doing: &'static str, path: PathBuf, cause: io::Error },
    #[error("{doing}: {cause}")]
    System { doing: &'static str, cause: io::Error },
    #[error("{device} {problem}")]
    Device { device: String, problem: String },
    /// The output of a program, or a message between processes, has an unexpected form.
    #[error("{what}: {cause}")]
    Unreadable { what: String, cause: String },
    #[error("{0}")]
    Request(String),
    /// A part of the lab that runs in a sandbox failed. The text is its report.
    #[error("{0}")]
    Inside(String),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error(transparent)]
    Toml(#[from] toml::ser::Error),
    #[error("{step}: {cause}")]
    Step {
        /// The step, and what helps if it fails.
        step: String,
        cause: Box<LabError>,
    },
}

impl LabError {
    pub(crate) fn missing(what: impl Into<String>, next_step: &'static str) -> Self {
        Self::Missing { what: what.into(), next_step }
    }

    pub(crate) fn program(program: impl Display, how: impl Into<String>) -> Self {
        Self::Program { program: program.to_string(), how: how.into() }
    }

    pub(crate) fn unreadable(what: impl Into<String>, cause: impl Display) -> Self {
        Self::Unreadable { what: what.into(), cause: cause.to_string() }
    }

    /// Makes the error of a program without the pipe that it was started with.
    pub(crate) fn no_pipe() -> Self {
        Self::System { doing: "talking to a child", cause: io::ErrorKind::BrokenPipe.into() }
    }

    pub(crate) fn start(program: impl Display) -> impl FnOnce(io::Error) -> Self {
        move |cause| Self::Start { program: program.to_string(), cause }
    }

    pub(crate) fn file(
        doing: &'static str,
        path: &(impl AsRef<Path> + ?Sized),
    ) -> impl FnOnce(io::Error) -> Self {
        move |cause| Self::File { doing, path: path.as_ref().to_owned(), cause }
    }

    pub(crate) fn system<E: Into<io::Error>>(doing: &'static str) -> impl FnOnce(E) -> Self {
        move |cause| Self::System { doing, cause: cause.into() }
    }

    pub(crate) fn step(step: impl Display) -> impl FnOnce(Self) -> Self {
        move |cause| Self::Step { step: step.to_string(), cause: Box::new(cause) }
    }
}
