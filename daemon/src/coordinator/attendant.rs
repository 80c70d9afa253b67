//! The running task of the stream, which a daemon that stops lets say so.

use std::sync::Arc;

use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Duration, timeout};

use super::stream::StreamTask;

/// Longest wait for the task. It is longer than the stream itself waits for the coordinator.
const END_MAX: Duration = Duration::from_secs(1);

/// The task of the stream. Dropping it leaves the task running.
#[derive(Debug)]
pub struct Attendant {
    stop: Arc<Notify>,
    task: JoinHandle<()>,
}

impl Attendant {
    /// Starts the task on tokio's runtime.
    pub fn start(stream: StreamTask) -> Self {
        Self { stop: stream.stop(), task: tokio::spawn(stream.attend()) }
    }

    /// Tells the coordinator that this host leaves, if there is a stream.
    pub fn leave(&self) {
        self.stop.notify_one();
    }

    /// Waits for the end of the stream after [`Self::leave`], and ends the task.
    pub async fn end(mut self) {
        let _ = timeout(END_MAX, &mut self.task).await;
        self.task.abort();
    }
}
