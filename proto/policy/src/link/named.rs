//! A bounded table of records by name. At the bound, old idle records are replaced.

use std::collections::{BTreeMap, VecDeque};

use super::flows::SlotId;

/// Number of old records that [`IdTable::oldest_idle`] checks, which bounds the cost of an
/// insertion.
pub(super) const FORGET_TRIES: usize = 16;

#[derive(Clone, Debug)]
struct NamedEntry<T> {
    record: T,
    /// Number of the record, 0 after its removal, because slots are reused.
    born: u64,
}

/// A bounded table of records by name.
#[derive(Clone, Debug)]
pub(super) struct IdTable<I, T> {
    entries: Vec<NamedEntry<T>>,
    free: Vec<SlotId>,
    by_id: BTreeMap<I, SlotId>,
    /// Slots and record numbers, the oldest first. An entry is valid while `born` is the same.
    ages: VecDeque<(SlotId, u64)>,
    births: u64,
    pub(super) max: usize,
}

impl<I: Copy + Ord, T> IdTable<I, T> {
    /// Creates a table for `max` records, besides the record `unnamed`, which has the first slot.
    pub(super) fn new(max: usize, unnamed: Option<T>) -> Self {
        let unnamed = unnamed.into_iter();
        Self {
            entries: unnamed.map(|record| NamedEntry { record, born: 0 }).collect(),
            free: Vec::new(),
            by_id: BTreeMap::new(),
            ages: VecDeque::new(),
            births: 0,
            max,
        }
    }

    pub(super) fn get(&self, slot: SlotId) -> &T {
        &self.entries[slot as usize].record
    }

    pub(super) fn get_mut(&mut self, slot: SlotId) -> &mut T {
        &mut self.entries[slot as usize].record
    }

    pub(super) fn find(&self, id: I) -> Option<SlotId> {
        self.by_id.get(&id).copied()
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn is_full(&self) -> bool {
        self.by_id.len() >= self.max
    }

    pub(super) fn insert(&mut self, id: I, record: T) -> SlotId {
        self.births += 1;
        let born = self.births;
        let entry = NamedEntry { record, born };
        let slot = if let Some(slot) = self.free.pop() {
            self.entries[slot as usize] = entry;
            slot
        } else {
            self.entries.push(entry);
            (self.entries.len() - 1) as SlotId
        };
        self.by_id.insert(id, slot);
        let (entries, ages) = (&self.entries, &mut self.ages);
        if ages.len() > 2 * self.by_id.len() + 64 {
            ages.retain(|&(slot, born)| entries[slot as usize].born == born);
        }
        ages.push_back((slot, born));
        slot
    }

    /// Removes a record. Its slot may be used again.
    pub(super) fn remove(&mut self, id: I, slot: SlotId) {
        self.entries[slot as usize].born = 0;
        self.by_id.remove(&id);
        self.free.push(slot);
    }

    /// Returns an idle record of the [`FORGET_TRIES`] oldest, for removal. Records that are in use
    /// move to the end of the list, so the next call checks others.
    pub(super) fn oldest_idle(&mut self, is_idle: impl Fn(&T) -> bool) -> Option<SlotId> {
        let mut tries = 0;
        while tries < FORGET_TRIES
            && let Some((slot, born)) = self.ages.pop_front()
        {
            let entry = &self.entries[slot as usize];
            if entry.born != born {
                continue; // It was forgotten before: each such entry is met only once.
            }
            if is_idle(&entry.record) {
                return Some(slot);
            }
            self.ages.push_back((slot, born));
            tries += 1;
        }
        None
    }

    /// Returns the number of the oldest record, and the length of `ages`.
    #[cfg(test)]
    pub(super) fn oldest(&self) -> (u64, usize) {
        (self.ages[0].1, self.ages.len())
    }
}
