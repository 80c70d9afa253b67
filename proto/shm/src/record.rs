//! What a client tells the daemon: one [`Record`] per slot, encoded in 56 bytes.
//!
//! The encoding is seven little-endian words. Word 0 holds the small fields, and sixteen bits
//! that belong to the lane and not to the record: `next`, the slot where the next record of this
//! lane will appear (see [`crate::lane`]). Everything is untrusted when the daemon reads it:
//! [`Record::decode`] accepts a word array only if encoding the result gives it back, apart from
//! `next`, so there is one encoding of each record and no field without meaning.

use core::fmt;

use crate::permit::FLOW_BYTES_MAX;

/// What a flow is for. The numbers are those of `laxity_policy::Stage`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Stage {
    /// Stage 1: fetch of reusable KV-cache blocks.
    KvReuse = 1,
    /// Stage 2: a collective inside a layer.
    Collective = 2,
    /// Stage 3: prefill-to-decode transfer of a layer's KV cache.
    P2d = 3,
    /// Model weights of a scale-out.
    Weights = 4,
    /// Anything else.
    #[default]
    Background = 5,
}

impl Stage {
    /// The stage of a wire number, `None` if it names none.
    #[must_use]
    pub const fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::KvReuse,
            2 => Self::Collective,
            3 => Self::P2d,
            4 => Self::Weights,
            5 => Self::Background,
            _ => return None,
        })
    }

    /// This stage's bit in [`crate::layout::Header::credit_stages`].
    #[must_use]
    pub const fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// Which way through the NIC the bytes go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Direction {
    /// Out of this host.
    #[default]
    Egress = 0,
    /// Into this host.
    Ingress = 1,
}

/// The metadata of one transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flow {
    /// What it is for.
    pub stage: Stage,
    /// Which way it goes.
    pub direction: Direction,
    /// Which NIC, an index into the daemon's configuration.
    pub nic: u8,
    /// The layer that consumes (stages 1, 2) or produced (stage 3) the bytes.
    pub layer: u16,
    /// Bytes to move, at most [`FLOW_BYTES_MAX`].
    pub bytes: u64,
    /// The batch, 0 if unknown.
    pub batch: u64,
    /// The request, 0 if unknown or all of the batch.
    pub request: u64,
    /// Deadline, absolute CLOCK_MONOTONIC nanoseconds; 0 if there is none.
    pub deadline_ns: u64,
    /// The receiving side, not this port, is the bottleneck.
    pub receiver_bound: bool,
}

impl Flow {
    /// Which of the lane's credit counters this flow draws on, `None` if it has none.
    #[inline]
    #[must_use]
    pub const fn credit_port(&self) -> Option<usize> {
        let port = ((self.nic as usize) << 1) | self.direction as usize;
        if port < crate::layout::CREDIT_PORTS {
            Some(port)
        } else {
            None
        }
    }
}

/// One message from client to daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// A flow wants to send; it holds its slot until the last permit. Its tag is the sequence of
    /// this record in its lane.
    Submit(Flow),
    /// A flow was granted by the client itself: on credit, or (`observed`) because the mode is
    /// `observe`. Its tag is the sequence of this record.
    SubmitOnCredit {
        /// The flow.
        flow: Flow,
        /// Not drawn from credit: the client runs in `observe` mode.
        observed: bool,
    },
    /// `bytes` of the flow `tag` have left the wire.
    Completed {
        /// Sequence of the record that submitted the flow.
        tag: u64,
        /// Bytes more.
        bytes: u64,
    },
    /// The flow is withdrawn: whatever was not granted before, the client does not await. The
    /// slot is the client's once this record is consumed.
    Cancelled {
        /// Sequence of the record that submitted the flow.
        tag: u64,
        /// Bytes of it that the client put on the wire with the daemon's leave.
        granted: u64,
    },
    /// The lane's owner is gone: every flow of this lane is withdrawn.
    LaneReset,
    /// A batch was formed.
    BatchBegin {
        /// Which.
        batch: u64,
        /// Layers of the model.
        layers: u16,
        /// Expected time of a layer without contention, 0 if unknown.
        layer_time_ns: u64,
    },
    /// A request is a member of a batch.
    RequestJoin {
        /// Which batch.
        batch: u64,
        /// Which request.
        request: u64,
        /// When its first token is due, absolute CLOCK_MONOTONIC nanoseconds; 0 if unknown.
        deadline_ns: u64,
        /// Bytes that it will move, 0 if unknown.
        bytes: u64,
    },
    /// The request has its first token, or was aborted.
    RequestEnd {
        /// Which.
        request: u64,
    },
    /// `batch` waits behind `ahead`.
    BatchQueued {
        /// The one that waits.
        batch: u64,
        /// The one that runs.
        ahead: u64,
    },
    /// `batch` now computes `layer`.
    LayerBegin {
        /// Which batch.
        batch: u64,
        /// Which layer.
        layer: u16,
    },
    /// `batch` has computed its last layer.
    ComputeEnd {
        /// Which batch.
        batch: u64,
    },
    /// Nothing of `batch` is left.
    BatchEnd {
        /// Which batch.
        batch: u64,
    },
}

/// A descriptor that encodes no record. The daemon should detach the client: its memory is
/// corrupt, or it speaks another version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Garbage {
    /// No such operation.
    #[error("record has unknown opcode {0}: the client is corrupt or of another version")]
    Opcode(u8),
    /// No such stage.
    #[error("record has unknown stage {0}")]
    Stage(u8),
    /// Bits or words are set that this record has no use for.
    #[error("record of opcode {0} has bits set that it does not define")]
    Reserved(u8),
    /// More bytes than a permit can count.
    #[error("flow of {0} bytes is larger than a permit can count")]
    Bytes(u64),
    /// `next` lies outside the lane, or names a slot that is in use.
    #[error("record chains to slot {0}, which does not exist or is in use")]
    Next(u16),
    /// More was sent on credit than was granted.
    #[error("client overdrew its credit by {0} bytes")]
    Overdraft(u64),
}

const OP_SUBMIT: u8 = 1;
const OP_CREDIT: u8 = 2;
const OP_COMPLETED: u8 = 3;
const OP_CANCELLED: u8 = 4;
const OP_LANE_RESET: u8 = 5;
const OP_BATCH_BEGIN: u8 = 16;
const OP_REQUEST_JOIN: u8 = 17;
const OP_REQUEST_END: u8 = 18;
const OP_BATCH_QUEUED: u8 = 19;
const OP_LAYER_BEGIN: u8 = 20;
const OP_COMPUTE_END: u8 = 21;
const OP_BATCH_END: u8 = 22;

const FLAG_INGRESS: u8 = 1;
const FLAG_RECEIVER_BOUND: u8 = 2;
const FLAG_OBSERVED: u8 = 4;

/// Words of a descriptor.
pub const WORDS: usize = 7;

/// A record as it lies in a slot: 56 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Descriptor(pub [u64; WORDS]);

const _: () = assert!(size_of::<Descriptor>() == 56);

impl Descriptor {
    /// Word 0 is `next (16) | layer (16) | nic (8) | flags (8) | stage (8) | opcode (8)`.
    #[inline]
    const fn head(opcode: u8, stage: u8, flags: u8, nic: u8, layer: u16) -> u64 {
        opcode as u64
            | (stage as u64) << 8
            | (flags as u64) << 16
            | (nic as u64) << 24
            | (layer as u64) << 32
    }

    /// The slot where the next record of the lane will be.
    #[inline]
    #[must_use]
    pub const fn next(&self) -> u16 {
        (self.0[0] >> 48) as u16
    }

    /// Sets the slot where the next record of the lane will be.
    #[inline]
    #[must_use]
    pub const fn with_next(mut self, next: u16) -> Self {
        self.0[0] = (self.0[0] & 0x0000_ffff_ffff_ffff) | (next as u64) << 48;
        self
    }
}

#[inline]
fn encode_flow(opcode: u8, extra: u8, flow: &Flow) -> Descriptor {
    let flags = extra
        | if flow.direction as u8 != 0 {
            FLAG_INGRESS
        } else {
            0
        }
        | if flow.receiver_bound {
            FLAG_RECEIVER_BOUND
        } else {
            0
        };
    let head = Descriptor::head(opcode, flow.stage as u8, flags, flow.nic, flow.layer);
    Descriptor([
        head,
        flow.bytes,
        flow.batch,
        flow.request,
        flow.deadline_ns,
        0,
        0,
    ])
}

impl Record {
    /// The record as 56 bytes, `next` zero. A flow with more than [`FLOW_BYTES_MAX`] bytes
    /// encodes to something that [`Record::decode`] refuses; the client splits or bypasses it.
    #[inline]
    #[must_use]
    pub fn encode(&self) -> Descriptor {
        let simple = |op, layer, words: [u64; 4]| {
            let [a, b, c, d] = words;
            Descriptor([Descriptor::head(op, 0, 0, 0, layer), a, b, c, d, 0, 0])
        };
        match *self {
            Self::Submit(ref flow) => encode_flow(OP_SUBMIT, 0, flow),
            Self::SubmitOnCredit { ref flow, observed } => {
                encode_flow(OP_CREDIT, if observed { FLAG_OBSERVED } else { 0 }, flow)
            }
            Self::Completed { tag, bytes } => simple(OP_COMPLETED, 0, [bytes, tag, 0, 0]),
            Self::Cancelled { tag, granted } => simple(OP_CANCELLED, 0, [granted, tag, 0, 0]),
            Self::LaneReset => simple(OP_LANE_RESET, 0, [0; 4]),
            Self::BatchBegin {
                batch,
                layers,
                layer_time_ns,
            } => simple(OP_BATCH_BEGIN, layers, [layer_time_ns, batch, 0, 0]),
            Self::RequestJoin {
                batch,
                request,
                deadline_ns,
                bytes,
            } => simple(OP_REQUEST_JOIN, 0, [bytes, batch, request, deadline_ns]),
            Self::RequestEnd { request } => simple(OP_REQUEST_END, 0, [0, 0, request, 0]),
            Self::BatchQueued { batch, ahead } => simple(OP_BATCH_QUEUED, 0, [ahead, batch, 0, 0]),
            Self::LayerBegin { batch, layer } => simple(OP_LAYER_BEGIN, layer, [0, batch, 0, 0]),
            Self::ComputeEnd { batch } => simple(OP_COMPUTE_END, 0, [0, batch, 0, 0]),
            Self::BatchEnd { batch } => simple(OP_BATCH_END, 0, [0, batch, 0, 0]),
        }
    }

    /// Reads a descriptor that another process wrote; `next` is left to the lane.
    ///
    /// # Errors
    /// [`Garbage`] says what is wrong. Detach the client.
    #[inline]
    pub fn decode(descriptor: &Descriptor) -> Result<Self, Garbage> {
        let [head, bytes, batch, request, deadline_ns, w5, w6] = descriptor.0;
        let opcode = head as u8;
        let stage = (head >> 8) as u8;
        let flags = (head >> 16) as u8;
        let nic = (head >> 24) as u8;
        let layer = (head >> 32) as u16;
        if w5 | w6 != 0 {
            return Err(Garbage::Reserved(opcode));
        }
        if opcode == OP_SUBMIT || opcode == OP_CREDIT {
            let known = FLAG_INGRESS
                | FLAG_RECEIVER_BOUND
                | if opcode == OP_CREDIT {
                    FLAG_OBSERVED
                } else {
                    0
                };
            if flags & !known != 0 {
                return Err(Garbage::Reserved(opcode));
            }
            if bytes > FLOW_BYTES_MAX {
                return Err(Garbage::Bytes(bytes));
            }
            let stage = Stage::from_number(stage).ok_or(Garbage::Stage(stage))?;
            let direction = if flags & FLAG_INGRESS != 0 {
                Direction::Ingress
            } else {
                Direction::Egress
            };
            let receiver_bound = flags & FLAG_RECEIVER_BOUND != 0;
            let flow = Flow {
                stage,
                direction,
                nic,
                layer,
                bytes,
                batch,
                request,
                deadline_ns,
                receiver_bound,
            };
            return Ok(if opcode == OP_SUBMIT {
                Self::Submit(flow)
            } else {
                Self::SubmitOnCredit {
                    flow,
                    observed: flags & FLAG_OBSERVED != 0,
                }
            });
        }
        let record = match opcode {
            OP_COMPLETED => Self::Completed { tag: batch, bytes },
            OP_CANCELLED => Self::Cancelled {
                tag: batch,
                granted: bytes,
            },
            OP_LANE_RESET => Self::LaneReset,
            OP_BATCH_BEGIN => Self::BatchBegin {
                batch,
                layers: layer,
                layer_time_ns: bytes,
            },
            OP_REQUEST_JOIN => Self::RequestJoin {
                batch,
                request,
                deadline_ns,
                bytes,
            },
            OP_REQUEST_END => Self::RequestEnd { request },
            OP_BATCH_QUEUED => Self::BatchQueued {
                batch,
                ahead: bytes,
            },
            OP_LAYER_BEGIN => Self::LayerBegin { batch, layer },
            OP_COMPUTE_END => Self::ComputeEnd { batch },
            OP_BATCH_END => Self::BatchEnd { batch },
            other => return Err(Garbage::Opcode(other)),
        };
        // One encoding per record: whatever this record does not use must be zero.
        if record.encode() != descriptor.with_next(0) {
            return Err(Garbage::Reserved(opcode));
        }
        Ok(record)
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::KvReuse => "kv_reuse",
            Self::Collective => "collective",
            Self::P2d => "p2d",
            Self::Weights => "weights",
            Self::Background => "background",
        })
    }
}
