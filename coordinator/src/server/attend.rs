//! The stream of one daemon: one task reads and one task writes.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use laxity_wire::v1::coordination_server::Coordination;
use laxity_wire::v1::{
    self, FromCoordinator, FromDaemon, Goodbye, GoodbyeReason, Heartbeat, Hello, NackReason,
    Report, event::Event, from_coordinator::Message, from_daemon,
};
use tokio::sync::{Notify, mpsc, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use tracing::{debug, info, warn};

use super::access::{ProvenPeer, Served};
use crate::cluster::attend::TOO_OFTEN;
use crate::cluster::refusal::goodbye;
use crate::cluster::{Cluster, HostId, Taken};
use crate::lead::Lead;
use crate::pace::Pace;
use crate::shared::Shared;

/// Longest wait for the Hello of a new stream.
const HELLO_MAX: Duration = Duration::from_secs(5);
const GOODBYE_MAX: Duration = Duration::from_secs(1);
/// Longest text of a daemon that is logged, in characters.
const TEXT_MAX: usize = 300;
/// Heartbeat periods of silence after which a daemon is assumed dead.
const SILENCE_HEARTBEATS: u32 = 3;

type FrameSender = mpsc::Sender<Result<FromCoordinator, Status>>;

/// The service `laxity.v1.Coordination`.
pub(crate) struct CoordinationService {
    pub(super) shared: Arc<Shared>,
}

/// The messages that go onto the connection. This is the last check that orders pass only while
/// this coordinator leads.
pub(crate) struct Outbound {
    frames: ReceiverStream<Result<FromCoordinator, Status>>,
    lead: Arc<Lead>,
}

impl Stream for Outbound {
    type Item = Result<FromCoordinator, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let next = Pin::new(&mut self.frames).poll_next(cx);
            if let Poll::Ready(Some(Ok(frame))) = &next
                && matches!(frame.message, Some(Message::Order(_)))
                && !self.lead.holds()
            {
                continue;
            }
            return next;
        }
    }
}

#[tonic::async_trait]
impl Coordination for CoordinationService {
    type AttendStream = Outbound;

    async fn attend(
        &self,
        request: Request<Streaming<FromDaemon>>,
    ) -> Result<Response<Self::AttendStream>, Status> {
        let peer = ProvenPeer::of(&request);
        let served = Served::of(&request);
        // The channel holds one message. Further ones wait in the cluster, where later ones replace
        // them.
        let (sender, receiver) = mpsc::channel(1);
        let shared = Arc::clone(&self.shared);
        tokio::spawn(serve(shared, (peer, served), request.into_inner(), sender));
        Ok(Response::new(Outbound {
            frames: ReceiverStream::new(receiver),
            lead: Arc::clone(&self.shared.lead),
        }))
    }
}

fn message(message: Message) -> FromCoordinator {
    FromCoordinator { message: Some(message) }
}

fn not_leader(shared: &Shared) -> Goodbye {
    let leader = shared.lead.leader();
    let detail = if leader.is_empty() {
        "this coordinator does not lead, and no leader is known".to_owned()
    } else {
        format!("this coordinator does not lead; {leader} does")
    };
    Goodbye { leader, ..goodbye(GoodbyeReason::NotLeader, detail) }
}

async fn serve(
    shared: Arc<Shared>,
    (peer, served): (ProvenPeer, Served),
    mut inbound: Streaming<FromDaemon>,
    sender: FrameSender,
) {
    let hello = match tokio::time::timeout(HELLO_MAX, inbound.message()).await {
        Ok(Ok(Some(FromDaemon { message: Some(from_daemon::Message::Hello(hello)) }))) => hello,
        Ok(Ok(Some(_))) => {
            let detail = "the first message of a stream is Hello";
            return part(&sender, goodbye(GoodbyeReason::Protocol, detail)).await;
        }
        Ok(Ok(None) | Err(_)) | Err(_) => return,
    };
    // An invalid name may be very long, so it is not even logged.
    if let Err(problem) = Cluster::check_name(&hello.host) {
        return part(&sender, goodbye(GoodbyeReason::Protocol, problem)).await;
    }
    if let Err(status) = peer.may_report(&hello.host) {
        let _ = sender.send(Err(status)).await;
        return;
    }
    // Subscribe before the check, so that no change of leadership is missed.
    let era = shared.lead.era();
    if !shared.lead.holds() {
        return part(&sender, not_leader(&shared)).await;
    }
    let now = shared.now();
    let attended = shared.cluster().attend(now, &hello);
    let (id, stream) = match attended {
        Ok(attended) => attended,
        Err(refused) => {
            let detail = &refused.detail;
            // A host that tries without end must not fill the log.
            match detail == TOO_OFTEN {
                true => debug!(host = %hello.host, %detail, "a daemon was not let in"),
                false => warn!(host = %hello.host, %detail, "a daemon was not let in"),
            }
            return part(&sender, refused).await;
        }
    };
    // Any peer can send the messages up to here, so only now the connection stops being a visitor.
    let _serving = served.begin();
    debug!(host = %hello.host, software = %shortened(&hello.software), "a daemon attends");
    tell_watchers(&shared, &hello);
    let woken = Arc::new(Notify::new());
    woken.notify_one();
    shared.writers().insert(stream, Arc::clone(&woken));
    shared.stir();
    let writer = tokio::spawn(write(Arc::clone(&shared), (id, stream), sender.clone(), woken));
    let last = read(&shared, (id, stream), &hello, &mut inbound, era).await;
    writer.abort();
    // The writer may stop within an order. The daemon drops an order without its last piece.
    let _ = writer.await;
    shared.writers().remove(&stream);
    let now = shared.now();
    shared.cluster().detach(now, id, stream);
    shared.stir();
    tell_watchers(&shared, &hello);
    if let Some(last) = last {
        info!(host = %hello.host, detail = %last.detail, "a daemon's stream was ended");
        part(&sender, last).await;
    }
}

async fn part(sender: &FrameSender, last: Goodbye) {
    let last = sender.send(Ok(message(Message::Goodbye(last))));
    // A peer that does not read sees the end of the stream instead.
    let _ = tokio::time::timeout(GOODBYE_MAX, last).await;
}

fn tell_watchers(shared: &Shared, hello: &Hello) {
    // This reads the current state, since another stream may have replaced the one that ends.
    let changed = shared.cluster().host_changed(&hello.host);
    shared.tell_watchers(v1::watch_event::Event::Host(changed));
}

/// Returns a peer's text as one short line for the log.
fn shortened(text: &str) -> String {
    let shown = text.chars().filter(|c| !c.is_control());
    shown.take(TEXT_MAX).collect()
}

/// Reads until the stream ends. Returns the goodbye to send, if any.
async fn read(
    shared: &Shared,
    (id, stream): (HostId, u64),
    hello: &Hello,
    inbound: &mut Streaming<FromDaemon>,
    mut era: watch::Receiver<u64>,
) -> Option<Goodbye> {
    let mut pace = Pace::default();
    let mut fenced = false;
    let mut stopping = shared.stopping.clone();
    // A second receiver, so that the first one still sees a change that this one has seen.
    let mut again = era.clone();
    loop {
        let config = shared.config();
        let silence_max = Duration::from(config.heartbeat) * SILENCE_HEARTBEATS;
        let read = tokio::select! {
            read = tokio::time::timeout(silence_max, inbound.message()) => read,
            _ = stopping.wait_for(|stop| *stop) => {
                return Some(goodbye(GoodbyeReason::Stopping, "the coordinator stops"));
            }
            _ = era.changed() => return Some(not_leader(shared)),
        };
        let message = match read {
            Ok(Ok(Some(message))) => message,
            Ok(Ok(None)) => return None,
            Ok(Err(status)) => {
                debug!(host = %hello.host, %status, "a daemon's stream broke");
                let detail = status.message().to_owned();
                return Some(goodbye(GoodbyeReason::Protocol, detail));
            }
            Err(_) => {
                let detail = format!("nothing was heard for {silence_max:?}");
                return Some(goodbye(GoodbyeReason::Protocol, detail));
            }
        };
        if let Some(last) = take(shared, (id, stream), hello, message, &mut fenced) {
            return Some(last);
        }
        let events = shared.cluster().take_work().max(1);
        let wait = pace.took(shared.now(), events, config.limits.events_per_s_max);
        if wait.0 > 0 {
            tokio::select! {
                () = tokio::time::sleep(Duration::from_nanos(wait.0)) => {}
                // The head of the loop handles these.
                _ = stopping.wait_for(|stop| *stop) => {}
                _ = again.changed() => {}
            }
        }
    }
}

/// Fills in how far the clock of a host is ahead of this one.
fn compare_clocks(report: &mut Report, now: SystemTime) {
    let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let own = i64::try_from(since.as_nanos()).unwrap_or(i64::MAX);
    for event in &mut report.events {
        if let Some(Event::HostSettings(said)) = &mut event.event {
            let theirs = i64::try_from(said.clock_ns).unwrap_or(i64::MAX);
            said.clock_ahead_ns = if theirs == 0 { 0 } else { theirs.saturating_sub(own) };
        }
    }
}

/// Processes one message of a stream. Returns the goodbye to send if the stream has to end.
/// `fenced` is set once the log has a line about a later term.
fn take(
    shared: &Shared,
    (id, stream): (HostId, u64),
    hello: &Hello,
    message: FromDaemon,
    fenced: &mut bool,
) -> Option<Goodbye> {
    let now = shared.now();
    // The daemon has a new stream, so its old one must end although it sends heartbeats.
    if !shared.cluster().speaks(id, stream) {
        let detail = "another stream of this host has replaced this one";
        return Some(goodbye(GoodbyeReason::Replaced, detail));
    }
    match message.message {
        Some(from_daemon::Message::Report(mut report)) => {
            compare_clocks(&mut report, SystemTime::now());
            let taken = shared.cluster().report(now, id, stream, report);
            shared.stir();
            if let Err(broken) = taken {
                return Some(broken);
            }
        }
        Some(from_daemon::Message::Ack(ack)) => {
            shared.cluster().acknowledged(id, stream, ack.epoch);
        }
        Some(from_daemon::Message::Nack(nack)) => {
            if nack.reason() == NackReason::Fenced && !core::mem::replace(fenced, true) {
                warn!(
                    host = %hello.host, detail = %shortened(&nack.detail),
                    "a daemon has seen orders of a later term: another coordinator leads"
                );
            }
            shared.cluster().resync(id, stream);
            shared.stir();
        }
        Some(from_daemon::Message::Resync(_)) => {
            shared.cluster().resync(id, stream);
            shared.stir();
        }
        Some(from_daemon::Message::Leaving(_)) => {
            info!(host = %hello.host, "a daemon stops");
            shared.cluster().leaves(now, id, stream);
        }
        Some(from_daemon::Message::Hello(_)) => {
            let detail = "a stream has one Hello";
            return Some(goodbye(GoodbyeReason::Protocol, detail));
        }
        // A later release may send other messages. They count as signs of life.
        Some(from_daemon::Message::Heartbeat(_)) | None => {
            shared.cluster().heard(now, id, stream);
        }
    }
    None
}

/// Sends waiting messages when the connection has room, and heartbeats if there are none.
async fn write(
    shared: Arc<Shared>,
    (id, stream): (HostId, u64),
    sender: FrameSender,
    woken: Arc<Notify>,
) {
    loop {
        let heartbeat = Duration::from(shared.config().heartbeat);
        let woken = tokio::time::timeout(heartbeat, woken.notified()).await;
        // Reserve room before taking messages, so that these are the newest when they are sent.
        let Ok(room) = sender.reserve().await else { return };
        if !shared.lead.holds() {
            return;
        }
        let taken = shared.cluster().take(id, stream);
        let frames = match taken {
            Taken::Frames(frames) => frames,
            Taken::Replaced => {
                let detail = "another stream of this host has replaced this one";
                let last = goodbye(GoodbyeReason::Replaced, detail);
                return room.send(Ok(message(Message::Goodbye(last))));
            }
        };
        let mut frames = frames.into_iter();
        match frames.next() {
            Some(frame) => room.send(Ok(frame)),
            None if woken.is_err() => room.send(Ok(message(Message::Heartbeat(Heartbeat {})))),
            None => continue,
        }
        for frame in frames {
            let Ok(room) = sender.reserve().await else { return };
            room.send(Ok(frame));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_daemon_says_for_people_is_one_short_line_of_the_log() {
        let shown = shortened(&format!("a\n\u{1b}[31mb{}", "x".repeat(1 << 20)));
        assert!(shown.starts_with("a[31mbx") && shown.len() == TEXT_MAX);
    }
}
