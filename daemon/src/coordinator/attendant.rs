//! The running task of the stream. A daemon that stops waits for the task's goodbye.

use std::sync::Arc;

use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Duration, timeout};

use super::exchange::CoordinatorExchange;
use super::stream::StreamTask;

/// Longest wait for the task. It is longer than the stream itself waits for the coordinator.
const END_MAX: Duration = Duration::from_secs(1);

/// The task of the stream, if there is a coordinator. Dropping it leaves the task running.
#[derive(Debug)]
pub struct Attendant {
    running: Option<RunningStream>,
}

#[derive(Debug)]
struct RunningStream {
    stop: Arc<Notify>,
    exchange: Arc<CoordinatorExchange>,
    task: JoinHandle<()>,
}

impl Attendant {
    /// Starts the task on tokio's runtime.
    pub fn start(stream: Option<StreamTask>) -> Self {
        let running = stream.map(|stream| {
            let (stop, exchange) = (stream.stop(), stream.exchange());
            RunningStream { stop, exchange, task: tokio::spawn(stream.attend()) }
        });
        Self { running }
    }

    /// Makes the stream say goodbye if the daemon stops in order. Otherwise ends the task at once,
    /// and the coordinator counts this host as lost.
    pub fn leave(self, in_order: bool) -> Self {
        let Some(running) = self.running else { return self };
        // Clients wait for the next daemon meanwhile, so the goodbye is awaited only while there is
        // a stream on which it can come.
        if in_order && running.exchange.view().connected {
            running.stop.notify_one();
            return Self { running: Some(running) };
        }
        running.task.abort();
        Self { running: None }
    }

    /// Waits for the end of the stream, and ends the task.
    pub async fn end(self) {
        if let Some(mut running) = self.running {
            let _ = timeout(END_MAX, &mut running.task).await;
            running.task.abort();
        }
    }
}
