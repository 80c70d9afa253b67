//! An order of the coordinator as the links get it: with the batches in it that the coordinator does not rank.

use std::collections::HashMap;
use std::sync::Arc;

use laxity_policy::event::Order;
use laxity_policy::{BatchId, RequestId};
use laxity_wire::v1::Epoch;

/// A whole order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decree {
    /// When it was issued.
    pub epoch: Epoch,
    /// What it says. The same allocation as before if it says nothing new.
    pub terms: Arc<Terms>,
}

/// What an order says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    sigma: Vec<BatchId>,
    places: HashMap<BatchId, usize>,
    /// In ascending order.
    pruned: Vec<RequestId>,
    /// Fetches that are to wait, in ascending order.
    held: Vec<u64>,
}

impl Terms {
    /// From (sort key, batch) and request, in any order.
    #[must_use]
    pub fn new(ranks: impl Iterator<Item = (u64, u64)>, pruned: impl Iterator<Item = u64>) -> Self {
        let mut keyed: Vec<(u64, u64)> = ranks.collect();
        keyed.sort_unstable();
        let sigma: Vec<BatchId> = keyed.iter().map(|&(_, batch)| BatchId(batch)).collect();
        let places = sigma.iter().enumerate().map(|(place, &id)| (id, place));
        let mut pruned: Vec<RequestId> = pruned.map(RequestId).collect();
        pruned.sort_unstable();
        Self {
            places: places.collect(),
            sigma,
            pruned,
            held: Vec::new(),
        }
    }

    /// The same, with fetches that are to wait, in any order.
    #[must_use]
    pub fn with_held(mut self, held: impl Iterator<Item = u64>) -> Self {
        self.held = held.collect();
        self.held.sort_unstable();
        self
    }

    /// Whether the fetch of this number is to wait.
    #[must_use]
    pub fn holds(&self, fetch: u64) -> bool {
        self.held.binary_search(&fetch).is_ok()
    }

    /// Whether the coordinator has a place for the batch.
    #[must_use]
    pub fn ranks(&self, batch: BatchId) -> bool {
        self.places.contains_key(&batch)
    }

    /// This order, with the batches of `local` in it that it does not rank. `batch_of` says which batch a
    /// request belongs to, zero if that is not known.
    ///
    /// *Ranks.* Those that the coordinator ranks stand as it says. Another is put directly before the first of them
    /// that it precedes by the local order, and at the end if it precedes none. Behind all would be simpler, and wrong
    /// whenever the coordinator is the problem: a batch has no rank while its announcement is under way (milliseconds),
    /// but also if the coordinator is over a limit, or hangs, and then every new batch, however urgent, would wait behind
    /// all old ones until the order's age limit. Where the two orders contradict each other the unranked batch
    /// gets the better place, for the same reason. Unranked batches keep their order among each other: the set of
    /// ranked batches that follow one includes the set of those that follow a later one.
    ///
    /// *Pruned.* The coordinator's word on the requests of batches that it ranks; the daemon's own on the others.
    #[must_use]
    pub fn over(&self, local: &Order, batch_of: impl Fn(RequestId) -> BatchId) -> Order {
        let mut before = self.sigma.len();
        let mut unranked: Vec<(usize, BatchId)> = Vec::new();
        for &batch in local.sigma.iter().rev() {
            match self.places.get(&batch) {
                Some(&place) => before = before.min(place),
                None => unranked.push((before, batch)),
            }
        }
        let mut sigma = Vec::with_capacity(self.sigma.len() + unranked.len());
        for (place, &batch) in self.sigma.iter().enumerate() {
            while let Some(&(at, other)) = unranked.last()
                && at <= place
            {
                sigma.push(other);
                unranked.pop();
            }
            sigma.push(batch);
        }
        sigma.extend(unranked.iter().rev().map(|&(_, batch)| batch));
        let own = local.pruned.iter().copied();
        let mut pruned = self.pruned.clone();
        pruned.extend(own.filter(|&request| !self.ranks(batch_of(request))));
        pruned.sort_unstable();
        pruned.dedup();
        Order {
            epoch: local.epoch,
            sigma,
            pruned,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local(sigma: &[u64], pruned: &[u64]) -> Order {
        Order {
            epoch: 1,
            sigma: sigma.iter().map(|&id| BatchId(id)).collect(),
            pruned: pruned.iter().map(|&id| RequestId(id)).collect(),
        }
    }

    fn merged(ranks: &[u64], sigma: &[u64]) -> Vec<u64> {
        let terms = Terms::new((0..).zip(ranks.iter().copied()), [].into_iter());
        let order = terms.over(&local(sigma, &[]), |_| BatchId(0));
        order.sigma.iter().map(|batch| batch.0).collect()
    }

    #[test]
    fn ranked_batches_stand_as_the_coordinator_says_and_equal_keys_by_batch() {
        assert_eq!(merged(&[3, 1, 2], &[1, 2, 3]), [3, 1, 2]);
        let terms = Terms::new([(7, 2), (7, 1), (3, 9)].into_iter(), [].into_iter());
        let order = terms.over(&local(&[], &[]), |_| BatchId(0));
        assert_eq!(order.sigma, [BatchId(9), BatchId(1), BatchId(2)]);
    }

    #[test]
    fn an_unranked_batch_keeps_its_local_place_among_the_ranked() {
        assert_eq!(merged(&[1, 2, 3], &[1, 9, 2, 3]), [1, 9, 2, 3]);
        assert_eq!(merged(&[1, 2, 3], &[8, 1, 2, 3, 9]), [8, 1, 2, 3, 9]);
        assert_eq!(merged(&[1, 2], &[1, 7, 8, 2, 9]), [1, 7, 8, 2, 9]);
        assert_eq!(merged(&[], &[5, 4]), [5, 4]);
    }

    #[test]
    fn where_the_orders_disagree_the_unranked_batch_gets_the_better_place() {
        assert_eq!(merged(&[1, 2, 3], &[3, 9, 1, 2]), [9, 1, 2, 3]);
    }

    #[test]
    fn each_side_prunes_the_requests_of_its_own_batches() {
        let terms = Terms::new([(1, 10)].into_iter(), [5].into_iter());
        let batch_of = |request: RequestId| BatchId(if request.0 < 20 { 10 } else { 11 });
        let order = terms.over(&local(&[10, 11], &[6, 21]), batch_of);
        assert_eq!(order.pruned, [RequestId(5), RequestId(21)]);
    }
}
