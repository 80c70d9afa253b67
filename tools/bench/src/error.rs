//! Why a figure can't be measured. The texts contain their causes.

use std::io;

use thiserror::Error;

/// The reason why a figure can't be measured.
#[derive(Debug, Error)]
pub(crate) enum BenchError {
    /// This machine can't measure the figure. The report contains the text, and it isn't a failure.
    #[error("{0}")]
    Skip(String),
    /// An argument doesn't fit this machine.
    #[error("{0}")]
    Argument(String),
    /// The system refused a call.
    #[error("{doing}: {cause}")]
    System {
        /// What the call was for.
        doing: String,
        /// The cause.
        cause: io::Error,
    },
    /// A process of the measured pair failed. The text has its last words.
    #[error("{0}")]
    Process(String),
    /// The measurement was disturbed, and its figure would mean nothing.
    #[error("{0}")]
    Disturbed(String),
    /// One repetition of a measurement failed.
    #[error("repetition {number}: {cause}")]
    Repetition {
        /// Number of the repetition, from 1.
        number: usize,
        /// The cause.
        cause: Box<BenchError>,
    },
}

impl BenchError {
    pub(crate) fn system<E: Into<io::Error>>(doing: impl Into<String>) -> impl FnOnce(E) -> Self {
        move |cause| Self::System { doing: doing.into(), cause: cause.into() }
    }

    pub(crate) fn repetition(number: usize) -> impl FnOnce(Self) -> Self {
        move |cause| Self::Repetition { number, cause: Box::new(cause) }
    }
}
