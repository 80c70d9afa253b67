//! Which memory belongs to what: the second of the sources that a flow's metadata come from
//! (architecture §4.1).
//!
//! The engine registers which address range is which layer's KV cache, and which blocks hold which
//! request. A work request then inherits from its local address, without the transfer library's
//! help. Two tables, since the two are said by different people at different times: *layers*,
//! once for the life of the cache, and *owners*, for each request anew. Within a table the last
//! word counts: a range that overlaps older ones cuts them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock};

use laxity_job::fork::PerProcess;
use laxity_shm::record::Stage;

use crate::scope::Scope;

/// Ranges that each table may hold: an engine that never forgets its blocks must not eat its
/// memory.
pub const RANGES_MAX: usize = 1 << 20;

/// A range that cannot be registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// It is empty, or wraps around.
    #[error("{bytes} bytes at {address:#x} are no range of memory")]
    NoRange {
        /// Where it begins.
        address: u64,
        /// How long it is.
        bytes: u64,
    },
    /// Part of it was registered as another layer's KV cache.
    #[error(
        "{bytes} bytes at {address:#x} overlap layer {layer}, which begins at {start:#x} with \
         {length} bytes; \
         forget that first if it is there no more"
    )]
    Overlap {
        /// Where the range begins.
        address: u64,
        /// How long it is.
        bytes: u64,
        /// The layer that is there.
        layer: u16,
        /// Where that begins.
        start: u64,
        /// How long that is.
        length: u64,
    },
    /// The table is full.
    #[error("{RANGES_MAX} ranges are registered; forget those that are not used any more")]
    Full,
}

/// Disjoint ranges of addresses.
#[derive(Debug)]
struct Ranges<T> {
    /// By first address: first address behind it, and what it is.
    map: BTreeMap<u64, (u64, T)>,
}

impl<T: Copy> Ranges<T> {
    const fn new() -> Self {
        Self {
            map: BTreeMap::new(),
        }
    }

    fn find(&self, address: u64) -> Option<T> {
        let (_, (end, what)) = self.map.range(..=address).next_back()?;
        (address < *end).then_some(*what)
    }

    /// What overlaps `start..end`: first address, the one behind the last, and what it is.
    fn among(&self, start: u64, end: u64) -> Vec<(u64, u64, T)> {
        let before = self.map.range(..start).next_back();
        let before = before.filter(|(_, (last, _))| *last > start);
        let inside = self.map.range(start..end);
        let all = before.into_iter().chain(inside);
        all.map(|(first, (last, what))| (*first, *last, *what))
            .collect()
    }

    /// Takes `start..end` out of whatever covers it.
    fn cut(&mut self, start: u64, end: u64) {
        let before = self.map.range(..start).next_back().map(|(k, v)| (*k, *v));
        if let Some((first, (last, what))) = before
            && last > start
        {
            self.map.insert(first, (start, what));
            if last > end {
                self.map.insert(end, (last, what));
            }
        }
        while let Some((&first, &(last, what))) = self.map.range(start..end).next() {
            self.map.remove(&first);
            if last > end {
                self.map.insert(end, (last, what));
            }
        }
    }

    fn set(&mut self, start: u64, end: u64, what: T) -> Result<(), MemoryError> {
        // A cut may leave two pieces of one range.
        if self.map.len() + 2 > RANGES_MAX {
            return Err(MemoryError::Full);
        }
        self.cut(start, end);
        self.map.insert(start, (end, what));
        Ok(())
    }
}

#[derive(Clone, Copy, Debug)]
struct LayerOf {
    stage: Option<Stage>,
    layer: u16,
}

#[derive(Clone, Copy, Debug)]
struct MemoryOwner {
    batch: u64,
    request: u64,
    deadline_ns: u64,
}

#[derive(Debug)]
struct Tables {
    layers: Ranges<LayerOf>,
    owners: Ranges<MemoryOwner>,
}

static TABLES: PerProcess<RwLock<Tables>> = PerProcess::none();

fn tables() -> &'static RwLock<Tables> {
    TABLES.get_or_make(|| {
        // A forked child knows nothing of its parent's memory.
        COUNT.store(0, Ordering::Relaxed);
        RwLock::new(Tables {
            layers: Ranges::new(),
            owners: Ranges::new(),
        })
    })
}

/// Ranges in both tables. Relaxed: a process that registers nothing must not pay for a lock, and
/// one that registers while it submits cannot expect either order.
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn range(address: u64, bytes: u64) -> Result<(u64, u64), MemoryError> {
    match address.checked_add(bytes) {
        Some(end) if bytes > 0 => Ok((address, end)),
        _ => Err(MemoryError::NoRange { address, bytes }),
    }
}

fn change<T>(how: impl FnOnce(&mut Tables) -> T) -> T {
    let mut tables = tables().write().unwrap_or_else(PoisonError::into_inner);
    let result = how(&mut tables);
    let count = tables.layers.map.len() + tables.owners.map.len();
    COUNT.store(count, Ordering::Relaxed);
    result
}

/// The range holds the KV cache of `layer`; transfers of it are of `stage`, if that is always the
/// same.
///
/// # Errors
/// [`MemoryError`]; nothing changes then.
pub fn set_layer(
    address: u64,
    bytes: u64,
    layer: u16,
    stage: Option<Stage>,
) -> Result<(), MemoryError> {
    let (start, end) = range(address, bytes)?;
    change(|tables| tables.layers.set(start, end, LayerOf { stage, layer }))
}

/// [`set_layer`], but not where there is another layer.
///
/// # Errors
/// [`MemoryError`]; nothing changes then.
pub fn claim_layer(
    address: u64,
    bytes: u64,
    layer: u16,
    stage: Option<Stage>,
) -> Result<(), MemoryError> {
    let (start, end) = range(address, bytes)?;
    change(|tables| {
        let there = tables.layers.among(start, end);
        match there.into_iter().find(|(_, _, of)| of.layer != layer) {
            Some((first, last, of)) => Err(MemoryError::Overlap {
                address,
                bytes,
                layer: of.layer,
                start: first,
                length: last - first,
            }),
            None => tables.layers.set(start, end, LayerOf { stage, layer }),
        }
    })
}

/// The range holds blocks of a request.
///
/// # Errors
/// [`MemoryError`]; nothing changes then.
pub fn set_owner(
    address: u64,
    bytes: u64,
    batch: u64,
    request: u64,
    deadline_ns: u64,
) -> Result<(), MemoryError> {
    let (start, end) = range(address, bytes)?;
    let owner = MemoryOwner {
        batch,
        request,
        deadline_ns,
    };
    change(|tables| tables.owners.set(start, end, owner))
}

/// Nothing is known of the range any more.
///
/// # Errors
/// [`MemoryError::NoRange`].
pub fn forget(address: u64, bytes: u64) -> Result<(), MemoryError> {
    let (start, end) = range(address, bytes)?;
    change(|tables| {
        tables.layers.cut(start, end);
        tables.owners.cut(start, end);
    });
    Ok(())
}

/// Whether nothing is known of any memory.
#[inline]
#[must_use]
pub fn is_silent() -> bool {
    COUNT.load(Ordering::Relaxed) == 0
}

/// What is known of the memory at an address.
#[inline]
#[must_use]
pub fn at(address: u64) -> Option<Scope> {
    if is_silent() {
        return None;
    }
    let tables = tables().read().unwrap_or_else(PoisonError::into_inner);
    let layer = tables.layers.find(address);
    let owner = tables.owners.find(address);
    if layer.is_none() && owner.is_none() {
        return None;
    }
    Some(Scope {
        stage: layer.and_then(|l| l.stage),
        layer: layer.map(|l| l.layer),
        batch: owner.map_or(0, |o| o.batch),
        request: owner.map_or(0, |o| o.request),
        deadline_ns: owner.map_or(0, |o| o.deadline_ns),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_word_about_an_address_counts() {
        // Against an oracle: one entry per address.
        let mut ranges = Ranges::new();
        let mut oracle = [None; 64];
        let mut state = 1u64;
        for step in 0..4000 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let start = (state >> 33) % 60;
            let end = start + 1 + (state >> 45) % (64 - start - 1).max(1);
            let cells = start as usize..end as usize;
            if state >> 60 < 5 {
                ranges.cut(start, end);
                oracle[cells].fill(None);
            } else {
                ranges.set(start, end, step).expect("room");
                oracle[cells].fill(Some(step));
            }
            for (address, expected) in oracle.iter().enumerate() {
                assert_eq!(ranges.find(address as u64), *expected, "step {step}");
            }
        }
    }

    #[test]
    fn layer_and_owner_are_found_together() {
        // Addresses that nothing else in this process uses.
        let base = 0x7000_0000_0000;
        assert_eq!(at(base), None);
        set_layer(base, 4096, 3, Some(Stage::P2d)).expect("a range");
        set_owner(base + 1024, 1024, 9, 4, 77).expect("a range");
        let found = at(base + 1024).expect("both are known");
        assert_eq!((found.stage, found.layer), (Some(Stage::P2d), Some(3)));
        assert_eq!((found.batch, found.request, found.deadline_ns), (9, 4, 77));
        assert_eq!(at(base + 2048).map(|s| s.request), Some(0));
        forget(base, 4096).expect("a range");
        assert_eq!(at(base + 1024), None);
        assert!(matches!(
            set_layer(u64::MAX, 2, 0, None),
            Err(MemoryError::NoRange { .. })
        ));
        assert!(matches!(forget(base, 0), Err(MemoryError::NoRange { .. })));
    }
}
