//! Why a command of `laxity cluster` failed, and what to do about it.

use std::error::Error as _;
use std::io;
use std::time::Duration;

use laxity_cli::output::OutputError;
use laxity_credentials::Unusable;
use laxity_credentials::explain::{self, Settings};
use thiserror::Error;
use tonic::{Code, Status};

use super::tables::clean;

pub(super) const SETTINGS: Settings = Settings::OPTIONS;

/// The reason why a command failed. The texts contain their causes.
#[derive(Debug, Error)]
pub(crate) enum ClusterError {
    #[error(
        "`{0}` is no endpoint; write http://HOST:PORT, or https:// where the coordinator \
        serves with TLS"
    )]
    NotAnEndpoint(String),
    #[error(
        "certificates are of no use with http://; write https:// in --endpoint or \
        $LAXITY_COORDINATOR"
    )]
    PlainWithCertificates,
    #[error("https:// needs --ca FILE (or $LAXITY_CA): the authority of the cluster")]
    NoAuthority,
    #[error(transparent)]
    Certificate(#[from] Unusable),
    #[error("these certificates cannot be used: check --ca, --cert and --key: {0}")]
    Certificates(String),
    #[error("cannot start the runtime: {0}")]
    Runtime(io::Error),
    /// No connection was made. The hint says what to check.
    #[error("cannot reach the coordinator at {url}: {cause}; {hint}")]
    Unreachable { url: String, cause: String, hint: String },
    #[error("the coordinator did not let us in: {cause}; {hint}")]
    NotLetIn { cause: String, hint: String },
    #[error(
        "the connection to the coordinator broke: {0}; it may be restarting, or serve with \
        TLS and want https:// in --endpoint: try again, and look at its log"
    )]
    Broken(String),
    #[error(
        "the coordinator did not answer within {0:?}; look at its log and load, or wait \
        longer with --timeout-ms"
    )]
    Late(Duration),
    #[error("{0}")]
    Refused(String),
    #[error(
        "the coordinator does not allow this: {0}; changes need a certificate of role \
        operator (--cert, --key)"
    )]
    NotAllowed(String),
    #[error(
        "the coordinator does not know us: {0}; give a certificate of its authority \
        (--cert, --key)"
    )]
    Unknown(String),
    #[error(
        "this is no laxity-coordinator, or an older one than this command; check --endpoint \
        and `laxity-coordinator --version` there"
    )]
    OtherRelease,
    #[error(
        "the coordinator went away: {0}; it may be restarting, or another one leads now: try \
        again"
    )]
    WentAway(String),
    #[error("the coordinator failed ({code:?}): {said}; its log has more")]
    Failed { code: Code, said: String },
    #[error("the coordinator told no policy; is it of a later release?")]
    NoPolicy,
    #[error("the coordinator stopped; watch again when it, or another one, is back")]
    Stopped,
    #[error("the coordinator knows no host {0}; `laxity cluster hosts` lists all that have come")]
    NoHost(String),
    #[error("`laxity cluster batches` lists what can be explained: {0}")]
    NotExplained(String),
    #[error("{argument}: {problem}")]
    Change { argument: String, problem: String },
    #[error(transparent)]
    Output(#[from] OutputError),
}

impl ClusterError {
    pub(super) fn answered(status: &Status) -> Self {
        if status.source().is_some() {
            return Self::cut(status);
        }
        let said = clean(status.message());
        match status.code() {
            Code::NotFound | Code::InvalidArgument | Code::FailedPrecondition => {
                Self::Refused(said)
            }
            Code::PermissionDenied => Self::NotAllowed(said),
            Code::Unauthenticated => Self::Unknown(said),
            Code::Unimplemented => Self::OtherRelease,
            Code::Unavailable => Self::WentAway(said),
            code => Self::Failed { code, said },
        }
    }

    /// Makes the error of a connection that broke during a request. In TLS 1.3 a client learns only
    /// then that it was refused.
    fn cut(status: &Status) -> Self {
        let cause = explain::cause(status, &SETTINGS);
        let text = clean(&cause.text);
        match cause.hint {
            Some(hint) => Self::NotLetIn { cause: text, hint },
            None => Self::Broken(text),
        }
    }
}
