//! The protocol on the sockets: a hello on each, then frames. All of it comes from another host, so
//! every value is checked.
//!
//! A frame is a head of 40 bytes and a part of a message. The parts of one message may use several
//! sockets of one class. A socket's frames are in the order of their messages. In the other
//! direction, the first socket carries the number of buffers posted so far.
//!
//! | bytes of a head | |
//! |---|---|
//! | 0 | 1: part of a message; 2: buffers posted, with nothing after the head |
//! | 8–15 | number of the message; number of buffers posted |
//! | 16–23 | bytes of the whole message |
//! | 24–31 | offset of the part in the message |
//! | 32–39 | bytes of the part, which follow |

use crate::handle::{VERSION, check_hello, word};

pub const HEAD_BYTES: usize = 40;
pub const HELLO_BYTES: usize = 48;
/// Largest number of sockets of a connection, over all classes.
pub(super) const STREAMS_MAX: u16 = 256;

const HELLO_MAGIC: [u8; 8] = *b"LAXTCP\r\n";
const PART: u8 = 1;
const POSTED: u8 = 2;

/// The first bytes on each socket, from the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamHello {
    /// The nonce of the listener's handle. A stranger doesn't have it.
    pub nonce: u64,
    /// A random number of the connection that the socket belongs to.
    pub connection: u128,
    /// The socket's index in the connection.
    pub index: u16,
    pub streams: u16,
    /// The class of the socket, as a DSCP.
    pub dscp: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    Part(Part),
    /// The number of buffers posted since the connection began.
    Posted(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub message: u64,
    /// The message's size in bytes.
    pub total: u64,
    pub offset: u64,
    /// Size of the part in bytes.
    pub length: u64,
}

impl StreamHello {
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&HELLO_MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.index.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.streams.to_le_bytes());
        bytes[14] = self.dscp;
        bytes[16..24].copy_from_slice(&self.nonce.to_le_bytes());
        bytes[24..40].copy_from_slice(&self.connection.to_le_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, String> {
        check_hello(bytes, HELLO_MAGIC)?;
        let hello = Self {
            index: u16::from_le_bytes(word(bytes, 10)),
            streams: u16::from_le_bytes(word(bytes, 12)),
            dscp: bytes[14],
            nonce: u64::from_le_bytes(word(bytes, 16)),
            connection: u128::from_le_bytes(word(bytes, 24)),
        };
        if hello.streams == 0 || hello.streams > STREAMS_MAX || hello.index >= hello.streams {
            return Err(format!("socket {} of {} is invalid", hello.index, hello.streams));
        }
        if hello.dscp > 63 {
            return Err(format!("{} is no DSCP", hello.dscp));
        }
        Ok(hello)
    }
}

impl Head {
    pub fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        match self {
            Self::Part(part) => {
                bytes[0] = PART;
                bytes[8..16].copy_from_slice(&part.message.to_le_bytes());
                bytes[16..24].copy_from_slice(&part.total.to_le_bytes());
                bytes[24..32].copy_from_slice(&part.offset.to_le_bytes());
                bytes[32..40].copy_from_slice(&part.length.to_le_bytes());
            }
            Self::Posted(buffers) => {
                bytes[0] = POSTED;
                bytes[8..16].copy_from_slice(&buffers.to_le_bytes());
            }
        }
        bytes
    }

    pub fn decode(bytes: &[u8; HEAD_BYTES]) -> Result<Self, String> {
        let number = |at| u64::from_le_bytes(word(bytes, at));
        match bytes[0] {
            PART => {
                let part = Part {
                    message: number(8),
                    total: number(16),
                    offset: number(24),
                    length: number(32),
                };
                let end = part.offset.checked_add(part.length);
                if end.is_none_or(|end| end > part.total) {
                    return Err(format!(
                        "a part of {} bytes at {} of a message of {}",
                        part.length, part.offset, part.total
                    ));
                }
                Ok(Self::Part(part))
            }
            POSTED => Ok(Self::Posted(number(8))),
            kind => Err(format!("a frame of kind {kind}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn hellos_come_back_as_they_were(
            nonce: u64, connection: u128, streams in 1..=STREAMS_MAX, dscp in 0..64_u8,
        ) {
            let hello = StreamHello { nonce, connection, index: streams - 1, streams, dscp };
            prop_assert_eq!(StreamHello::decode(&hello.encode()).unwrap(), hello);
        }

        #[test]
        fn parts_come_back_as_they_were(
            message: u64, offset in 0..1_u64 << 60, length in 0..1_u64 << 60,
        ) {
            let part = Head::Part(Part { message, total: offset + length, offset, length });
            prop_assert_eq!(Head::decode(&part.encode()).unwrap(), part);
            let posted = Head::Posted(message);
            prop_assert_eq!(Head::decode(&posted.encode()).unwrap(), posted);
        }

        #[test]
        fn a_part_beyond_its_message_is_refused(total in 0..1_u64 << 60, offset: u64, length: u64) {
            let part = Part { message: 0, total, offset, length };
            let fits = offset.checked_add(length).is_some_and(|end| end <= total);
            prop_assert_eq!(Head::decode(&Head::Part(part).encode()).is_ok(), fits);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::array::uniform32(any::<u8>())) {
            let mut head = [0; HEAD_BYTES];
            head[..32].copy_from_slice(&bytes);
            let _ = Head::decode(&head);
            let hello = StreamHello { nonce: 1, connection: 2, index: 0, streams: 1, dscp: 0 };
            let mut hello = hello.encode();
            hello[8..40].copy_from_slice(&bytes);
            if let Ok(hello) = StreamHello::decode(&hello) {
                prop_assert!(hello.index < hello.streams && hello.streams <= STREAMS_MAX);
                prop_assert!(hello.dscp < 64);
            }
        }
    }
}
