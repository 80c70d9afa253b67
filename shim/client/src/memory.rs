//! Facts about memory, which are the second source of a flow's metadata (architecture §4.1).
//!
//! The engine registers which address range holds which layer's KV cache, and which blocks belong
//! to which request. A work request gets these values by its local address, without the transfer
//! library's help. There are two tables: *layers* are set once for the life of the cache, and
//! *owners* for each request. Within a table the last registration counts, and cuts older ranges.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock};

use laxity_job::fork::PerProcess;
use laxity_shm::record::Stage;

use crate::scope::Scope;

/// Largest number of ranges in a table, so that an engine which never removes its blocks doesn't
/// exhaust the memory.
pub const RANGES_MAX: usize = 1 << 20;

/// The reason why a range can't be registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the texts say what the fields are")]
pub enum MemoryError {
    /// The range is empty, or wraps around.
    #[error("{bytes} bytes at {address:#x} are no range of memory")]
    NoRange { address: u64, bytes: u64 },
    /// Part of the range was registered as another layer's KV cache.
    #[error(
        "{bytes} bytes at {address:#x} overlap layer {layer}, which begins at {start:#x} with \
         {length} bytes; \
         forget that first if it is there no more"
    )]
    Overlap {
        address: u64,
        bytes: u64,
        layer: u16,
        /// Address of the other layer's range.
        start: u64,
        /// Size of the other layer's range in bytes.
        length: u64,
    },
    /// The table of ranges is full.
    #[error("{RANGES_MAX} ranges are registered; forget those that are not used any more")]
    Full,
}

/// Disjoint ranges of addresses.
#[derive(Debug)]
struct Ranges<T> {
    /// The ranges by first address: the first address after the range, and its value.
    map: BTreeMap<u64, (u64, T)>,
}

impl<T: Copy> Ranges<T> {
    const fn new() -> Self {
        Self { map: BTreeMap::new() }
    }

    fn find(&self, address: u64) -> Option<T> {
        let (_, (end, what)) = self.map.range(..=address).next_back()?;
        (address < *end).then_some(*what)
    }

    /// Returns the ranges that overlap `start..end`: first address, the one after the last, and
    /// value.
    fn among(&self, start: u64, end: u64) -> Vec<(u64, u64, T)> {
        let before = self.map.range(..start).next_back();
        let before = before.filter(|(_, (last, _))| *last > start);
        let inside = self.map.range(start..end);
        let all = before.into_iter().chain(inside);
        all.map(|(first, (last, what))| (*first, *last, *what)).collect()
    }

    /// Removes `start..end` from the ranges that contain it.
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
        // A forked child has no facts about its parent's memory.
        COUNT.store(0, Ordering::Relaxed);
        RwLock::new(Tables { layers: Ranges::new(), owners: Ranges::new() })
    })
}

/// Number of ranges in both tables. Relaxed: a process without ranges must not pay for a lock, and
/// one that registers while it submits can't expect an order.
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

/// Records that the range holds the KV cache of `layer`. `stage` is the stage of its transfers, if
/// that is always the same.
///
/// # Errors
/// [`MemoryError`]. Nothing changes then.
pub fn set_layer(
    address: u64,
    bytes: u64,
    layer: u16,
    stage: Option<Stage>,
) -> Result<(), MemoryError> {
    let (start, end) = range(address, bytes)?;
    change(|tables| tables.layers.set(start, end, LayerOf { stage, layer }))
}

/// Does the same as [`set_layer`], but fails where there is another layer.
///
/// # Errors
/// [`MemoryError`]. Nothing changes then.
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

/// Records that the range holds blocks of a request.
///
/// # Errors
/// [`MemoryError`]. Nothing changes then.
pub fn set_owner(
    address: u64,
    bytes: u64,
    batch: u64,
    request: u64,
    deadline_ns: u64,
) -> Result<(), MemoryError> {
    let (start, end) = range(address, bytes)?;
    let owner = MemoryOwner { batch, request, deadline_ns };
    change(|tables| tables.owners.set(start, end, owner))
}

/// Removes all facts about the range.
pub fn forget(address: u64, bytes: u64) -> Result<(), MemoryError> {
    let (start, end) = range(address, bytes)?;
    change(|tables| {
        tables.layers.cut(start, end);
        tables.owners.cut(start, end);
    });
    Ok(())
}

/// Reports whether there are no hints about any memory.
#[inline]
pub fn is_silent() -> bool {
    COUNT.load(Ordering::Relaxed) == 0
}

/// Returns what hints say about the memory at an address.
#[inline]
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
        // The oracle has one entry per address.
        let mut ranges = Ranges::new();
        let mut oracle = [None; 64];
        let mut state = 1u64;
        for step in 0..4000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
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
        // Nothing else in this process uses these addresses.
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
        assert!(matches!(set_layer(u64::MAX, 2, 0, None), Err(MemoryError::NoRange { .. })));
        assert!(matches!(forget(base, 0), Err(MemoryError::NoRange { .. })));
    }
}
