//! A daemon of a load: its stream, its reports and the orders that came back.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use laxity_credentials::explain::{self, SettingNames};
use laxity_wire::v1::coordination_client::CoordinationClient;
use laxity_wire::v1::{
    Event, FromCoordinator, FromDaemon, Heartbeat, Report, SnapshotPiece, event::Event as Kind,
    from_coordinator, from_daemon::Message,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;

use super::hello;

/// The reports of a daemon that no order has considered yet, and what came back.
#[derive(Debug, Default)]
pub(super) struct LoadedDaemon {
    sent: u64,
    pub(super) waiting: VecDeque<(u64, Instant)>,
    pub(super) samples_us: Vec<u32>,
    pub(super) measuring: bool,
    pub(super) ordered: bool,
    pub(super) orders: u64,
    pub(super) refusals: u64,
    pub(super) ended: Option<String>,
}

#[derive(Clone)]
pub(super) struct Daemon {
    outbound: mpsc::Sender<FromDaemon>,
    book: Arc<Mutex<LoadedDaemon>>,
}

impl Daemon {
    pub(super) fn book(&self) -> MutexGuard<'_, LoadedDaemon> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) async fn report(&self, snapshot: SnapshotPiece, events: Vec<Kind>) {
        let sequence = {
            let mut book = self.book();
            book.sent += 1;
            let sequence = book.sent;
            if book.measuring {
                book.waiting.push_back((sequence, Instant::now()));
            }
            sequence
        };
        let events = events.into_iter().map(|event| Event { event: Some(event) });
        let report = Report { sequence, snapshot: snapshot as i32, events: events.collect() };
        // If the stream has ended, `ended` shows it.
        let _ = self.outbound.send(say(Message::Report(report))).await;
    }

    fn heard(&self, frame: FromCoordinator) {
        let mut book = self.book();
        match frame.message {
            Some(from_coordinator::Message::Order(order)) if order.last => {
                book.ordered = true;
                book.orders += 1;
                while let Some(&(sequence, at)) = book.waiting.front()
                    && sequence <= order.considered_report
                {
                    book.waiting.pop_front();
                    let us = u32::try_from(at.elapsed().as_micros()).unwrap_or(u32::MAX);
                    book.samples_us.push(us);
                }
            }
            Some(from_coordinator::Message::Refusal(refusal)) => {
                book.refusals += u64::from(refusal.count);
            }
            Some(from_coordinator::Message::Goodbye(last)) => book.ended = Some(last.detail),
            _ => {}
        }
    }
}

fn say(message: Message) -> FromDaemon {
    FromDaemon { message: Some(message) }
}

/// Returns the text of a status: the coordinator's, or the cause if the connection broke.
fn said(status: &tonic::Status) -> String {
    match std::error::Error::source(status) {
        Some(_) => explain::cause(status, &SettingNames::OPTIONS).to_string(),
        None => status.message().to_owned(),
    }
}

pub(super) async fn attend(endpoint: &str, nth: usize) -> Result<Daemon, String> {
    let text =
        |error: tonic::transport::Error| explain::cause(&error, &SettingNames::OPTIONS).to_string();
    let connecting = Endpoint::from_shared(endpoint.to_owned()).map_err(text)?.tcp_nodelay(true);
    let channel = connecting.connect().await.map_err(text)?;
    let (outbound, messages) = mpsc::channel(64);
    let _ = outbound.send(say(Message::Hello(hello(nth)))).await;
    let mut inbound = CoordinationClient::new(channel)
        .attend(ReceiverStream::new(messages))
        .await
        .map_err(|status| said(&status))?
        .into_inner();
    let daemon = Daemon { outbound, book: Arc::default() };
    let listener = daemon.clone();
    tokio::spawn(async move {
        let ended = loop {
            match inbound.message().await {
                Ok(Some(frame)) => listener.heard(frame),
                Ok(None) => break "the stream ended".to_owned(),
                Err(status) => break said(&status),
            }
        };
        listener.book().ended.get_or_insert(ended);
    });
    let beat = daemon.outbound.clone();
    tokio::spawn(async move {
        while beat.send(say(Message::Heartbeat(Heartbeat {}))).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(900)).await;
        }
    });
    Ok(daemon)
}
