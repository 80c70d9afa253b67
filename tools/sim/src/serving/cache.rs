//! The prefix blocks that each unit holds.
//!
//! A block id stands for the whole prefix up to it, so a unit that holds a block also holds those
//! before it. Capacity is per unit. The least recently used block is evicted first, except blocks
//! that a request still has to read. Block ids are dense, so that nothing is hashed. Holders and
//! recency are linked lists in one pool.

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct CacheEntry {
    block: u32,
    rank: u32,
    sibling: u32,
    newer: u32,
    older: u32,
    /// Requests that still have to read the block. While there are any, it is not evicted.
    readers: u32,
}

#[derive(Clone, Copy, Debug)]
struct Shelf {
    newest: u32,
    oldest: u32,
    blocks: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Pinned(u32);

#[derive(Debug)]
pub(super) struct Caches {
    first: Vec<u32>,
    entries: Vec<CacheEntry>,
    free: Vec<u32>,
    shelves: Vec<Shelf>,
    blocks_max: u64,
    ranks_per_unit: u32,
}

impl Caches {
    pub(super) fn new(blocks: u32, units: u32, ranks_per_unit: u32, blocks_max: u64) -> Self {
        let shelf = Shelf { newest: NONE, oldest: NONE, blocks: 0 };
        Self {
            first: vec![NONE; blocks as usize],
            entries: Vec::new(),
            free: Vec::new(),
            shelves: vec![shelf; units as usize],
            blocks_max,
            ranks_per_unit,
        }
    }

    pub(super) fn holders(&self, block: u32) -> impl Iterator<Item = u32> + '_ {
        let mut at = self.first[block as usize];
        core::iter::from_fn(move || {
            let entry = self.entries.get(at as usize)?;
            at = entry.sibling;
            Some(entry.rank)
        })
    }

    fn find(&self, unit: u32, block: u32) -> u32 {
        let mut at = self.first[block as usize];
        while at != NONE && self.entries[at as usize].rank / self.ranks_per_unit != unit {
            at = self.entries[at as usize].sibling;
        }
        at
    }

    /// Protects the block on this rank until [`Self::release`] is called with the result. Returns
    /// `None` if the rank does not hold the block.
    pub(super) fn pin(&mut self, rank: u32, block: u32) -> Option<Pinned> {
        let unit = rank / self.ranks_per_unit;
        let at = self.find(unit, block);
        let entry = self.entries.get_mut(at as usize)?;
        entry.readers += 1;
        if entry.readers == 1 {
            self.unlink(unit, at);
        }
        Some(Pinned(at))
    }

    pub(super) fn release(&mut self, pinned: Pinned) {
        let entry = &mut self.entries[pinned.0 as usize];
        entry.readers -= 1;
        if entry.readers == 0 {
            let unit = entry.rank / self.ranks_per_unit;
            self.link_newest(unit, pinned.0);
        }
    }

    pub(super) fn touch(&mut self, unit: u32, block: u32) -> bool {
        let at = self.find(unit, block);
        if at == NONE {
            return false;
        }
        if self.entries[at as usize].readers > 0 {
            return true;
        }
        self.unlink(unit, at);
        self.link_newest(unit, at);
        true
    }

    /// Stores the block on this rank. A unit holds a block once. Nothing is stored if all blocks of
    /// the unit are protected.
    pub(super) fn insert(&mut self, rank: u32, block: u32) {
        let unit = rank / self.ranks_per_unit;
        if self.blocks_max == 0 || self.touch(unit, block) {
            return;
        }
        if self.shelves[unit as usize].blocks >= self.blocks_max {
            if self.shelves[unit as usize].oldest == NONE {
                return;
            }
            self.evict(unit);
        }
        let entry = CacheEntry {
            block,
            rank,
            readers: 0,
            sibling: self.first[block as usize],
            newer: NONE,
            older: NONE,
        };
        let at = match self.free.pop() {
            Some(at) => {
                self.entries[at as usize] = entry;
                at
            }
            None => {
                self.entries.push(entry);
                (self.entries.len() - 1) as u32
            }
        };
        self.first[block as usize] = at;
        self.link_newest(unit, at);
        self.shelves[unit as usize].blocks += 1;
    }

    fn evict(&mut self, unit: u32) {
        let at = self.shelves[unit as usize].oldest;
        let CacheEntry { block, sibling, .. } = self.entries[at as usize];
        self.unlink(unit, at);
        self.shelves[unit as usize].blocks -= 1;
        let mut before = self.first[block as usize];
        if before == at {
            self.first[block as usize] = sibling;
        } else {
            while self.entries[before as usize].sibling != at {
                before = self.entries[before as usize].sibling;
            }
            self.entries[before as usize].sibling = sibling;
        }
        self.free.push(at);
    }

    fn unlink(&mut self, unit: u32, at: u32) {
        let CacheEntry { newer, older, .. } = self.entries[at as usize];
        let shelf = &mut self.shelves[unit as usize];
        match newer {
            NONE => shelf.newest = older,
            newer => self.entries[newer as usize].older = older,
        }
        match older {
            NONE => shelf.oldest = newer,
            older => self.entries[older as usize].newer = newer,
        }
    }

    fn link_newest(&mut self, unit: u32, at: u32) {
        let shelf = &mut self.shelves[unit as usize];
        let older = shelf.newest;
        shelf.newest = at;
        if older == NONE {
            shelf.oldest = at;
        } else {
            self.entries[older as usize].newer = at;
        }
        let entry = &mut self.entries[at as usize];
        (entry.newer, entry.older) = (NONE, older);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_least_recently_used_block_goes_first() {
        let mut caches = Caches::new(4, 2, 2, 2);
        caches.insert(0, 0);
        caches.insert(1, 1);
        assert!(caches.touch(0, 0));
        caches.insert(0, 2);
        assert_eq!(caches.holders(1).count(), 0);
        assert_eq!(caches.holders(0).collect::<Vec<_>>(), [0]);
        caches.insert(3, 0);
        assert_eq!(caches.holders(0).collect::<Vec<_>>(), [3, 0]);
    }

    proptest! {
        #[test]
        fn it_agrees_with_lists(
            steps in proptest::collection::vec((0_u32..6, 0_u32..12, any::<bool>()), 1..300),
            most in 1_u64..6,
        ) {
            let mut caches = Caches::new(12, 3, 2, most);
            let mut model: Vec<Vec<(u32, u32)>> = vec![Vec::new(); 3];
            for (rank, block, insert) in steps {
                let shelf = &mut model[(rank / 2) as usize];
                let known = shelf.iter().position(|entry| entry.0 == block);
                if let Some(at) = known {
                    let entry = shelf.remove(at);
                    shelf.push(entry);
                } else if insert {
                    if shelf.len() as u64 == most {
                        shelf.remove(0);
                    }
                    shelf.push((block, rank));
                }
                if insert {
                    caches.insert(rank, block);
                } else {
                    prop_assert_eq!(caches.touch(rank / 2, block), known.is_some());
                }
                for block in 0..12 {
                    let mut held: Vec<u32> = caches.holders(block).collect();
                    held.sort_unstable();
                    let wanted: Vec<u32> = model.iter().flatten()
                        .filter(|entry| entry.0 == block).map(|entry| entry.1).collect();
                    prop_assert_eq!(held, wanted);
                }
            }
        }
    }
}
