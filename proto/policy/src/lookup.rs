//! A hash map whose keys this process chose itself.
//!
//! The hash is fixed, so memory use and speed repeat from run to run. No decision iterates over one
//! of these maps. Ids from other processes (batches, requests) are looked up in ordered trees
//! instead, because another process could choose ids that collide under a fixed hash.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Multiplicative hash of one 64-bit key.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NameHasher(u64);

impl Hasher for NameHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, name: u64) {
        // 2^64 / φ spreads consecutive keys. The high half of the product is folded in because the
        // map takes its bucket from the low bits and its tag from the high ones.
        let product = u128::from(self.0 ^ name) * 0x9E37_79B9_7F4A_7C15;
        self.0 = (product as u64) ^ ((product >> 64) as u64);
    }
}

/// Map from a key that this process chose to a value.
pub(crate) type Lookup<K, V> = HashMap<K, V, BuildHasherDefault<NameHasher>>;
