//! What every policy decides in seeded random runs, as one number each: changes that are meant to
//! make decisions cheaper must not change any of them.
//!
//! A number that differs means that some decision differs. If a policy was changed on purpose, put
//! the number that the test prints in its place; numbers of policies that were not touched have to
//! stay.

mod dispatch;
mod replica;
mod workflow;

use serde::Serialize;

/// FNV-1a over all that was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Digest(u64);

impl Digest {
    const fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn add(&mut self, what: &impl Serialize) {
        for byte in serde_json::to_vec(what).expect("decisions are plain data") {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

/// A generator that is the same everywhere (SplitMix64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.roll() % end.max(1)
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }
}

/// Compares with what was recorded.
fn check(found: &[(String, u64)], recorded: &[(&str, u64)]) {
    let listed: String = found
        .iter()
        .map(|(name, digest)| {
            let part = |at: u32| digest >> at & 0xffff;
            let (a, b, c, d) = (part(48), part(32), part(16), part(0));
            format!("    (\"{name}\", 0x{a:04x}_{b:04x}_{c:04x}_{d:04x}),\n")
        })
        .collect();
    let same = found
        .iter()
        .map(|(name, digest)| (name.as_str(), *digest))
        .eq(recorded.iter().copied());
    let differ: Vec<_> = found
        .iter()
        .filter(|(name, digest)| !recorded.contains(&(name.as_str(), *digest)))
        .map(|(name, _)| name)
        .collect();
    assert!(
        same,
        "other decisions than recorded: {differ:?}; now:\n{listed}"
    );
}
