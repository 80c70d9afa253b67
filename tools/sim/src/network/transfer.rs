//! The transfers under way: a slab with a free list, so that nothing is allocated once it has grown
//! to what is in flight at most.

/// Ports of a path at most: egress, leaf uplink, leaf downlink, ingress.
pub const PATH_MAX: usize = 4;

/// No port, no place, no transfer.
pub(super) const NONE: u32 = u32::MAX;

/// A transfer that was started. Stays unique when its slot is used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId {
    index: u32,
    generation: u32,
}

/// Where a transfer stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The slot is free.
    Free,
    /// Started, without a rate until rates are computed.
    Fresh,
    /// Its rate is what the lane at this place of its path allows: the bottleneck.
    Bound(u8),
    /// All its bytes have passed; the caller has not been told.
    Ended,
}

/// One transfer. A cache line, since all of its lanes refer to it.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(super) struct Transfer {
    /// The lanes of its path; [`NONE`] past its end.
    pub(super) lanes: [u32; PATH_MAX],
    /// Where it stands in each.
    pub(super) places: [u32; PATH_MAX],
    /// Its size.
    pub(super) bytes: u64,
    /// How many were started before it.
    pub(super) order: u64,
    pub(super) generation: u32,
    /// The caller's.
    pub(super) tag: u32,
    pub(super) hops: u8,
    pub(super) class: u8,
    pub(super) stage: Stage,
}

const _: () = assert!(size_of::<Transfer>() == 64);

impl Transfer {
    /// The lanes of its path with the place of each.
    pub(super) fn path(&self) -> impl Iterator<Item = (usize, u32)> + use<> {
        let hops = usize::from(self.hops);
        self.lanes.into_iter().take(hops).enumerate()
    }
}

/// All transfers.
#[derive(Debug)]
pub(super) struct Slab {
    slots: Vec<Transfer>,
    /// The first free slot; the next one is in its `tag`.
    free: u32,
}

impl Slab {
    pub(super) fn new() -> Self {
        Self {
            slots: Vec::new(),
            free: NONE,
        }
    }

    /// Takes a slot; its generation is the only thing that survives from its last use.
    pub(super) fn insert(&mut self, mut transfer: Transfer) -> u32 {
        if self.free == NONE {
            transfer.generation = 0;
            self.slots.push(transfer);
            // `Entry` keeps a place of the path beside the index.
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

    /// Gives a slot back; its id is void from here on.
    pub(super) fn remove(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        debug_assert!(slot.stage != Stage::Free, "a slot is freed once");
        slot.stage = Stage::Free;
        slot.generation = slot.generation.wrapping_add(1);
        slot.tag = self.free;
        self.free = index;
    }

    pub(super) fn id(&self, index: u32) -> TransferId {
        TransferId {
            index,
            generation: self.slots[index as usize].generation,
        }
    }

    /// The slot of `id`, unless it has ended and been told.
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
