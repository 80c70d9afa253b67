//! The protocol of a group's control connections: a hello, then frames. All of it comes from
//! another host, so every value is checked.
//!
//! | bytes of a head | |
//! |---|---|
//! | 0 | 1 exchange, 2 put, 3 signal, 4 get, 5 reply, 6 bye |
//! | 4–7 | number of the region |
//! | 8–15 | offset in the receiver's part of the region |
//! | 16–23 | bytes of data; the value that a signal adds |
//! | 24–31 | number of the exchange or of the get |
//!
//! The data of an exchange, a put or a reply follow their head.

use crate::handle::{VERSION, check_hello, word};

pub const HEAD_BYTES: usize = 32;
pub const HELLO_BYTES: usize = 32;
/// Largest contribution to an exchange, in bytes. Queue pairs need 48 for each rank, so this does
/// for more ranks than a group has. At most three contributions of a peer are in memory.
pub(super) const EXCHANGE_BYTES_MAX: u64 = 1 << 20;

const HELLO_MAGIC: [u8; 8] = *b"LAXRMA\r\n";

/// The first bytes of a control connection, from the rank that connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RmaHello {
    /// The nonce of the listener's handle. A stranger doesn't have it.
    pub nonce: u64,
    pub rank: u32,
    pub ranks: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A rank's contribution to an exchange.
    Exchange {
        number: u64,
        bytes: u64,
    },
    Put {
        region: u32,
        offset: u64,
        bytes: u64,
    },
    Signal {
        region: u32,
        offset: u64,
        value: u64,
    },
    Get {
        region: u32,
        offset: u64,
        bytes: u64,
        number: u64,
    },
    /// The data of a get.
    Reply {
        number: u64,
        bytes: u64,
    },
    /// The rank closes its group. Nothing follows.
    Bye,
}

impl RmaHello {
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&HELLO_MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.rank.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.ranks.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.nonce.to_le_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, String> {
        check_hello(bytes, HELLO_MAGIC)?;
        Ok(Self {
            rank: u32::from_le_bytes(word(bytes, 12)),
            ranks: u32::from_le_bytes(word(bytes, 16)),
            nonce: u64::from_le_bytes(word(bytes, 24)),
        })
    }
}

impl Frame {
    pub fn encode(&self) -> [u8; HEAD_BYTES] {
        let (kind, region, offset, bytes, number) = match *self {
            Self::Exchange { number, bytes } => (1, 0, 0, bytes, number),
            Self::Put { region, offset, bytes } => (2, region, offset, bytes, 0),
            Self::Signal { region, offset, value } => (3, region, offset, value, 0),
            Self::Get { region, offset, bytes, number } => (4, region, offset, bytes, number),
            Self::Reply { number, bytes } => (5, 0, 0, bytes, number),
            Self::Bye => (6, 0, 0, 0, 0),
        };
        let mut head = [0; HEAD_BYTES];
        head[0] = kind;
        head[4..8].copy_from_slice(&region.to_le_bytes());
        head[8..16].copy_from_slice(&offset.to_le_bytes());
        head[16..24].copy_from_slice(&bytes.to_le_bytes());
        head[24..32].copy_from_slice(&number.to_le_bytes());
        head
    }

    pub fn decode(head: &[u8; HEAD_BYTES]) -> Result<Self, String> {
        let region = u32::from_le_bytes(word(head, 4));
        let [offset, bytes, number] = [8, 16, 24].map(|at| u64::from_le_bytes(word(head, at)));
        Ok(match head[0] {
            1 if bytes <= EXCHANGE_BYTES_MAX => Self::Exchange { number, bytes },
            1 => return Err(format!("an exchange of {bytes} bytes")),
            2 => Self::Put { region, offset, bytes },
            3 => Self::Signal { region, offset, value: bytes },
            4 => Self::Get { region, offset, bytes, number },
            5 => Self::Reply { number, bytes },
            6 => Self::Bye,
            kind => return Err(format!("a frame of kind {kind}")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_come_back_as_they_were(
            region: u32, offset: u64, bytes: u64, number: u64, size in 0..=EXCHANGE_BYTES_MAX,
        ) {
            for frame in [
                Frame::Exchange { number, bytes: size },
                Frame::Put { region, offset, bytes },
                Frame::Signal { region, offset, value: bytes },
                Frame::Get { region, offset, bytes, number },
                Frame::Reply { number, bytes },
                Frame::Bye,
            ] {
                prop_assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
            }
        }

        #[test]
        fn hellos_come_back_and_anything_else_is_refused(
            nonce: u64, rank: u32, ranks: u32, at in 0..10_usize, bits in 1..=255_u8,
        ) {
            let hello = RmaHello { nonce, rank, ranks };
            let mut bytes = hello.encode();
            prop_assert_eq!(RmaHello::decode(&bytes), Ok(hello));
            bytes[at] ^= bits;
            prop_assert!(RmaHello::decode(&bytes).is_err());
        }

        #[test]
        fn arbitrary_heads_never_panic_and_announce_no_large_exchange(
            bytes in prop::array::uniform32(any::<u8>()),
        ) {
            if let Ok(Frame::Exchange { bytes, .. }) = Frame::decode(&bytes) {
                prop_assert!(bytes <= EXCHANGE_BYTES_MAX);
            }
        }
    }
}
