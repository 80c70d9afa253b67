//! Messages between the scheduler thread and the rest of the daemon.
//!
//! Inwards, a channel carries [`SchedulerCommand`]s. A doorbell announces them: a flag that an
//! awake scheduler reads once a turn, and an eventfd that wakes a sleeping one. Outwards, a
//! [`SnapshotSlot`] holds the latest snapshot. A busy scheduler makes no system call for it. The
//! reader polls while there are new snapshots, and the scheduler wakes it only after a pause.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use laxity_shm::marking::Treatments;
use laxity_wire::explain::{Explanation, FlowQuery};
use nix::sys::eventfd::{EfdFlags, EventFd};
use tokio::sync::oneshot;

use crate::clients::{ClientId, Leaving, PendingClient};
use crate::config::{Config, ResidualConfig};
use crate::driver::trace::TraceCommand;
use crate::stats::{PortResidual, PortUse, Snapshot};

/// Longest time that the scheduler may take to answer a command.
pub const ANSWER_MAX: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub enum SchedulerCommand {
    Attach {
        newcomer: Box<PendingClient>,
        /// Resolves once the client's memory has the mode, the bypass and the DSCPs, and its lanes
        /// are scanned. Only then does the client get the memory, so all its flows are scheduled.
        attached: oneshot::Sender<()>,
    },
    /// Remove a client whose socket hung up. Its memory goes back to the sender, so that the
    /// scheduler does not spend time on unmapping it.
    Detach {
        client: ClientId,
        leaving: oneshot::Sender<Option<Leaving>>,
    },
    Bypass(bool),
    /// Apply a configuration. Keys that need a restart are unchanged in it.
    Configure(Arc<Config>),
    /// Tell clients which DSCPs the NICs treat alike.
    Treatments(Box<Treatments>),
    /// Apply the residual capacity of each port, and report how permits use the ports.
    Residual {
        /// By port; `None` if its NIC counts no bytes.
        residuals: Vec<Option<PortResidual>>,
        /// Receives the configuration of residual capacity and the use of each port.
        usage: mpsc::Sender<(ResidualConfig, Vec<PortUse>)>,
    },
    /// Read an update from the coordinator exchange.
    Coordinator,
    /// Publish a snapshot that is newer than this command.
    Publish,
    /// Change or read the trace, for `laxity trace`.
    Trace(TraceCommand),
    /// Look at the next flows, for `laxity explain`.
    Explain(ExplainCommand),
    /// Release all clients and end the thread. With `handover`, the next daemon takes them over.
    Stop {
        handover: bool,
    },
}

/// A lane, by the index of its client and its own number.
pub type FlowPlace = (u32, u16);

/// Asks for some of the flows that match a query, for `laxity explain`.
#[derive(Debug)]
pub struct ExplainCommand {
    pub wanted: FlowQuery,
    pub from: FlowPlace,
    pub reply: oneshot::Sender<ExplainedPart>,
}

#[derive(Debug)]
pub struct ExplainedPart {
    pub told: Explanation,
    /// The lane to continue with, if any is left.
    pub next: Option<FlowPlace>,
}

/// The sending end. It is cheap to clone.
#[derive(Clone, Debug)]
pub struct Mailbox {
    commands: mpsc::Sender<SchedulerCommand>,
    doorbell: Arc<Doorbell>,
}

#[derive(Debug)]
pub struct Doorbell {
    pending: AtomicBool,
    fd: EventFd,
}

#[derive(Debug)]
pub struct Inbox {
    commands: mpsc::Receiver<SchedulerCommand>,
    doorbell: Arc<Doorbell>,
}

pub fn mailbox() -> nix::Result<(Mailbox, Inbox)> {
    let (sender, receiver) = mpsc::channel();
    let fd = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
    let doorbell = Arc::new(Doorbell { pending: AtomicBool::new(false), fd });
    Ok((
        Mailbox { commands: sender, doorbell: Arc::clone(&doorbell) },
        Inbox { commands: receiver, doorbell },
    ))
}

impl Mailbox {
    /// Sends `command`. Returns false if the scheduler has ended.
    pub fn send(&self, command: SchedulerCommand) -> bool {
        if self.commands.send(command).is_err() {
            return false;
        }
        // Release pairs with the Acquire swap in `take`, which then finds the command in the
        // channel. The eventfd is written even if the scheduler is awake: commands are rare.
        self.doorbell.pending.store(true, Ordering::Release);
        let _ = self.doorbell.fd.write(1);
        true
    }
}

/// Waits until the scheduler answers a command.
pub async fn answer<T>(reply: oneshot::Receiver<T>) -> Result<T, String> {
    match tokio::time::timeout(ANSWER_MAX, reply).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(_)) => Err("laxityd is stopping".to_owned()),
        Err(_) => Err(format!("the scheduler did not answer within {ANSWER_MAX:?}; ask again")),
    }
}

impl Inbox {
    /// Reports whether a command is there. This is one load of a cache line that rarely changes.
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.doorbell.pending.load(Ordering::Relaxed)
    }

    pub fn take(&self) -> Vec<SchedulerCommand> {
        self.doorbell.pending.swap(false, Ordering::AcqRel);
        self.commands.try_iter().collect()
    }

    /// Returns a descriptor that becomes readable with a command. Nothing reads it, so the caller
    /// watches for edges.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.doorbell.fd.as_fd()
    }
}

/// The time between two polls by the reader, and between two snapshots.
pub const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Polls without a new snapshot before the reader sleeps.
pub const LOOKS_MAX: u32 = 10;
/// How long the scheduler may publish nothing before it has to wake the reader. The reader polls
/// for longer than that.
pub const WAKE_AFTER: Duration = Duration::from_millis(300);

/// The place for the scheduler's latest snapshot. Neither side waits for the other.
#[derive(Debug)]
pub struct SnapshotSlot {
    latest: ArcSwapOption<Snapshot>,
    wake: EventFd,
    progress: AtomicU64,
}

impl SnapshotSlot {
    pub fn new() -> nix::Result<Self> {
        Ok(Self {
            latest: ArcSwapOption::empty(),
            wake: EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?,
            progress: AtomicU64::new(0),
        })
    }

    /// Publishes `snapshot`. `wake` is set if the reader may sleep, i.e. if nothing was published
    /// for longer than [`WAKE_AFTER`], or if a task waits.
    pub fn publish(&self, snapshot: Snapshot, wake: bool) {
        self.latest.store(Some(Arc::new(snapshot)));
        if wake {
            let _ = self.wake.write(1);
        }
    }

    /// Resets the wake-up, so that the descriptor is no longer readable.
    pub fn acknowledge(&self) {
        let _ = self.wake.read();
    }

    /// Returns the latest snapshot, if there is one since the last call.
    pub fn take(&self) -> Option<Arc<Snapshot>> {
        self.latest.swap(None)
    }

    /// Returns a descriptor that becomes readable when the scheduler wakes the reader.
    pub fn fd(&self) -> std::io::Result<OwnedFd> {
        self.wake.as_fd().try_clone_to_owned()
    }

    /// Counts a sign of life of the scheduler. If the count stays the same for a watchdog period
    /// while a command waits, the thread hangs.
    #[inline]
    pub fn progress(&self) {
        let seen = self.progress.load(Ordering::Relaxed);
        self.progress.store(seen.wrapping_add(1), Ordering::Relaxed);
    }

    pub fn signs_of_life(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_pending_until_it_is_taken() {
        let (mailbox, inbox) = mailbox().unwrap();
        assert!(!inbox.is_pending());
        assert!(mailbox.send(SchedulerCommand::Publish));
        assert!(mailbox.send(SchedulerCommand::Bypass(true)));
        assert!(inbox.is_pending());
        assert_eq!(inbox.take().len(), 2);
        assert!(!inbox.is_pending());
        drop(inbox);
        assert!(!mailbox.send(SchedulerCommand::Stop { handover: false }));
    }
}
