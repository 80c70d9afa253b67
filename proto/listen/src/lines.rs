//! Limits on log lines that others cause, and on repeated errors of `accept`.

use std::io;
use std::time::{Duration, Instant};

use tracing::warn;

/// A limit on how often a line is logged, with a count of omitted lines.
#[derive(Debug)]
pub struct LineLimit {
    burst: u32,
    every: Duration,
    since: Option<Instant>,
    said: u32,
    left_out: u64,
}

impl LineLimit {
    /// Allows `burst` lines in each period of `every`.
    pub const fn new(burst: u32, every: Duration) -> Self {
        Self { burst, every, since: None, said: 0, left_out: 0 }
    }

    /// Returns the number of lines omitted since the last logged line, or `None` if the line at
    /// `now` has to be omitted, too.
    pub fn take(&mut self, now: Instant) -> Option<u64> {
        let is_over = |since| now.saturating_duration_since(since) >= self.every;
        if self.since.is_none_or(is_over) {
            self.since = Some(now);
            self.said = 0;
        }
        if self.said < self.burst {
            self.said += 1;
            return Some(std::mem::take(&mut self.left_out));
        }
        self.left_out += 1;
        None
    }
}

/// Handles errors of `accept`. A lasting error, such as a lack of descriptors, must neither cause a
/// busy loop nor fill the log.
#[derive(Debug)]
pub struct AcceptErrors {
    what: &'static str,
    lines: LineLimit,
}

impl AcceptErrors {
    /// How long a listener pauses after an error.
    pub const REST: Duration = Duration::from_millis(50);

    /// Makes a handler for the listener that the log calls `what`.
    pub const fn new(what: &'static str) -> Self {
        Self { what, lines: LineLimit::new(1, Duration::from_secs(60)) }
    }

    /// Logs `error` at most once a minute, and waits for [`Self::REST`].
    pub async fn rest_after(&mut self, error: &io::Error) {
        if let Some(left_out) = self.lines.take(Instant::now()) {
            warn!(%error, left_out, "{} cannot accept a connection, and tries again", self.what);
        }
        tokio::time::sleep(Self::REST).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_the_burst_are_left_out_and_counted() {
        let (mut lines, now) = (LineLimit::new(2, Duration::from_secs(60)), Instant::now());
        assert_eq!((lines.take(now), lines.take(now)), (Some(0), Some(0)));
        assert_eq!((lines.take(now), lines.take(now)), (None, None));
        assert_eq!(lines.take(now + Duration::from_secs(60)), Some(2));
        assert_eq!(lines.take(now + Duration::from_secs(120)), Some(0));
    }
}
