//! Pieces in, whole orders out (docs/coordinator.md, "Orders").
//!
//! A state machine without a stream: it outlives each of them, since what it remembers, the largest term seen and
//! the newest order applied, is what keeps a coordinator that was overtaken from being obeyed on a later one.
//!
//! | what comes | what is done |
//! |---|---|
//! | a term smaller than the largest seen | `Nack` (`FENCED`), counted; nothing changes |
//! | an epoch that is not newer than the one applied | counted, `Resync` |
//! | a delta on another base, a gap, another epoch within one, pieces without an epoch | what was gathered is dropped, `Resync` |
//! | more than anybody can have asked for | the stream ends |
//! | the last piece | everything at once |
//!
//! After a `Resync` deltas are dropped in silence until the full order comes: they were under way.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use laxity_wire::v1::{Epoch, Nack, NackReason, Order, Resync, from_daemon::Message};

use super::decree::{Decree, Terms};

/// Most ranks, and most pruned requests, that an order may hold: four times what this daemon reports.
const ENTRIES_MAX: usize = 4 * super::ledger::REQUESTS_MAX;
/// Most pieces of an order.
const PIECES_MAX: usize = 4096;

/// What became of a piece.
#[derive(Clone, Debug, PartialEq)]
pub enum Gathered {
    /// More pieces have to come, or this one was dropped.
    Nothing,
    /// The order is whole.
    Whole {
        /// What is in force now.
        decree: Decree,
        /// Up to which report of the stream it considered.
        considered: u64,
    },
    /// To be sent.
    Say(Message),
    /// The stream makes no sense: end it. Text for the log.
    HangUp(String),
}

/// What was refused so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refused {
    /// Orders of a term or a sequence that was overtaken.
    pub stale: u64,
    /// Orders that were dropped because a part was missing or made no sense.
    pub broken: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Gatherer {
    term_max: u64,
    applied: Option<Epoch>,
    /// What deltas may build on: `applied`, if that came on this stream.
    base: Option<Epoch>,
    ranks: HashMap<u64, u64>,
    pruned: BTreeSet<u64>,
    /// Fetches that are to wait.
    held: BTreeSet<u64>,
    terms: Arc<Terms>,
    partial: Option<Partial>,
    /// A full order was asked for and has not begun.
    awaits_full: bool,
    refused: Refused,
}

/// What was gathered of an order.
#[derive(Debug)]
struct Partial {
    epoch: Epoch,
    base: Option<Epoch>,
    next: u32,
    /// Ids only: the names in causes are as long as their sender likes.
    ranks: Vec<(u64, u64)>,
    unranked: Vec<u64>,
    pruned: Vec<u64>,
    unpruned: Vec<u64>,
    held: Vec<u64>,
    tokens: Vec<u64>,
}

impl Partial {
    fn add(&mut self, piece: &Order) {
        self.next += 1;
        let ranks = piece.ranks.iter().filter(|rank| rank.batch != 0);
        self.ranks
            .extend(ranks.map(|rank| (rank.batch, rank.sort_key)));
        self.unranked.extend(&piece.unranked);
        let pruned = piece.pruned.iter().map(|pruned| pruned.request);
        self.pruned.extend(pruned);
        self.unpruned.extend(&piece.unpruned);
        self.held.extend(&piece.held);
        let tokens = piece.tokens.iter().map(|token| token.fetch);
        self.tokens.extend(tokens);
    }

    const fn entries(&self) -> usize {
        self.ranks.len()
            + self.unranked.len()
            + self.pruned.len()
            + self.unpruned.len()
            + self.held.len()
            + self.tokens.len()
    }
}

impl Gatherer {
    /// The newest order that was applied.
    #[must_use]
    pub const fn applied(&self) -> Option<Epoch> {
        self.applied
    }

    /// What the newest order says.
    #[must_use]
    pub fn terms(&self) -> Arc<Terms> {
        Arc::clone(&self.terms)
    }

    /// What was refused so far.
    #[must_use]
    pub const fn refused(&self) -> Refused {
        self.refused
    }

    /// A stream begins, whose orders will have this term. False if that was overtaken.
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

    /// What is in force does not hold any more; the next order has to be a full one.
    pub fn forget(&mut self) {
        self.base = None;
        self.partial = None;
    }

    /// Takes a piece.
    pub fn take(&mut self, piece: &Order) -> Gathered {
        let Some(epoch) = piece.epoch else {
            return self.broken("an order has no epoch");
        };
        if epoch.term < self.term_max {
            self.refused.stale += 1;
            return Gathered::Say(Message::Nack(Nack {
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
                Err(gathered) => return gathered,
            },
        };
        if piece.piece != partial.next || piece.base != partial.base {
            return self.broken("a piece is missing");
        }
        partial.add(piece);
        if partial.entries() > ENTRIES_MAX || partial.next as usize > PIECES_MAX {
            return Gathered::HangUp(format!(
                "an order has more than {ENTRIES_MAX} entries or {PIECES_MAX} pieces; this host never reported as much"
            ));
        }
        if !piece.last {
            self.partial = Some(partial);
            return Gathered::Nothing;
        }
        self.apply(&partial, piece.considered_report)
    }

    /// The first piece of an order.
    #[expect(
        clippy::result_large_err,
        reason = "what is to be said is large, and this is no hot path"
    )]
    fn open(&mut self, epoch: Epoch, piece: &Order) -> Result<Partial, Gathered> {
        let overtaken = self.applied.is_some_and(|old| epoch.key() <= old.key());
        if overtaken {
            self.refused.stale += 1;
            return Err(self.resync());
        }
        if piece.base.is_none() {
            self.awaits_full = false;
        } else if self.awaits_full {
            return Err(Gathered::Nothing);
        } else if piece.base != self.base {
            return Err(self.broken("a delta builds on another order"));
        }
        Ok(Partial {
            epoch,
            base: piece.base,
            next: 0,
            ranks: Vec::new(),
            unranked: Vec::new(),
            pruned: Vec::new(),
            unpruned: Vec::new(),
            held: Vec::new(),
            tokens: Vec::new(),
        })
    }

    fn apply(&mut self, whole: &Partial, considered: u64) -> Gathered {
        let full = whole.base.is_none();
        if full {
            self.ranks.clear();
            self.pruned.clear();
            self.held.clear();
        }
        for fetch in &whole.tokens {
            self.held.remove(fetch);
        }
        self.held.extend(&whole.held);
        for batch in &whole.unranked {
            self.ranks.remove(batch);
        }
        for request in &whole.unpruned {
            self.pruned.remove(request);
        }
        let ranks = whole.ranks.iter();
        self.ranks.extend(ranks.copied());
        self.pruned.extend(&whole.pruned);
        let most = self.ranks.len().max(self.pruned.len()).max(self.held.len());
        if most > ENTRIES_MAX {
            self.ranks.clear();
            self.pruned.clear();
            self.held.clear();
            self.forget();
            return Gathered::HangUp(format!(
                "its orders add up to more than {ENTRIES_MAX} entries; this host never reported as many"
            ));
        }
        if full || whole.entries() > 0 {
            let ranks = self.ranks.iter().map(|(&batch, &key)| (key, batch));
            let terms =
                Terms::new(ranks, self.pruned.iter().copied()).with_held(self.held.iter().copied());
            if terms != *self.terms {
                self.terms = Arc::new(terms);
            }
        }
        self.applied = Some(whole.epoch);
        self.base = self.applied;
        Gathered::Whole {
            decree: Decree {
                epoch: whole.epoch,
                terms: Arc::clone(&self.terms),
            },
            considered,
        }
    }

    fn broken(&mut self, what: &'static str) -> Gathered {
        self.refused.broken += 1;
        tracing::debug!(what, "dropped an order");
        self.resync()
    }

    fn resync(&mut self) -> Gathered {
        self.partial = None;
        if core::mem::replace(&mut self.awaits_full, true) {
            return Gathered::Nothing;
        }
        Gathered::Say(Message::Resync(Resync {
            applied: self.applied,
        }))
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
            ranks: ranks
                .iter()
                .map(|&batch| Rank {
                    batch,
                    sort_key: u64::MAX - batch,
                })
                .collect(),
            considered_report: u64::from(last) * 3,
            ..Order::default()
        }
    }

    fn begun(term: u64) -> Gatherer {
        let mut gatherer = Gatherer::default();
        assert!(gatherer.begin(term));
        gatherer
    }

    /// The order of the batches, if the piece made one whole.
    fn sigma(gathered: &Gathered) -> Option<Vec<u64>> {
        let Gathered::Whole { decree, .. } = gathered else {
            return None;
        };
        let order = decree.terms.over(&event::Order::default(), |_| BatchId(0));
        Some(order.sigma.iter().map(|batch| batch.0).collect())
    }

    fn asks_for_all(gathered: &Gathered) -> bool {
        matches!(gathered, Gathered::Say(Message::Resync(_)))
    }

    #[test]
    fn nothing_is_handed_over_before_the_last_piece_and_then_all_of_it() {
        let mut gatherer = begun(5);
        let at = epoch(5, 1);
        assert_eq!(
            gatherer.take(&piece(at, None, 0, false, &[1, 2])),
            Gathered::Nothing
        );
        assert_eq!(
            gatherer.take(&piece(at, None, 1, false, &[3])),
            Gathered::Nothing
        );
        assert_eq!(gatherer.applied(), None);
        let whole = gatherer.take(&piece(at, None, 2, true, &[4]));
        assert_eq!(sigma(&whole), Some(vec![4, 3, 2, 1]));
        assert_eq!(gatherer.applied(), Some(at));
    }

    #[test]
    fn a_delta_changes_what_it_names_and_one_that_says_nothing_shares_the_terms() {
        let mut gatherer = begun(5);
        gatherer.take(&piece(epoch(5, 1), None, 0, true, &[1, 2, 3]));
        let mut delta = piece(epoch(5, 4), Some(epoch(5, 1)), 0, true, &[9]);
        delta.unranked = vec![2];
        delta.pruned = vec![Pruned {
            request: 77,
            ..Pruned::default()
        }];
        let Gathered::Whole { decree, considered } = gatherer.take(&delta) else {
            panic!("not whole");
        };
        assert_eq!(considered, 3);
        assert!(!decree.terms.ranks(BatchId(2)) && decree.terms.ranks(BatchId(9)));
        let again = gatherer.take(&piece(epoch(5, 5), Some(epoch(5, 4)), 0, true, &[]));
        let Gathered::Whole { decree: next, .. } = again else {
            panic!("not whole");
        };
        assert!(Arc::ptr_eq(&decree.terms, &next.terms));
    }

    #[test]
    fn an_order_with_a_gap_a_wrong_base_or_another_within_is_dropped_whole() {
        let at = epoch(5, 2);
        for (first, second) in [
            (
                piece(at, None, 0, false, &[8]),
                piece(at, None, 2, true, &[9]),
            ),
            (
                piece(at, None, 0, false, &[8]),
                piece(epoch(5, 3), None, 0, true, &[9]),
            ),
            (
                piece(at, None, 0, false, &[8]),
                piece(at, Some(epoch(5, 1)), 1, true, &[9]),
            ),
        ] {
            let mut gatherer = begun(5);
            gatherer.take(&piece(epoch(5, 1), None, 0, true, &[1]));
            gatherer.take(&first);
            assert!(asks_for_all(&gatherer.take(&second)));
            assert_eq!(gatherer.applied(), Some(epoch(5, 1)));
            assert_eq!(gatherer.refused().broken, 1);
            // What was under way is dropped in silence, the full order is taken.
            let late = piece(epoch(5, 6), Some(epoch(5, 4)), 0, true, &[7]);
            assert_eq!(gatherer.take(&late), Gathered::Nothing);
            let full = gatherer.take(&piece(epoch(5, 7), None, 0, true, &[6]));
            assert_eq!(sigma(&full), Some(vec![6]));
        }
        let mut gatherer = begun(5);
        assert!(asks_for_all(&gatherer.take(&piece(
            at,
            Some(epoch(5, 1)),
            0,
            true,
            &[1]
        ))));
        assert!(matches!(
            gatherer.take(&Order::default()),
            Gathered::Nothing
        ));
    }

    #[test]
    fn an_older_term_is_refused_also_on_a_later_stream() {
        let mut gatherer = begun(5);
        gatherer.take(&piece(epoch(5, 1), None, 0, true, &[1]));
        let old = gatherer.take(&piece(epoch(4, 9), None, 0, true, &[2]));
        let Gathered::Say(Message::Nack(nack)) = old else {
            panic!("{old:?}");
        };
        assert_eq!(nack.reason(), NackReason::Fenced);
        assert!(!gatherer.begin(4));
        assert!(gatherer.begin(5));
        assert!(matches!(
            gatherer.take(&piece(epoch(4, 9), None, 0, true, &[2])),
            Gathered::Say(Message::Nack(_))
        ));
        assert_eq!(gatherer.applied(), Some(epoch(5, 1)));
        assert_eq!(gatherer.refused().stale, 3);
    }

    #[test]
    fn an_older_sequence_of_the_same_term_is_refused_and_counted() {
        let mut gatherer = begun(5);
        gatherer.take(&piece(epoch(5, 7), None, 0, true, &[1]));
        assert!(gatherer.begin(5));
        for sequence in [3, 7] {
            let old = gatherer.take(&piece(epoch(5, sequence), None, 0, true, &[2]));
            assert!(!matches!(old, Gathered::Whole { .. }), "{old:?}");
        }
        assert_eq!(gatherer.refused().stale, 2);
        let new = gatherer.take(&piece(epoch(5, 8), None, 0, true, &[3]));
        assert_eq!(sigma(&new), Some(vec![3]));
    }

    #[test]
    fn a_new_stream_begins_with_a_full_order() {
        let mut gatherer = begun(5);
        gatherer.take(&piece(epoch(5, 1), None, 0, true, &[1]));
        assert!(gatherer.begin(6));
        let delta = piece(epoch(6, 1), Some(epoch(5, 1)), 0, true, &[2]);
        assert!(asks_for_all(&gatherer.take(&delta)));
    }

    #[test]
    fn orders_without_end_end_the_stream_and_hold_nothing() {
        let mut gatherer = begun(5);
        let mut pieces = 0;
        let said = loop {
            let gathered = gatherer.take(&piece(epoch(5, 1), None, pieces, false, &[]));
            pieces += 1;
            if gathered != Gathered::Nothing {
                break gathered;
            }
        };
        assert!(matches!(said, Gathered::HangUp(_)) && pieces as usize == PIECES_MAX + 1);
        assert!(gatherer.partial.is_none());

        let many: Vec<u64> = (0..4096).collect();
        let mut gatherer = begun(5);
        let said = (0..).find_map(|index| {
            let gathered = gatherer.take(&piece(epoch(5, 1), None, index, false, &many));
            (gathered != Gathered::Nothing).then_some(gathered)
        });
        assert!(matches!(said, Some(Gathered::HangUp(_))));
        assert!(gatherer.partial.is_none() && gatherer.ranks.is_empty());
    }

    #[test]
    fn deltas_that_add_up_to_more_than_was_reported_end_the_stream() {
        let mut gatherer = begun(5);
        let mut base = None;
        let said = (1..).find_map(|sequence: u64| {
            let first = sequence * 10_000;
            let many: Vec<u64> = (first..first + 8192).collect();
            let mut large = piece(epoch(5, sequence), base, 0, true, &[]);
            let rank = |&batch: &u64| Rank { batch, sort_key: 1 };
            large.ranks = many.iter().map(rank).collect();
            base = Some(epoch(5, sequence));
            let gathered = gatherer.take(&large);
            matches!(gathered, Gathered::HangUp(_)).then_some(gathered)
        });
        assert!(said.is_some() && gatherer.ranks.is_empty());
    }
}
