//! The book of KV blocks of one instance. Rules of ownership: the crate's page.

use rustc_hash::FxHashMap;

use crate::request::RequestId;

/// A request asked for more blocks than are free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{needed} blocks are needed and {free} are free")]
pub struct Short {
    /// Blocks that were asked for.
    pub needed: u32,
    /// Blocks that there are.
    pub free: u32,
}

/// Blocks of an instance, and who holds how many.
#[derive(Clone, Debug)]
pub struct Pool {
    block_tokens: u32,
    capacity: u32,
    used: u32,
    /// Numbers are the driver's, so that nobody can make them collide; asked for each token of each
    /// iteration.
    held: FxHashMap<RequestId, u32>,
}

impl Pool {
    /// `capacity` blocks of `block_tokens` tokens (1 at least).
    #[must_use]
    pub fn new(capacity: u32, block_tokens: u32) -> Self {
        Self {
            block_tokens: block_tokens.max(1),
            capacity,
            used: 0,
            held: FxHashMap::default(),
        }
    }

    /// Blocks of so many tokens.
    #[must_use]
    pub const fn blocks(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_tokens)
    }

    /// Tokens of a block.
    #[must_use]
    pub const fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Blocks in all.
    #[must_use]
    pub const fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Blocks held.
    #[must_use]
    pub const fn used(&self) -> u32 {
        self.used
    }

    /// Blocks that nobody holds: none while more are held than there are (after [`Self::resize`]).
    #[must_use]
    pub const fn free(&self) -> u32 {
        self.capacity.saturating_sub(self.used)
    }

    /// Blocks that a request holds.
    #[must_use]
    pub fn held(&self, request: RequestId) -> u32 {
        self.held.get(&request).copied().unwrap_or(0)
    }

    /// Blocks that a request lacks to hold `tokens` tokens.
    #[must_use]
    pub fn lacking(&self, request: RequestId, tokens: u32) -> u32 {
        self.blocks(tokens).saturating_sub(self.held(request))
    }

    /// Tokens up to which a request can grow now.
    #[must_use]
    pub fn reach(&self, request: RequestId) -> u32 {
        (self.held(request) + self.free()).saturating_mul(self.block_tokens)
    }

    /// Lets a request hold `tokens` tokens; what it holds beyond that it keeps.
    ///
    /// # Errors
    /// If too few blocks are free; nothing has changed then.
    pub fn grow(&mut self, request: RequestId, tokens: u32) -> Result<(), Short> {
        let needed = self.lacking(request, tokens);
        let free = self.free();
        if needed > free {
            return Err(Short { needed, free });
        }
        if needed > 0 {
            self.used += needed;
            *self.held.entry(request).or_default() += needed;
        }
        Ok(())
    }

    /// A request gives back all that it holds: so many blocks.
    pub fn release(&mut self, request: RequestId) -> u32 {
        let blocks = self.held.remove(&request).unwrap_or(0);
        self.used -= blocks;
        blocks
    }

    /// There are more blocks now, or fewer: something else takes memory, or has given it back.
    pub const fn resize(&mut self, capacity: u32) {
        self.capacity = capacity;
    }

    /// The sum of what is held is what is used. For tests.
    #[must_use]
    pub fn is_balanced(&self) -> bool {
        self.held
            .values()
            .map(|blocks| u64::from(*blocks))
            .sum::<u64>()
            == u64::from(self.used)
            && self.held.values().all(|blocks| *blocks > 0)
    }
}
