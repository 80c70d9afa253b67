//! Applies orders as docs/coordinator.md says that a daemon does, and asserts every rule.

use std::collections::BTreeMap;

use laxity_wire::v1::{Epoch, FromCoordinator, Order, Pruned, Refusal, from_coordinator::Message};

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Replica {
    pub(crate) ranks: BTreeMap<u64, u64>,
    pub(crate) pruned: BTreeMap<u64, Pruned>,
    pub(crate) applied: Option<Epoch>,
    pub(crate) considered: u64,
    pub(crate) orders: usize,
    pub(crate) refusals: Vec<Refusal>,
    pub(crate) drained: bool,
    pub(crate) snapshot_wanted: bool,
    gathered: Vec<Order>,
}

impl Replica {
    pub(crate) fn take(&mut self, frame: FromCoordinator) {
        match frame.message.expect("a message") {
            Message::Order(order) => self.gather(order),
            Message::Refusal(refusal) => self.refusals.push(refusal),
            Message::Standing(standing) => self.drained = standing.drained,
            Message::SnapshotWanted(_) => self.snapshot_wanted = true,
            _ => {}
        }
    }

    fn gather(&mut self, order: Order) {
        assert_eq!(order.piece as usize, self.gathered.len());
        let last = order.last;
        self.gathered.push(order);
        if last {
            let pieces = core::mem::take(&mut self.gathered);
            self.apply(pieces);
        }
    }

    fn apply(&mut self, pieces: Vec<Order>) {
        let (epoch, base) = (pieces[0].epoch, pieces[0].base);
        let key = |epoch: &Epoch| epoch.key();
        assert!(epoch.as_ref().map(key) > self.applied.as_ref().map(key));
        match base {
            Some(_) => assert_eq!(base, self.applied, "a delta builds on what was applied"),
            None => {
                self.ranks.clear();
                self.pruned.clear();
            }
        }
        self.orders += 1;
        for piece in pieces {
            assert_eq!((piece.epoch, piece.base), (epoch, base));
            let ranks = piece.ranks.into_iter();
            self.ranks.extend(ranks.map(|rank| (rank.batch, rank.sort_key)));
            for batch in piece.unranked {
                self.ranks.remove(&batch);
            }
            let pruned = piece.pruned.into_iter();
            self.pruned.extend(pruned.map(|it| (it.request, it)));
            for request in piece.unpruned {
                self.pruned.remove(&request);
            }
            self.considered = self.considered.max(piece.considered_report);
        }
        self.applied = epoch;
    }

    /// Returns the batches in the order of service.
    pub(crate) fn sigma(&self) -> Vec<u64> {
        let mut sigma: Vec<(u64, u64)> = self.ranks.iter().map(|(&b, &key)| (key, b)).collect();
        sigma.sort_unstable();
        sigma.into_iter().map(|(_, batch)| batch).collect()
    }
}
