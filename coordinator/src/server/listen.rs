//! Accepts connections up to a limit, does TLS where it is configured, and identifies each peer.
//!
//! A connection beyond the limit is closed at once: in the backlog, it would delay others. The
//! handshake has a time limit, so that a silent peer holds a slot for seconds only.
//!
//! A connection without a stream of a daemon or a watcher is a *visitor*. Visitors have fewer
//! slots, and a new visitor always gets one: it takes that of the oldest visitor of the address
//! with the most visitors. So idle connections keep nobody out, and a connection with a stream
//! never loses its slot.

use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use laxity_listen::{AcceptErrors, ConnectionSlot, ConnectionSlots, LineLimit, descriptors_max};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{Sleep, sleep};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::either::Either;
use tonic::transport::server::Connected;
use tracing::{debug, warn};

use super::access::{self, ConnectInfo, ProvenPeer, Served};
use crate::limits::Limits;
use crate::tls::ServerTls;

/// Longest duration of a handshake, and then of the wait for the first bytes of HTTP/2.
const HANDSHAKE_MAX: Duration = Duration::from_secs(5);
/// Longest time for a refused peer to read the reason.
const LINGER_MAX: Duration = Duration::from_secs(1);
/// Length of the preface that HTTP/2 clients send first (RFC 9113, 3.4), in bytes.
const PREFACE_BYTES: usize = 24;
/// Maximum number of visitors at a time, in all and from one address.
const VISITORS_MAX: usize = 1024;
const VISITORS_PER_ADDRESS_MAX: usize = 512;

type Io = Either<TcpStream, Box<TlsStream<TcpStream>>>;

/// A connection. Its slot is free again when it is dropped.
pub(crate) struct Connection {
    io: Io,
    info: ConnectInfo,
    /// The number of bytes of the HTTP/2 preface that are missing, and the time limit for them.
    preface: Option<(usize, Pin<Box<Sleep>>)>,
    visit: Visit,
    _slot: ConnectionSlot<IpAddr>,
}

/// A future that is ready when a new visitor has taken this visitor's slot.
type Lost = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A connection's slot among the visitors, while it is a visitor.
struct Visit {
    slots: ConnectionSlots<IpAddr>,
    address: IpAddr,
    lost: Option<Lost>,
}

impl Visit {
    fn enter(&mut self) {
        // A caller is refused only if privileged holders have all slots, and there are none here.
        if let Some(mut slot) = self.slots.take(self.address, false) {
            self.lost = Some(Box::pin(async move { slot.lost().await }));
        }
    }

    /// Returns ready when the connection has lost its slot.
    fn poll(&mut self, cx: &mut Context<'_>, is_served: bool) -> Poll<()> {
        if is_served {
            self.lost = None;
            return Poll::Pending;
        }
        if self.lost.is_none() {
            self.enter();
        }
        match &mut self.lost {
            Some(lost) => lost.as_mut().poll(cx),
            None => Poll::Pending,
        }
    }
}

impl Connection {
    fn new(io: Io, peer: ProvenPeer, slot: ConnectionSlot<IpAddr>, visit: Visit) -> Self {
        Self {
            io,
            info: ConnectInfo { peer, served: Served::default() },
            preface: Some((PREFACE_BYTES, Box::pin(sleep(HANDSHAKE_MAX)))),
            visit,
            _slot: slot,
        }
    }

    /// Counts bytes of the preface and fails when the time limit is over. After the preface, HTTP/2
    /// has its own limits.
    fn poll_preface(&mut self, cx: &mut Context<'_>, read: usize) -> Poll<io::Result<()>> {
        let Some((missing, late)) = &mut self.preface else { return Poll::Ready(Ok(())) };
        *missing = missing.saturating_sub(read);
        if *missing == 0 {
            self.preface = None;
        } else if late.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Poll::Ready(Ok(()))
    }
}

impl Connected for Connection {
    type ConnectInfo = ConnectInfo;

    fn connect_info(&self) -> ConnectInfo {
        self.info.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let is_served = self.info.is_served();
        if self.visit.poll(cx, is_served).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.io).poll_read(cx, buffer);
        let more = buffer.filled().len() - before;
        match self.poll_preface(cx, more) {
            Poll::Ready(Ok(())) => read,
            late => late,
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// Accepts connections until the receiver is dropped.
pub(crate) fn accept(
    listener: TcpListener,
    tls: Option<Arc<ServerTls>>,
    limits: Limits,
) -> ReceiverStream<io::Result<Connection>> {
    let (sender, receiver) = mpsc::channel(16);
    let (wanted, descriptors) = (limits.connections_max, descriptors_max());
    let limits = limits.within(descriptors);
    if limits.connections_max < wanted {
        warn!(
            descriptors,
            connections_max = limits.connections_max,
            "limits.connections_max = {wanted} is more than the limit of open files leaves room \
             for; raise that (LimitNOFILE=)"
        );
    }
    tokio::spawn(async move {
        let slots =
            ConnectionSlots::new(limits.connections_max, limits.connections_per_address_max);
        let visitors = ConnectionSlots::new(
            VISITORS_MAX.min(limits.connections_max.div_ceil(2)),
            VISITORS_PER_ADDRESS_MAX.min(limits.connections_per_address_max.div_ceil(2)),
        );
        let mut errors = AcceptErrors::new("the coordinator's port");
        let refusals = Arc::new(Mutex::new(LineLimit::new(10, Duration::from_secs(60))));
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = sender.closed() => return,
            };
            let (stream, address) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    errors.rest_after(&error).await;
                    continue;
                }
            };
            let Some(slot) = slots.take_free(address.ip()) else {
                debug!(%address, "a connection beyond limits.connections_* was closed");
                continue;
            };
            let mut visit = Visit { slots: visitors.clone(), address: address.ip(), lost: None };
            visit.enter();
            let _ = stream.set_nodelay(true);
            let Some(tls) = tls.clone() else {
                let peer = ProvenPeer::Anyone(address);
                let connection = Connection::new(Io::Left(stream), peer, slot, visit);
                if sender.send(Ok(connection)).await.is_err() {
                    return;
                }
                continue;
            };
            let (sender, refusals) = (sender.clone(), Arc::clone(&refusals));
            tokio::spawn(async move {
                let greeted = greet(&tls, (stream, address), slot, visit, &refusals);
                if let Some(connection) = greeted.await {
                    let _ = sender.send(Ok(connection)).await;
                }
            });
        }
    });
    ReceiverStream::new(receiver)
}

/// Waits until the TLS alert has arrived. In TLS 1.3 a client sends its first request before its
/// certificate is refused. To close the socket with that request unread would reset it before the
/// alert is read.
async fn linger(mut stream: TcpStream) {
    if stream.shutdown().await.is_ok() {
        let mut unread = [0; 4096];
        while matches!(stream.read(&mut unread).await, Ok(1..)) {}
    }
}

async fn greet(
    tls: &ServerTls,
    (stream, address): (TcpStream, SocketAddr),
    slot: ConnectionSlot<IpAddr>,
    mut visit: Visit,
    refusals: &Mutex<LineLimit>,
) -> Option<Connection> {
    let acceptor = TlsAcceptor::from(tls.current());
    let accepting = acceptor.accept(stream).into_fallible();
    let accepting = tokio::time::timeout(HANDSHAKE_MAX, accepting);
    let accepted = tokio::select! {
        accepted = accepting => accepted,
        () = poll_fn(|cx| visit.poll(cx, false)) => return None,
    };
    let stream = match accepted {
        Ok(Ok(stream)) => stream,
        Ok(Err((error, stream))) => {
            let line = refusals.lock().take(Instant::now());
            if let Some(left_out) = line {
                warn!(%address, %error, left_out, "a connection was refused: no valid certificate");
            }
            let lingering = tokio::time::timeout(LINGER_MAX, linger(stream));
            tokio::select! {
                _ = lingering => {}
                () = poll_fn(|cx| visit.poll(cx, false)) => {}
            }
            return None;
        }
        Err(_) => return None,
    };
    let (_, session) = stream.get_ref();
    let leaf = session.peer_certificates().and_then(<[_]>::first);
    let roles = leaf.map_or_else(Vec::new, |leaf| access::roles(leaf));
    let peer = ProvenPeer::Known(roles.into());
    let io = Io::Right(Box::new(stream));
    Some(Connection::new(io, peer, slot, visit))
}
