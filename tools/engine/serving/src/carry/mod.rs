//! Bytes to other processes, under permits of laxityd.
//!
//! A *parcel* is a flow of Laxity's with its payload: it is submitted with its stage, layer, batch,
//! request and deadline, cut as it is permitted, sent on the connection of its class, and complete
//! when the receiver has said so, which is when it has left every queue on its way. A flow keeps
//! the class of its first permit: connections of different classes would reorder it. *Words*
//! (orders and answers between engines) are small and go on an unmarked connection of their own.
//!
//! Threads: one ([`gate`]) owns the lane, and everything that is said to the daemon passes it in
//! order; each connection has one that writes ([`outgoing`]) and one that reads ([`incoming`]).
//! Nothing that computes ever waits for a permit.

pub mod frame;
pub mod gate;
pub mod incoming;
pub mod outgoing;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;

pub use frame::{Head, Kind, ReadPart};
pub use gate::{Carrier, Counts, Options};

/// A whole parcel that came in.
#[derive(Clone, Debug, PartialEq)]
pub struct Arrival {
    /// Who sent it: where that process listens.
    pub from: SocketAddr,
    /// What it is.
    pub head: Head,
    /// Its bytes.
    pub payload: Vec<u8>,
}

/// What comes in.
#[derive(Clone, Debug)]
pub enum Incoming {
    /// A parcel.
    Parcel(Arrival),
    /// A word: one line of JSON.
    Words(SocketAddr, String),
    /// Bytes of a flow that this process reads.
    Part {
        /// The flow.
        flow: u64,
        /// How many.
        bytes: u64,
    },
    /// A process that we send to, or that sends to us, is gone.
    Lost(SocketAddr, String),
}

/// Whoever takes what comes in. Called by the readers' threads: it must not wait.
pub type Taker = std::sync::Arc<dyn Fn(Incoming) + Send + Sync>;
