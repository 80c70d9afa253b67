//! What the [`Carrier`](super::Carrier) tells the thread of the [`gate`](super::gate), and the
//! thread's options and counters.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use laxity_client::Hint;

use super::frame::{Head, ReadPart};
use super::outgoing::Said;

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
    /// Bytes that were sent without a permit.
    pub bypassed_bytes: u64,
    /// Bytes that the daemon permitted.
    pub scheduled_bytes: u64,
    /// Time without a daemon, in ns.
    pub unscheduled_ns: u64,
    pub lost: u64,
}

pub(super) enum GateCommand {
    Send(Parcel),
    Words(SocketAddr, String),
    Hint(Hint),
    /// A batch or request has nothing more to send. The daemon gets the hint after all its bytes
    /// have arrived.
    EndBatch(u64),
    EndRequest(u64),
    /// Offer a parcel that its receiver will read.
    Offer(SocketAddr, Head, Arc<Vec<u8>>),
    /// Send the part of an offered parcel that its receiver may read now.
    Give(SocketAddr, ReadPart),
    Said(Said),
    Stop,
}
