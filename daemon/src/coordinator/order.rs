//! A cluster order as the links get it, with the batches that the coordinator does not rank.

use std::collections::HashMap;
use std::sync::Arc;

use laxity_policy::event::Order;
use laxity_policy::{BatchId, RequestId};
use laxity_wire::v1::Epoch;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterOrder {
    pub epoch: Epoch,
    /// The content. Orders with equal content share one allocation.
    pub content: Arc<OrderContent>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OrderContent {
    sigma: Vec<BatchId>,
    /// The index of each batch in `sigma`.
    ranks: HashMap<BatchId, usize>,
    pruned: Vec<RequestId>,
}

impl OrderContent {
    /// Makes a content from (sort key, batch) pairs and pruned requests, each in any order.
    pub fn new(ranks: impl Iterator<Item = (u64, u64)>, pruned: impl Iterator<Item = u64>) -> Self {
        let mut keyed: Vec<(u64, u64)> = ranks.collect();
        keyed.sort_unstable();
        let sigma: Vec<BatchId> = keyed.iter().map(|&(_, batch)| BatchId(batch)).collect();
        let ranks = sigma.iter().enumerate().map(|(rank, &id)| (id, rank));
        let mut pruned: Vec<RequestId> = pruned.map(RequestId).collect();
        pruned.sort_unstable();
        Self { ranks: ranks.collect(), sigma, pruned }
    }

    pub fn ranks(&self, batch: BatchId) -> bool {
        self.ranks.contains_key(&batch)
    }

    /// Returns this order without some batches and pruned requests.
    pub fn without(
        &self,
        batch: impl Fn(BatchId) -> bool,
        request: impl Fn(RequestId) -> bool,
    ) -> Self {
        let sigma = self.sigma.iter().filter(|id| !batch(**id)).enumerate();
        let pruned = self.pruned.iter().filter(|id| !request(**id));
        Self::new(sigma.map(|(rank, id)| (rank as u64, id.0)), pruned.map(|id| id.0))
    }

    /// Merges the batches of `local` that this order does not rank into this order. `batch_of`
    /// returns the batch of a request, or zero if the batch is unknown.
    ///
    /// *Ranks.* Ranked batches keep the coordinator's order. An unranked batch goes directly before
    /// the first ranked batch that it precedes in the local order, or to the end. If the two orders
    /// disagree, the unranked batch gets the better rank. Unranked batches keep their local order.
    ///
    /// The simpler rule, to put unranked batches last, is wrong if the coordinator has a problem.
    /// Usually a batch is unranked for milliseconds, until its announcement arrives. If the
    /// coordinator hangs or is over a limit, every new urgent batch would wait behind all old ones
    /// until the age limit.
    ///
    /// *Pruned.* The coordinator decides for requests of batches that it ranks, and the daemon for
    /// all others.
    pub fn merged_with(&self, local: &Order, batch_of: impl Fn(RequestId) -> BatchId) -> Order {
        let mut before = self.sigma.len();
        let mut unranked: Vec<(usize, BatchId)> = Vec::new();
        for &batch in local.sigma.iter().rev() {
            match self.ranks.get(&batch) {
                Some(&rank) => before = before.min(rank),
                None => unranked.push((before, batch)),
            }
        }
        let mut sigma = Vec::with_capacity(self.sigma.len() + unranked.len());
        for (rank, &batch) in self.sigma.iter().enumerate() {
            while let Some(&(at, other)) = unranked.last()
                && at <= rank
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
        Order { epoch: local.epoch, sigma, pruned }
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
        let content = OrderContent::new((0..).zip(ranks.iter().copied()), [].into_iter());
        let order = content.merged_with(&local(sigma, &[]), |_| BatchId(0));
        order.sigma.iter().map(|batch| batch.0).collect()
    }

    #[test]
    fn ranked_batches_stand_as_the_coordinator_says_and_equal_keys_by_batch() {
        assert_eq!(merged(&[3, 1, 2], &[1, 2, 3]), [3, 1, 2]);
        let content = OrderContent::new([(7, 2), (7, 1), (3, 9)].into_iter(), [].into_iter());
        let order = content.merged_with(&local(&[], &[]), |_| BatchId(0));
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
        let content = OrderContent::new([(1, 10)].into_iter(), [5].into_iter());
        let batch_of = |request: RequestId| BatchId(if request.0 < 20 { 10 } else { 11 });
        let order = content.merged_with(&local(&[10, 11], &[6, 21]), batch_of);
        assert_eq!(order.pruned, [RequestId(5), RequestId(21)]);
    }
}
