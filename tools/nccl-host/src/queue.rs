//! The messages to and from one peer: some wait for the plugin, and some are in flight.
//!
//! Like NCCL's proxy, a queue fills memory once for a message, asks the plugin for the same message
//! again after "not now", and tests the oldest request first.

use std::collections::VecDeque;

use crate::comm::{Connecting, Listener, RecvComm, SendComm};
use crate::error::HostError;
use crate::memory::Region;
use crate::request::{Attempt, Request, Tested};

/// Maximum number of bytes of a message. This is a step of NCCL's buffers (4 MiB in 8 steps).
pub const STEP_BYTES: usize = 512 << 10;

/// Maximum number of messages in flight on one communicator. NCCL has as many steps.
pub const STEPS: usize = 8;

/// Counters of one turn of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendCounts {
    pub messages: u64,
    pub bytes: u64,
    /// Messages that the plugin answered with "not now".
    pub refusals: u64,
    /// Messages that are done, whichever turn started them.
    pub done: u64,
}

/// Messages `M`, which become bytes only when the plugin has room for them.
pub struct SendQueue<M> {
    connecting: Option<Connecting>,
    comm: Option<SendComm>,
    waiting: VecDeque<M>,
    /// A message in registered memory, after the plugin answered "not now".
    filled: Option<(Region, usize)>,
    sending: VecDeque<Request>,
    spare: Vec<Region>,
}

impl<M> Default for SendQueue<M> {
    fn default() -> Self {
        let (waiting, sending, spare) = Default::default();
        Self { connecting: None, comm: None, waiting, filled: None, sending, spare }
    }
}

impl<M> SendQueue<M> {
    pub fn connect(&mut self, connecting: Connecting) {
        self.connecting = Some(connecting);
    }

    pub const fn is_connecting(&self) -> bool {
        self.connecting.is_some()
    }

    pub const fn is_connected(&self) -> bool {
        self.comm.is_some()
    }

    /// Reports whether a turn has something to do.
    pub fn is_busy(&self) -> bool {
        let idle = self.waiting.is_empty() && self.sending.is_empty();
        self.connecting.is_some() || self.filled.is_some() || !idle
    }

    pub fn extend(&mut self, messages: impl IntoIterator<Item = M>) {
        self.waiting.extend(messages);
    }

    /// Starts as many messages as the plugin takes, and makes it progress. `fill` writes a message
    /// into memory of [`STEP_BYTES`] bytes, and returns its length.
    pub fn turn(&mut self, fill: impl Fn(&M, &mut [u8]) -> usize) -> Result<SendCounts, HostError> {
        let mut counts = SendCounts::default();
        if let Some(connecting) = &mut self.connecting {
            self.comm = connecting.poll()?;
        }
        let Some(comm) = &self.comm else { return Ok(counts) };
        self.connecting = None;
        while self.sending.len() < STEPS {
            let (region, length) = if let Some(filled) = self.filled.take() {
                filled
            } else if let Some(message) = self.waiting.pop_front() {
                let mut region = match self.spare.pop() {
                    Some(region) => region,
                    None => comm.register(vec![0; STEP_BYTES])?,
                };
                let length = fill(&message, &mut region);
                (region, length)
            } else {
                break;
            };
            match comm.send(region, length, 0)? {
                Attempt::Started(request) => {
                    self.sending.push_back(request);
                    counts.messages += 1;
                    counts.bytes += length as u64;
                }
                Attempt::NotNow(region) => {
                    counts.refusals += 1;
                    self.filled = Some((region, length));
                    break;
                }
            }
        }
        while let Some((region, _)) = take_done(&mut self.sending)? {
            self.spare.push(region);
            counts.done += 1;
        }
        Ok(counts)
    }
}

/// Takes the oldest request if it is done.
fn take_done(requests: &mut VecDeque<Request>) -> Result<Option<(Region, usize)>, HostError> {
    let Some(request) = requests.pop_front() else { return Ok(None) };
    match request.test()? {
        Tested::Done(region, length) => Ok(Some((region, length))),
        Tested::Pending(request) => {
            requests.push_front(request);
            Ok(None)
        }
    }
}

/// Messages from the peer that connects to a listener. Receives are posted ahead of them.
pub struct ReceiveQueue {
    listener: Option<Listener>,
    comm: Option<RecvComm>,
    receiving: VecDeque<Request>,
    spare: Vec<Region>,
}

impl ReceiveQueue {
    pub const fn new(listener: Listener) -> Self {
        let listener = Some(listener);
        Self { listener, comm: None, receiving: VecDeque::new(), spare: Vec::new() }
    }

    pub const fn is_connected(&self) -> bool {
        self.comm.is_some()
    }

    /// Accepts the peer, unless that is done. Returns whether it is connected.
    pub fn accept(&mut self) -> Result<bool, HostError> {
        if let Some(listener) = &mut self.listener
            && let Some(comm) = listener.accept()?
        {
            self.comm = Some(comm);
            self.listener = None;
        }
        Ok(self.is_connected())
    }

    /// Posts receives until `ahead` are under way. If the next message is there, returns what
    /// `take` makes of it. The message's memory is then used again.
    pub fn next<T>(
        &mut self,
        ahead: usize,
        take: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<Option<T>, HostError> {
        let Some(comm) = &self.comm else { return Ok(None) };
        while self.receiving.len() < ahead {
            let region = match self.spare.pop() {
                Some(region) => region,
                None => comm.register(vec![0; STEP_BYTES])?,
            };
            match comm.receive(region, STEP_BYTES, 0)? {
                Attempt::Started(request) => self.receiving.push_back(request),
                Attempt::NotNow(region) => {
                    self.spare.push(region);
                    break;
                }
            }
        }
        let done = take_done(&mut self.receiving)?;
        Ok(done.map(|(mut region, length)| {
            let taken = take(&mut region[..length]);
            self.spare.push(region);
            taken
        }))
    }
}
