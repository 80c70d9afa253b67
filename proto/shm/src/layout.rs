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

use crate::record::{self, Descriptor, Flow, WORDS};
use crate::sync::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence, light_fence};

/// `"LAXITY\0\x01"`, little-endian.
pub const MAGIC: u64 = u64::from_le_bytes(*b"LAXITY\0\x01");
/// Version of everything in this crate that another process sees. Client and daemon must agree
/// exactly: the client runs unscheduled otherwise.
pub const VERSION: u32 = 1;
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
pub const LEVELS: usize = 17;
/// The number that a permit gives the scavenger as its level.
pub const LEVEL_SCAVENGER: u8 = u8::MAX;

/// Bits of [`Header::attention`]. While the word is zero a submit is stores only.
pub mod attention {
    /// The daemon sleeps, or is about to: write the eventfd after publishing.
    pub const SLEEPING: u32 = 1;
    /// Many lanes: ring the lane's doorbell after publishing.
    pub const DOORBELL: u32 = 1 << 1;
    /// `membarrier` does not work between the two: execute a fence before looking at this word.
    pub const FENCE: u32 = 1 << 2;
    /// `laxity bypass on`: send everything, unscheduled, at once.
    pub const BYPASS: u32 = 1 << 3;
    /// The daemon stops or throws the client out: everything resolves, the lane detaches.
    pub const RELEASED: u32 = 1 << 4;
    /// Mode `observe`: tell the daemon, wait for nothing.
    pub const OBSERVE: u32 = 1 << 5;
    /// Mode `off`: tell nothing, wait for nothing.
    pub const OFF: u32 = 1 << 6;
    /// Written by the client when it gives the daemon up, and by a forked child on its copy.
    pub const LOST: u32 = 1 << 7;
    /// Bits on which flows resolve as bypassed.
    pub const UNSCHEDULED: u32 = BYPASS | RELEASED | OFF | LOST;
    /// Bits on which a lane must detach for good.
    pub const GONE: u32 = RELEASED | LOST;
    /// Bits that change what a submit does before it publishes.
    pub const NOT_ENFORCED: u32 = UNSCHEDULED | OBSERVE;
}

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

/// One slot: 56 bytes of descriptor, 8 of state, one cache line.
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

/// Written once by the daemon, before the region is handed over.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct IdentityLine {
    pub(crate) magic: AtomicU64,
    pub(crate) version: AtomicU32,
    pub(crate) lanes: AtomicU16,
    pub(crate) slots: AtomicU16,
    pub(crate) region_bytes: AtomicU64,
    pub(crate) colour: AtomicU8,
    pub(crate) daemon_pid: AtomicU32,
}

/// Written by the daemon many times a second, hence alone on its line.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct HeartbeatLine {
    /// CLOCK_MONOTONIC of the daemon's last sign of life.
    pub(crate) heartbeat_ns: AtomicU64,
}

/// Read by every submit, written rarely: stays in the client's cache.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct AttentionLine {
    pub(crate) attention: AtomicU32,
    /// CPU that the scheduler thread runs on, `u32::MAX` if unknown.
    pub(crate) daemon_cpu: AtomicU32,
    /// Level of a flow that is sent on credit, and its DSCP in the upper half.
    pub(crate) credit_mark: AtomicU16,
    /// Stages that may use credit, one bit each.
    pub(crate) credit_stages: AtomicU8,
    /// DSCP by level; index 0 is the scavenger.
    pub(crate) dscp: [AtomicU8; LEVELS],
}

/// Written by the client: which lanes it uses. Untrusted, and harmless: a wrong bit costs the
/// daemon one look at a lane that is empty, or costs the client its lane.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct ClaimLines {
    pub(crate) claimed: [AtomicU64; LANES_MAX as usize / 64],
}

/// Written by the client when [`attention::DOORBELL`] asks for it.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct DoorbellLines {
    pub(crate) rings: [AtomicU16; LANES_MAX as usize],
}

/// The first page of a region.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Header {
    pub(crate) identity: IdentityLine,
    pub(crate) heartbeat: HeartbeatLine,
    pub(crate) attention: AttentionLine,
    pub(crate) claims: ClaimLines,
    pub(crate) doorbells: DoorbellLines,
}

impl Header {
    /// A header in ordinary memory, for tests and models.
    #[must_use]
    pub fn new() -> Self {
        Self {
            identity: IdentityLine {
                magic: AtomicU64::new(0),
                version: AtomicU32::new(0),
                lanes: AtomicU16::new(0),
                slots: AtomicU16::new(0),
                region_bytes: AtomicU64::new(0),
                colour: AtomicU8::new(0),
                daemon_pid: AtomicU32::new(0),
            },
            heartbeat: HeartbeatLine {
                heartbeat_ns: AtomicU64::new(0),
            },
            attention: AttentionLine {
                attention: AtomicU32::new(0),
                daemon_cpu: AtomicU32::new(u32::MAX),
                credit_mark: AtomicU16::new(0),
                credit_stages: AtomicU8::new(0),
                dscp: core::array::from_fn(|_| AtomicU8::new(0)),
            },
            claims: ClaimLines {
                claimed: core::array::from_fn(|_| AtomicU64::new(0)),
            },
            doorbells: DoorbellLines {
                rings: core::array::from_fn(|_| AtomicU16::new(0)),
            },
        }
    }

    /// The attention word. Relaxed: see [`crate::sleep`] for the fence that goes with it.
    #[inline]
    #[must_use]
    pub fn attention(&self) -> u32 {
        self.attention.attention.load(Ordering::Relaxed)
    }

    /// Sets bits of the attention word. Relaxed: whoever needs an order executes a fence.
    pub fn raise(&self, bits: u32) {
        self.attention.attention.fetch_or(bits, Ordering::Relaxed);
    }

    /// Clears bits of the attention word.
    pub fn lower(&self, bits: u32) {
        self.attention.attention.fetch_and(!bits, Ordering::Relaxed);
    }

    /// The daemon's last sign of life, CLOCK_MONOTONIC nanoseconds.
    #[must_use]
    pub fn heartbeat_ns(&self) -> u64 {
        self.heartbeat.heartbeat_ns.load(Ordering::Relaxed)
    }

    /// Daemon: gives a sign of life. Due at least every 20 ms while any flow of any client waits.
    #[inline]
    pub fn beat(&self, now_ns: u64) {
        self.heartbeat.heartbeat_ns.store(now_ns, Ordering::Relaxed);
    }

    /// CPU of the scheduler thread, if known.
    #[must_use]
    pub fn daemon_cpu(&self) -> Option<u32> {
        let cpu = self.attention.daemon_cpu.load(Ordering::Relaxed);
        (cpu != u32::MAX).then_some(cpu)
    }

    /// Daemon: publishes where the scheduler thread runs; writes only on a change.
    pub fn set_daemon_cpu(&self, cpu: Option<u32>) {
        let cpu = cpu.unwrap_or(u32::MAX);
        if self.attention.daemon_cpu.load(Ordering::Relaxed) != cpu {
            self.attention.daemon_cpu.store(cpu, Ordering::Relaxed);
        }
    }

    /// Process id of the daemon that made the region.
    #[must_use]
    pub fn daemon_pid(&self) -> u32 {
        self.identity.daemon_pid.load(Ordering::Relaxed)
    }

    /// Level of a flow sent on credit (low half) and its DSCP (high half).
    #[inline]
    #[must_use]
    pub fn credit_mark(&self) -> u16 {
        self.attention.credit_mark.load(Ordering::Relaxed)
    }

    /// Stages that may use credit: a set of [`crate::record::Stage::bit`]s.
    #[inline]
    #[must_use]
    pub fn credit_stages(&self) -> u8 {
        self.attention.credit_stages.load(Ordering::Relaxed)
    }

    /// Daemon: which stages may use credit, and the level that they then have.
    pub fn set_credit_class(&self, stages: u8, level: u8) {
        let mark = u16::from(level) | u16::from(self.dscp(level)) << 8;
        self.attention.credit_mark.store(mark, Ordering::Relaxed);
        self.attention
            .credit_stages
            .store(stages, Ordering::Relaxed);
    }

    /// DSCP of a level. Level 0 ("none") and unknown levels have 0, as an unmarked packet does.
    #[inline]
    #[must_use]
    pub fn dscp(&self, level: u8) -> u8 {
        let index = match level {
            LEVEL_SCAVENGER => 0,
            1..=16 => usize::from(level),
            _ => return 0,
        };
        self.attention.dscp[index].load(Ordering::Relaxed)
    }

    /// Daemon: the DSCP of each level, index 0 the scavenger, then `P_1 …`.
    pub fn set_dscp(&self, table: &[u8; LEVELS]) {
        for (cell, value) in self.attention.dscp.iter().zip(table) {
            cell.store(*value, Ordering::Relaxed);
        }
        self.set_credit_class(self.credit_stages(), self.credit_mark() as u8);
    }

    /// Client: takes a lane, before it publishes there, or gives it up for good, after all of it was
    /// consumed.
    pub fn set_claimed(&self, lane: u16, claimed: bool) {
        let Some(word) = self.claims.claimed.get(usize::from(lane) / 64) else {
            return;
        };
        let bit = 1 << (lane % 64);
        // Release: the daemon that sees the bit finds the lane in the state it was left in.
        if claimed {
            word.fetch_or(bit, Ordering::Release);
        } else {
            word.fetch_and(!bit, Ordering::Release);
        }
    }

    /// Daemon: which of the lanes `64 · word ..` are claimed. Pairs with [`Header::set_claimed`].
    #[inline]
    #[must_use]
    pub fn claimed(&self, word: usize) -> u64 {
        self.claims
            .claimed
            .get(word)
            .map_or(0, |w| w.load(Ordering::Acquire))
    }

    /// Client, after publishing a record: what the daemon asks for. Zero: nothing.
    #[inline]
    #[must_use]
    pub fn after_publish(&self) -> u32 {
        light_fence();
        self.attention()
    }

    /// Client, when [`Header::after_publish`] was not zero: rings the doorbell if there is one,
    /// and says whether the eventfd must be written.
    #[cold]
    #[must_use]
    pub fn answer(&self, lane: u16, mut seen: u32) -> bool {
        if seen & attention::FENCE != 0 {
            fence(Ordering::SeqCst);
            seen = self.attention();
        }
        if seen & attention::DOORBELL != 0
            && let Some(bell) = self.doorbells.rings.get(usize::from(lane))
        {
            // One writer per lane, so no read-modify-write is needed. Release: whoever sees the
            // ring finds the record.
            let rings = bell.load(Ordering::Relaxed);
            bell.store(rings.wrapping_add(1), Ordering::Release);
        }
        seen & attention::SLEEPING != 0
    }

    /// Daemon: how often the doorbell was rung, modulo 2^16. Pairs with `answer`.
    #[inline]
    pub fn rings(&self, lane: u16) -> u16 {
        self.doorbells
            .rings
            .get(usize::from(lane))
            .map_or(0, |b| b.load(Ordering::Acquire))
    }
}

impl Default for Header {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<Slot>() == LINE_BYTES);
    assert!(size_of::<LaneHeader>() == LANE_HEADER_LINES * LINE_BYTES);
    assert!(size_of::<Header>() <= HEADER_BYTES);
    assert!(core::mem::offset_of!(Slot, state) == 56);
    assert!(core::mem::offset_of!(Header, heartbeat) == 64);
    assert!(core::mem::offset_of!(Header, attention) == 128);
    assert!(core::mem::offset_of!(Header, claims) == 192);
    assert!(core::mem::offset_of!(Header, doorbells) == 320);
    assert!(core::mem::offset_of!(AttentionLine, dscp) == 11);
    assert!(size_of::<AttentionLine>() == LINE_BYTES);
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

    #[test]
    fn levels_have_their_own_dscp_and_unknown_levels_none() {
        let h = Header::new();
        h.set_dscp(&core::array::from_fn(|i| 40 + i as u8));
        assert_eq!(h.dscp(LEVEL_SCAVENGER), 40);
        assert_eq!((h.dscp(1), h.dscp(16)), (41, 56));
        assert_eq!((h.dscp(0), h.dscp(17), h.dscp(254)), (0, 0, 0));
    }
}
