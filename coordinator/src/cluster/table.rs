//! A table with keys that hold a slot and an arrival number. Admission's ids lead to entries
//! without a search, and the key of a removed entry leads to none.

/// Bits of a key that hold its slot: enough for `laxity_policy::prune::MEMBERS_MAX`. The other 44
/// bits count arrivals: about a hundred years at 5000 a second.
const SLOT_BITS: u32 = 20;

/// Maximum number of entries of a table.
pub(crate) const ENTRIES_MAX: usize = 1 << SLOT_BITS;

/// The key of an entry: arrival above, slot below. Keys ascend by arrival and are unique and not 0.
pub(crate) type Key = u64;

/// A table whose entries are found by their [`Key`].
#[derive(Debug)]
pub(crate) struct KeyedTable<T> {
    entries: Vec<(Key, Option<T>)>,
    free: Vec<usize>,
    arrivals: u64,
}

impl<T> Default for KeyedTable<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), free: Vec::new(), arrivals: 0 }
    }
}

impl<T> KeyedTable<T> {
    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Adds an entry. The caller keeps the number of entries within [`ENTRIES_MAX`].
    pub(crate) fn insert(&mut self, value: T) -> Key {
        self.arrivals += 1;
        let slot = self.free.pop().unwrap_or_else(|| {
            self.entries.push((0, None));
            self.entries.len() - 1
        });
        debug_assert!(slot < ENTRIES_MAX, "whoever inserts keeps to a cap");
        let key = self.arrivals << SLOT_BITS | slot as u64;
        self.entries[slot] = (key, Some(value));
        key
    }

    fn slot(&self, key: Key) -> Option<usize> {
        let slot = (key & (ENTRIES_MAX as u64 - 1)) as usize;
        (self.entries.get(slot)?.0 == key).then_some(slot)
    }

    pub(crate) fn get(&self, key: Key) -> Option<&T> {
        self.entries[self.slot(key)?].1.as_ref()
    }

    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let slot = self.slot(key)?;
        self.entries[slot].1.as_mut()
    }

    pub(crate) fn remove(&mut self, key: Key) -> Option<T> {
        let slot = self.slot(key)?;
        let (key, value) = &mut self.entries[slot];
        *key = 0;
        let value = value.take();
        self.free.push(slot);
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_whose_slot_is_used_again_leads_nowhere() {
        let mut table = KeyedTable::default();
        let first = table.insert('a');
        assert_eq!(table.remove(first), Some('a'));
        let second = table.insert('b');
        assert!(second > first, "keys ascend by arrival");
        assert_eq!((table.get(first), table.get(second)), (None, Some(&'b')));
        assert_eq!((table.remove(first), table.len()), (None, 1));
    }
}
