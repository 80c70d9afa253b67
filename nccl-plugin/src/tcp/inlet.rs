//! One incoming socket. A head is read with some bytes after it. The rest of a part is read
//! directly into its buffer.

use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd as _;

use super::frame::{HEAD_BYTES, Head, Part};
use super::socket;
use crate::fault::{Fault, Result};
use crate::socket::peer;

/// Bytes that are read together with a head. A small message thus takes one system call, and no
/// more than these bytes of a large message are copied twice.
const STAGE_BYTES: usize = 4096;
/// Largest message, in bytes, whose parts are not acknowledged at once. The sender's scheduler
/// accounts for larger ones.
const ACKNOWLEDGED_BYTES_MIN: u64 = 16 << 10;
/// Bytes after which reading continues with the next socket.
const TURN_BYTES: usize = 4 << 20;

/// The buffers that parts of messages go into.
pub(super) trait BufferSource {
    /// Returns the address for a message's bytes, or `None` if nobody has posted for it.
    fn place(&mut self, part: &Part) -> Result<Option<usize>>;
    /// Records that `bytes` more of a message arrived. A message without bytes arrives with 0.
    fn arrived(&mut self, part: &Part, bytes: usize);
}

#[derive(Debug)]
pub(super) struct ReceiveSocket {
    stream: TcpStream,
    stage: Box<[u8; STAGE_BYTES]>,
    /// The range of `stage` that was read and not used yet.
    from: usize,
    to: usize,
    /// The part whose bytes come next, and how many of them have arrived.
    part: Option<(Part, u64)>,
    closed: bool,
}

impl ReceiveSocket {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            stage: Box::new([0; STAGE_BYTES]),
            from: 0,
            to: 0,
            part: None,
            closed: false,
        }
    }

    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Reports whether the peer closed the socket.
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Reports whether the rest of a head or part is outstanding.
    pub(super) fn is_amid(&self) -> bool {
        self.part.is_some() || self.from < self.to
    }

    /// Reads the available bytes, as far as buffers are posted. Returns how many bytes moved.
    pub(super) fn read(&mut self, shelf: &mut impl BufferSource) -> Result<usize> {
        let mut moved = 0;
        while moved < TURN_BYTES {
            match self.part {
                None => {
                    if self.to - self.from < HEAD_BYTES {
                        let count = self.fill()?;
                        moved += count;
                        if count == 0 {
                            break;
                        }
                        continue;
                    }
                    self.part = Some((self.take_head()?, 0));
                    // A message without bytes consists of its head.
                    moved += 1;
                }
                Some((part, done)) => {
                    let Some(base) = shelf.place(&part)? else { break };
                    let count = self.take_body(&part, done, base)?;
                    let Some(count) = count else { break };
                    moved += count;
                    let done = done + count as u64;
                    shelf.arrived(&part, count);
                    self.part = (done < part.length).then_some((part, done));
                    if self.part.is_none() && part.total > ACKNOWLEDGED_BYTES_MIN {
                        socket::acknowledge(&self.stream);
                    }
                }
            }
        }
        Ok(moved)
    }

    fn take_head(&mut self) -> Result<Part> {
        let mut bytes = [0; HEAD_BYTES];
        bytes.copy_from_slice(&self.stage[self.from..self.from + HEAD_BYTES]);
        self.from += HEAD_BYTES;
        let garbled = |what: String| {
            Fault::Remote(format!("{} sent {what}: the connection is garbled", peer(&self.stream)))
        };
        match Head::decode(&bytes).map_err(garbled)? {
            Head::Part(part) => Ok(part),
            Head::Posted(_) => Err(garbled(String::from("what only a receiver sends"))),
        }
    }

    /// Reads bytes of the part, from the stage or directly from the socket. Returns `None` if none
    /// are there.
    fn take_body(&mut self, part: &Part, done: u64, base: usize) -> Result<Option<usize>> {
        let rest = usize::try_from(part.length - done).unwrap_or(usize::MAX);
        let to = base + part.offset as usize + done as usize;
        if rest == 0 {
            return Ok(Some(0));
        }
        let staged = (self.to - self.from).min(rest);
        if staged > 0 {
            // SAFETY: `BufferSource::place` ensures that the message fits there, and the head that
            // the part lies within the message.
            unsafe {
                core::ptr::copy_nonoverlapping(
                    self.stage.as_ptr().add(self.from),
                    to as *mut u8,
                    staged,
                );
            }
            self.from += staged;
            return Ok(Some(staged));
        }
        if rest < STAGE_BYTES / 2 {
            // The next head may come with the same call.
            let filled = self.fill()?;
            return if filled > 0 { self.take_body(part, done, base) } else { Ok(None) };
        }
        // SAFETY: `BufferSource::place` ensures that the message fits there, and the head that the
        // part lies within the message.
        let count = unsafe { socket::receive(self.stream.as_raw_fd(), to as *mut u8, rest) };
        self.counted(count).map(|count| (count > 0).then_some(count))
    }

    /// Reads into the stage. Returns 0 if nothing is there.
    fn fill(&mut self) -> Result<usize> {
        self.stage.copy_within(self.from..self.to, 0);
        self.to -= self.from;
        self.from = 0;
        let room = &mut self.stage[self.to..];
        let count =
            // SAFETY: this function borrows the memory mutably.
            unsafe { socket::receive(self.stream.as_raw_fd(), room.as_mut_ptr(), room.len()) };
        let count = self.counted(count)?;
        self.to += count;
        Ok(count)
    }

    /// Returns the number of bytes read, and records the end of the connection.
    fn counted(&mut self, count: std::io::Result<Option<usize>>) -> Result<usize> {
        match count {
            Ok(None) => Ok(0),
            Ok(Some(0)) => {
                self.closed = true;
                Ok(0)
            }
            Ok(Some(count)) => Ok(count),
            // `TcpReceiver` decides whether this is an error. It is one if data is outstanding.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {
                self.closed = true;
                Ok(0)
            }
            Err(error) => {
                Err(Fault::Remote(format!("receiving from {}: {error}", peer(&self.stream))))
            }
        }
    }
}

impl Drop for ReceiveSocket {
    fn drop(&mut self) {
        // A forked child may have the socket, too, so closing it here wouldn't end the connection.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}
