//! The transfers under way, in a slab with a free list. Nothing is allocated once the slab has
//! reached its final size.

pub const PATH_MAX: usize = 4;

/// Marker for no port, no place or no transfer.
pub(super) const NONE: u32 = u32::MAX;

/// The id of a started transfer. It stays unique when the transfer's slot is reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId {
    index: u32,
    generation: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Free,
    Fresh,
    /// The band at this place of the path is the bottleneck and determines the rate.
    Bound(u8),
    /// All bytes have passed, but the caller has not popped the transfer yet.
    Ended,
}

/// One transfer. It fills a cache line, because all of its bands refer to it.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(super) struct Transfer {
    /// Bands of the path, padded with [`NONE`].
    pub(super) bands: [u32; PATH_MAX],
    pub(super) places: [u32; PATH_MAX],
    /// Size of the transfer, in bytes.
    pub(super) bytes: u64,
    pub(super) order: u64,
    pub(super) generation: u32,
    pub(super) tag: u32,
    pub(super) hops: u8,
    pub(super) class: u8,
    pub(super) stage: Stage,
}

const _: () = assert!(size_of::<Transfer>() == 64);

impl Transfer {
    pub(super) fn path(&self) -> impl Iterator<Item = (usize, u32)> + use<> {
        let hops = usize::from(self.hops);
        self.bands.into_iter().take(hops).enumerate()
    }
}

#[derive(Debug)]
pub(super) struct Slab {
    slots: Vec<Transfer>,
    /// First free slot. The `tag` of a free slot holds the next one.
    free: u32,
}

impl Slab {
    pub(super) fn new() -> Self {
        Self { slots: Vec::new(), free: NONE }
    }

    /// Puts a transfer into a free slot. Only the generation of the slot's last use is kept.
    pub(super) fn insert(&mut self, mut transfer: Transfer) -> u32 {
        if self.free == NONE {
            transfer.generation = 0;
            self.slots.push(transfer);
            // `BandEntry` stores a place of the path in the low bits of the index.
            assert!(self.slots.len() < 1 << 30, "too many transfers at once");
            return self.slots.len() as u32 - 1;
        }
        let index = self.free;
        let slot = &mut self.slots[index as usize];
        self.free = slot.tag;
        transfer.generation = slot.generation;
        *slot = transfer;
        index
    }

    pub(super) fn remove(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        debug_assert!(slot.stage != Stage::Free, "a slot is freed once");
        slot.stage = Stage::Free;
        slot.generation = slot.generation.wrapping_add(1);
        slot.tag = self.free;
        self.free = index;
    }

    pub(super) fn id(&self, index: u32) -> TransferId {
        TransferId { index, generation: self.slots[index as usize].generation }
    }

    /// Returns the slot of `id`, unless the transfer was popped.
    pub(super) fn find(&self, id: TransferId) -> Option<u32> {
        let slot = self.slots.get(id.index as usize)?;
        (slot.generation == id.generation && slot.stage != Stage::Free).then_some(id.index)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Transfer)> {
        (0..).zip(&self.slots)
    }
}

impl std::ops::Index<u32> for Slab {
    type Output = Transfer;
    fn index(&self, index: u32) -> &Transfer {
        &self.slots[index as usize]
    }
}

impl std::ops::IndexMut<u32> for Slab {
    fn index_mut(&mut self, index: u32) -> &mut Transfer {
        &mut self.slots[index as usize]
    }
}
