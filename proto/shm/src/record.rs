//! Records from a client to the daemon: one [`Record`] per slot, encoded in 48 bytes.
//!
//! The encoding has six little-endian words. A seventh is spare and neither written nor read.
//!
//! ```text
//! word 0  stage | direction << 8 | nic << 16 | layer << 32 | whole << 48 | peer << 56
//! word 1  bytes        word 2  batch, or tag        word 3  request        word 4  deadline
//! word 5  next | opcode << 16
//! ```
//!
//! `next` belongs to the lane: the slot where its next record will appear (see [`crate::lane`]).
//! The small fields of word 0 lie as they do in [`Flow`], so that a submit copies them in few
//! loads. The daemon trusts no record: [`Record::decode`] accepts only what encoding gives back, so
//! each record has one encoding and no field without meaning.

use crate::permit::FLOW_BYTES_MAX;

pub use laxity_types::Stage;

pub use crate::hint::Hint;

/// The direction of a flow through the NIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Direction {
    /// Out of this host.
    #[default]
    Egress = 0,
    /// Into this host.
    Ingress = 1,
}

/// The metadata of one transfer. `repr(C)`: a record has the small fields in the same layout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Flow {
    /// What the flow is for.
    pub stage: Stage,
    /// The flow's direction through the NIC.
    pub direction: Direction,
    /// The NIC, as an index into the daemon's configuration.
    pub nic: u8,
    /// Always zero, see [`Reserved`].
    pub reserved: Reserved,
    /// The layer that consumes (stages 1, 2) or produced (stage 3) the bytes.
    pub layer: u16,
    /// Whether the flow goes out in one piece, with a class that the client cannot choose: a work
    /// request on a queue pair. It is permitted as a whole, however large. While no flow waits on
    /// any port, it may be sent on credit whatever its stage.
    pub whole: bool,
    /// The peer's number, as announced on the same lane ([`Record::Peer`]); 0 if unknown. For an
    /// incoming flow it also says whose egress the flow loads.
    pub peer: u8,
    /// Bytes to move, at most [`FLOW_BYTES_MAX`].
    pub bytes: u64,
    /// The batch, 0 if unknown.
    pub batch: u64,
    /// The request, 0 if unknown or if the flow serves the whole batch.
    pub request: u64,
    /// Deadline, absolute CLOCK_MONOTONIC nanoseconds; 0 if there is none.
    pub deadline_ns: u64,
}

/// The byte of a [`Flow`] that has no meaning: zero. As padding it would keep the small fields,
/// eight bytes together, from being read in one load, and a submit on credit would take 19
/// instructions more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Reserved(u8);

/// Bit of [`Flow::key`]: the flow is [`Flow::whole`].
pub const WHOLE: u64 = 1 << 48;
/// Bits of [`Flow::head`] that are [`Flow::layer`].
const LAYER: u64 = 0xffff << 32;

impl Flow {
    /// Returns all fields but layer, bytes and ids as one number, never 0.
    #[inline]
    #[must_use]
    pub const fn key(&self) -> u64 {
        self.head() & !LAYER
    }

    /// Returns word 0 of a flow's descriptor: the small fields, in their order.
    #[inline]
    pub(crate) const fn head(&self) -> u64 {
        // SAFETY: `Flow` is `repr(C)` and aligned as a u64, and its first eight bytes are fields
        // without padding (asserted below), so they are initialized.
        unsafe { core::ptr::from_ref(self).cast::<u64>().read() }
    }

    /// Returns the lane's credit counter for this flow, or `None` if there is none.
    #[inline]
    #[must_use]
    pub const fn credit_port(&self) -> Option<usize> {
        let port = ((self.nic as usize) << 1) | self.direction as usize;
        if port < crate::layout::CREDIT_PORTS { Some(port) } else { None }
    }
}

/// What a client writes into a slot for the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// A flow wants to send. It holds its slot until the last permit. Its tag is the sequence of
    /// this record in its lane.
    Submit(Flow),
    /// The client sends a flow without waiting: on credit, or (`observed`) because the mode is
    /// `observe`. Its tag is the sequence of this record.
    SubmitOnCredit {
        /// The flow that the client sends.
        flow: Flow,
        /// Whether the client runs in `observe` mode, so that the flow uses no credit.
        observed: bool,
    },
    /// `bytes` of the flow `tag` were delivered.
    Completed {
        /// Sequence of the record that submitted the flow.
        tag: u64,
        /// Bytes since the last such record.
        bytes: u64,
    },
    /// The client withdraws a flow and waits for no more permits. The slot belongs to the client
    /// again once this record is consumed.
    Cancelled {
        /// Sequence of the record that submitted the flow.
        tag: u64,
        /// Permitted bytes of the flow that the client put on the wire.
        permitted: u64,
    },
    /// The lane's owner has ended, and every flow of this lane is withdrawn.
    LaneReset,
    /// A hint of the inference engine.
    Hint(Hint),
    /// The address of a peer number, for the later flows of this lane ([`Flow::peer`]).
    Peer {
        /// The peer's number, not 0.
        peer: u8,
        /// The peer's address: IPv6, or IPv4 mapped into it; the GID for RoCE v2.
        address: [u8; 16],
    },
}

/// The error of a descriptor that encodes no record. The daemon should release the client: its
/// memory is corrupt, or it has another version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Garbage {
    /// The opcode is unknown.
    #[error("record has unknown opcode {0}: the client is corrupt or of another version")]
    Opcode(u32),
    /// The stage is unknown.
    #[error("record has unknown stage {0}")]
    Stage(u8),
    /// Bits or words are set that this record does not define.
    #[error("record of opcode {0} has bits set that it does not define")]
    Reserved(u32),
    /// The flow has more bytes than a permit can count.
    #[error("flow of {0} bytes is larger than a permit can count")]
    Bytes(u64),
    /// `next` lies outside the lane, or names a slot that is in use.
    #[error("record chains to slot {0}, which does not exist or is in use")]
    Next(u16),
    /// The client sent more on credit than it had.
    #[error("client overdrew its credit by {0} bytes")]
    Overdraft(u64),
}

pub(crate) const OP_SUBMIT: u32 = 1;
pub(crate) const OP_CREDIT: u32 = 2;
pub(crate) const OP_OBSERVED: u32 = 3;
pub(crate) const OP_COMPLETED: u32 = 4;
const OP_CANCELLED: u32 = 5;
const OP_LANE_RESET: u32 = 6;
const OP_PEER: u32 = 23;

/// Number of words of a descriptor that are used.
pub const WORDS: usize = 6;

/// A record as it lies in a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Descriptor(pub [u64; WORDS]);

impl Descriptor {
    /// Returns the slot where the next record of the lane will be.
    #[inline]
    pub const fn next(&self) -> u16 {
        self.0[5] as u16
    }

    /// Sets the slot where the next record of the lane will be.
    #[inline]
    #[must_use]
    pub const fn with_next(mut self, next: u16) -> Self {
        self.0[5] = tail(self.opcode(), next);
        self
    }

    /// Returns the opcode, or the undefined opcode `u32::MAX` if the word has a larger number.
    #[inline]
    pub(crate) const fn opcode(&self) -> u32 {
        let opcode = self.0[5] >> 16;
        if opcode > u32::MAX as u64 { u32::MAX } else { opcode as u32 }
    }
}

/// Returns word 5 of a descriptor.
#[inline]
pub(crate) const fn tail(opcode: u32, next: u16) -> u64 {
    (opcode as u64) << 16 | next as u64
}

#[inline]
const fn encode_flow(opcode: u32, flow: &Flow) -> Descriptor {
    let last = tail(opcode, 0);
    Descriptor([flow.head(), flow.bytes, flow.batch, flow.request, flow.deadline_ns, last])
}

#[inline(always)]
pub(crate) fn decode_flow(descriptor: &Descriptor) -> Result<Flow, Garbage> {
    let [head, bytes, batch, request, deadline_ns, _] = descriptor.0;
    let stage = head as u8;
    if Stage::from_number(stage).is_none() {
        return Err(Garbage::Stage(stage));
    }
    // Direction and `whole` are 0 or 1, and all other bits are zero.
    if head & 0x00fe_0000_ff00_fe00 != 0 {
        return Err(Garbage::Reserved(descriptor.opcode()));
    }
    if bytes > FLOW_BYTES_MAX {
        return Err(Garbage::Bytes(bytes));
    }
    // SAFETY: `Flow` is `repr(C)` and has these five words (asserted below). Its first bytes are
    // those of `head`, little-endian: a stage that `from_number` accepts, a direction and a bool
    // that are 0 or 1, and a reserved byte that is 0. Every other field may have any bits.
    // Decoding each field took a third of the consumer's instructions.
    Ok(unsafe {
        core::mem::transmute::<[u64; 5], Flow>([head, bytes, batch, request, deadline_ns])
    })
}

/// Decodes the tag and the bytes of a completion.
#[inline(always)]
pub(crate) fn decode_completed(descriptor: &Descriptor) -> Result<(u64, u64), Garbage> {
    let [head, bytes, tag, request, deadline_ns, _] = descriptor.0;
    if head | request | deadline_ns == 0 {
        Ok((tag, bytes))
    } else {
        Err(Garbage::Reserved(OP_COMPLETED))
    }
}

const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<Flow>() == 40 && cfg!(target_endian = "little"));
    assert!(offset_of!(Flow, stage) == 0 && offset_of!(Flow, direction) == 1);
    assert!(offset_of!(Flow, nic) == 2 && offset_of!(Flow, reserved) == 3);
    assert!(offset_of!(Flow, layer) == 4);
    assert!(offset_of!(Flow, whole) == 6 && offset_of!(Flow, peer) == 7);
    assert!(offset_of!(Flow, bytes) == 8);
    assert!(offset_of!(Flow, batch) == 16 && offset_of!(Flow, request) == 24);
    assert!(offset_of!(Flow, deadline_ns) == 32);
};

impl Record {
    /// Encodes the record as words, with `next` zero. [`Record::decode`] refuses a flow with more
    /// than [`FLOW_BYTES_MAX`] bytes, so the client bypasses such a flow.
    #[inline]
    pub const fn encode(&self) -> Descriptor {
        match *self {
            Self::Submit(ref flow) => encode_flow(OP_SUBMIT, flow),
            Self::SubmitOnCredit { ref flow, observed: false } => encode_flow(OP_CREDIT, flow),
            Self::SubmitOnCredit { ref flow, observed: true } => encode_flow(OP_OBSERVED, flow),
            Self::Completed { tag, bytes } => simple(OP_COMPLETED, 0, [bytes, tag, 0, 0]),
            Self::Cancelled { tag, permitted } => simple(OP_CANCELLED, 0, [permitted, tag, 0, 0]),
            Self::LaneReset => simple(OP_LANE_RESET, 0, [0; 4]),
            Self::Hint(hint) => hint.encode(),
            Self::Peer { peer, address } => {
                let address = u128::from_le_bytes(address);
                let halves = [address as u64, (address >> 64) as u64];
                simple(OP_PEER, peer as u16, [halves[0], halves[1], 0, 0])
            }
        }
    }

    /// Decodes words that another process wrote. The lane reads `next` itself.
    ///
    /// # Errors
    /// [`Garbage`] says what is wrong. Release the client.
    #[inline(always)]
    pub fn decode(descriptor: &Descriptor) -> Result<Self, Garbage> {
        match descriptor.opcode() {
            OP_SUBMIT => Ok(Self::Submit(decode_flow(descriptor)?)),
            OP_CREDIT => {
                Ok(Self::SubmitOnCredit { flow: decode_flow(descriptor)?, observed: false })
            }
            OP_OBSERVED => {
                Ok(Self::SubmitOnCredit { flow: decode_flow(descriptor)?, observed: true })
            }
            OP_COMPLETED => {
                let (tag, bytes) = decode_completed(descriptor)?;
                Ok(Self::Completed { tag, bytes })
            }
            opcode => Self::decode_rare(opcode, descriptor),
        }
    }

    /// Decodes the infrequent records.
    #[cold]
    pub(crate) fn decode_rare(opcode: u32, descriptor: &Descriptor) -> Result<Self, Garbage> {
        let [head, bytes, batch, ..] = descriptor.0;
        let record = match opcode {
            OP_CANCELLED => Self::Cancelled { tag: batch, permitted: bytes },
            OP_LANE_RESET => Self::LaneReset,
            OP_PEER => Self::Peer {
                peer: (head >> 32) as u8,
                address: (u128::from(bytes) | u128::from(batch) << 64).to_le_bytes(),
            },
            other => Self::Hint(Hint::decode(other, descriptor).ok_or(Garbage::Opcode(other))?),
        };
        // One encoding per record: all unused bits must be zero.
        if record.encode() != descriptor.with_next(0) {
            return Err(Garbage::Reserved(opcode));
        }
        Ok(record)
    }
}

/// Encodes a record without a flow.
#[inline]
pub(crate) const fn simple(opcode: u32, layer: u16, words: [u64; 4]) -> Descriptor {
    let [a, b, c, d] = words;
    Descriptor([(layer as u64) << 32, a, b, c, d, tail(opcode, 0)])
}
