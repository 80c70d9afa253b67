//! The layout of a region, and the writer of each part.
//!
//! ```text
//! 0      header page: one cache line per writer and per rate of change
//! 4096   colour · 64 bytes of nothing, then the lanes, `lane_stride` apart:
//!          line 0  client: waiter      line 2  daemon: consumed counter
//!          line 1  unused              line 3  daemon: credit counters
//!          then the slots, 64 bytes each
//! ```
//!
//! A lane's stride is an odd number of lines, and the colour displaces the first lane of a region.
//! So the lines that the daemon polls spread over all sets of its L1 cache. With strides of whole
//! pages, 64 lanes would share one set.
//!
//! The daemon never reads its geometry back from the region: it keeps its own copy. The client
//! reads it once, checks it against the size of the file, and keeps its own copy too.

use laxity_types::Level;

use crate::record::{self, Descriptor, Flow, WORDS};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

pub use crate::header::{CREDIT_WHOLE, Header, attention};

/// `"LAXITY\0\x01"`, little-endian: the magic number of a region.
pub const MAGIC: u64 = u64::from_le_bytes(*b"LAXITY\0\x01");
/// Newest version of everything in this crate that another process sees. `docs/upgrading.md` says
/// which changes need another version. Only a region of the version in the welcome is used.
pub const VERSION: u32 = 2;
/// Oldest version that this build speaks. Once there is a release, this is the last one's.
pub const VERSION_OLDEST: u32 = 2;
/// Size of a cache line and of a slot in bytes. The layout uses it as its unit.
pub const LINE_BYTES: usize = 64;
/// Size of the header in bytes.
pub const HEADER_BYTES: usize = 4096;
/// Number of cache lines of a lane before its slots.
pub const LANE_HEADER_LINES: usize = 4;
/// Maximum number of lanes of a region.
pub const LANES_MAX: u16 = 1024;
/// Maximum number of slots of a lane. A 16-bit doorbell must not wrap between two polls, which see
/// at most a lane's worth of records.
pub const SLOTS_MAX: u16 = 4096;
/// Minimum number of slots of a lane: one is always reserved, and one in eight is kept for records
/// that need no permit.
pub const SLOTS_MIN: u16 = 8;
/// Ports for which a lane has a credit counter: `nic · 2 + direction` below this.
pub const CREDIT_PORTS: usize = 8;
/// Number of colours that a region may have.
pub const COLOURS: u8 = 64;
/// Entries of the level table: index 0 for the scavenger, then `P_1 … P_16`.
pub const LEVELS: usize = Level::ROWS;
/// The level in a permit that stands for the scavenger.
pub const LEVEL_SCAVENGER: u8 = Level::SCAVENGER.0;

/// How far Laxity takes part in transfers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Mode {
    /// The client sends nothing to the daemon.
    Off = 0,
    /// Laxity accounts for transfers and delays none.
    Observe = 1,
    /// Transfers wait for permits.
    #[default]
    Enforce = 2,
}

impl Mode {
    /// Returns the mode of a number in a message, or `None` if the number is invalid.
    pub const fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            0 => Self::Off,
            1 => Self::Observe,
            2 => Self::Enforce,
            _ => return None,
        })
    }

    /// Returns the mode's name in files and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Observe => "observe",
            Self::Enforce => "enforce",
        }
    }

    /// Returns the mode of a name in configuration or `LAXITY_MODE`, or `None` if it is unknown.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Off, Self::Observe, Self::Enforce].into_iter().find(|mode| mode.name() == name)
    }

    /// Returns the bits of the attention word for this mode.
    #[must_use]
    pub const fn attention(self) -> u32 {
        match self {
            Self::Off => attention::OFF,
            Self::Observe => attention::OBSERVE,
            Self::Enforce => 0,
        }
    }
}

/// The shape of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Number of lanes, 1 to [`LANES_MAX`].
    pub lanes: u16,
    /// Number of slots of each lane, [`SLOTS_MIN`] to [`SLOTS_MAX`].
    pub slots: u16,
    /// Lines by which the first lane is displaced, below [`COLOURS`]. Clients should differ in it.
    pub colour: u8,
}

impl Default for Geometry {
    fn default() -> Self {
        Self { lanes: 64, slots: 256, colour: 0 }
    }
}

impl Geometry {
    /// Reports whether every field is in range.
    pub const fn is_valid(&self) -> bool {
        self.lanes >= 1
            && self.lanes <= LANES_MAX
            && self.slots >= SLOTS_MIN
            && self.slots <= SLOTS_MAX
            && self.colour < COLOURS
    }

    /// Returns the bytes from one lane to the next, an odd number of lines.
    pub const fn lane_stride(&self) -> usize {
        ((LANE_HEADER_LINES + self.slots as usize) | 1) * LINE_BYTES
    }

    /// Returns the offset of lane `index` in bytes.
    pub const fn lane_offset(&self, index: u16) -> usize {
        HEADER_BYTES + self.colour as usize * LINE_BYTES + index as usize * self.lane_stride()
    }

    /// Returns the size of the region, in whole pages of 4 KiB. It does not depend on the colour.
    pub const fn region_bytes(&self) -> usize {
        let end =
            HEADER_BYTES + COLOURS as usize * LINE_BYTES + self.lanes as usize * self.lane_stride();
        end.div_ceil(4096) * 4096
    }
}

/// A slot in one cache line: 48 bytes of descriptor, 8 unused, 8 of state.
///
/// The state word passes the ownership, so a slot has one writer at any time. The client owns it
/// until it stores `published` (Release). The daemon owns it from the Acquire load that sees that
/// word. It ends its ownership of a flow's slot by the last permit, or by a `consumed` that covers
/// the record that withdraws the flow, and of any other slot by a `consumed` that covers the slot's
/// record.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Slot {
    words: [AtomicU64; WORDS],
    /// Unused: neither written nor read.
    spare: AtomicU64,
    /// The state word, see [`crate::permit`].
    pub(crate) state: AtomicU64,
}

impl Slot {
    /// Stores the descriptor. Relaxed: published by the Release store to `state` that follows.
    #[inline]
    pub(crate) fn write(&self, descriptor: &Descriptor) {
        for (word, value) in self.words.iter().zip(descriptor.0) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Stores a flow on credit, word by word, so that a submit needs no room for a copy.
    #[inline]
    pub(crate) fn write_on_credit(&self, flow: &Flow, next: u16) {
        let [head, bytes, batch, request, deadline, last] = &self.words;
        head.store(flow.head(), Ordering::Relaxed);
        bytes.store(flow.bytes, Ordering::Relaxed);
        batch.store(flow.batch, Ordering::Relaxed);
        request.store(flow.request, Ordering::Relaxed);
        deadline.store(flow.deadline_ns, Ordering::Relaxed);
        last.store(record::tail(record::OP_CREDIT, next), Ordering::Relaxed);
    }

    /// Copies the descriptor, each word once. Relaxed: ordered by the Acquire load of `state`
    /// before. If a client writes meanwhile, the copy is a mixture, which may be garbage.
    #[inline]
    pub(crate) fn read(&self) -> Descriptor {
        Descriptor(core::array::from_fn(|i| self.words[i].load(Ordering::Relaxed)))
    }

    pub(crate) fn new() -> Self {
        Self {
            words: core::array::from_fn(|_| AtomicU64::new(0)),
            spare: AtomicU64::new(0),
            state: AtomicU64::new(0),
        }
    }
}

/// The words by which a client sleeps and is woken. See [`crate::sleep`].
#[repr(C, align(64))]
#[derive(Debug)]
pub struct WaiterLine {
    /// Client: the event that it waits for, 0 while awake.
    pub(crate) awaited: AtomicU64,
    /// Daemon: incremented before each wake-up.
    pub(crate) wakes: AtomicU32,
}

/// Counters that the daemon advances as it consumes.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct ConsumedLine {
    /// Number of records consumed. The daemon stores it with Release after it copied the records.
    /// The client's Acquire load keeps its later writes to their slots after those copies.
    pub(crate) consumed: AtomicU64,
}

/// Cumulative bytes of credit per port.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct CreditLine {
    /// Credit given by the daemon. Relaxed: no other data depends on this number.
    pub(crate) permitted: [AtomicU64; CREDIT_PORTS],
}

/// The header of a lane: the cache lines before its slots.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct LaneHeader {
    /// Written by the client when it sleeps.
    pub waiter: WaiterLine,
    /// A line that neither side reads. A client of an earlier commit may write it.
    spare: [AtomicU64; LINE_BYTES / size_of::<u64>()],
    /// Written by the daemon after it has copied some records.
    pub consumed: ConsumedLine,
    /// Written by the daemon when it gives credit.
    pub credit: CreditLine,
}

impl LaneHeader {
    pub(crate) fn new() -> Self {
        Self {
            waiter: WaiterLine { awaited: AtomicU64::new(0), wakes: AtomicU32::new(0) },
            spare: core::array::from_fn(|_| AtomicU64::new(0)),
            consumed: ConsumedLine { consumed: AtomicU64::new(0) },
            credit: CreditLine { permitted: core::array::from_fn(|_| AtomicU64::new(0)) },
        }
    }
}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<Slot>() == LINE_BYTES);
    assert!(size_of::<LaneHeader>() == LANE_HEADER_LINES * LINE_BYTES);
    assert!(core::mem::offset_of!(Slot, state) == 56);
};

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn lanes_do_not_overlap_and_stay_inside_the_region() {
        for lanes in [1, 2, 63, 64, LANES_MAX] {
            for slots in [SLOTS_MIN, 9, 256, SLOTS_MAX] {
                for colour in [0, 1, COLOURS - 1] {
                    let g = Geometry { lanes, slots, colour };
                    assert!(g.is_valid());
                    let need = (LANE_HEADER_LINES + usize::from(slots)) * LINE_BYTES;
                    assert!(g.lane_stride() >= need);
                    assert_eq!(g.lane_stride() / LINE_BYTES % 2, 1);
                    assert!(g.lane_offset(lanes - 1) + need <= g.region_bytes());
                    assert!(g.lane_offset(0) >= HEADER_BYTES);
                }
            }
        }
    }

    #[test]
    fn polled_lines_of_64_lanes_fall_into_64_cache_sets() {
        let g = Geometry::default();
        let sets: std::collections::BTreeSet<_> =
            (0..64).map(|lane| g.lane_offset(lane) / LINE_BYTES % 64).collect();
        assert_eq!(sets.len(), 64);
    }
}
