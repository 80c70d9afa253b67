//! Hints of the inference engine, which the transfer library doesn't have, and their encoding.

use crate::record::{Descriptor, simple};

const OP_BATCH_BEGIN: u32 = 16;
const OP_REQUEST_JOIN: u32 = 17;
const OP_REQUEST_END: u32 = 18;
const OP_BATCH_QUEUED: u32 = 19;
const OP_LAYER_BEGIN: u32 = 20;
const OP_COMPUTE_END: u32 = 21;
const OP_BATCH_END: u32 = 22;
// 23 is a record that is no hint.
const OP_REQUEST_TRACE: u32 = 24;

/// A hint. Ids are the application's own. In a flow, the id 0 means "unknown". The client library
/// sends no hint with that id, though decoding accepts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants say what their fields are")]
pub enum Hint {
    /// A batch was formed.
    BatchBegin {
        batch: u64,
        layers: u16,
        /// Expected time of a layer without contention, in nanoseconds. 0 if unknown.
        layer_time_ns: u64,
    },
    /// A request is a member of a batch.
    RequestJoin {
        batch: u64,
        request: u64,
        /// Deadline of the first token in CLOCK_MONOTONIC nanoseconds. 0 if unknown.
        deadline_ns: u64,
        /// Number of bytes that the request will move. 0 if unknown.
        bytes: u64,
    },
    /// A request has its first token, or was aborted.
    RequestEnd { request: u64 },
    /// The trace of a request at its engine.
    RequestTrace {
        request: u64,
        /// The trace's id, its upper half first.
        trace: [u64; 2],
        /// The id of the span that called the engine.
        span: u64,
    },
    /// A batch waits until another one has run.
    BatchQueued { batch: u64, ahead: u64 },
    /// A batch begins to compute a layer.
    LayerBegin { batch: u64, layer: u16 },
    /// A batch has computed its last layer.
    ComputeEnd { batch: u64 },
    /// A batch has ended: it has neither layers nor transfers left.
    BatchEnd { batch: u64 },
}

impl Hint {
    /// Returns the hint of a request's `traceparent` header (W3C Trace Context, §3.2), or `None` if
    /// the header is invalid.
    #[must_use]
    pub fn of_traceparent(request: u64, header: &str) -> Option<Self> {
        let mut parts = header.trim().split('-');
        let mut part = |length: usize| {
            let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
            parts.next().filter(|part| part.len() == length && part.bytes().all(is_digit))
        };
        let (version, trace, span, _flags) = (part(2)?, part(32)?, part(16)?, part(2)?);
        let trace = u128::from_str_radix(trace, 16).ok().filter(|id| *id != 0)?;
        let span = u64::from_str_radix(span, 16).ok().filter(|id| *id != 0)?;
        // Later versions may have more parts. Version 255 is none.
        let is_valid = version != "ff" && (version != "00" || parts.next().is_none());
        let trace = [(trace >> 64) as u64, trace as u64];
        is_valid.then_some(Self::RequestTrace { request, trace, span })
    }

    /// Returns the ids of the hint's requests and batches. A hint with one id returns it twice.
    #[must_use]
    pub const fn ids(self) -> [u64; 2] {
        match self {
            Self::RequestJoin { batch, request, .. } => [batch, request],
            Self::BatchQueued { batch, ahead } => [batch, ahead],
            Self::RequestEnd { request } | Self::RequestTrace { request, .. } => [request; 2],
            Self::BatchBegin { batch, .. }
            | Self::LayerBegin { batch, .. }
            | Self::ComputeEnd { batch }
            | Self::BatchEnd { batch } => [batch; 2],
        }
    }

    #[inline]
    pub(crate) const fn encode(self) -> Descriptor {
        match self {
            Self::BatchBegin { batch, layers, layer_time_ns } => {
                simple(OP_BATCH_BEGIN, layers, [layer_time_ns, batch, 0, 0])
            }
            Self::RequestJoin { batch, request, deadline_ns, bytes } => {
                simple(OP_REQUEST_JOIN, 0, [bytes, batch, request, deadline_ns])
            }
            Self::RequestEnd { request } => simple(OP_REQUEST_END, 0, [0, 0, request, 0]),
            Self::RequestTrace { request, trace: [high, low], span } => {
                simple(OP_REQUEST_TRACE, 0, [high, low, request, span])
            }
            Self::BatchQueued { batch, ahead } => simple(OP_BATCH_QUEUED, 0, [ahead, batch, 0, 0]),
            Self::LayerBegin { batch, layer } => simple(OP_LAYER_BEGIN, layer, [0, batch, 0, 0]),
            Self::ComputeEnd { batch } => simple(OP_COMPUTE_END, 0, [0, batch, 0, 0]),
            Self::BatchEnd { batch } => simple(OP_BATCH_END, 0, [0, batch, 0, 0]),
        }
    }

    /// Decodes the words of a hint, or returns `None` if the opcode is that of no hint.
    /// `Record::decode_rare` checks that all other bits are zero.
    pub(crate) fn decode(opcode: u32, descriptor: &Descriptor) -> Option<Self> {
        let [head, bytes, batch, request, deadline_ns, _] = descriptor.0;
        let layer = (head >> 32) as u16;
        Some(match opcode {
            OP_BATCH_BEGIN => Self::BatchBegin { batch, layers: layer, layer_time_ns: bytes },
            OP_REQUEST_JOIN => Self::RequestJoin { batch, request, deadline_ns, bytes },
            OP_REQUEST_END => Self::RequestEnd { request },
            OP_REQUEST_TRACE => {
                Self::RequestTrace { request, trace: [bytes, batch], span: deadline_ns }
            }
            OP_BATCH_QUEUED => Self::BatchQueued { batch, ahead: bytes },
            OP_LAYER_BEGIN => Self::LayerBegin { batch, layer },
            OP_COMPUTE_END => Self::ComputeEnd { batch },
            OP_BATCH_END => Self::BatchEnd { batch },
            _ => return None,
        })
    }
}
