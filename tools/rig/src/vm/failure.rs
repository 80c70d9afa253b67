//! Why a job has no result, told apart: a panic, a hang, a time limit, a machine that lacks
//! something.

use std::io;
use std::time::Duration;

use super::network::BadNetwork;
use crate::probe::CannotRun;

/// Lines of the console that an error shows.
const CONSOLE_LINES: usize = 25;

/// Why a job has no result. Each says what to do, or shows what there is to go on.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// The machine lacks something.
    #[error(transparent)]
    CannotRun(#[from] CannotRun),
    /// The network that was asked for cannot be built.
    #[error("the guest's network: {0}")]
    Network(#[from] BadNetwork),
    /// The guest could not be prepared or started.
    #[error("cannot start the virtual machine: {0:#}")]
    Start(anyhow::Error),
    /// QEMU ended by itself before the guest did anything.
    #[error("QEMU ended with {status}: {said}")]
    Qemu {
        /// How it ended.
        status: String,
        /// What it said.
        said: String,
    },
    /// The guest's kernel panicked.
    #[error("the guest's kernel panicked. The end of its console:\n{console}")]
    Panicked {
        /// End of its console.
        console: String,
    },
    /// The guest was switched off from inside, by a program or by the kernel.
    #[error("the guest went down before its job was done. The end of its console:\n{console}")]
    WentDown {
        /// End of its console.
        console: String,
    },
    /// Nothing was heard of the guest, not even a heartbeat.
    #[error(
        "the guest hangs: nothing was heard of it for {silent_s} s{when}. The end of its \
         console:\n{console}"
    )]
    Hung {
        /// For how long, s.
        silent_s: u64,
        /// While what.
        when: &'static str,
        /// End of its console.
        console: String,
    },
    /// The job took too long; the guest is well.
    #[error("the time limit of {limit:?} is over; the virtual machine was killed")]
    TimedOut {
        /// The limit.
        limit: Duration,
    },
    /// The guest could not do what it was told.
    #[error("in the guest: {0}")]
    Failed(String),
    /// The guest's part of this program ended without an answer.
    #[error(
        "the lab's process in the guest ended without an answer. The end of the guest's \
         console:\n{console}"
    )]
    Lost {
        /// End of its console.
        console: String,
    },
    /// The person at the terminal ended it.
    #[error("ended by Ctrl-]")]
    Escaped,
    /// What the job prints cannot be passed on.
    #[error("cannot pass on what the job prints: {0}")]
    Output(#[source] io::Error),
}

/// What the kernel says first when it gives up.
pub(super) const PANIC: &str = "Kernel panic";

/// The last lines of a console or, if there is one, a panic and what led to it.
pub(super) fn tail(console: &str) -> String {
    const BEFORE_PANIC: usize = 5;
    let lines: Vec<&str> = console.lines().map(str::trim_end).collect();
    let first = match lines.iter().position(|line| line.contains(PANIC)) {
        Some(panic) => panic.saturating_sub(BEFORE_PANIC),
        None => lines.len().saturating_sub(CONSOLE_LINES),
    };
    let last = lines.len().min(first + CONSOLE_LINES);
    let tail = lines[first..last].join("\n");
    if tail.trim().is_empty() {
        "(nothing)".into()
    } else {
        tail
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_of_a_console_is_its_last_lines() {
        let long: String = (0..100).map(|line| format!("line {line}\r\n")).collect();
        let tail = tail(&long);
        assert!(
            tail.starts_with("line 75\n") && tail.ends_with("line 99"),
            "{tail}"
        );
        assert_eq!(super::tail("\n"), "(nothing)");
        let panicked = format!("a\nb\n[1.0] {PANIC} - not syncing: crash\n{long}");
        assert!(super::tail(&panicked).starts_with("a\nb\n[1.0] Kernel panic"));
    }
}
