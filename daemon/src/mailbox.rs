//! The two ways between the scheduler thread and the rest of the daemon.
//!
//! Inwards: [`Command`]s over a channel, and a bell (a flag for a scheduler that is awake, an
//! eventfd for one that sleeps). Outwards: a [`SnapshotSlot`] that holds the latest snapshot. The
//! scheduler never waits for the other side: it reads the flag once a turn, and where the board
//! is being looked at it pins its snapshot up later. Nor does it make a system call while it is
//! busy: the other side looks at the board by itself for as long as there is news, and only the
//! first news after a pause rings.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError, mpsc};
use std::time::Duration;

use nix::sys::eventfd::{EfdFlags, EventFd};
use tokio::sync::oneshot;

use crate::clients::{ClientId, Leaving, Newcomer};
use crate::config::Config;
use crate::driver::trace::TraceOrder;
use crate::stats::Snapshot;

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
    /// The stream to the coordinator has something on its desk.
    Coordinator,
    /// Somebody waits for a snapshot that is newer than this command.
    Publish,
    /// For `laxity trace`.
    Trace(TraceOrder),
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

/// Time between two looks at the board while there is news, and between two snapshots.
pub const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Looks without news after which the reader waits for the ring.
pub const LOOKS_MAX: u32 = 10;
/// A scheduler that has pinned nothing for this long rings: well before the reader stops looking.
pub const RING_AFTER: Duration = Duration::from_millis(300);

/// Where the scheduler pins its latest snapshot.
#[derive(Debug)]
pub struct SnapshotSlot {
    latest: Mutex<Option<Arc<Snapshot>>>,
    pinned: EventFd,
    progress: AtomicU64,
}

impl SnapshotSlot {
    /// An empty board.
    ///
    /// # Errors
    /// The process is out of file descriptors.
    pub fn new() -> nix::Result<Self> {
        let pinned = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
        Ok(Self {
            latest: Mutex::new(None),
            pinned,
            progress: AtomicU64::new(0),
        })
    }

    /// Pins `snapshot` up, unless somebody holds the board right now. Never waits. `ring` if the
    /// reader may not be looking: nothing was pinned for longer than [`LOOKS_MAX`] looks take, or
    /// somebody waits.
    #[must_use]
    pub fn try_pin(&self, snapshot: Arc<Snapshot>, ring: bool) -> bool {
        let mut latest = match self.latest.try_lock() {
            Ok(latest) => latest,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        *latest = Some(snapshot);
        drop(latest);
        if ring {
            let _ = self.pinned.write(1);
        }
        true
    }

    /// The ring was heard.
    pub fn hear(&self) {
        let _ = self.pinned.read();
    }

    /// The latest snapshot since the last call.
    #[must_use]
    pub fn take(&self) -> Option<Arc<Snapshot>> {
        self.latest
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    /// A descriptor that becomes readable when the scheduler rings.
    ///
    /// # Errors
    /// The process is out of file descriptors.
    pub fn fd(&self) -> std::io::Result<OwnedFd> {
        self.pinned.as_fd().try_clone_to_owned()
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
    fn a_command_rings_until_it_is_taken() {
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
