//! The format of data connections: a head of [`HEAD_BYTES`] before each `len` bytes of payload.
//! Numbers are little-endian.
//!
//! A connection begins with a [`Preamble`]. The receiver answers each frame with an acknowledgement
//! ([`ACK_BYTES`]: flow and bytes) on the same connection.

use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;

use laxity_client::Stage;
use serde::{Deserialize, Serialize};

pub const HEAD_BYTES: usize = 80;
pub const ACK_BYTES: usize = 16;
pub const FRAME_BYTES_MAX: usize = 256 << 10;
/// Maximum number of bytes of a parcel. A layer's KV of a long prompt has tens of megabytes.
pub const PARCEL_BYTES_MAX: u64 = 1 << 30;
pub const WORDS_BYTES_MAX: u64 = 16 << 20;

const MAGIC: [u8; 4] = *b"LXE2";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// KV of a prefix, from a process that has it.
    KvReuse = 1,
    Dispatch = 2,
    Combine = 3,
    P2d = 4,
}

impl Kind {
    pub const fn stage(self) -> Stage {
        match self {
            Self::KvReuse => Stage::KvReuse,
            Self::Dispatch | Self::Combine => Stage::Collective,
            Self::P2d => Stage::P2d,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    pub kind: Kind,
    /// The layer that produced or needs the parcel.
    pub layer: u16,
    pub flow: u64,
    /// Number of the batch, or 0 without one.
    pub batch: u64,
    /// Number of the request, or 0 if the parcel belongs to the whole batch.
    pub request: u64,
    /// Index of the first token of KV, or the number of an exchange with experts.
    pub place: u64,
    /// Time until the deadline when the frame was sent, in ns. 0 without a deadline.
    pub remaining_ns: u64,
    pub total: u64,
    /// Bytes of the parcel before this frame.
    pub offset: u64,
    pub len: u32,
}

impl Head {
    pub fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = self.kind as u8;
        bytes[6..8].copy_from_slice(&self.layer.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        let words = [
            self.flow, self.batch, self.request, self.place, self.remaining_ns, self.total,
            self.offset,
        ];
        for (at, word) in words.into_iter().enumerate() {
            bytes[16 + at * 8..24 + at * 8].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Decodes untrusted bytes of a peer.
    /// Fails if the bytes are no head, or the parcel is too large.
    pub fn decode(bytes: &[u8; HEAD_BYTES]) -> io::Result<Self> {
        let words = bytes[16..].as_chunks::<8>().0;
        let word = |at: usize| u64::from_le_bytes(words[at]);
        let kinds = [Kind::KvReuse, Kind::Dispatch, Kind::Combine, Kind::P2d];
        let kind = kinds.into_iter().find(|kind| *kind as u8 == bytes[4] && bytes[..4] == MAGIC);
        let kind = kind.ok_or_else(|| invalid("no frame of an engine"))?;
        let head = Self {
            kind,
            layer: u16::from_le_bytes([bytes[6], bytes[7]]),
            len: u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]),
            flow: word(0),
            batch: word(1),
            request: word(2),
            place: word(3),
            remaining_ns: word(4),
            total: word(5),
            offset: word(6),
        };
        let end = head.offset.checked_add(u64::from(head.len));
        if head.total > PARCEL_BYTES_MAX
            || head.len as usize > FRAME_BYTES_MAX
            || end.is_none_or(|end| end > head.total)
        {
            return Err(invalid(format!(
                "a frame of {} bytes from {} on, of a parcel of {}",
                head.len, head.offset, head.total
            )));
        }
        Ok(head)
    }
}

pub(super) fn invalid(what: impl Into<String>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what.into())
}

/// Bit that marks the number of a flow whose receiver reads it. The number is then the receiver's.
pub const READ: u64 = 1 << 63;

/// A part of a flow that its receiver may read now. The receiver sends this to the holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "word", rename = "read")]
pub struct ReadPart {
    /// Number of the flow at its receiver, with the bit [`READ`].
    pub flow: u64,
    /// Number of the request that the KV belongs to.
    pub request: u64,
    pub layer: u16,
    /// Bytes of the flow before this part.
    pub offset: u64,
    pub bytes: u64,
}

/// The beginning of a connection: its purpose, and the address of the process that opened it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preamble {
    /// Whether the connection carries control messages instead of parcels.
    pub words: bool,
    /// The DSCP of the connection in both directions. Acknowledgements must not wait in another
    /// class than the bytes that they acknowledge.
    pub dscp: u8,
    /// Address at which the process that opened the connection listens. It identifies the process.
    pub listens: SocketAddr,
}

impl Preamble {
    /// Writes the preamble: `LXE2`, `W` or `P`, the DSCP, a length, and the address as text.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let address = self.listens.to_string();
        let mut bytes = MAGIC.to_vec();
        bytes.push(if self.words { b'W' } else { b'P' });
        bytes.push(self.dscp);
        bytes.push(address.len() as u8);
        bytes.extend(address.as_bytes());
        to.write_all(&bytes)
    }

    /// Reads a preamble.
    /// Fails if the connection is gone, or the bytes are no preamble.
    pub fn read(from: &mut impl Read) -> io::Result<Self> {
        let mut start = [0; 7];
        from.read_exact(&mut start)?;
        let words = match (start[..4] == MAGIC, start[4]) {
            (true, b'W') => true,
            (true, b'P') => false,
            _ => return Err(invalid("not an engine")),
        };
        let mut address = vec![0; start[6] as usize];
        from.read_exact(&mut address)?;
        let listens = std::str::from_utf8(&address).ok().and_then(|text| text.parse().ok());
        let listens = listens.ok_or_else(|| invalid("an engine without an address"))?;
        Ok(Self { words, dscp: start[5] & 0x3f, listens })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn head() -> Head {
        Head {
            kind: Kind::P2d,
            layer: 7,
            flow: 1,
            batch: 2,
            request: 3,
            place: 4,
            remaining_ns: 5,
            total: 600,
            offset: 100,
            len: 500,
        }
    }

    #[test]
    fn heads_and_preambles_come_back_as_they_were() {
        assert_eq!(Head::decode(&head().encode()).unwrap(), head());
        let preamble = Preamble { words: true, dscp: 34, listens: "[::1]:99".parse().unwrap() };
        let mut bytes = Vec::new();
        preamble.write(&mut bytes).unwrap();
        assert_eq!(Preamble::read(&mut bytes.as_slice()).unwrap(), preamble);
        assert!(Preamble::read(&mut b"GET / HTTP/1.1".as_slice()).is_err());
    }

    #[test]
    fn frames_beyond_their_parcel_are_refused() {
        let long = Head { offset: 101, ..head() };
        assert!(Head::decode(&long.encode()).is_err());
        let wrapped = Head { offset: u64::MAX, ..head() };
        assert!(Head::decode(&wrapped.encode()).is_err());
        let huge = Head { total: PARCEL_BYTES_MAX + 1, ..head() };
        assert!(Head::decode(&huge.encode()).is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_refused_or_make_sense(
            bytes in prop::collection::vec(any::<u8>(), HEAD_BYTES),
        ) {
            let mut array = [0; HEAD_BYTES];
            array.copy_from_slice(&bytes);
            array[..4].copy_from_slice(&MAGIC);
            if let Ok(head) = Head::decode(&array) {
                prop_assert!(head.offset + u64::from(head.len) <= head.total);
            }
        }
    }
}
