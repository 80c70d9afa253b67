//! The first page of a region: what the daemon tells all lanes of a client, and which lanes there
//! are. One cache line per writer and per rate of change.

use laxity_types::{Level, Stage};

use crate::layout::{LANES_MAX, LEVEL_SCAVENGER, LEVELS};
use crate::sync::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence, light_fence};

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

/// Bit of [`Header::credit_stages`]: nothing waits on any port, so flows that are
/// [whole](crate::record::Flow::whole) may use credit whatever their stage. Stages begin with bit
/// 1.
pub const CREDIT_WHOLE: u8 = 1;

/// Stages that the header has room for. [`Stage::bit`] has room for as many.
const STAGES_MAX: usize = 7;

/// Written once by the daemon, before the region is handed over.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct IdentityLine {
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
pub(crate) struct HeartbeatLine {
    /// CLOCK_MONOTONIC of the daemon's last sign of life.
    pub(crate) heartbeat_ns: AtomicU64,
}

/// Read by every submit, written rarely: stays in the client's cache.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct AttentionLine {
    pub(crate) attention: AtomicU32,
    /// CPU that the scheduler thread runs on, `u32::MAX` if unknown.
    pub(crate) daemon_cpu: AtomicU32,
    /// Level of a flow that is sent on credit, and its DSCP in the upper half.
    pub(crate) credit_mark: AtomicU16,
    /// Stages that may use credit, one bit each.
    pub(crate) credit_stages: AtomicU8,
    /// DSCP by level; index 0 is the scavenger.
    pub(crate) dscp: [AtomicU8; LEVELS],
    /// DSCP by [`Stage::index`], plus one. An older daemon leaves zeroes.
    pub(crate) stage_dscp: [AtomicU8; STAGES_MAX],
}

/// Written by the client: which lanes it uses. Untrusted, and harmless: a wrong bit costs the
/// daemon one look at a lane that is empty, or costs the client its lane.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct ClaimLines {
    pub(crate) claimed: [AtomicU64; LANES_MAX as usize / 64],
}

/// Written by the client when [`attention::DOORBELL`] asks for it.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct DoorbellLines {
    pub(crate) rings: [AtomicU16; LANES_MAX as usize],
}

/// Bytes of a NIC's name that are kept.
const NIC_NAME_BYTES: usize = 16;
/// NICs that a client can find by name.
const NICS_NAMED: usize = 64;

/// Written once by the daemon, before the region is handed over: names of the NICs, by their
/// number.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct NicLines {
    names: [[AtomicU64; NIC_NAME_BYTES / 8]; NICS_NAMED],
}

/// A name as it is kept: cut, and padded with zeros.
fn nic_name(name: &str) -> [u64; NIC_NAME_BYTES / 8] {
    let mut bytes = [0; NIC_NAME_BYTES];
    let length = name.len().min(NIC_NAME_BYTES);
    bytes[..length].copy_from_slice(&name.as_bytes()[..length]);
    core::array::from_fn(|i| u64::from_le_bytes(core::array::from_fn(|byte| bytes[8 * i + byte])))
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
    pub(crate) nics: NicLines,
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
                stage_dscp: core::array::from_fn(|_| AtomicU8::new(0)),
            },
            claims: ClaimLines {
                claimed: core::array::from_fn(|_| AtomicU64::new(0)),
            },
            doorbells: DoorbellLines {
                rings: core::array::from_fn(|_| AtomicU16::new(0)),
            },
            nics: NicLines {
                names: core::array::from_fn(|_| core::array::from_fn(|_| AtomicU64::new(0))),
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

    /// Who may use credit: a set of [`crate::record::Stage::bit`]s and [`CREDIT_WHOLE`].
    #[inline]
    #[must_use]
    pub fn credit_stages(&self) -> u8 {
        self.attention.credit_stages.load(Ordering::Relaxed)
    }

    /// Daemon: which stages may use credit, and the level that they then have.
    pub fn set_credit_class(&self, stages: u8, level: u8) {
        let mark = u16::from(level) | u16::from(self.dscp(level)) << 8;
        self.attention.credit_mark.store(mark, Ordering::Relaxed);
        self.set_credit_stages(stages);
    }

    /// Daemon: who may use credit.
    pub fn set_credit_stages(&self, stages: u8) {
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
            1..=Level::COUNT_MAX => usize::from(level),
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

    /// The DSCP for transfers of a stage whose class can't be chosen one by one, or `None` if the
    /// daemon said none.
    #[must_use]
    pub fn dscp_of_stage(&self, stage: Stage) -> Option<u8> {
        let said = &self.attention.stage_dscp[stage.index()];
        said.load(Ordering::Relaxed).checked_sub(1)
    }

    /// Daemon: the table of [`Header::dscp_of_stage`], in the order of [`Stage::ALL`].
    pub fn set_dscp_of_stages(&self, table: [u8; Stage::ALL.len()]) {
        for (cell, value) in self.attention.stage_dscp.iter().zip(table) {
            cell.store(value + 1, Ordering::Relaxed);
        }
    }

    /// Daemon: the NICs, in the order of their numbers.
    pub fn set_nics<'a>(&self, names: impl Iterator<Item = &'a str>) {
        for (cells, name) in self.nics.names.iter().zip(names) {
            for (cell, word) in cells.iter().zip(nic_name(name)) {
                cell.store(word, Ordering::Relaxed);
            }
        }
    }

    /// The number of the NIC of this name, else of the one that is named `default`.
    #[must_use]
    pub fn nic(&self, name: &str) -> Option<u8> {
        let find = |name| {
            let wanted = nic_name(name);
            let is = |cells: &[AtomicU64; NIC_NAME_BYTES / 8]| {
                cells
                    .iter()
                    .zip(wanted)
                    .all(|(cell, word)| cell.load(Ordering::Relaxed) == word)
            };
            self.nics.names.iter().position(is)
        };
        if name.is_empty() {
            return None;
        }
        find(name).or_else(|| find("default")).map(|at| at as u8)
    }

    /// Client: takes a lane, before it publishes there, or gives it up for good, after all of it
    /// was consumed.
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
    use crate::layout::{HEADER_BYTES, LINE_BYTES};
    assert!(size_of::<Header>() <= HEADER_BYTES);
    assert!(core::mem::offset_of!(Header, heartbeat) == 64);
    assert!(core::mem::offset_of!(Header, attention) == 128);
    assert!(core::mem::offset_of!(Header, claims) == 192);
    assert!(core::mem::offset_of!(Header, doorbells) == 320);
    assert!(core::mem::offset_of!(AttentionLine, dscp) == 11);
    assert!(core::mem::offset_of!(AttentionLine, stage_dscp) == 28);
    assert!(size_of::<AttentionLine>() == LINE_BYTES);
};

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn nics_are_found_by_name_and_by_default() {
        let h = Header::new();
        assert_eq!(h.nic("mlx5_0"), None);
        h.set_nics(["mlx5_0", "mlx5_bond_1_and_more"].into_iter());
        assert_eq!(h.nic("mlx5_0"), Some(0));
        assert_eq!(h.nic("mlx5_bond_1_and_more"), Some(1));
        assert_eq!(h.nic("mlx5"), None);
        assert_eq!(h.nic(""), None);
        h.set_nics(["rxe0", "default"].into_iter());
        assert_eq!((h.nic("rxe0"), h.nic("rxe1")), (Some(0), Some(1)));
    }

    #[test]
    fn levels_have_their_own_dscp_and_unknown_levels_none() {
        let h = Header::new();
        h.set_dscp(&core::array::from_fn(|i| 40 + i as u8));
        assert_eq!(h.dscp(LEVEL_SCAVENGER), 40);
        assert_eq!((h.dscp(1), h.dscp(16)), (41, 56));
        assert_eq!((h.dscp(0), h.dscp(17), h.dscp(254)), (0, 0, 0));
    }

    #[test]
    fn a_stage_has_the_dscp_that_the_daemon_says_and_none_before() {
        let h = Header::new();
        assert_eq!(h.dscp_of_stage(Stage::P2d), None);
        h.set_dscp_of_stages([0, 63, 18, 8, 9]);
        let said = Stage::ALL.map(|stage| h.dscp_of_stage(stage));
        assert_eq!(said, [0, 63, 18, 8, 9].map(Some));
    }
}
