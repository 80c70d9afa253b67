//! A hash map for lookup by names that this process chose itself.
//!
//! The hash is fixed, so memory use and speed repeat from run to run; no decision ever iterates
//! over one of these maps. Names that come from other processes (batches, requests) are looked
//! up in ordered trees instead, since a fixed hash could be made to collide on purpose.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Multiplicative hash of one 64-bit name.
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
        // 2^64 / φ spreads consecutive names; the product's high half is folded in because the
        // map takes its bucket from the low bits and its tag from the high ones.
        let product = u128::from(self.0 ^ name) * 0x9E37_79B9_7F4A_7C15;
        self.0 = (product as u64) ^ ((product >> 64) as u64);
    }
}

/// Map from a name of ours to a value.
pub(crate) type Lookup<K, V> = HashMap<K, V, BuildHasherDefault<NameHasher>>;
