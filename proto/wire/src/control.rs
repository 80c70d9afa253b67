//! The control protocol, on a unix stream socket: one JSON object per line. Each request line has
//! one answer line.
//!
//! ```text
//! → {"v":1,"op":"bypass","on":false}
//! ← {"v":1,"answer":"done","message":"bypass is off (3 clients attached)"}
//! ```
//!
//! JSON suffices, because both ends are on one host and of one release. A person can type a
//! request into `socat`, which helps in an emergency. The cluster-wide API is gRPC.
//!
//! `v` is [`VERSION`] and changes only when the meaning of a field changes. New fields may appear
//! at any time, so readers ignore unknown ones.

use serde::{Deserialize, Serialize};

use crate::explain::{Explanation, FlowQuery};
use crate::status::Status;
use crate::trace::TracePage;

/// The version of the protocol: `v` of every line.
pub const VERSION: u32 = 1;

/// Longest request line that the daemon reads, in bytes. A request has a few dozen bytes. The
/// daemon answers a longer line with an error and disconnects.
pub const REQUEST_BYTES_MAX: usize = 4096;

/// Longest answer that a client reads, in bytes. A status with 1024 clients is about 300 KiB.
pub const RESPONSE_BYTES_MAX: usize = 8 << 20;

/// The default path of the control socket.
pub const SOCKET_DEFAULT: &str = "/run/laxity/control.sock";

/// The environment variable with the path of another control socket.
pub const SOCKET_ENV: &str = "LAXITY_CONTROL";

/// A message with the protocol's version, in one line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Envelope<T> {
    /// The [`VERSION`] of the sender.
    pub v: u32,
    /// The request or the answer.
    #[serde(flatten)]
    pub body: T,
}

impl<T> Envelope<T> {
    /// Makes a message with this build's version.
    pub const fn new(body: T) -> Self {
        Self { v: VERSION, body }
    }
}

/// A request of an operator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// Return the state of the daemon as [`Response::Status`].
    Status,
    /// Turn the bypass of all traffic on or off. It stays on until it is turned off or the host
    /// restarts.
    Bypass {
        /// Whether to turn the bypass on.
        on: bool,
    },
    /// Change the mode until an operator sets another one, or the configured mode changes.
    SetMode {
        /// The mode: `off`, `observe` or `enforce`.
        mode: String,
    },
    /// Read the configuration file again, as after SIGHUP.
    Reload,
    /// Begin a trace of the scheduler.
    TraceStart {
        /// The length of the trace in seconds.
        seconds: u64,
        /// Maximum number of events that may wait to be read. Further events are lost and counted.
        events: u64,
        /// Whether the trace ends with this connection, so that a killed reader leaves no trace
        /// running.
        #[serde(default)]
        attended: bool,
    },
    /// Return some events of the trace as [`Response::Trace`]. Repeat this until the trace is over.
    TraceRead,
    /// End the trace, whose events can still be read.
    TraceStop,
    /// Return what the scheduler knows about flows as [`Response::Explanation`].
    Explain(FlowQuery),
}

/// An answer of the daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Response {
    /// The answer to [`Request::Status`].
    Status(Box<Status>),
    /// The request was carried out.
    Done {
        /// A text for people about what happened.
        message: String,
    },
    /// The answer to [`Request::TraceRead`].
    Trace(Box<TracePage>),
    /// The answer to [`Request::Explain`].
    Explanation(Box<Explanation>),
    /// The request was not carried out, and nothing has changed.
    Error {
        /// The problem and its remedy.
        message: String,
    },
}

impl Response {
    /// Makes an answer that says what happened.
    pub fn done(message: impl Into<String>) -> Self {
        Self::Done { message: message.into() }
    }

    /// Makes an answer that says what was wrong.
    pub fn error(message: impl Into<String>) -> Self {
        Self::Error { message: message.into() }
    }
}

/// Parses one request line, as the daemon does.
///
/// # Errors
/// Text for [`Response::Error`]: no JSON, an unknown operation, or another protocol version.
pub fn parse_request(line: &[u8]) -> Result<Request, String> {
    /// The version alone, so that a later version's request gives an error about the version.
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
        assert_eq!(parse_request(line.as_bytes()), Ok(Request::Bypass { on: true }));
    }

    #[test]
    fn every_request_survives_the_line() {
        for request in [
            Request::Status,
            Request::Bypass { on: false },
            Request::SetMode { mode: "observe".into() },
            Request::Reload,
            Request::TraceStart { seconds: 10, events: 1000, attended: true },
            Request::TraceRead,
            Request::TraceStop,
            Request::Explain(FlowQuery { request: Some(7), ..FlowQuery::default() }),
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
        assert!(error.contains("levitate") && error.contains("status"), "{error}");
    }

    #[test]
    fn garbage_is_an_error_and_not_a_panic() {
        for line in [&b""[..], b"{", b"null", b"\xff\xfe", b"[1]", b"{\"v\":-1}"] {
            assert!(parse_request(line).is_err());
        }
    }
}
