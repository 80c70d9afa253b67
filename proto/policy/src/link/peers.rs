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
//! wait in a lower class must not hold up an urgent flow to the same peer. Pieces that exceed the
//! bound by themselves are not counted. The port's rule for such pieces bounds them.
//!
//! Flows of unknown peers are bounded together, by the port's `overcommit` windows. Scavenged flows
//! have no bound by peer, and don't use the windows beyond the first: they wait in one queue, in
//! order of arrival. Nor does a trust domain that shares the port with others. `peer_room.rs`
//! decides by these counts.

use laxity_types::{Level, PeerId};

use super::backlog_rate::BacklogRate;
use super::in_flight::{InFlight, Oversized};
use crate::time::Time;

/// Maximum number of windows in flight on a port whose bytes are bounded by peer. Beyond the first,
/// permits come at [`PACE_EIGHTHS`] of the port's rate. Pieces above the window do not count.
pub const PEER_WINDOWS: u32 = 4;

/// The rate of permits beyond the window, in eighths of the port's rate.
///
/// Headers take up to a twelfth of a line. Permits at the full rate would come faster than the port
/// sends, and bytes for peers that are not busy would pile up in the NIC, where the policy orders
/// nothing.
pub(super) const PACE_EIGHTHS: u64 = 7;

/// Peers with a number below this have a bound of their own. Others count as unknown.
pub const PEERS_MAX: usize = 4096;

/// Bytes in flight to one peer.
#[derive(Clone, Debug, Default)]
struct ToPeer {
    in_flight: InFlight,
    /// The pieces among them that exceed the peer's bound, each by itself.
    oversized: Oversized,
    /// How fast bytes are delivered while flows wait for the peer's bound.
    backlog_rate: BacklogRate,
}

/// Bytes in flight by peer.
#[derive(Clone, Debug, Default)]
pub(super) struct Peers(Vec<ToPeer>);

/// Returns the peer under which a flow is counted.
pub(super) const fn counted(peer: PeerId) -> PeerId {
    if (peer.0 as usize) < PEERS_MAX { peer } else { PeerId(0) }
}

/// The part of the index with scavenged flows, which is never left out.
pub(super) const SCAVENGED: PeerId = PeerId(1);

/// Returns the part of the index with the flows of a peer. Unknown peers share part 0.
pub(super) const fn part(peer: PeerId) -> PeerId {
    match counted(peer) {
        PeerId(0) => PeerId(0),
        PeerId(known) => PeerId(known + 1),
    }
}

impl Peers {
    #[inline]
    pub(super) fn add(&mut self, now: Time, peer: PeerId, level: Level, bytes: u64, bound: u64) {
        let at = usize::from(counted(peer).0);
        if at >= self.0.len() {
            self.add_peers(at);
        }
        self.0[at].in_flight.add(level, bytes);
        self.0[at].oversized.add(now, level, bytes, bound);
    }

    #[cold]
    fn add_peers(&mut self, at: usize) {
        self.0.resize(at + 1, ToPeer::default());
    }

    #[inline]
    pub(super) fn remove(&mut self, peer: PeerId, level: Level, bytes: u64, bound: u64) {
        if let Some(known) = self.0.get_mut(usize::from(counted(peer).0)) {
            known.in_flight.remove(level, bytes);
            known.oversized.remove(bytes, known.in_flight.all, bound);
        }
    }

    /// Notes that a flow waits because its peer has no room.
    pub(super) fn refused(&mut self, now: Time, peer: PeerId, window: u64, rate: u64) {
        if let Some(known) = self.0.get_mut(usize::from(counted(peer).0)) {
            known.backlog_rate.refused(now, window, rate);
        }
    }

    /// Counts bytes that the peer received, for the rate at which it is served.
    #[inline]
    pub(super) fn delivered(&mut self, now: Time, peer: PeerId, bytes: u64) {
        if let Some(known) = self.0.get_mut(usize::from(counted(peer).0)) {
            known.backlog_rate.delivered(now, bytes);
        }
    }

    /// Returns the rate at which bytes to a peer are delivered at present.
    pub(super) fn rate(&self, now: Time, peer: PeerId, window: u64, port_rate: u64) -> u64 {
        let known = self.0.get(usize::from(counted(peer).0));
        known.map_or(port_rate, |known| known.backlog_rate.on(now, window, port_rate))
    }

    /// Begins the measurements of rates again.
    pub(super) fn forget_rates(&mut self) {
        for peer in &mut self.0 {
            peer.backlog_rate.pause();
        }
    }

    pub(super) fn all(&self, peer: PeerId) -> u64 {
        self.0.get(usize::from(counted(peer).0)).map_or(0, |known| known.in_flight.all)
    }

    /// Returns the bytes to a peer that compete with a chunk of `level` and count in its bound.
    pub(super) fn at_or_above(&self, peer: PeerId, level: Level) -> u64 {
        let known = self.0.get(usize::from(counted(peer).0));
        known.map_or(0, |known| {
            let pieces = known.oversized.bytes.at_or_above(level);
            known.in_flight.at_or_above(level).saturating_sub(pieces)
        })
    }
}
