//! The handle by which other threads send to other processes.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use laxity_client::Hint;

use super::Taker;
use super::frame::{Head, ReadPart};
use super::gate::{Gate, GateOrder, Parcel};
use super::outgoing::Load;

#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Path of the daemon's socket. Without it nothing is scheduled.
    pub socket: Option<PathBuf>,
    pub name: String,
    /// Index of the NIC in the daemon's configuration.
    pub nic: u8,
    /// Time without a sign of life after which the daemon counts as gone.
    pub stall: Duration,
    pub words_dscp: u8,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub sent_bytes: BTreeMap<(&'static str, u8), u64>,
    pub parcels: u64,
    pub bypassed_bytes: u64,
    pub scheduled_bytes: u64,
    /// Time without a daemon, in ns.
    pub unscheduled_ns: u64,
    pub lost: u64,
}

/// A handle for sending to other processes. Clones share one thread.
#[derive(Clone)]
pub struct Carrier {
    orders: Sender<GateOrder>,
    counts: Arc<Mutex<Counts>>,
    pub listens: SocketAddr,
}

impl Carrier {
    /// Starts the thread. `listens` is the address that identifies this process.
    pub fn start(options: Options, listens: SocketAddr, taker: Taker) -> std::io::Result<Self> {
        let (orders, incoming) = channel();
        let counts = Arc::new(Mutex::new(Counts::default()));
        let shared = Arc::clone(&counts);
        let own = orders.clone();
        std::thread::Builder::new()
            .name("gate".to_owned())
            .spawn(move || Gate::new(&options, listens, own, taker, shared).serve(&incoming))?;
        Ok(Self { orders, counts, listens })
    }

    // A failed send means that the thread ended, which only happens after [`Self::stop`].
    fn order(&self, order: impl FnOnce(&mut Gate) + Send + 'static) {
        let _ = self.orders.send(Box::new(order));
    }

    fn enter(&self, parcel: Parcel) {
        self.order(|gate| gate.enter(parcel));
    }

    /// Sends a parcel. `head` describes it, except for bytes and flow, which are set here. A
    /// deadline of 0 means none.
    pub fn send(&self, to: SocketAddr, head: Head, deadline_ns: u64, payload: Vec<u8>) {
        self.enter(Parcel::new(to, head, deadline_ns, payload));
    }

    /// Reads a parcel that another process offers, under permits of this process's daemon.
    pub fn read(&self, from: SocketAddr, head: Head, deadline_ns: u64, bytes: u64) {
        let parcel = Parcel::new(from, head, deadline_ns, Vec::new());
        self.enter(Parcel { read: true, bytes, ..parcel });
    }

    /// Offers a parcel. It is sent when its receiver reads it, without a permit of the sender's
    /// daemon, like a NIC that answers an RDMA READ.
    pub fn offer(&self, to: SocketAddr, head: Head, payload: Vec<u8>) {
        self.order(move |gate| gate.offer(to, head, payload));
    }

    pub fn give(&self, to: SocketAddr, part: ReadPart) {
        self.order(move |gate| gate.give_part(to, part));
    }

    /// Reports that bytes of a flow that is read here arrived.
    pub fn arrived(&self, flow: u64, bytes: u64) {
        self.order(move |gate| gate.arrived(flow, bytes));
    }

    /// Sends a parcel of a relegated request to the scavenger, without a deadline. The daemon gets
    /// the stage `Background`, because it keeps that stage there.
    pub fn scavenge(&self, to: SocketAddr, head: Head, payload: Vec<u8>) {
        let parcel = Parcel::new(to, head, 0, payload);
        self.enter(Parcel { scavenged: true, ..parcel });
    }

    /// Sends a control message, which is one line.
    pub fn say(&self, to: SocketAddr, line: String) {
        self.order(move |gate| gate.give(to, None, Load::Words(line)));
    }

    pub fn hint(&self, hint: Hint) {
        self.order(move |gate| gate.lane.hint(hint));
    }

    pub fn end_batch(&self, batch: u64) {
        self.order(move |gate| gate.end_batch(batch));
    }

    pub fn end_request(&self, request: u64) {
        self.order(move |gate| gate.end_request(request));
    }

    pub fn counts(&self) -> Counts {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn stop(&self) {
        self.order(|gate| gate.is_stopped = true);
    }
}
