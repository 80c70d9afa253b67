//! The bytes of a port that are in flight to each peer.
//!
//! A port's window bounds what is in flight to all peers together. Once it is full of bytes for a
//! busy receiver, the link to idle receivers idles. So `laxity` bounds the bytes to each known
//! peer, too. A flow whose peer is full lets flows to others pass. What waits for a busy receiver
//! thus waits in the sender's queue, where an urgent flow still overtakes it, and not in the
//! network. The sender learns from completions alone how fast a receiver drains, so no message is
//! necessary. docs/notes/receivers.md has what this is worth.
//!
//! The bound of a level counts bytes at that level or above, like the port's window: bytes that
//! wait in a lower class must not hold up an urgent flow to the same peer.
//!
//! Flows of unknown peers are bounded together, by the port's `overcommit` windows. Scavenged flows have no bound by
//! peer: they wait in one queue, in order of arrival, and count at the level of nobody else.

use laxity_types::{Level, PeerId};

use super::Link;
use super::in_flight::InFlight;
use super::queue::{QueueId, SCAVENGER};
use crate::event::FlowSpec;

/// Most windows that may be in flight on a port whose bytes are bounded by peer, at the port's pace.
/// A client that goes silent holds at most this.
pub const PEER_WINDOWS: u32 = 16;

/// Peers with a bound of their own. Others count as unknown.
pub const PEERS_MAX: usize = 4096;

/// Bytes in flight by peer.
#[derive(Clone, Debug, Default)]
pub(super) struct Peers {
    in_flight: Vec<InFlight>,
}

/// Returns the peer under which a flow is counted.
const fn counted(peer: PeerId) -> PeerId {
    if (peer.0 as usize) < PEERS_MAX { peer } else { PeerId(0) }
}

/// The part of the index with scavenged flows, which is never left out.
const SCAVENGED: PeerId = PeerId(1);

/// Returns the part of the index with the flows of a peer. Unknown peers share part 0.
const fn part(peer: PeerId) -> PeerId {
    match counted(peer) {
        PeerId(0) => PeerId(0),
        PeerId(known) => PeerId(known + 1),
    }
}

impl Peers {
    pub(super) fn add(&mut self, peer: PeerId, level: Level, bytes: u64) {
        let at = usize::from(counted(peer).0);
        if at >= self.in_flight.len() {
            self.in_flight.resize(at + 1, InFlight::default());
        }
        self.in_flight[at].add(level, bytes);
    }

    pub(super) fn remove(&mut self, peer: PeerId, level: Level, bytes: u64) {
        if let Some(known) = self.in_flight.get_mut(usize::from(counted(peer).0)) {
            known.remove(level, bytes);
        }
    }

    /// Returns the bytes to a peer that compete with a chunk of `level`.
    pub(super) fn at_or_above(&self, peer: PeerId, level: Level) -> u64 {
        let known = self.in_flight.get(usize::from(counted(peer).0));
        known.map_or(0, |known| known.at_or_above(level))
    }
}

impl Link {
    /// Reports whether bytes in flight are bounded by peer.
    pub(super) fn bounds_peers(&self) -> bool {
        self.port.config.peer_window_bytes != 0 && self.discipline.bounds_peers()
    }

    /// Returns the number of the part of the index in which a flow waits.
    pub(super) fn queue_peer(&self, queue: QueueId, spec: &FlowSpec) -> PeerId {
        match queue {
            _ if !self.bounds_peers() => PeerId(0),
            SCAVENGER => SCAVENGED,
            _ => part(spec.peer),
        }
    }

    /// Returns the bound on bytes in flight to a peer.
    fn peer_bound(&self, peer: PeerId) -> u64 {
        let config = &self.port.config;
        match counted(peer) {
            PeerId(0) => config.window_bytes.saturating_mul(u64::from(config.overcommit)),
            _ => config.peer_window_bytes,
        }
    }

    /// Reports whether the peer of a flow has room for a piece. A piece larger than a chunk counts
    /// as a chunk, or it might never fit.
    pub(super) fn peer_takes(
        &self,
        queue: QueueId,
        spec: &FlowSpec,
        level: Level,
        piece: u64,
    ) -> bool {
        let bytes = piece.min(self.port.config.chunk_bytes);
        if !self.bounds_peers() || queue == SCAVENGER || bytes == 0 {
            return true;
        }
        let all = self.peers.at_or_above(spec.peer, level).saturating_add(bytes);
        all <= self.peer_bound(spec.peer)
    }

    /// Reports whether bytes may be in flight beyond the window, at the port's pace.
    pub(super) fn overcommits(&self, level: Level, bytes: u64) -> bool {
        let config = &self.port.config;
        let windows = |count: u32| config.window_bytes.saturating_mul(u64::from(count));
        let all = self.in_flight.all.saturating_add(bytes);
        let above = self.in_flight.at_or_above(level).saturating_add(bytes);
        (config.overcommit > 1 && all <= windows(config.overcommit))
            || (self.bounds_peers() && above <= windows(PEER_WINDOWS))
    }

    /// Reports whether a flow may have a chunk of a guaranteed share, which may exceed the window.
    /// Bytes that wait for other peers do not suspend the share.
    pub(super) fn has_share(&self, spec: &FlowSpec) -> bool {
        let window = self.port.config.window_bytes;
        if !self.bounds_peers() {
            return self.in_flight.all <= window;
        }
        let to_peer = self.peers.at_or_above(spec.peer, Level::SCAVENGER);
        to_peer <= self.peer_bound(spec.peer)
            && self.in_flight.all <= window.saturating_mul(u64::from(PEER_WINDOWS))
    }

    /// Takes bytes off those in flight. Their peer may have room again.
    pub(super) fn settle(&mut self, peer: PeerId, level: Level, bytes: u64) {
        self.in_flight.remove(level, bytes);
        self.peers.remove(peer, level, bytes);
        self.port.queues.offer(part(peer));
    }
}
