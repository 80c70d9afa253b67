//! One attachment to one daemon: its region, its socket and its seats.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use laxity_shm::fork::ForkGuard;
use laxity_shm::lane::LaneMemory;
use laxity_shm::layout::{CREDIT_PORTS, Header, attention};
use laxity_shm::producer::{Producer, SlotRef};
use laxity_shm::region::Region;
use laxity_shm::registration::{self, Hello, RegistrationError, Welcome};
use laxity_shm::sleep::{Clock, register};

use crate::locks::{LOCK_PATIENCE, shortly};
use crate::options::Options;

/// Longest time that flows wait for the next daemon after one that handed its clients over.
const HANDOVER_NS: u64 = 1_000_000_000;

/// An attachment. A lost session is not used again, and a new attachment is a new session.
#[derive(Debug)]
pub(crate) struct Session {
    /// The guard, which must be dropped before what it guards.
    _guard: ForkGuard,
    pub(crate) region: Arc<Region>,
    socket: OwnedFd,
    eventfd: OwnedFd,
    lost: AtomicBool,
    /// The time of the loss, 0 before it.
    lost_ns: AtomicU64,
    /// Whether no other daemon takes this session over. Relaxed, because a late look is harmless.
    has_no_successor: AtomicBool,
    seats: Mutex<Seats>,
    clock: Clock,
}

#[derive(Debug, Default)]
struct Seats {
    unused: u16,
    left: Vec<Seat>,
}

/// A lane of a region, and what its producer must remember from owner to owner.
#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) index: u16,
    pub(crate) producer: Producer,
    /// Credit used per port, in bytes since the lane began.
    pub(crate) credit_used: [u64; CREDIT_PORTS],
    /// Number of the lane's last sleep.
    pub(crate) turn: u64,
    /// Flows of the last owner that it could not withdraw for lack of a slot.
    pub(crate) leftover: Option<Vec<SlotRef>>,
}

/// The reason why there is no lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoFreeLane {
    /// All lanes are in use.
    AllTaken,
    /// Other threads take or return lanes, and one may be free.
    Contended,
}

/// Connects to the daemon's socket and greets. The answer comes later.
pub(crate) fn greet(options: &Options) -> Result<(OwnedFd, ForkGuard), RegistrationError> {
    let socket = registration::connect(&options.socket)?;
    let guard = ForkGuard::socket(socket.as_fd()).map_err(|_| RegistrationError::NoAnswer)?;
    let hello = Hello::new(&options.name, options.mode, !register());
    registration::send_hello(socket.as_fd(), &hello)?;
    Ok((socket, guard))
}

impl Session {
    /// Maps the region that the daemon sent. Returns `None` if it can't be used. `asked` has
    /// guarded the socket so far. It is the last parameter, so it is dropped before the socket.
    pub(crate) fn new(
        clock: Clock,
        socket: OwnedFd,
        welcome: Welcome,
        asked: ForkGuard,
    ) -> Option<Self> {
        let region = Region::map(welcome.memfd, welcome.geometry).ok()?;
        let guard = ForkGuard::new(&region, socket.as_fd(), welcome.eventfd.as_fd()).ok()?;
        // The socket is guarded twice for a moment rather than not at all.
        drop(asked);
        Some(Self {
            _guard: guard,
            region,
            socket,
            eventfd: welcome.eventfd,
            lost: AtomicBool::new(false),
            lost_ns: AtomicU64::new(0),
            has_no_successor: AtomicBool::new(false),
            seats: Mutex::default(),
            clock,
        })
    }

    #[inline]
    pub(crate) fn header(&self) -> &Header {
        self.region.header()
    }

    /// Returns the time of the loss, or `None` if the session is not lost.
    pub(crate) fn lost_at(&self) -> Option<u64> {
        // In a forked child, other pages replace the region and show the loss.
        if self.header().attention() & attention::GONE != 0 {
            self.lose();
        }
        // Acquire, which pairs with the Release in `lose`.
        self.lost.load(Ordering::Acquire).then(|| self.lost_ns.load(Ordering::Relaxed))
    }

    /// Marks the daemon as lost for all lanes. The region is not written any more, and nothing
    /// reads what a daemon that comes back writes there.
    pub(crate) fn lose(&self) {
        if self.lost.load(Ordering::Acquire) {
            return;
        }
        // If two threads get here, the later time counts. Both are nearly equal.
        self.lost_ns.store(self.clock.now_ns(), Ordering::Relaxed);
        self.lost.store(true, Ordering::Release);
        self.header().raise(attention::LOST);
        // A daemon that is still alive notices the loss now, and not when the last lane is dropped.
        // SAFETY: the descriptor is owned here. Failure means that the connection is gone already.
        unsafe { libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_RDWR) };
    }

    /// Reports whether the daemon handed its clients over to the next one while it scheduled them.
    pub(crate) fn is_handed_over(&self) -> bool {
        let seen = self.header().attention();
        seen & (attention::HANDOVER | attention::UNENFORCED) == attention::HANDOVER
    }

    /// Reports whether flows of this lost session wait for the next daemon. They stop waiting once
    /// that daemon is late or can't come. A forked child sees other pages than the region, so it
    /// never waits.
    pub(crate) fn has_successor(&self) -> bool {
        self.is_handed_over()
            && !self.has_no_successor.load(Ordering::Relaxed)
            && self.clock.now_ns()
                < self.lost_ns.load(Ordering::Relaxed).saturating_add(HANDOVER_NS)
    }

    /// Ends the wait for the next daemon, because nobody listens or this process is refused.
    pub(crate) fn give_up_successor(&self) {
        self.has_no_successor.store(true, Ordering::Relaxed);
    }

    /// Returns [`Session::lost_at`] after a check of the socket, a system call. Lanes don't use it.
    pub(crate) fn check_hangup(&self) -> Option<u64> {
        if self.lost_at().is_none() && self.is_hung_up() {
            self.lose();
        }
        self.lost_at()
    }

    pub(crate) fn is_hung_up(&self) -> bool {
        registration::is_hung_up(self.socket.as_fd())
    }

    pub(crate) fn wake_daemon(&self) {
        registration::wake(self.eventfd.as_fd());
    }

    /// Takes a free lane. Blocks no longer than [`LOCK_PATIENCE`]. A forked child has another
    /// session.
    pub(crate) fn claim_lane(&self) -> Result<Seat, NoFreeLane> {
        let mut seats =
            shortly(|| LOCK_PATIENCE, || self.seats.try_lock()).ok_or(NoFreeLane::Contended)?;
        let mut seat = match seats.left.pop() {
            Some(seat) => seat,
            None => {
                let index = seats.unused;
                let memory = LaneMemory::mapped(&self.region, index).ok_or(NoFreeLane::AllTaken)?;
                seats.unused += 1;
                Seat {
                    index,
                    producer: Producer::new(memory),
                    credit_used: [0; CREDIT_PORTS],
                    turn: 0,
                    leftover: None,
                }
            }
        };
        if let Some(leftover) = seat.leftover.take()
            && seat.producer.reset(leftover.iter().copied()).is_err()
        {
            seat.leftover = Some(leftover);
            seats.left.push(seat);
            return Err(NoFreeLane::AllTaken);
        }
        drop(seats);
        self.header().set_claimed(seat.index, true);
        Ok(seat)
    }

    /// Returns a lane, and withdraws its flows. Those in `gated` hold slots.
    pub(crate) fn return_lane(&self, mut seat: Seat, gated: Vec<SlotRef>) {
        if self.lost_at().is_some() {
            return;
        }
        if seat.producer.reset(gated.iter().copied()).is_err() {
            seat.leftover = Some(gated);
        } else {
            let seen = self.header().after_publish();
            if seen != 0 && self.header().answer(seat.index, seen) {
                self.wake_daemon();
            }
        }
        // The lane stays claimed, since the daemon may not have read all records. The next owner
        // takes this seat before a new one. A process therefore has as many claimed lanes as it
        // ever had owners at once.
        self.seats.lock().unwrap_or_else(PoisonError::into_inner).left.push(seat);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use laxity_shm::layout::Geometry;

    use super::*;

    fn session(lanes: u16) -> Session {
        let geometry = Geometry { lanes, slots: 16, colour: 0 };
        let region = Region::create(geometry).expect("a region");
        let owned = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned().expect("a copy");
        let (socket, other) = UnixStream::pair().expect("a pair");
        let welcome =
            Welcome { geometry, memfd: owned(region.memfd()), eventfd: owned(other.as_fd()) };
        let guard = ForkGuard::socket(socket.as_fd()).expect("room in the table");
        Session::new(Clock::SYSTEM, socket.into(), welcome, guard).expect("a session")
    }

    #[test]
    fn lanes_that_other_threads_take_just_now_are_not_all_taken() {
        let session = session(2);
        let busy = session.seats.lock().expect("nobody panicked");
        assert_eq!(session.claim_lane().unwrap_err(), NoFreeLane::Contended);
        drop(busy);
        let _seats = [session.claim_lane().expect("one"), session.claim_lane().expect("two")];
        assert_eq!(session.claim_lane().unwrap_err(), NoFreeLane::AllTaken);
    }
}
