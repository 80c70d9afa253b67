//! The control protocol: one JSON object per line, request and answer in turn, on a unix stream
//! socket.
//!
//! ```text
//! → {"v":1,"op":"bypass","on":true}
//! ← {"v":1,"answer":"done","message":"bypass is on for 3 clients"}
//! ```
//!
//! JSON and not gRPC: the peers are on one host and of one release, a person can type a request
//! into `socat`, and the socket must work while everything else is on fire. The cluster-wide API
//! is gRPC.
//!
//! Compatibility: `v` is [`VERSION`] and only changes when the meaning of a field changes. New
//! fields may appear at any time, so readers ignore those they do not know.

use serde::{Deserialize, Serialize};

use crate::status::Status;
use crate::trace::TracePage;

/// Version of the protocol, the `v` of every line.
pub const VERSION: u32 = 1;

/// Longest request line the daemon reads. A request is a few dozen bytes; whoever sends more is
/// answered with an error and disconnected.
pub const REQUEST_BYTES_MAX: usize = 4096;

/// Longest answer a client reads. A status with 1024 clients is about 300 KiB.
pub const RESPONSE_BYTES_MAX: usize = 8 << 20;

/// Where the daemon listens unless told otherwise.
pub const SOCKET_DEFAULT: &str = "/run/laxity/control.sock";

/// The environment variable that names another control socket.
pub const SOCKET_ENV: &str = "LAXITY_CONTROL";

/// A message with the protocol's version: what stands on one line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Envelope<T> {
    /// [`VERSION`] of the sender.
    pub v: u32,
    /// The message.
    #[serde(flatten)]
    pub body: T,
}

impl<T> Envelope<T> {
    /// Wraps `body` with this build's version.
    pub const fn new(body: T) -> Self {
        Self { v: VERSION, body }
    }
}

/// What an operator asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// Everything there is to see; answered with [`Response::Status`].
    Status,
    /// Lets all traffic of all clients go out unscheduled, or ends that. Kept until it is turned
    /// off or the host restarts.
    Bypass {
        /// On or off.
        on: bool,
    },
    /// Changes the policy of every port until the next reload or restart.
    SetPolicy {
        /// A policy's name, such as `laxity` or `two_class`.
        policy: String,
    },
    /// Changes the mode until the next reload or restart.
    SetMode {
        /// `off`, `observe` or `enforce`.
        mode: String,
    },
    /// Reads the configuration file again, as SIGHUP does.
    Reload,
    /// Begins to record what the scheduler sees and does.
    TraceStart {
        /// For how long; it ends by itself.
        seconds: u64,
        /// Events that may wait to be read; those beyond are lost, and counted.
        events: u64,
        /// It ends when this connection does, so that whoever is killed leaves no trace running.
        #[serde(default)]
        attended: bool,
    },
    /// Some of what was recorded; answered with [`Response::Trace`]. Ask again until it is over.
    TraceRead,
    /// Ends the recording. What was recorded can still be read.
    TraceStop,
    /// Answered with [`Response::Version`].
    Version,
}

/// What the daemon answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Response {
    /// The answer to [`Request::Status`].
    Status(Box<Status>),
    /// The request was carried out.
    Done {
        /// What happened, for a person.
        message: String,
        /// Settings that were read but only take effect after a restart (reload only).
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        needs_restart: Vec<String>,
    },
    /// The answer to [`Request::TraceRead`].
    Trace(Box<TracePage>),
    /// The answer to [`Request::Version`].
    Version {
        /// Release of the daemon.
        version: String,
        /// Its process.
        pid: u32,
    },
    /// The request was not carried out; nothing has changed.
    Error {
        /// What was wrong and what to do.
        message: String,
    },
}

impl Response {
    /// An answer that says what happened.
    pub fn done(message: impl Into<String>) -> Self {
        Self::Done {
            message: message.into(),
            needs_restart: Vec::new(),
        }
    }

    /// An answer that says what was wrong.
    pub fn error(message: impl Into<String>) -> Self {
        Self::Error {
            message: message.into(),
        }
    }
}

/// Parses one request line as the daemon does.
///
/// # Errors
/// Text for [`Response::Error`]: not JSON, no such operation, or another protocol version.
pub fn parse_request(line: &[u8]) -> Result<Request, String> {
    /// The version alone, so that a request of the future is named as such and not as a typo.
    #[derive(Deserialize)]
    struct Version {
        v: u32,
    }
    let version: Version = serde_json::from_slice(line)
        .map_err(|e| format!("not a request: {e}; send {{\"v\":{VERSION},\"op\":\"status\"}}"))?;
    if version.v != VERSION {
        return Err(format!(
            "protocol version {} is not spoken here, {VERSION} is; use the tools of the daemon's \
             release",
            version.v
        ));
    }
    let envelope: Envelope<Request> =
        serde_json::from_slice(line).map_err(|e| format!("not a request: {e}"))?;
    Ok(envelope.body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_one_flat_object_with_a_version() {
        let line = serde_json::to_string(&Envelope::new(Request::Bypass { on: true })).unwrap();
        assert_eq!(line, r#"{"v":1,"op":"bypass","on":true}"#);
        assert_eq!(
            parse_request(line.as_bytes()),
            Ok(Request::Bypass { on: true })
        );
    }

    #[test]
    fn every_request_survives_the_line() {
        for request in [
            Request::Status,
            Request::Bypass { on: false },
            Request::SetPolicy {
                policy: "mfs".into(),
            },
            Request::SetMode {
                mode: "observe".into(),
            },
            Request::Reload,
            Request::TraceStart {
                seconds: 10,
                events: 1000,
                attended: true,
            },
            Request::TraceRead,
            Request::TraceStop,
            Request::Version,
        ] {
            let line = serde_json::to_vec(&Envelope::new(request.clone())).unwrap();
            assert_eq!(parse_request(&line), Ok(request));
        }
    }

    #[test]
    fn a_request_of_another_version_is_refused_by_its_version_though_its_operation_is_unknown() {
        let error = parse_request(br#"{"v":7,"op":"levitate"}"#).unwrap_err();
        assert!(error.contains("version 7"), "{error}");
    }

    #[test]
    fn an_unknown_operation_lists_the_known_ones() {
        let error = parse_request(br#"{"v":1,"op":"levitate"}"#).unwrap_err();
        assert!(
            error.contains("levitate") && error.contains("status"),
            "{error}"
        );
    }

    #[test]
    fn garbage_is_an_error_and_not_a_panic() {
        for line in [&b""[..], b"{", b"null", b"\xff\xfe", b"[1]", b"{\"v\":-1}"] {
            assert!(parse_request(line).is_err());
        }
    }
}
