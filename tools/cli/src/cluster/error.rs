//! Why a command of `laxity cluster` failed, and what to do about it.

use std::error::Error as _;
use std::io;
use std::time::Duration;

use laxity_cli::output::OutputError;
use laxity_credentials::Unusable;
use laxity_credentials::explain::{self, SettingNames};
use thiserror::Error;
use tonic::{Code, Status};

use super::tables::clean;

pub(super) const SETTINGS: SettingNames = SettingNames::OPTIONS;

/// The reason why a command failed. The texts contain their causes.
#[derive(Debug, Error)]
pub(crate) enum ClusterError {
    #[error(
        "`{0}` is not an endpoint; write http://HOST:PORT, or https:// if the coordinator \
        serves with TLS"
    )]
    NotAnEndpoint(String),
    #[error(
        "http:// does not use certificates; write https:// in --endpoint or $LAXITY_COORDINATOR"
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
    #[error("cannot reach the coordinator at {url}: {cause}; {hint}")]
    Unreachable { url: String, cause: String, hint: String },
    #[error("the coordinator refused the connection: {cause}; {hint}")]
    NotLetIn { cause: String, hint: String },
    #[error(
        "the connection to the coordinator broke: {0}; the coordinator may be restarting, or may \
        serve with TLS and need https:// in --endpoint: try again, and look at its log"
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
        "the coordinator does not know this client: {0}; give a certificate of the \
        coordinator's authority (--cert, --key)"
    )]
    Unknown(String),
    #[error(
        "the endpoint is not a laxity-coordinator, or is older than this command; check \
        --endpoint, and `laxity-coordinator --version` on that host"
    )]
    OtherRelease,
    #[error(
        "the coordinator closed the connection: {0}; it may be restarting, or another one may \
        lead now: try again"
    )]
    WentAway(String),
    #[error("the coordinator failed ({code:?}): {said}; its log has more")]
    Failed { code: Code, said: String },
    #[error("the coordinator's answer has no policy; is the coordinator of a later release?")]
    NoPolicy,
    #[error("the coordinator stopped; run the command again when a coordinator is back")]
    Stopped,
    #[error("the coordinator knows no host {0}; `laxity cluster hosts` lists the known hosts")]
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
