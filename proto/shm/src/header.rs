//! The first page of a region: the daemon's settings for all lanes of a client, and the client's
//! claimed lanes. Each writer and each rate of change has its own cache line.

use laxity_types::marking::{Marking, Treatments};
use laxity_types::{Level, Stage};

use crate::layout::{LANES_MAX, LEVEL_SCAVENGER, LEVELS};
use crate::sync::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence, light_fence};

/// Bits of [`Header::attention`]. While the word is zero a submit is stores only.
pub mod attention {
    /// The daemon sleeps, or is about to. A client writes the eventfd after publishing.
    pub const SLEEPING: u32 = 1;
    /// The daemon has many lanes. A client increments the lane's doorbell after publishing.
    pub const DOORBELL: u32 = 1 << 1;
    /// `membarrier` does not work. A client executes a full fence and reads this word again.
    pub const FENCE: u32 = 1 << 2;
    /// `laxity bypass on`: a client sends everything unscheduled, at once.
    pub const BYPASS: u32 = 1 << 3;
    /// The daemon stops or releases the client: flows go out unscheduled, the lane detaches.
    pub const RELEASED: u32 = 1 << 4;
    /// Mode `observe`: a client reports its flows and does not wait.
    pub const OBSERVE: u32 = 1 << 5;
    /// Mode `off`: a client neither reports nor waits.
    pub const OFF: u32 = 1 << 6;
    /// The client has given the daemon up. A forked child sets it on its copy.
    pub const LOST: u32 = 1 << 7;
    /// Beside [`RELEASED`]: the next daemon is expected at the same socket. A client waits for it,
    /// for a short time. A client of an older release sees only that it is released.
    pub const HANDOVER: u32 = 1 << 8;
    /// Bits on which waiting flows are bypassed.
    pub const UNSCHEDULED: u32 = BYPASS | RELEASED | OFF | LOST;
    /// Bits on which a lane must detach for good.
    pub const GONE: u32 = RELEASED | LOST;
    /// Bits by which an operator or the client chose that nothing waits.
    pub const UNENFORCED: u32 = BYPASS | OBSERVE | OFF;
    /// Bits that change what a submit does before it publishes.
    pub const NOT_ENFORCED: u32 = UNSCHEDULED | OBSERVE;
}

/// Bit of [`Header::credit_stages`]: no flow waits on any port, so
/// [whole](crate::record::Flow::whole) flows of any stage may use credit. Bits of stages begin with
/// bit 1.
pub const CREDIT_WHOLE: u8 = 1;

/// Number of stages that fit into the header. [`Stage::bit`] has the same limit.
const STAGES_MAX: usize = 7;

/// Values that the daemon writes once, before it hands the region over.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(crate) struct IdentityLine {
    pub(crate) magic: AtomicU64,
    pub(crate) version: AtomicU32,
    pub(crate) lanes: AtomicU16,
    pub(crate) slots: AtomicU16,
    pub(crate) region_bytes: AtomicU64,
    pub(crate) colour: AtomicU8,
    pub(crate) daemon_pid: AtomicU32,
}

/// The heartbeat. The daemon writes it many times a second, so it has its own line.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(crate) struct HeartbeatLine {
    /// CLOCK_MONOTONIC of the daemon's last heartbeat.
    pub(crate) heartbeat_ns: AtomicU64,
}

/// Values that every submit reads. They change rarely, so the line stays in the client's cache.
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
    /// DSCP by [`Stage::index`], plus one. Zero if the daemon is older and has no such table.
    pub(crate) stage_dscp: [AtomicU8; STAGES_MAX],
    /// Number of the [`Marking`]. Zero if the daemon is older and has none.
    pub(crate) marking: AtomicU8,
    /// InfiniBand's service level by [`Stage::index`], plus one. Zero if none is to be set.
    pub(crate) stage_sl: [AtomicU8; STAGES_MAX],
}

/// Bits of the lanes that the client uses. They are untrusted but harmless: a wrong bit makes the
/// daemon poll an empty lane or miss one of the client's lanes.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(crate) struct ClaimLines {
    pub(crate) claimed: [AtomicU64; LANES_MAX as usize / 64],
}

/// Counters that the client increments while [`attention::DOORBELL`] is set.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct DoorbellLines {
    pub(crate) rings: [AtomicU16; LANES_MAX as usize],
}

/// Maximum number of bytes of a NIC's name. The rest is cut.
const NIC_NAME_BYTES: usize = 16;
/// The encoded name of a number without a NIC.
const UNNAMED: [u64; NIC_NAME_BYTES / 8] = [0; NIC_NAME_BYTES / 8];
/// Number of NICs that a client can find by name.
const NICS_NAMED: usize = 64;

/// Names of the NICs by their number. The daemon writes them before it hands the region over, and
/// again when it finds a NIC.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct NicLines {
    names: [[AtomicU64; NIC_NAME_BYTES / 8]; NICS_NAMED],
}

impl NicLines {
    fn find(&self, name: &str) -> Option<u8> {
        let wanted = nic_name(name);
        if wanted == UNNAMED {
            return None;
        }
        self.names.iter().position(|cells| words(cells) == wanted).map(|at| at as u8)
    }
}

/// Returns the encoded name in `cells`.
fn words(cells: &[AtomicU64; NIC_NAME_BYTES / 8]) -> [u64; NIC_NAME_BYTES / 8] {
    // Acquire: pairs with the stores of `set_nics`.
    cells.each_ref().map(|cell| cell.load(Ordering::Acquire))
}

/// Encodes a NIC's name: cut, and padded with zeros.
fn nic_name(name: &str) -> [u64; NIC_NAME_BYTES / 8] {
    let mut bytes = [0; NIC_NAME_BYTES];
    let length = name.len().min(NIC_NAME_BYTES);
    bytes[..length].copy_from_slice(&name.as_bytes()[..length]);
    core::array::from_fn(|i| u64::from_le_bytes(core::array::from_fn(|byte| bytes[8 * i + byte])))
}

/// Which DSCPs the host's NICs treat alike, for [`Header::treatments`].
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct TreatmentLine {
    by_dscp: [AtomicU8; Treatments::COUNT],
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
    pub(crate) treatment: TreatmentLine,
}

impl Header {
    /// Creates a header in ordinary memory, for tests and models.
    pub fn new() -> Self {
        Self {
            identity: IdentityLine::default(),
            heartbeat: HeartbeatLine::default(),
            attention: AttentionLine {
                attention: AtomicU32::new(0),
                daemon_cpu: AtomicU32::new(u32::MAX),
                credit_mark: AtomicU16::new(0),
                credit_stages: AtomicU8::new(0),
                dscp: core::array::from_fn(|_| AtomicU8::new(0)),
                stage_dscp: core::array::from_fn(|_| AtomicU8::new(0)),
                stage_sl: core::array::from_fn(|_| AtomicU8::new(0)),
                marking: AtomicU8::new(0),
            },
            claims: ClaimLines::default(),
            doorbells: DoorbellLines { rings: core::array::from_fn(|_| AtomicU16::new(0)) },
            nics: NicLines {
                names: core::array::from_fn(|_| core::array::from_fn(|_| AtomicU64::new(0))),
            },
            treatment: TreatmentLine { by_dscp: core::array::from_fn(|_| AtomicU8::new(0)) },
        }
    }

    /// Returns the attention word. Relaxed: [`crate::sleep`] has the fence that orders it.
    #[inline]
    pub fn attention(&self) -> u32 {
        self.attention.attention.load(Ordering::Relaxed)
    }

    /// Sets bits of the attention word. Relaxed: a caller that needs an order executes a fence.
    pub fn raise(&self, bits: u32) {
        self.attention.attention.fetch_or(bits, Ordering::Relaxed);
    }

    /// Clears bits of the attention word.
    pub fn lower(&self, bits: u32) {
        self.attention.attention.fetch_and(!bits, Ordering::Relaxed);
    }

    /// Returns the time of the daemon's last heartbeat, CLOCK_MONOTONIC nanoseconds.
    pub fn heartbeat_ns(&self) -> u64 {
        self.heartbeat.heartbeat_ns.load(Ordering::Relaxed)
    }

    /// Daemon: writes the heartbeat, at least every 20 ms while any flow of any client waits.
    #[inline]
    pub fn beat(&self, now_ns: u64) {
        self.heartbeat.heartbeat_ns.store(now_ns, Ordering::Relaxed);
    }

    /// Returns the CPU of the scheduler thread, if known.
    pub fn daemon_cpu(&self) -> Option<u32> {
        let cpu = self.attention.daemon_cpu.load(Ordering::Relaxed);
        (cpu != u32::MAX).then_some(cpu)
    }

    /// Daemon: publishes the scheduler thread's CPU. It writes only on a change.
    pub fn set_daemon_cpu(&self, cpu: Option<u32>) {
        let cpu = cpu.unwrap_or(u32::MAX);
        if self.attention.daemon_cpu.load(Ordering::Relaxed) != cpu {
            self.attention.daemon_cpu.store(cpu, Ordering::Relaxed);
        }
    }

    /// Returns the level of a flow sent on credit (low half) and its DSCP (high half).
    #[inline]
    pub fn credit_mark(&self) -> u16 {
        self.attention.credit_mark.load(Ordering::Relaxed)
    }

    /// Returns the flows that may use credit: [`crate::record::Stage::bit`]s and [`CREDIT_WHOLE`].
    #[inline]
    pub fn credit_stages(&self) -> u8 {
        self.attention.credit_stages.load(Ordering::Relaxed)
    }

    /// Daemon: sets which stages may use credit, and the level of flows on credit.
    pub fn set_credit_class(&self, stages: u8, level: u8) {
        let mark = u16::from(level) | u16::from(self.dscp(level)) << 8;
        self.attention.credit_mark.store(mark, Ordering::Relaxed);
        self.set_credit_stages(stages);
    }

    /// Daemon: sets which flows may use credit, see [`Header::credit_stages`].
    pub fn set_credit_stages(&self, stages: u8) {
        self.attention.credit_stages.store(stages, Ordering::Relaxed);
    }

    /// Returns the DSCP of a level, which is 0 (unmarked) for level 0 and unknown levels.
    #[inline]
    pub fn dscp(&self, level: u8) -> u8 {
        let index = match level {
            LEVEL_SCAVENGER => 0,
            1..=Level::COUNT_MAX => usize::from(level),
            _ => return 0,
        };
        self.attention.dscp[index].load(Ordering::Relaxed)
    }

    /// Daemon: sets the DSCP of each level, index 0 the scavenger, then `P_1 …`.
    pub fn set_dscp(&self, table: &[u8; LEVELS]) {
        for (cell, value) in self.attention.dscp.iter().zip(table) {
            cell.store(*value, Ordering::Relaxed);
        }
        self.set_credit_class(self.credit_stages(), self.credit_mark() as u8);
    }

    /// Returns the DSCP for transfers of a stage whose class can't be chosen one by one, or `None`
    /// if the daemon has not set it.
    pub fn dscp_of_stage(&self, stage: Stage) -> Option<u8> {
        let said = &self.attention.stage_dscp[stage.index()];
        said.load(Ordering::Relaxed).checked_sub(1)
    }

    /// Daemon: sets the table of [`Header::dscp_of_stage`], in the order of [`Stage::ALL`].
    pub fn set_dscp_of_stages(&self, table: [u8; Stage::ALL.len()]) {
        for (cell, value) in self.attention.stage_dscp.iter().zip(table) {
            cell.store(value + 1, Ordering::Relaxed);
        }
    }

    /// Returns InfiniBand's service level for queue pairs of a stage, or `None` if none is to be
    /// set.
    pub fn sl_of_stage(&self, stage: Stage) -> Option<u8> {
        self.attention.stage_sl[stage.index()].load(Ordering::Relaxed).checked_sub(1)
    }

    /// Daemon: sets the table of [`Header::sl_of_stage`], in the order of [`Stage::ALL`].
    pub fn set_sl_of_stages(&self, table: Option<[u8; Stage::ALL.len()]>) {
        for (index, cell) in self.attention.stage_sl.iter().enumerate() {
            let sl = table.and_then(|table| table.get(index).copied());
            cell.store(sl.map_or(0, |sl| sl + 1), Ordering::Relaxed);
        }
    }

    /// Returns what the daemon wants done to classes, or `None` if it is of a release without this
    /// setting.
    #[must_use]
    pub fn marking(&self) -> Option<Marking> {
        Marking::from_number(self.attention.marking.load(Ordering::Relaxed))
    }

    /// Returns which DSCPs the host's NICs treat alike.
    pub fn treatments(&self) -> Treatments {
        let number = |dscp: usize| self.treatment.by_dscp[dscp].load(Ordering::Relaxed);
        Treatments::new(core::array::from_fn(number))
    }

    /// Daemon: sets what [`Header::marking`] and [`Header::treatments`] return. A client that reads
    /// meanwhile may see a mixture of the old and the new table, and decides about one class by
    /// that.
    pub fn set_marking(&self, marking: Marking, treatments: &Treatments) {
        for (cell, number) in self.treatment.by_dscp.iter().zip(treatments.by_dscp()) {
            cell.store(*number, Ordering::Relaxed);
        }
        self.attention.marking.store(marking as u8, Ordering::Relaxed);
    }

    /// Daemon: sets the names of the NICs, in the order of their numbers. If `default` moves to a
    /// higher number, a client finds it at one of the two at any time.
    pub fn set_nics<'a>(
        &self,
        names: impl DoubleEndedIterator<Item = &'a str> + ExactSizeIterator,
    ) {
        for (cells, name) in self.nics.names.iter().zip(names).rev() {
            for (cell, word) in cells.iter().zip(nic_name(name)) {
                // Release: pairs with the loads of `nic`, which then find the names above.
                cell.store(word, Ordering::Release);
            }
        }
    }

    /// Returns the number of the NIC of this name, else of the owner of its port, else of the NIC
    /// named `default`.
    pub fn nic(&self, name: &str, owner: impl FnOnce() -> Option<String>) -> Option<u8> {
        if name.is_empty() {
            return None;
        }
        self.nic_named(name, owner).or_else(|| self.nics.find("default"))
    }

    /// Returns the number of the NIC of this name, else of the owner of its port.
    pub fn nic_named(&self, name: &str, owner: impl FnOnce() -> Option<String>) -> Option<u8> {
        self.nics.find(name).or_else(|| self.nics.find(&owner()?))
    }

    /// Returns a NIC for a transfer of which only the host is known. Successive turns have all
    /// NICs except `default`, one after the other. Returns 0 if there are none.
    #[must_use]
    pub fn nic_in_turn(&self, turn: usize) -> u8 {
        let default = nic_name("default");
        let names = self.nics.names.iter().map(words).take_while(|name| *name != UNNAMED);
        let mut others = names.zip(0..).filter(|(name, _)| *name != default);
        let count = others.clone().count();
        let chosen = turn.checked_rem(count).and_then(|at| others.nth(at));
        chosen.map_or(0, |(_, number)| number)
    }

    /// Returns this daemon's number of the NIC that has `number` in the header `before`. Returns
    /// `number` if `before` has no name for it, and `u8::MAX` if this daemon has no such NIC and
    /// none named `default`.
    #[must_use]
    pub fn nic_of(&self, before: &Self, number: u8) -> u8 {
        let name = |header: &Self, at: usize| Some(words(header.nics.names.get(at)?));
        let wanted = name(before, number.into()).filter(|name| *name != UNNAMED);
        let Some(wanted) = wanted.filter(|wanted| name(self, number.into()) != Some(*wanted))
        else {
            return number;
        };
        let find = |wanted| (0..NICS_NAMED).find(|at| name(self, *at) == Some(wanted));
        find(wanted).or_else(|| find(nic_name("default"))).map_or(u8::MAX, |at| at as u8)
    }

    /// Client: claims a lane before the first record, or gives it up after all its records were
    /// consumed.
    pub fn set_claimed(&self, lane: u16, claimed: bool) {
        let Some(word) = self.claims.claimed.get(usize::from(lane) / 64) else { return };
        let bit = 1 << (lane % 64);
        // Release: a daemon that sees the bit also sees the lane as its last owner left it.
        if claimed {
            word.fetch_or(bit, Ordering::Release);
        } else {
            word.fetch_and(!bit, Ordering::Release);
        }
    }

    /// Daemon: returns the claimed lanes from `64 · word` on. Pairs with [`Header::set_claimed`].
    #[inline]
    pub fn claimed(&self, word: usize) -> u64 {
        self.claims.claimed.get(word).map_or(0, |w| w.load(Ordering::Acquire))
    }

    /// Client: returns the attention word after publishing a record. Zero needs no further action.
    #[inline]
    pub fn after_publish(&self) -> u32 {
        light_fence();
        self.attention()
    }

    /// Client: acts on a nonzero [`Header::after_publish`]. It increments the doorbell if the
    /// daemon asks for it. Returns whether the eventfd must be written.
    #[cold]
    pub fn answer(&self, lane: u16, mut seen: u32) -> bool {
        if seen & attention::FENCE != 0 {
            fence(Ordering::SeqCst);
            seen = self.attention();
        }
        if seen & attention::DOORBELL != 0
            && let Some(bell) = self.doorbells.rings.get(usize::from(lane))
        {
            // One writer per lane, so no read-modify-write is needed. Release: a daemon that sees
            // the new value also sees the record.
            let rings = bell.load(Ordering::Relaxed);
            bell.store(rings.wrapping_add(1), Ordering::Release);
        }
        seen & attention::SLEEPING != 0
    }

    /// Daemon: returns the lane's doorbell counter, modulo 2^16. Pairs with `answer`.
    #[inline]
    pub fn rings(&self, lane: u16) -> u16 {
        self.doorbells.rings.get(usize::from(lane)).map_or(0, |b| b.load(Ordering::Acquire))
    }
}

impl Default for Header {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(not(loom))]
const _: () = {
    use core::mem::offset_of;

    use crate::layout::{HEADER_BYTES, LINE_BYTES};
    assert!(size_of::<Header>() <= HEADER_BYTES);
    assert!(offset_of!(Header, heartbeat) == 64 && offset_of!(Header, attention) == 128);
    assert!(offset_of!(Header, claims) == 192 && offset_of!(Header, doorbells) == 320);
    assert!(offset_of!(AttentionLine, dscp) == 11 && offset_of!(AttentionLine, stage_dscp) == 28);
    assert!(offset_of!(AttentionLine, marking) == 35 && offset_of!(AttentionLine, stage_sl) == 36);
    assert!(offset_of!(Header, treatment) == 3392);
    assert!(size_of::<AttentionLine>() == LINE_BYTES);
};

#[cfg(all(test, not(loom)))]
mod tests;
