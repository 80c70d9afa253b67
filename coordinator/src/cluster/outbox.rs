//! What waits to be sent to one host. It is not a queue of orders. It notes what changed, and an
//! order is built from the notes when the host's stream has room.
//!
//! A slow host therefore gets one order with the newest values, whatever number of runs happened.
//! Its memory is bounded, and it never gets outdated values.

use std::collections::{BTreeSet, VecDeque};

use laxity_wire::v1::{
    self, Epoch, FromCoordinator, ORDER_PIECE_ENTRIES_MAX, Order, from_coordinator::Message,
};

/// Maximum number of notes. Beyond it, the next order is a full one.
const NOTES_MAX: usize = 1 << 14;
/// Maximum number of waiting messages other than orders. Further refusals are only counted.
const MESSAGES_MAX: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Outbox {
    pub(super) full: bool,
    /// Ids of batches whose rank changed or was removed.
    pub(super) ranks: BTreeSet<u64>,
    /// Ids of requests that were pruned, or that were pruned and have ended.
    pub(super) pruned: BTreeSet<u64>,
    /// Whether an order is due even if nothing changed.
    pub(super) answer: bool,
    messages: VecDeque<Message>,
    /// The epoch of the last order that was handed to the stream.
    pub(super) sent: Option<Epoch>,
    /// Whether the host is in the list of hosts with messages waiting.
    pub(super) listed: bool,
}

impl Outbox {
    pub(super) fn wants_order(&self) -> bool {
        self.full || self.answer || !(self.ranks.is_empty() && self.pruned.is_empty())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty() && !self.wants_order()
    }

    /// Adds a message that is not an order. A bounded number of refusals waits. Of every other kind
    /// only the newest waits, and it is never dropped, because the host needs it.
    pub(super) fn write(&mut self, message: Message) {
        if matches!(message, Message::Refusal(_)) {
            if self.messages.len() >= MESSAGES_MAX {
                return;
            }
        } else {
            let kind = core::mem::discriminant(&message);
            self.messages.retain(|other| core::mem::discriminant(other) != kind);
        }
        self.messages.push_back(message);
    }

    pub(super) fn take_messages(&mut self) -> impl Iterator<Item = FromCoordinator> {
        self.messages
            .drain(..)
            .map(|message| FromCoordinator { message: Some(message) })
            .collect::<Vec<_>>()
            .into_iter()
    }

    /// Makes the next order a full one if there are too many notes.
    pub(super) fn trim(&mut self) {
        if self.ranks.len() + self.pruned.len() > NOTES_MAX {
            self.demand_full();
        }
    }

    /// Makes the next order a full one, which needs no notes.
    pub(super) fn demand_full(&mut self) {
        self.full = true;
        self.ranks.clear();
        self.pruned.clear();
    }

    pub(super) fn take_notes(&mut self) -> Self {
        Self {
            full: self.full,
            ranks: core::mem::take(&mut self.ranks),
            pruned: core::mem::take(&mut self.pruned),
            ..Self::default()
        }
    }

    /// Clears everything that belonged to the stream before.
    pub(super) fn restart(&mut self) {
        let listed = self.listed;
        *self = Self { listed, ..Self::default() };
    }
}

/// The contents of one order, before it is cut into pieces.
#[derive(Debug, Default)]
pub(super) struct Contents {
    pub(super) ranks: Vec<v1::Rank>,
    pub(super) unranked: Vec<u64>,
    pub(super) pruned: Vec<v1::Pruned>,
    pub(super) unpruned: Vec<u64>,
}

/// Cuts an order into pieces of at most [`ORDER_PIECE_ENTRIES_MAX`] entries. The last piece is
/// marked as such.
pub(super) fn pieces(
    contents: Contents,
    epoch: Epoch,
    base: Option<Epoch>,
    considered_report: u64,
) -> Vec<FromCoordinator> {
    let mut pieces = vec![Order::default()];
    let mut room = ORDER_PIECE_ENTRIES_MAX;
    let mut put = |place: &mut dyn FnMut(&mut Order)| {
        if room == 0 {
            pieces.push(Order::default());
            room = ORDER_PIECE_ENTRIES_MAX;
        }
        room -= 1;
        if let Some(piece) = pieces.last_mut() {
            place(piece);
        }
    };
    for rank in contents.ranks {
        put(&mut |piece| piece.ranks.push(rank));
    }
    for batch in contents.unranked {
        put(&mut |piece| piece.unranked.push(batch));
    }
    for mut pruned in contents.pruned {
        put(&mut |piece| piece.pruned.push(core::mem::take(&mut pruned)));
    }
    for request in contents.unpruned {
        put(&mut |piece| piece.unpruned.push(request));
    }
    let last = pieces.len() - 1;
    let number = |(index, mut piece): (usize, Order)| {
        piece.epoch = Some(epoch);
        piece.base = base;
        piece.piece = index as u32;
        if index == last {
            piece.last = true;
            piece.considered_report = considered_report;
        }
        FromCoordinator { message: Some(Message::Order(piece)) }
    };
    pieces.into_iter().enumerate().map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_order_is_cut_and_only_its_last_piece_says_that_it_ends() {
        let ranks = (0..2 * ORDER_PIECE_ENTRIES_MAX as u64 + 1)
            .map(|batch| v1::Rank { batch, sort_key: 1 })
            .collect();
        let contents = Contents { ranks, ..Contents::default() };
        let epoch = Epoch { term: 3, sequence: 4 };
        let sent = pieces(contents, epoch, None, 9);
        let orders: Vec<&Order> = sent
            .iter()
            .map(|frame| match &frame.message {
                Some(Message::Order(order)) => order,
                other => panic!("{other:?}"),
            })
            .collect();
        let shape = |order: &&Order| (order.piece, order.last, order.ranks.len());
        let shapes: Vec<_> = orders.iter().map(shape).collect();
        let most = ORDER_PIECE_ENTRIES_MAX;
        assert_eq!(shapes, [(0, false, most), (1, false, most), (2, true, 1)]);
        assert!(orders.iter().all(|order| order.epoch == Some(epoch)));
    }

    #[test]
    fn an_order_without_contents_is_one_piece() {
        let epoch = Epoch { term: 1, sequence: 1 };
        assert_eq!(pieces(Contents::default(), epoch, None, 0).len(), 1);
    }

    #[test]
    fn refusals_that_nobody_reads_push_out_nothing_that_matters() {
        let mut outbox = Outbox::default();
        for _ in 0..10 * MESSAGES_MAX {
            outbox.write(Message::Refusal(v1::Refusal::default()));
        }
        for drained in [true, false, true, false] {
            outbox.write(Message::Standing(v1::Standing { drained }));
            outbox.write(Message::SnapshotWanted(v1::SnapshotWanted {}));
        }
        let mut messages: Vec<_> = outbox.take_messages().collect();
        assert_eq!(messages.len(), MESSAGES_MAX + 2);
        let last = messages.pop().and_then(|frame| frame.message);
        assert!(matches!(last, Some(Message::SnapshotWanted(_))));
        let standing = messages.pop().and_then(|frame| frame.message);
        assert!(matches!(standing, Some(Message::Standing(it)) if !it.drained));
    }

    #[test]
    fn notes_that_nobody_reads_become_a_full_order() {
        let mut outbox = Outbox::default();
        for batch in 0..NOTES_MAX as u64 + 1 {
            outbox.ranks.insert(batch);
            outbox.trim();
        }
        assert!(outbox.full && outbox.ranks.is_empty());
    }
}
