//! HTTP/1 for metrics and pages, to any client that can reach the address.
//!
//! A client may be silent, send slowly or not read its answer. Such a client holds one of a bounded
//! number of connections, for a bounded time ([`HttpLimits`]). If all are taken, a new connection
//! takes the slot of another one: of the address with the most connections, the one whose last
//! request is oldest ([`crate::ConnectionSlots`]). Answers are made on the runtime's thread. They
//! must be cheap, as those of [`rendered`] are.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tracing::{debug, info, warn};

use crate::{AcceptErrors, ConnectionSlot, ConnectionSlots};

/// Limits of connections.
#[derive(Clone, Copy, Debug)]
pub struct HttpLimits {
    /// Maximum number of connections. Beyond it, the address with the most loses its oldest one.
    pub connections_max: usize,
    /// Longest time for the head of a request, and for the wait for the next request.
    pub head_max: Duration,
    /// Longest time of a connection, for all its requests together.
    pub connection_max: Duration,
    /// Whether a connection may carry more than one request.
    pub keep_alive: bool,
}

impl HttpLimits {
    /// Limits of an endpoint that is scraped: one request per connection, within ten seconds.
    pub const METRICS: Self = Self {
        connections_max: 64,
        head_max: Duration::from_secs(3),
        connection_max: Duration::from_secs(10),
        keep_alive: false,
    };
}

/// An answer with its whole body.
pub type Answer = Response<Full<Bytes>>;

/// A socket that is bound and not yet served.
#[derive(Debug)]
pub struct HttpListener {
    tcp: TcpListener,
}

impl HttpListener {
    /// Binds `address`. The caller must be inside a tokio runtime.
    ///
    /// # Errors
    /// The kernel's error. The caller adds the address and its setting to the text.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let tcp = std::net::TcpListener::bind(address)?;
        tcp.set_nonblocking(true)?;
        let tcp = TcpListener::from_std(tcp)?;
        Ok(Self { tcp })
    }

    /// Returns the address, with the port that the kernel chose for port 0.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// Serves until the future is dropped, which ends all connections. `what` is the name for the
    /// log.
    pub async fn serve<A, F>(self, what: &'static str, limits: HttpLimits, answer: A)
    where
        A: Fn(&Request<Incoming>) -> F + Send + Sync + 'static,
        F: Future<Output = Answer> + Send + 'static,
    {
        let answer = Arc::new(answer);
        let mut errors = AcceptErrors::new(what);
        let slots = ConnectionSlots::new(limits.connections_max, limits.connections_max);
        // Dropping the set ends all connections.
        let mut connections = JoinSet::new();
        loop {
            let (stream, from) = match self.tcp.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    errors.rest_after(&error).await;
                    continue;
                }
            };
            while connections.try_join_next().is_some() {}
            let Some(slot) = slots.take(from.ip(), false) else { continue };
            let (slots, answer) = (slots.clone(), Arc::clone(&answer));
            connections.spawn(connection(stream, slot, slots, limits, answer));
            // A connection that lost its slot closes before the next one is accepted.
            tokio::task::yield_now().await;
        }
    }
}

/// An HTTP address to serve. If the address can't be bound, for example because another process
/// holds it, the program logs a warning, goes on, and tries again later.
#[derive(Debug)]
pub struct HttpEndpoint {
    /// What is served, for the log.
    what: &'static str,
    address: SocketAddr,
    /// The listener, or why there is none.
    listener: Result<HttpListener, String>,
}

/// The time between attempts to bind an address.
const BIND_EVERY: Duration = Duration::from_secs(5);

impl HttpEndpoint {
    /// Binds `address`, which the setting `key` has. The caller must be inside a tokio runtime.
    pub fn bind(what: &'static str, key: &str, address: SocketAddr) -> Self {
        let listener = HttpListener::bind(address).map_err(|cause| {
            let problem = format!(
                "cannot serve {what} at {address}: {cause}; set another address, or \"\" for none \
                 (`{key}` in the configuration)"
            );
            warn!("{problem}. Everything else goes on, and this is tried again");
            problem
        });
        Self { what, address, listener }
    }

    /// Returns why nothing is served, and what to do.
    pub fn problem(&self) -> Option<&str> {
        self.listener.as_ref().err().map(String::as_str)
    }

    /// Returns the address if it is bound, with the port that the kernel chose for port 0.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.listener.as_ref().ok()?.tcp.local_addr().ok()
    }

    /// Returns the listener as soon as its address is free.
    pub async fn listener(self) -> HttpListener {
        if let Ok(listener) = self.listener {
            return listener;
        }
        loop {
            tokio::time::sleep(BIND_EVERY).await;
            if let Ok(listener) = HttpListener::bind(self.address) {
                info!(address = %self.address, "{} are served now", self.what);
                return listener;
            }
        }
    }
}

async fn connection<A, F>(
    stream: TcpStream,
    mut slot: ConnectionSlot<IpAddr>,
    slots: ConnectionSlots<IpAddr>,
    limits: HttpLimits,
    answer: Arc<A>,
) where
    A: Fn(&Request<Incoming>) -> F + Send + Sync + 'static,
    F: Future<Output = Answer> + Send + 'static,
{
    let number = slot.number();
    let service = service_fn(move |request| {
        slots.renew(number);
        let response = answer(&request);
        async move { Ok::<_, Infallible>(response.await) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_max)
        .keep_alive(limits.keep_alive)
        .max_buf_size(1 << 14)
        .serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        served = tokio::time::timeout(limits.connection_max, served) => match served {
            Ok(Ok(())) => {}
            Ok(Err(error)) => debug!(%error, "an HTTP connection broke"),
            Err(_) => debug!("an HTTP connection took too long"),
        },
        () = slot.lost() => debug!("an HTTP connection made room for a newer one"),
    }
}

/// How long a rendered text is used again.
const TEXT_AGE_MAX: Duration = Duration::from_millis(100);

/// Answers `GET /health` with `OK` and any other `GET` with the metrics of `render`. Metrics are
/// rendered at most ten times a second.
pub fn rendered(
    render: impl Fn() -> String + Send + Sync + 'static,
) -> impl Fn(&Request<Incoming>) -> Ready<Answer> + Send + Sync + 'static {
    let last: Mutex<Option<(Instant, Bytes)>> = Mutex::new(None);
    move |request| {
        if request.method() != Method::GET {
            return ready(text(StatusCode::METHOD_NOT_ALLOWED, Bytes::from("use GET\n")));
        }
        if request.uri().path() == "/health" {
            return ready(text(StatusCode::OK, Bytes::from("OK")));
        }
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((made, body)) = &*last
            && made.elapsed() < TEXT_AGE_MAX
        {
            return ready(text(StatusCode::OK, body.clone()));
        }
        let body = Bytes::from(render());
        *last = Some((Instant::now(), body.clone()));
        ready(text(StatusCode::OK, body))
    }
}

fn text(status: StatusCode, body: Bytes) -> Answer {
    let mut answer = Response::new(Full::new(body));
    *answer.status_mut() = status;
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    answer.headers_mut().insert(CONTENT_TYPE, kind);
    answer
}
