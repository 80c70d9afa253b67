//! Why a part of the lab failed.
//!
//! The reader is a person at a terminal. Each variant of [`LabError`] is a cause for which that
//! person does something else. The texts contain their causes, so a cause is no source as well.

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
use crate::vm::task::{TaskError, TaskReport};

/// The reason why a part of the lab failed.
#[derive(Debug, Error)]
pub enum LabError {
    /// The machine lacks something.
    #[error(transparent)]
    CannotRun(#[from] CannotRun),
    /// A field of the configuration is invalid.
    #[error(transparent)]
    Config(#[from] InvalidLab),
    /// The guest's network can't be built as configured.
    #[error(transparent)]
    Network(#[from] BadNetwork),
    /// The file of requests can't be used.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// What was asked for does not exist, or does not fit the rest. The text says what to change.
    #[error("{0}")]
    Plan(String),
    /// A program or a file that this part needs is not there.
    #[error("{what} is missing; {next_step}")]
    Missing {
        /// What is missing.
        what: String,
        /// How to get it.
        next_step: &'static str,
    },
    /// A program can't be started.
    #[error("starting {program}: {cause}")]
    Start {
        /// Name or path of the program.
        program: String,
        /// The cause.
        cause: io::Error,
    },
    /// A program failed, or did not do its part.
    #[error("{program} {how}")]
    Program {
        /// Name of the program, or its command line.
        program: String,
        /// How it failed, with its exit status and its last words.
        how: String,
    },
    /// One of two programs that talk to each other failed.
    #[error("{active}\nits peer: {passive}")]
    Pair {
        /// The program that begins.
        active: Box<TaskReport>,
        /// The program that answers.
        passive: Box<TaskReport>,
    },
    /// A task in the guest failed.
    #[error(transparent)]
    Task(#[from] TaskError),
    /// The daemon did not tell its status.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// Something did not happen in time.
    #[error("{what} after {within:?}{said}")]
    Timeout {
        /// What is still not so.
        what: String,
        /// How long the lab waited.
        within: Duration,
        /// The last lines of a log, if there is one.
        said: String,
    },
    /// A file can't be read or written.
    #[error("{doing} {path}: {cause}", path = .path.display())]
    File {
        /// What was to be done with the file.
        doing: &'static str,
        /// Path of the file or folder.
        path: PathBuf,
        /// The cause.
        cause: io::Error,
    },
    /// The system refused a call.
    #[error("{doing}: {cause}")]
    System {
        /// What the call was for.
        doing: &'static str,
        /// The cause.
        cause: io::Error,
    },
    /// A device of the guest does not work.
    #[error("{device} {problem}")]
    Device {
        /// Name of the device.
        device: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The output of a program, or a message between processes, is not what it should be.
    #[error("{what}: {cause}")]
    Unreadable {
        /// What can't be read.
        what: String,
        /// The cause.
        cause: String,
    },
    /// A request got no answer, or a wrong one.
    #[error("{0}")]
    Request(String),
    /// A part of the lab that runs in a sandbox failed. The text is what it reported.
    #[error("{0}")]
    Inside(String),
    /// A message between the lab's processes can't be written as JSON.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// A configuration file of a program can't be written as TOML.
    #[error(transparent)]
    Toml(#[from] toml::ser::Error),
    /// A step that the reader knows by name failed.
    #[error("{step}: {cause}")]
    Step {
        /// The step, and what helps if it fails.
        step: String,
        /// The cause.
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
