//! Where everything lies in a region, and who writes it.
//!
//! ```text
//! 0      header page: one cache line per writer and per rate of change
//! 4096   colour · 64 bytes of nothing, then the lanes, `lane_stride` apart:
//!          line 0  client: waiter      line 2  daemon: consumed counter
//!          line 1  client: owner       line 3  daemon: credit counters
//!          then the slots, 64 bytes each
//! ```
//!
//! A lane's stride is an odd number of lines and the first lane of a region is displaced by its
//! colour, so that the lines that the daemon polls spread over all sets of its L1 cache: with
//! strides of whole pages 64 lanes would fight for one set.
//!
//! The daemon never reads its geometry back from the region: it keeps its own copy. The client
//! reads it once, checks it against the size of the file, and keeps its own copy too.

use laxity_types::Level;

use crate::record::{self, Descriptor, Flow, WORDS};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

pub use crate::header::{CREDIT_WHOLE, Header, attention};

/// `"LAXITY\0\x01"`, little-endian.
pub const MAGIC: u64 = u64::from_le_bytes(*b"LAXITY\0\x01");
/// Version of everything in this crate that another process sees. Client and daemon must agree
/// exactly: the client runs unscheduled otherwise.
pub const VERSION: u32 = 2;
/// Size of a cache line, of a slot, and the unit of the layout.
pub const LINE_BYTES: usize = 64;
/// Size of the header.
pub const HEADER_BYTES: usize = 4096;
/// Lines of a lane before its slots.
pub const LANE_HEADER_LINES: usize = 4;
/// The most lanes that a region may have.
pub const LANES_MAX: u16 = 1024;
/// The most slots that a lane may have. A doorbell is 16 bits wide and must not come round
/// between two looks, which see at most a lane's worth of records.
pub const SLOTS_MAX: u16 = 4096;
/// The fewest slots that make sense: one is always reserved, one in eight is kept for records
/// that need no permit.
pub const SLOTS_MIN: u16 = 8;
/// Ports for which a lane has a credit counter: `nic · 2 + direction` below this.
pub const CREDIT_PORTS: usize = 8;
/// Colours that a region may have.
pub const COLOURS: u8 = 64;
/// Entries of the level table: index 0 for the scavenger, then `P_1 … P_16`.
pub const LEVELS: usize = Level::ROWS;
/// The number that a permit gives the scavenger as its level.
pub const LEVEL_SCAVENGER: u8 = Level::SCAVENGER.0;

/// How far the scheduler may go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Mode {
    /// Nothing is sent to the daemon.
    Off = 0,
    /// Account and report, delay nothing.
    Observe = 1,
    /// Permits decide.
    #[default]
    Enforce = 2,
}

impl Mode {
    /// The mode of a wire number, `None` if it names none.
    #[must_use]
    pub const fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            0 => Self::Off,
            1 => Self::Observe,
            2 => Self::Enforce,
            _ => return None,
        })
    }

    /// The mode of a name, as in configuration and `LAXITY_MODE`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "off" => Self::Off,
            "observe" => Self::Observe,
            "enforce" => Self::Enforce,
            _ => return None,
        })
    }

    /// The bits of the attention word that say so.
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
    /// Lanes, 1 to [`LANES_MAX`].
    pub lanes: u16,
    /// Slots of each lane, [`SLOTS_MIN`] to [`SLOTS_MAX`].
    pub slots: u16,
    /// Lines by which the first lane is displaced, below [`COLOURS`]: give each client another.
    pub colour: u8,
}

impl Default for Geometry {
    fn default() -> Self {
        Self {
            lanes: 64,
            slots: 256,
            colour: 0,
        }
    }
}

impl Geometry {
    /// Whether every field is in range.
    #[must_use]
    pub const fn is_valid(&self) -> bool {
        self.lanes >= 1
            && self.lanes <= LANES_MAX
            && self.slots >= SLOTS_MIN
            && self.slots <= SLOTS_MAX
            && self.colour < COLOURS
    }

    /// Bytes from one lane to the next: an odd number of lines.
    #[must_use]
    pub const fn lane_stride(&self) -> usize {
        ((LANE_HEADER_LINES + self.slots as usize) | 1) * LINE_BYTES
    }

    /// Where lane `index` begins.
    #[must_use]
    pub const fn lane_offset(&self, index: u16) -> usize {
        HEADER_BYTES + self.colour as usize * LINE_BYTES + index as usize * self.lane_stride()
    }

    /// Size of the region, a whole number of pages of 4 KiB; the colour does not change it.
    #[must_use]
    pub const fn region_bytes(&self) -> usize {
        let end =
            HEADER_BYTES + COLOURS as usize * LINE_BYTES + self.lanes as usize * self.lane_stride();
        end.div_ceil(4096) * 4096
    }
}

/// One slot: 48 bytes of descriptor, 8 spare, 8 of state: one cache line.
///
/// Ownership passes to and fro with the state word, so it has one writer at any time: the client
/// until it stores `published` (Release), the daemon from the Acquire load that sees it until its
/// last permit, or until `consumed` passes the record that withdraws the flow.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Slot {
    words: [AtomicU64; WORDS],
    /// Room for later versions: neither written nor read.
    spare: AtomicU64,
    /// See [`crate::permit`].
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

    /// The same for a flow on credit, word by word, so that a submit needs no room for a copy.
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

    /// Copies the descriptor out, each word once. Relaxed: ordered by the Acquire load of `state`
    /// before it. A client that writes meanwhile gets a mixture read, which decodes or does not.
    #[inline]
    pub(crate) fn read(&self) -> Descriptor {
        Descriptor(core::array::from_fn(|i| {
            self.words[i].load(Ordering::Relaxed)
        }))
    }

    pub(crate) fn new() -> Self {
        Self {
            words: core::array::from_fn(|_| AtomicU64::new(0)),
            spare: AtomicU64::new(0),
            state: AtomicU64::new(0),
        }
    }
}

/// What the sleeping client stores, and the word that it sleeps on. See [`crate::sleep`].
#[repr(C, align(64))]
#[derive(Debug)]
pub struct WaiterLine {
    /// Client: what it awaits, 0 while awake.
    pub(crate) awaited: AtomicU64,
    /// Daemon: incremented before each wake-up.
    pub(crate) wakes: AtomicU32,
}

/// Counters that the daemon advances as it consumes.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct ConsumedLine {
    /// Records consumed. Release by the daemon after it copied them out; the client's Acquire
    /// load orders its overwriting of their slots behind that.
    pub(crate) consumed: AtomicU64,
}

/// Bytes of credit, cumulative, per port.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct CreditLine {
    /// Daemon. Relaxed: the number is all that is said.
    pub(crate) granted: [AtomicU64; CREDIT_PORTS],
}

/// For people who look at a region: who owns the lane. Nothing is decided by it.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct OwnerLine {
    /// Client: thread id of the owner, 0 if free.
    thread: AtomicU32,
}

impl OwnerLine {
    /// Client: says who owns the lane.
    pub fn set_thread(&self, thread: u32) {
        self.thread.store(thread, Ordering::Relaxed);
    }

    /// Thread id of the owner in its own pid namespace, 0 if free.
    #[must_use]
    pub fn thread(&self) -> u32 {
        self.thread.load(Ordering::Relaxed)
    }
}

/// The lines of a lane before its slots.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct LaneHeader {
    /// Client, slow path.
    pub waiter: WaiterLine,
    /// Client, once.
    pub owner: OwnerLine,
    /// Daemon, after each batch.
    pub consumed: ConsumedLine,
    /// Daemon, when it grants ahead.
    pub credit: CreditLine,
}

impl LaneHeader {
    pub(crate) fn new() -> Self {
        Self {
            waiter: WaiterLine {
                awaited: AtomicU64::new(0),
                wakes: AtomicU32::new(0),
            },
            owner: OwnerLine {
                thread: AtomicU32::new(0),
            },
            consumed: ConsumedLine {
                consumed: AtomicU64::new(0),
            },
            credit: CreditLine {
                granted: core::array::from_fn(|_| AtomicU64::new(0)),
            },
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
                    let g = Geometry {
                        lanes,
                        slots,
                        colour,
                    };
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
        let sets: std::collections::BTreeSet<_> = (0..64)
            .map(|lane| g.lane_offset(lane) / LINE_BYTES % 64)
            .collect();
        assert_eq!(sets.len(), 64);
    }
}
