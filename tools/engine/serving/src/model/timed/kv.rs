//! The KV cache of a timed model, which holds the seed of each token's pattern in each layer.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::pattern::{self, mix};
use crate::model::{KvCache, ModelShape, Result, fail};
use crate::schedule::Room;

/// Seeds by layer and slot. A slot holds one token. Block `b` has the slots from `b × block_tokens`
/// on. The engine's thread writes them. The thread that gives KV to other processes finds blocks in
/// the pool, whose lock orders the accesses. So `Relaxed` suffices.
pub(super) struct TimedKv {
    layers: Vec<Vec<AtomicU64>>,
    block_tokens: usize,
    token_bytes: usize,
}

impl TimedKv {
    pub(super) fn new(shape: &ModelShape, room: Room) -> Self {
        let slots = room.blocks as usize * room.block_tokens as usize;
        Self {
            layers: (0..shape.layers)
                .map(|_| (0..slots).map(|_| AtomicU64::new(0)).collect())
                .collect(),
            block_tokens: room.block_tokens as usize,
            token_bytes: shape.kv_bytes(),
        }
    }

    fn slot(&self, blocks: &[u32], token: usize) -> usize {
        blocks[token / self.block_tokens] as usize * self.block_tokens + token % self.block_tokens
    }

    /// Returns the seeds of a layer, if these blocks hold a sequence's tokens up to `end`.
    fn layer(&self, layer: usize, blocks: &[u32], end: usize) -> Result<&[AtomicU64]> {
        let Some(seeds) = self.layers.get(layer) else {
            fail!("there is no layer {layer}");
        };
        let all = seeds.len() / self.block_tokens;
        if let Some(block) = blocks.iter().find(|block| **block as usize >= all) {
            fail!("there is no block {block}");
        }
        if end > blocks.len() * self.block_tokens {
            fail!("{} blocks do not hold {end} tokens", blocks.len());
        }
        Ok(seeds)
    }

    /// Returns the seeds of some tokens of a sequence with these blocks.
    pub(super) fn seeds(
        &self,
        layer: usize,
        blocks: &[u32],
        tokens: Range<usize>,
    ) -> Result<Vec<u64>> {
        let seeds = self.layer(layer, blocks, tokens.end)?;
        let seed = |token| seeds[self.slot(blocks, token)].load(Ordering::Relaxed);
        Ok(tokens.map(seed).collect())
    }

    /// Writes the KV of tokens from token `first` of a sequence with these blocks. The KV depends
    /// on that of the tokens before.
    pub(super) fn compute(
        &self,
        layer: usize,
        blocks: &[u32],
        first: usize,
        tokens: &[u32],
    ) -> Result<()> {
        let seeds = self.layer(layer, blocks, first + tokens.len())?;
        let mut last = match first {
            0 => mix(layer as u64),
            _ => seeds[self.slot(blocks, first - 1)].load(Ordering::Relaxed),
        };
        for (at, &token) in tokens.iter().enumerate() {
            last = mix(last ^ u64::from(token));
            seeds[self.slot(blocks, first + at)].store(last, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl KvCache for TimedKv {
    fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    fn token_bytes(&self) -> usize {
        self.token_bytes
    }

    fn export(&self, layer: usize, blocks: &[u32], first: usize, tokens: usize) -> Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(tokens * self.token_bytes);
        for seed in self.seeds(layer, blocks, first..first.saturating_add(tokens))? {
            pattern::extend(&mut bytes, seed, self.token_bytes / 8);
        }
        Ok(bytes)
    }

    fn import(&self, layer: usize, blocks: &[u32], first: usize, bytes: &[u8]) -> Result<usize> {
        let tokens = bytes.len() / self.token_bytes;
        if tokens * self.token_bytes != bytes.len() {
            fail!("{} bytes are no whole tokens", bytes.len());
        }
        let end = first.saturating_add(tokens);
        let seeds = self.layer(layer, blocks, end)?;
        for (at, token) in bytes.chunks_exact(self.token_bytes).enumerate() {
            let Some(seed) = pattern::seed_of(token) else {
                fail!("KV of layer {layer} is damaged at token {}", first + at);
            };
            seeds[self.slot(blocks, first + at)].store(seed, Ordering::Relaxed);
        }
        Ok(tokens)
    }
}
