//! The control socket: reads request lines, has them carried out, writes answer lines.
//!
//! Who may connect is the socket's file mode. A peer that sends too long a line, or nothing for a
//! while, is disconnected; connections beyond [`CONNECTIONS_MAX`] wait for one to end.

use std::sync::Arc;
use std::time::Duration;

use laxity_wire::control::{REQUEST_BYTES_MAX, parse_request};
use laxity_wire::{Envelope, Request, Response};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tracing::{debug, warn};

use crate::service::Service;

/// Connections served at once.
const CONNECTIONS_MAX: usize = 32;
/// A connection that asks nothing for this long is closed.
const IDLE_MAX: Duration = Duration::from_secs(60);
/// A peer that does not read its answer for this long is disconnected.
const WRITE_MAX: Duration = Duration::from_secs(5);

/// Serves `listener` until the runtime ends.
pub async fn serve(listener: UnixListener, service: Arc<Service>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let service = Arc::clone(&service);
                tokio::spawn(async move {
                    if let Err(error) = converse(stream, &service).await {
                        debug!(%error, "a control connection ended");
                    }
                    drop(place);
                });
            }
            Err(error) => {
                warn!(%error, "cannot accept a control connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn converse(stream: UnixStream, service: &Service) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        let limit = REQUEST_BYTES_MAX as u64 + 1;
        let mut bounded = (&mut stream).take(limit);
        let read = bounded.read_until(b'\n', &mut line);
        match tokio::time::timeout(IDLE_MAX, read).await {
            Err(_) => return Ok(()),
            Ok(read) => read?,
        };
        if line.is_empty() {
            return Ok(());
        }
        let too_long = line.len() > REQUEST_BYTES_MAX;
        let response = if too_long {
            Response::error(format!("a request has at most {REQUEST_BYTES_MAX} bytes"))
        } else {
            match parse_request(&line) {
                Ok(request) => answer(service, request).await,
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

async fn answer(service: &Service, request: Request) -> Response {
    match request {
        Request::Status => match service.status().await {
            Ok(status) => Response::Status(Box::new(status)),
            Err(problem) => Response::error(problem),
        },
        Request::Bypass { on } => Response::done(service.bypass(on)),
        Request::SetPolicy { policy } => or_error(service.set_policy(&policy)),
        Request::SetMode { mode } => or_error(service.set_mode(&mode)),
        Request::Reload => match service.reload() {
            Ok(needs_restart) => Response::Done {
                message: if needs_restart.is_empty() {
                    "the configuration was read again".to_owned()
                } else {
                    format!(
                        "the configuration was read again; restart laxityd for {}",
                        needs_restart.join(", ")
                    )
                },
                needs_restart: needs_restart.into_iter().map(str::to_owned).collect(),
            },
            Err(error) => Response::error(error.to_string()),
        },
        Request::TraceStart { seconds, events } => or_error(service.trace_start(seconds, events)),
        Request::TraceRead => match service.trace_read().await {
            Ok(page) => Response::Trace(Box::new(page)),
            Err(problem) => Response::error(problem),
        },
        Request::TraceStop => or_error(service.trace_stop().await),
        Request::Version => Response::Version {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
        },
    }
}

fn or_error(result: Result<String, String>) -> Response {
    match result {
        Ok(message) => Response::done(message),
        Err(message) => Response::Error { message },
    }
}
