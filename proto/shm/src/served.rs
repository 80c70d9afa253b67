//! The daemon's end of one client: its region, the consumers of its lanes, its eventfd.
//!
//! # Which lanes are polled
//! A region has 64 lanes by default, of which most are always idle. So only lanes that were claimed
//! at some time are polled. The client keeps a bitmap of claimed lanes in the header.
//! [`RegionConsumer::refresh`] reads it again, at intervals while the daemon is awake and always
//! before a sleep. The bitmap is untrusted but harmless, because it only selects the lanes to poll.
//! With more than a few hundred lanes over all clients, polling each lane costs more than the work.
//! The daemon then raises [`attention::DOORBELL`], and submitters also increment a 16-bit doorbell,
//! 32 to a line. A lane is then polled only when its doorbell has changed.
//! [`RegionConsumer::sweep`] polls all of them regardless. It is needed after raising the flag and
//! before sleeping (see [`crate::sleep`]).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::consumer::{Consumer, Incoming, Sink};
use crate::lane::LaneMemory;
use crate::layout::{Geometry, Header, VERSION, attention};
use crate::record::Garbage;
use crate::region::{Region, RegionError};
use crate::registration::{self, RegistrationError};

/// The error of a client that cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The region could not be created. Refuse the client with [`registration::Reason::Full`].
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The eventfd could not be created. Refuse the client with [`registration::Reason::Full`].
    #[error(transparent)]
    Registration(#[from] RegistrationError),
}

/// A lane that was claimed at some time.
#[derive(Debug)]
struct Active {
    index: u16,
    /// The doorbell's value at the last poll.
    rings: u16,
    claimed: bool,
    consumer: Consumer,
}

/// The daemon's end of one client process.
#[derive(Debug)]
pub struct RegionConsumer {
    region: Arc<Region>,
    eventfd: OwnedFd,
    /// Lanes that were claimed at some time, in the order in which the daemon found them.
    lanes: Vec<Active>,
    /// Index into `lanes` by lane number.
    by_index: Vec<Option<u16>>,
    doorbell: bool,
    fenced: bool,
}

impl RegionConsumer {
    /// Creates the region and the eventfd of a new client. `client_fenced` is
    /// [`registration::HELLO_FENCED`] of its greeting.
    ///
    /// # Errors
    /// [`ServeError`]: refuse the client.
    pub fn new(geometry: Geometry, client_fenced: bool) -> Result<Self, ServeError> {
        let region = Region::create(geometry)?;
        let fenced = !crate::sleep::register();
        // This process's heavy fence does not reach an unregistered client, so the client has to
        // fence itself. The same holds if the heavy fence fails here.
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

    /// Returns the header page: heartbeat, attention word, DSCP table, credit class, CPU.
    #[inline]
    pub fn header(&self) -> &Header {
        self.region.header()
    }

    /// Returns the region.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns the eventfd to poll during a sleep. [`registration::drain`] empties it afterwards,
    /// which is needed unless the poll reports edges.
    pub fn eventfd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }

    /// Sends the region to the client, which is the last step of a registration.
    ///
    /// # Errors
    /// [`RegistrationError`]: the client has ended, drop it.
    pub fn welcome(&self, socket: BorrowedFd<'_>) -> Result<(), RegistrationError> {
        let geometry = self.region.geometry();
        let (memfd, eventfd) = (self.region.memfd(), self.eventfd.as_fd());
        registration::send_welcome(socket, VERSION, geometry, memfd, eventfd)
    }

    /// Reads which lanes are claimed, at a cost of one cache line per 512 lanes. Call it at
    /// intervals while awake, since a new lane waits for it, and before sleeping. A lane stays
    /// polled after its bit is cleared.
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
        let Some(memory) = LaneMemory::mapped(&self.region, index) else { return };
        self.by_index[usize::from(index)] = Some(self.lanes.len() as u16);
        // One less, so that the first poll with a doorbell does not skip the lane.
        let rings = self.region.header().rings(index).wrapping_sub(1);
        let consumer = Consumer::new(memory, self.fenced);
        self.lanes.push(Active { index, rings, claimed: true, consumer });
    }

    /// Polls the lanes that may have records, at most `budget` records of each. `sink` gets each
    /// record with the consumer of its lane, so that it can write the permit first. Returns the
    /// number of records.
    pub fn scan<F>(&mut self, budget: usize, mut sink: F) -> usize
    where
        F: FnMut(u16, &mut Consumer, Result<Incoming, Garbage>),
    {
        self.scan_into(budget, &mut sink)
    }

    /// Does the same as [`RegionConsumer::scan`] for a scheduler: see [`Sink`].
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
            // `drain` is called at one place in this function, so that `sink` is inlined into it.
            let taken = drain(lane, budget, sink);
            // After a stop by the budget the old value stays, so that the lane is polled again.
            if taken < budget {
                lane.rings = rings;
            }
            total += taken;
        }
        total
    }

    /// Calls [`RegionConsumer::refresh`] and polls every lane that was claimed at some time,
    /// regardless of the doorbells.
    pub fn sweep<F>(&mut self, budget: usize, mut sink: F) -> usize
    where
        F: FnMut(u16, &mut Consumer, Result<Incoming, Garbage>),
    {
        self.sweep_into(budget, &mut sink)
    }

    /// Does the same as [`RegionConsumer::sweep`], with a method of [`Sink`] per kind of record.
    pub fn sweep_into(&mut self, budget: usize, sink: &mut impl Sink) -> usize {
        self.refresh();
        let mut total = 0;
        for lane in &mut self.lanes {
            let taken = drain(lane, budget, sink);
            if taken == budget {
                // Stopped by the budget: the remaining records will not change the doorbell again.
                lane.rings = self.region.header().rings(lane.index).wrapping_sub(1);
            }
            total += taken;
        }
        total
    }

    /// Switches doorbells on or off. After switching on for all clients call
    /// [`crate::sync::heavy_fence`] once, then [`RegionConsumer::sweep`]: the sweep finds records
    /// of submitters that did not see the flag.
    pub fn set_doorbell(&mut self, on: bool) {
        self.doorbell = on;
        if on {
            self.header().raise(attention::DOORBELL);
        } else {
            self.header().lower(attention::DOORBELL);
        }
    }

    /// Returns the number of lanes that are claimed now.
    pub fn claimed_lanes(&self) -> usize {
        self.lanes.iter().filter(|lane| lane.claimed).count()
    }

    /// Returns the consumer of a lane that was claimed at some time, for permits and credit.
    #[inline]
    #[must_use]
    pub fn consumer(&mut self, lane: u16) -> Option<&mut Consumer> {
        let at = (*self.by_index.get(usize::from(lane))?)?;
        self.lanes.get_mut(usize::from(at)).map(|active| &mut active.consumer)
    }

    /// Returns all consumers with their lanes.
    pub fn consumers(&mut self) -> impl Iterator<Item = (u16, &mut Consumer)> {
        self.lanes.iter_mut().map(|active| (active.index, &mut active.consumer))
    }

    /// Sets and clears bits of the attention word and wakes all sleeping threads of this client. It
    /// is for bypass, release and changes of mode, not for `SLEEPING`.
    pub fn announce(&mut self, raise: u32, lower: u32) {
        self.header().lower(lower);
        self.header().raise(raise);
        // A client that is about to sleep either sees the bits, or `wake` sees the client.
        crate::sync::heavy_fence();
        for lane in &mut self.lanes {
            lane.consumer.wake();
        }
    }
}

/// Consumes at most `budget` records of a lane.
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
