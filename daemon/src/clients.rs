//! An attached process as the scheduler sees it: its shared memory and its client state.
//!
//! The two are separate fields, because a record changes the client state while a scan borrows the
//! memory.

use std::sync::Arc;

use laxity_policy::{DomainId, PeerId, Time};
use laxity_shm::consumer::Consumer;
use laxity_shm::layout::{CREDIT_PORTS, Geometry, attention};
use laxity_shm::region::Region;
use laxity_shm::registration::Release;
use laxity_shm::served::{RegionConsumer, ServeError};
use laxity_wire::PodStatus;

use crate::config::Mode;
use crate::driver::flows::Flows;
use crate::driver::on_wire::OnWire;
use crate::driver::trust::Loss;
use crate::owner::Owner;
use crate::stats::{ClientCounters, ClientSnapshot};

/// Maximum number of records that a scan reads from one lane before it goes on to the next.
pub const BUDGET: usize = 32;
/// Maximum number of records that a scan reads from one client before it goes on to the next, so
/// that a client gains nothing by using many lanes. A client with more lanes than this gets one
/// record of each lane.
const CLIENT_BUDGET: usize = 256;

/// Number of an attachment. No number is used twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u64);

#[derive(Clone, Debug)]
pub struct Identity {
    pub id: ClientId,
    /// The process id, as the kernel reports it, or else as the client does.
    pub pid: u32,
    /// The process id, as the kernel reports it. Zero for a process of another pid namespace.
    pub kernel_pid: u32,
    pub owner: Owner,
    pub pod: Option<Arc<PodStatus>>,
    pub gid: u32,
    pub name: Arc<str>,
    pub mode: Mode,
    /// The version of shared memory that client and daemon have chosen.
    pub version: u32,
    pub release: Release,
}

/// A process that is registered and not yet scheduled.
#[derive(Debug)]
pub struct PendingClient {
    pub identity: Identity,
    pub served: RegionConsumer,
}

impl PendingClient {
    pub fn new(identity: Identity, geometry: Geometry, fenced: bool) -> Result<Self, ServeError> {
        Ok(Self { identity, served: RegionConsumer::new(geometry, fenced)? })
    }
}

/// What remains of a client after its release. Dropping it unmaps the client's memory.
#[derive(Debug)]
pub struct Leaving {
    pub identity: Identity,
    pub counters: ClientCounters,
    pub served: RegionConsumer,
}

#[derive(Debug)]
pub struct LaneState {
    pub flows: Flows,
    /// For each port, whether the lane used up its credit when no more credit was available.
    pub lacks_credit: [bool; CREDIT_PORTS],
}

/// The scheduler's state of one client, apart from its memory.
#[derive(Debug)]
pub struct ClientState {
    pub identity: Identity,
    /// The number of the client's job, for metrics.
    pub job: usize,
    pub domain: DomainId,
    pub attached: Time,
    pub counters: ClientCounters,
    /// Flows that are not completed.
    pub flows: usize,
    /// Maximum number of flows that the client may have now: `flows_max`, or zero while the client
    /// is not scheduled (mode `off`, `distrusted` or `suspected`). Further flows go out
    /// unscheduled.
    pub room: usize,
    pub flows_max: usize,
    pub lost: Loss,
    /// Whether the client is unscheduled because of a loss of its owner. See
    /// [`crate::driver::trust`].
    pub distrusted: bool,
    /// Whether the client is unscheduled because its owner owes many bytes and the client completed
    /// nothing lately. See [`crate::driver::overdue`].
    pub suspected: bool,
    /// When the client last completed bytes.
    pub completed: Time,
    pub ports: Vec<OnWire>,
    /// Whether the client was ever in mode `observe`, so that observed records may still arrive.
    pub may_observe: bool,
    pub lanes: ClientLanes,
    /// The address of each of the client's peers and its number in links, by the number that the
    /// client's flows use. Zeroes mean none.
    pub peers: Option<Box<[KnownPeer; 256]>>,
    /// The client's flows with bytes that are not yet permitted.
    pub waiting: usize,
    /// Quarantined lanes. The first one releases the client, so the number is above zero only until
    /// the client's socket hangs up.
    pub quarantined_lanes: u32,
    /// No more records of a released client are read.
    pub released: bool,
    /// Whether the flows of a released client have ended and its credit has returned.
    pub settled: bool,
    /// The shared memory, whose header has the mode and the bypass.
    region: Arc<Region>,
}

/// The address of a peer, and its number in links.
type KnownPeer = ([u8; 16], PeerId);

impl ClientState {
    /// Stores the address of the peer that this client's flows call `peer`, and its number in
    /// links.
    #[cold]
    pub fn introduce(&mut self, peer: u8, address: [u8; 16], number: PeerId) {
        let peers = self.peers.get_or_insert_with(|| Box::new([([0; 16], PeerId(0)); 256]));
        peers[usize::from(peer)] = (address, number);
    }

    /// Returns the address of the peer that this client's flows call `peer`, if it is known.
    pub fn address_of(&self, peer: u8) -> Option<[u8; 16]> {
        let (address, _) = self.peers.as_ref()?[usize::from(peer)];
        (address != [0; 16]).then_some(address)
    }

    /// Returns the number in links of the peer that this client's flows call `peer`.
    #[inline]
    pub fn number_of(&self, peer: u8) -> PeerId {
        match &self.peers {
            Some(peers) if peer != 0 => peers[usize::from(peer)].1,
            _ => PeerId(0),
        }
    }

    /// Reports whether the client's region has the bypass bit. The service sets it there directly,
    /// so the client may bypass before the scheduler reads the command.
    pub fn told_to_bypass(&self) -> bool {
        self.region.header().attention() & attention::BYPASS != 0
    }
}

/// The states of a client's lanes that sent a record.
#[derive(Debug)]
pub struct ClientLanes {
    lanes: Vec<Option<Box<LaneState>>>,
    slots: usize,
}

impl ClientLanes {
    /// Returns the state of `lane` and creates it at the first call.
    #[inline]
    pub fn at(&mut self, lane: u16) -> &mut LaneState {
        let index = usize::from(lane);
        if index >= self.lanes.len() {
            self.grow(index);
        }
        let slots = self.slots;
        self.lanes[index].get_or_insert_with(|| {
            Box::new(LaneState { flows: Flows::new(slots), lacks_credit: [false; CREDIT_PORTS] })
        })
    }

    #[cold]
    fn grow(&mut self, index: usize) {
        self.lanes.resize_with(index + 1, || None);
    }

    /// Returns one more than the highest lane that sent a record.
    pub fn count(&self) -> u16 {
        self.lanes.len() as u16
    }

    pub fn get(&self, lane: u16) -> Option<&LaneState> {
        self.lanes.get(usize::from(lane))?.as_deref()
    }
}

/// The client and the lane that a record came from.
pub struct RecordOrigin<'a> {
    pub client: u32,
    pub state: &'a mut ClientState,
    pub lane: u16,
    pub consumer: &'a mut Consumer,
}

/// An attached client, with its state and its memory.
#[derive(Debug)]
pub struct AttachedClient {
    pub state: ClientState,
    pub served: RegionConsumer,
    /// Consecutive scans without a record.
    pub idle_scans: u32,
    pub mode: Mode,
    /// Maximum number of records that a round reads from each lane of the client.
    pub budget: usize,
    /// Number of lanes that are scanned: all that a thread of the client ever claimed.
    pub lanes: usize,
}

impl AttachedClient {
    pub fn new(newcomer: PendingClient, now: Time, flows_max: usize, ports: usize) -> Self {
        let PendingClient { identity, served } = newcomer;
        let slots = usize::from(served.region().geometry().slots);
        let mode = identity.mode;
        Self {
            state: ClientState {
                identity,
                job: 0,
                domain: DomainId::default(),
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
                ports: vec![OnWire::default(); ports],
                may_observe: false,
                lanes: ClientLanes { lanes: Vec::new(), slots },
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

    /// Sets the bypass, and the more lenient of `daemon`'s mode and the client's own.
    ///
    /// `always` wakes sleeping threads even if the memory already has these values: another thread
    /// may have set them there without waking anyone.
    pub fn set_mode(&mut self, daemon: Mode, bypass: bool, always: bool) {
        self.mode = daemon.min(self.state.identity.mode);
        self.state.may_observe |= self.mode == Mode::Observe;
        self.set_room();
        let mut raise = self.mode.attention();
        if bypass {
            raise |= attention::BYPASS;
        }
        let lower = attention::UNENFORCED & !raise;
        let held = self.served.header().attention() & attention::UNENFORCED;
        if always || held != raise {
            self.served.announce(raise, lower);
        }
    }

    pub fn refresh(&mut self) {
        self.served.refresh();
        self.lanes = self.served.consumers().size_hint().0;
        self.budget = (CLIENT_BUDGET / self.lanes.max(1)).clamp(1, BUDGET);
    }

    pub fn set_room(&mut self) {
        let unscheduled = self.state.distrusted || self.state.suspected;
        self.state.room =
            if self.mode == Mode::Off || unscheduled { 0 } else { self.state.flows_max };
    }

    /// Releases the client: its waiting flows go out unscheduled, and it submits no more. With
    /// `handover` they wait for the next daemon instead, if the client's library can do so.
    pub fn release(&mut self, handover: bool) {
        self.state.released = true;
        let handover = if handover { attention::HANDOVER } else { 0 };
        self.served.announce(attention::RELEASED | handover, 0);
    }

    pub fn snapshot(&self) -> ClientSnapshot {
        let identity = &self.state.identity;
        ClientSnapshot {
            id: identity.id.0,
            pid: identity.pid,
            owner: identity.owner.clone(),
            pod: identity.pod.clone(),
            name: Arc::clone(&identity.name),
            job: self.state.job,
            release: identity.release,
            mode: self.mode,
            attached: self.state.attached,
            lanes: self.served.claimed_lanes() as u32,
            flows: self.state.flows as u64,
            waiting_flows: self.state.waiting as u64,
            quarantined_lanes: self.state.quarantined_lanes,
            owed_bytes: self.state.ports.iter().map(OnWire::owed).sum(),
            held: self.state.ports.iter().any(OnWire::is_held),
            distrusted: self.state.distrusted || self.state.suspected,
            limited: false,
            counters: self.state.counters,
        }
    }

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
            kernel_pid: 1,
            owner: Owner::of(1, 1),
            pod: None,
            gid: 1,
            name: "sleeper".into(),
            mode: Mode::Enforce,
            version: laxity_shm::layout::VERSION,
            release: Release::ours(),
        };
        let newcomer = PendingClient::new(identity, Geometry::default(), false).expect("a region");
        let region = Arc::clone(newcomer.served.region());
        let mut client = AttachedClient::new(newcomer, Time::ZERO, 10, 2);
        region.header().set_claimed(0, true);
        client.served.refresh();
        let memory = LaneMemory::mapped(&region, 0).expect("a lane");
        let _ = memory.header().waiter.announce(Awaited::Any, 1);
        // The service does the same, so that the bypass works even if the scheduler hangs.
        region.header().raise(attention::BYPASS);
        client.set_mode(Mode::Enforce, true, true);
        let woken_already = !client.served.consumer(0).expect("claimed").wake();
        assert!(woken_already, "the sleeper was left to its slice");
    }
}
