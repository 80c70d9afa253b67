//! Fuzzes the messages between daemons and coordinator with arbitrary bytes: from several daemons
//! to a coordinator in any order, and from a coordinator to a daemon.
//!
//! After each message the coordinator's sums must agree and its limits must hold. The daemon's own
//! [`OrderAssembler`] must accept its orders. After all hosts have left, no state of them may be
//! left.

use laxity_coordinator::cluster::{Cluster, ClusterPolicy, ClusterSettings, HostId, Taken};
use laxity_coordinator::limits::Limits;
use laxity_daemon::coordinator::assemble::{Assembled, OrderAssembler, RefusedOrders};
use laxity_policy::{Span, Time};
use laxity_wire::v1::{
    self, Direction, Epoch, Event, FromCoordinator, FromDaemon, Hello, Order, PortInfo, Report,
    SnapshotPiece, from_coordinator, from_daemon::Message,
};
use prost::Message as _;

use crate::Input;

mod seeds;

pub use seeds::seeds;

const HOSTS: usize = 4;
const STEPS_MAX: usize = 256;
/// Maximum number of polls at one instant. More mean that the coordinator never finishes.
const POLLS_MAX: usize = 1000;
const TERM: u64 = 7;
const GRACE: Span = Span::from_millis(100);

// The values of a step's kind, which is in bits 2 to 4 of its first byte. Bits 0 and 1 are the
// host.
const SAY: u8 = 0;
const REPORT: u8 = 1;
const HAPPEN: u8 = 2;
const HAPPEN_TOO: u8 = 3;
const WAIT: u8 = 4;
const READ: u8 = 5;
const OPERATE: u8 = 6;
const ORDER: u8 = 7;

fn address(host: &str) -> Vec<u8> {
    vec![host.bytes().last().unwrap_or(0); 16]
}

pub fn hello(host: &str) -> Hello {
    let port = |direction| PortInfo {
        name: "eth0".into(),
        direction: direction as i32,
        rate_bytes_per_s: 1_000_000_000,
        addresses: vec![address(host)],
    };
    Hello {
        protocol: v1::PROTOCOL,
        protocol_min: v1::PROTOCOL_MIN,
        software: "fuzz".into(),
        capabilities: Vec::new(),
        host: host.into(),
        instance: 1,
        ports: vec![port(Direction::Egress), port(Direction::Ingress)],
        applied: None,
    }
}

fn name(host: usize) -> String {
    format!("h{host}")
}

#[derive(Default)]
struct Daemon {
    stream: Option<(HostId, u64)>,
    sequence: u64,
    assembler: OrderAssembler,
}

struct World {
    cluster: Cluster,
    now: Time,
    daemons: [Daemon; HOSTS],
    misled: OrderAssembler,
}

impl World {
    fn new() -> Self {
        // Limits are small, so that inputs reach them. Little is reserved, so that charges show.
        let limits = Limits {
            hosts_max: 6,
            batches_max: 24,
            batches_per_host_max: 16,
            requests_max: 48,
            requests_per_host_max: 32,
            loads_max: 64,
            loads_per_host_max: 48,
            fetches_max: 16,
            fetches_per_host_max: 8,
            hosts_per_batch_max: 3,
            events_per_report_max: 64,
            ..Limits::default()
        };
        let settings = ClusterSettings { limits, host_grace: GRACE, ..ClusterSettings::default() };
        let now = Time(1 << 40);
        let cluster = Cluster::new(now, settings, ClusterPolicy::default(), TERM);
        let mut world = Self {
            cluster: cluster.expect("the limits are valid"),
            now,
            daemons: Default::default(),
            misled: OrderAssembler::default(),
        };
        for host in 0..HOSTS - 1 {
            world.attend(host, &hello(&name(host)));
            world.report(host, SnapshotPiece::End, Vec::new());
        }
        world
    }

    fn attend(&mut self, host: usize, hello: &Hello) {
        if let Ok((id, stream)) = self.cluster.attend(self.now, hello) {
            self.detach(host);
            let daemon = &mut self.daemons[host];
            (daemon.stream, daemon.sequence) = (Some((id, stream)), 0);
            assert!(daemon.assembler.begin(TERM));
        }
    }

    fn detach(&mut self, host: usize) {
        if let Some((id, stream)) = self.daemons[host].stream.take() {
            self.cluster.detach(self.now, id, stream);
        }
    }

    fn report(&mut self, host: usize, piece: SnapshotPiece, events: Vec<Event>) {
        let report =
            Report { sequence: self.daemons[host].sequence + 1, snapshot: piece as i32, events };
        self.say(host, Message::Report(report));
    }

    fn say(&mut self, host: usize, message: Message) {
        let Some((id, stream)) = self.daemons[host].stream else {
            if let Message::Hello(hello) = message {
                self.attend(host, &hello);
            }
            return;
        };
        match message {
            Message::Report(report) => {
                let sequence = report.sequence;
                match self.cluster.report(self.now, id, stream, report) {
                    Ok(()) => self.daemons[host].sequence = sequence,
                    Err(last) => {
                        assert!(!last.detail.is_empty(), "a goodbye says why");
                        self.detach(host);
                    }
                }
            }
            Message::Ack(ack) => self.cluster.acknowledged(id, stream, ack.epoch),
            Message::Nack(_) | Message::Resync(_) => self.cluster.resync(id, stream),
            Message::Heartbeat(_) => self.cluster.heard(self.now, id, stream),
            Message::Leaving(_) => self.cluster.leaves(self.now, id, stream),
            Message::Hello(_) => self.detach(host),
        }
        self.cluster.take_work();
    }

    fn wait(&mut self, span: Span) {
        self.now = self.now + span;
        let due = |cluster: &Cluster, now| cluster.next_deadline().is_some_and(|at| at <= now);
        let mut polls = 0;
        while due(&self.cluster, self.now) {
            if self.cluster.poll(self.now) {
                self.cluster.rest(self.now, Span(1));
                self.now = self.now + Span(1);
            }
            polls += 1;
            assert!(polls < POLLS_MAX, "it is never done");
        }
    }

    fn read(&mut self, host: usize) {
        while self.cluster.poll_ready().is_some() {}
        let Some((id, stream)) = self.daemons[host].stream else { return };
        let Taken::Frames(frames) = self.cluster.take(id, stream) else {
            self.daemons[host].stream = None;
            return;
        };
        let assembler = &mut self.daemons[host].assembler;
        for frame in frames {
            let bytes = frame.encode_to_vec();
            assert!(bytes.len() <= v1::MESSAGE_BYTES_MAX);
            let read = FromCoordinator::decode(&bytes[..]).expect("what is sent can be read");
            match read.message {
                Some(from_coordinator::Message::Order(order)) => match assembler.take(&order) {
                    Assembled::Incomplete => assert!(!order.last),
                    Assembled::Whole { order: applied, .. } => {
                        assert!(order.last && Some(applied.epoch) == order.epoch);
                    }
                    other => panic!("an order that makes no sense: {other:?}"),
                },
                Some(from_coordinator::Message::Standing(standing)) if standing.drained => {
                    assembler.forget();
                }
                _ => {}
            }
        }
        assert_eq!(assembler.refused(), RefusedOrders::default());
    }

    fn operate(&mut self, host: usize, packet: &[u8]) {
        let mut input = Input::new(packet);
        let what = input.byte();
        let rest = input.take(packet.len());
        let operator = "operator";
        match what % 8 {
            0 => self.detach(host),
            1 => self.attend(host, &hello(&name(host))),
            2 => {
                if let Ok(hello) = Hello::decode(rest) {
                    self.attend(host, &hello);
                }
            }
            3 | 4 => {
                let asked = v1::DrainRequest {
                    host: name(host),
                    drain: what % 8 == 3,
                    comment: String::from_utf8_lossy(rest).into_owned(),
                };
                if let Ok(change) = self.cluster.plan_drain(self.now, &asked, operator) {
                    self.cluster.apply(self.now, change);
                }
            }
            5 => {
                if let Ok(asked) = v1::SetPolicyRequest::decode(rest)
                    && let Ok(change) = self.cluster.plan_policy(self.now, &asked, operator)
                {
                    self.cluster.apply(self.now, change);
                }
            }
            6 => {
                let listed = self.cluster.list_batches(self.now, &Default::default());
                for batch in listed.batches {
                    assert!(batch.finish_remaining_ns.is_none_or(|left| left >= 0));
                    let wanted = v1::ExplainRequest { batch: batch.batch, tenant: String::new() };
                    let told = self.cluster.explain(self.now, &wanted);
                    assert!(told.is_ok_and(|told| !told.text.is_empty()));
                }
                let hosts = self.cluster.list_hosts(self.now).hosts;
                assert!(hosts.len() <= 12, "known ones and drained ones");
                self.cluster.summary();
            }
            _ => {
                let saved = self.cluster.durable(self.now, None);
                assert_eq!(self.cluster.restore(self.now, saved), Ok(()));
            }
        }
    }

    fn mislead(&mut self, packet: &[u8]) {
        let order = match FromCoordinator::decode(packet) {
            Ok(FromCoordinator { message: Some(from_coordinator::Message::Order(order)) }) => order,
            _ => match Order::decode(packet) {
                Ok(order) => order,
                Err(_) => return,
            },
        };
        let before = self.misled.applied();
        if let Assembled::Whole { order: applied, .. } = self.misled.take(&order) {
            let later =
                |epoch: Option<Epoch>| epoch.is_none_or(|old| old.key() < applied.epoch.key());
            assert!(order.last && later(before), "nothing older is applied");
        }
    }

    fn step(&mut self, step: u8, packet: &[u8]) {
        let host = usize::from(step & 3);
        match step >> 2 & 7 {
            SAY => {
                if let Ok(FromDaemon { message: Some(message) }) = FromDaemon::decode(packet) {
                    self.say(host, message);
                }
            }
            REPORT => {
                if let Ok(report) = Report::decode(packet) {
                    let piece = report.snapshot();
                    self.report(host, piece, report.events);
                }
            }
            HAPPEN | HAPPEN_TOO => {
                if let Ok(event) = Event::decode(packet) {
                    let piece = match step >> 5 {
                        6 => SnapshotPiece::Part,
                        7 => SnapshotPiece::End,
                        _ => SnapshotPiece::Unspecified,
                    };
                    self.report(host, piece, vec![event]);
                }
            }
            WAIT => {
                let ms = Input::new(packet).short();
                self.wait(Span::from_millis(u64::from(ms)));
            }
            READ => self.read(host),
            OPERATE => self.operate(host, packet),
            ORDER => self.mislead(packet),
            _ => unreachable!("three bits"),
        }
    }

    fn check(&self) {
        assert_eq!(self.cluster.audit(), Ok(()));
        let (counters, admission) = self.cluster.counters();
        assert!(counters.hosts <= 6 && counters.batches <= 24 && counters.requests <= 48);
        assert_eq!(admission.batches_forgotten, 0, "admission keeps what is charged");
    }

    fn compare(&mut self) {
        for host in 0..HOSTS {
            self.read(host);
            let by_deltas = self.daemons[host].assembler.content();
            let orders = self.daemons[host].assembler.applied();
            let Some((id, stream)) = self.daemons[host].stream else { continue };
            self.cluster.resync(id, stream);
            self.read(host);
            let daemon = &self.daemons[host];
            if orders.is_some() && daemon.assembler.applied() != orders {
                assert_eq!(by_deltas, daemon.assembler.content());
            }
        }
    }

    fn leave(&mut self) {
        for host in 0..HOSTS {
            self.detach(host);
        }
        self.wait(GRACE + Span::from_millis(1));
        self.check();
        let (counters, _) = self.cluster.counters();
        let left = (counters.hosts, counters.batches, counters.requests);
        assert_eq!(left, (0, 0, 0), "nothing is left of those who left");
    }
}

pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut world = World::new();
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        let step = input.byte();
        let packet = input.packet();
        world.step(step, packet);
        world.check();
    }
    world.wait(Span::from_millis(10));
    world.compare();
    world.leave();
}
