//! A blocking client of the control socket, for tools without a runtime. Every call has a timeout,
//! because the daemon may hang when it is needed.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;

use crate::control::{Envelope, RESPONSE_BYTES_MAX, Request, Response, SOCKET_ENV};
use crate::explain::{Explanation, FlowQuery};
use crate::status::Status;
use crate::trace::TracePage;

/// Why a control request failed. The text contains the cause. So there is no `source`, which would
/// print the cause twice.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the texts say what the fields are")]
pub enum ControlError {
    /// No daemon listens, or this user may not connect.
    #[error("cannot reach laxityd at {path}: {cause}; {}", way_in(.cause), path = .path.display())]
    Connect { path: PathBuf, cause: std::io::Error },
    /// The daemon listens and does not answer. It may be stopped in a debugger, or hang.
    #[error("laxityd at {path} did not answer within {timeout:?}, so it hangs or is stopped; see \
        `systemctl status laxityd`, then `systemctl restart laxityd` (jobs go on unscheduled \
        meanwhile)", path = .path.display())]
    Timeout { path: PathBuf, timeout: Duration },
    /// The connection broke during the request, which may have been carried out. Repeating it is
    /// safe. A begun trace ends with its connection.
    #[error("the connection to laxityd at {path} broke: {cause}", path = .path.display())]
    Broken { path: PathBuf, cause: std::io::Error },
    /// The answer does not follow this protocol. The peer is another program or another release.
    #[error("laxityd at {path} gave an answer that is not understood: {problem}; use the tools of \
        the daemon's release", path = .path.display())]
    Malformed { path: PathBuf, problem: String },
    /// The daemon refused the request, with this text.
    #[error("laxityd refused: {0}")]
    Refused(String),
}

/// Returns the remedy for a control socket that refuses a connection.
fn way_in(cause: &std::io::Error) -> String {
    match cause.kind() {
        ErrorKind::PermissionDenied => {
            "only root and the group of the socket may operate the daemon: use sudo, or join the \
             group (see docs/operating.md)"
                .to_owned()
        }
        _ => format!(
            "is it running (`systemctl status laxityd`, `journalctl -u laxityd`), and is this its \
             control socket (${SOCKET_ENV})?"
        ),
    }
}

/// A connection to a daemon's control socket.
#[derive(Debug)]
pub struct ControlClient {
    path: PathBuf,
    timeout: Duration,
    stream: BufReader<UnixStream>,
}

impl ControlClient {
    /// Connects to the daemon at `path`. Each later call may take `timeout`.
    pub fn connect(path: impl AsRef<Path>, timeout: Duration) -> Result<Self, ControlError> {
        let path = path.as_ref().to_owned();
        let open = || {
            let stream = UnixStream::connect(&path)?;
            stream.set_read_timeout(Some(timeout))?;
            stream.set_write_timeout(Some(timeout))?;
            Ok(stream)
        };
        match open() {
            Ok(stream) => Ok(Self { path, timeout, stream: BufReader::new(stream) }),
            Err(cause) => Err(ControlError::Connect { path, cause }),
        }
    }

    /// Sends `request` and waits for its answer.
    ///
    /// # Errors
    /// All but [`ControlError::Connect`]. After [`ControlError::Refused`], nothing has changed.
    pub fn call(&mut self, request: &Request) -> Result<Response, ControlError> {
        let mut line = serde_json::to_vec(&Envelope::new(request))
            .map_err(|e| self.malformed(e.to_string()))?;
        line.push(b'\n');
        self.stream.get_mut().write_all(&line).map_err(|e| self.io(e))?;

        line.clear();
        let limit = RESPONSE_BYTES_MAX as u64;
        let read = (&mut self.stream).take(limit).read_until(b'\n', &mut line);
        read.map_err(|e| self.io(e))?;
        if line.is_empty() {
            return Err(self.io(ErrorKind::UnexpectedEof.into()));
        }
        if line.len() as u64 == limit {
            return Err(self.malformed(format!("longer than {limit} bytes")));
        }
        let envelope: Envelope<Response> =
            serde_json::from_slice(&line).map_err(|e| self.malformed(e.to_string()))?;
        match envelope.body {
            Response::Error { message } => Err(ControlError::Refused(message)),
            answer => Ok(answer),
        }
    }

    /// Returns the daemon's state.
    pub fn status(&mut self) -> Result<Status, ControlError> {
        match self.call(&Request::Status)? {
            Response::Status(status) => Ok(*status),
            other => Err(self.malformed(format!("{other:?} is no answer to `status`"))),
        }
    }

    /// Turns the bypass on or off and returns the daemon's text about it.
    pub fn bypass(&mut self, on: bool) -> Result<String, ControlError> {
        self.message(&Request::Bypass { on })
    }

    /// Changes the mode until an operator sets another one or the configured mode changes. Returns
    /// the daemon's text about it.
    pub fn set_mode(&mut self, mode: &str) -> Result<String, ControlError> {
        self.message(&Request::SetMode { mode: mode.to_owned() })
    }

    /// Makes the daemon read its configuration again and returns the daemon's text about it.
    pub fn reload(&mut self) -> Result<String, ControlError> {
        self.message(&Request::Reload)
    }

    /// Begins a trace for `seconds`, with room for `events` events that wait to be read. The trace
    /// ends when this connection is closed.
    pub fn trace_start(&mut self, seconds: u64, events: u64) -> Result<String, ControlError> {
        self.message(&Request::TraceStart { seconds, events, attended: true })
    }

    /// Returns the next part of the trace.
    pub fn trace_read(&mut self) -> Result<TracePage, ControlError> {
        match self.call(&Request::TraceRead)? {
            Response::Trace(page) => Ok(*page),
            other => Err(self.malformed(format!("{other:?} is no answer to `trace_read`"))),
        }
    }

    /// Ends the trace, whose events can still be read.
    pub fn trace_stop(&mut self) -> Result<String, ControlError> {
        self.message(&Request::TraceStop)
    }

    /// Returns what the daemon knows about the flows of a query.
    pub fn explain(&mut self, wanted: FlowQuery) -> Result<Explanation, ControlError> {
        match self.call(&Request::Explain(wanted))? {
            Response::Explanation(told) => Ok(*told),
            other => Err(self.malformed(format!("{other:?} is no answer to `explain`"))),
        }
    }

    fn message(&mut self, request: &Request) -> Result<String, ControlError> {
        match self.call(request)? {
            Response::Done { message } => Ok(message),
            other => Err(self.malformed(format!("{other:?} is no answer to {request:?}"))),
        }
    }

    fn malformed(&self, problem: String) -> ControlError {
        ControlError::Malformed { path: self.path.clone(), problem }
    }

    fn io(&self, cause: std::io::Error) -> ControlError {
        let path = self.path.clone();
        match cause.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                ControlError::Timeout { path, timeout: self.timeout }
            }
            _ => ControlError::Broken { path, cause },
        }
    }
}
