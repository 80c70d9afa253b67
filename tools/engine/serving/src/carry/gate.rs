//! The thread that owns the lane. It submits flows, sends permitted bytes on the connection of
//! their class, and reports acknowledged bytes as completed. Hints use the same thread, so that the
//! daemon gets everything in order.
//!
//! The thread waits for commands and, while flows wait, for permits. It cannot wait for both at
//! once, so while flows wait it polls for commands every [`LOOK_EVERY`].

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use laxity_client::{Client, Direction, Flow, Hint, Lane, Mode, Stage, Ticket, peers};

use super::carrier::{Counts, Options};
use super::frame::{Head, Preamble, READ, ReadPart};
use super::outgoing::{Load, Outgoing, Said};
use super::{Incoming, Taker};
use crate::clock;

/// Longest time that a wait for a permit may delay a command.
const LOOK_EVERY: Duration = Duration::from_micros(200);

/// Maximum number of flows that wait in the lane at once. Others wait here, in order, because a
/// full lane would bypass them.
const WAITING_MAX: usize = 448;

/// A command of another thread. The gate's thread executes it.
pub(super) type GateOrder = Box<dyn FnOnce(&mut Gate) + Send>;

pub(super) struct Parcel {
    pub(super) to: SocketAddr,
    pub(super) head: Head,
    /// Deadline in ns, or 0 for none.
    pub(super) deadline_ns: u64,
    pub(super) scavenged: bool,
    /// Whether this process reads the parcel from `to`, instead of sending it.
    pub(super) read: bool,
    pub(super) bytes: u64,
    /// Bytes of the parcel. Empty if it is read.
    pub(super) payload: Arc<Vec<u8>>,
}

impl Parcel {
    pub(super) fn new(to: SocketAddr, head: Head, deadline_ns: u64, payload: Vec<u8>) -> Self {
        let (bytes, payload) = (payload.len() as u64, Arc::new(payload));
        Self { to, head, deadline_ns, scavenged: false, read: false, bytes, payload }
    }
}

struct Sending {
    ticket: Ticket,
    to: SocketAddr,
    /// The stage that the daemon has for the flow.
    stage: Stage,
    head: Head,
    payload: Arc<Vec<u8>>,
    class: Option<u8>,
    permitted: u64,
    arrived: u64,
}

/// The flows in progress of a batch or request, and whether it has ended.
#[derive(Default)]
struct Open {
    flows: u64,
    ended: bool,
}

/// Batches or requests by number, until they have no flow in progress. The next flow adds one
/// again. Methods return true when the daemon gets the hint that one has ended.
#[derive(Default)]
struct OpenSet(HashMap<u64, Open>);

impl OpenSet {
    fn add_flow(&mut self, number: u64) {
        if number != 0 {
            self.0.entry(number).or_default().flows += 1;
        }
    }

    fn close_flow(&mut self, number: u64) -> bool {
        if let Some(open) = self.0.get_mut(&number) {
            open.flows = open.flows.saturating_sub(1);
        }
        self.settle(number)
    }

    fn end(&mut self, number: u64) -> bool {
        self.0.entry(number).or_default().ended = true;
        self.settle(number)
    }

    fn settle(&mut self, number: u64) -> bool {
        let is_idle = self.0.get(&number).is_some_and(|open| open.flows == 0);
        is_idle && self.0.remove(&number).is_some_and(|open| open.ended)
    }
}

/// A parcel that its receiver may read.
struct Offer {
    head: Head,
    payload: Arc<Vec<u8>>,
    /// The class of the first part that was given. Each class has a connection, and parts on two
    /// connections can arrive in another order.
    class: Option<u8>,
}

impl Offer {
    /// Returns the class of the next part. `now` is that of the stage.
    fn class(&mut self, now: u8) -> u8 {
        *self.class.get_or_insert(now)
    }
}

pub(super) struct Gate {
    client: Client,
    pub(super) lane: Lane,
    nic: u8,
    words_dscp: u8,
    listens: SocketAddr,
    own: Sender<GateOrder>,
    pub(super) is_stopped: bool,
    taker: Taker,
    counts: Arc<Mutex<Counts>>,
    connections: HashMap<(SocketAddr, Option<(Stage, u8)>), Outgoing>,
    sending: HashMap<u64, Sending>,
    waiting: Vec<u64>,
    backlog: VecDeque<Parcel>,
    batches: OpenSet,
    requests: OpenSet,
    /// Parcels that others may read, by receiver, request and layer.
    offers: HashMap<(SocketAddr, u64, u16), Offer>,
    flows: u64,
    made: u64,
}

impl Gate {
    pub(super) fn new(
        options: &Options,
        listens: SocketAddr,
        own: Sender<GateOrder>,
        taker: Taker,
        counts: Arc<Mutex<Counts>>,
    ) -> Self {
        let defaults = laxity_client::Options {
            name: options.name.clone(),
            reattach_every: Duration::from_millis(100),
            stall_timeout: options.stall,
            attach_timeout: Duration::from_secs(2),
            ..laxity_client::Options::default()
        };
        let client = Client::attach(match &options.socket {
            Some(socket) => laxity_client::Options { socket: socket.clone(), ..defaults },
            None => laxity_client::Options { mode: Mode::Off, ..defaults },
        });
        let lane = client.lane();
        Self {
            client,
            lane,
            nic: options.nic,
            words_dscp: options.words_dscp,
            listens,
            own,
            is_stopped: false,
            taker,
            counts,
            connections: HashMap::new(),
            sending: HashMap::new(),
            waiting: Vec::new(),
            backlog: VecDeque::new(),
            batches: OpenSet::default(),
            requests: OpenSet::default(),
            offers: HashMap::new(),
            flows: 0,
            made: 0,
        }
    }

    pub(super) fn serve(mut self, orders: &Receiver<GateOrder>) {
        loop {
            // The queue never closes, because the gate has a sender of its own.
            let first = if self.waiting.is_empty() { orders.recv().ok() } else { None };
            let first = first.or_else(|| orders.try_recv().ok());
            if first.is_none() {
                self.lane.wait_any(LOOK_EVERY);
            }
            for order in first.into_iter().chain(orders.try_iter()) {
                order(&mut self);
                if self.is_stopped {
                    return;
                }
            }
            self.collect();
            // Permits free places in the lane for parcels of the backlog.
            while self.waiting.len() < WAITING_MAX
                && let Some(parcel) = self.backlog.pop_front()
            {
                self.submit(parcel);
            }
            self.lane.flush_unsent();
        }
    }

    /// Ends a batch. The daemon gets the hint after all its bytes have arrived.
    pub(super) fn end_batch(&mut self, batch: u64) {
        if self.batches.end(batch) {
            self.lane.hint(Hint::BatchEnd { batch });
        }
    }

    /// Ends a request in the same way.
    pub(super) fn end_request(&mut self, request: u64) {
        if self.requests.end(request) {
            self.lane.hint(Hint::RequestEnd { request });
        }
    }

    pub(super) fn offer(&mut self, to: SocketAddr, head: Head, payload: Vec<u8>) {
        let key = (to, head.request, head.layer);
        self.offers.insert(key, Offer { head, payload: Arc::new(payload), class: None });
    }

    fn hear(&mut self, said: Said) {
        match said {
            Said::Arrived { flow, bytes } => self.arrived(flow, bytes),
            Said::Gone { peer, number, why } => {
                // The loss of a replaced connection says nothing about its successor.
                let mut connections = self.connections.iter();
                if connections.any(|((to, _), found)| *to == peer && found.number == number) {
                    self.gone(peer, why);
                }
            }
        }
    }

    /// Adds a parcel's flow to its batch and request, and submits it or puts it into the backlog.
    pub(super) fn enter(&mut self, parcel: Parcel) {
        self.batches.add_flow(parcel.head.batch);
        self.requests.add_flow(parcel.head.request);
        self.count(|counts| counts.parcels += 1);
        if self.waiting.len() < WAITING_MAX && self.backlog.is_empty() {
            self.submit(parcel);
        } else {
            self.backlog.push_back(parcel);
        }
    }

    fn submit(&mut self, parcel: Parcel) {
        let Parcel { to, head, deadline_ns, scavenged, read, bytes, payload } = parcel;
        let stage = if scavenged { Stage::Background } else { head.kind.stage() };
        self.flows += 1;
        let now = clock::now().0;
        let head = Head {
            flow: if read { self.flows | READ } else { self.flows },
            total: bytes,
            offset: 0,
            len: 0,
            remaining_ns: if deadline_ns == 0 { 0 } else { deadline_ns.saturating_sub(now).max(1) },
            ..head
        };
        let address = match to.ip() {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        let ticket = self.lane.submit(&Flow {
            stage,
            direction: if read { Direction::Ingress } else { Direction::Egress },
            nic: self.nic,
            layer: head.layer,
            peer: peers::number(address.octets()),
            bytes: head.total,
            batch: head.batch,
            request: head.request,
            deadline_ns,
            ..Flow::default()
        });
        let sending =
            Sending { ticket, to, stage, head, payload, class: None, permitted: 0, arrived: 0 };
        self.sending.insert(head.flow, sending);
        self.waiting.push(head.flow);
    }

    fn count(&self, with: impl FnOnce(&mut Counts)) {
        with(&mut self.counts.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn collect(&mut self) {
        let (mut ready, mut asked) = (Vec::new(), Vec::new());
        let (lane, all) = (&mut self.lane, &mut self.sending);
        self.waiting.retain(|flow| {
            let Some(sending) = all.get_mut(flow) else { return false };
            let read = flow & READ != 0;
            while let Some(permit) = lane.poll(&mut sending.ticket) {
                let class = *sending.class.get_or_insert(permit.dscp);
                let head = Head { offset: sending.permitted, ..sending.head };
                sending.permitted += permit.bytes;
                let payload = Arc::clone(&sending.payload);
                let bytes = permit.bytes;
                if read {
                    let part = ReadPart {
                        flow: *flow,
                        request: head.request,
                        layer: head.layer,
                        offset: head.offset,
                        bytes,
                    };
                    asked.push((sending.to, part));
                } else {
                    let load = Load::Bytes { head, payload, bytes };
                    ready.push((sending.to, (class, sending.stage), load));
                }
                if permit.last {
                    return false;
                }
            }
            true
        });
        for (to, (class, stage), load) in ready {
            if let Load::Bytes { bytes, .. } = &load {
                let (name, bytes) = (stage.name(), *bytes);
                self.count(|counts| *counts.sent_bytes.entry((name, class)).or_default() += bytes);
            }
            self.give(to, Some((stage, class)), load);
        }
        for (from, part) in asked {
            if let Ok(line) = serde_json::to_string(&part) {
                self.give(from, None, Load::Words(line));
            }
        }
        let stats = self.client.stats();
        self.count(|counts| {
            counts.bypassed_bytes = stats.bypassed_bytes;
            counts.scheduled_bytes = stats.scheduled_bytes;
            counts.unscheduled_ns = stats.unscheduled_ns;
        });
    }

    /// Sends a part of an offered parcel, in the class that a queue pair for KV reuse has here.
    pub(super) fn give_part(&mut self, to: SocketAddr, part: ReadPart) {
        let key = (to, part.request, part.layer);
        let Some(offer) = self.offers.get_mut(&key) else { return };
        let total = offer.payload.len() as u64;
        let end = part.offset.saturating_add(part.bytes);
        if end > total {
            return;
        }
        let stage = offer.head.kind.stage();
        let class = offer.class(self.client.dscp_of(stage));
        let head = Head { flow: part.flow, total, offset: part.offset, ..offer.head };
        let (payload, bytes) = (Arc::clone(&offer.payload), part.bytes);
        if end == total {
            self.offers.remove(&key);
        }
        self.count(|counts| *counts.sent_bytes.entry((stage.name(), class)).or_default() += bytes);
        let load = Load::Bytes { head, payload, bytes };
        self.give(to, Some((stage, class)), load);
    }

    /// Passes a load to the connection of its stage and class. Opens the connection if there is
    /// none. Stages have connections of their own, as NCCL's and those of a KV transfer are.
    pub(super) fn give(&mut self, to: SocketAddr, class: Option<(Stage, u8)>, load: Load) {
        let key = (to, class);
        if !self.connections.contains_key(&key) {
            let preamble = Preamble {
                words: class.is_none(),
                dscp: class.map_or(self.words_dscp, |(_, dscp)| dscp),
                listens: self.listens,
            };
            let own = self.own.clone();
            let said = move |said| {
                let _ = own.send(Box::new(|gate| gate.hear(said)));
            };
            self.made += 1;
            match Outgoing::open((to, self.made), preamble, said) {
                Ok(connection) => {
                    self.connections.insert(key, connection);
                }
                Err(error) => return self.gone(to, error.to_string()),
            }
        }
        let given = self.connections.get(&key).is_some_and(|connection| connection.give(load));
        if !given {
            self.gone(to, "the connection is gone".to_owned());
        }
    }

    pub(super) fn arrived(&mut self, flow: u64, bytes: u64) {
        let Some(sending) = self.sending.get_mut(&flow) else { return };
        sending.arrived += bytes;
        self.lane.complete(&sending.ticket, bytes);
        if sending.arrived >= sending.head.total
            && let Some(sending) = self.sending.remove(&flow)
        {
            self.close(&sending.head);
        }
    }

    fn close(&mut self, head: &Head) {
        let Head { batch, request, .. } = *head;
        if self.batches.close_flow(batch) {
            self.lane.hint(Hint::BatchEnd { batch });
        }
        if self.requests.close_flow(request) {
            self.lane.hint(Hint::RequestEnd { request });
        }
    }

    /// Handles the loss of a receiver. Withdraws its flows, so that the daemon does not count them
    /// as in flight, and informs the engine.
    fn gone(&mut self, peer: SocketAddr, why: String) {
        self.connections.retain(|(to, _), _| *to != peer);
        self.offers.retain(|(to, ..), _| *to != peer);
        let lost: Vec<u64> = self
            .sending
            .iter()
            .filter(|(_, sending)| sending.to == peer)
            .map(|(flow, _)| *flow)
            .collect();
        for flow in lost {
            if let Some(sending) = self.sending.remove(&flow) {
                self.close(&sending.head);
                self.lane.cancel(sending.ticket);
                self.count(|counts| counts.lost += 1);
            }
        }
        let (lost, stay): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut self.backlog).into_iter().partition(|parcel| parcel.to == peer);
        self.backlog = stay;
        for parcel in lost {
            self.close(&parcel.head);
            self.count(|counts| counts.lost += 1);
        }
        (self.taker)(Incoming::Lost(peer, why));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apart::between::kv_head;
    use crate::carry::Kind;

    #[test]
    fn parts_of_a_parcel_keep_their_class_when_the_daemon_stops_scheduling_between_them() {
        let head = kv_head(Kind::KvReuse, 0, 1, 2, 0);
        let mut offer = Offer { head, payload: Arc::default(), class: None };
        assert_eq!([34, 0, 26].map(|now| offer.class(now)), [34; 3]);
    }
}
