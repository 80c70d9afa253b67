//! A table that removes its oldest entry when it is full, so that entries which an engine never
//! ends don't exhaust the memory.
//!
//! Entries are removed in the order in which they were inserted. An entry that is inserted again is
//! young again. The queue of ages may name entries that are gone or younger by now. It is cleaned
//! up when those are the majority.

use std::collections::{HashMap, VecDeque};

/// A table of a limited number of entries, by number.
#[derive(Debug)]
pub(super) struct Bounded<T> {
    entries: HashMap<u64, BoundedEntry<T>>,
    ages: VecDeque<(u64, u64)>,
    arrivals: u64,
    most: usize,
}

#[derive(Debug)]
struct BoundedEntry<T> {
    arrival: u64,
    what: T,
}

impl<T> Bounded<T> {
    pub(super) fn new(most: usize) -> Self {
        Self { entries: HashMap::new(), ages: VecDeque::new(), arrivals: 0, most: most.max(1) }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn get(&self, key: u64) -> Option<&T> {
        self.entries.get(&key).map(|entry| &entry.what)
    }

    pub(super) fn get_mut(&mut self, key: u64) -> Option<&mut T> {
        self.entries.get_mut(&key).map(|entry| &mut entry.what)
    }

    pub(super) fn remove(&mut self, key: u64) -> Option<T> {
        self.entries.remove(&key).map(|entry| entry.what)
    }

    /// Inserts or replaces the entry of a key. Returns the oldest entry if it was removed for lack
    /// of room.
    pub(super) fn insert(&mut self, key: u64, what: T) -> Option<(u64, T)> {
        self.arrivals += 1;
        let arrival = self.arrivals;
        self.entries.insert(key, BoundedEntry { arrival, what });
        self.ages.push_back((key, arrival));
        if self.ages.len() > 2 * self.most {
            let entries = &self.entries;
            self.ages
                .retain(|(key, arrival)| entries.get(key).is_some_and(|e| e.arrival == *arrival));
        }
        while self.entries.len() > self.most {
            let (oldest, arrival) = self.ages.pop_front()?;
            if self.entries.get(&oldest).map(|e| e.arrival) == Some(arrival) {
                return self.remove(oldest).map(|what| (oldest, what));
            }
        }
        None
    }

    /// Returns all entries, oldest first, so that they can be sent in the order in which they came.
    pub(super) fn by_age(&self) -> Vec<(u64, &T)> {
        let mut all: Vec<_> = self.entries.iter().collect();
        all.sort_by_key(|(_, entry)| entry.arrival);
        all.into_iter().map(|(key, entry)| (*key, &entry.what)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_leaves_and_what_came_again_is_young() {
        let mut table = Bounded::new(3);
        for key in 1..=3 {
            assert_eq!(table.insert(key, key * 10), None);
        }
        assert_eq!(table.insert(1, 11), None, "in its own place");
        assert_eq!(table.insert(4, 40), Some((2, 20)));
        assert_eq!(table.remove(3), Some(30));
        assert_eq!(table.insert(5, 50), None, "there is room");
        assert_eq!(table.insert(6, 60), Some((1, 11)));
        let ages: Vec<u64> = table.by_age().iter().map(|(key, _)| *key).collect();
        assert_eq!(ages, [4, 5, 6]);
    }

    #[test]
    fn nothing_grows_though_one_entry_comes_and_goes() {
        let mut table = Bounded::new(8);
        for round in 0..10_000 {
            table.insert(round % 5, ());
            if round % 3 == 0 {
                table.remove(round % 5);
            }
            assert!(table.ages.len() <= 17 && table.len() <= 8);
        }
    }
}
