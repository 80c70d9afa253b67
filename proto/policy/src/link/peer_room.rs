//! Whether a peer has room for a flow's bytes, by what is in flight to it (`peers.rs`).

use laxity_types::{Level, PeerId};

use super::Link;
use super::peers::{PEER_WINDOWS, SCAVENGED, counted, part};
use super::queue::{QueueId, SCAVENGER};
use crate::event::FlowSpec;

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

    /// Reports whether bytes may be in flight beyond the window, at the port's pace. They may
    /// behind a piece that exceeds the window by itself: nothing of it completes before its end.
    pub(super) fn overcommits(&self, level: Level, bytes: u64) -> bool {
        let config = &self.port.config;
        let windows = |count: u32| config.window_bytes.saturating_mul(u64::from(count));
        let all = self.in_flight.all.saturating_add(bytes);
        let above = self.in_flight.at_or_above(level).saturating_add(bytes);
        let beside = |piece: u64| all.saturating_sub(piece);
        (config.overcommit > 1 && all <= windows(config.overcommit))
            || self.oversized.alone().is_some_and(|piece| beside(piece) <= config.window_bytes)
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
        self.oversized.remove(bytes, self.in_flight.all, self.port.config.window_bytes);
        self.peers.remove(peer, level, bytes);
        self.port.queues.offer(part(peer));
    }
}
