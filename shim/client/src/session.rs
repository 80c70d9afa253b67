//! One attachment to one daemon: its region, its socket, its seats.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use laxity_shm::fork::ForkGuard;
use laxity_shm::lane::LaneMemory;
use laxity_shm::layout::{CREDIT_PORTS, Header, attention};
use laxity_shm::producer::{Producer, SlotRef};
use laxity_shm::region::Region;
use laxity_shm::registration::{self, Welcome};
use laxity_shm::sleep::now_ns;

use crate::client::{LOCK_PATIENCE, shortly};

/// An attachment. It ends when it is lost; a new one is a new session.
#[derive(Debug)]
pub(crate) struct Session {
    /// First, because it must go before what it guards.
    _guard: ForkGuard,
    pub(crate) region: Arc<Region>,
    socket: OwnedFd,
    eventfd: OwnedFd,
    lost: AtomicBool,
    /// When it was lost; 0 before.
    lost_ns: AtomicU64,
    seats: Mutex<Seats>,
}

#[derive(Debug, Default)]
struct Seats {
    unused: u16,
    left: Vec<Seat>,
}

/// A lane of a region and what its producer must remember from owner to owner.
#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) index: u16,
    pub(crate) producer: Producer,
    /// Credit used per port, in bytes since the lane began.
    pub(crate) credit_used: [u64; CREDIT_PORTS],
    /// Number of the last sleep.
    pub(crate) turn: u64,
    /// Flows that the last owner left behind and could not withdraw, for lack of a slot.
    leftover: Option<Vec<SlotRef>>,
}

/// Why there is no lane to be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoSeat {
    /// All are in use.
    AllTaken,
    /// Other threads take or leave lanes; one may be free.
    Contended,
}

impl Seat {
    /// The seat of an owner who leaves.
    pub(crate) fn taken(
        index: u16,
        producer: Producer,
        credit_used: [u64; CREDIT_PORTS],
        turn: u64,
    ) -> Self {
        Self {
            index,
            producer,
            credit_used,
            turn,
            leftover: None,
        }
    }
}

impl Session {
    /// Maps what the daemon sent. `None` if it cannot be used. `asked` guards the socket so far; as
    /// the last parameter it goes before the socket does.
    pub(crate) fn new(socket: OwnedFd, welcome: Welcome, asked: ForkGuard) -> Option<Self> {
        let region = Region::map(welcome.memfd, welcome.geometry).ok()?;
        let guard = ForkGuard::new(&region, socket.as_fd(), welcome.eventfd.as_fd()).ok()?;
        // Guarded twice for a moment rather than not at all.
        drop(asked);
        Some(Self {
            _guard: guard,
            region,
            socket,
            eventfd: welcome.eventfd,
            lost: AtomicBool::new(false),
            lost_ns: AtomicU64::new(0),
            seats: Mutex::default(),
        })
    }

    #[inline]
    pub(crate) fn header(&self) -> &Header {
        self.region.header()
    }

    /// When it was lost, `None` while it stands.
    pub(crate) fn lost_at(&self) -> Option<u64> {
        // A forked child learns it from the pages that replaced the region.
        if self.header().attention() & attention::GONE != 0 {
            self.lose();
        }
        // Acquire: pairs with the Release in `lose`.
        self.lost
            .load(Ordering::Acquire)
            .then(|| self.lost_ns.load(Ordering::Relaxed))
    }

    /// Gives the daemon up, for all lanes. The region is not written any more, so that whatever a
    /// daemon that comes back writes there concerns nobody.
    pub(crate) fn lose(&self) {
        if self.lost.load(Ordering::Acquire) {
            return;
        }
        // Of two threads that get here the later one's time counts; they are the same time.
        self.lost_ns.store(now_ns(), Ordering::Relaxed);
        self.lost.store(true, Ordering::Release);
        self.header().raise(attention::LOST);
        // The daemon, if it is alive after all, learns it now and not when the last lane lets go.
        // SAFETY: plain call on a descriptor that we own; failure means that it is gone already.
        unsafe { libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_RDWR) };
    }

    /// [`Session::lost_at`] after a look at the socket, which is a system call: for callers that
    /// want to know how it is, not for lanes.
    pub(crate) fn look(&self) -> Option<u64> {
        if self.lost_at().is_none() && self.is_hung_up() {
            self.lose();
        }
        self.lost_at()
    }

    pub(crate) fn is_hung_up(&self) -> bool {
        registration::is_hung_up(self.socket.as_fd())
    }

    /// Wakes the daemon.
    pub(crate) fn ring(&self) {
        registration::ring(self.eventfd.as_fd());
    }

    /// A lane nobody uses. Blocks no longer than [`LOCK_PATIENCE`]: a forked child has no session
    /// of its parent's.
    pub(crate) fn sit(&self) -> Result<Seat, NoSeat> {
        let mut seats =
            shortly(|| LOCK_PATIENCE, || self.seats.try_lock()).ok_or(NoSeat::Contended)?;
        let mut seat = match seats.left.pop() {
            Some(seat) => seat,
            None => {
                let index = seats.unused;
                let memory = LaneMemory::mapped(&self.region, index).ok_or(NoSeat::AllTaken)?;
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
            return Err(NoSeat::AllTaken);
        }
        drop(seats);
        // SAFETY: gettid has no arguments and cannot fail.
        let thread = unsafe { libc::gettid() } as u32;
        seat.producer.memory().header().owner.set_thread(thread);
        self.header().set_claimed(seat.index, true);
        Ok(seat)
    }

    /// Gives a lane back, withdrawing the flows in `gated`, which hold slots, and all others.
    pub(crate) fn leave(&self, mut seat: Seat, gated: Vec<SlotRef>) {
        if self.lost_at().is_some() {
            return;
        }
        if seat.producer.reset(gated.iter().copied()).is_err() {
            seat.leftover = Some(gated);
        } else {
            let seen = self.header().after_publish();
            if seen != 0 && self.header().answer(seat.index, seen) {
                self.ring();
            }
        }
        // The lane stays claimed: the daemon may not have looked yet, and what was published must
        // be found. The next owner takes this seat before a new one, so that a process has as many
        // claimed lanes as it ever had owners at once.
        seat.producer.memory().header().owner.set_thread(0);
        self.seats
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .left
            .push(seat);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use laxity_shm::layout::Geometry;

    use super::*;

    fn session(lanes: u16) -> Session {
        let geometry = Geometry {
            lanes,
            slots: 16,
            colour: 0,
        };
        let region = Region::create(geometry).expect("a region");
        let owned = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned().expect("a copy");
        let (socket, other) = UnixStream::pair().expect("a pair");
        let welcome = Welcome {
            geometry,
            memfd: owned(region.memfd()),
            eventfd: owned(other.as_fd()),
        };
        let guard = ForkGuard::socket(socket.as_fd()).expect("room in the table");
        Session::new(socket.into(), welcome, guard).expect("a session")
    }

    #[test]
    fn lanes_that_other_threads_take_just_now_are_not_all_taken() {
        let session = session(2);
        let busy = session.seats.lock().expect("nobody panicked");
        assert_eq!(session.sit().unwrap_err(), NoSeat::Contended);
        drop(busy);
        let _seats = [session.sit().expect("one"), session.sit().expect("two")];
        assert_eq!(session.sit().unwrap_err(), NoSeat::AllTaken);
    }
}
