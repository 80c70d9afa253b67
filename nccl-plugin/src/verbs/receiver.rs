//! The receiving end. It announces each posted buffer in the sender's fifo, and gets immediate data
//! for each message.
//!
//! An arrival on any queue pair takes a work request of one shared receive queue. That queue has
//! one for each posted buffer, so it is never empty.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use super::completions::{BATCH, Completion, Completions, SharedReceive};
use super::connect;
use super::control_connection::{PeerState, PeerWatch};
use super::cts::{self, Arrival, CtsEntry, DEPTH, ENTRY_BYTES, FIFO_BYTES, TABLE_BYTES};
use super::hello::{ClassQueuePair, End};
use super::nic::{Nic, registered};
use super::pinned::Pinned;
use super::queue_pair::{OwnedQueuePair, Work, WorkRequest, failure};
use crate::backend::{
    self, Buffer, Memory, MemoryRegistration, POINTER_CUDA, POINTER_DMABUF, Received,
};
use crate::fault::{Fault, Result};

/// Largest number of arrivals, which is that of posted buffers.
const ARRIVALS: u32 = DEPTH as u32;
/// Work requests of the queue pair that announces buffers, and of the one for flushes.
const ANNOUNCEMENTS: u32 = 64;
const FLUSHES: u32 = 64;
/// Work requests of the other queue pairs. They only receive, but some devices need one.
const FEW: u32 = 1;
/// Number of announcements for each reported completion, which also covers the announcements before
/// it.
const SIGNAL_EVERY: usize = 8;
/// Bit that distinguishes numbers of flushes from those of buffers.
const FLUSH: u64 = 1 << 63;
/// The bit `IBV_WC_RECV`, which is in the opcodes of all arrivals.
const ARRIVED: u32 = 128;

/// A receiving end whose sender is still connecting.
pub(super) struct Welcoming {
    lanes: SmallVec<[(OwnedQueuePair, ClassQueuePair); 8]>,
    shared: SharedReceive,
    completions: Completions,
    table: Pinned,
    shadow: Pinned,
    nic: Arc<Nic>,
    fifo: (u64, u32),
}

impl Welcoming {
    /// Creates a receiving end and connects its side to the sender.
    pub(super) fn new(nic: &Arc<Nic>, theirs: &End) -> Result<Self> {
        nic.check_link(theirs)?;
        let completions = Completions::new(nic, ARRIVALS + ANNOUNCEMENTS + FLUSHES)?;
        let shared = SharedReceive::new(nic, ARRIVALS)?;
        let lane = |(at, theirs_lane): (usize, &ClassQueuePair)| {
            let work_requests = if at == 0 { ANNOUNCEMENTS } else { FEW };
            let qp = OwnedQueuePair::new(nic, &completions, Some(&shared), work_requests)?;
            let ours = ClassQueuePair {
                dscp: theirs_lane.dscp,
                service_level: theirs_lane.service_level,
                number: qp.number(),
                first_packet: connect::first_packet(),
            };
            qp.connect(&ours, theirs_lane, theirs)?;
            Ok((qp, ours))
        };
        Ok(Self {
            lanes: theirs.lanes.iter().enumerate().map(lane).collect::<Result<_>>()?,
            table: Pinned::new(nic, TABLE_BYTES, true)?,
            shadow: Pinned::new(nic, FIFO_BYTES, false)?,
            shared,
            completions,
            nic: Arc::clone(nic),
            fifo: (theirs.address, theirs.rkey),
        })
    }

    pub(super) fn end(&self) -> End {
        let lanes = self.lanes.iter().map(|(_, lane)| *lane);
        connect::end(&self.nic, self.table.address(), self.table.rkey, lanes)
    }
}

/// A buffer that is posted: its number, and its size in bytes.
type PostedBuffer = (u64, usize);

/// The receiving end of a connection. The queue pairs come first, so that they are dropped before
/// what they use.
pub(super) struct VerbsReceiver {
    lanes: SmallVec<[OwnedQueuePair; 8]>,
    /// The queue pair that reads a byte of this host's registered memory back, and the memory it
    /// reads into.
    flusher: Option<(OwnedQueuePair, Pinned)>,
    shared: SharedReceive,
    completions: Completions,
    table: Pinned,
    shadow: Pinned,
    nic: Arc<Nic>,
    numbers: SmallVec<[u32; 8]>,
    /// Address and key of the sender's fifo.
    fifo: (u64, u32),
    watch: PeerWatch,
    next: u64,
    slots: [Option<PostedBuffer>; DEPTH],
    /// Announcements in flight, and how many of them follow the last one with a completion.
    announcements: usize,
    untold: usize,
    flushes: VecDeque<u64>,
    flushed: u64,
    /// Number of messages that arrived, by queue pair.
    arrived: SmallVec<[u64; 8]>,
    fault: Option<Fault>,
}

fn is_gpu(kind: i32) -> bool {
    kind & (POINTER_CUDA | POINTER_DMABUF) != 0
}

impl VerbsReceiver {
    /// Returns the receiving end after the sender is connected.
    pub(super) fn new(welcoming: Welcoming, watch: PeerWatch) -> Self {
        let lanes: SmallVec<[OwnedQueuePair; 8]> =
            welcoming.lanes.into_iter().map(|(qp, _)| qp).collect();
        Self {
            numbers: lanes.iter().map(OwnedQueuePair::number).collect(),
            arrived: lanes.iter().map(|_| 0).collect(),
            lanes,
            flusher: None,
            shared: welcoming.shared,
            completions: welcoming.completions,
            table: welcoming.table,
            shadow: welcoming.shadow,
            nic: welcoming.nic,
            fifo: welcoming.fifo,
            watch,
            next: 0,
            slots: [None; DEPTH],
            announcements: 0,
            untold: 0,
            flushes: VecDeque::new(),
            flushed: 0,
            fault: None,
        }
    }

    fn break_with(&mut self, fault: Fault) {
        self.fault.get_or_insert(fault);
    }

    /// Announces a buffer in the sender's fifo.
    fn offer_buffer(&mut self, post: u64, buffer: Buffer<'_>) -> Result<()> {
        let at = cts::place(post);
        let Buffer { address, bytes, region } = buffer;
        let rkey = match region {
            Some(region) => registered(region)?.rkey,
            None if bytes == 0 => 0,
            None => {
                return Err(Fault::Argument(format!(
                    "a buffer of {bytes} bytes has no memory registration"
                )));
            }
        };
        let entry = CtsEntry { post, address: address as u64, bytes: bytes as u64, rkey };
        for (word, value) in self.shadow.words()[at..].iter().zip(entry.encode()) {
            // Relaxed, because the post that follows makes the word visible to the NIC.
            word.store(value, Ordering::Relaxed);
        }
        self.shared.post()?;
        let told = self.untold + 1 >= SIGNAL_EVERY;
        let request = WorkRequest {
            id: self.untold as u64 + 1,
            work: Work::Write,
            local: self.shadow.address() + at as u64 * 8,
            lkey: self.shadow.lkey,
            remote: self.fifo.0.wrapping_add(at as u64 * 8),
            rkey: self.fifo.1,
            bytes: ENTRY_BYTES as u32,
            signaled: told,
            readable: true,
        };
        // SAFETY: `shadow` is owned here and dropped after the queue pair. Its part is written
        // again only after the buffer's message arrived, when the sender has read it.
        let posted = unsafe { self.lanes[0].post(&[request]) }?;
        if posted == 0 {
            return Err(Fault::Internal("the queue for announcements is full".into()));
        }
        self.announcements += 1;
        self.untold = if told { 0 } else { self.untold + 1 };
        Ok(())
    }

    /// Returns the queue pair for flushes, which is connected to itself.
    fn flusher(&mut self) -> Result<&(OwnedQueuePair, Pinned)> {
        if self.flusher.is_none() {
            let qp = OwnedQueuePair::new(&self.nic, &self.completions, None, FLUSHES)?;
            let lane = ClassQueuePair {
                number: qp.number(),
                first_packet: connect::first_packet(),
                ..ClassQueuePair::default()
            };
            let own = connect::end(&self.nic, 0, 0, [lane].into_iter());
            qp.connect(&lane, &lane, &own)?;
            let target = Pinned::new(&self.nic, 8, false)?;
            self.flusher = Some((qp, target));
        }
        self.flusher.as_ref().ok_or_else(|| Fault::Internal("no queue pair for flushes".into()))
    }

    fn read_back(&mut self, number: u64, address: usize, rkey: u32) -> Result<()> {
        let (qp, target) = self.flusher()?;
        let request = WorkRequest {
            id: number,
            work: Work::Read,
            local: target.address(),
            lkey: target.lkey,
            remote: address as u64,
            rkey,
            bytes: 1,
            signaled: true,
            readable: false,
        };
        // SAFETY: the byte that is written is owned here, and nobody reads it.
        match unsafe { qp.post(&[request]) }? {
            0 => Err(Fault::Internal("too many flushes at a time".into())),
            _ => Ok(()),
        }
    }

    fn arrive(&mut self, completion: &Completion, received: &mut Vec<Received>) -> Result<()> {
        if let Some(lane) = self.numbers.iter().position(|number| *number == completion.number) {
            self.arrived[lane] += 1;
        }
        let arrival = Arrival::decode(completion.immediate);
        let nonsense = |what: &str| {
            Fault::Remote(format!("the sender at {} announces {what}", self.watch.peer()))
        };
        let posted = self.slots.get_mut(arrival.slot).and_then(Option::take);
        let Some((post, room)) = posted else {
            return Err(nonsense("a message for a buffer that is not posted"));
        };
        let bytes = arrival.bytes.unwrap_or_else(|| {
            // Acquire, because the polled completion comes after the NIC's write.
            let word = &self.table.words()[cts::size_place(post)];
            u64::from_le(word.load(Ordering::Acquire))
        });
        let Some(bytes) = usize::try_from(bytes).ok().filter(|bytes| *bytes <= room) else {
            return Err(nonsense("a message that is larger than its buffer"));
        };
        received.push(Received { post, bytes: Some(bytes) });
        Ok(())
    }

    fn complete(&mut self, completion: &Completion, received: &mut Vec<Received>) -> Result<()> {
        if completion.status != 0 {
            return Err(failure(&self.nic, self.watch.peer(), completion));
        }
        if completion.opcode & ARRIVED != 0 {
            return self.arrive(completion, received);
        }
        if completion.id & FLUSH != 0 {
            self.flushes.retain(|flush| *flush != completion.id);
            received.push(Received { post: completion.id, bytes: None });
            return Ok(());
        }
        self.announcements = self.announcements.saturating_sub(completion.id as usize);
        Ok(())
    }

    fn drain(&mut self, received: &mut Vec<Received>) {
        let mut batch = [Completion::NONE; BATCH];
        loop {
            let count = match self.completions.poll(&mut batch) {
                Ok(count) => count,
                Err(fault) => return self.break_with(fault),
            };
            for completion in &batch[..count] {
                if let Err(fault) = self.complete(completion, received) {
                    // Completions after this one may still be good.
                    self.break_with(fault);
                }
            }
            if count < BATCH {
                return;
            }
        }
    }

    fn look(&mut self) {
        match self.watch.look() {
            PeerState::There | PeerState::Leaving => {}
            PeerState::Looked => {
                if let Err(fault) = self.nic.look() {
                    self.break_with(fault);
                }
            }
            PeerState::Gone => {
                let fault = Fault::Remote(format!("the sender at {} is gone", self.watch.peer()));
                self.break_with(fault);
            }
        }
    }
}

impl backend::Receiver for VerbsReceiver {
    fn register(&mut self, memory: Memory) -> Result<MemoryRegistration> {
        let registered = self.nic.register(memory)?;
        if is_gpu(memory.kind) {
            // The flusher is created now rather than between messages.
            self.flusher()?;
        }
        Ok(Box::new(registered))
    }

    fn deregister(&mut self, region: MemoryRegistration) -> Result<()> {
        self.nic.deregister(registered(&region)?)
    }

    fn post(&mut self, buffer: Buffer<'_>) -> Option<u64> {
        let post = self.next;
        let slot = &mut self.slots[post as usize % DEPTH];
        if self.fault.is_none() {
            if slot.is_some() || self.announcements >= ANNOUNCEMENTS as usize {
                return None;
            }
            *slot = Some((post, buffer.bytes));
            if let Err(fault) = self.offer_buffer(post, buffer) {
                self.break_with(fault);
            }
        }
        // A broken connection takes buffers, so that `progress` can return the fault.
        self.next += 1;
        Some(post)
    }

    fn flush(&mut self, buffer: Buffer<'_>) -> Option<u64> {
        let registered = registered(buffer.region?).ok()?;
        if buffer.bytes == 0 || !is_gpu(registered.kind) {
            return None;
        }
        let number = FLUSH | self.flushed;
        self.flushed += 1;
        if self.fault.is_none() {
            self.flushes.push_back(number);
            if let Err(fault) = self.read_back(number, buffer.address, registered.rkey) {
                self.break_with(fault);
            }
        }
        Some(number)
    }

    fn progress(&mut self, received: &mut Vec<Received>) -> Result<()> {
        let before = received.len();
        if self.fault.is_none() {
            self.drain(received);
        }
        if self.fault.is_none() {
            self.look();
        }
        match &self.fault {
            // Returns completed receives first, and the fault with the next call.
            Some(fault) if received.len() == before => Err(fault.clone()),
            _ => Ok(()),
        }
    }

    fn close(mut self: Box<Self>) {
        if !self.nic.is_ours() {
            return;
        }
        self.drain(&mut Vec::new());
        let Self { arrived, watch, .. } = *self;
        watch.part(&arrived);
    }
}
