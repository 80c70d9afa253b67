//! The sending end. It waits for a buffer in the fifo that the receiver writes, and writes messages
//! into the receiver's memory, each on the queue pair of its class.
//!
//! Every piece that is pushed is one work request with its own completion. The completion tells the
//! scheduler that the bytes were delivered, because the peer's NIC has acknowledged them. The last
//! piece carries the announcement. Pieces wait here while their queue is full. A queue pair
//! completes in order, so a message is done when its last piece is.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::completions::{BATCH, Completion, Completions};
use super::connect;
use super::control_connection::{self, PeerState, PeerWatch};
use super::cts::{self, Arrival, CtsEntry, FIFO_BYTES, TABLE_BYTES};
use super::hello::{ClassQueuePair, End};
use super::nic::{INFINIBAND, Nic, registered};
use super::outgoing::{Newest, OutgoingQueue};
use super::pinned::Pinned;
use super::queue_pair::{OwnedQueuePair, Work, failure};
use crate::backend::{
    self, Buffer, Memory, MemoryRegistration, Message, POINTER_HOST, Sent, TrafficClasses,
};
use crate::fault::{Fault, Result};

const WORK_REQUESTS: u32 = 128;
/// Largest message, in bytes, whose write also announces it on InfiniBand. Such a network may send
/// packets of one write by several paths, except for a write that announces itself.
const ANNOUNCED_APART: usize = 8192;
/// Longest wait of an orderly close for bytes in flight.
const LINGER: Duration = Duration::from_secs(5);

/// The resources of a sending end before its peer is known.
pub(super) struct Greeting {
    lanes: SmallVec<[(OwnedQueuePair, ClassQueuePair); 8]>,
    completions: Completions,
    fifo: Pinned,
    sizes: Pinned,
    nic: Arc<Nic>,
}

/// The sending end of a connection. The queue pairs come first, so that they are dropped before
/// what they use.
pub(super) struct VerbsSender {
    lanes: SmallVec<[OutgoingQueue; 8]>,
    completions: Completions,
    fifo: Pinned,
    sizes: Pinned,
    nic: Arc<Nic>,
    /// Address and key of the receiver's table of sizes.
    table: (u64, u32),
    watch: Option<PeerWatch>,
    /// Number of the next buffer.
    head: u64,
    /// The buffer that `clear` found for the next message.
    matched: Option<CtsEntry>,
    begun: u64,
    newest: Option<Newest>,
    /// Messages that were seen as done outside of `progress`. The next `progress` returns them.
    seen: Vec<Sent>,
    fault: Option<Fault>,
}

impl Greeting {
    pub(super) fn new(nic: &Arc<Nic>, classes: &TrafficClasses, service_level: u8) -> Result<Self> {
        let service_level = if nic.link == INFINIBAND { service_level } else { 0 };
        let depth = WORK_REQUESTS * classes.len() as u32;
        let completions = Completions::new(nic, depth)?;
        let lane = |dscp: &u8| {
            let qp = OwnedQueuePair::new(nic, &completions, None, WORK_REQUESTS)?;
            let lane = ClassQueuePair {
                dscp: *dscp & 63,
                service_level,
                number: qp.number(),
                first_packet: connect::first_packet(),
            };
            Ok((qp, lane))
        };
        Ok(Self {
            lanes: classes.iter().map(lane).collect::<Result<_>>()?,
            fifo: Pinned::new(nic, FIFO_BYTES, true)?,
            sizes: Pinned::new(nic, TABLE_BYTES, false)?,
            completions,
            nic: Arc::clone(nic),
        })
    }

    pub(super) fn end(&self) -> End {
        let lanes = self.lanes.iter().map(|(_, lane)| *lane);
        connect::end(&self.nic, self.fifo.address(), self.fifo.rkey, lanes)
    }

    pub(super) fn connect(self, theirs: &End) -> Result<VerbsSender> {
        self.nic.check_link(theirs)?;
        if theirs.lanes.len() != self.lanes.len() {
            return Err(Fault::Remote("the receiver has another number of classes".into()));
        }
        for ((qp, ours), theirs_lane) in self.lanes.iter().zip(&theirs.lanes) {
            qp.connect(ours, theirs_lane, theirs)?;
        }
        let room = WORK_REQUESTS.min(self.nic.work_requests_max) as usize;
        let outgoing = |(qp, _)| OutgoingQueue {
            qp,
            room,
            in_flight: VecDeque::new(),
            waiting: VecDeque::new(),
            done: 0,
        };
        Ok(VerbsSender {
            lanes: self.lanes.into_iter().map(outgoing).collect(),
            completions: self.completions,
            fifo: self.fifo,
            sizes: self.sizes,
            nic: self.nic,
            table: (theirs.address, theirs.rkey),
            watch: None,
            head: 0,
            matched: None,
            begun: 0,
            newest: None,
            seen: Vec::new(),
            fault: None,
        })
    }
}

impl VerbsSender {
    /// Stores the watch over the peer after the handshake.
    pub(super) fn watch(&mut self, watch: PeerWatch) {
        self.watch = Some(watch);
    }

    fn peer(&self) -> &str {
        self.watch.as_ref().map_or("the receiver", PeerWatch::peer)
    }

    fn break_with(&mut self, fault: Fault) {
        self.fault.get_or_insert(fault);
    }

    fn in_flight(&self) -> bool {
        self.lanes.iter().any(|lane| !lane.in_flight.is_empty() || !lane.waiting.is_empty())
    }

    fn drain(&mut self, sent: &mut Vec<Sent>) {
        let mut batch = [Completion::NONE; BATCH];
        loop {
            let count = match self.completions.poll(&mut batch) {
                Ok(count) => count,
                Err(fault) => return self.break_with(fault),
            };
            for completion in &batch[..count] {
                if completion.status != 0 {
                    // Messages that the receiver reported as arrived are done nevertheless.
                    self.settle(sent, true);
                    let fault = failure(&self.nic, self.peer(), completion);
                    self.break_with(fault);
                    return;
                }
                let completed = match self.lanes.get_mut(completion.id as usize) {
                    Some(lane) => lane.complete_oldest(sent).then(|| lane.post()),
                    None => None,
                };
                match completed {
                    Some(Ok(())) => {}
                    Some(Err(fault)) => return self.break_with(fault),
                    None => {
                        return self.break_with(Fault::Internal("a completion of nothing".into()));
                    }
                }
            }
            if count < BATCH {
                return;
            }
        }
    }

    /// Completes the messages that a leaving receiver reports as arrived. Their acknowledgement may
    /// be lost.
    fn settle(&mut self, sent: &mut Vec<Sent>, now: bool) {
        let Some(watch) = &mut self.watch else { return };
        if now {
            watch.look_now();
        }
        let Some(arrived) = control_connection::arrived(watch.farewell(), self.lanes.len()) else {
            return;
        };
        for (lane, arrived) in self.lanes.iter_mut().zip(arrived) {
            while lane.done < arrived && lane.complete_oldest(sent) {}
        }
    }

    /// Checks the peer and the device from time to time.
    fn look(&mut self, sent: &mut Vec<Sent>) {
        let peer_state = self.watch.as_mut().map_or(PeerState::There, PeerWatch::look);
        match peer_state {
            PeerState::There => {}
            PeerState::Looked => {
                if let Err(fault) = self.nic.look() {
                    self.break_with(fault);
                }
            }
            PeerState::Leaving => self.settle(sent, false),
            PeerState::Gone => {
                self.settle(sent, false);
                let messages = if self.in_flight() { " with messages in flight" } else { "" };
                let fault =
                    Fault::Remote(format!("the receiver at {} is gone{messages}", self.peer()));
                self.break_with(fault);
            }
        }
    }

    /// Queues work requests for the next bytes of the newest message.
    fn queue(&mut self, bytes: usize) -> Option<usize> {
        let apart = self.nic.link == INFINIBAND;
        let piece_max = self.nic.piece_max;
        let newest = self.newest.as_mut()?;
        let lane = self.lanes.get_mut(newest.class)?;
        let bytes = bytes.min(newest.bytes - newest.pushed);
        let end = newest.pushed + bytes;
        let over = end == newest.bytes;
        let (immediate, in_table) = Arrival::encode(newest.entry.post, newest.bytes as u64);
        let announced_apart = in_table || (apart && newest.bytes > ANNOUNCED_APART);
        loop {
            let count = (end - newest.pushed).min(piece_max);
            let last = over && newest.pushed + count == newest.bytes;
            let announces = last && !announced_apart;
            if count > 0 || announces {
                let work = if announces { Work::Announce(immediate) } else { Work::Write };
                let request = newest.request(work, count);
                lane.waiting.push_back((request, newest.piece(count, announces)));
                newest.pushed += count;
            }
            if newest.pushed == end {
                break;
            }
        }
        if over && announced_apart {
            let table = in_table.then_some(self.table);
            let request = newest.announcement(immediate, &self.sizes, table);
            lane.waiting.push_back((request, newest.piece(0, true)));
        }
        let class = newest.class;
        if over {
            self.newest = None;
        }
        Some(class)
    }
}

impl backend::Sender for VerbsSender {
    fn register(&mut self, memory: Memory) -> Result<MemoryRegistration> {
        Ok(Box::new(self.nic.register(memory)?))
    }

    fn deregister(&mut self, region: MemoryRegistration) -> Result<()> {
        self.nic.deregister(registered(&region)?)
    }

    fn clear(&mut self, bytes: usize) -> Result<bool> {
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        self.matched = cts::read(self.fifo.words(), self.head);
        let Some(CtsEntry { bytes: room, .. }) = self.matched else {
            // A receiver that is gone never posts. Without bytes in flight, only this check
            // notices.
            let mut seen = core::mem::take(&mut self.seen);
            self.look(&mut seen);
            self.seen = seen;
            return self.fault.clone().map_or(Ok(false), Err);
        };
        if bytes as u64 > room {
            self.matched = None;
            return Err(Fault::Argument(format!(
                "a message of {bytes} bytes was sent to {} where a buffer of {room} was posted",
                self.peer()
            )));
        }
        Ok(true)
    }

    fn begin(&mut self, message: Message<'_>) -> u64 {
        let number = self.begun;
        self.begun += 1;
        let Some(entry) = self.matched.take() else {
            self.break_with(Fault::Internal("a message was begun before it was allowed to".into()));
            return number;
        };
        self.head += 1;
        let Buffer { address, bytes, region } = message.buffer;
        let keys = match region.map(registered) {
            Some(Ok(registered)) => Some((registered.lkey, registered.kind)),
            None if bytes == 0 => Some((0, POINTER_HOST)),
            Some(Err(fault)) => {
                self.break_with(fault);
                None
            }
            None => {
                self.break_with(Fault::Argument(format!(
                    "a message of {bytes} bytes has no memory registration"
                )));
                None
            }
        };
        self.newest = keys.map(|(lkey, kind)| Newest {
            message: number,
            class: if message.class < self.lanes.len() { message.class } else { 0 },
            entry,
            address,
            lkey,
            bytes,
            pushed: 0,
            readable: kind == POINTER_HOST,
            accounted: message.accounted,
        });
        number
    }

    fn push(&mut self, bytes: usize) {
        if self.fault.is_some() {
            return;
        }
        if let Some(class) = self.queue(bytes)
            && let Err(fault) = self.lanes[class].post()
        {
            self.break_with(fault);
        }
    }

    fn progress(&mut self, sent: &mut Vec<Sent>) -> Result<()> {
        let before = sent.len();
        sent.append(&mut self.seen);
        if self.fault.is_none() {
            self.drain(sent);
        }
        if self.fault.is_none() {
            self.look(sent);
        }
        match &self.fault {
            // Returns messages that are done first, and the fault with the next call.
            Some(fault) if sent.len() == before => Err(fault.clone()),
            _ => Ok(()),
        }
    }

    fn close(mut self: Box<Self>, kept: bool) {
        let until = Instant::now() + LINGER;
        let mut sent = Vec::new();
        while kept
            && self.nic.is_ours()
            && self.in_flight()
            && self.fault.is_none()
            && Instant::now() < until
        {
            self.drain(&mut sent);
            self.look(&mut sent);
            std::thread::yield_now();
        }
    }
}
