//! The receiving end over TCP sockets.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::os::fd::AsRawFd as _;

use smallvec::SmallVec;

use super::frame::{Head, Part};
use super::inlet::{BufferSource, ReceiveSocket};
use super::sender::register;
use super::socket;
use crate::backend::{Buffer, Memory, MemoryRegistration, Received, Receiver};
use crate::fault::{Fault, Result};
use crate::socket::peer;

/// Largest buffer, in bytes, that is announced only together with others. Small messages may go
/// before their buffer is announced ([`super::sender`]).
const QUIET_BYTES: usize = 4 << 10;
/// Number of reads without data after which all buffers are announced. The sender may have a
/// message that is too long for its buffer. Such a message waits for the announcement, and the
/// receiver reports the error.
const TELL_TURNS: u32 = 1 << 14;
/// Largest number of buffers that are not announced. Messages for so few small buffers may go
/// without the announcement.
const UNTOLD_MAX: u64 = 7;
/// Number of turns after which a socket is read that had no data lately.
const COLD_TURNS: u32 = 8;

#[derive(Debug)]
struct Target {
    address: usize,
    /// The buffer's size in bytes.
    room: usize,
    /// The message's size in bytes, once its first part has arrived.
    size: Option<usize>,
    got: usize,
    is_filled: bool,
}

/// Posted buffers, in the order of their messages. A buffer has the number of its message.
#[derive(Debug, Default)]
struct PostedReceives {
    targets: VecDeque<Target>,
    first: u64,
    complete: Vec<Received>,
}

impl PostedReceives {
    /// Returns the number of the first message without a buffer.
    fn next(&self) -> u64 {
        self.first + self.targets.len() as u64
    }

    fn push(&mut self, buffer: &Buffer<'_>) -> u64 {
        let post = self.next();
        let (address, room) = (buffer.address, buffer.bytes);
        self.targets.push_back(Target { address, room, size: None, got: 0, is_filled: false });
        post
    }
}

impl BufferSource for PostedReceives {
    fn place(&mut self, part: &Part) -> Result<Option<usize>> {
        if part.message >= self.next() {
            return Ok(None);
        }
        let garbled = |what: &str| {
            let message = part.message;
            Fault::Remote(format!("message {message} {what}: the connection is garbled"))
        };
        let at = part.message.checked_sub(self.first).ok_or_else(|| garbled("came again"))?;
        let target = &mut self.targets[at as usize];
        if part.total > target.room as u64 {
            return Err(Fault::Argument(format!(
                "message {} has {} bytes, its buffer room for {}",
                part.message, part.total, target.room
            )));
        }
        if *target.size.get_or_insert(part.total as usize) as u64 != part.total || target.is_filled
        {
            return Err(garbled("changed its size"));
        }
        Ok(Some(target.address))
    }

    fn arrived(&mut self, part: &Part, bytes: usize) {
        let at = part.message.wrapping_sub(self.first) as usize;
        let Some(target) = self.targets.get_mut(at) else { return };
        target.got += bytes;
        target.is_filled = target.size.is_some_and(|size| target.got >= size);
        while let Some(first) = self.targets.front().filter(|first| first.is_filled) {
            self.complete.push(Received { post: self.first, bytes: first.size });
            self.targets.pop_front();
            self.first += 1;
        }
    }
}

pub(super) struct TcpReceiver {
    inlets: Vec<ReceiveSocket>,
    posted: PostedReceives,
    /// Number of buffers that were announced to the sender.
    told: u64,
    /// Bytes of the last announcement that the socket has not taken.
    control: SmallVec<[u8; 64]>,
    /// The socket that received data last.
    warm: usize,
    turn: u32,
    /// Number of reads without data since the last data.
    vain: u32,
}

impl TcpReceiver {
    pub(super) fn new(streams: Vec<TcpStream>) -> Self {
        Self {
            inlets: streams.into_iter().map(ReceiveSocket::new).collect(),
            posted: PostedReceives::default(),
            told: 0,
            control: SmallVec::new(),
            warm: 0,
            turn: 0,
            vain: 0,
        }
    }

    /// Announces posted buffers to the sender. If the sender is gone, the next read notices.
    fn tell(&mut self) {
        if self.control.is_empty() {
            if self.told == self.posted.next() {
                return;
            }
            self.told = self.posted.next();
            self.control = Head::Posted(self.told).encode().as_slice().into();
        }
        let piece = libc::iovec {
            iov_base: self.control.as_ptr().cast_mut().cast(),
            iov_len: self.control.len(),
        };
        let socket = self.inlets[0].stream().as_raw_fd();
        // SAFETY: the bytes are this connection's own.
        match unsafe { socket::send(socket, &[piece], 0) } {
            Ok(Some(count)) => {
                self.control.drain(..count);
            }
            Ok(None) => {}
            Err(_) => self.control.clear(),
        }
    }

    fn read_all(&mut self) -> Result<usize> {
        let mut moved = 0;
        for (at, inlet) in self.inlets.iter_mut().enumerate() {
            if !inlet.is_closed() || inlet.is_amid() {
                let count = inlet.read(&mut self.posted)?;
                if count > 0 {
                    self.warm = at;
                }
                moved += count;
            }
        }
        Ok(moved)
    }
}

impl Receiver for TcpReceiver {
    fn register(&mut self, memory: Memory) -> Result<MemoryRegistration> {
        register(memory)
    }

    fn deregister(&mut self, _region: MemoryRegistration) -> Result<()> {
        Ok(())
    }

    fn post(&mut self, buffer: Buffer<'_>) -> Option<u64> {
        let post = self.posted.push(&buffer);
        if buffer.bytes > QUIET_BYTES || self.posted.next() - self.told > UNTOLD_MAX {
            self.tell();
        }
        Some(post)
    }

    fn flush(&mut self, _buffer: Buffer<'_>) -> Option<u64> {
        None
    }

    fn progress(&mut self, received: &mut Vec<Received>) -> Result<()> {
        if !self.control.is_empty() {
            self.tell();
        }
        self.turn = self.turn.wrapping_add(1);
        let warm = &mut self.inlets[self.warm];
        let mut moved = if warm.is_closed() { 0 } else { warm.read(&mut self.posted)? };
        let look_around =
            self.turn.is_multiple_of(COLD_TURNS) || self.inlets.iter().any(ReceiveSocket::is_amid);
        if moved == 0 && (look_around || self.inlets.iter().any(ReceiveSocket::is_closed)) {
            moved = self.read_all()?;
        }
        self.vain = if moved == 0 { self.vain + 1 } else { 0 };
        if self.vain == TELL_TURNS {
            self.tell();
            self.vain = 0;
        }
        received.append(&mut self.posted.complete);
        if moved == 0
            && received.is_empty()
            && !self.posted.targets.is_empty()
            && self.inlets.iter().any(ReceiveSocket::is_closed)
        {
            return Err(Fault::Remote(format!(
                "{} closed the connection while messages were awaited: its process is gone, or \
                 aborted",
                peer(self.inlets[0].stream())
            )));
        }
        Ok(())
    }

    fn close(self: Box<Self>) {
        if !self.posted.targets.is_empty() {
            // A receive is incomplete, so the sender has to notice at once.
            for inlet in &self.inlets {
                socket::reset_on_close(inlet.stream());
            }
        }
    }
}
