//! Prefix blocks of requests: which units hold them, and which must not be evicted for now.

use super::cache::{Caches, Pinned};
use super::layout::mix;
use super::router::Route;
use super::setup::Setup;
use crate::scenario::Routing;

#[derive(Debug)]
pub(super) struct Prefixes {
    pub(super) caches: Caches,
    pinned: Vec<Vec<Pinned>>,
}

impl Prefixes {
    pub(super) fn new(setup: &Setup<'_>) -> Self {
        let requests = &setup.inputs.requests;
        let block_tokens = u64::from(requests.block_tokens.max(1));
        Self {
            caches: Caches::new(
                requests.distinct_blocks,
                setup.layout.units,
                setup.layout.ranks_per_unit,
                setup.scenario.serving.cache_tokens / block_tokens,
            ),
            pinned: vec![Vec::new(); requests.list.len()],
        }
    }

    /// Protects reused blocks from eviction until the request has computed. With copies, the blocks
    /// are also stored where the request computes.
    pub(super) fn use_blocks(&mut self, setup: &Setup<'_>, number: usize, route: &Route) {
        let layout = &setup.layout;
        let unit = layout.unit_of(route.rank);
        let mut pinned = Vec::with_capacity(route.blocks.len());
        // Goes back to front, so that the tail of a prefix is evicted first.
        for &(block, holder) in route.blocks.iter().rev() {
            pinned.extend(self.caches.pin(holder, block));
            if layout.unit_of(holder) != unit && setup.scenario.serving.copy_on_fetch {
                self.caches.insert(route.rank, block);
            }
        }
        self.pinned[number] = pinned;
    }

    /// Stores the blocks of a computed request in the unit of `rank`, or in their static home.
    pub(super) fn keep_blocks(&mut self, setup: &Setup<'_>, number: u32, mut rank: u32) {
        let requests = &setup.inputs.requests;
        let blocks = requests.blocks_of(&requests.list[number as usize]);
        for pinned in core::mem::take(&mut self.pinned[number as usize]) {
            self.caches.release(pinned);
        }
        let serving = &setup.scenario.serving;
        if let (Routing::StaticHomes, Some(&first)) = (serving.routing, blocks.first()) {
            rank = (mix(u64::from(first)) % u64::from(setup.layout.ranks)) as u32;
        }
        let unit = setup.layout.unit_of(rank);
        for &block in blocks.iter().rev() {
            // A block has one holder, unless copies are enabled.
            let held = self.caches.holders(block).next().is_some();
            if !held || serving.copy_on_fetch {
                self.caches.insert(rank, block);
            } else {
                self.caches.touch(unit, block);
            }
        }
    }
}
