//! Accounts for the KV blocks of one instance. The crate's page has the rules of ownership.

use rustc_hash::FxHashMap;

use crate::request::RequestId;

#[derive(Clone, Debug)]
pub struct Pool {
    block_tokens: u32,
    capacity: u32,
    used: u32,
    /// Blocks of each request. A fast hash is safe here because the driver chooses the ids.
    held: FxHashMap<RequestId, u32>,
}

impl Default for Pool {
    fn default() -> Self {
        Self::new(0, 1)
    }
}

impl Pool {
    /// Creates a pool of `capacity` blocks of `block_tokens` tokens (at least 1).
    pub fn new(capacity: u32, block_tokens: u32) -> Self {
        Self { block_tokens: block_tokens.max(1), capacity, used: 0, held: FxHashMap::default() }
    }

    pub const fn blocks(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_tokens)
    }

    pub const fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    pub const fn capacity(&self) -> u32 {
        self.capacity
    }

    pub const fn used(&self) -> u32 {
        self.used
    }

    pub const fn free(&self) -> u32 {
        self.capacity - self.used
    }

    pub fn held(&self, request: RequestId) -> u32 {
        self.held.get(&request).copied().unwrap_or(0)
    }

    /// Returns how many more blocks `request` needs to hold `tokens` tokens.
    pub fn lacking(&self, request: RequestId, tokens: u32) -> u32 {
        self.blocks(tokens).saturating_sub(self.held(request))
    }

    /// Gives `request` the blocks for `tokens` tokens. The request keeps blocks beyond that.
    /// Returns whether enough blocks were free. If not, the pool is unchanged.
    pub fn grow(&mut self, request: RequestId, tokens: u32) -> bool {
        let needed = self.lacking(request, tokens);
        if needed > self.free() {
            return false;
        }
        if needed > 0 {
            self.used += needed;
            *self.held.entry(request).or_default() += needed;
        }
        true
    }

    /// Frees all blocks of `request` and returns their number.
    pub fn release(&mut self, request: RequestId) -> u32 {
        let blocks = self.held.remove(&request).unwrap_or(0);
        self.used -= blocks;
        blocks
    }

    /// Reports whether the blocks of all requests add up to the used blocks. For tests.
    pub fn is_balanced(&self) -> bool {
        self.held.values().map(|blocks| u64::from(*blocks)).sum::<u64>() == u64::from(self.used)
            && self.held.values().all(|blocks| *blocks > 0)
    }
}
