//! Why a figure can't be measured. The texts contain their causes.

use std::io;

use thiserror::Error;

pub(crate) type Result<T> = std::result::Result<T, BenchError>;

#[derive(Debug, Error)]
pub(crate) enum BenchError {
    #[error("{0}")]
    Skip(String),
    #[error("{doing}: {cause}")]
    System { doing: String, cause: io::Error },
    #[error("{0}")]
    Failed(String),
    #[error("repetition {number}: {cause}")]
    Repetition { number: usize, cause: Box<BenchError> },
}

impl BenchError {
    pub(crate) fn system<E: Into<io::Error>>(doing: impl Into<String>) -> impl FnOnce(E) -> Self {
        move |cause| Self::System { doing: doing.into(), cause: cause.into() }
    }

    pub(crate) fn repetition(number: usize) -> impl FnOnce(Self) -> Self {
        move |cause| Self::Repetition { number, cause: Box::new(cause) }
    }
}
