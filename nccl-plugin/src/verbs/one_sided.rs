//! One-sided operations over reliable queue pairs, several to each rank of a group and to the rank
//! itself. A put is an RDMA WRITE, a get an RDMA READ, and a signal a FETCH AND ADD.
//!
//! Domains share the queue pairs of a rank. A queue pair performs its work requests in order at the
//! target, so a signal is behind the puts and signals of its domain. A flush reads a byte of this
//! rank's memory through the device, behind everything that the device wrote before.

use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;

use laxity_ibverbs::ibv_wc_status;
use laxity_shm::sleep::now_ns;
use parking_lot::Mutex;

use super::completions::{BATCH, Completion, Completions};
use super::connect::{end, first_packet};
use super::hello::{ClassQueuePair, End};
use super::nic::{Nic, RegionKeys};
use super::pinned::Pinned;
use super::queue_pair::{OwnedQueuePair, Work, WorkRequest, failure};
use crate::backend::{Memory, POINTER_HOST};
use crate::fault::{Fault, Result};
use crate::rma::wire::{Far, Mesh, RequestPart, RmaOperation, Wire};

/// Largest number of queue pairs to a rank.
const LANES_MAX: usize = 4;
/// Largest number of work requests in flight on a queue pair.
const WORK_REQUESTS: u32 = 256;
/// Time between two looks at the device's events, since a look is a system call.
const LOOK_NS: u64 = 20_000_000;

/// A device port on which groups are made.
#[derive(Clone, Debug)]
pub struct OneSidedPort(pub(super) Arc<Nic>);

struct RankQueuePair {
    qp: OwnedQueuePair,
    /// The parts of posted work requests. Only the last work request of a part has it.
    in_flight: VecDeque<Option<RequestPart>>,
    waiting: VecDeque<(WorkRequest, Option<RequestPart>)>,
}

/// The state that the threads of a context share. Fields are dropped in order: queue pairs first.
struct ContextQueuePairs {
    /// The queue pairs, [`RdmaWire::lanes`] for each rank. `None` stands for a lost rank's.
    lanes: Vec<Option<RankQueuePair>>,
    by_number: HashMap<u32, usize>,
    completions: Completions,
    /// Memory for values that the device has to write and nobody reads.
    scratch: Pinned,
    /// The value of [`Mesh::lost`] up to which the queue pairs of lost ranks are gone.
    lost: usize,
}

/// The queue pairs of a context.
pub(crate) struct RdmaWire {
    mesh: Arc<Mesh>,
    nic: Arc<Nic>,
    lanes: usize,
    room: usize,
    queues: Mutex<ContextQueuePairs>,
    looked_ns: AtomicU64,
}

impl OneSidedPort {
    /// Returns the device port and the address at which groups meet, if it can do all operations.
    pub(super) fn of(nic: &Arc<Nic>, meet_at: Option<SocketAddr>) -> Option<(Self, SocketAddr)> {
        let at = meet_at.unwrap_or_else(|| SocketAddr::new(nic.device().address, 0));
        (nic.atomics > 0).then(|| (Self(Arc::clone(nic)), at))
    }

    pub(crate) fn register(&self, memory: Memory) -> Result<RegionKeys> {
        self.0.register_region(memory)
    }

    /// Makes the queue pairs of a context. All ranks of the group call this.
    pub(crate) fn open(
        &self,
        mesh: &Arc<Mesh>,
        domains: usize,
        dscp: u8,
        service_level: u8,
    ) -> Result<RdmaWire> {
        let nic = &self.0;
        let lanes = domains.min(LANES_MAX);
        let count = mesh.ranks() * lanes;
        let most = nic.completions_max as usize / count;
        let room = most.min(nic.work_requests_max.min(WORK_REQUESTS) as usize).max(1);
        let made = ContextQueuePairs::new(nic, count, room);
        let describe = |lane: &RankQueuePair| ClassQueuePair {
            dscp,
            service_level,
            number: lane.qp.number(),
            first_packet: first_packet(),
        };
        // A rank that fails contributes an unusable description, so that no rank waits for it.
        let pairs = made.as_ref().map_or(&[][..], |queues| &queues.lanes);
        let ours = end(nic, 0, 0, pairs.iter().flatten().map(describe));
        let mut data = Vec::new();
        ours.encode(&mut data);
        let all = mesh.exchange(&data);
        let connected = made.and_then(|queues| {
            for (rank, theirs) in all?.iter().enumerate() {
                let theirs = End::decode(theirs, count)
                    .map_err(|why| Fault::Remote(format!("rank {rank}'s queue pairs: {why}")))?;
                nic.check_link(&theirs)?;
                let own = &queues.lanes[rank * lanes..][..lanes];
                for (at, lane) in own.iter().flatten().enumerate() {
                    let (own, other) = (rank * lanes + at, mesh.rank * lanes + at);
                    lane.qp.connect(&ours.lanes[own], &theirs.lanes[other], &theirs)?;
                }
            }
            Ok(queues)
        });
        // Nobody sends before all queue pairs can receive. A retry would take seconds. A rank that
        // has failed says so, because the others wait for it.
        let all = mesh.exchange(&[u8::from(connected.is_err())]);
        let queues = connected?;
        if let Some(rank) = all?.iter().position(|refused| refused != &[0]) {
            return Err(Fault::Remote(format!("rank {rank} can't connect its queue pairs")));
        }
        Ok(RdmaWire {
            mesh: Arc::clone(mesh),
            nic: Arc::clone(nic),
            lanes,
            room,
            queues: Mutex::new(queues),
            looked_ns: AtomicU64::new(0),
        })
    }
}

impl ContextQueuePairs {
    /// Creates `count` queue pairs with room for `room` work requests each.
    fn new(nic: &Arc<Nic>, count: usize, room: usize) -> Result<Self> {
        let completions = Completions::new(nic, (count * room) as u32)?;
        let scratch = Pinned::new(nic, 8, false)?;
        let lane = |_| {
            let qp = OwnedQueuePair::one_sided(nic, &completions, room as u32)?;
            Ok(Some(RankQueuePair { qp, in_flight: VecDeque::new(), waiting: VecDeque::new() }))
        };
        let lanes: Vec<Option<RankQueuePair>> = (0..count).map(lane).collect::<Result<_>>()?;
        let number =
            |(at, lane): (usize, &Option<RankQueuePair>)| Some((lane.as_ref()?.qp.number(), at));
        let by_number = lanes.iter().enumerate().filter_map(number).collect();
        Ok(Self { lanes, by_number, completions, scratch, lost: 0 })
    }
}

impl RankQueuePair {
    /// Posts waiting work requests, as far as there is room.
    fn post(&mut self, room: usize) -> Result<()> {
        // SAFETY: the memory belongs to a region, and NCCL leaves it alone until the request is
        // done. If the region ends before, its key does, too, and the device fails the work
        // request. The queue pair is dropped before the scratch memory.
        unsafe { self.qp.post_waiting(&mut self.waiting, &mut self.in_flight, room) }
    }
}

impl RdmaWire {
    /// Fails everything for a rank.
    fn lose(&self, queues: &mut ContextQueuePairs, rank: usize, fault: Fault) {
        self.mesh.lose(rank, fault);
        // The queue pairs go before the parts, so the device is done with their memory.
        for lane in &mut queues.lanes[rank * self.lanes..][..self.lanes] {
            drop(lane.take());
        }
    }

    /// Handles completions, and posts waiting work requests.
    fn move_on(&self, queues: &mut ContextQueuePairs) -> Result<()> {
        let mut found = [Completion::NONE; BATCH];
        loop {
            let count = queues.completions.poll(&mut found)?;
            for completion in &found[..count] {
                let Some(at) = queues.by_number.get(&completion.number).copied() else { continue };
                let Some(lane) = &mut queues.lanes[at] else { continue };
                if completion.status == ibv_wc_status::IBV_WC_SUCCESS {
                    if let Some(Some(part)) = lane.in_flight.pop_front() {
                        part.succeed();
                    }
                    continue;
                }
                let rank = at / self.lanes;
                let fault = failure(&self.nic, &format!("rank {rank}"), completion);
                self.lose(queues, rank, fault);
            }
            if count < BATCH {
                break;
            }
        }
        let lost = self.mesh.lost();
        if lost != queues.lost {
            queues.lost = lost;
            for rank in 0..self.mesh.ranks() {
                if let Some(fault) = self.mesh.fault(rank) {
                    self.lose(queues, rank, fault);
                }
            }
        }
        for at in 0..queues.lanes.len() {
            if let Some(lane) = &mut queues.lanes[at]
                && let Err(fault) = lane.post(self.room)
            {
                self.lose(queues, at / self.lanes, fault);
            }
        }
        Ok(())
    }
}

impl Wire for RdmaWire {
    fn post(&self, domain: usize, rank: usize, operation: RmaOperation, part: RequestPart) {
        let queues = &mut *self.queues.lock();
        let (local, lkey) = (queues.scratch.address(), queues.scratch.lkey);
        let Some(lane) = &mut queues.lanes[rank * self.lanes + domain % self.lanes] else { return };
        let request = |work, far: &Far, bytes| {
            let (remote, rkey) = far.remote(rank);
            let (signaled, readable) = (true, false);
            WorkRequest { id: 0, work, local, lkey, remote, rkey, bytes, signaled, readable }
        };
        let (work, transfer) = match operation {
            RmaOperation::Put(put) => (Work::Write, put),
            RmaOperation::Get(get) => (Work::Read, get),
            RmaOperation::Signal(far, value) => {
                lane.waiting.push_back((request(Work::Add(value), &far, 8), Some(part)));
                return self.post_waiting(queues, rank, domain);
            }
            RmaOperation::Flush(far) => {
                lane.waiting.push_back((request(Work::Read, &far, 1), Some(part)));
                return self.post_waiting(queues, rank, domain);
            }
        };
        let Some((local, lkey, kind)) = transfer.near.registered() else {
            // Nothing may follow: a later signal would announce bytes that never came.
            let text = "a region was deregistered before its memory was sent";
            return self.lose(queues, rank, Fault::Argument(text.to_owned()));
        };
        let (mut part, mut done) = (Some(part), 0);
        while done < transfer.bytes {
            let bytes = (transfer.bytes - done).min(self.nic.piece_max as u64);
            let of_scratch = request(work, &transfer.far, bytes as u32);
            let remote = of_scratch.remote.wrapping_add(done);
            let readable = work == Work::Write && kind == POINTER_HOST;
            let local = local + done;
            let request = WorkRequest { local, lkey, remote, readable, ..of_scratch };
            done += bytes;
            let last = if done == transfer.bytes { part.take() } else { None };
            lane.waiting.push_back((request, last));
        }
        self.post_waiting(queues, rank, domain);
    }

    fn progress(&self) {
        let now = now_ns();
        let queues = &mut *self.queues.lock();
        // Relaxed, because it doesn't matter which of several threads looks.
        if now.saturating_sub(self.looked_ns.load(Ordering::Relaxed)) > LOOK_NS {
            self.looked_ns.store(now, Ordering::Relaxed);
            if let Err(fault) = self.nic.look() {
                self.lose_all(queues, &fault);
            }
        }
        self.moved(queues);
    }

    fn has_failed(&self) -> bool {
        self.mesh.has_failed()
    }

    fn is_over(&self, rank: usize) -> bool {
        self.mesh.fault(rank).is_some()
    }

    fn flushes(&self) -> bool {
        true
    }
}

impl RdmaWire {
    /// Posts the waiting work requests of one queue pair. Completions come with the next progress.
    fn post_waiting(&self, queues: &mut ContextQueuePairs, rank: usize, domain: usize) {
        if let Some(lane) = &mut queues.lanes[rank * self.lanes + domain % self.lanes]
            && let Err(fault) = lane.post(self.room)
        {
            self.lose(queues, rank, fault);
        }
    }

    fn moved(&self, queues: &mut ContextQueuePairs) {
        if let Err(fault) = self.move_on(queues) {
            self.lose_all(queues, &fault);
        }
    }

    fn lose_all(&self, queues: &mut ContextQueuePairs, fault: &Fault) {
        for rank in 0..self.mesh.ranks() {
            self.lose(queues, rank, fault.clone());
        }
    }
}
