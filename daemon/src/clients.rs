//! An attached process as the scheduler sees it: its shared memory, and the account kept of it.
//!
//! The two are separate fields, because while the lanes of a client are scanned (its memory is
//! borrowed) every record changes its state.

use std::sync::Arc;

use laxity_policy::Time;
use laxity_shm::consumer::Consumer;
use laxity_shm::layout::{CREDIT_PORTS, Geometry, attention};
use laxity_shm::region::Region;
use laxity_shm::served::{ServeError, Served};

use crate::config::Mode;
use crate::driver::flows::Flows;
use crate::driver::on_wire::OnWire;
use crate::driver::trust::Loss;
use crate::owner::Owner;
use crate::stats::{ClientCounters, ClientSnapshot};

/// Records taken from one lane before the next has its turn.
pub const BUDGET: usize = 32;
/// Records taken from one client before the next has its turn, though one of each lane at least: a
/// client gains nothing by spreading its records over many lanes.
const CLIENT_BUDGET: usize = 256;

/// Number of an attachment; never used twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u64);

/// Who a client is.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Number of the attachment.
    pub id: ClientId,
    /// Process, as the kernel says.
    pub pid: u32,
    /// Whose process it is.
    pub owner: Owner,
    /// What it calls itself.
    pub name: Arc<str>,
    /// Mode it asked for.
    pub mode: Mode,
}

/// A process that has registered and waits to be served.
#[derive(Debug)]
pub struct Newcomer {
    /// Who.
    pub identity: Identity,
    /// Its memory.
    pub served: Served,
}

impl Newcomer {
    /// Makes the memory of a client.
    ///
    /// # Errors
    /// The system is out of memory or descriptors: refuse the client.
    pub fn new(identity: Identity, geometry: Geometry, fenced: bool) -> Result<Self, ServeError> {
        Ok(Self {
            identity,
            served: Served::new(geometry, fenced)?,
        })
    }
}

/// What a client leaves behind; dropping it unmaps its memory.
#[derive(Debug)]
pub struct Leaving {
    /// Who it was.
    pub identity: Identity,
    /// What it did.
    pub counters: ClientCounters,
    /// Its memory.
    pub served: Served,
}

/// What is kept of one lane.
#[derive(Debug)]
pub struct LaneState {
    /// Its living flows.
    pub flows: Flows,
    /// Ports whose credit this lane ran out of while there was none to give.
    pub hungry: [bool; CREDIT_PORTS],
}

/// What is kept of one client, apart from its memory.
#[derive(Debug)]
pub struct ClientState {
    /// Who.
    pub identity: Identity,
    /// Since when.
    pub attached: Time,
    /// Its counters.
    pub counters: ClientCounters,
    /// Living flows.
    pub flows: usize,
    /// Living flows that it may have now: `flows_max`, or none while it is not scheduled (mode
    /// `off`, or [`crate::driver::overdue`]). Flows beyond go out unscheduled.
    pub room: usize,
    /// Living flows that it may have.
    pub flows_max: usize,
    /// What it lost lately.
    pub lost: Loss,
    /// Nothing of it is scheduled, for what it or others of its owner lost; see
    /// [`crate::driver::trust`].
    pub distrusted: bool,
    /// Nothing of it is scheduled, since its owner owes much and it has completed nothing lately;
    /// see [`crate::driver::overdue`].
    pub suspected: bool,
    /// When it completed something last.
    pub completed: Time,
    /// What it has on the wire of each port.
    pub ports: Box<[OnWire]>,
    /// It was in mode `observe` at some time, so records that say so may still come.
    pub may_observe: bool,
    /// Its lanes.
    pub lanes: Lanes,
    /// Addresses of its peers, by the numbers that its flows use; zeroes for none.
    pub peers: Option<Box<[[u8; 16]; 256]>>,
    /// Flows with bytes not yet permitted.
    pub waiting: usize,
    /// Lanes that turned out garbage. The client is released at the first, so this is more than
    /// zero only until its socket hangs up.
    pub quarantined_lanes: u32,
    /// It was released: nothing of it is read any more.
    pub released: bool,
    /// Its flows have ended and its credit has returned.
    pub settled: bool,
    /// Its memory, which says what it was told.
    region: Arc<Region>,
}

impl ClientState {
    /// Takes a peer's address for the number that flows of this client use.
    #[cold]
    pub fn introduce(&mut self, peer: u8, address: [u8; 16]) {
        let peers = self.peers.get_or_insert_with(|| Box::new([[0; 16]; 256]));
        peers[usize::from(peer)] = address;
    }

    /// Whether the client was told to bypass everything. Whoever gives that order tells it at once,
    /// so it may act on it before the scheduler has heard.
    pub fn told_to_bypass(&self) -> bool {
        self.region.header().attention() & attention::BYPASS != 0
    }
}

/// The books of the lanes of a client that have spoken.
#[derive(Debug)]
pub struct Lanes {
    lanes: Vec<Option<Box<LaneState>>>,
    slots: usize,
}

impl Lanes {
    /// The account of `lane`, opened at the first call.
    #[inline]
    pub fn at(&mut self, lane: u16) -> &mut LaneState {
        let index = usize::from(lane);
        if index >= self.lanes.len() {
            self.grow(index);
        }
        let slots = self.slots;
        self.lanes[index].get_or_insert_with(|| {
            Box::new(LaneState {
                flows: Flows::new(slots),
                hungry: [false; CREDIT_PORTS],
            })
        })
    }

    #[cold]
    fn grow(&mut self, index: usize) {
        self.lanes.resize_with(index + 1, || None);
    }

    /// One more than the highest lane that has spoken.
    #[must_use]
    pub fn count(&self) -> u16 {
        self.lanes.len() as u16
    }

    /// The account of `lane`, if it has spoken.
    #[must_use]
    pub fn get(&self, lane: u16) -> Option<&LaneState> {
        self.lanes.get(usize::from(lane))?.as_deref()
    }
}

/// The lane that a record came from.
pub struct RecordOrigin<'a> {
    /// Index of the client.
    pub client: u32,
    /// Its state.
    pub state: &'a mut ClientState,
    /// Number of the lane.
    pub lane: u16,
    /// Its memory.
    pub consumer: &'a mut Consumer,
}

/// An attached process.
#[derive(Debug)]
pub struct Client {
    /// What is kept of it.
    pub state: ClientState,
    /// Its memory.
    pub served: Served,
    /// Empty scans since its last record: how cold it is.
    pub idle_scans: u32,
    /// The mode that holds for it.
    pub mode: Mode,
    /// Records that may be taken from each of its lanes in a round.
    pub budget: usize,
    /// Lanes that are looked at: every one that was ever claimed.
    pub lanes: usize,
}

impl Client {
    /// Takes `newcomer` in, on a host with `ports`.
    #[must_use]
    pub fn new(newcomer: Newcomer, now: Time, flows_max: usize, ports: usize) -> Self {
        let Newcomer { identity, served } = newcomer;
        let slots = usize::from(served.region().geometry().slots);
        let mode = identity.mode;
        Self {
            state: ClientState {
                identity,
                attached: now,
                counters: ClientCounters::default(),
                flows: 0,
                peers: None,
                room: flows_max,
                flows_max,
                lost: Loss::default(),
                distrusted: false,
                suspected: false,
                completed: Time::ZERO,
                ports: vec![OnWire::default(); ports].into(),
                may_observe: false,
                lanes: Lanes {
                    lanes: Vec::new(),
                    slots,
                },
                waiting: 0,
                quarantined_lanes: 0,
                released: false,
                settled: false,
                region: Arc::clone(served.region()),
            },
            served,
            idle_scans: 0,
            mode,
            budget: 1,
            lanes: 0,
        }
    }

    /// Makes `daemon`'s mode, or the client's own if that is more lenient, and the bypass hold.
    /// `always` wakes its sleepers though the word says it all already: somebody who cannot wake
    /// them has set it.
    pub fn set_mode(&mut self, daemon: Mode, bypass: bool, always: bool) {
        self.mode = daemon.min(self.state.identity.mode);
        self.state.may_observe |= self.mode == Mode::Observe;
        self.set_room();
        let mut raise = match self.mode {
            Mode::Off => attention::OFF,
            Mode::Observe => attention::OBSERVE,
            Mode::Enforce => 0,
        };
        if bypass {
            raise |= attention::BYPASS;
        }
        let all = attention::OFF | attention::OBSERVE | attention::BYPASS;
        let lower = all & !raise;
        let held = self.served.header().attention() & all;
        if always || held != raise {
            self.served.announce(raise, lower);
        }
    }

    /// Looks for newly claimed lanes.
    pub fn refresh(&mut self) {
        self.served.refresh();
        self.lanes = self.served.consumers().size_hint().0;
        self.budget = (CLIENT_BUDGET / self.lanes.max(1)).clamp(1, BUDGET);
    }

    /// How many flows it may have now.
    pub fn set_room(&mut self) {
        let unscheduled = self.state.distrusted || self.state.suspected;
        self.state.room = if self.mode == Mode::Off || unscheduled {
            0
        } else {
            self.state.flows_max
        };
    }

    /// Lets go of it: all that waits in it resolves, and it will not submit any more.
    pub fn release(&mut self) {
        self.state.released = true;
        self.served.announce(attention::RELEASED, 0);
    }

    /// For the snapshot.
    #[must_use]
    pub fn snapshot(&self) -> ClientSnapshot {
        let identity = &self.state.identity;
        ClientSnapshot {
            id: identity.id.0,
            pid: identity.pid,
            owner: identity.owner.clone(),
            name: Arc::clone(&identity.name),
            mode: self.mode,
            attached: self.state.attached,
            lanes: self.served.claimed_lanes() as u32,
            flows: self.state.flows as u64,
            waiting_flows: self.state.waiting as u64,
            quarantined_lanes: self.state.quarantined_lanes,
            owed_bytes: self.state.ports.iter().map(OnWire::owed).sum(),
            held: self.state.ports.iter().any(OnWire::is_held),
            distrusted: self.state.distrusted || self.state.suspected,
            counters: self.state.counters,
        }
    }

    /// What it leaves behind.
    #[must_use]
    pub fn leave(self) -> Leaving {
        Leaving {
            identity: self.state.identity,
            counters: self.state.counters,
            served: self.served,
        }
    }
}

#[cfg(test)]
mod tests {
    use laxity_shm::lane::LaneMemory;
    use laxity_shm::sleep::Awaited;

    use super::*;

    #[test]
    fn a_bypass_wakes_sleepers_though_its_bit_is_up_already() {
        let identity = Identity {
            id: ClientId(1),
            pid: 1,
            owner: Owner::of(1, 1),
            name: "sleeper".into(),
            mode: Mode::Enforce,
        };
        let newcomer = Newcomer::new(identity, Geometry::default(), false).expect("a region");
        let region = Arc::clone(newcomer.served.region());
        let mut client = Client::new(newcomer, Time::ZERO, 10, 2);
        region.header().set_claimed(0, true);
        client.served.refresh();
        let memory = LaneMemory::mapped(&region, 0).expect("a lane");
        let _ = memory.header().waiter.announce(Awaited::Any, 1);
        // As the service does, so that the bypass holds even if the scheduler hangs.
        region.header().raise(attention::BYPASS);
        client.set_mode(Mode::Enforce, true, true);
        let woken_already = !client.served.consumer(0).expect("claimed").wake();
        assert!(woken_already, "the sleeper was left to its slice");
    }
}
