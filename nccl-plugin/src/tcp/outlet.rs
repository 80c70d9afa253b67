//! One outgoing socket: a queue of parts, the bytes that the kernel took, and the bytes that the
//! peer's kernel has.
//!
//! A message's memory may be used again when the kernel has a copy. For large parts, the kernel is
//! asked not to copy (`MSG_ZEROCOPY`), and reports when it no longer reads the memory. If it
//! reports that it copied nevertheless (loopback, veth, NICs without scatter-gather), later parts
//! are sent with a copy.

use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd as _;

use smallvec::SmallVec;

use super::frame::HEAD_BYTES;
use super::socket;
use crate::fault::{Fault, Result};
use crate::socket::peer;

/// Largest number of parts in one system call.
const PARTS_MAX: usize = 8;
/// Smallest part, in bytes, for which sending without a copy is worth its overhead.
const ZERO_COPY_BYTES_MIN: usize = 256 << 10;
/// Largest number of sends without a copy whose memory the kernel still reads.
const HELD_MAX: usize = 256;

#[derive(Clone, Copy, Debug)]
pub(super) struct OutgoingPart {
    pub(super) head: [u8; HEAD_BYTES],
    pub(super) address: usize,
    pub(super) bytes: usize,
    pub(super) message: u64,
    /// Whether the part's arrival has to be reported.
    pub(super) accounted: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartOutcome {
    /// The part's memory may be used again.
    Taken { message: u64, bytes: usize },
    /// The peer's kernel has the part.
    Arrived { message: u64, bytes: usize },
}

/// Bytes whose acknowledgement is outstanding.
#[derive(Clone, Copy, Debug)]
struct Unacknowledged {
    /// Position in the stream after these bytes.
    end: u64,
    message: u64,
    /// Number of bytes before `end` that this entry accounts for.
    bytes: usize,
}

/// Memory that the kernel reads from.
#[derive(Clone, Copy, Debug)]
struct ZeroCopySend {
    /// Number of the last send that reads from this memory.
    send: u32,
    message: u64,
    bytes: usize,
}

#[derive(Debug)]
pub(super) struct SendSocket {
    stream: TcpStream,
    queue: VecDeque<OutgoingPart>,
    /// Bytes of the first part that were sent, its head included.
    sent: usize,
    /// Bytes that the kernel took since the connection began.
    position: u64,
    awaited: VecDeque<Unacknowledged>,
    zero_copy: bool,
    /// Number of the next send without a copy. The kernel uses the same numbers.
    next_send: u32,
    /// Whether any of the first part was sent without a copy.
    is_held: bool,
    held: VecDeque<ZeroCopySend>,
    /// The newest send whose memory the kernel no longer reads. The kernel reports it once, and may
    /// do so before the part is sent completely, because the rest may go with a copy.
    released_through: Option<u32>,
}

impl SendSocket {
    pub(super) fn new(stream: TcpStream, zero_copy: bool) -> Self {
        let zero_copy = zero_copy && socket::allow_zero_copy(&stream);
        Self {
            stream,
            queue: VecDeque::new(),
            sent: 0,
            // The hello isn't counted, and nothing accounts for it.
            position: 0,
            awaited: VecDeque::new(),
            zero_copy,
            next_send: 0,
            is_held: false,
            held: VecDeque::new(),
            released_through: None,
        }
    }

    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    pub(super) fn push(&mut self, part: OutgoingPart) {
        self.queue.push_back(part);
    }

    /// Sends as much as the kernel takes.
    pub(super) fn flush(&mut self, fates: &mut Vec<PartOutcome>) -> Result<()> {
        while let Some(first) = self.queue.front() {
            let without_copy =
                self.zero_copy && first.bytes >= ZERO_COPY_BYTES_MIN && self.held.len() < HELD_MAX;
            let count = if without_copy { self.send_without_copy() } else { self.send_several() };
            match count {
                Ok(Some(count)) => self.took(count, fates),
                Ok(None) => break,
                Err(error) => {
                    return Err(Fault::Remote(format!(
                        "sending to {}: {error}: the peer's process is gone, or aborted",
                        peer(&self.stream)
                    )));
                }
            }
        }
        self.release(fates);
        Ok(())
    }

    /// Sends the first parts, as many as go in one call. A later part that is to be sent without a
    /// copy ends the call.
    fn send_several(&self) -> std::io::Result<Option<usize>> {
        let mut pieces: SmallVec<[libc::iovec; 2 * PARTS_MAX]> = SmallVec::new();
        let mut skip = self.sent;
        for (at, part) in self.queue.iter().take(PARTS_MAX).enumerate() {
            if at > 0 && self.zero_copy && part.bytes >= ZERO_COPY_BYTES_MIN {
                break;
            }
            let head = skip.min(HEAD_BYTES);
            let body = skip - head;
            if head < HEAD_BYTES {
                pieces.push(libc::iovec {
                    iov_base: part.head[head..].as_ptr().cast_mut().cast(),
                    iov_len: HEAD_BYTES - head,
                });
            }
            if part.bytes > body {
                pieces.push(libc::iovec {
                    iov_base: (part.address + body) as *mut _,
                    iov_len: part.bytes - body,
                });
            }
            skip = 0;
        }
        // SAFETY: heads are in the queue. The memory of messages stays until they are done
        // (`Sender::begin`).
        unsafe { socket::send(self.stream.as_raw_fd(), &pieces, 0) }
    }

    /// Sends the first part. Its head is copied, since it moves in memory. Its bytes are not.
    fn send_without_copy(&mut self) -> std::io::Result<Option<usize>> {
        let Some(part) = self.queue.front() else { return Ok(None) };
        let fd = self.stream.as_raw_fd();
        if self.sent < HEAD_BYTES {
            let piece = libc::iovec {
                iov_base: part.head[self.sent..].as_ptr().cast_mut().cast(),
                iov_len: HEAD_BYTES - self.sent,
            };
            // SAFETY: the head is in the queue.
            return unsafe { socket::send(fd, &[piece], libc::MSG_MORE) };
        }
        let body = self.sent - HEAD_BYTES;
        let piece =
            libc::iovec { iov_base: (part.address + body) as *mut _, iov_len: part.bytes - body };
        // SAFETY: the memory of a message stays until it is done. It is done only after the error
        // queue reported this send.
        match unsafe { socket::send(fd, &[piece], libc::MSG_ZEROCOPY) } {
            Ok(Some(count)) => {
                self.next_send = self.next_send.wrapping_add(1);
                self.is_held = true;
                Ok(Some(count))
            }
            // The kernel can't pin more memory, so this part is sent with a copy.
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                // SAFETY: the memory of a message stays until it is done.
                unsafe { socket::send(fd, &[piece], 0) }
            }
            other => other,
        }
    }

    /// Removes bytes that the kernel took from the front of the queue.
    fn took(&mut self, mut count: usize, fates: &mut Vec<PartOutcome>) {
        self.position += count as u64;
        while let Some(part) = self.queue.front() {
            let rest = HEAD_BYTES + part.bytes - self.sent;
            if count < rest {
                self.sent += count;
                return;
            }
            count -= rest;
            let (message, bytes) = (part.message, part.bytes);
            if part.accounted && bytes > 0 {
                self.awaited.push_back(Unacknowledged {
                    end: self.position - count as u64,
                    message,
                    bytes,
                });
            }
            let send = self.next_send.wrapping_sub(1);
            let waits = self.released_through.is_none_or(|through| !is_through(through, send));
            if core::mem::take(&mut self.is_held) && waits {
                self.held.push_back(ZeroCopySend { send, message, bytes });
            } else {
                fates.push(PartOutcome::Taken { message, bytes });
            }
            self.sent = 0;
            self.queue.pop_front();
        }
    }

    /// Asks the kernel which memory it no longer reads from.
    fn release(&mut self, fates: &mut Vec<PartOutcome>) {
        while !self.held.is_empty() {
            let Some(told) = socket::released(&self.stream) else { return };
            self.released(told, fates);
        }
    }

    /// Records that the kernel no longer reads from some memory.
    fn released(&mut self, told: socket::Released, fates: &mut Vec<PartOutcome>) {
        if told.copied {
            self.zero_copy = false;
        }
        self.released_through = Some(told.through);
        let is_free = |held: &ZeroCopySend| is_through(told.through, held.send);
        while let Some(held) = self.held.front().copied().filter(is_free) {
            self.held.pop_front();
            fates.push(PartOutcome::Taken { message: held.message, bytes: held.bytes });
        }
    }

    /// Asks the kernel which bytes have arrived.
    pub(super) fn look_for_acknowledgements(&mut self, fates: &mut Vec<PartOutcome>) {
        if self.awaited.is_empty() {
            return;
        }
        let unacknowledged = socket::unacknowledged(&self.stream);
        let arrived = self.position.saturating_sub(unacknowledged);
        while let Some(first) = self.awaited.front_mut() {
            let begin = first.end - first.bytes as u64;
            let bytes = (arrived.saturating_sub(begin) as usize).min(first.bytes);
            if bytes == 0 {
                break;
            }
            fates.push(PartOutcome::Arrived { message: first.message, bytes });
            first.bytes -= bytes;
            if first.bytes > 0 {
                break;
            }
            self.awaited.pop_front();
        }
    }

    /// Reports whether parts are unsent, or the kernel still reads memory.
    pub(super) fn is_busy(&self) -> bool {
        !self.queue.is_empty() || !self.held.is_empty()
    }

    /// Reports whether an acknowledgement is outstanding.
    pub(super) fn is_awaiting(&self) -> bool {
        !self.awaited.is_empty()
    }
}

/// Reports whether the kernel's report about the sends up to `through` includes `send`. Numbers
/// wrap, so a send counts as earlier if the distance is less than half the range.
fn is_through(through: u32, send: u32) -> bool {
    through.wrapping_sub(send) < u32::MAX / 2
}

impl Drop for SendSocket {
    fn drop(&mut self) {
        // A forked child may have the socket, too, so closing it here wouldn't end the connection.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn memory_is_free_though_the_kernel_said_so_before_the_part_was_through() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let stream = TcpStream::connect(listener.local_addr().expect("bound")).expect("connects");
        let mut outlet = SendSocket::new(stream, false);
        let (mut fates, bytes) = (Vec::new(), 300_000);
        for message in [0, 1] {
            outlet.push(OutgoingPart {
                head: [0; HEAD_BYTES],
                address: 0,
                bytes,
                message,
                accounted: false,
            });
        }
        // The first part goes with send 0. Send 1 takes some bytes of the second.
        (outlet.next_send, outlet.is_held) = (1, true);
        outlet.took(HEAD_BYTES + bytes, &mut fates);
        (outlet.next_send, outlet.is_held) = (2, true);
        outlet.took(HEAD_BYTES + 1000, &mut fates);
        assert_eq!(fates, []);
        // One report covers both sends and says that the kernel copied. The rest goes with a copy.
        outlet.released(socket::Released { through: 1, copied: true }, &mut fates);
        assert_eq!(fates, [PartOutcome::Taken { message: 0, bytes }]);
        outlet.took(bytes - 1000, &mut fates);
        assert_eq!(fates[1..], [PartOutcome::Taken { message: 1, bytes }]);
        assert!(!outlet.is_busy());
    }
}
