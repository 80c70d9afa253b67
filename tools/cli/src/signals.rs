//! Receives signals that ask a command to end, so that it can finish its work.

use std::ffi::c_int;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use nix::sys::signal::Signal;
use signal_hook::iterator::Signals;

pub(crate) struct Endings {
    received: Receiver<Signal>,
}

impl Endings {
    /// Starts to receive the signals. Once the result is dropped, the next signal ends the process
    /// at once.
    ///
    /// Signals that the caller ignores (`nohup`) stay ignored. In programs that are started later,
    /// the other signals have their default effect: they have a handler here and are not blocked.
    pub(crate) fn receive() -> io::Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let ignored = ignored(&status);
        let endings = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];
        let wanted = endings.map(|signal| signal as c_int);
        let wanted = wanted.iter().filter(|signal| ignored >> (**signal - 1) & 1 == 0);
        let mut signals = Signals::new(wanted)?;
        let (sender, received) = channel();
        std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
            for signal in signals.forever().filter_map(|number| Signal::try_from(number).ok()) {
                if sender.send(signal).is_err() {
                    std::process::exit(128 + signal as i32);
                }
            }
        })?;
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
