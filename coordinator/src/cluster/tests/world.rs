//! A cluster with a simulated clock, and daemons that report what a test wants.

use laxity_policy::{Span, Time};
use laxity_wire::v1::{
    self, BatchArrived, BatchFinished, Direction, Event, FetchFinished, Hello, PortBytes, PortInfo,
    Report, RequestEnded, RequestLoad, SnapshotPiece, event::Event as Kind,
};

use super::replica::Replica;
use crate::cluster::{Cluster, ClusterCounters, ClusterPolicy, ClusterSettings, HostId, Taken};

pub(super) const MS: u64 = 1_000_000;
/// The rate of every port, in bytes per second.
pub(super) const RATE: u64 = 1_000_000_000;

/// A cluster with a simulated clock.
pub(super) struct World {
    pub(super) cluster: Cluster,
    pub(super) now: Time,
}

pub(super) struct Daemon {
    pub(super) id: HostId,
    pub(super) stream: u64,
    pub(super) sent: u64,
    pub(super) replica: Replica,
}

/// The address of the egress port of the host "victim".
pub(super) const ADDRESS: [u8; 16] = [0xab; 16];

pub(super) fn hello(host: &str) -> Hello {
    let address = match host {
        "victim" => Some(ADDRESS),
        // h0, h1 and so on have the addresses 00…, 01… and so on.
        _ => host.strip_prefix('h').and_then(|nth| nth.parse().ok()).map(|nth: u8| [nth; 16]),
    };
    let port = |name: &str, direction| PortInfo {
        name: name.into(),
        direction: direction as i32,
        rate_bytes_per_s: RATE,
        addresses: match direction {
            Direction::Egress => address.iter().map(|it| it.to_vec()).collect(),
            _ => Vec::new(),
        },
    };
    Hello {
        protocol: 1,
        protocol_min: 1,
        host: host.into(),
        ports: vec![port("eth0", Direction::Egress), port("eth0", Direction::Ingress)],
        ..Hello::default()
    }
}

pub(super) fn request(request: u64, remaining_ms: i64, bytes: u64) -> RequestLoad {
    RequestLoad {
        request,
        remaining_ns: Some(remaining_ms * MS as i64),
        loads: vec![PortBytes { port: 0, bytes }],
    }
}

pub(super) fn arrived(batch: u64, requests: impl IntoIterator<Item = RequestLoad>) -> Kind {
    Kind::BatchArrived(BatchArrived {
        batch,
        requests: requests.into_iter().collect(),
        ..BatchArrived::default()
    })
}

pub(super) fn finished(batch: u64) -> Kind {
    Kind::BatchFinished(BatchFinished { batch })
}

pub(super) fn started(batch: u64) -> Kind {
    Kind::BatchStarted(v1::BatchStarted { batch })
}

pub(super) fn ended(request: u64) -> Kind {
    Kind::RequestEnded(RequestEnded { request })
}

pub(super) fn fetched(fetch: u64) -> Kind {
    Kind::FetchFinished(FetchFinished { fetch })
}

impl World {
    pub(super) fn new() -> Self {
        let host_grace = Span::from_millis(100);
        Self::with(ClusterSettings { host_grace, ..ClusterSettings::default() })
    }

    pub(super) fn with(settings: ClusterSettings) -> Self {
        let policy = ClusterPolicy::default();
        let now = Time(10_000 * MS);
        Self { cluster: Cluster::new(now, settings, policy, 7).expect("valid"), now }
    }

    /// Returns a cluster that daemons of these hosts have joined, in this order.
    pub(super) fn of<const N: usize>(hosts: [&str; N]) -> (Self, [Daemon; N]) {
        let mut world = Self::new();
        let daemons = hosts.map(|host| world.join(host));
        (world, daemons)
    }

    pub(super) fn attend(&mut self, hello: &Hello) -> Daemon {
        let attended = self.cluster.attend(self.now, hello).or_else(|told| {
            // A host that comes back too often waits as it was told.
            self.now = self.now + Span(told.retry_after_ns);
            self.cluster.attend(self.now, hello)
        });
        let (id, stream) = attended.expect("let in");
        Daemon { id, stream, sent: 0, replica: Replica::default() }
    }

    /// Attends with a daemon that sends an empty snapshot.
    pub(super) fn join(&mut self, host: &str) -> Daemon {
        let mut daemon = self.attend(&hello(host));
        self.snapshot(&mut daemon, []);
        daemon
    }

    pub(super) fn report(&mut self, from: &mut Daemon, events: impl IntoIterator<Item = Kind>) {
        self.send(from, SnapshotPiece::Unspecified, events);
    }

    pub(super) fn snapshot(&mut self, from: &mut Daemon, events: impl IntoIterator<Item = Kind>) {
        self.send(from, SnapshotPiece::End, events);
    }

    pub(super) fn send(
        &mut self,
        from: &mut Daemon,
        snapshot: SnapshotPiece,
        events: impl IntoIterator<Item = Kind>,
    ) {
        from.sent += 1;
        let events = events.into_iter().map(|event| Event { event: Some(event) });
        let report =
            Report { sequence: from.sent, snapshot: snapshot as i32, events: events.collect() };
        let taken = self.cluster.report(self.now, from.id, from.stream, report);
        assert_eq!((taken, self.cluster.audit()), (Ok(()), Ok(())));
    }

    pub(super) fn detach(&mut self, daemon: &Daemon) {
        self.cluster.detach(self.now, daemon.id, daemon.stream);
    }

    pub(super) fn resync(&mut self, daemon: &Daemon) {
        self.cluster.resync(daemon.id, daemon.stream);
    }

    pub(super) fn explain(&self, batch: u64) -> v1::ExplainResponse {
        let wanted = v1::ExplainRequest { batch, ..Default::default() };
        self.cluster.explain(self.now, &wanted).expect("there")
    }

    pub(super) fn batches(&self) -> Vec<v1::BatchStatus> {
        let all = v1::ListBatchesRequest::default();
        self.cluster.list_batches(self.now, &all).batches
    }

    pub(super) fn counters(&self) -> ClusterCounters {
        self.cluster.counters().0
    }

    pub(super) fn drain(&mut self, host: &str, drain: bool) -> Result<u32, String> {
        let asked = v1::DrainRequest { host: host.into(), drain, comment: "a reason".into() };
        let change = self.cluster.plan_drain(self.now, &asked, "me")?;
        Ok(self.cluster.apply(self.now, change))
    }

    /// Lets the debounce pass and polls until nothing is due.
    pub(super) fn settle(&mut self) {
        self.now = self.now + Span(10 * MS);
        while self.cluster.next_deadline().is_some_and(|due| due <= self.now) {
            self.cluster.poll(self.now);
        }
        assert_eq!(self.cluster.audit(), Ok(()));
    }

    /// Lets the daemon read everything that waits.
    pub(super) fn read(&mut self, daemon: &mut Daemon) {
        while self.cluster.poll_ready().is_some() {}
        match self.cluster.take(daemon.id, daemon.stream) {
            Taken::Frames(frames) => frames.into_iter().for_each(|it| daemon.replica.take(it)),
            Taken::Replaced => panic!("replaced"),
        }
    }

    pub(super) fn settle_and_read(&mut self, daemons: &mut [&mut Daemon]) {
        self.settle();
        for daemon in daemons {
            self.read(daemon);
        }
    }
}
