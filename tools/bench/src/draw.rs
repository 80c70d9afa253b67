//! Numbers that look random and are the same in every run: SplitMix64 (Steele, Lea, Flood 2014).

/// A stream of numbers.
pub(crate) struct Draw(u64);

impl Draw {
    /// The stream of a seed.
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `bound`, which must not be zero. Its bias is far below what a benchmark sees.
    pub(crate) const fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}
