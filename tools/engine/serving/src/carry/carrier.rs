//! The handle by which other threads send to other processes.

use std::net::SocketAddr;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use laxity_client::Hint;

use super::Taker;
use super::command::{Counts, GateCommand, Options, Parcel};
use super::frame::{Head, ReadPart};
use super::gate::Gate;
use super::outgoing::Said;

/// A handle for sending to other processes. Clones share one thread.
#[derive(Clone)]
pub struct Carrier {
    orders: Sender<GateCommand>,
    counts: Arc<Mutex<Counts>>,
    listens: SocketAddr,
}

impl std::fmt::Debug for Carrier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Carrier").field("listens", &self.listens).finish_non_exhaustive()
    }
}

impl Carrier {
    /// Starts the thread. `listens` is the address that identifies this process.
    /// Fails if no thread can be started.
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

    pub const fn listens(&self) -> SocketAddr {
        self.listens
    }

    // A failed send means that the thread ended, which only happens after `Stop`.
    fn order(&self, order: GateCommand) {
        let _ = self.orders.send(order);
    }

    /// Sends a parcel. `head` describes it, except for bytes and flow, which are set here. A
    /// deadline of 0 means none.
    pub fn send(&self, to: SocketAddr, head: Head, deadline_ns: u64, payload: Vec<u8>) {
        self.order(GateCommand::Send(Parcel::new(to, head, deadline_ns, payload)));
    }

    /// Reads a parcel that another process offers, under permits of this process's daemon.
    pub fn read(&self, from: SocketAddr, head: Head, deadline_ns: u64, bytes: u64) {
        let parcel = Parcel::new(from, head, deadline_ns, Vec::new());
        self.order(GateCommand::Send(Parcel { read: true, bytes, ..parcel }));
    }

    /// Offers a parcel. It is sent when its receiver reads it, without a permit of the sender's
    /// daemon, like a NIC that answers an RDMA READ.
    pub fn offer(&self, to: SocketAddr, head: Head, payload: Vec<u8>) {
        self.order(GateCommand::Offer(to, head, Arc::new(payload)));
    }

    pub fn give(&self, to: SocketAddr, part: ReadPart) {
        self.order(GateCommand::Give(to, part));
    }

    /// Reports that bytes of a flow that is read here arrived.
    pub fn arrived(&self, flow: u64, bytes: u64) {
        self.order(GateCommand::Said(Said::Arrived { flow, bytes }));
    }

    /// Sends a parcel of a relegated request to the scavenger, without a deadline. The daemon gets
    /// the stage `Background`, because it keeps that stage there.
    pub fn scavenge(&self, to: SocketAddr, head: Head, payload: Vec<u8>) {
        let parcel = Parcel::new(to, head, 0, payload);
        self.order(GateCommand::Send(Parcel { scavenged: true, ..parcel }));
    }

    /// Sends a control message, which is one line.
    pub fn say(&self, to: SocketAddr, line: String) {
        self.order(GateCommand::Words(to, line));
    }

    pub fn hint(&self, hint: Hint) {
        self.order(GateCommand::Hint(hint));
    }

    pub fn end_batch(&self, batch: u64) {
        self.order(GateCommand::EndBatch(batch));
    }

    pub fn end_request(&self, request: u64) {
        self.order(GateCommand::EndRequest(request));
    }

    /// Returns the counters so far.
    pub fn counts(&self) -> Counts {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn stop(&self) {
        self.order(GateCommand::Stop);
    }
}
