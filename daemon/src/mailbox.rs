//! The two ways between the scheduler thread and the rest of the daemon.
//!
//! Inwards: [`Command`]s over a channel, and a doorbell (a flag for a scheduler that is awake, an
//! eventfd for one that sleeps). The scheduler reads the flag once a turn. Outwards: a
//! [`SnapshotSlot`] that holds the latest snapshot. The scheduler makes no system call for it while
//! it is busy: the reader looks by itself as long as there are new snapshots, and the scheduler
//! wakes it only for the first one after a pause.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use nix::sys::eventfd::{EfdFlags, EventFd};
use tokio::sync::oneshot;

use crate::clients::{ClientId, Leaving, Newcomer};
use crate::config::Config;
use crate::driver::trace::TraceCommand;
use crate::stats::Snapshot;

/// How long the scheduler may take to answer a request.
pub const ANSWER_MAX: Duration = Duration::from_secs(2);

/// What the rest of the daemon tells the scheduler.
#[derive(Debug)]
pub enum Command {
    /// A process has registered; serve it.
    Attach {
        /// The process.
        newcomer: Box<Newcomer>,
        /// Told once its memory says what holds (mode, bypass, DSCP) and is scanned. Only then
        /// is it handed over, so that its first flow is treated like all others.
        attached: oneshot::Sender<()>,
    },
    /// Its socket hung up: forget it, and hand back what it held, so that unmapping its memory
    /// is not the scheduler's work.
    Detach {
        /// Which.
        client: ClientId,
        /// Takes what was its.
        leaving: oneshot::Sender<Option<Leaving>>,
    },
    /// Let everything out unscheduled, or stop that.
    Bypass(bool),
    /// A new configuration. What needs a restart is as it was.
    Configure(Arc<Config>),
    /// The coordinator exchange has an update.
    Coordinator,
    /// Somebody waits for a snapshot that is newer than this command.
    Publish,
    /// For `laxity trace`.
    Trace(TraceCommand),
    /// Release all clients and end.
    Stop,
}

/// The sending end; cheap to clone.
#[derive(Clone, Debug)]
pub struct Mailbox {
    commands: mpsc::Sender<Command>,
    bell: Arc<Doorbell>,
}

/// Says that there is a command.
#[derive(Debug)]
pub struct Doorbell {
    pending: AtomicBool,
    fd: EventFd,
}

/// The receiving end, the scheduler's.
#[derive(Debug)]
pub struct Inbox {
    commands: mpsc::Receiver<Command>,
    bell: Arc<Doorbell>,
}

/// Makes both ends.
///
/// # Errors
/// The process is out of file descriptors.
pub fn mailbox() -> nix::Result<(Mailbox, Inbox)> {
    let (sender, receiver) = mpsc::channel();
    let fd = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
    let bell = Arc::new(Doorbell {
        pending: AtomicBool::new(false),
        fd,
    });
    Ok((
        Mailbox {
            commands: sender,
            bell: Arc::clone(&bell),
        },
        Inbox {
            commands: receiver,
            bell,
        },
    ))
}

impl Mailbox {
    /// Sends `command`. False if the scheduler has ended.
    pub fn send(&self, command: Command) -> bool {
        if self.commands.send(command).is_err() {
            return false;
        }
        // Release: pairs with the Acquire swap in `take`, which then finds the command in the
        // channel. The eventfd is written whether or not the scheduler sleeps: commands are rare.
        self.bell.pending.store(true, Ordering::Release);
        let _ = self.bell.fd.write(1);
        true
    }
}

impl Inbox {
    /// Whether a command is there: one load of a line that rarely changes.
    #[inline]
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.bell.pending.load(Ordering::Relaxed)
    }

    /// All commands that are there.
    pub fn take(&self) -> Vec<Command> {
        self.bell.pending.swap(false, Ordering::AcqRel);
        self.commands.try_iter().collect()
    }

    /// Becomes readable when there is a command. To be watched edge-triggered: nobody reads it.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.bell.fd.as_fd()
    }
}

/// Time between two looks for a snapshot while there are new ones, and between two snapshots.
pub const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Looks without a new snapshot after which the reader waits to be woken.
pub const LOOKS_MAX: u32 = 10;
/// The scheduler wakes the reader if it has published nothing for this long. The reader looks for
/// longer than that.
pub const WAKE_AFTER: Duration = Duration::from_millis(300);

/// Where the scheduler publishes its latest snapshot. Neither side waits for the other.
#[derive(Debug)]
pub struct SnapshotSlot {
    latest: ArcSwapOption<Snapshot>,
    wake: EventFd,
    progress: AtomicU64,
}

impl SnapshotSlot {
    /// An empty slot.
    ///
    /// # Errors
    /// The process is out of file descriptors.
    pub fn new() -> nix::Result<Self> {
        Ok(Self {
            latest: ArcSwapOption::empty(),
            wake: EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?,
            progress: AtomicU64::new(0),
        })
    }

    /// Publishes `snapshot`. `wake` if the reader may not be looking: nothing was published for
    /// longer than [`LOOKS_MAX`] looks take, or somebody waits.
    pub fn publish(&self, snapshot: Snapshot, wake: bool) {
        self.latest.store(Some(Arc::new(snapshot)));
        if wake {
            let _ = self.wake.write(1);
        }
    }

    /// Takes note of having been woken.
    pub fn acknowledge(&self) {
        let _ = self.wake.read();
    }

    /// The latest snapshot since the last call.
    #[must_use]
    pub fn take(&self) -> Option<Arc<Snapshot>> {
        self.latest.swap(None)
    }

    /// A descriptor that becomes readable when the scheduler wakes the reader.
    ///
    /// # Errors
    /// The process is out of file descriptors.
    pub fn fd(&self) -> std::io::Result<OwnedFd> {
        self.wake.as_fd().try_clone_to_owned()
    }

    /// Scheduler: counts a sign of life. For the watchdog: a command that is not taken within a
    /// watchdog period while this stands still means a thread that hangs.
    #[inline]
    pub fn progress(&self) {
        let seen = self.progress.load(Ordering::Relaxed);
        self.progress.store(seen.wrapping_add(1), Ordering::Relaxed);
    }

    /// Signs of life so far.
    #[must_use]
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
        assert!(mailbox.send(Command::Publish));
        assert!(mailbox.send(Command::Bypass(true)));
        assert!(inbox.is_pending());
        assert_eq!(inbox.take().len(), 2);
        assert!(!inbox.is_pending());
        drop(inbox);
        assert!(!mailbox.send(Command::Stop));
    }
}
