//! The allocation of the KV cache's blocks: a pool with reference counts and a prefix cache.
//!
//! A full block with known tokens is *published* under the hash of all tokens up to its end (the
//! chain of its sequence, salted with the model's identity). Sequences with the same beginning find
//! it again. A block without references stays findable until its place is needed. The block that is
//! unused for longest is evicted first. Blocks of a chain are released from the end, so that the
//! end of a chain is evicted before its beginning.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sha2::{Digest as _, Sha256};

/// The hash of a block's tokens and all tokens before them.
pub type BlockHash = [u8; 16];

pub fn chain(identity: &[u8; 16], tokens: &[u32], block_tokens: usize) -> Vec<BlockHash> {
    let mut before = *identity;
    tokens
        .chunks_exact(block_tokens)
        .map(|block| {
            let mut hash = Sha256::new();
            hash.update(before);
            block.iter().for_each(|token| hash.update(token.to_le_bytes()));
            before.copy_from_slice(&hash.finalize()[..16]);
            before
        })
        .collect()
}

#[derive(Clone, Debug, Default)]
struct Block {
    references: u32,
    hash: Option<BlockHash>,
    /// Value of the clock when the block was released, which is its key in `idle`.
    idle_since: u64,
}

#[derive(Clone, Debug)]
pub struct Blocks {
    blocks: Vec<Block>,
    /// Blocks that have no references and are not published.
    free: Vec<u32>,
    /// Published blocks without references, by the time of their release.
    idle: BTreeMap<u64, u32>,
    published: HashMap<BlockHash, u32>,
    clock: u64,
    evicted: u64,
}

impl Blocks {
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

    /// Returns the number of blocks that can be taken now.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    pub fn used(&self) -> usize {
        self.blocks.len() - self.available()
    }

    pub const fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Takes `count` blocks, or returns `None` if there are too few.
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

    /// Takes the blocks that are found, from the first on.
    pub fn find(&mut self, hashes: &[BlockHash]) -> Vec<u32> {
        let mut found = Vec::new();
        for hash in hashes {
            let Some(&block) = self.published.get(hash) else { break };
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

    /// Publishes a full block. If a block of the same tokens is published already, that one stays.
    pub fn publish(&mut self, block: u32, hash: BlockHash) {
        let entry = &mut self.blocks[block as usize];
        if entry.references > 0 && entry.hash.is_none() && !self.published.contains_key(&hash) {
            entry.hash = Some(hash);
            self.published.insert(hash, block);
        }
    }

    /// Releases one reference to each block. The blocks of a sequence must be in its order.
    pub fn release(&mut self, blocks: &[u32]) {
        for &block in blocks.iter().rev() {
            let entry = &mut self.blocks[block as usize];
            // A count below zero would give the block out twice. Leaking it is better.
            debug_assert!(entry.references > 0, "block {block} was released twice");
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

/// A pool that the engine's thread shares with the thread that gives KV to other processes.
#[derive(Clone, Debug)]
pub struct SharedBlocks(Arc<Mutex<Blocks>>);

impl SharedBlocks {
    pub fn new(blocks: Blocks) -> Self {
        Self(Arc::new(Mutex::new(blocks)))
    }

    /// Locks the pool for one statement.
    pub fn lock(&self) -> MutexGuard<'_, Blocks> {
        // No method leaves a pool inconsistent, so a poisoned lock can be used.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Checks that each block is in exactly one place, and each published hash leads to its block.
    fn check(blocks: &Blocks, held: &[Vec<u32>]) {
        let mut count = vec![0_u32; blocks.blocks.len()];
        held.iter().flatten().for_each(|block| count[*block as usize] += 1);
        let free: HashSet<u32> = blocks.free.iter().copied().collect();
        let idle: HashSet<u32> = blocks.idle.values().copied().collect();
        assert_eq!(free.len(), blocks.free.len(), "a block is free twice");
        assert_eq!(idle.len(), blocks.idle.len(), "a block is idle twice");
        for (number, entry) in blocks.blocks.iter().enumerate() {
            let block = number as u32;
            assert_eq!(entry.references, count[number], "block {block}");
            let places = [free.contains(&block), idle.contains(&block), entry.references > 0];
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
        fn no_block_is_lost_and_none_given_twice(
            operations in prop::collection::vec((0..4_u8, 0..12_u8, 0..40_usize), 1..300),
        ) {
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
                        let published = |hash| blocks.published.get(hash).copied();
                        let there: Vec<u32> = hashes.iter().map_while(published).collect();
                        let idle = |block: &&u32| blocks.blocks[**block as usize].references == 0;
                        let idle = there.iter().filter(idle).count();
                        let before = blocks.available();
                        let found = blocks.find(&hashes);
                        prop_assert_eq!(&found, &there);
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
