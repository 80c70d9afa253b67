//! One control connection, as the service thread moves it: operations of this rank go out, and
//! those of the peer are performed in this rank's regions.

use core::ffi::c_void;
use std::collections::{HashMap, VecDeque};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd as _;

use super::frame::{Frame, HEAD_BYTES};
use super::gate::RmaOperation;
use super::mesh::Mesh;
use super::region::Place;
use super::request::RequestPart;
use crate::fault::{Fault, Result};
use crate::socket::peer;
use crate::tcp::socket;

/// Bytes after which another connection is served.
const TURN_BYTES: usize = 4 << 20;
/// Largest number of gets that wait for their data. The peer keeps a reply for each.
const GETS_MAX: usize = 256;

/// A message or an operation for a peer.
pub(super) enum Outgoing {
    /// This rank's contribution to an exchange, with its number.
    Exchange(u64, Vec<u8>),
    RmaOperation(RmaOperation, RequestPart),
    Bye,
}

/// A frame that is being sent.
struct Item {
    head: [u8; HEAD_BYTES],
    body: Body,
    bytes: u64,
    part: Option<RequestPart>,
    is_reply: bool,
}

enum Body {
    None,
    Owned(Vec<u8>),
    RmaRegion(Place),
}

/// The destination of a frame's data.
enum FrameSink {
    Exchange {
        number: u64,
        data: Vec<u8>,
        filled: usize,
    },
    /// Without a place, the data are dropped: the region was deregistered.
    RmaRegion {
        place: Option<Place>,
        bytes: u64,
        filled: u64,
        part: Option<RequestPart>,
    },
}

/// A get whose data have not come.
struct PendingGet {
    to: Place,
    bytes: u64,
    part: RequestPart,
}

pub(super) struct RankLink {
    pub(super) stream: TcpStream,
    pub(super) rank: usize,
    out: VecDeque<Item>,
    /// Bytes of the first item that were sent, its head included.
    written: u64,
    /// Gets that are not sent yet, because [`GETS_MAX`] gets wait for their data.
    later: VecDeque<Outgoing>,
    gets: HashMap<u64, PendingGet>,
    next_get: u64,
    replies: usize,
    head: [u8; HEAD_BYTES],
    head_filled: usize,
    sink: Option<FrameSink>,
    /// Whether the peer has closed its group.
    has_left: bool,
}

impl RankLink {
    pub(super) fn new(stream: TcpStream, rank: usize) -> Self {
        Self {
            stream,
            rank,
            out: VecDeque::new(),
            written: 0,
            later: VecDeque::new(),
            gets: HashMap::new(),
            next_get: 0,
            replies: 0,
            head: [0; HEAD_BYTES],
            head_filled: 0,
            sink: None,
            has_left: false,
        }
    }

    pub(super) fn has_output(&self) -> bool {
        !self.out.is_empty()
    }

    /// Reports whether the peer closed its group in order.
    pub(super) fn has_left(&self) -> bool {
        self.has_left
    }

    fn garbled(&self, what: &str) -> Fault {
        Fault::Remote(format!(
            "rank {} at {} sent {what}: the connection is garbled",
            self.rank,
            peer(&self.stream)
        ))
    }

    fn broken(&self, error: &std::io::Error) -> Fault {
        Fault::Remote(format!(
            "rank {} at {}: {error}: its process is gone, or aborted",
            self.rank,
            peer(&self.stream)
        ))
    }

    /// Returns the number of gets for which the peer keeps a reply. It keeps the reply until it has
    /// sent all of the data.
    fn open_gets(&self) -> usize {
        let arriving = matches!(self.sink, Some(FrameSink::RmaRegion { part: Some(_), .. }));
        self.gets.len() + usize::from(arriving)
    }

    /// Queues a frame.
    pub(super) fn push(&mut self, outgoing: Outgoing) {
        let (frame, body, bytes, part) = match outgoing {
            Outgoing::Exchange(number, data) => {
                let bytes = data.len() as u64;
                (Frame::Exchange { number, bytes }, Body::Owned(data), bytes, None)
            }
            Outgoing::Bye => {
                self.later.clear();
                (Frame::Bye, Body::None, 0, None)
            }
            // A flush concerns only memory of this rank, so nothing is sent.
            Outgoing::RmaOperation(RmaOperation::Flush(_), part) => return part.succeed(),
            Outgoing::RmaOperation(RmaOperation::Put(put), part) => {
                let (region, offset, bytes) = (put.far.region.id, put.far.offset, put.bytes);
                (Frame::Put { region, offset, bytes }, Body::RmaRegion(put.near), bytes, Some(part))
            }
            Outgoing::RmaOperation(RmaOperation::Signal(far, value), part) => {
                let (region, offset) = (far.region.id, far.offset);
                (Frame::Signal { region, offset, value }, Body::None, 0, Some(part))
            }
            get @ Outgoing::RmaOperation(RmaOperation::Get(_), _)
                if self.open_gets() >= GETS_MAX =>
            {
                return self.later.push_back(get);
            }
            Outgoing::RmaOperation(RmaOperation::Get(get), part) => {
                let (region, offset, bytes) = (get.far.region.id, get.far.offset, get.bytes);
                let number = self.next_get;
                self.next_get += 1;
                self.gets.insert(number, PendingGet { to: get.near, bytes, part });
                (Frame::Get { region, offset, bytes, number }, Body::None, 0, None)
            }
        };
        self.out.push_back(Item { head: frame.encode(), body, bytes, part, is_reply: false });
    }

    /// Sends what the socket takes.
    pub(super) fn write(&mut self) -> Result<()> {
        while let Some(item) = self.out.front() {
            let head = &item.head[(self.written as usize).min(HEAD_BYTES)..];
            let skip = self.written.saturating_sub(HEAD_BYTES as u64);
            let send = |address: usize| {
                let piece = |address: *const u8, bytes: u64| libc::iovec {
                    iov_base: address.cast_mut().cast::<c_void>(),
                    iov_len: bytes as usize,
                };
                let body = piece(address as *const u8, item.bytes - skip);
                let pieces = [piece(head.as_ptr(), head.len() as u64), body];
                // SAFETY: the head is borrowed. The body is owned by the item, or within a region
                // whose lock is held during the call.
                unsafe { socket::send(self.stream.as_raw_fd(), &pieces, 0) }
            };
            let sent = match &item.body {
                Body::None => Some(send(0)),
                Body::Owned(data) => Some(send(data.as_ptr() as usize + skip as usize)),
                Body::RmaRegion(place) => place.with(skip, send),
            };
            match sent {
                Some(Ok(None)) => return Ok(()),
                Some(Ok(Some(count))) => self.written += count as u64,
                Some(Err(error)) => return Err(self.broken(&error)),
                // Nothing may follow: a later signal would announce bytes that never came.
                None => {
                    return Err(Fault::Argument(
                        "a region was deregistered while its memory was sent".into(),
                    ));
                }
            }
            let is_whole = |item: &Item| self.written == HEAD_BYTES as u64 + item.bytes;
            if self.out.front().is_some_and(is_whole)
                && let Some(item) = self.out.pop_front()
            {
                self.written = 0;
                self.replies -= usize::from(item.is_reply);
                if let Some(part) = item.part {
                    part.succeed();
                }
            }
        }
        Ok(())
    }

    /// Performs the requests that have arrived. Returns false at the end of the connection.
    pub(super) fn read(&mut self, mesh: &Mesh) -> Result<bool> {
        let mut turn = 0;
        while turn < TURN_BYTES {
            let count = match self.receive() {
                Ok(None) => return Ok(true),
                Ok(Some(0)) => return Ok(false),
                Ok(Some(count)) => count,
                Err(error) => return Err(self.broken(&error)),
            };
            turn += count;
            match &mut self.sink {
                Some(FrameSink::Exchange { filled, .. }) => *filled += count,
                Some(FrameSink::RmaRegion { filled, .. }) => *filled += count as u64,
                None => {
                    self.head_filled += count;
                    if self.head_filled == HEAD_BYTES {
                        self.head_filled = 0;
                        let frame =
                            Frame::decode(&self.head).map_err(|what| self.garbled(&what))?;
                        self.begin(frame, mesh)?;
                    }
                }
            }
            self.finish(mesh)?;
        }
        Ok(true)
    }

    /// Reads the available bytes of the next head or of its data.
    fn receive(&mut self) -> std::io::Result<Option<usize>> {
        let fd = self.stream.as_raw_fd();
        let read = |address: usize, bytes: u64| {
            // SAFETY: the memory is borrowed mutably, or within a region whose lock is held during
            // the call.
            unsafe { socket::receive(fd, address as *mut u8, bytes as usize) }
        };
        let slice = |room: &mut [u8]| read(room.as_mut_ptr() as usize, room.len() as u64);
        match &mut self.sink {
            None => slice(&mut self.head[self.head_filled..]),
            Some(FrameSink::Exchange { data, filled, .. }) => slice(&mut data[*filled..]),
            Some(FrameSink::RmaRegion { place, bytes, filled, .. }) => {
                let rest = *bytes - *filled;
                let within = |place: &Place| place.with(*filled, |address| read(address, rest));
                if let Some(count) = place.as_ref().and_then(within) {
                    return count;
                }
                *place = None;
                let mut scratch = [0; 4096];
                slice(&mut scratch[..rest.min(4096) as usize])
            }
        }
    }

    fn begin(&mut self, frame: Frame, mesh: &Mesh) -> Result<()> {
        if self.has_left {
            return Err(self.garbled("more than its end"));
        }
        let region = |id, offset, bytes| {
            let found = mesh.region(id).map_err(|what| self.garbled(what))?;
            let place = found.map(|region| region.place(offset, bytes)).transpose();
            place.map_err(|fault| self.garbled(&fault.to_string()))
        };
        match frame {
            Frame::Exchange { number, bytes } => {
                self.sink =
                    Some(FrameSink::Exchange { number, data: vec![0; bytes as usize], filled: 0 });
            }
            Frame::Put { region: id, offset, bytes } => {
                let place = region(id, offset, bytes)?;
                self.sink = Some(FrameSink::RmaRegion { place, bytes, filled: 0, part: None });
            }
            Frame::Signal { region: id, offset, value } => {
                if let Some(place) = region(id, offset, 8)? {
                    place.add(value).map_err(|fault| self.garbled(&fault.to_string()))?;
                }
            }
            Frame::Get { region: id, offset, bytes, number } => {
                let place = region(id, offset, bytes)?;
                let place = place.ok_or_else(|| self.garbled("a get of a region that is gone"))?;
                self.replies += 1;
                if self.replies > GETS_MAX {
                    return Err(self.garbled("too many gets"));
                }
                let head = Frame::Reply { number, bytes }.encode();
                let body = Body::RmaRegion(place);
                self.out.push_back(Item { head, body, bytes, part: None, is_reply: true });
            }
            Frame::Reply { number, bytes } => {
                let pending = self.gets.remove(&number).filter(|get| get.bytes == bytes);
                let get = pending.ok_or_else(|| self.garbled("a reply that nobody asked for"))?;
                let (place, part) = (Some(get.to), Some(get.part));
                self.sink = Some(FrameSink::RmaRegion { place, bytes, filled: 0, part });
            }
            Frame::Bye => self.has_left = true,
        }
        Ok(())
    }

    /// Ends the current frame if all of its data have come.
    fn finish(&mut self, mesh: &Mesh) -> Result<()> {
        match &self.sink {
            Some(FrameSink::Exchange { data, filled, .. }) if *filled == data.len() => {}
            Some(FrameSink::RmaRegion { bytes, filled, .. }) if filled == bytes => {}
            _ => return Ok(()),
        }
        match self.sink.take() {
            Some(FrameSink::Exchange { number, data, .. }) => {
                mesh.contributed(self.rank, number, data).map_err(|what| self.garbled(what))
            }
            Some(FrameSink::RmaRegion { place, part: Some(part), .. }) => {
                if place.is_some() {
                    part.succeed();
                }
                if let Some(get) = self.later.pop_front() {
                    self.push(get);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Tells the peer that nothing follows.
    pub(super) fn end_output(&self) {
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}

impl Drop for RankLink {
    fn drop(&mut self) {
        // A forked child may have the socket, too, so closing it here wouldn't end the connection.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}
