//! Which block of the KV cache is whose: a pool with reference counts and a prefix cache.
//!
//! A full block whose tokens are known is *published* under the hash of everything up to its end
//! (the chain of its sequence, salted with the model's identity), and found again by sequences that
//! begin the same. A block that nobody refers to stays findable until its place is needed; the one
//! longest unused goes first. Blocks of one chain are let go of from the end, so that what is left
//! of a chain is its beginning.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sha2::{Digest as _, Sha256};

/// Stands for a block's tokens and all tokens before them.
pub type BlockHash = [u8; 16];

/// The hashes of the full blocks of a sequence.
#[must_use]
pub fn chain(identity: &[u8; 16], tokens: &[u32], block_tokens: usize) -> Vec<BlockHash> {
    let mut before = *identity;
    tokens
        .chunks_exact(block_tokens)
        .map(|block| {
            let mut hash = Sha256::new();
            hash.update(before);
            block
                .iter()
                .for_each(|token| hash.update(token.to_le_bytes()));
            before.copy_from_slice(&hash.finalize()[..16]);
            before
        })
        .collect()
}

#[derive(Clone, Debug, Default)]
struct Block {
    references: u32,
    hash: Option<BlockHash>,
    /// When it was let go of; its key among the idle ones.
    idle_since: u64,
}

/// The pool.
#[derive(Clone, Debug)]
pub struct Blocks {
    blocks: Vec<Block>,
    /// Neither referred to nor published.
    free: Vec<u32>,
    /// Published, referred to by nobody, by when they were let go of.
    idle: BTreeMap<u64, u32>,
    published: HashMap<BlockHash, u32>,
    clock: u64,
    evicted: u64,
}

impl Blocks {
    /// A pool of `count` blocks.
    #[must_use]
    pub fn new(count: usize) -> Self {
        Self {
            blocks: vec![Block::default(); count],
            free: (0..count as u32).rev().collect(),
            idle: BTreeMap::new(),
            published: HashMap::new(),
            clock: 0,
            evicted: 0,
        }
    }

    /// All blocks.
    #[must_use]
    pub fn total(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that could be had now.
    #[must_use]
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Blocks that somebody refers to.
    #[must_use]
    pub fn used(&self) -> usize {
        self.total() - self.available()
    }

    /// Published blocks that had to make room.
    #[must_use]
    pub const fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Takes `count` blocks, or none if there are not so many.
    pub fn take(&mut self, count: usize) -> Option<Vec<u32>> {
        if self.available() < count {
            return None;
        }
        let mut taken = Vec::with_capacity(count);
        while taken.len() < count {
            let block = match self.free.pop() {
                Some(block) => block,
                None => self.evict()?,
            };
            self.blocks[block as usize].references = 1;
            taken.push(block);
        }
        Some(taken)
    }

    fn evict(&mut self) -> Option<u32> {
        let (_, block) = self.idle.pop_first()?;
        if let Some(hash) = self.blocks[block as usize].hash.take() {
            self.published.remove(&hash);
        }
        self.evicted += 1;
        Some(block)
    }

    /// How many of these are there from the first on, without taking them.
    #[must_use]
    pub fn count_found(&self, hashes: &[BlockHash]) -> usize {
        let there = |hash: &&BlockHash| self.published.contains_key(*hash);
        hashes.iter().take_while(there).count()
    }

    /// How many of these that would be found nobody refers to: taking them makes so many fewer
    /// available.
    #[must_use]
    pub fn count_idle(&self, hashes: &[BlockHash]) -> usize {
        let blocks = hashes.iter().map_while(|hash| self.published.get(hash));
        blocks
            .filter(|block| self.blocks[**block as usize].references == 0)
            .count()
    }

    /// Takes those that are there from the first on.
    pub fn find(&mut self, hashes: &[BlockHash]) -> Vec<u32> {
        let mut found = Vec::new();
        for hash in hashes {
            let Some(&block) = self.published.get(hash) else {
                break;
            };
            self.retain(block);
            found.push(block);
        }
        found
    }

    fn retain(&mut self, block: u32) {
        let entry = &mut self.blocks[block as usize];
        if entry.references == 0 {
            self.idle.remove(&entry.idle_since);
        }
        entry.references += 1;
    }

    /// Makes a full block findable. One of the same tokens that already is stays the one that is
    /// found.
    pub fn publish(&mut self, block: u32, hash: BlockHash) {
        let entry = &mut self.blocks[block as usize];
        if entry.references > 0 && entry.hash.is_none() && !self.published.contains_key(&hash) {
            entry.hash = Some(hash);
            self.published.insert(hash, block);
        }
    }

    /// Lets go of blocks, once each; give a sequence's in its order.
    pub fn release(&mut self, blocks: &[u32]) {
        for &block in blocks.iter().rev() {
            let entry = &mut self.blocks[block as usize];
            // One too many would hand the block out twice: better never again.
            debug_assert!(entry.references > 0, "block {block} was let go of twice");
            if entry.references == 0 {
                continue;
            }
            entry.references -= 1;
            if entry.references > 0 {
                continue;
            }
            if entry.hash.is_some() {
                self.clock += 1;
                entry.idle_since = self.clock;
                self.idle.insert(self.clock, block);
            } else {
                self.free.push(block);
            }
        }
    }
}

/// A pool that the engine's thread shares with the one that gives KV to others.
#[derive(Clone, Debug)]
pub struct SharedBlocks(Arc<Mutex<Blocks>>);

impl SharedBlocks {
    /// Shares a pool.
    #[must_use]
    pub fn new(blocks: Blocks) -> Self {
        Self(Arc::new(Mutex::new(blocks)))
    }

    fn lock(&self) -> MutexGuard<'_, Blocks> {
        // No method leaves a pool half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// [`Blocks::take`].
    #[must_use]
    pub fn take(&self, count: usize) -> Option<Vec<u32>> {
        self.lock().take(count)
    }

    /// [`Blocks::find`].
    #[must_use]
    pub fn find(&self, hashes: &[BlockHash]) -> Vec<u32> {
        self.lock().find(hashes)
    }

    /// [`Blocks::publish`].
    pub fn publish(&self, block: u32, hash: BlockHash) {
        self.lock().publish(block, hash);
    }

    /// [`Blocks::release`].
    pub fn release(&self, blocks: &[u32]) {
        self.lock().release(blocks);
    }

    /// [`Blocks::used`].
    #[must_use]
    pub fn used(&self) -> usize {
        self.lock().used()
    }

    /// [`Blocks::evicted`].
    #[must_use]
    pub fn evicted(&self) -> u64 {
        self.lock().evicted()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn hash(number: u8) -> BlockHash {
        [number; 16]
    }

    /// Every block is in exactly one place, and whatever is published leads to it.
    fn check(blocks: &Blocks, held: &[Vec<u32>]) {
        let mut count = vec![0_u32; blocks.total()];
        held.iter()
            .flatten()
            .for_each(|block| count[*block as usize] += 1);
        let free: HashSet<u32> = blocks.free.iter().copied().collect();
        let idle: HashSet<u32> = blocks.idle.values().copied().collect();
        assert_eq!(free.len(), blocks.free.len(), "a block is free twice");
        assert_eq!(idle.len(), blocks.idle.len(), "a block is idle twice");
        for (number, entry) in blocks.blocks.iter().enumerate() {
            let block = number as u32;
            assert_eq!(entry.references, count[number], "block {block}");
            let places = [
                free.contains(&block),
                idle.contains(&block),
                entry.references > 0,
            ];
            assert_eq!(places.iter().filter(|p| **p).count(), 1, "block {block}");
            if let Some(hash) = entry.hash {
                assert_eq!(blocks.published.get(&hash), Some(&block));
                assert!(!free.contains(&block));
            }
        }
        let published = blocks.blocks.iter().filter(|b| b.hash.is_some()).count();
        assert_eq!(published, blocks.published.len());
    }

    proptest! {
        #[test]
        fn no_block_is_lost_and_none_given_twice(operations in prop::collection::vec((0..4_u8, 0..12_u8, 0..40_usize), 1..300)) {
            let mut blocks = Blocks::new(16);
            let mut held: Vec<Vec<u32>> = Vec::new();
            for (operation, number, which) in operations {
                match operation {
                    0 => {
                        let before = blocks.available();
                        match blocks.take(number as usize % 6) {
                            Some(taken) => held.push(taken),
                            None => prop_assert!(before < number as usize % 6),
                        }
                    }
                    1 if !held.is_empty() => {
                        let gone = held.swap_remove(which % held.len());
                        blocks.release(&gone);
                    }
                    2 if !held.is_empty() => {
                        let of = &held[which % held.len()];
                        if let Some(block) = of.first() {
                            blocks.publish(*block, hash(number));
                        }
                    }
                    3 => {
                        let hashes = [hash(number), hash(number + 1)];
                        let (expected, idle) = (blocks.count_found(&hashes), blocks.count_idle(&hashes));
                        let before = blocks.available();
                        let found = blocks.find(&hashes);
                        prop_assert_eq!(found.len(), expected);
                        prop_assert_eq!(before - blocks.available(), idle);
                        held.push(found);
                    }
                    _ => {}
                }
                check(&blocks, &held);
            }
            for gone in held.drain(..) {
                blocks.release(&gone);
            }
            check(&blocks, &[]);
            prop_assert_eq!(blocks.available(), 16);
        }
    }

    #[test]
    fn the_longest_unused_chain_makes_room_and_from_its_end() {
        let mut blocks = Blocks::new(4);
        let first = blocks.take(2).unwrap();
        blocks.publish(first[0], hash(1));
        blocks.publish(first[1], hash(2));
        let second = blocks.take(2).unwrap();
        blocks.publish(second[0], hash(3));
        blocks.publish(second[1], hash(4));
        blocks.release(&first);
        blocks.release(&second);
        let taken = blocks.take(1).unwrap();
        assert_eq!(taken, [first[1]]);
        assert_eq!(blocks.find(&[hash(1), hash(2)]), [first[0]]);
        assert_eq!(blocks.find(&[hash(3), hash(4)]), second);
        assert_eq!(blocks.evicted(), 1);
    }

    #[test]
    fn a_chain_tells_models_and_beginnings_apart() {
        let chain_of = |identity: u8, tokens: &[u32]| chain(&[identity; 16], tokens, 2);
        let one = chain_of(1, &[1, 2, 3, 4, 5]);
        assert_eq!(one.len(), 2);
        assert_eq!(one, chain_of(1, &[1, 2, 3, 4, 9]));
        assert_ne!(one[0], chain_of(2, &[1, 2])[0]);
        assert_ne!(one[1], chain_of(1, &[9, 2, 3, 4])[1]);
    }
}
