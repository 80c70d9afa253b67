//! Connections: accepted up to a cap, with TLS where it is configured, each with who its peer is.
//!
//! A connection beyond a cap is closed at once: leaving it in the backlog would make those wait that have a place. The
//! handshake has a time limit, so that a peer that says nothing holds a place for seconds only.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{Sleep, sleep};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;
use tracing::{debug, warn};

use super::access::{self, Peer};
use crate::limits::Limits;
use crate::tls::ServerTls;

/// How long a handshake may take, and then the first bytes of HTTP/2.
const HANDSHAKE_MAX: Duration = Duration::from_secs(5);
/// How long a peer that was refused may take to read why.
const LINGER_MAX: Duration = Duration::from_secs(1);
/// What a client of HTTP/2 begins with (RFC 9113, 3.4).
const PREFACE_BYTES: usize = 24;
/// After an error of `accept`, such as too many open files.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);

/// What a request knows of its connection.
#[derive(Clone, Debug)]
pub(crate) struct ConnectInfo {
    pub(crate) peer: Peer,
}

enum Io {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// One connection. Its place is free again when it is dropped.
pub(crate) struct Connection {
    io: Io,
    info: ConnectInfo,
    /// Until the peer has said what every client of HTTP/2 begins with: so many bytes yet, and until when.
    preface: Option<(usize, Pin<Box<Sleep>>)>,
    _place: Place,
}

impl Connection {
    fn new(io: Io, peer: Peer, place: Place) -> Self {
        Self {
            io,
            info: ConnectInfo { peer },
            preface: Some((PREFACE_BYTES, Box::pin(sleep(HANDSHAKE_MAX)))),
            _place: place,
        }
    }

    /// A peer that connects and says nothing holds a place for seconds only. HTTP/2 itself looks after those that began.
    fn poll_preface(&mut self, cx: &mut Context<'_>, read: usize) -> Poll<io::Result<()>> {
        let Some((missing, late)) = &mut self.preface else {
            return Poll::Ready(Ok(()));
        };
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
        let before = buffer.filled().len();
        let read = match &mut self.io {
            Io::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            Io::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        };
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
        match &mut self.io {
            Io::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Io::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.io {
            Io::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, parts),
            Io::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, parts),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.io {
            Io::Plain(stream) => stream.is_write_vectored(),
            Io::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.io {
            Io::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Io::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.io {
            Io::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Io::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[derive(Debug, Default)]
struct Taken {
    total: usize,
    by_address: HashMap<IpAddr, usize>,
}

/// Counts connections.
#[derive(Clone, Debug, Default)]
struct Places(Arc<Mutex<Taken>>);

/// One of them.
struct Place {
    places: Places,
    address: IpAddr,
}

impl Places {
    fn take(&self, address: IpAddr, limits: &Limits) -> Option<Place> {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let here = taken.by_address.get(&address).copied().unwrap_or(0);
        if taken.total >= limits.connections_max || here >= limits.connections_per_address_max {
            return None;
        }
        taken.total += 1;
        taken.by_address.insert(address, here + 1);
        Some(Place {
            places: self.clone(),
            address,
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.0.lock().unwrap_or_else(PoisonError::into_inner);
        taken.total -= 1;
        if let Some(here) = taken.by_address.get_mut(&self.address) {
            *here -= 1;
            if *here == 0 {
                taken.by_address.remove(&self.address);
            }
        }
    }
}

/// Accepts until the receiver is dropped.
pub(crate) fn accept(
    listener: TcpListener,
    tls: Option<Arc<ServerTls>>,
    limits: Limits,
) -> ReceiverStream<io::Result<Connection>> {
    let (sender, receiver) = mpsc::channel(16);
    tokio::spawn(async move {
        let places = Places::default();
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = sender.closed() => return,
            };
            let (stream, address) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_AGAIN).await;
                    continue;
                }
            };
            let Some(place) = places.take(address.ip(), &limits) else {
                debug!(%address, "a connection beyond limits.connections_* was closed");
                continue;
            };
            let _ = stream.set_nodelay(true);
            let Some(tls) = tls.clone() else {
                let connection = Connection::new(Io::Plain(stream), Peer::Anyone(address), place);
                if sender.send(Ok(connection)).await.is_err() {
                    return;
                }
                continue;
            };
            let sender = sender.clone();
            tokio::spawn(async move {
                if let Some(connection) = greet(&tls, stream, address, place).await {
                    let _ = sender.send(Ok(connection)).await;
                }
            });
        }
    });
    ReceiverStream::new(receiver)
}

/// Lets the alert that says why arrive. In TLS 1.3 a client has sent its first request by the time its certificate is
/// refused: a socket closed on that would be reset, and the reset overtake the alert.
async fn linger(mut stream: TcpStream) {
    if stream.shutdown().await.is_ok() {
        let mut unread = [0; 4096];
        while matches!(stream.read(&mut unread).await, Ok(1..)) {}
    }
}

async fn greet(
    tls: &ServerTls,
    stream: TcpStream,
    address: SocketAddr,
    place: Place,
) -> Option<Connection> {
    let acceptor = TlsAcceptor::from(tls.current());
    let accepting = acceptor.accept(stream).into_fallible();
    let stream = match tokio::time::timeout(HANDSHAKE_MAX, accepting).await {
        Ok(Ok(stream)) => stream,
        Ok(Err((error, stream))) => {
            warn!(%address, %error, "a connection was refused: no valid certificate");
            let _ = tokio::time::timeout(LINGER_MAX, linger(stream)).await;
            return None;
        }
        Err(_) => return None,
    };
    let (_, session) = stream.get_ref();
    let leaf = session.peer_certificates().and_then(<[_]>::first);
    let roles = leaf.map_or_else(Vec::new, |leaf| access::roles(leaf));
    let peer = Peer::Known(roles.into());
    Some(Connection::new(Io::Tls(Box::new(stream)), peer, place))
}
