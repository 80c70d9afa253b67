//! Records by name, of which so many may be kept. Old ones that nobody needs make room.

use std::collections::{BTreeMap, VecDeque};

use super::flows::Slot;

/// How many old records are looked at for one to forget: bounds what a newcomer costs.
pub(super) const FORGET_TRIES: usize = 16;

#[derive(Clone, Debug)]
struct Entry<T> {
    record: T,
    /// Number of the record, 0 once it is forgotten: slots are used again.
    born: u64,
}

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Named<I, T> {
    entries: Vec<Entry<T>>,
    free: Vec<Slot>,
    by_id: BTreeMap<I, Slot>,
    /// The oldest first; `born` says whether an entry still holds.
    ages: VecDeque<(Slot, u64)>,
    births: u64,
    max: usize,
}

impl<I: Copy + Ord, T> Named<I, T> {
    /// Room for `max` records, besides those of `unnamed`, which have the first slots.
    pub(super) fn new(max: usize, unnamed: Option<T>) -> Self {
        let unnamed = unnamed.into_iter();
        Self {
            entries: unnamed.map(|record| Entry { record, born: 0 }).collect(),
            free: Vec::new(),
            by_id: BTreeMap::new(),
            ages: VecDeque::new(),
            births: 0,
            max,
        }
    }

    pub(super) fn get(&self, slot: Slot) -> &T {
        &self.entries[slot as usize].record
    }

    pub(super) fn get_mut(&mut self, slot: Slot) -> &mut T {
        &mut self.entries[slot as usize].record
    }

    pub(super) fn find(&self, id: I) -> Option<Slot> {
        self.by_id.get(&id).copied()
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn is_full(&self) -> bool {
        self.by_id.len() >= self.max
    }

    /// Keeps a record under a new name.
    pub(super) fn insert(&mut self, id: I, record: T) -> Slot {
        self.births += 1;
        let born = self.births;
        let entry = Entry { record, born };
        let slot = if let Some(slot) = self.free.pop() {
            self.entries[slot as usize] = entry;
            slot
        } else {
            self.entries.push(entry);
            (self.entries.len() - 1) as Slot
        };
        self.by_id.insert(id, slot);
        let (entries, ages) = (&self.entries, &mut self.ages);
        if ages.len() > 2 * self.by_id.len() + 64 {
            ages.retain(|&(slot, born)| entries[slot as usize].born == born);
        }
        ages.push_back((slot, born));
        slot
    }

    /// Forgets a record. Its slot may be used again.
    pub(super) fn remove(&mut self, id: I, slot: Slot) {
        self.entries[slot as usize].born = 0;
        self.by_id.remove(&id);
        self.free.push(slot);
    }

    /// One of the [`FORGET_TRIES`] oldest records that is idle, to be removed. Those that are not
    /// go to the back of the line, so the next call looks at others.
    pub(super) fn oldest_idle(&mut self, is_idle: impl Fn(&T) -> bool) -> Option<Slot> {
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

    /// Number of the oldest record, and how many entries there are for ages.
    #[cfg(test)]
    pub(super) fn oldest(&self) -> (u64, usize) {
        (self.ages[0].1, self.ages.len())
    }
}
