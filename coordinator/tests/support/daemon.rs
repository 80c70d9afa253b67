//! A coordinator in this process, and a daemon that reports what a test wants.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use laxity_coordinator::config::Config;
use laxity_coordinator::limits::Limits;
use laxity_coordinator::server::{Coordinator, CoordinatorHandle};
use laxity_quantity::Nanos;
use laxity_wire::v1::coordination_client::CoordinationClient;
use laxity_wire::v1::operator_client::OperatorClient;
use laxity_wire::v1::{
    self, Ack, BatchArrived, Direction, Epoch, Event, FromCoordinator, FromDaemon, Goodbye, Hello,
    Order, PortBytes, PortInfo, Report, RequestLoad, SnapshotPiece, event::Event as Kind,
    from_coordinator::Message, from_daemon,
};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Status, Streaming};

/// Longest wait for anything on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) struct Served {
    pub(crate) address: SocketAddr,
    pub(crate) web: Option<SocketAddr>,
    pub(crate) handle: CoordinatorHandle,
    pub(crate) running: JoinHandle<()>,
}

impl Served {
    pub(crate) async fn start(config: Config) -> Self {
        let config = Config {
            listen: ([127, 0, 0, 1], 0).into(),
            // The daemons of these tests send no heartbeats.
            heartbeat: Nanos(10_000_000_000),
            ..config
        };
        let coordinator = Coordinator::bind(config, 7).await.expect("starts");
        let (address, web) = (coordinator.address().expect("bound"), coordinator.web_address());
        let handle = coordinator.handle();
        let running = tokio::spawn(async move { coordinator.run().await.expect("serves") });
        Self { address, web, handle, running }
    }

    pub(crate) async fn limited(limits: Limits) -> Self {
        let config = Config { limits, ..Config::default() };
        Self::start(config).await
    }

    pub(crate) fn endpoint(&self) -> Endpoint {
        Endpoint::from_shared(format!("http://{}", self.address)).expect("a URL")
    }

    pub(crate) async fn channel(&self) -> Channel {
        self.endpoint().connect().await.expect("listens")
    }

    pub(crate) async fn operator(&self) -> OperatorClient<Channel> {
        OperatorClient::new(self.channel().await)
    }

    pub(crate) async fn daemon(&self, host: &str) -> Daemon {
        self.attend(hello(host)).await
    }

    pub(crate) async fn attend(&self, hello: Hello) -> Daemon {
        let daemon = Daemon::attend(self.channel().await, hello).await;
        daemon.expect("answered")
    }

    /// Returns a daemon that has sent a snapshot and got an order for it.
    pub(crate) async fn settled(&self, host: &str, events: Vec<Kind>) -> Daemon {
        let mut daemon = self.daemon(host).await;
        daemon.snapshot(events).await;
        daemon.settled().await;
        daemon
    }

    pub(crate) async fn hosts(&self) -> v1::ListHostsResponse {
        let mut operator = self.operator().await;
        let listed = operator.list_hosts(v1::ListHostsRequest {}).await;
        listed.expect("lists").into_inner()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.handle.stop();
    }
}

/// Waits for `waits`, and fails after [`PATIENCE`].
pub(crate) async fn in_time<T>(waits: impl Future<Output = T>, what: &str) -> T {
    tokio::time::timeout(PATIENCE, waits).await.expect(what)
}

pub(crate) fn hello(host: &str) -> Hello {
    let port = |direction: Direction| PortInfo {
        addresses: Vec::new(),
        name: "mlx5_0".into(),
        direction: direction as i32,
        rate_bytes_per_s: 50_000_000_000,
    };
    Hello {
        protocol: v1::PROTOCOL,
        protocol_min: v1::PROTOCOL_MIN,
        software: "a test".into(),
        capabilities: Vec::new(),
        host: host.into(),
        instance: 1,
        ports: vec![port(Direction::Egress), port(Direction::Ingress)],
        applied: None,
    }
}

/// Returns the arrival of a batch with one request of the same id, which is due in `due_ms`.
pub(crate) fn arrived(batch: u64, due_ms: i64) -> Kind {
    Kind::BatchArrived(BatchArrived {
        batch,
        compute_ns: 1_000_000,
        requests: vec![RequestLoad {
            request: batch,
            remaining_ns: Some(due_ms * 1_000_000),
            loads: vec![PortBytes { port: 0, bytes: 1 << 20 }],
        }],
        ..BatchArrived::default()
    })
}

pub(crate) struct Daemon {
    to: mpsc::Sender<FromDaemon>,
    from: Streaming<FromCoordinator>,
    sequence: u64,
    /// The ranks in force, by the rules of docs/coordinator.md.
    pub(crate) ranks: BTreeMap<u64, u64>,
    pub(crate) applied: Option<Epoch>,
}

impl Daemon {
    pub(crate) async fn attend(channel: Channel, hello: Hello) -> Result<Self, Status> {
        let (to, messages) = mpsc::channel(256);
        let hello = from_daemon::Message::Hello(hello);
        let _ = to.try_send(FromDaemon { message: Some(hello) });
        let answer = CoordinationClient::new(channel).attend(ReceiverStream::new(messages)).await?;
        Ok(Self {
            to,
            from: answer.into_inner(),
            sequence: 0,
            ranks: BTreeMap::new(),
            applied: None,
        })
    }

    pub(crate) async fn say(&self, message: from_daemon::Message) {
        let message = Some(message);
        // The end of a stream shows when it is read.
        let _ = self.to.send(FromDaemon { message }).await;
    }

    /// Ends as a daemon does that is told to stop.
    pub(crate) async fn leave(mut self) {
        self.say(from_daemon::Message::Leaving(v1::Leaving {})).await;
        drop(self.to);
        while let Ok(Some(_)) = self.from.message().await {}
    }

    pub(crate) async fn report(&mut self, events: Vec<Kind>) {
        self.piece(SnapshotPiece::Unspecified, events).await;
    }

    pub(crate) async fn snapshot(&mut self, events: Vec<Kind>) {
        self.piece(SnapshotPiece::End, events).await;
    }

    async fn piece(&mut self, snapshot: SnapshotPiece, events: Vec<Kind>) {
        self.sequence += 1;
        let events = events.into_iter().map(|event| Event { event: Some(event) });
        self.say(from_daemon::Message::Report(Report {
            sequence: self.sequence,
            snapshot: snapshot as i32,
            events: events.collect(),
        }))
        .await;
    }

    pub(crate) async fn resync(&self) {
        let resync = v1::Resync { applied: None };
        self.say(from_daemon::Message::Resync(resync)).await;
    }

    pub(crate) fn reported(&self) -> u64 {
        self.sequence
    }

    /// Returns the next message that is not a heartbeat, or an error when the stream has ended.
    pub(crate) async fn next(&mut self) -> Result<Message, Status> {
        loop {
            let read = tokio::time::timeout(PATIENCE, self.from.message());
            match read.await.expect("something within the patience of the test")? {
                Some(FromCoordinator { message: Some(Message::Heartbeat(_)) | None }) => {}
                Some(FromCoordinator { message: Some(message) }) => return Ok(message),
                None => return Err(Status::cancelled("the stream is over")),
            }
        }
    }

    /// Returns the result of `pick` for the first message that it accepts.
    pub(crate) async fn until<T>(&mut self, pick: impl Fn(&Message) -> Option<T>) -> T {
        loop {
            let message = self.next().await.expect("the stream goes on");
            if let Message::Order(order) = &message {
                self.apply(order);
            }
            if let Some(found) = pick(&message) {
                return found;
            }
        }
    }

    /// Applies an order, which has one piece in these tests.
    fn apply(&mut self, order: &Order) {
        assert!(order.last && order.piece == 0);
        match order.base {
            None => self.ranks.clear(),
            base => assert_eq!(base, self.applied, "a delta builds on what was applied"),
        }
        for rank in &order.ranks {
            self.ranks.insert(rank.batch, rank.sort_key);
        }
        for batch in &order.unranked {
            self.ranks.remove(batch);
        }
        self.applied = order.epoch;
    }

    /// Applies and returns the next order.
    pub(crate) async fn order(&mut self) -> Order {
        let order = |message: &Message| match message {
            Message::Order(order) => Some(order.clone()),
            _ => None,
        };
        self.until(order).await
    }

    /// Applies orders until one has considered all reports, and returns that one.
    pub(crate) async fn settled(&mut self) -> Order {
        let said = self.sequence;
        let order = |message: &Message| match message {
            Message::Order(order) if order.considered_report >= said => Some(order.clone()),
            _ => None,
        };
        self.until(order).await
    }

    pub(crate) async fn goodbye(&mut self) -> Goodbye {
        let goodbye = |message: &Message| match message {
            Message::Goodbye(goodbye) => Some(goodbye.clone()),
            _ => None,
        };
        self.until(goodbye).await
    }

    pub(crate) async fn ack(&self) {
        let ack = Ack { epoch: self.applied };
        self.say(from_daemon::Message::Ack(ack)).await;
    }

    /// Returns the batches in the order of their ranks.
    pub(crate) fn served(&self) -> Vec<u64> {
        let mut served: Vec<(u64, u64)> = self.ranks.iter().map(|(&b, &k)| (k, b)).collect();
        served.sort_unstable();
        served.into_iter().map(|(_, batch)| batch).collect()
    }
}
