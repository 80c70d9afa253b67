//! What a worker of a fault campaign tells the oracle, as frames in a pipe.
//!
//! The pipe is the worker's wire: it carries every byte that a transfer may send. A frame is a
//! header of 32 bytes, little-endian, and a payload. `outlet.py` writes the same form.
//!
//! ```text
//! kind u8 | flag u8 | starved_ms u16 | queue u32 | number u64 | value u64 | payload bytes u64
//! ```

use std::io::{self, Read};

const HEADER: usize = 32;
/// Maximum number of bytes of a payload. A longer one means that the worker wrote garbage.
const PAYLOAD_MAX: u64 = 4 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// The worker is about to submit a transfer of `bytes`. Transfers of a queue that is in order
    /// complete in the order of their numbers.
    Submitted {
        queue: u32,
        number: u64,
        bytes: u64,
        in_order: bool,
    },
    Bytes {
        queue: u32,
        number: u64,
        offset: u64,
        payload: Vec<u8>,
    },
    /// Bytes of which only the place is known, because a virtual wire carries no content.
    #[cfg_attr(not(feature = "virtual-time"), expect(dead_code, reason = "nothing sends it"))]
    Sent {
        queue: u32,
        number: u64,
        offset: u64,
        bytes: u64,
    },
    Done {
        queue: u32,
        number: u64,
    },
    /// A wait for a permit, on CLOCK_MONOTONIC. The process did not run for `starved_ms` of it.
    Waited {
        queue: u32,
        begin_ns: u64,
        end_ns: u64,
        starved_ms: u16,
    },
    /// The queue ended in order. It had `count` transfers.
    Ended {
        queue: u32,
        count: u64,
    },
    /// The queue ended early, because its thread or its peer did. Open transfers are void.
    Abandoned {
        queue: u32,
    },
    /// Bytes that the daemon permitted, and bytes that went out without a permit.
    Counted {
        scheduled: u64,
        bypassed: u64,
    },
    Wrong {
        why: String,
    },
}

impl Frame {
    pub(super) fn put(&self, out: &mut Vec<u8>) {
        let mut header = |kind: u8, flag: u8, starved: u16, queue: u32, words: [u64; 3]| {
            out.extend([kind, flag]);
            out.extend(starved.to_le_bytes());
            out.extend(queue.to_le_bytes());
            out.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        };
        match self {
            Self::Submitted { queue, number, bytes, in_order } => {
                header(b'S', u8::from(*in_order), 0, *queue, [*number, *bytes, 0]);
            }
            Self::Bytes { queue, number, offset, payload } => {
                header(b'B', 0, 0, *queue, [*number, *offset, payload.len() as u64]);
                out.extend(payload);
            }
            // No worker process sends this frame.
            Self::Sent { .. } => {}
            Self::Done { queue, number } => header(b'D', 0, 0, *queue, [*number, 0, 0]),
            Self::Waited { queue, begin_ns, end_ns, starved_ms } => {
                header(b'W', 0, *starved_ms, *queue, [*begin_ns, *end_ns, 0]);
            }
            Self::Ended { queue, count } => header(b'E', 0, 0, *queue, [*count, 0, 0]),
            Self::Abandoned { queue } => header(b'X', 0, 0, *queue, [0; 3]),
            Self::Counted { scheduled, bypassed } => {
                header(b'C', 0, 0, 0, [*scheduled, *bypassed, 0]);
            }
            Self::Wrong { why } => {
                header(b'!', 0, 0, 0, [0, 0, why.len() as u64]);
                out.extend(why.as_bytes());
            }
        }
    }

    /// Reads the next frame. `None` is the end of the pipe. A worker that is killed may leave a
    /// part of a frame, which counts as the end, too.
    pub(super) fn read(from: &mut impl Read) -> io::Result<Option<Self>> {
        let mut is_whole = |part: &mut [u8]| match from.read_exact(part) {
            Err(end) if end.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            read => read.map(|()| true),
        };
        let mut header = [0; HEADER];
        if !is_whole(&mut header)? {
            return Ok(None);
        }
        let word =
            |at: usize| header[at..at + 8].iter().rev().fold(0, |w, b| w << 8 | u64::from(*b));
        let (number, value, length) = (word(8), word(16), word(24));
        let queue = (word(0) >> 32) as u32;
        let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        if length > PAYLOAD_MAX {
            return Err(bad("a payload that is too long"));
        }
        let mut payload = vec![0; length as usize];
        if !is_whole(&mut payload)? {
            return Ok(None);
        }
        Ok(Some(match header[0] {
            b'S' => Self::Submitted { queue, number, bytes: value, in_order: header[1] != 0 },
            b'B' => Self::Bytes { queue, number, offset: value, payload },
            b'D' => Self::Done { queue, number },
            b'W' => Self::Waited {
                queue,
                begin_ns: number,
                end_ns: value,
                starved_ms: (word(0) >> 16) as u16,
            },
            b'E' => Self::Ended { queue, count: number },
            b'X' => Self::Abandoned { queue },
            b'C' => Self::Counted { scheduled: number, bypassed: value },
            b'!' => Self::Wrong { why: String::from_utf8_lossy(&payload).into_owned() },
            _ => return Err(bad("an unknown kind of frame")),
        }))
    }
}

/// Returns the content of a transfer: each word of 8 bytes names its queue, its transfer and its
/// place. So no byte of a transfer passes for a byte of another, or for another of its own.
fn word(queue: u32, number: u64, index: u64) -> u64 {
    u64::from(queue) << 56 | (number & 0xffff_ffff) << 24 | (index & 0xff_ffff)
}

/// Returns `length` bytes of a transfer from `offset` on. Both are multiples of 8.
pub(super) fn content(queue: u32, number: u64, offset: u64, length: u64) -> Vec<u8> {
    let indices = offset / 8..(offset + length) / 8;
    indices.flat_map(|index| word(queue, number, index).to_le_bytes()).collect()
}

pub(super) fn is_content(queue: u32, number: u64, offset: u64, payload: &[u8]) -> bool {
    let words = payload.chunks_exact(8);
    offset.is_multiple_of(8)
        && words.remainder().is_empty()
        && words
            .zip(offset / 8..)
            .all(|(bytes, index)| bytes == word(queue, number, index).to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_frame_is_read_as_it_was_written() {
        let queue = 0x0102_0304;
        let frames = [
            Frame::Submitted { queue, number: 7, bytes: 80, in_order: true },
            Frame::Bytes { queue, number: 7, offset: 8, payload: content(queue, 7, 8, 72) },
            Frame::Done { queue, number: 7 },
            Frame::Waited { queue, begin_ns: 5, end_ns: 1 << 40, starved_ms: 513 },
            Frame::Ended { queue, count: 8 },
            Frame::Abandoned { queue },
            Frame::Counted { scheduled: 1 << 50, bypassed: 3 },
            Frame::Wrong { why: "an engine ended".to_owned() },
        ];
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.put(&mut bytes));
        let mut from = bytes.as_slice();
        for frame in frames {
            assert_eq!(Frame::read(&mut from).unwrap(), Some(frame));
        }
        assert_eq!(Frame::read(&mut from).unwrap(), None);
        assert!(Frame::read(&mut &bytes[..40]).unwrap().is_some());
        assert!(Frame::read(&mut [9; 32].as_slice()).is_err());
    }

    #[test]
    fn bytes_of_another_place_are_not_the_content() {
        let payload = content(3, 9, 16, 64);
        assert!(is_content(3, 9, 16, &payload));
        assert!(!is_content(2, 9, 16, &payload) && !is_content(3, 8, 16, &payload));
        assert!(!is_content(3, 9, 24, &payload) && !is_content(3, 9, 16, &payload[1..]));
    }
}
