//! The task that holds the stream. It connects, sends reports from the exchange, assembles orders,
//! and connects again after a wait.
//!
//! It runs on the daemon's tokio thread, beside registration and operators. It makes a message only
//! when the stream has room. So a coordinator that does not read delays reports, but not the
//! daemon.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use laxity_policy::{Span, Time};
use laxity_shm::sleep::now_ns;
use laxity_wire::v1::coordination_client::CoordinationClient;
use laxity_wire::v1::{
    self, Ack, Event, FromCoordinator, FromDaemon, Goodbye, Heartbeat, Hello, Nack, NackReason,
    Report, SnapshotPiece, Welcome, event::Event as Kind, from_coordinator, from_daemon::Message,
};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tracing::{debug, info, warn};

use super::assemble::{Assembled, OrderAssembler};
use super::exchange::CoordinatorExchange;
use super::stream_end::{OwnEnd, StreamEnd, back_off, leave, shortened};
use super::stream_state::StreamState;
use super::{addresses, channel};
use crate::config::{ConfigInForce, CoordinatorConfig, NicConfig};
use crate::mailbox::Mailbox;
use crate::service::SchedulerHandle;
use crate::stats::Snapshot;

const WELCOME_MAX: Duration = Duration::from_secs(5);
/// Shortest time between two snapshots on one stream.
const SNAPSHOT_EVERY: Span = Span::from_millis(1000);
/// Maximum number of messages that wait for the connection.
const OUTBOUND: usize = 2;
const MESSAGE_BYTES_MAX: usize = 4 * v1::MESSAGE_BYTES_MAX;

/// The task that keeps a stream to the coordinator, and connects again if it ends.
#[derive(Debug)]
pub struct StreamTask {
    config: CoordinatorConfig,
    host: String,
    /// The configuration in force, for its NICs. A change of `config` needs a restart.
    in_force: ConfigInForce,
    /// The NICs of the last Hello.
    nics: Vec<NicConfig>,
    instance: u64,
    exchange: Arc<CoordinatorExchange>,
    mailbox: Mailbox,
    snapshots: watch::Receiver<Option<Arc<Snapshot>>>,
    assembler: OrderAssembler,
    /// Notified when the daemon stops.
    stop: Arc<Notify>,
}

fn now() -> Time {
    Time(now_ns())
}

/// Converts a time of CLOCK_MONOTONIC that is to come into the runtime's [`Instant`].
fn instant(at: Time) -> Instant {
    Instant::now() + Duration::from_nanos(at.since(now()).0)
}

/// Returns a random number: each `RandomState` has its own random keys.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

impl StreamTask {
    /// Makes the task for the coordinator that the configuration names, if it names one.
    pub fn new(in_force: &ConfigInForce, scheduler: &SchedulerHandle) -> Option<Self> {
        let exchange = scheduler.exchange.clone()?;
        Some(Self {
            config: in_force.load().coordinator.clone(),
            host: exchange.view().host,
            in_force: Arc::clone(in_force),
            nics: in_force.load().nic.clone(),
            instance: random(),
            exchange,
            mailbox: scheduler.mailbox.clone(),
            snapshots: scheduler.snapshots.clone(),
            assembler: OrderAssembler::default(),
            stop: Arc::default(),
        })
    }

    pub fn exchange(&self) -> Arc<CoordinatorExchange> {
        Arc::clone(&self.exchange)
    }

    /// Returns the notification that ends the task, after a goodbye to the coordinator.
    pub fn stop(&self) -> Arc<Notify> {
        Arc::clone(&self.stop)
    }

    /// Runs until the daemon stops. If there is a stream then, the task says goodbye and ends by
    /// itself. If not, it has to be aborted.
    pub async fn attend(mut self) {
        let least = Duration::from(self.config.backoff_min);
        let most = Duration::from(self.config.backoff_max).max(least);
        let mut range = least;
        let mut elsewhere = None;
        let mut was_there = true;
        let mut told = String::new();
        loop {
            let url = elsewhere.take().unwrap_or_else(|| self.config.endpoint.clone());
            let connects = self.exchange.view().connects;
            let ended = self.once(&url).await;
            if ended.own == Some(OwnEnd::Stops) {
                return;
            }
            self.exchange.end(&self.mailbox);
            let is_there = self.exchange.view().connects > connects;
            self.exchange.update_view(|view| {
                view.connected = false;
                view.failures += u64::from(ended.own.is_none());
                view.problem.clone_from(&ended.problem);
            });
            if ended.ordered {
                range = least;
            }
            if ended.own == Some(OwnEnd::NicsChanged) {
                info!(coordinator = %url, "connects again, because the NICs of this host changed");
                elsewhere = Some(url);
                continue;
            }
            elsewhere = ended.leader;
            let wait = back_off(&mut range, most, random()).max(ended.retry_after);
            let (problem, wait_ms) = (&ended.problem, wait.as_millis() as u64);
            // One warning per outage and reason is enough, since metrics show each attempt.
            if is_there || was_there || told != *problem {
                told.clone_from(problem);
                warn!(
                    coordinator = %url, problem, wait_ms,
                    "no coordinator; the last cluster order applies until its age limit, then this \
                     daemon's own order"
                );
            } else {
                debug!(coordinator = %url, problem, wait_ms, "still no coordinator");
            }
            was_there = is_there;
            tokio::select! {
                () = sleep(wait) => {}
                () = self.stop.notified() => return,
            }
        }
    }

    async fn once(&mut self, url: &str) -> StreamEnd {
        self.nics.clone_from(&self.in_force.load().nic);
        let channel = match channel::connect(url, &self.config).await {
            Ok(channel) => channel,
            Err(problem) => return StreamEnd::because(problem),
        };
        let (outbound, messages) = mpsc::channel(OUTBOUND);
        let _ = outbound.try_send(say(Message::Hello(self.hello())));
        let mut client =
            CoordinationClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let opening = client.attend(ReceiverStream::new(messages));
        let mut inbound = match timeout(WELCOME_MAX, opening).await {
            Ok(Ok(response)) => response.into_inner(),
            Ok(Err(status)) => return StreamEnd::because(shortened(&channel::refusal(&status))),
            Err(_) => return StreamEnd::because("it opens no stream"),
        };
        let welcome = match timeout(WELCOME_MAX, inbound.message()).await {
            Ok(Ok(Some(frame))) => match frame.message {
                Some(from_coordinator::Message::Welcome(welcome)) => welcome,
                Some(from_coordinator::Message::Goodbye(last)) => {
                    return StreamEnd::parted(&last, url, &self.config);
                }
                _ => return StreamEnd::because("it did not begin with a Welcome"),
            },
            Ok(Ok(None)) => return StreamEnd::because("it ended the stream"),
            Ok(Err(status)) => return StreamEnd::because(shortened(&channel::refusal(&status))),
            Err(_) => return StreamEnd::because("it does not welcome this host"),
        };
        let mut stream = match self.welcome(now(), &welcome, url) {
            Ok(stream) => stream,
            Err(refused) => {
                let (ended, answer) = *refused;
                if let Some(answer) = answer {
                    let _ = outbound.try_send(say(answer));
                }
                return ended;
            }
        };
        let mut ended = match self.converse(&mut stream, &outbound, &mut inbound).await {
            Ok(last) => StreamEnd::parted(&last, url, &self.config),
            Err(ended) => ended,
        };
        if ended.own == Some(OwnEnd::Stops) {
            leave(outbound, &mut inbound).await;
        }
        ended.ordered = stream.ordered;
        ended
    }

    /// Begins a stream that the coordinator welcomed.
    ///
    /// # Errors
    /// The coordinator can't be used. The stream ends, after the answer if there is one.
    pub fn welcome(
        &mut self,
        now: Time,
        welcome: &Welcome,
        url: &str,
    ) -> Result<StreamState, Box<(StreamEnd, Option<Message>)>> {
        let (ours, theirs) =
            ((v1::PROTOCOL, v1::PROTOCOL_MIN), (welcome.protocol, welcome.protocol_min));
        if v1::common_protocol(ours, theirs).is_none() {
            let ended = StreamEnd {
                problem: format!(
                    "it speaks protocols {} to {}, this daemon {} to {}; bring them to releases \
                     that overlap",
                    theirs.1, theirs.0, ours.1, ours.0
                ),
                retry_after: self.config.backoff_max.into(),
                ..StreamEnd::default()
            };
            return Err(Box::new((ended, None)));
        }
        if !self.assembler.begin(welcome.term) {
            let refused = self.assembler.refused();
            self.exchange.update_view(|view| view.stale_orders = refused.stale);
            let nack = Nack {
                epoch: Some(v1::Epoch { term: welcome.term, sequence: 0 }),
                reason: NackReason::Fenced as i32,
                detail: "a later term was seen".into(),
            };
            let ended = StreamEnd::because(format!(
                "its term {} was overtaken by one that this daemon has seen; another coordinator \
                 leads. (If there is but one, its host's clock was set back: restart laxityd)",
                welcome.term
            ));
            return Err(Box::new((ended, Some(Message::Nack(nack)))));
        }
        self.welcomed(welcome, url);
        Ok(StreamState::new(now, welcome))
    }

    /// Reports whether the NICs differ from those of the last Hello. Another rate is reported with
    /// the load of its port. A NIC whose rate was unknown may have had no address.
    fn have_nics_changed(&self) -> bool {
        let key = |nic: &NicConfig| (nic.name.clone(), nic.absent, nic.rate.is_known());
        !self.in_force.load().nic.iter().map(key).eq(self.nics.iter().map(key))
    }

    pub fn hello(&self) -> Hello {
        Hello {
            protocol: v1::PROTOCOL,
            protocol_min: v1::PROTOCOL_MIN,
            software: format!("laxityd {}", env!("CARGO_PKG_VERSION")),
            capabilities: Vec::new(),
            host: self.host.clone(),
            instance: self.instance,
            ports: addresses::ports(&self.nics),
            applied: self.assembler.applied(),
        }
    }

    fn welcomed(&self, welcome: &Welcome, url: &str) {
        info!(
            coordinator = %url, host = %self.host, term = welcome.term,
            software = %shortened(&welcome.software), "connected to the coordinator"
        );
        self.exchange.update_view(|view| {
            view.connected = true;
            view.drained = false;
            view.connects += 1;
            view.coordinator = shortened(&welcome.software);
        });
        let limits = welcome.limits.unwrap_or_default();
        let events_max = match limits.events_per_report_max {
            0 => usize::MAX,
            most => most as usize,
        };
        let age_max_ns = match welcome.order_age_max_ns {
            0 => u64::MAX,
            most => most,
        };
        self.exchange.begin(&self.mailbox, events_max, age_max_ns);
    }

    /// Runs the stream until it ends, with a goodbye or for another reason.
    async fn converse(
        &mut self,
        stream: &mut StreamState,
        outbound: &mpsc::Sender<FromDaemon>,
        inbound: &mut Streaming<FromCoordinator>,
    ) -> Result<Goodbye, StreamEnd> {
        let (exchange, stop) = (Arc::clone(&self.exchange), self.stop());
        loop {
            if self.have_nics_changed() {
                let ended = StreamEnd::because("the NICs of this host changed");
                return Err(StreamEnd { own: Some(OwnEnd::NicsChanged), ..ended });
            }
            let (silent_at, beat_at) = (instant(stream.silent_at()), instant(stream.beat_at()));
            let has_messages = stream.reply.is_some() || stream.ack.is_some();
            let pending = has_messages || exchange.has_report() || now() >= stream.beat_at();
            tokio::select! {
                read = timeout_at(silent_at, inbound.message()) => {
                    let frame = match read {
                        Ok(Ok(Some(frame))) => frame,
                        Ok(Ok(None)) => return Err(StreamEnd::because("it ended the stream")),
                        Ok(Err(status)) => {
                            return Err(shortened(&channel::refusal(&status)).into());
                        }
                        Err(_) => {
                            let silence = stream.silent_at().since(stream.heard);
                            let silence = Duration::from_nanos(silence.0);
                            return Err(format!("nothing was heard of it for {silence:?}").into());
                        }
                    };
                    if let Some(last) = self.hear(now(), stream, frame)? {
                        return Ok(last);
                    }
                }
                room = outbound.reserve(), if pending => match room {
                    Ok(room) => {
                        if let Some(message) = self.next(now(), stream) {
                            room.send(say(message));
                        }
                    }
                    Err(_) => return Err(StreamEnd::because("it ended the stream")),
                },
                () = stop.notified() => {
                    return Err(StreamEnd { own: Some(OwnEnd::Stops), ..StreamEnd::default() });
                }
                () = exchange.report_ready(), if !pending => {}
                () = sleep_until(beat_at), if !pending => {}
            }
        }
    }

    /// Returns the next message to send. The stream has room for it.
    pub fn next(&mut self, now: Time, stream: &mut StreamState) -> Option<Message> {
        let message = self.next_unless_silent(now, stream)?;
        stream.spoke = now;
        Some(message)
    }

    fn next_unless_silent(&mut self, now: Time, stream: &mut StreamState) -> Option<Message> {
        if stream.snapshot_wanted && now.since(stream.snapshot_at) >= SNAPSHOT_EVERY {
            stream.snapshot_wanted = false;
            stream.snapshot_at = now;
            self.exchange.want_snapshot(&self.mailbox);
        }
        if let Some(reply) = stream.reply.take() {
            return Some(reply);
        }
        if let Some(epoch) = stream.ack.take() {
            return Some(Message::Ack(Ack { epoch: Some(epoch) }));
        }
        if let Some(dispatch) = self.exchange.take(now, &self.mailbox) {
            return Some(self.report(stream, dispatch.piece, dispatch.events));
        }
        if now < stream.beat_at() {
            return None;
        }
        let seen = self.snapshots.borrow().clone();
        let loads = seen.map_or_else(Vec::new, |seen| stream.port_loads.news(&seen, &self.nics));
        Some(if loads.is_empty() {
            Message::Heartbeat(Heartbeat {})
        } else {
            self.report(stream, SnapshotPiece::Unspecified, loads)
        })
    }

    fn report(
        &self,
        stream: &mut StreamState,
        piece: SnapshotPiece,
        events: Vec<Event>,
    ) -> Message {
        stream.reported += 1;
        let asks = |event: &Event| {
            matches!(event.event, Some(Kind::BatchArrived(_) | Kind::BatchFinished(_)))
        };
        if piece == SnapshotPiece::End || events.iter().any(asks) {
            stream.owed = stream.reported;
        }
        self.exchange.update_view(|view| view.reports += 1);
        Message::Report(Report { sequence: stream.reported, snapshot: piece as i32, events })
    }

    /// Processes a message. Returns the goodbye if it is one.
    pub fn hear(
        &mut self,
        now: Time,
        stream: &mut StreamState,
        frame: FromCoordinator,
    ) -> Result<Option<Goodbye>, String> {
        stream.heard = now;
        match frame.message {
            Some(from_coordinator::Message::Order(order)) => self.order(now, stream, &order)?,
            Some(from_coordinator::Message::Refusal(refusal)) => {
                debug!(
                    events = refusal.count, detail = %shortened(&refusal.detail),
                    "the coordinator refused events"
                );
                let count = u64::from(refusal.count);
                self.exchange.update_view(|view| view.refused_events += count);
            }
            Some(from_coordinator::Message::SnapshotWanted(_)) => stream.snapshot_wanted = true,
            // The coordinator is alive and has considered all reports that may change its order.
            Some(from_coordinator::Message::Heartbeat(_)) if stream.is_up_to_date() => {
                self.exchange.confirm(now);
            }
            Some(from_coordinator::Message::Heartbeat(_)) => {}
            Some(from_coordinator::Message::Standing(standing)) => self.stand(stream, standing),
            Some(from_coordinator::Message::Goodbye(last)) => return Ok(Some(last)),
            Some(from_coordinator::Message::Welcome(_)) => {
                return Err("it welcomed this host twice".into());
            }
            // Messages of a later release are ignored.
            None => {}
        }
        Ok(None)
    }

    fn stand(&mut self, stream: &mut StreamState, standing: v1::Standing) {
        let drained = standing.drained;
        if self.exchange.view().drained != drained {
            info!(drained, "an operator drained this host or put it back into the cluster order");
        }
        self.exchange.update_view(|view| view.drained = drained);
        if drained {
            // A drained host drops the order at once, before the order's age limit.
            self.assembler.forget();
            stream.ordered = false;
            self.exchange.withdraw(&self.mailbox);
        }
    }

    fn order(
        &mut self,
        now: Time,
        stream: &mut StreamState,
        order: &v1::Order,
    ) -> Result<(), String> {
        let before = self.assembler.content();
        let assembled = self.assembler.take(order);
        let refused = self.assembler.refused();
        self.exchange.update_view(|view| {
            (view.stale_orders, view.broken_orders) = (refused.stale, refused.broken);
        });
        match assembled {
            Assembled::Incomplete => {}
            Assembled::Reply(message) => stream.reply = Some(message),
            Assembled::EndStream(problem) => return Err(problem),
            Assembled::Whole { order, considered } => {
                let is_new = !stream.ordered || !Arc::ptr_eq(&before, &order.content);
                stream.ordered = true;
                stream.considered = considered;
                stream.ack = Some(order.epoch);
                self.exchange.update_view(|view| {
                    view.term = Some(order.epoch.term);
                    view.sequence = Some(order.epoch.sequence);
                    view.orders += 1;
                });
                self.exchange.set_order(now, order, is_new, &self.mailbox);
            }
        }
        Ok(())
    }
}

const fn say(message: Message) -> FromDaemon {
    FromDaemon { message: Some(message) }
}
