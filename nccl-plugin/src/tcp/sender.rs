//! The sending end over TCP sockets.
//!
//! A message goes once its receiver has posted a buffer for it, which the receiver announces on the
//! first socket. Up to [`EAGER_BYTES`] may go before that, because the buffers of any socket hold
//! as many, whatever the receiver does. A small message therefore needs no round trip, and a
//! message that began is always delivered.

use core::sync::atomic::{AtomicBool, Ordering};
use std::collections::VecDeque;
use std::net::TcpStream;
use std::os::fd::AsRawFd as _;
use std::thread;
use std::time::{Duration, Instant};

use laxity_shm::sleep::now_ns;

use super::frame::{HEAD_BYTES, Head, Part};
use super::outlet::{OutgoingPart, PartOutcome, SendSocket};
use super::socket;
use crate::backend::{Memory, MemoryRegistration, Message, POINTER_HOST, Sender, Sent};
use crate::fault::{Fault, Result};
use crate::socket::peer;

/// Bytes that may go before their receiver has posted.
const EAGER_BYTES: u64 = 32 << 10;
/// Smallest part, in bytes, into which a message is split to use several sockets.
const STRIPE_BYTES_MIN: usize = 64 << 10;
/// Time between two checks for acknowledgements, in nanoseconds.
const LOOK_NS: u64 = 20_000;
/// Longest wait of a close for data in flight.
const CLOSE_WAIT: Duration = Duration::from_secs(2);

/// Longest wait of a close after the previous one timed out. When a host is gone, many connections
/// to it are closed one after another.
const CLOSE_WAIT_SHORT: Duration = Duration::from_millis(5);
/// Whether the last close timed out. Relaxed, because the value is a heuristic.
static CLOSED_IN_VAIN: AtomicBool = AtomicBool::new(false);

#[derive(Debug)]
struct BegunMessage {
    number: u64,
    address: usize,
    bytes: usize,
    class: usize,
    accounted: bool,
    pushed: usize,
    taken: usize,
    told: bool,
}

impl BegunMessage {
    fn is_done(&self) -> bool {
        // A message without bytes is done once the kernel took its head.
        self.told
    }
}

pub(super) struct TcpSender {
    outlets: Vec<SendSocket>,
    sockets: usize,
    begun: VecDeque<BegunMessage>,
    next: u64,
    /// Number of messages for which buffers were posted.
    posted: u64,
    /// Messages that went before their buffers were posted, with their bytes.
    ahead: VecDeque<(u64, u64)>,
    ahead_bytes: u64,
    control: [u8; HEAD_BYTES],
    control_filled: usize,
    closed: bool,
    looked_ns: u64,
    fates: Vec<PartOutcome>,
}

impl TcpSender {
    pub(super) fn new(streams: Vec<TcpStream>, sockets: usize, zero_copy: bool) -> Self {
        let outlet = |stream| SendSocket::new(stream, zero_copy);
        Self {
            outlets: streams.into_iter().map(outlet).collect(),
            sockets,
            begun: VecDeque::new(),
            next: 0,
            posted: 0,
            ahead: VecDeque::new(),
            ahead_bytes: 0,
            control: [0; HEAD_BYTES],
            control_filled: 0,
            closed: false,
            looked_ns: 0,
            fates: Vec::new(),
        }
    }

    /// Reads the receiver's announcements.
    fn listen(&mut self) -> Result<()> {
        loop {
            let room = &mut self.control[self.control_filled..];
            let stream = self.outlets[0].stream();
            let count =
                // SAFETY: this function borrows the memory mutably.
                unsafe { socket::receive(stream.as_raw_fd(), room.as_mut_ptr(), room.len()) };
            match count {
                Ok(None) => return Ok(()),
                Ok(Some(0)) => {
                    self.closed = true;
                    return Ok(());
                }
                Ok(Some(count)) => self.control_filled += count,
                Err(error) => {
                    return Err(Fault::Remote(format!(
                        "{}: {error}: the peer's process is gone, or aborted",
                        peer(stream)
                    )));
                }
            }
            if self.control_filled == HEAD_BYTES {
                self.control_filled = 0;
                let head = Head::decode(&self.control);
                let Ok(Head::Posted(posted)) = head else {
                    return Err(Fault::Remote(format!(
                        "{} sent what only a sender does: the connection is garbled",
                        peer(self.outlets[0].stream())
                    )));
                };
                self.posted = self.posted.max(posted);
                while let Some((_, bytes)) = self.ahead.front().filter(|(n, _)| *n < self.posted) {
                    self.ahead_bytes -= bytes;
                    self.ahead.pop_front();
                }
            }
        }
    }

    fn gone(&self) -> Fault {
        Fault::Remote(format!(
            "{} closed the connection while messages were on their way: its process is gone, or \
             aborted",
            peer(self.outlets[0].stream())
        ))
    }

    fn may_go(&self, bytes: u64) -> bool {
        self.next < self.posted || self.ahead_bytes + bytes <= EAGER_BYTES
    }

    /// Converts the progress of parts into the progress of messages.
    fn tell(&mut self, sent: &mut Vec<Sent>) {
        let first = self.begun.front().map_or(self.next, |first| first.number);
        for fate in self.fates.drain(..) {
            match fate {
                PartOutcome::Taken { message, bytes } => {
                    let at = usize::try_from(message.wrapping_sub(first)).unwrap_or(usize::MAX);
                    let Some(begun) = self.begun.get_mut(at) else { continue };
                    begun.taken += bytes;
                    if !begun.accounted && bytes > 0 {
                        sent.push(Sent { message, left: bytes, done: false });
                    }
                    if begun.taken == begun.bytes && !begun.told {
                        begun.told = true;
                        sent.push(Sent { message, left: 0, done: true });
                    }
                }
                PartOutcome::Arrived { message, bytes } => {
                    sent.push(Sent { message, left: bytes, done: false });
                }
            }
        }
        while self.begun.front().is_some_and(BegunMessage::is_done) {
            self.begun.pop_front();
        }
    }
}

impl Sender for TcpSender {
    fn register(&mut self, memory: Memory) -> Result<MemoryRegistration> {
        register(memory)
    }

    fn deregister(&mut self, _region: MemoryRegistration) -> Result<()> {
        Ok(())
    }

    fn clear(&mut self, bytes: usize) -> Result<bool> {
        let bytes = bytes as u64;
        if !self.may_go(bytes) {
            self.listen()?;
        }
        let may_go = self.may_go(bytes);
        if !may_go && self.closed {
            return Err(self.gone());
        }
        Ok(may_go)
    }

    fn begin(&mut self, message: Message<'_>) -> u64 {
        let number = self.next;
        self.next += 1;
        if number >= self.posted {
            let bytes = message.buffer.bytes as u64;
            self.ahead.push_back((number, bytes));
            self.ahead_bytes += bytes;
        }
        self.begun.push_back(BegunMessage {
            number,
            address: message.buffer.address,
            bytes: message.buffer.bytes,
            class: message.class,
            accounted: message.accounted,
            pushed: 0,
            taken: 0,
            told: false,
        });
        number
    }

    fn push(&mut self, bytes: usize) {
        let Some(newest) = self.begun.back_mut() else { return };
        let class = newest.class.min(self.outlets.len() / self.sockets - 1);
        let parts = (bytes / STRIPE_BYTES_MIN).clamp(1, self.sockets);
        let mut left = bytes.min(newest.bytes - newest.pushed);
        for at in 0..parts {
            let length = left / (parts - at);
            left -= length;
            let part = Part {
                message: newest.number,
                total: newest.bytes as u64,
                offset: newest.pushed as u64,
                length: length as u64,
            };
            // The number of a small message selects its socket. A large message uses all sockets.
            let socket = (newest.number as usize + at) % self.sockets;
            self.outlets[class * self.sockets + socket].push(OutgoingPart {
                head: Head::Part(part).encode(),
                address: newest.address + newest.pushed,
                bytes: length,
                message: newest.number,
                accounted: newest.accounted,
            });
            newest.pushed += length;
        }
    }

    fn progress(&mut self, sent: &mut Vec<Sent>) -> Result<()> {
        let mut result = Ok(());
        for outlet in self.outlets.iter_mut().filter(|outlet| outlet.is_busy()) {
            result = result.and(outlet.flush(&mut self.fates));
        }
        if self.outlets.iter().any(SendSocket::is_awaiting) {
            let now = now_ns();
            if now.saturating_sub(self.looked_ns) > LOOK_NS {
                self.looked_ns = now;
                for outlet in &mut self.outlets {
                    outlet.look_for_acknowledgements(&mut self.fates);
                }
            }
        }
        self.tell(sent);
        // Bytes that wait for a socket wait for the peer to read, so check that the peer is there.
        if !self.begun.is_empty() && result.is_ok() {
            self.listen()?;
            if self.closed {
                // Acknowledgements came before the end of the connection.
                for outlet in &mut self.outlets {
                    result = result.and(outlet.flush(&mut self.fates));
                }
                self.tell(sent);
                if !self.begun.is_empty() {
                    return Err(self.gone());
                }
            }
        }
        result
    }

    fn look(&mut self, sent: &mut Vec<Sent>) {
        for outlet in &mut self.outlets {
            outlet.look_for_acknowledgements(&mut self.fates);
        }
        self.tell(sent);
    }

    fn close(self: Box<Self>, kept: bool) {
        let mut this = *self;
        if !kept {
            for outlet in &this.outlets {
                socket::reset_on_close(outlet.stream());
            }
            return;
        }
        // Closing with unread data, or receiving data after the close, resets the connection. The
        // peer can still read what its kernel has. Anything else is lost.
        let patience =
            if CLOSED_IN_VAIN.load(Ordering::Relaxed) { CLOSE_WAIT_SHORT } else { CLOSE_WAIT };
        let give_up = Instant::now() + patience;
        let mut pause = Duration::from_micros(20);
        while Instant::now() < give_up {
            let is_through = |outlet: &SendSocket| socket::unacknowledged(outlet.stream()) == 0;
            if this.outlets.iter().all(is_through) || this.listen().is_err() || this.closed {
                CLOSED_IN_VAIN.store(false, Ordering::Relaxed);
                let _ = this.listen();
                return;
            }
            thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
        CLOSED_IN_VAIN.store(true, Ordering::Relaxed);
    }
}

/// Returns the registration of memory for a socket, which needs none.
pub(super) fn register(memory: Memory) -> Result<MemoryRegistration> {
    if memory.kind != POINTER_HOST {
        return Err(Fault::Argument(format!(
            "memory of kind {} can't be sent by sockets: getProperties says that only the host's \
             can",
            memory.kind
        )));
    }
    Ok(Box::new(()))
}
