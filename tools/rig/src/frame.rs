//! How a flow's bytes travel on a data connection: frames of a 64-byte head and a payload whose
//! every byte is known from the flow and the offset, so that the receiver can prove that it got
//! all of them, unchanged, in order and once.
//!
//! The payload of a flow is a window into one fixed pseudo-random block, so that sending copies
//! nothing in user space and verifying is one comparison of memory.

use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

/// Bytes of a frame's head.
pub const HEAD_BYTES: usize = 64;

/// Most payload bytes of a frame.
pub const PAYLOAD_BYTES_MAX: usize = 64 << 10;

const MAGIC: u32 = 0x4c58_4631;

/// What a flow is to the model. The receiver acts on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum Kind {
    /// Reused KV of one request and layer, from the holder's rank to the unit's.
    KvReuse = 1,
    /// Dispatch of an all-to-all.
    Dispatch = 2,
    /// Combine of an all-to-all.
    Combine = 3,
    /// KV of one request and layer, to the decode host.
    P2d = 4,
}

impl Kind {
    /// Of stage 2.
    #[must_use]
    pub const fn is_collective(self) -> bool {
        matches!(self, Self::Dispatch | Self::Combine)
    }

    fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::KvReuse,
            2 => Self::Dispatch,
            3 => Self::Combine,
            4 => Self::P2d,
            _ => return None,
        })
    }
}

/// The head of a frame: which bytes of which flow follow, and what the flow is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// Unique among all flows of a run; the host that submitted it is in the upper bits
    /// ([`Head::owner`]).
    pub flow: u64,
    /// Place of the payload in the flow.
    pub offset: u64,
    /// Bytes of the whole flow.
    pub total: u64,
    /// Bytes that follow.
    pub len: u32,
    /// What the flow is.
    pub kind: Kind,
    /// Layer.
    pub layer: u16,
    /// Batch, 0 if none.
    pub batch: u64,
    /// Request, 0 if none.
    pub request: u64,
    /// Sending host.
    pub from: u16,
}

impl Head {
    /// The name of the `number`th flow that a host submits.
    #[must_use]
    pub const fn name(host: usize, number: u64) -> u64 {
        (host as u64 + 1) << 48 | number
    }

    /// The host that submitted the flow: the one that sends it or, of a read, the one that receives
    /// it.
    #[must_use]
    pub const fn owner(&self) -> usize {
        (self.flow >> 48).saturating_sub(1) as usize
    }

    /// The head as bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.len.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.flow.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.total.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.batch.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.request.to_le_bytes());
        bytes[48..50].copy_from_slice(&self.layer.to_le_bytes());
        bytes[50..52].copy_from_slice(&self.from.to_le_bytes());
        bytes[52] = self.kind as u8;
        bytes
    }

    /// Reads a head; `None` if it is none, after which nothing on the connection can be trusted.
    #[must_use]
    pub fn decode(bytes: &[u8; HEAD_BYTES]) -> Option<Self> {
        let u16_at = |i: usize| u16::from_le_bytes([bytes[i], bytes[i + 1]]);
        let u32_at = |i: usize| u32::from(u16_at(i)) | u32::from(u16_at(i + 2)) << 16;
        let u64_at = |i: usize| u64::from(u32_at(i)) | u64::from(u32_at(i + 4)) << 32;
        let head = Self {
            flow: u64_at(8),
            offset: u64_at(16),
            total: u64_at(24),
            len: u32_at(4),
            kind: Kind::from_number(bytes[52])?,
            layer: u16_at(48),
            batch: u64_at(32),
            request: u64_at(40),
            from: u16_at(50),
        };
        let fits = head.len as usize <= PAYLOAD_BYTES_MAX
            && head.offset.checked_add(u64::from(head.len))? <= head.total;
        (u32_at(0) == MAGIC && fits).then_some(head)
    }
}

/// Period of the payload pattern, bytes. Not a power of two, so that a shift by a chunk or a page
/// cannot go unseen.
const PERIOD: u64 = (256 << 10) - 5;

static BLOCK: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    let mut block: Vec<u8> = (0..PERIOD).map(|_| next()).collect();
    block.extend_from_within(..PAYLOAD_BYTES_MAX);
    block
});

/// The payload of `flow` at `offset`, `len` bytes of at most [`PAYLOAD_BYTES_MAX`].
#[must_use]
pub fn payload(flow: u64, offset: u64, len: usize) -> &'static [u8] {
    let start = (flow.wrapping_mul(0x9e37_79b9) % PERIOD + offset % PERIOD) % PERIOD;
    &BLOCK[start as usize..][..len]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head() -> Head {
        Head {
            flow: 0x0003_0000_0000_0007,
            offset: 64 << 10,
            total: 200_000,
            len: 30_000,
            kind: Kind::Combine,
            layer: 7,
            batch: 2_000_001,
            request: 0,
            from: 3,
        }
    }

    #[test]
    fn a_head_survives_the_wire() {
        assert_eq!(Head::decode(&head().encode()), Some(head()));
    }

    #[test]
    fn a_head_that_makes_no_sense_is_refused() {
        let damage = |at: usize, with: u8| {
            let mut bytes = head().encode();
            bytes[at] = with;
            Head::decode(&bytes)
        };
        assert_eq!(damage(0, 0), None, "magic");
        assert_eq!(damage(52, 9), None, "kind");
        assert_eq!(damage(7, 1), None, "more payload than a frame may have");
        assert_eq!(damage(18, 4), None, "payload beyond the end of the flow");
    }

    proptest! {
        #[test]
        fn chunks_of_a_flow_join_into_the_same_bytes_however_it_is_cut(
            flow in any::<u64>(),
            offset in 0..10_000_000_u64,
            cut in 0..60_000_usize,
        ) {
            let whole = payload(flow, offset, 60_000);
            let (a, b) = (payload(flow, offset, cut), payload(flow, offset + cut as u64, 60_000 - cut));
            prop_assert_eq!(whole, [a, b].concat());
        }

        #[test]
        fn any_64_bytes_decode_or_are_refused_without_panic(bytes in any::<[u8; 64]>()) {
            let _ = Head::decode(&bytes);
        }
    }

    #[test]
    fn neighbouring_flows_and_offsets_have_different_bytes() {
        assert_ne!(payload(1, 0, 64), payload(2, 0, 64));
        assert_ne!(payload(1, 0, 64), payload(1, 32 << 10, 64));
    }
}
