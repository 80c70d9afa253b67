//! The control socket: reads request lines, carries them out and writes answer lines.
//!
//! The socket's file mode decides who may connect. If a user has all of its share of connections, a
//! new one closes that user's connection with the oldest last request. If all connections are
//! taken, it closes such a connection of the user with the most ([`ConnectionSlots`]). Connections
//! of root are closed only for root. A peer that sends too long a line, or nothing for long, is
//! closed.
//!
//! A command that its operator saw fail must not take effect later. So the request of a closed
//! connection is not carried out.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use laxity_listen::{AcceptErrors, ConnectionSlots};
use laxity_wire::control::{REQUEST_BYTES_MAX, parse_request};
use laxity_wire::{Envelope, Request, Response};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tracing::debug;

use crate::service::Service;
use crate::service::trace::AttendedTrace;

/// Maximum number of connections that are served at once.
pub const CONNECTIONS_MAX: usize = 32;
/// Maximum number of connections of one user other than root.
const PER_UID_MAX: usize = CONNECTIONS_MAX / 2;
/// How long a connection may ask nothing before it is closed.
const IDLE_MAX: Duration = Duration::from_secs(60);
/// How long a peer may leave its answer unread before it is disconnected.
const WRITE_MAX: Duration = Duration::from_secs(5);

pub async fn serve(listener: UnixListener, service: Arc<Service>) {
    let places = ConnectionSlots::new(CONNECTIONS_MAX, PER_UID_MAX);
    let mut errors = AcceptErrors::new("the control socket");
    loop {
        let accepted = listener.accept().await;
        let (stream, uid) = match accepted.and_then(|(s, _)| s.peer_cred().map(|c| (s, c.uid()))) {
            Ok(accepted) => accepted,
            Err(error) => {
                errors.rest_after(&error).await;
                continue;
            }
        };
        let Some(mut place) = places.take(uid, uid == 0) else {
            debug!(uid, "root has every control connection; one was closed");
            continue;
        };
        let (service, places) = (Arc::clone(&service), places.clone());
        tokio::spawn(async move {
            let number = place.number();
            tokio::select! {
                // `biased`: a command that was carried out is answered before its connection ends.
                biased;
                ended = converse(stream, uid, &service, || places.renew(number)) => {
                    if let Err(error) = ended {
                        debug!(%error, "a control connection ended");
                    }
                }
                () = place.lost() => debug!(uid, "a control connection made room for a newer one"),
            }
        });
        // A connection that lost its slot closes before the next one is accepted.
        tokio::task::yield_now().await;
    }
}

async fn converse(
    stream: UnixStream,
    uid: u32,
    service: &Service,
    asked: impl Fn(),
) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut line = Vec::new();
    let mut trace = None;
    loop {
        line.clear();
        let limit = REQUEST_BYTES_MAX as u64 + 1;
        let mut bounded = (&mut stream).take(limit);
        let read = bounded.read_until(b'\n', &mut line);
        match tokio::time::timeout(IDLE_MAX, read).await {
            Err(_) => return Ok(()),
            Ok(read) => read?,
        };
        if line.is_empty() || is_gone(stream.get_ref()) {
            return Ok(());
        }
        asked();
        let too_long = line.len() > REQUEST_BYTES_MAX;
        let response = if too_long {
            Response::error(format!("a request has at most {REQUEST_BYTES_MAX} bytes"))
        } else {
            match parse_request(&line) {
                Ok(request) => {
                    let is_change = changes(&request);
                    let response = answer(service, request, &mut trace).await;
                    if let (true, Response::Done { message }) = (is_change, &response) {
                        service.changed(Some(uid), message);
                    }
                    response
                }
                Err(problem) => Response::Error { message: problem },
            }
        };
        let mut text = serde_json::to_vec(&Envelope::new(response))?;
        text.push(b'\n');
        match tokio::time::timeout(WRITE_MAX, stream.get_mut().write_all(&text)).await {
            Err(_) => return Ok(()),
            Ok(written) => written?,
        }
        if too_long {
            return Ok(());
        }
    }
}

/// Reports whether the other side has closed the connection completely, so that nobody reads an
/// answer. A side that only closed its writing half, as `socat` does, still reads.
fn is_gone(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream.as_fd(), PollFlags::empty())];
    let hangup = |fd: &PollFd<'_>| fd.revents().is_some_and(|r| r.contains(PollFlags::POLLHUP));
    poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0) && fds.iter().any(hangup)
}

/// Reports whether a request changes what the daemon does to traffic.
const fn changes(request: &Request) -> bool {
    matches!(request, Request::Bypass { .. } | Request::SetMode { .. } | Request::Reload)
}

/// Carries out one request. `trace` is the trace that ends with this connection.
async fn answer<'a>(
    service: &'a Service,
    request: Request,
    trace: &mut Option<AttendedTrace<'a>>,
) -> Response {
    let answered = match request {
        Request::Status => service.status().await.map(|status| Response::Status(Box::new(status))),
        Request::Bypass { on } => Ok(Response::done(service.bypass(on))),
        Request::SetMode { mode } => service.set_mode(&mode).await.map(Response::done),
        Request::Reload => {
            service.reload().await.map(|keys| reloaded(&keys)).map_err(|error| error.to_string())
        }
        Request::TraceStart { seconds, events, attended } => {
            service.traces().start(seconds, events).map(|begun| {
                if attended {
                    *trace = Some(service.traces().attend(&begun));
                }
                Response::done(begun.message)
            })
        }
        Request::TraceRead => {
            service.traces().read().await.map(|page| Response::Trace(Box::new(page)))
        }
        Request::Explain(wanted) => {
            service.explain(wanted).await.map(|told| Response::Explanation(Box::new(told)))
        }
        Request::TraceStop => service.traces().stop().await.map(Response::done),
    };
    answered.unwrap_or_else(Response::error)
}

fn reloaded(needs_restart: &[&str]) -> Response {
    let read = "the configuration was read again";
    let message = match needs_restart {
        [] => read.to_owned(),
        keys => format!("{read}; restart laxityd for {}", keys.join(", ")),
    };
    Response::done(message)
}
