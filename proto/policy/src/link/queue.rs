//! The queue of a port: groups of flows whose ranks change together, and one index of the groups.
//!
//! Ranking each flow of a batch again whenever a layer begins would cost O(n). But the order
//! *inside* a batch never changes when it advances (MFS §4.4.1: RLI falls by the same amount for
//! all). So flows are grouped (by port, batch, request or coflow, as the policy says). The
//! index of a peer contains only groups, and an event moves one entry. The port-wide index contains
//! the best group of each peer, so that a peer can be left out at the cost of one entry.

use std::collections::{BTreeMap, BTreeSet};

use laxity_types::PeerId;

use super::flows::{NONE, SlotId};
use crate::lookup::Lookup;

/// Number of a kind of group. A discipline chooses it below [`QUEUES_MAX`].
pub(crate) type QueueId = u8;
pub(crate) const QUEUES_MAX: usize = 32;
/// The queue of scavenged work, the same in every policy.
pub(crate) const SCAVENGER: QueueId = QUEUES_MAX as QueueId - 1;

/// The property that the flows of a group share, besides the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GroupBy {
    /// The flows of the port.
    Port,
    /// The flows of a batch.
    Batch,
    /// The flows of a request.
    Request,
    /// The flows of a batch, stage and layer.
    Coflow,
}

/// The rank of a group among the groups of the port. Smaller is served first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    pub(crate) tier: u8,
    pub(crate) major: u64,
    pub(crate) minor: u64,
    pub(crate) seq: u64,
}

impl Rank {
    /// The worst rank outside the scavenger.
    pub(crate) const LAST: Self =
        Self { tier: u8::MAX - 1, major: u64::MAX, minor: u64::MAX, seq: u64::MAX };
    /// The rank of the scavenger, after all levels.
    pub(crate) const SCAVENGER: Self = Self { tier: u8::MAX, major: 0, minor: 0, seq: 0 };
}

/// A number of flows, and the bytes of them that are not permitted yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Number of flows.
    pub flows: u64,
    /// Bytes that are not permitted yet.
    pub bytes: u64,
}

impl Tally {
    pub(crate) fn add(&mut self, bytes: u64) {
        self.flows += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }

    pub(crate) fn remove(&mut self, bytes: u64) {
        self.flows -= 1;
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

/// The order of a flow in its group: the policy's order, the tie rule's, arrival, the flow's slot.
pub(crate) type MemberOrder = (u64, u64, u64, SlotId);

#[derive(Clone, Debug)]
pub(crate) struct Group {
    key: u64,
    /// The part of the index with the flows of this peer (`peers::part`), or 0 if peers are not
    /// told apart.
    peer: PeerId,
    pub(crate) queue: QueueId,
    pub(crate) scope: GroupBy,
    /// The batch, if the scope is [`GroupBy::Batch`].
    pub(crate) batch: SlotId,
    pub(crate) members: BTreeSet<MemberOrder>,
    /// Bytes of the members that are not permitted yet.
    pub(crate) bytes: u64,
    /// Virtual time inside the group: the share of the member that was served last.
    pub(crate) virtual_time: u64,
    /// Bytes that the group has had of its queue, in virtual time.
    pub(crate) share: u64,
    /// Waiting flows by target layer, for flows whose level follows the batch's progress.
    pub(crate) layers: BTreeMap<u16, Tally>,
    rank: Option<Rank>,
}

impl Group {
    /// Returns the member that is served next.
    pub(crate) fn head(&self) -> Option<MemberOrder> {
        self.members.first().copied()
    }
}

#[derive(Clone, Debug, Default)]
struct PeerQueue {
    groups: BTreeMap<Rank, SlotId>,
    /// The rank under which the peer is in the port's index, if it is.
    offered: Option<Rank>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Queues {
    slots: Vec<Group>,
    free: Vec<SlotId>,
    by_key: Lookup<(u64, PeerId), SlotId>,
    peers: Vec<PeerQueue>,
    /// The peers that are not set aside, by the rank of their best group.
    index: BTreeMap<Rank, PeerId>,
    virtual_time: [u64; QUEUES_MAX],
    scavenger: SlotId,
}

impl Queues {
    pub(crate) fn new() -> Self {
        Self { peers: vec![PeerQueue::default()], scavenger: NONE, ..Self::default() }
    }

    /// Returns the group `name` of `queue` for `peer`, and whether this call created it.
    pub(crate) fn group(
        &mut self,
        queue: QueueId,
        scope: GroupBy,
        name: u64,
        peer: PeerId,
    ) -> (SlotId, bool) {
        let key = name | u64::from(queue) << 56 | (scope as u64) << 52;
        if let Some(&slot) = self.by_key.get(&(key, peer)) {
            return (slot, false);
        }
        let group = Group {
            key,
            peer,
            queue,
            scope,
            batch: NONE,
            members: BTreeSet::new(),
            bytes: 0,
            virtual_time: 0,
            share: self.virtual_time[usize::from(queue)],
            layers: BTreeMap::new(),
            rank: None,
        };
        let slot = if let Some(slot) = self.free.pop() {
            self.slots[slot as usize] = group;
            slot
        } else {
            self.slots.push(group);
            (self.slots.len() - 1) as SlotId
        };
        if queue == SCAVENGER {
            self.scavenger = slot;
        }
        self.by_key.insert((key, peer), slot);
        (slot, true)
    }

    pub(crate) fn drop_group(&mut self, slot: SlotId) {
        self.set_rank(slot, None);
        let group = &self.slots[slot as usize];
        self.by_key.remove(&(group.key, group.peer));
        if slot == self.scavenger {
            self.scavenger = NONE;
        }
        self.free.push(slot);
    }

    /// Moves the group to `rank` in the index. A group without a rank is not served.
    pub(crate) fn set_rank(&mut self, slot: SlotId, rank: Option<Rank>) {
        let group = &mut self.slots[slot as usize];
        if group.rank == rank {
            return;
        }
        let peer = group.peer;
        let at = usize::from(peer.0);
        if at >= self.peers.len() {
            self.peers.resize(at + 1, PeerQueue::default());
        }
        let groups = &mut self.peers[at].groups;
        if let Some(old) = group.rank {
            groups.remove(&old);
        }
        if let Some(new) = rank {
            groups.insert(new, slot);
        }
        group.rank = rank;
        self.offer(peer);
    }

    /// Puts a peer into the port's index by its best group, or takes it out if it has none.
    pub(crate) fn offer(&mut self, peer: PeerId) {
        let Some(queue) = self.peers.get_mut(usize::from(peer.0)) else { return };
        let best = queue.groups.first_key_value().map(|(&rank, _)| rank);
        if queue.offered == best {
            return;
        }
        if let Some(old) = queue.offered {
            self.index.remove(&old);
        }
        if let Some(new) = best {
            self.index.insert(new, peer);
        }
        queue.offered = best;
    }

    /// Puts all peers that were set aside into the index again.
    pub(crate) fn offer_all(&mut self) {
        for peer in 0..self.peers.len() {
            self.offer(PeerId(peer as u16));
        }
    }

    /// Leaves the groups of a group's peer out of the port's index until the next
    /// [`Queues::offer`] of that peer, or until the rank of one of them changes.
    pub(crate) fn set_aside(&mut self, slot: SlotId) {
        let peer = self.slots[slot as usize].peer;
        if let Some(old) = self.peers[usize::from(peer.0)].offered.take() {
            self.index.remove(&old);
        }
    }

    /// Charges `bytes` to a group and its queue. The served member's share was `share` before.
    pub(crate) fn charge(&mut self, slot: SlotId, share: u64, bytes: u64) {
        let group = &mut self.slots[slot as usize];
        group.virtual_time = group.virtual_time.max(share);
        let queue = &mut self.virtual_time[usize::from(group.queue)];
        *queue = group.share.max(*queue);
        group.share = group.share.saturating_add(bytes);
    }

    pub(crate) fn get(&self, slot: SlotId) -> &Group {
        &self.slots[slot as usize]
    }

    pub(crate) fn get_mut(&mut self, slot: SlotId) -> &mut Group {
        &mut self.slots[slot as usize]
    }

    /// Returns the best rank and its group, among peers that are not set aside.
    pub(crate) fn first(&self) -> Option<(Rank, SlotId)> {
        let (_, &peer) = self.index.first_key_value()?;
        let best = self.peers[usize::from(peer.0)].groups.first_key_value();
        best.map(|(&rank, &slot)| (rank, slot))
    }

    /// Returns the group of scavenged work, if any waits.
    pub(crate) fn scavenger(&self) -> Option<SlotId> {
        (self.scavenger != NONE).then_some(self.scavenger)
    }

    /// Returns the groups that are served before `group`, in no order.
    pub(crate) fn before(&self, group: &Group) -> impl Iterator<Item = &Group> {
        let rank = group.rank.unwrap_or(Rank::LAST);
        let groups = self.peers.iter().flat_map(move |peer| peer.groups.range(..rank));
        groups.map(|(_, &slot)| self.get(slot))
    }

    /// Returns the groups whose levels follow the progress of their batch.
    pub(crate) fn promotable(&self) -> impl Iterator<Item = &Group> {
        let groups = self.peers.iter().flat_map(|peer| peer.groups.values());
        groups.map(|&slot| self.get(slot)).filter(|group| !group.layers.is_empty())
    }
}
