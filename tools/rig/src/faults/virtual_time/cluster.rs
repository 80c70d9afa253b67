//! The coordinator of a virtual world: the product's model of the cluster, and messages between it
//! and the daemon's end of the stream, which may be lost.

use laxity_coordinator::cluster::{Cluster, ClusterPolicy, ClusterSettings, HostId, Taken};
use laxity_daemon::coordinator::stream_state::StreamState;
use laxity_policy::{Span, Time};
use laxity_wire::v1::{self, FromCoordinator, from_coordinator, from_daemon};

use super::host::DaemonStream;
use crate::error::LabError;

const HEARTBEAT: Span = Span::from_millis(20);
/// Age up to which an order is valid.
const ORDER_AGE_MAX: Span = Span::from_millis(100);
/// The first term of a world. Coordinators of earlier terms come late.
const TERM: u64 = 100;
const URL: &str = "http://virtual";
/// Messages of the daemon between two looks at the stream.
const MESSAGES_MAX: usize = 4;
/// Looks at an order that is too old, until the scheduler has to have noticed.
const LOOKS_MAX: u32 = 60;

struct WelcomedStream {
    host: HostId,
    number: u64,
    state: StreamState,
    beat: Time,
}

pub(super) struct VirtualCoordinator {
    cluster: Cluster,
    /// The highest term so far.
    term: u64,
    stream: Option<WelcomedStream>,
    /// Whether daemons can't reach it.
    pub(super) is_lost: bool,
    pub(super) orders_to_lose: u64,
    last_order: Option<FromCoordinator>,
    /// The last epoch that the daemon applied: its term and its sequence.
    applied: Option<(u64, u64)>,
    pub(super) orders: u64,
    outdated_looks: u32,
}

fn lead(now: Time, term: u64) -> Result<Cluster, LabError> {
    let settings = ClusterSettings {
        heartbeat: HEARTBEAT,
        host_grace: ORDER_AGE_MAX,
        order_age_max: ORDER_AGE_MAX,
        ..ClusterSettings::default()
    };
    Cluster::new(now, settings, ClusterPolicy::default(), term)
        .map_err(|error| LabError::Inside(error.to_string()))
}

impl VirtualCoordinator {
    pub(super) fn new(now: Time) -> Result<Self, LabError> {
        Ok(Self {
            cluster: lead(now, TERM)?,
            term: TERM,
            stream: None,
            is_lost: false,
            orders_to_lose: 0,
            last_order: None,
            applied: None,
            orders: 0,
            outdated_looks: 0,
        })
    }

    /// Forgets the stream of a daemon that ended.
    pub(super) fn daemon_ended(&mut self, now: Time) {
        self.end(now, None);
        self.applied = None;
    }

    fn end(&mut self, now: Time, daemon: Option<&DaemonStream>) {
        if let Some(WelcomedStream { host, number, .. }) = self.stream.take() {
            self.cluster.detach(now, host, number);
            if let Some(daemon) = daemon {
                daemon.exchange.end(&daemon.mailbox);
            }
        }
    }

    /// Starts another coordinator, of the next term or of an earlier one.
    pub(super) fn change_leader(&mut self, now: Time, is_outdated: bool) -> Result<(), LabError> {
        let term = if is_outdated { TERM - 1 } else { self.term + 1 };
        self.term = self.term.max(term);
        self.cluster = lead(now, term)?;
        // The stream's number is unknown to it, so the next look ends the stream.
        Ok(())
    }

    /// Passes messages in both directions. Returns what is wrong about them.
    pub(super) fn look(&mut self, now: Time, daemon: &mut DaemonStream) -> Option<String> {
        if self.is_lost {
            self.end(now, Some(daemon));
        } else {
            while self.cluster.next_deadline().is_some_and(|at| at <= now) {
                self.cluster.poll(now);
            }
            let wrong = match self.stream.take() {
                None => self.begin(now, daemon),
                Some(stream) => self.converse(now, daemon, stream),
            };
            if wrong.is_some() {
                return wrong;
            }
        }
        self.check(now, daemon)
    }

    fn begin(&mut self, now: Time, daemon: &mut DaemonStream) -> Option<String> {
        // A host that comes too often has to wait.
        let Ok((host, number)) = self.cluster.attend(now, &daemon.task.hello()) else {
            return None;
        };
        let Taken::Frames(frames) = self.cluster.take(host, number) else {
            return Some("a stream that just began was replaced".to_owned());
        };
        let mut frames = frames.into_iter();
        let Some(from_coordinator::Message::Welcome(welcome)) =
            frames.next().and_then(|frame| frame.message)
        else {
            return Some("a stream began without a welcome".to_owned());
        };
        match daemon.task.welcome(now, &welcome, URL) {
            Ok(state) => {
                let stream = WelcomedStream { host, number, state, beat: now };
                self.hear(now, daemon, stream, frames.collect());
            }
            Err(_) if welcome.term < self.term => self.cluster.detach(now, host, number),
            Err(refused) => {
                return Some(format!("the daemon refuses a leader: {}", refused.0.problem));
            }
        }
        None
    }

    fn converse(
        &mut self,
        now: Time,
        daemon: &mut DaemonStream,
        mut stream: WelcomedStream,
    ) -> Option<String> {
        let (host, number) = (stream.host, stream.number);
        if !self.cluster.speaks(host, number) || now >= stream.state.silent_at() {
            self.stream = Some(stream);
            self.end(now, Some(daemon));
            return None;
        }
        for _ in 0..MESSAGES_MAX {
            let Some(message) = daemon.task.next(now, &mut stream.state) else { break };
            self.cluster.heard(now, host, number);
            match message {
                from_daemon::Message::Report(report) => {
                    if let Err(goodbye) = self.cluster.report(now, host, number, report) {
                        return Some(format!("the coordinator refuses a report: {goodbye:?}"));
                    }
                }
                from_daemon::Message::Ack(ack) => {
                    self.cluster.acknowledged(host, number, ack.epoch);
                }
                from_daemon::Message::Nack(_) => self.cluster.resync(host, number),
                _ => {}
            }
        }
        let Taken::Frames(mut frames) = self.cluster.take(host, number) else { return None };
        if now >= stream.beat + HEARTBEAT {
            let beat = from_coordinator::Message::Heartbeat(v1::Heartbeat {});
            frames.push(FromCoordinator { message: Some(beat) });
            stream.beat = now;
        }
        self.hear(now, daemon, stream, frames);
        None
    }

    /// Delivers messages to the daemon, unless they are lost. The daemon may end the stream.
    fn hear(
        &mut self,
        now: Time,
        daemon: &mut DaemonStream,
        mut stream: WelcomedStream,
        frames: Vec<FromCoordinator>,
    ) {
        let mut ends = false;
        for frame in frames {
            if matches!(frame.message, Some(from_coordinator::Message::Order(_))) {
                self.last_order = Some(frame.clone());
                if self.orders_to_lose > 0 {
                    self.orders_to_lose -= 1;
                    continue;
                }
            }
            ends |= !matches!(daemon.task.hear(now, &mut stream.state, frame), Ok(None));
        }
        self.stream = Some(stream);
        if ends {
            self.end(now, Some(daemon));
        }
    }

    pub(super) fn repeat_order(&mut self, now: Time, daemon: &mut DaemonStream) {
        if let (Some(order), Some(stream)) = (self.last_order.clone(), self.stream.take()) {
            self.hear(now, daemon, stream, vec![order]);
        }
    }

    /// Checks that the daemon's epochs only grow, and that an old order is no longer in force.
    fn check(&mut self, now: Time, daemon: &DaemonStream) -> Option<String> {
        let view = daemon.exchange.view();
        let applied = view.term.zip(view.sequence);
        if applied < self.applied {
            return Some(format!("the order {applied:?} came after {:?}", self.applied));
        }
        self.orders += u64::from(applied > self.applied);
        self.applied = applied;
        let (in_force, age) = daemon.exchange.in_force(now);
        let is_outdated = in_force && age.is_some_and(|age| age > ORDER_AGE_MAX);
        self.outdated_looks = if is_outdated { self.outdated_looks + 1 } else { 0 };
        if self.outdated_looks > LOOKS_MAX {
            return Some(format!("an order of the age {age:?} is in force"));
        }
        None
    }

    pub(super) fn audit(&self) -> Option<String> {
        self.cluster.audit().err()
    }
}
