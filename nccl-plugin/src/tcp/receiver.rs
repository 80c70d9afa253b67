//! The receiving end over TCP sockets.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::os::fd::AsRawFd as _;

use smallvec::SmallVec;

use super::frame::{Head, Part};
use super::inlet::{BufferSource, ReceiveSocket};
use super::sender::register;
use super::socket;
use crate::backend::{Buffer, GROUP_MAX, Memory, MemoryRegistration, Received, Receiver};
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

#[derive(Clone, Debug)]
struct Target {
    address: usize,
    bytes: usize,
    tag: i32,
    /// The message for this buffer, once its first part has arrived.
    message: Option<u64>,
    size: usize,
    got: usize,
}

#[derive(Clone, Debug)]
struct ReceiveGroup {
    post: u64,
    targets: SmallVec<[Target; 1]>,
    left: usize,
}

/// Posted buffers, by the numbers of their messages.
#[derive(Debug, Default)]
struct PostedReceives {
    groups: VecDeque<ReceiveGroup>,
    /// Number of the first group's first message.
    first: u64,
    /// Number of the first message without a buffer.
    next: u64,
    posts: u64,
    complete: Vec<Received>,
}

impl PostedReceives {
    fn push(&mut self, buffers: &[Buffer<'_>]) -> u64 {
        let target = |buffer: &Buffer<'_>| Target {
            address: buffer.address,
            bytes: buffer.bytes,
            tag: buffer.tag,
            message: None,
            size: 0,
            got: 0,
        };
        let post = self.posts;
        self.posts += 1;
        self.next += buffers.len() as u64;
        self.groups.push_back(ReceiveGroup {
            post,
            targets: buffers.iter().map(target).collect(),
            left: buffers.len(),
        });
        post
    }

    /// Returns the index of the message's group, and of its buffer in the group.
    fn find(&mut self, part: &Part) -> Result<Option<(usize, usize)>> {
        if part.message >= self.next {
            return Ok(None);
        }
        let garbled = |what: &str| Fault::Remote(format!("message {} {what}", part.message));
        let mut begin = self.first;
        for (at, group) in self.groups.iter().enumerate() {
            let end = begin + group.targets.len() as u64;
            if (begin..end).contains(&part.message) {
                let own = |target: &Target| target.message == Some(part.message);
                let free = |target: &Target| target.message.is_none() && target.tag == part.tag;
                let alone = |_: &Target| group.targets.len() == 1;
                let place = group
                    .targets
                    .iter()
                    .position(own)
                    .or_else(|| group.targets.iter().position(free))
                    .or_else(|| group.targets.iter().position(alone));
                let place = place.ok_or_else(|| {
                    garbled(&format!("has tag {}, which no buffer of its group has", part.tag))
                })?;
                let room = group.targets[place].bytes;
                if part.total > room as u64 {
                    return Err(Fault::Argument(format!(
                        "message {} has {} bytes, its buffer room for {room}",
                        part.message, part.total
                    )));
                }
                return Ok(Some((at, place)));
            }
            begin = end;
        }
        Err(garbled("came again: the connection is garbled"))
    }
}

impl BufferSource for PostedReceives {
    fn place(&mut self, part: &Part) -> Result<Option<usize>> {
        let Some((group, place)) = self.find(part)? else {
            return Ok(None);
        };
        let target = &mut self.groups[group].targets[place];
        if target.message.is_none() {
            target.message = Some(part.message);
            target.size = part.total as usize;
        }
        if target.size as u64 != part.total || target.got as u64 >= part.total.max(1) {
            return Err(Fault::Remote(format!(
                "message {} changed its size: the connection is garbled",
                part.message
            )));
        }
        Ok(Some(target.address))
    }

    fn arrived(&mut self, part: &Part, bytes: usize) {
        let Ok(Some((group, place))) = self.find(part) else {
            return;
        };
        let group = &mut self.groups[group];
        let target = &mut group.targets[place];
        target.got += bytes;
        if target.got >= target.size {
            group.left -= 1;
        }
        while let Some(first) = self.groups.front().filter(|first| first.left == 0) {
            self.first += first.targets.len() as u64;
            let sizes: SmallVec<[usize; GROUP_MAX]> =
                first.targets.iter().map(|target| target.size).collect();
            self.complete.push(Received { post: first.post, sizes });
            self.groups.pop_front();
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
            if self.told == self.posted.next {
                return;
            }
            self.told = self.posted.next;
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

    fn post(&mut self, buffers: &[Buffer<'_>]) -> Option<u64> {
        let post = self.posted.push(buffers);
        let large = buffers.iter().any(|buffer| buffer.bytes > QUIET_BYTES);
        if large || self.posted.next - self.told > UNTOLD_MAX {
            self.tell();
        }
        Some(post)
    }

    fn flush(&mut self, _buffers: &[Buffer<'_>]) -> Option<u64> {
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
            && !self.posted.groups.is_empty()
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
        if !self.posted.groups.is_empty() {
            // A receive is incomplete, so the sender has to notice at once.
            for inlet in &self.inlets {
                socket::reset_on_close(inlet.stream());
            }
        }
    }
}
