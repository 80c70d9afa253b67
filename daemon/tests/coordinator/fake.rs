//! A fake coordinator that sends what a test wants, over real gRPC.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use laxity_wire::v1::coordination_server::{Coordination, CoordinationServer};
use laxity_wire::v1::{
    Event, FromCoordinator, FromDaemon, Heartbeat, Hello, Order, SnapshotPiece, Welcome,
    event::Event as Kind, from_coordinator::Message, from_daemon,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Certificate, Identity, ServerTlsConfig};
use tonic::{Request, Response, Status, Streaming};

use crate::support::SOON;

/// The heartbeat period. It is short, so that daemons soon notice three missing heartbeats.
pub(crate) const HEARTBEAT: Duration = Duration::from_millis(500);

/// The coordinator's end of a stream to a daemon.
pub(crate) struct Peer {
    pub(crate) hello: Hello,
    say: mpsc::Sender<Result<FromCoordinator, Status>>,
    heard: Receiver<from_daemon::Message>,
    handle: tokio::runtime::Handle,
}

/// A fake coordinator. Dropping it ends its streams without a goodbye.
pub(crate) struct Fake {
    pub(crate) address: SocketAddr,
    peers: Receiver<Peer>,
    /// Whether the coordinator reads messages of daemons.
    pub(crate) reads: Arc<AtomicBool>,
    runtime: Option<tokio::runtime::Runtime>,
}

struct Service {
    peers: Sender<Peer>,
    reads: Arc<AtomicBool>,
}

pub(crate) fn frame(message: Message) -> FromCoordinator {
    FromCoordinator { message: Some(message) }
}

#[tonic::async_trait]
impl Coordination for Service {
    type AttendStream = ReceiverStream<Result<FromCoordinator, Status>>;

    async fn attend(
        &self,
        request: Request<Streaming<FromDaemon>>,
    ) -> Result<Response<Self::AttendStream>, Status> {
        let (say, frames) = mpsc::channel(4096);
        let (sender, heard) = channel();
        let (peers, reads) = (self.peers.clone(), Arc::clone(&self.reads));
        let mut inbound = request.into_inner();
        let beats = say.clone();
        tokio::spawn(async move {
            let Ok(Some(FromDaemon { message: Some(from_daemon::Message::Hello(hello)) })) =
                inbound.message().await
            else {
                return;
            };
            let handle = tokio::runtime::Handle::current();
            let peer = Peer { hello, say, heard, handle };
            let _ = peers.send(peer);
            loop {
                while !reads.load(Ordering::Acquire) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                match inbound.message().await {
                    Ok(Some(FromDaemon { message: Some(message) })) => {
                        if sender.send(message).is_err() {
                            return;
                        }
                    }
                    Ok(Some(_)) => {}
                    Ok(None) | Err(_) => return,
                }
            }
        });
        tokio::spawn(async move {
            tokio::time::sleep(HEARTBEAT).await;
            while beats.send(Ok(frame(Message::Heartbeat(Heartbeat {})))).await.is_ok() {
                tokio::time::sleep(HEARTBEAT).await;
            }
        });
        Ok(Response::new(ReceiverStream::new(frames)))
    }
}

impl Fake {
    pub(crate) fn start() -> Self {
        Self::start_at(SocketAddr::from(([127, 0, 0, 1], 0)))
    }

    /// Starts a coordinator at the address of one that has ended.
    pub(crate) fn start_at(address: SocketAddr) -> Self {
        Self::serve(address, None)
    }

    /// Starts a coordinator with the certificates of a folder of `laxity certs`.
    pub(crate) fn start_tls(folder: &Path) -> Self {
        let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
        let tls = ServerTlsConfig::new()
            .identity(Identity::from_pem(
                read("coordinator-localhost.crt"),
                read("coordinator-localhost.key"),
            ))
            .client_ca_root(Certificate::from_pem(read("ca.crt")));
        Self::serve(SocketAddr::from(([127, 0, 0, 1], 0)), Some(tls))
    }

    fn serve(address: SocketAddr, tls: Option<ServerTlsConfig>) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let listener = crate::support::eventually("the address is free", || {
            runtime.block_on(tokio::net::TcpListener::bind(address)).ok()
        });
        let address = listener.local_addr().unwrap();
        let (sender, peers) = channel();
        let reads = Arc::new(AtomicBool::new(true));
        let service = Service { peers: sender, reads: Arc::clone(&reads) };
        let mut server = tonic::transport::Server::builder();
        if let Some(tls) = tls {
            server = server.tls_config(tls).unwrap();
        }
        runtime.spawn(
            server
                .add_service(CoordinationServer::new(service))
                .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true))),
        );
        Self { address, peers, reads, runtime: Some(runtime) }
    }

    /// Reports whether no daemon has come since the last one that was taken.
    pub(crate) fn is_alone(&self) -> bool {
        self.peers.try_recv().is_err()
    }

    /// Returns the next stream of a daemon.
    pub(crate) fn peer(&self) -> Peer {
        self.peers.recv_timeout(SOON).expect("a daemon attends")
    }

    /// Returns the next stream after a welcome and a snapshot.
    pub(crate) fn welcomed(&self, term: u64) -> Peer {
        let peer = self.peer();
        peer.welcome(term);
        peer.await_snapshot();
        peer
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Peer {
    pub(crate) fn say(&self, message: Message) {
        let (say, frame) = (self.say.clone(), frame(message));
        self.handle.block_on(async move {
            let _ = say.send(Ok(frame)).await;
        });
    }

    pub(crate) fn welcome(&self, term: u64) {
        self.say(Message::Welcome(Welcome {
            protocol: 1,
            protocol_min: 1,
            software: "a fake".into(),
            term,
            heartbeat_ns: HEARTBEAT.as_nanos() as u64,
            ..Welcome::default()
        }));
    }

    pub(crate) fn order(&self, order: Order) {
        self.say(Message::Order(order));
    }

    /// Returns the first message that `wanted` accepts, and skips others.
    pub(crate) fn hear<T>(
        &self,
        what: &str,
        mut wanted: impl FnMut(&from_daemon::Message) -> Option<T>,
    ) -> T {
        let end = Instant::now() + SOON;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let message = self.heard.recv_timeout(left);
            let message = message.unwrap_or_else(|error| panic!("never said: {what} ({error})"));
            if let Some(found) = wanted(&message) {
                return found;
            }
        }
    }

    /// Returns the first event that `wanted` accepts.
    pub(crate) fn event<T>(&self, what: &str, mut wanted: impl FnMut(&Kind) -> Option<T>) -> T {
        self.hear(what, |message| {
            let from_daemon::Message::Report(report) = message else { return None };
            let kinds = report.events.iter();
            kinds.filter_map(|event: &Event| event.event.as_ref()).find_map(&mut wanted)
        })
    }

    pub(crate) fn await_snapshot(&self) {
        self.hear("the end of a snapshot", |message| match message {
            from_daemon::Message::Report(report) => {
                (report.snapshot() == SnapshotPiece::End).then_some(())
            }
            _ => None,
        });
    }
}
