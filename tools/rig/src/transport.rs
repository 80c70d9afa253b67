//! The data connections of one host: to each peer one TCP connection per class of the fabric, so
//! that a class's bytes, and the acknowledgements of what it receives, all carry its DSCP.
//!
//! The receiving side proves delivery: a flow's chunks have to arrive contiguously, with the
//! bytes that its sender's pattern has, each exactly once; anything else is counted.

use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind, IoSlice, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};

use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, SockaddrIn, sockopt};

use crate::fabric::{self, WireClass};
use crate::frame::{self, HEAD_BYTES, Head, PAYLOAD_BYTES_MAX};
use crate::ledger::{Arrival, DeliveryCheck, Reassembly, stage_name};
use crate::message::Traffic;

/// First TCP port; one per class.
const PORT_FIRST: u16 = 7000;

const BACKLOG: i32 = 64;

struct OutFrame {
    head: [u8; HEAD_BYTES],
    payload: &'static [u8],
}

struct Outgoing {
    stream: TcpStream,
    queue: VecDeque<OutFrame>,
    /// Bytes of the first frame that are gone.
    written: usize,
    blocked: bool,
}

impl Outgoing {
    fn flush(&mut self) -> io::Result<()> {
        while let Some(frame) = self.queue.front() {
            let slices = if self.written < HEAD_BYTES {
                [
                    IoSlice::new(&frame.head[self.written..]),
                    IoSlice::new(frame.payload),
                ]
            } else {
                let payload = &frame.payload[self.written - HEAD_BYTES..];
                [IoSlice::new(payload), IoSlice::new(&[])]
            };
            match self.stream.write_vectored(&slices) {
                Ok(count) => {
                    self.written += count;
                    if self.written == HEAD_BYTES + frame.payload.len() {
                        self.queue.pop_front();
                        self.written = 0;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.blocked = true;
                    return Ok(());
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

struct Incoming {
    stream: TcpStream,
    stream_so_far: Reassembly,
}

/// All data connections of a host.
pub struct Transport {
    host: usize,
    classes: Vec<WireClass>,
    socket_buffer: u32,
    listeners: Vec<TcpListener>,
    outgoing: Vec<Outgoing>,
    by_peer: HashMap<(usize, usize), usize>,
    incoming: Vec<Option<Incoming>>,
    buffer: Vec<u8>,
    ledger: DeliveryCheck,
    sent: Traffic,
}

fn tos(class: WireClass) -> i32 {
    i32::from(class.dscp) << 2
}

fn limit_buffers(socket: &impl AsFd, bytes: u32) -> nix::Result<()> {
    // The kernel doubles what is asked for, to account for its own overhead.
    socket::setsockopt(socket, sockopt::SndBuf, &(bytes as usize / 2))?;
    socket::setsockopt(socket, sockopt::RcvBuf, &(bytes as usize / 2))
}

impl Transport {
    /// Listens on one port per class.
    ///
    /// # Errors
    /// The host's namespace has no such address, or something else listens there.
    pub fn listen(host: usize, classes: Vec<WireClass>, socket_buffer: u32) -> io::Result<Self> {
        let mut listeners = Vec::new();
        for (port, &class) in (PORT_FIRST..).zip(&classes) {
            // The receive buffer has to be set before the handshake fixes the window's scale, and
            // an accepted socket inherits it, as it inherits the mark for its acknowledgements.
            let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
            let socket = socket::socket(AddressFamily::Inet, SockType::Stream, flags, None)?;
            limit_buffers(&socket, socket_buffer)?;
            // Connections of the run before may linger.
            socket::setsockopt(&socket, sockopt::ReuseAddr, &true)?;
            socket::setsockopt(&socket, sockopt::Ipv4Tos, &tos(class))?;
            let address =
                SockaddrIn::from(std::net::SocketAddrV4::new(fabric::address(host), port));
            socket::bind(std::os::fd::AsRawFd::as_raw_fd(&socket), &address)?;
            socket::listen(&socket, socket::Backlog::new(BACKLOG)?)?;
            listeners.push(TcpListener::from(socket));
        }
        Ok(Self {
            host,
            classes,
            socket_buffer,
            listeners,
            outgoing: Vec::new(),
            by_peer: HashMap::new(),
            incoming: Vec::new(),
            buffer: vec![0; 256 << 10],
            ledger: DeliveryCheck::default(),
            sent: Traffic::default(),
        })
    }

    /// Connects to a peer once per class and returns the numbers of the new connections.
    ///
    /// # Errors
    /// The peer does not listen.
    pub fn connect(&mut self, peer: usize) -> io::Result<Vec<usize>> {
        let mut connected = Vec::new();
        for (index, class) in self.classes.clone().into_iter().enumerate() {
            let flags = SockFlag::SOCK_CLOEXEC;
            let socket = socket::socket(AddressFamily::Inet, SockType::Stream, flags, None)?;
            limit_buffers(&socket, self.socket_buffer)?;
            socket::setsockopt(&socket, sockopt::Ipv4Tos, &tos(class))?;
            let address = SocketAddr::from((fabric::address(peer), PORT_FIRST + index as u16));
            let SocketAddr::V4(address) = address else {
                continue;
            };
            socket::connect(
                std::os::fd::AsRawFd::as_raw_fd(&socket),
                &SockaddrIn::from(address),
            )?;
            let stream = TcpStream::from(socket);
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
            self.by_peer.insert((peer, index), self.outgoing.len());
            connected.push(self.outgoing.len());
            self.outgoing.push(Outgoing {
                stream,
                queue: VecDeque::new(),
                written: 0,
                blocked: false,
            });
        }
        Ok(connected)
    }

    /// The listening sockets, to be polled.
    pub fn listeners(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.listeners.iter().map(AsFd::as_fd)
    }

    /// An outgoing connection, to be polled for room.
    #[must_use]
    pub fn outgoing(&self, number: usize) -> BorrowedFd<'_> {
        self.outgoing[number].stream.as_fd()
    }

    /// An incoming connection, to be polled for bytes.
    #[must_use]
    pub fn incoming(&self, number: usize) -> Option<BorrowedFd<'_>> {
        self.incoming
            .get(number)?
            .as_ref()
            .map(|incoming| incoming.stream.as_fd())
    }

    /// Accepts what waits at a listener and returns the numbers of the new connections.
    ///
    /// # Errors
    /// The host has run out of descriptors.
    pub fn accept(&mut self, listener: usize) -> io::Result<Vec<usize>> {
        let mut accepted = Vec::new();
        loop {
            match self.listeners[listener].accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true)?;
                    socket::setsockopt(&stream, sockopt::Ipv4Tos, &tos(self.classes[listener]))?;
                    accepted.push(self.incoming.len());
                    self.incoming.push(Some(Incoming {
                        stream,
                        stream_so_far: Reassembly::default(),
                    }));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(accepted),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Queues bytes of a flow on the connection of `dscp`'s class to `peer`.
    ///
    /// `head.offset` and `head.len` say which; they are cut into frames here.
    pub fn send(&mut self, peer: usize, class: usize, head: &Head, bytes: u64) {
        let Some(&number) = self.by_peer.get(&(peer, class)) else {
            return;
        };
        let outgoing = &mut self.outgoing[number];
        let mut offset = head.offset;
        let end = offset + bytes;
        while offset < end {
            let len = (end - offset).min(PAYLOAD_BYTES_MAX as u64);
            let cut = Head {
                offset,
                len: len as u32,
                ..*head
            };
            outgoing.queue.push_back(OutFrame {
                head: cut.encode(),
                payload: frame::payload(head.flow, offset, len as usize),
            });
            offset += len;
        }
        let stage = stage_name(head.kind).to_owned();
        let dscp = self.classes[class].dscp;
        *self
            .sent
            .sent
            .entry(stage)
            .or_default()
            .entry(dscp)
            .or_default() += bytes;
    }

    /// An outgoing connection has room again.
    pub fn unblock(&mut self, number: usize) {
        self.outgoing[number].blocked = false;
    }

    /// Writes what the connections take.
    ///
    /// # Errors
    /// A peer is gone.
    pub fn flush(&mut self) -> io::Result<()> {
        for outgoing in &mut self.outgoing {
            if !outgoing.blocked && !outgoing.queue.is_empty() {
                outgoing.flush()?;
            }
        }
        Ok(())
    }

    /// Reads what a connection has and appends the frames that became complete.
    ///
    /// # Errors
    /// The peer speaks something else. That it closed the connection is no error.
    pub fn receive(&mut self, number: usize, arrivals: &mut Vec<Arrival>) -> io::Result<()> {
        let Some(incoming) = self.incoming[number].as_mut() else {
            return Ok(());
        };
        loop {
            match incoming.stream.read(&mut self.buffer) {
                Ok(0) => {
                    self.incoming[number] = None;
                    return Ok(());
                }
                Ok(count) => {
                    let bytes = &self.buffer[..count];
                    incoming
                        .stream_so_far
                        .take(bytes, &mut self.ledger, arrivals)?;
                    if count < self.buffer.len() {
                        return Ok(());
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => {
                    self.incoming[number] = None;
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// What was sent and received. Of flows that never ended, what did not come is the difference.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        Traffic {
            sent: self.sent.sent.clone(),
            ..self.ledger.traffic().clone()
        }
    }

    /// The host these connections belong to.
    #[must_use]
    pub fn host(&self) -> usize {
        self.host
    }
}
