//! Transfers to other processes, under permits of laxityd.
//!
//! A *parcel* is a flow with its payload. It is submitted with its stage, layer, batch, request and
//! deadline, cut as it is permitted, and sent on the connection of its class. It is completed when
//! the receiver acknowledged it, which is when it has left all queues on its way. A flow keeps the
//! class of its first permit, because connections of different classes would reorder it. *Words*
//! (control messages between engines) are small and have a connection and DSCP of their own.
//!
//! One thread ([`gate`]) owns the lane, so that the daemon gets everything in order. Each
//! connection has one thread that writes ([`outgoing`]) and one that reads ([`incoming`]). Threads
//! that compute never wait for a permit.

pub mod carrier;
pub mod frame;
pub mod gate;
pub mod incoming;
pub mod outgoing;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;

pub use carrier::{Carrier, Counts, Options};
pub use frame::{Head, Kind, ReadPart};

#[derive(Clone, Debug, PartialEq)]
pub struct Arrival {
    /// Address at which the sender listens. It identifies the sender.
    pub from: SocketAddr,
    pub head: Head,
    pub payload: Vec<u8>,
}

#[derive(Clone, Debug)]
pub enum Incoming {
    /// A parcel, of which all bytes are here.
    Parcel(Arrival),
    /// A control message, which is one line of JSON.
    Words(SocketAddr, String),
    /// Bytes of a flow that this process reads.
    Part { flow: u64, bytes: u64 },
    /// The loss of a process to or from which there was a connection, with the reason.
    Lost(SocketAddr, String),
}

/// The receiver of everything that arrives. The readers' threads call it, so it must not block.
pub type Taker = std::sync::Arc<dyn Fn(Incoming) + Send + Sync>;
