//! One daemon's stream: a task that reads and a task that writes.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use laxity_wire::v1::coordination_server::Coordination;
use laxity_wire::v1::{
    self, FromCoordinator, FromDaemon, Goodbye, GoodbyeReason, Heartbeat, Hello, NackReason,
    from_coordinator::Message, from_daemon,
};
use tokio::sync::{Notify, mpsc, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use tracing::{debug, info, warn};

use super::access::{Peer, Served};
use crate::cluster::refusal::goodbye;
use crate::cluster::{Cluster, HostId, Taken};
use crate::lead::Lead;
use crate::pace::Pace;
use crate::shared::Shared;

/// How long a new stream may take to say hello.
const HELLO_MAX: Duration = Duration::from_secs(5);
/// How long a goodbye may take to leave.
const GOODBYE_MAX: Duration = Duration::from_secs(1);
/// Longest text of a daemon that is logged.
const TEXT_MAX: usize = 300;
/// Heartbeats of silence after which a daemon is taken for dead.
const SILENCE_HEARTBEATS: u32 = 3;

type Sender = mpsc::Sender<Result<FromCoordinator, Status>>;

/// `laxity.v1.Coordination`.
pub(crate) struct Service {
    shared: Arc<Shared>,
}

impl Service {
    pub(crate) const fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }
}

/// What goes onto the connection. An order passes only while this coordinator leads: the last place
/// to ask.
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
impl Coordination for Service {
    type AttendStream = Outbound;

    async fn attend(
        &self,
        request: Request<Streaming<FromDaemon>>,
    ) -> Result<Response<Self::AttendStream>, Status> {
        let peer = Peer::of(&request);
        let served = Served::of(&request);
        // One: what waits longer waits in the cluster, where it is merged with what follows.
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
    FromCoordinator {
        message: Some(message),
    }
}

fn not_leader(shared: &Shared) -> Goodbye {
    let leader = shared.lead.leader();
    let detail = if leader.is_empty() {
        "this coordinator does not lead, and no leader is known".to_owned()
    } else {
        format!("this coordinator does not lead; {leader} does")
    };
    Goodbye {
        leader,
        ..goodbye(GoodbyeReason::NotLeader, detail)
    }
}

async fn serve(
    shared: Arc<Shared>,
    (peer, served): (Peer, Served),
    mut inbound: Streaming<FromDaemon>,
    sender: Sender,
) {
    let hello = match tokio::time::timeout(HELLO_MAX, inbound.message()).await {
        Ok(Ok(Some(FromDaemon {
            message: Some(from_daemon::Message::Hello(hello)),
        }))) => hello,
        Ok(Ok(Some(_))) => {
            let detail = "the first message of a stream is Hello";
            return part(&sender, goodbye(GoodbyeReason::Protocol, detail)).await;
        }
        Ok(Ok(None) | Err(_)) | Err(_) => return,
    };
    // A name that can't be one is as long as its sender likes: it goes no further, not even to the
    // log.
    if let Err(problem) = Cluster::check_name(&hello.host) {
        return part(&sender, goodbye(GoodbyeReason::Protocol, problem)).await;
    }
    if let Err(status) = peer.may_report(&hello.host) {
        let _ = sender.send(Err(status)).await;
        return;
    }
    // Before the question, so that no change is missed.
    let era = shared.lead.era();
    if !shared.lead.holds() {
        return part(&sender, not_leader(&shared)).await;
    }
    let now = shared.now();
    let attended = shared.cluster().attend(now, &hello);
    let (id, stream) = match attended {
        Ok(attended) => attended,
        Err(refused) => {
            warn!(host = %hello.host, detail = %refused.detail, "a daemon was not let in");
            return part(&sender, refused).await;
        }
    };
    // What was said so far, anybody can say.
    let _serving = served.begin();
    debug!(host = %hello.host, software = %shortened(&hello.software), "a daemon attends");
    tell_watchers(&shared, &hello);
    let woken = Arc::new(Notify::new());
    woken.notify_one();
    shared.writers().insert(stream, Arc::clone(&woken));
    shared.stir();
    let writer = tokio::spawn(write(
        Arc::clone(&shared),
        (id, stream),
        sender.clone(),
        woken,
    ));
    let last = read(&shared, (id, stream), &hello, &mut inbound, era).await;
    writer.abort();
    // The writer may be in the middle of an order: its receiver drops what has no end.
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

async fn part(sender: &Sender, last: Goodbye) {
    let last = sender.send(Ok(message(Message::Goodbye(last))));
    // One that does not read learns of it by the end of the stream.
    let _ = tokio::time::timeout(GOODBYE_MAX, last).await;
}

fn tell_watchers(shared: &Shared, hello: &Hello) {
    // As it is: a stream that ends may have been replaced by another.
    let changed = shared.cluster().host_changed(&hello.host);
    shared.tell_watchers(v1::watch_event::Event::Host(changed));
}

/// What a peer says for people, for the log: one line, and not a long one.
fn shortened(text: &str) -> String {
    let shown = text.chars().filter(|c| !c.is_control());
    shown.take(TEXT_MAX).collect()
}

/// Reads until the stream ends. Gives what to say last, if anything.
async fn read(
    shared: &Shared,
    (id, stream): (HostId, u64),
    hello: &Hello,
    inbound: &mut Streaming<FromDaemon>,
    mut era: watch::Receiver<u64>,
) -> Option<Goodbye> {
    let mut pace = Pace::new();
    let mut fenced = false;
    let mut stopping = shared.stopping.clone();
    // Of its own, so that the other one still sees what this one has seen.
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
                // Said at the head of the loop.
                _ = stopping.wait_for(|stop| *stop) => {}
                _ = again.changed() => {}
            }
        }
    }
}

/// Takes one message of a stream. Gives what to say last, if the stream has to end. `fenced` says
/// whether the log has a line on a later term already.
fn take(
    shared: &Shared,
    (id, stream): (HostId, u64),
    hello: &Hello,
    message: FromDaemon,
    fenced: &mut bool,
) -> Option<Goodbye> {
    let now = shared.now();
    // The daemon has come back, and its old stream must not stay for as long as it sends
    // heartbeats.
    if !shared.cluster().speaks(id, stream) {
        let detail = "another stream speaks for this host";
        return Some(goodbye(GoodbyeReason::Replaced, detail));
    }
    match message.message {
        Some(from_daemon::Message::Report(report)) => {
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
        Some(from_daemon::Message::Hello(_)) => {
            let detail = "a stream has one Hello";
            return Some(goodbye(GoodbyeReason::Protocol, detail));
        }
        // Of a kind that a later release knows: a sign of life.
        Some(from_daemon::Message::Heartbeat(_)) | None => {
            shared.cluster().heard(now, id, stream);
        }
    }
    None
}

/// Sends what waits for the host whenever there is room for it, and signs of life.
async fn write(
    shared: Arc<Shared>,
    (id, stream): (HostId, u64),
    sender: Sender,
    woken: Arc<Notify>,
) {
    loop {
        let heartbeat = Duration::from(shared.config().heartbeat);
        let woken = tokio::time::timeout(heartbeat, woken.notified()).await;
        // Room first: what is taken is the newest at the time it is sent.
        let Ok(mut room) = sender.reserve().await else {
            return;
        };
        if !shared.lead.holds() {
            return;
        }
        let now = shared.now();
        let taken = shared.cluster().take(now, id, stream);
        let frames = match taken {
            Taken::Frames(frames) => frames,
            Taken::Replaced => {
                let detail = "another stream speaks for this host";
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
            room = match sender.reserve().await {
                Ok(room) => room,
                Err(_) => return,
            };
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
