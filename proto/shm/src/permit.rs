//! The state word of a slot: the client's announcement of a record, or the daemon's permit.
//!
//! ```text
//! bit 63      60 59       52 51                     0
//!    |     0    |     sequence of the record (60)    |   published, by the client
//!    |  1 or 2  | level (8) | cumulative bytes (52)  |   permitted, by the daemon; 2 is the last
//! ```
//!
//! The daemon answers in the word that announced the record, so that one cache line serves both
//! directions (measured: 207 ns against 290 with a separate line for the permit). 52 bits count 4
//! PiB, so a permit counts single bytes. The count is cumulative: a client that reads late, or
//! twice, still uses each byte once.

const PAYLOAD_BITS: u32 = 52;
const LEVEL_SHIFT: u32 = PAYLOAD_BITS;
/// Lowest bit of the kind.
const KIND_SHIFT: u32 = 60;
const PAYLOAD_MASK: u64 = (1 << PAYLOAD_BITS) - 1;

const PUBLISHED: u64 = 0;
const PERMIT: u64 = 1;
const PERMIT_LAST: u64 = 2;

/// Maximum number of bytes of one flow, 4 PiB − 1.
pub const FLOW_BYTES_MAX: u64 = PAYLOAD_MASK;

/// The meaning of a state word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotState {
    /// The slot was never used.
    Empty,
    /// The slot has a record with this sequence. Nothing is permitted.
    Published(u64),
    /// The flow may send `cumulative` bytes in all.
    Permit {
        /// Bytes permitted so far, over the life of the flow.
        cumulative: u64,
        /// Level of this permit: 1 is the highest, 255 the scavenger.
        level: u8,
        /// Whether no further permit follows. The slot then belongs to the client again.
        last: bool,
    },
    /// Neither side writes such a word.
    Invalid,
}

/// Returns the word that announces the record with sequence `seq`. It is the sequence, which starts
/// at 1 and stays below 2^60 for 365 years at 100 million records a second.
#[inline]
pub const fn published(seq: u64) -> u64 {
    seq
}

/// Returns the word that permits `cumulative` bytes, capped at [`FLOW_BYTES_MAX`].
#[inline]
pub const fn permit(cumulative: u64, level: u8, last: bool) -> u64 {
    let bytes = if cumulative > PAYLOAD_MASK { PAYLOAD_MASK } else { cumulative };
    let kind = if last { PERMIT_LAST } else { PERMIT };
    (kind << KIND_SHIFT) | ((level as u64) << LEVEL_SHIFT) | bytes
}

/// Decodes a word. A word of no known form is [`SlotState::Invalid`].
#[inline]
pub const fn decode(word: u64) -> SlotState {
    let payload = word & PAYLOAD_MASK;
    let level = (word >> LEVEL_SHIFT) as u8;
    match word >> KIND_SHIFT {
        PUBLISHED if word == 0 => SlotState::Empty,
        PUBLISHED => SlotState::Published(word),
        PERMIT => SlotState::Permit { cumulative: payload, level, last: false },
        PERMIT_LAST => SlotState::Permit { cumulative: payload, level, last: true },
        _ => SlotState::Invalid,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_word_that_was_never_written_is_empty() {
        assert_eq!(decode(0), SlotState::Empty);
    }

    proptest! {
        #[test]
        fn a_permit_reads_back(cumulative in 0..=FLOW_BYTES_MAX, level: u8, last: bool) {
            prop_assert_eq!(
                decode(permit(cumulative, level, last)),
                SlotState::Permit { cumulative, level, last }
            );
        }

        #[test]
        fn a_sequence_reads_back(seq in 1_u64..1 << 60) {
            prop_assert_eq!(decode(published(seq)), SlotState::Published(seq));
        }

        #[test]
        fn any_word_decodes_and_only_written_forms_are_valid(word: u64) {
            match decode(word) {
                SlotState::Empty => prop_assert_eq!(word, 0),
                SlotState::Published(seq) => prop_assert_eq!(word, published(seq)),
                SlotState::Permit { cumulative, level, last } =>
                    prop_assert_eq!(word, permit(cumulative, level, last)),
                SlotState::Invalid => {}
            }
        }
    }
}
