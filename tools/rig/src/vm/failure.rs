//! The reasons why a job has no result: a panic, a hang, a time limit, or a machine that lacks
//! something.

use std::io;
use std::time::Duration;

use super::network::BadNetwork;
use crate::error::LabError;
use crate::probe::CannotRun;

const CONSOLE_LINES: usize = 25;

/// The reason why a job has no result. The message says what to do, or has the end of the console.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    #[error(transparent)]
    CannotRun(#[from] CannotRun),
    #[error("the guest's network: {0}")]
    Network(#[from] BadNetwork),
    #[error("cannot start the virtual machine: {0}")]
    Start(LabError),
    #[error("QEMU ended with {status}: {said}")]
    Qemu { status: String, said: String },
    #[error("the guest's kernel panicked. The end of its console:\n{console}")]
    Panicked { console: String },
    /// A program or the kernel in the guest powered it off.
    #[error("the guest went down before its job was done. The end of its console:\n{console}")]
    WentDown { console: String },
    /// The guest sent nothing, not even a heartbeat.
    #[error(
        "the guest hangs: nothing was heard of it for {silent_s} s{when}. The end of its \
         console:\n{console}"
    )]
    Hung {
        /// Time without a message of the guest, in s.
        silent_s: u64,
        when: &'static str,
        console: String,
    },
    #[error("the time limit of {limit:?} is over; the virtual machine was killed")]
    TimedOut { limit: Duration },
    #[error("in the guest: {0}")]
    Failed(String),
    #[error(
        "the lab's process in the guest ended without an answer. The end of the guest's \
         console:\n{console}"
    )]
    Lost { console: String },
    #[error("cannot pass on what the job prints: {0}")]
    Output(#[source] io::Error),
}

/// First words of the kernel's message about a panic.
pub(super) const PANIC: &str = "Kernel panic";

/// Returns the last lines of a console. If there is a panic, returns it with the lines before it.
pub(super) fn tail(console: &str) -> String {
    const BEFORE_PANIC: usize = 5;
    let lines: Vec<&str> = console.lines().map(str::trim_end).collect();
    let first = match lines.iter().position(|line| line.contains(PANIC)) {
        Some(panic) => panic.saturating_sub(BEFORE_PANIC),
        None => lines.len().saturating_sub(CONSOLE_LINES),
    };
    let last = lines.len().min(first + CONSOLE_LINES);
    let tail = lines[first..last].join("\n");
    if tail.trim().is_empty() { "(nothing)".into() } else { tail }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_of_a_console_is_its_last_lines() {
        let long: String = (0..100).map(|line| format!("line {line}\r\n")).collect();
        let tail = tail(&long);
        assert!(tail.starts_with("line 75\n") && tail.ends_with("line 99"), "{tail}");
        assert_eq!(super::tail("\n"), "(nothing)");
        let panicked = format!("a\nb\n[1.0] {PANIC} - not syncing: crash\n{long}");
        assert!(super::tail(&panicked).starts_with("a\nb\n[1.0] Kernel panic"));
    }
}
