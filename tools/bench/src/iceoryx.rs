//! The established zero-copy middleware in the same harness: an iceoryx2 round trip, by
//! publish-subscribe (two services, one each way) and by request-response. Both sides poll.

use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use iceoryx2::port::publisher::Publisher;
use iceoryx2::port::subscriber::Subscriber;
use iceoryx2::prelude::*;

use crate::clock::Clock;
use crate::peer::Peer;
use crate::sample::{Percentiles, Recorder};

/// Answers on the reply topic what it reads on the request topic.
pub(crate) const PUBSUB_ROLE: &str = "iceoryx-pubsub";
/// Serves requests.
pub(crate) const SERVER_ROLE: &str = "iceoryx-server";

/// A slot's worth of payload. The first word is the sequence; `STOP` asks the peer to end.
type Payload = [u64; 8];
const STOP: u64 = u64::MAX;
const PATIENCE: Duration = Duration::from_secs(10);

type Fallible<T> = anyhow::Result<T>;

fn node() -> Fallible<Node<ipc::Service>> {
    set_log_level(LogLevel::Error);
    NodeBuilder::new()
        .create()
        .map_err(|e| anyhow!("iceoryx2 node: {e:?}"))
}

fn topic(name: &str, part: &str) -> Fallible<ServiceName> {
    format!("laxity-bench/{name}/{part}")
        .as_str()
        .try_into()
        .map_err(|e| anyhow!("{e:?}"))
}

struct PubSub {
    // Ports live no longer than their node; fields drop in order.
    publisher: Publisher<ipc::Service, Payload, ()>,
    subscriber: Subscriber<ipc::Service, Payload, ()>,
    _node: Node<ipc::Service>,
}

impl PubSub {
    fn open(name: &str, outgoing: &str, incoming: &str) -> Fallible<Self> {
        let node = node()?;
        let open = |part: &str| {
            node.service_builder(&topic(name, part)?)
                .publish_subscribe::<Payload>()
                .open_or_create()
                .map_err(|e| anyhow!("iceoryx2 service: {e:?}"))
        };
        let publisher = open(outgoing)?
            .publisher_builder()
            .create()
            .map_err(|e| anyhow!("iceoryx2 publisher: {e:?}"))?;
        let subscriber = open(incoming)?
            .subscriber_builder()
            .create()
            .map_err(|e| anyhow!("iceoryx2 subscriber: {e:?}"))?;
        Ok(Self {
            publisher,
            subscriber,
            _node: node,
        })
    }

    #[inline(always)]
    fn send(&self, sequence: u64) -> Fallible<()> {
        let sample = self
            .publisher
            .loan_uninit()
            .map_err(|e| anyhow!("loan: {e:?}"))?;
        let payload = [sequence, 1, 2, 3, 4, 5, 6, 7];
        sample
            .write_payload(payload)
            .send()
            .map_err(|e| anyhow!("send: {e:?}"))?;
        Ok(())
    }

    #[inline(always)]
    fn receive(&self) -> Fallible<Option<u64>> {
        let sample = self
            .subscriber
            .receive()
            .map_err(|e| anyhow!("receive: {e:?}"))?;
        Ok(sample.map(|sample| sample.payload()[0]))
    }
}

/// One repetition by publish-subscribe.
pub(crate) fn publish_subscribe(
    clock: Clock,
    far: usize,
    round_trips: usize,
) -> Fallible<Percentiles> {
    let name = format!("{}-{}", std::process::id(), clock.begin());
    let ports = PubSub::open(&name, "request", "reply")?;
    let peer = Peer::spawn(PUBSUB_ROLE, far, None, &["--name", &name])?;
    // Until the peer has subscribed, what is published reaches nobody: repeat the first message.
    let begin = Instant::now();
    ports.send(0)?;
    while ports.receive()? != Some(0) {
        if begin.elapsed() > PATIENCE {
            bail!("the iceoryx2 peer did not answer");
        }
        std::thread::sleep(Duration::from_millis(1));
        ports.send(0)?;
    }
    std::thread::sleep(Duration::from_millis(2));
    while ports.receive()?.is_some() {}

    let mut recorder = Recorder::with_room_for(round_trips);
    let warm_up = (round_trips / 10) as u64;
    for sequence in 1..=warm_up + round_trips as u64 {
        let begin = clock.begin();
        ports.send(sequence)?;
        while ports.receive()? != Some(sequence) {}
        let end = clock.end();
        if sequence > warm_up {
            recorder.note(begin, end);
        }
    }
    ports.send(STOP)?;
    peer.join(PATIENCE).context("stop the iceoryx2 peer")?;
    Ok(recorder.finish(clock))
}

/// One repetition by request-response.
pub(crate) fn request_response(
    clock: Clock,
    far: usize,
    round_trips: usize,
) -> Fallible<Percentiles> {
    let name = format!("{}-{}", std::process::id(), clock.begin());
    let node = node()?;
    let service = node
        .service_builder(&topic(&name, "call")?)
        .request_response::<Payload, Payload>()
        .open_or_create()
        .map_err(|e| anyhow!("iceoryx2 service: {e:?}"))?;
    let client = service
        .client_builder()
        .create()
        .map_err(|e| anyhow!("iceoryx2 client: {e:?}"))?;
    let peer = Peer::spawn(SERVER_ROLE, far, None, &["--name", &name])?;
    let call = |sequence: u64, patience: Option<Duration>| -> Fallible<bool> {
        let request = client.loan_uninit().map_err(|e| anyhow!("loan: {e:?}"))?;
        let pending = request
            .write_payload([sequence, 1, 2, 3, 4, 5, 6, 7])
            .send()
            .map_err(|e| anyhow!("send: {e:?}"))?;
        let begin = patience.map(|patience| (Instant::now(), patience));
        loop {
            if pending
                .receive()
                .map_err(|e| anyhow!("receive: {e:?}"))?
                .is_some()
            {
                return Ok(true);
            }
            if begin.is_some_and(|(begin, patience)| begin.elapsed() > patience) {
                return Ok(false);
            }
        }
    };
    let begin = Instant::now();
    while !call(0, Some(Duration::from_millis(5)))? {
        if begin.elapsed() > PATIENCE {
            bail!("the iceoryx2 server did not answer");
        }
    }
    let mut recorder = Recorder::with_room_for(round_trips);
    let warm_up = (round_trips / 10) as u64;
    for sequence in 1..=warm_up + round_trips as u64 {
        let begin = clock.begin();
        call(sequence, None)?;
        let end = clock.end();
        if sequence > warm_up {
            recorder.note(begin, end);
        }
    }
    call(STOP, Some(Duration::from_millis(100)))?;
    peer.join(PATIENCE).context("stop the iceoryx2 server")?;
    Ok(recorder.finish(clock))
}

/// The peer's side of publish-subscribe.
pub(crate) fn serve_publish_subscribe(name: &str) -> Fallible<()> {
    let ports = PubSub::open(name, "reply", "request")?;
    loop {
        match ports.receive()? {
            Some(STOP) => return Ok(()),
            Some(sequence) => ports.send(sequence)?,
            None => {}
        }
    }
}

/// The peer's side of request-response.
pub(crate) fn serve_request_response(name: &str) -> Fallible<()> {
    let node = node()?;
    let server = node
        .service_builder(&topic(name, "call")?)
        .request_response::<Payload, Payload>()
        .open_or_create()
        .map_err(|e| anyhow!("iceoryx2 service: {e:?}"))?
        .server_builder()
        .create()
        .map_err(|e| anyhow!("iceoryx2 server: {e:?}"))?;
    loop {
        let Some(request) = server.receive().map_err(|e| anyhow!("receive: {e:?}"))? else {
            continue;
        };
        let payload = *request.payload();
        let response = request.loan_uninit().map_err(|e| anyhow!("loan: {e:?}"))?;
        response
            .write_payload(payload)
            .send()
            .map_err(|e| anyhow!("respond: {e:?}"))?;
        if payload[0] == STOP {
            return Ok(());
        }
    }
}
