//! The running task of the stream. A daemon that stops waits for the task's goodbye.

use std::sync::Arc;

use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Duration, timeout};

use super::exchange::CoordinatorExchange;
use super::stream::StreamTask;

/// Longest wait for the task. It is longer than the stream itself waits for the coordinator.
const END_MAX: Duration = Duration::from_secs(1);

/// The running task of the stream. Dropping it leaves the task running.
#[derive(Debug)]
pub struct Attendant {
    stop: Arc<Notify>,
    exchange: Arc<CoordinatorExchange>,
    task: JoinHandle<()>,
}

impl Attendant {
    /// Starts the task on tokio's runtime.
    pub fn start(stream: StreamTask) -> Self {
        let (stop, exchange) = (stream.stop(), stream.exchange());
        Self { stop, exchange, task: tokio::spawn(stream.attend()) }
    }

    /// Makes the stream say goodbye if the daemon stops in order. Otherwise ends the task at once,
    /// and the coordinator counts this host as lost.
    pub fn leave(self, in_order: bool) -> Option<Self> {
        // Clients wait for the next daemon meanwhile, so the goodbye is awaited only while there is
        // a stream on which it can come.
        if in_order && self.exchange.view().connected {
            self.stop.notify_one();
            return Some(self);
        }
        self.task.abort();
        None
    }

    /// Waits for the end of the stream, if there is one, and ends the task.
    pub async fn end(running: Option<Self>) {
        if let Some(Self { mut task, .. }) = running {
            let _ = timeout(END_MAX, &mut task).await;
            task.abort();
        }
    }
}
