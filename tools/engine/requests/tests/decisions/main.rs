//! The decisions of every policy in seeded random runs, as a table of counts for each policy. A
//! change that makes decisions cheaper must not change any of them.
//!
//! The last column is a digest of all decisions, so any change shows there. The other columns and
//! the first decisions below the table show what changed. After an intended change of a policy,
//! accept its new table (`cargo insta accept`). The tables of other policies have to stay the same.

mod dispatch;
mod replica;
mod workflow;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use serde::Serialize;

/// The decisions of some runs.
#[derive(Debug)]
struct Tally {
    counts: BTreeMap<String, u64>,
    /// FNV-1a hash of all decisions.
    digest: u64,
    /// The first decisions as text.
    first: Vec<String>,
}

impl Tally {
    /// Number of decisions that are shown.
    const SHOWN: usize = 10;

    const fn new() -> Self {
        Self { counts: BTreeMap::new(), digest: 0xcbf2_9ce4_8422_2325, first: Vec::new() }
    }

    fn add(&mut self, what: &impl Serialize) {
        for byte in serde_json::to_vec(what).expect("decisions are plain data") {
            self.digest = (self.digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn count(&mut self, what: &str, count: usize) {
        *self.counts.entry(what.to_owned()).or_default() += count as u64;
    }

    fn show(&mut self, decision: impl FnOnce() -> String) {
        if self.first.len() < Self::SHOWN {
            self.first.push(decision());
        }
    }
}

/// Returns the table of one policy and the first decisions of its first row.
fn table(rows: &[(&str, Tally)]) -> String {
    let columns: BTreeSet<&String> = rows.iter().flat_map(|(_, row)| row.counts.keys()).collect();
    let mut text = format!("{:<12}", "");
    for column in &columns {
        let _ = write!(text, "{column:>17}");
    }
    let _ = writeln!(text, "  digest");
    for (name, row) in rows {
        let _ = write!(text, "{name:<12}");
        for column in &columns {
            let count = row.counts.get(*column).copied().unwrap_or(0);
            let _ = write!(text, "{count:>17}");
        }
        let _ = writeln!(text, "  {:016x}", row.digest);
    }
    let _ = writeln!(text, "\n{}", rows[0].1.first.join("\n"));
    text
}

/// A random number generator with the same sequence everywhere (SplitMix64).
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
