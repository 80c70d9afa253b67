//! Why a stream ends, when to connect again, and the goodbye of a daemon that stops.

use std::time::Duration;

use laxity_wire::v1::{
    FromCoordinator, FromDaemon, Goodbye, GoodbyeReason, Leaving, from_daemon::Message,
};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tonic::Streaming;

use super::channel;
use crate::config::CoordinatorConfig;

/// Longest text of a coordinator that is shown, in characters.
const TEXT_MAX: usize = 300;
/// Longest time that the end of the daemon waits for the coordinator. Clients may wait for the next
/// daemon meanwhile.
const LEAVE_MAX: Duration = Duration::from_millis(100);

/// Why a stream ended.
#[derive(Debug, Default)]
pub struct StreamEnd {
    pub problem: String,
    /// Whether an order came, so that the stream was useful.
    pub(super) ordered: bool,
    /// Shortest wait before the next attempt.
    pub(super) retry_after: Duration,
    /// The coordinator to try instead.
    pub(super) leader: Option<String>,
    /// Why this daemon ended the stream, if the coordinator did not.
    pub(super) own: Option<OwnEnd>,
}

/// Why a daemon ends a stream that is in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OwnEnd {
    /// The Hello no longer says which NICs this host has.
    NicsChanged,
    /// The daemon was told to stop, and says goodbye.
    Stops,
}

impl From<String> for StreamEnd {
    fn from(problem: String) -> Self {
        Self::because(problem)
    }
}

impl StreamEnd {
    pub(super) fn because(problem: impl Into<String>) -> Self {
        Self { problem: problem.into(), ..Self::default() }
    }

    /// Converts a goodbye to the rules for coming back.
    pub(super) fn parted(last: &Goodbye, url: &str, config: &CoordinatorConfig) -> Self {
        let most = Duration::from(config.backoff_max);
        let detail = shortened(&last.detail);
        let leader = match last.reason() {
            GoodbyeReason::NotLeader => channel::redirection(url, &last.leader, config),
            _ => None,
        };
        Self {
            problem: format!("it said goodbye ({:?}): {detail}", last.reason()),
            retry_after: match last.reason() {
                GoodbyeReason::Incompatible => most,
                _ if leader.is_some() => Duration::ZERO,
                _ => Duration::from_nanos(last.retry_after_ns).min(most),
            },
            leader,
            ..Self::default()
        }
    }
}

/// Returns a wait before the next attempt from the upper half of `range`, and doubles the range, up
/// to `most`. With random numbers, not all hosts of a cluster connect at once after a failover.
pub(super) fn back_off(range: &mut Duration, most: Duration, random: u64) -> Duration {
    let half = *range / 2;
    *range = range.saturating_mul(2).min(most);
    half + half.mul_f64(random as f64 / u64::MAX as f64)
}

pub(super) fn shortened(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(TEXT_MAX).collect()
}

/// Tells the coordinator that this host leaves on purpose, and waits for a moment until the
/// coordinator has ended the stream. A coordinator that does not know this message takes it for a
/// sign of life.
pub(super) async fn leave(
    outbound: mpsc::Sender<FromDaemon>,
    inbound: &mut Streaming<FromCoordinator>,
) {
    let told = async {
        let leaving = FromDaemon { message: Some(Message::Leaving(Leaving {})) };
        if outbound.send(leaving).await.is_ok() {
            // The stream ends in order only if this daemon's half ends first.
            drop(outbound);
            while let Ok(Some(_)) = inbound.message().await {}
        }
    };
    let _ = timeout(LEAVE_MAX, told).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_in_the_upper_half_of_a_range_that_doubles_up_to_the_most() {
        let ms = Duration::from_millis;
        let mut range = ms(100);
        let waits = [u64::MAX, 0, u64::MAX, 0, u64::MAX, 0]
            .map(|random| back_off(&mut range, ms(1000), random));
        assert_eq!(waits, [100, 100, 400, 400, 1000, 500].map(ms));
    }
}
