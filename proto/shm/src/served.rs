//! The daemon's end of one client: its region, the consumers of its lanes, its doorbell.
//!
//! # Which lanes are looked at
//! A region has 64 lanes and most are idle for ever, so only claimed ones are polled. The client
//! keeps a bitmap of those in the header; it is re-read with [`Served::refresh`], now and then
//! while awake and always before a sleep. It is untrusted and harmless: it says where to look,
//! not what to believe. With more than a few hundred lanes over all clients
//! looking at each one costs more than the work, so the daemon raises [`attention::DOORBELL`]:
//! submitters then also count up a 16-bit doorbell, 32 to a line, and a lane is polled only when
//! its bell rang. [`Served::sweep`] looks at every lane regardless; it is due after raising the
//! flag and before sleeping (see [`crate::sleep`]).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::consumer::{Consumer, Incoming, Sink};
use crate::lane::LaneMemory;
use crate::layout::{Geometry, Header, attention};
use crate::record::Garbage;
use crate::region::{Region, RegionError};
use crate::registration::{self, RegistrationError};

/// Why a client cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// No region. Refuse the client with [`registration::Reason::Full`].
    #[error(transparent)]
    Region(#[from] RegionError),
    /// No eventfd. Refuse the client with [`registration::Reason::Full`].
    #[error(transparent)]
    Registration(#[from] RegistrationError),
}

/// A lane that is claimed.
#[derive(Debug)]
struct Active {
    index: u16,
    /// Doorbell as last seen.
    rings: u16,
    claimed: bool,
    consumer: Consumer,
}

/// The daemon's end of one client process.
#[derive(Debug)]
pub struct Served {
    region: Arc<Region>,
    eventfd: OwnedFd,
    /// Lanes that were claimed at some time, in the order of first sight.
    lanes: Vec<Active>,
    /// Index into `lanes` by lane number.
    by_index: Vec<Option<u16>>,
    doorbell: bool,
    fenced: bool,
}

impl Served {
    /// Makes the region and the eventfd of a new client. `client_fenced` is
    /// [`registration::HELLO_FENCED`] of its greeting.
    ///
    /// # Errors
    /// [`ServeError`]: refuse the client.
    pub fn new(geometry: Geometry, client_fenced: bool) -> Result<Self, ServeError> {
        let region = Region::create(geometry)?;
        let fenced = !crate::sleep::register();
        // Our heavy fence does not reach an unregistered client, so it has to fence itself. If
        // ours does not work at all, the same holds.
        if client_fenced || fenced {
            region.header().raise(attention::FENCE);
        }
        Ok(Self {
            eventfd: registration::eventfd()?,
            lanes: Vec::new(),
            by_index: vec![None; usize::from(geometry.lanes)],
            region,
            doorbell: false,
            fenced,
        })
    }

    /// The header page: heartbeat, attention word, DSCP table, credit class, CPU.
    #[inline]
    #[must_use]
    pub fn header(&self) -> &Header {
        self.region.header()
    }

    /// The region.
    #[must_use]
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// To be watched while asleep; drain it with [`registration::drain`].
    #[must_use]
    pub fn eventfd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }

    /// Sends the region to the client: the last step of a registration.
    ///
    /// # Errors
    /// [`RegistrationError`]: the client is gone, drop it.
    pub fn welcome(&self, socket: BorrowedFd<'_>) -> Result<(), RegistrationError> {
        let geometry = self.region.geometry();
        registration::send_welcome(socket, geometry, self.region.memfd(), self.eventfd.as_fd())
    }

    /// Looks which lanes are claimed. One cache line per 512 lanes: do it now and then
    /// while awake, since a new lane waits for it, and before sleeping. A lane stays polled if its
    /// bit goes away again.
    pub fn refresh(&mut self) {
        let count = self.by_index.len();
        for active in &mut self.lanes {
            active.claimed = false;
        }
        for word in 0..count.div_ceil(64) {
            let mut bits = self.region.header().claimed(word);
            while bits != 0 {
                let index = word * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                if index < count {
                    self.claim(index as u16);
                }
            }
        }
    }

    fn claim(&mut self, index: u16) {
        if let Some(at) = self.by_index[usize::from(index)] {
            self.lanes[usize::from(at)].claimed = true;
            return;
        }
        let Some(memory) = LaneMemory::mapped(&self.region, index) else {
            return;
        };
        self.by_index[usize::from(index)] = Some(self.lanes.len() as u16);
        // One ring behind, so that the first look with a doorbell does not skip the lane.
        let rings = self.region.header().rings(index).wrapping_sub(1);
        let consumer = Consumer::new(memory, self.fenced);
        self.lanes.push(Active {
            index,
            rings,
            claimed: true,
            consumer,
        });
    }

    /// Polls the lanes that may have something, at most `budget` records of each, and gives each
    /// record to `sink` with the consumer of its lane, so that the permit can be written before
    /// anything else is done. Returns how many records came.
    pub fn scan<F>(&mut self, budget: usize, mut sink: F) -> usize
    where
        F: FnMut(u16, &mut Consumer, Result<Incoming, Garbage>),
    {
        self.scan_into(budget, &mut sink)
    }

    /// [`Served::scan`] for a scheduler: see [`Sink`].
    #[inline]
    pub fn scan_into(&mut self, budget: usize, sink: &mut impl Sink) -> usize {
        let mut total = 0;
        for lane in &mut self.lanes {
            let mut rings = lane.rings;
            if self.doorbell {
                rings = self.region.header().rings(lane.index);
                if rings == lane.rings {
                    continue;
                }
            }
            // The one place, so that `sink` is inlined into it.
            let taken = drain(lane, budget, sink);
            // Stopped by the budget: leave the bell unanswered.
            if taken < budget {
                lane.rings = rings;
            }
            total += taken;
        }
        total
    }

    /// Polls every claimed lane, whatever the doorbells say.
    pub fn sweep<F>(&mut self, budget: usize, mut sink: F) -> usize
    where
        F: FnMut(u16, &mut Consumer, Result<Incoming, Garbage>),
    {
        self.sweep_into(budget, &mut sink)
    }

    /// [`Served::sweep`] for a scheduler: see [`Sink`].
    pub fn sweep_into(&mut self, budget: usize, sink: &mut impl Sink) -> usize {
        self.refresh();
        let mut total = 0;
        for lane in &mut self.lanes {
            let taken = drain(lane, budget, sink);
            if taken == budget {
                // Stopped by the budget, so there may be more for which no bell rings any more.
                lane.rings = self.region.header().rings(lane.index).wrapping_sub(1);
            }
            total += taken;
        }
        total
    }

    /// Switches doorbells on or off. After switching on for all clients call
    /// [`crate::sync::heavy_fence`] once, then [`Served::sweep`]: a submit that did not see the
    /// flag is found by the sweep.
    pub fn set_doorbell(&mut self, on: bool) {
        self.doorbell = on;
        if on {
            self.header().raise(attention::DOORBELL);
        } else {
            self.header().lower(attention::DOORBELL);
        }
    }

    /// Lanes that are claimed now.
    #[must_use]
    pub fn claimed_lanes(&self) -> usize {
        self.lanes.iter().filter(|lane| lane.claimed).count()
    }

    /// The consumer of a lane that was seen, to write permits and credit later.
    #[inline]
    #[must_use]
    pub fn consumer(&mut self, lane: u16) -> Option<&mut Consumer> {
        let at = (*self.by_index.get(usize::from(lane))?)?;
        self.lanes
            .get_mut(usize::from(at))
            .map(|active| &mut active.consumer)
    }

    /// All consumers with their lanes.
    pub fn consumers(&mut self) -> impl Iterator<Item = (u16, &mut Consumer)> {
        self.lanes
            .iter_mut()
            .map(|active| (active.index, &mut active.consumer))
    }

    /// Sets bits of the attention word and wakes every sleeper of this client, so that it sees
    /// them. For bypass, release and changes of mode; not for `SLEEPING`.
    pub fn announce(&mut self, raise: u32, lower: u32) {
        self.header().lower(lower);
        self.header().raise(raise);
        // A client that is about to sleep either sees the bits or is seen by `wake`.
        crate::sync::heavy_fence();
        for lane in &mut self.lanes {
            lane.consumer.wake();
        }
    }
}

/// Takes at most `budget` records out of a lane.
#[inline(always)]
fn drain(lane: &mut Active, budget: usize, sink: &mut impl Sink) -> usize {
    let mut taken = 0;
    while taken < budget && lane.consumer.poll_into(lane.index, sink) {
        taken += 1;
    }
    if taken > 0 {
        lane.consumer.flush();
        sink.drained(lane.index, taken);
    }
    taken
}
