//! Whether a peer has room for a flow's bytes, by what is in flight to it (`peers.rs`).

use laxity_types::{Level, PeerId, Stage};

use super::Link;
use super::peers::{PACE_EIGHTHS, PEER_WINDOWS, SCAVENGED, counted, part};
use super::queue::{QueueId, SCAVENGER};
use crate::event::FlowSpec;
use crate::time::{Span, Time};

/// The time after which peers without room are offered again, see [`Link::offer_peers`].
const OFFER_EVERY: Span = Span::from_millis(1);

impl Link {
    /// Sets the window, to at least a chunk, and whether this trust domain has the port alone.
    pub(crate) fn set_window(&mut self, bytes: u64, is_alone: bool) {
        self.is_alone = is_alone;
        let bytes = bytes.max(self.port.config.chunk_bytes);
        if bytes > self.port.config.window_bytes {
            self.port.queues.offer_all();
        }
        self.port.config.window_bytes = bytes;
    }

    /// Notes bytes that were permitted and are in flight already, for the pace beyond the window.
    #[inline]
    pub(super) fn pace(&mut self, now: Time, bytes: u64) {
        let (rate, all) = (self.port.config.rate, self.port.in_flight.all);
        let on_wire = Span::transfer(bytes, rate);
        self.drained_in_force = self.drained_in_force.max(now) + on_wire;
        let full_rate = self.port.full_rate;
        let estimated = if rate == full_rate { on_wire } else { Span::transfer(bytes, full_rate) };
        self.drained = self.drained.max(now) + estimated;
        if !self.bounds_peers() {
            return;
        }
        // Completed bytes don't delay further permits, even if the port is faster than configured.
        let after = |drained: Time, rate| {
            let at_rate = drained.max(now) + Span::transfer(bytes, rate);
            at_rate.min(now + Span::transfer(all, rate))
        };
        let (full, reduced) = self.drained_by_peers;
        self.drained_by_peers.0 = after(full, rate);
        if all > self.port.config.window_bytes {
            let slower = (rate / 8).saturating_mul(PACE_EIGHTHS).max(1);
            self.drained_by_peers.1 = after(reduced, slower);
        }
    }

    /// Offers peers without room again now and then: a flow's level rises as time passes, and may
    /// then be above that of the bytes in flight.
    #[inline]
    pub(super) fn offer_peers(&mut self, now: Time) {
        if self.bounds_peers() && now.since(self.offered) >= OFFER_EVERY {
            self.offered = now;
            self.port.queues.offer_all();
        }
    }

    /// Reports whether bytes in flight are bounded by peer.
    pub(super) fn bounds_peers(&self) -> bool {
        self.port.config.peer_window_bytes != 0 && self.discipline.bounds_peers()
    }

    /// Returns how many windows may be in flight because of bounds by peer, without `overcommit`.
    pub(crate) fn windows_max(&self) -> u32 {
        if self.bounds_peers() { PEER_WINDOWS } else { 1 }
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
    pub(super) fn peer_bound(&self, peer: PeerId) -> u64 {
        let config = &self.port.config;
        let all = config.window_bytes.saturating_mul(u64::from(config.overcommit));
        match (counted(peer), config.peer_window_bytes) {
            (_, 0) => u64::MAX,
            (PeerId(0), _) => all,
            (_, bytes) => bytes.min(all),
        }
    }

    /// Returns the bound above which a piece does not count as bytes to its peer.
    pub(super) fn piece_bound(&self, peer: PeerId) -> u64 {
        match self.port.config.peer_window_bytes {
            0 => u64::MAX,
            _ => self.peer_bound(peer).min(self.port.config.window_bytes),
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
        let all = self.port.peers.at_or_above(spec.peer, level).saturating_add(bytes);
        all <= self.bound_at(spec, level)
    }

    /// Returns the bound on bytes in flight to a flow's peer at `level` and above. P2D with the
    /// level of collectives has half of it, because its peer may be busy, and its bytes take room
    /// from collectives.
    pub(super) fn bound_at(&self, spec: &FlowSpec, level: Level) -> u64 {
        let all = self.peer_bound(spec.peer);
        match self.port.held_up.highest() {
            Some(highest) if spec.stage == Stage::P2d && level < highest => {
                (all / 2).max(self.port.config.chunk_bytes)
            }
            _ => all,
        }
    }

    /// Returns when a piece may be in flight beyond the window, if it may at all: at the port's
    /// pace up to `overcommit` windows, at [`PACE_EIGHTHS`] of it up to [`PEER_WINDOWS`] windows,
    /// and behind pieces that exceed the window by themselves when these leave room in the port.
    /// Nothing of such a piece completes before its end.
    pub(super) fn exceeds_at(&self, queue: QueueId, piece: u64) -> Option<Time> {
        let config = &self.port.config;
        let bytes = piece.min(config.chunk_bytes);
        let windows = |count: u32| config.window_bytes.saturating_mul(u64::from(count));
        let all = self.port.in_flight.all.saturating_add(bytes);
        let chunk = Span::transfer(config.chunk_bytes, config.rate);
        // Permitted bytes are down to one chunk by then, if the port sends at its rate.
        let pace = self.drained_in_force - chunk;
        if config.overcommit > 1 && all <= windows(config.overcommit) {
            return Some(pace);
        }
        let beside = all.saturating_sub(self.oversized.bytes.all);
        let many = self.is_alone
            && self.bounds_peers()
            && queue != SCAVENGER
            && (piece <= config.window_bytes || self.oversized.bytes.all == 0)
            && beside <= windows(PEER_WINDOWS);
        let (full, reduced) = self.drained_by_peers;
        let beside_peers = many.then(|| full.max(reduced) - chunk);
        let next = self.oversized.next_at(config.rate, queue == SCAVENGER);
        let next = next.filter(|_| beside <= config.window_bytes);
        beside_peers.into_iter().chain(next.map(|at| pace.max(at - chunk))).min()
    }

    /// Returns the time that a piece larger than the window needs, at the rate of earlier pieces.
    #[must_use]
    pub fn piece_time(&self, bytes: u64) -> Span {
        Span::transfer(bytes, self.port.piece_rate.on(self.port.config.rate))
    }

    /// Reports whether a flow may have a chunk of a guaranteed share, which may exceed the window.
    /// Bytes that wait for other peers do not suspend the share.
    pub(super) fn has_share(&self, spec: &FlowSpec) -> bool {
        let window = self.port.config.window_bytes;
        if !self.is_alone || !self.bounds_peers() {
            return self.port.in_flight.all <= window;
        }
        self.port.peers.all(spec.peer) <= self.peer_bound(spec.peer)
            && self.port.in_flight.all <= window.saturating_mul(u64::from(PEER_WINDOWS))
    }

    /// Takes bytes off those in flight. Their peer may have room again. Returns when they were
    /// permitted, if they were one piece that exceeds the window.
    #[inline]
    pub(super) fn settle(&mut self, peer: PeerId, level: Level, bytes: u64) -> Option<Time> {
        self.port.in_flight.remove(level, bytes);
        let window = self.port.config.window_bytes;
        let permitted = self.oversized.remove(bytes, self.port.in_flight.all, window);
        self.port.peers.remove(peer, level, bytes, self.piece_bound(peer));
        // Without waiting flows nobody has a group that could be offered.
        if self.waiting != 0 {
            self.port.queues.offer(part(peer));
        }
        permitted
    }

    /// Takes delivered bytes off those in flight.
    #[inline]
    pub(super) fn deliver(&mut self, now: Time, peer: PeerId, level: Level, bytes: u64) {
        self.note_progress(level, bytes);
        self.port.backlog_rate.delivered(now, bytes);
        self.port.peers.delivered(now, peer, bytes);
        if let Some(permitted) = self.settle(peer, level, bytes) {
            let rate = self.port.config.rate;
            self.port.piece_rate.add(level, bytes, now.since(permitted), rate);
            // All of a piece's bytes are delivered at its end.
            self.port.backlog_rate.pause();
        }
    }
}
