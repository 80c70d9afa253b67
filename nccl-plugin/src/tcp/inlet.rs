//! One incoming socket: heads are read with a little of what follows, the rest of a part right
//! where it belongs.

use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd as _;

use super::frame::{HEAD_BYTES, Head, Part};
use super::socket;
use crate::fault::{Fault, Result};
use crate::socket::peer;

/// Read with a head: a small message comes with one system call, and of a large one no more than
/// this is copied twice.
const STAGE_BYTES: usize = 4096;
/// Parts of messages of more than this are acknowledged at once: those that a sender's scheduler
/// keeps account of.
const ACKNOWLEDGED_BYTES_MIN: u64 = 16 << 10;
/// A socket is left for the next after this many bytes.
const TURN_BYTES: usize = 4 << 20;

/// Where parts of messages belong.
pub(super) trait Shelf {
    /// Where the bytes of a message are to go; `None` if nobody has posted for it yet.
    fn place(&mut self, part: &Part) -> Result<Option<usize>>;
    /// `bytes` more of a message are there; of one without any, 0.
    fn arrived(&mut self, part: &Part, bytes: usize);
}

#[derive(Debug)]
pub(super) struct ReceiveSocket {
    stream: TcpStream,
    stage: Box<[u8; STAGE_BYTES]>,
    /// What is read and not used of it.
    from: usize,
    to: usize,
    /// The part whose bytes come next, and how many have.
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

    /// The peer sends nothing more over it.
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Whether something of a message is awaited that began here.
    pub(super) fn is_amid(&self) -> bool {
        self.part.is_some() || self.from < self.to
    }

    /// Reads what is there and somebody waits for; how many bytes moved.
    pub(super) fn read(&mut self, shelf: &mut impl Shelf) -> Result<usize> {
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
                    // Of a message without bytes the head is all.
                    moved += 1;
                }
                Some((part, done)) => {
                    let Some(base) = shelf.place(&part)? else {
                        break;
                    };
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
            Fault::Remote(format!(
                "{} sent {what}: the connection is garbled",
                peer(&self.stream)
            ))
        };
        match Head::decode(&bytes).map_err(garbled)? {
            Head::Part(part) => Ok(part),
            Head::Posted(_) => Err(garbled(String::from("what only a receiver sends"))),
        }
    }

    /// Bytes of the part: from the stage, or right from the socket. `None` if there are none yet.
    fn take_body(&mut self, part: &Part, done: u64, base: usize) -> Result<Option<usize>> {
        let rest = usize::try_from(part.length - done).unwrap_or(usize::MAX);
        let to = base + part.offset as usize + done as usize;
        if rest == 0 {
            return Ok(Some(0));
        }
        let staged = (self.to - self.from).min(rest);
        if staged > 0 {
            // SAFETY: the shelf says that the message fits there, and its head that the part lies
            // within it.
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
            // What follows may come with it.
            let filled = self.fill()?;
            return if filled > 0 {
                self.take_body(part, done, base)
            } else {
                Ok(None)
            };
        }
        // SAFETY: as above.
        let count = unsafe { socket::receive(self.stream.as_raw_fd(), to as *mut u8, rest) };
        self.counted(count)
            .map(|count| (count > 0).then_some(count))
    }

    /// Reads into the stage; 0 if nothing is there.
    fn fill(&mut self) -> Result<usize> {
        self.stage.copy_within(self.from..self.to, 0);
        self.to -= self.from;
        self.from = 0;
        let room = &mut self.stage[self.to..];
        let count =
            // SAFETY: the room is this function's own.
            unsafe { socket::receive(self.stream.as_raw_fd(), room.as_mut_ptr(), room.len()) };
        let count = self.counted(count)?;
        self.to += count;
        Ok(count)
    }

    /// Notices the end.
    fn counted(&mut self, count: std::io::Result<Option<usize>>) -> Result<usize> {
        match count {
            Ok(None) => Ok(0),
            Ok(Some(0)) => {
                self.closed = true;
                Ok(0)
            }
            Ok(Some(count)) => Ok(count),
            // Whether that is an error depends on whether anything is awaited.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {
                self.closed = true;
                Ok(0)
            }
            Err(error) => Err(Fault::Remote(format!(
                "receiving from {}: {error}",
                peer(&self.stream)
            ))),
        }
    }
}

impl Drop for ReceiveSocket {
    fn drop(&mut self) {
        // As an outlet's.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}
