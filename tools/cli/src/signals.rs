//! Receives signals that ask a command to end, so that it can finish its work.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{SigSet, Signal};
use thiserror::Error;

/// The reason why signals can't be received. The operating system refuses it.
#[derive(Debug, Error)]
pub(crate) enum SignalsError {
    #[error("cannot block signals: {0}")]
    Block(Errno),
    #[error("cannot start a thread for signals: {0}")]
    Thread(std::io::Error),
}

pub(crate) struct Endings {
    received: Receiver<Signal>,
}

impl Endings {
    /// Starts to receive the signals. Once the result is dropped, the next signal ends the process
    /// at once.
    ///
    /// Signals that the caller ignores (`nohup`) stay ignored. Programs that are started later
    /// inherit nothing of it, since [`std::process::Command`] gives them an empty mask.
    pub(crate) fn receive() -> Result<Self, SignalsError> {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let ignored = ignored(&status);
        let mut wanted = SigSet::empty();
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
            if ignored >> (signal as i32 - 1) & 1 == 0 {
                wanted.add(signal);
            }
        }
        wanted.thread_block().map_err(SignalsError::Block)?;
        let (sender, received) = channel();
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                while let Ok(signal) = wanted.wait() {
                    if sender.send(signal).is_err() {
                        std::process::exit(128 + signal as i32);
                    }
                }
            })
            .map_err(SignalsError::Thread)?;
        Ok(Self { received })
    }

    pub(crate) fn wait(&self, limit: Duration) -> Option<Signal> {
        match self.received.recv_timeout(limit) {
            Ok(signal) => Some(signal),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                std::thread::sleep(limit);
                None
            }
        }
    }
}

/// Returns the ignored signals from the text of /proc/self/status, as bit `n - 1` for signal `n`.
fn ignored(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read_from_the_status_of_the_process() {
        let nohup = "Name:\tlaxity\nSigBlk:\t0000000000000002\nSigIgn:\t0000000000001001\n";
        assert_eq!(ignored(nohup), 1 << 12 | 1);
        assert_eq!(ignored(""), 0);
    }
}
