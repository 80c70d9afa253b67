//! Assembles cluster orders from their pieces (docs/coordinator.md, "Orders").
//!
//! This state machine outlives each stream. It remembers the largest term and the newest applied
//! order, so that no order of a replaced coordinator is applied on a later stream.
//!
//! | message | effect |
//! |---|---|
//! | a term smaller than the largest seen | `Nack` (`FENCED`), counted, no change |
//! | an epoch that is not newer than the applied one | counted, `Resync` |
//! | another base, a gap, another epoch or none | the partial order is dropped, `Resync` |
//! | an order above the limits | the stream ends |
//! | the last piece | the whole order is applied at once |
//!
//! After a `Resync`, deltas that were under way are dropped without an answer until the full order.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use laxity_wire::v1::{Epoch, Nack, NackReason, Order, Resync, from_daemon::Message};

use super::order::{ClusterOrder, OrderContent};

/// Maximum number of entries in the pieces of an order, and of ranks and of pruned requests that
/// are in force: four times what this daemon reports.
const ENTRIES_MAX: usize = 4 * super::reports::REQUESTS_MAX;
/// Maximum number of pieces of an order.
const PIECES_MAX: usize = 4096;

#[derive(Clone, Debug, PartialEq)]
pub enum Assembled {
    /// The order lacks pieces, or the piece was dropped.
    Incomplete,
    Whole {
        order: ClusterOrder,
        /// The last report of the stream that the order considers.
        considered: u64,
    },
    Reply(Message),
    /// The stream is invalid and has to end. The text is for the log.
    EndStream(String),
}

/// Counts of orders that were not applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RefusedOrders {
    /// Orders with an outdated term or sequence, and streams with an outdated term.
    pub stale: u64,
    /// Orders with a missing or invalid part.
    pub broken: u64,
}

/// Assembles cluster orders from their pieces, and applies deltas to the order before.
#[derive(Debug, Default)]
pub struct OrderAssembler {
    term_max: u64,
    applied: Option<Epoch>,
    /// The order that deltas may build on: `applied`, if that came on this stream.
    base: Option<Epoch>,
    ranks: HashMap<u64, u64>,
    pruned: BTreeSet<u64>,
    content: Arc<OrderContent>,
    partial: Option<IncompleteOrder>,
    /// Whether a full order was requested and has not begun.
    awaits_full: bool,
    refused: RefusedOrders,
}

#[derive(Debug, Default)]
struct IncompleteOrder {
    epoch: Epoch,
    base: Option<Epoch>,
    next: u32,
    /// Ids only, because the names in causes have no limit of length.
    ranks: Vec<(u64, u64)>,
    unranked: Vec<u64>,
    pruned: Vec<u64>,
    unpruned: Vec<u64>,
}

impl IncompleteOrder {
    fn add(&mut self, piece: &Order) {
        self.next += 1;
        let ranks = piece.ranks.iter().filter(|rank| rank.batch != 0);
        self.ranks.extend(ranks.map(|rank| (rank.batch, rank.sort_key)));
        self.unranked.extend(&piece.unranked);
        let pruned = piece.pruned.iter().map(|pruned| pruned.request);
        self.pruned.extend(pruned);
        self.unpruned.extend(&piece.unpruned);
    }

    const fn entries(&self) -> usize {
        self.ranks.len() + self.unranked.len() + self.pruned.len() + self.unpruned.len()
    }
}

impl OrderAssembler {
    pub const fn applied(&self) -> Option<Epoch> {
        self.applied
    }

    pub fn content(&self) -> Arc<OrderContent> {
        Arc::clone(&self.content)
    }

    pub const fn refused(&self) -> RefusedOrders {
        self.refused
    }

    /// Begins a stream whose orders have this term. Returns false if the term is outdated.
    pub fn begin(&mut self, term: u64) -> bool {
        self.forget();
        self.awaits_full = false;
        if term < self.term_max {
            self.refused.stale += 1;
            return false;
        }
        self.term_max = term;
        true
    }

    /// Drops the base for deltas, so that the next order has to be a full one.
    pub fn forget(&mut self) {
        self.base = None;
        self.partial = None;
    }

    pub fn take(&mut self, piece: &Order) -> Assembled {
        let Some(epoch) = piece.epoch else { return self.broken("an order has no epoch") };
        if epoch.term < self.term_max {
            self.refused.stale += 1;
            return Assembled::Reply(Message::Nack(Nack {
                epoch: Some(epoch),
                reason: NackReason::Fenced as i32,
                detail: format!("term {} was seen", self.term_max),
            }));
        }
        self.term_max = epoch.term;
        let mut partial = match self.partial.take() {
            Some(partial) if partial.epoch == epoch && piece.piece != 0 => partial,
            Some(_) => return self.broken("an order ended within"),
            None => match self.open(epoch, piece) {
                Ok(partial) => partial,
                Err(assembled) => return assembled,
            },
        };
        if piece.piece != partial.next || piece.base != partial.base {
            return self.broken("a piece is missing");
        }
        partial.add(piece);
        if partial.entries() > ENTRIES_MAX || partial.next as usize > PIECES_MAX {
            return Assembled::EndStream(format!(
                "an order has more than {ENTRIES_MAX} entries or {PIECES_MAX} pieces; this host \
                 never reported as much"
            ));
        }
        if !piece.last {
            self.partial = Some(partial);
            return Assembled::Incomplete;
        }
        self.apply(&partial, piece.considered_report)
    }

    /// Starts an order with its first piece.
    #[expect(
        clippy::result_large_err,
        reason = "what is to be said is large, and this is no hot path"
    )]
    fn open(&mut self, epoch: Epoch, piece: &Order) -> Result<IncompleteOrder, Assembled> {
        let overtaken = self.applied.is_some_and(|old| epoch.key() <= old.key());
        if overtaken {
            self.refused.stale += 1;
            return Err(self.resync());
        }
        if piece.base.is_none() {
            self.awaits_full = false;
        } else if self.awaits_full {
            return Err(Assembled::Incomplete);
        } else if piece.base != self.base {
            return Err(self.broken("a delta builds on another order"));
        }
        Ok(IncompleteOrder { epoch, base: piece.base, ..IncompleteOrder::default() })
    }

    fn apply(&mut self, whole: &IncompleteOrder, considered: u64) -> Assembled {
        let full = whole.base.is_none();
        if full {
            self.ranks.clear();
            self.pruned.clear();
        }
        for batch in &whole.unranked {
            self.ranks.remove(batch);
        }
        for request in &whole.unpruned {
            self.pruned.remove(request);
        }
        let ranks = whole.ranks.iter();
        self.ranks.extend(ranks.copied());
        self.pruned.extend(&whole.pruned);
        let most = self.ranks.len().max(self.pruned.len());
        if most > ENTRIES_MAX {
            self.ranks.clear();
            self.pruned.clear();
            self.forget();
            return Assembled::EndStream(format!(
                "its orders add up to more than {ENTRIES_MAX} entries; this host never reported as \
                 many"
            ));
        }
        if full || whole.entries() > 0 {
            let ranks = self.ranks.iter().map(|(&batch, &key)| (key, batch));
            let content = OrderContent::new(ranks, self.pruned.iter().copied());
            if content != *self.content {
                self.content = Arc::new(content);
            }
        }
        self.applied = Some(whole.epoch);
        self.base = self.applied;
        Assembled::Whole {
            order: ClusterOrder { epoch: whole.epoch, content: Arc::clone(&self.content) },
            considered,
        }
    }

    fn broken(&mut self, what: &'static str) -> Assembled {
        self.refused.broken += 1;
        tracing::debug!(what, "dropped an order");
        self.resync()
    }

    fn resync(&mut self) -> Assembled {
        self.partial = None;
        if core::mem::replace(&mut self.awaits_full, true) {
            return Assembled::Incomplete;
        }
        Assembled::Reply(Message::Resync(Resync { applied: self.applied }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use laxity_policy::{BatchId, event};
    use laxity_wire::v1::{Pruned, Rank};

    const fn epoch(term: u64, sequence: u64) -> Epoch {
        Epoch { term, sequence }
    }

    fn piece(at: Epoch, base: Option<Epoch>, piece: u32, last: bool, ranks: &[u64]) -> Order {
        Order {
            epoch: Some(at),
            base,
            piece,
            last,
            ranks: ranks.iter().map(|&batch| Rank { batch, sort_key: u64::MAX - batch }).collect(),
            considered_report: u64::from(last) * 3,
            ..Order::default()
        }
    }

    fn begun(term: u64) -> OrderAssembler {
        let mut assembler = OrderAssembler::default();
        assert!(assembler.begin(term));
        assembler
    }

    /// Returns the order of the batches, if the piece completed an order.
    fn sigma(assembled: &Assembled) -> Option<Vec<u64>> {
        let Assembled::Whole { order, .. } = assembled else { return None };
        let order = order.content.merged_with(&event::Order::default(), |_| BatchId(0));
        Some(order.sigma.iter().map(|batch| batch.0).collect())
    }

    fn asks_for_all(assembled: &Assembled) -> bool {
        matches!(assembled, Assembled::Reply(Message::Resync(_)))
    }

    #[test]
    fn nothing_is_handed_over_before_the_last_piece_and_then_all_of_it() {
        let mut assembler = begun(5);
        let at = epoch(5, 1);
        assert_eq!(assembler.take(&piece(at, None, 0, false, &[1, 2])), Assembled::Incomplete);
        assert_eq!(assembler.take(&piece(at, None, 1, false, &[3])), Assembled::Incomplete);
        assert_eq!(assembler.applied(), None);
        let whole = assembler.take(&piece(at, None, 2, true, &[4]));
        assert_eq!(sigma(&whole), Some(vec![4, 3, 2, 1]));
        assert_eq!(assembler.applied(), Some(at));
    }

    #[test]
    fn a_delta_changes_what_it_names_and_one_that_says_nothing_shares_the_terms() {
        let mut assembler = begun(5);
        assembler.take(&piece(epoch(5, 1), None, 0, true, &[1, 2, 3]));
        let mut delta = piece(epoch(5, 4), Some(epoch(5, 1)), 0, true, &[9]);
        delta.unranked = vec![2];
        delta.pruned = vec![Pruned { request: 77, ..Pruned::default() }];
        let Assembled::Whole { order, considered } = assembler.take(&delta) else {
            panic!("not whole");
        };
        assert_eq!(considered, 3);
        assert!(!order.content.ranks(BatchId(2)) && order.content.ranks(BatchId(9)));
        let again = assembler.take(&piece(epoch(5, 5), Some(epoch(5, 4)), 0, true, &[]));
        let Assembled::Whole { order: next, .. } = again else { panic!("not whole") };
        assert!(Arc::ptr_eq(&order.content, &next.content));
    }

    #[test]
    fn an_order_with_a_gap_a_wrong_base_or_another_within_is_dropped_whole() {
        let at = epoch(5, 2);
        for (first, second) in [
            (piece(at, None, 0, false, &[8]), piece(at, None, 2, true, &[9])),
            (piece(at, None, 0, false, &[8]), piece(epoch(5, 3), None, 0, true, &[9])),
            (piece(at, None, 0, false, &[8]), piece(at, Some(epoch(5, 1)), 1, true, &[9])),
        ] {
            let mut assembler = begun(5);
            assembler.take(&piece(epoch(5, 1), None, 0, true, &[1]));
            assembler.take(&first);
            assert!(asks_for_all(&assembler.take(&second)));
            assert_eq!(assembler.applied(), Some(epoch(5, 1)));
            assert_eq!(assembler.refused().broken, 1);
            // A delta that was under way is dropped without an answer, and the full order is
            // applied.
            let late = piece(epoch(5, 6), Some(epoch(5, 4)), 0, true, &[7]);
            assert_eq!(assembler.take(&late), Assembled::Incomplete);
            let full = assembler.take(&piece(epoch(5, 7), None, 0, true, &[6]));
            assert_eq!(sigma(&full), Some(vec![6]));
        }
        let mut assembler = begun(5);
        assert!(asks_for_all(&assembler.take(&piece(at, Some(epoch(5, 1)), 0, true, &[1]))));
        assert!(matches!(assembler.take(&Order::default()), Assembled::Incomplete));
    }

    #[test]
    fn an_older_term_is_refused_also_on_a_later_stream() {
        let mut assembler = begun(5);
        assembler.take(&piece(epoch(5, 1), None, 0, true, &[1]));
        let old = assembler.take(&piece(epoch(4, 9), None, 0, true, &[2]));
        let Assembled::Reply(Message::Nack(nack)) = old else { panic!("{old:?}") };
        assert_eq!(nack.reason(), NackReason::Fenced);
        assert!(!assembler.begin(4));
        assert!(assembler.begin(5));
        assert!(matches!(
            assembler.take(&piece(epoch(4, 9), None, 0, true, &[2])),
            Assembled::Reply(Message::Nack(_))
        ));
        assert_eq!(assembler.applied(), Some(epoch(5, 1)));
        assert_eq!(assembler.refused().stale, 3);
    }

    #[test]
    fn an_older_sequence_of_the_same_term_is_refused_and_counted() {
        let mut assembler = begun(5);
        assembler.take(&piece(epoch(5, 7), None, 0, true, &[1]));
        assert!(assembler.begin(5));
        for sequence in [3, 7] {
            let old = assembler.take(&piece(epoch(5, sequence), None, 0, true, &[2]));
            assert!(!matches!(old, Assembled::Whole { .. }), "{old:?}");
        }
        assert_eq!(assembler.refused().stale, 2);
        let new = assembler.take(&piece(epoch(5, 8), None, 0, true, &[3]));
        assert_eq!(sigma(&new), Some(vec![3]));
    }

    #[test]
    fn a_new_stream_begins_with_a_full_order() {
        let mut assembler = begun(5);
        assembler.take(&piece(epoch(5, 1), None, 0, true, &[1]));
        assert!(assembler.begin(6));
        let delta = piece(epoch(6, 1), Some(epoch(5, 1)), 0, true, &[2]);
        assert!(asks_for_all(&assembler.take(&delta)));
    }

    #[test]
    fn orders_without_end_end_the_stream_and_hold_nothing() {
        let mut assembler = begun(5);
        let mut pieces = 0;
        let said = loop {
            let assembled = assembler.take(&piece(epoch(5, 1), None, pieces, false, &[]));
            pieces += 1;
            if assembled != Assembled::Incomplete {
                break assembled;
            }
        };
        assert!(matches!(said, Assembled::EndStream(_)) && pieces as usize == PIECES_MAX + 1);
        assert!(assembler.partial.is_none());

        let many: Vec<u64> = (0..4096).collect();
        let mut assembler = begun(5);
        let said = (0..).find_map(|index| {
            let assembled = assembler.take(&piece(epoch(5, 1), None, index, false, &many));
            (assembled != Assembled::Incomplete).then_some(assembled)
        });
        assert!(matches!(said, Some(Assembled::EndStream(_))));
        assert!(assembler.partial.is_none() && assembler.ranks.is_empty());
    }

    #[test]
    fn deltas_that_add_up_to_more_than_was_reported_end_the_stream() {
        let mut assembler = begun(5);
        let mut base = None;
        let said = (1..).find_map(|sequence: u64| {
            let first = sequence * 10_000;
            let many: Vec<u64> = (first..first + 8192).collect();
            let mut large = piece(epoch(5, sequence), base, 0, true, &[]);
            let rank = |&batch: &u64| Rank { batch, sort_key: 1 };
            large.ranks = many.iter().map(rank).collect();
            base = Some(epoch(5, sequence));
            let assembled = assembler.take(&large);
            matches!(assembled, Assembled::EndStream(_)).then_some(assembled)
        });
        assert!(said.is_some() && assembler.ranks.is_empty());
    }
}
