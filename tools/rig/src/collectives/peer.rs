//! Another prefill host as the peer of exchanges: a communicator in each direction.
//!
//! Rows of both directions share a communicator. A receive is always posted, so neither host can
//! wait for the other to receive, whatever the order of exchanges.

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};

use laxity_nccl_host::{
    Attempt, Context, Handle, HostError, Listener, RecvComm, Request, STEP_BYTES, STEPS, SendQueue,
    Tested,
};
use thiserror::Error;

use super::counters::Counters;
use super::rows::{self, Inbound, Pattern, Rows, RowsError, Way};

/// Index of the device. The plugin gets only one interface.
const DEVICE: usize = 0;

/// The reason why exchanges with a host failed.
#[derive(Debug, Error)]
pub(super) enum PeerError {
    #[error(transparent)]
    Host(#[from] HostError),
    #[error(transparent)]
    Rows(#[from] RowsError),
    #[error("writing the handle {path}: {cause}")]
    Handle { path: PathBuf, cause: std::io::Error },
}

/// Returns the file with the handle of a listener at `at`, for the host `from` to connect to.
fn handle_file(folder: &Path, at: usize, from: usize) -> PathBuf {
    folder.join(format!("collectives{at}from{from}.handle"))
}

pub(super) struct PeerHost {
    pub(super) host: usize,
    /// File in which the peer puts its handle, as NCCL's bootstrap passes it.
    peers_handle: PathBuf,
    listener: Option<Listener>,
    send: SendQueue<Rows>,
    receive: Option<RecvComm>,
    receiving: VecDeque<Request>,
    inbound: Inbound,
}

impl PeerHost {
    /// Listens for a host, and writes the handle for it.
    pub(super) fn listen(
        context: &Context,
        folder: &Path,
        own: usize,
        host: usize,
    ) -> Result<Self, PeerError> {
        let (listener, handle) = context.listen(DEVICE)?;
        let path = handle_file(folder, own, host);
        let next = path.with_extension("next");
        // The peer never reads half a handle.
        fs::write(&next, handle)
            .and_then(|()| fs::rename(&next, &path))
            .map_err(|cause| PeerError::Handle { path, cause })?;
        Ok(Self {
            host,
            peers_handle: handle_file(folder, host, own),
            listener: Some(listener),
            send: SendQueue::default(),
            receive: None,
            receiving: VecDeque::new(),
            inbound: Inbound::default(),
        })
    }

    pub(super) fn is_connected(&self) -> bool {
        self.send.is_connected() && self.receive.is_some()
    }

    /// Reports whether the plugin has bytes of this peer to send.
    pub(super) fn is_busy(&self) -> bool {
        self.send.is_busy()
    }

    pub(super) fn dispatch(&mut self, exchange: u64, bytes: u64) {
        self.send.extend(rows::messages(Way::Dispatch, exchange, bytes));
    }

    /// Makes the plugin progress, and answers rows that came from the peer. Returns the own
    /// exchanges whose rows are back.
    pub(super) fn turn(
        &mut self,
        context: &Context,
        pattern: &Pattern,
        counters: &mut Counters,
    ) -> Result<Vec<u64>, PeerError> {
        if !self.is_connected() {
            self.connect(context)?;
        }
        // Receive first, because the peer may wait for that.
        let back = self.receive(pattern, counters)?;
        let sent = self.send.turn(|rows, region| pattern.write(rows, region))?;
        counters.sent_messages += sent.messages;
        counters.sent_bytes += sent.bytes;
        counters.refusals += sent.refusals;
        Ok(back)
    }

    fn connect(&mut self, context: &Context) -> Result<(), PeerError> {
        if !(self.send.is_connected() || self.send.is_connecting())
            && let Ok(bytes) = fs::read(&self.peers_handle)
            && let Ok(handle) = Handle::try_from(bytes.as_slice())
        {
            self.send.connect(context.connect(DEVICE, handle));
        }
        if let Some(listener) = &mut self.listener
            && let Some(receive) = listener.accept()?
        {
            self.receive = Some(receive);
            self.listener = None;
        }
        Ok(())
    }

    fn receive(
        &mut self,
        pattern: &Pattern,
        counters: &mut Counters,
    ) -> Result<Vec<u64>, PeerError> {
        let mut back = Vec::new();
        let Some(comm) = &self.receive else { return Ok(back) };
        while self.receiving.len() < STEPS {
            let region = comm.register(vec![0; STEP_BYTES])?;
            match comm.receive(region, STEP_BYTES, 0)? {
                Attempt::Started(request) => self.receiving.push_back(request),
                Attempt::NotNow(_) => break,
            }
        }
        while let Some(request) = self.receiving.pop_front() {
            let (mut region, length) = match request.test()? {
                Tested::Done(region, length) => (region, length),
                Tested::Pending(request) => {
                    self.receiving.push_front(request);
                    break;
                }
            };
            counters.received_bytes += length as u64;
            if let Some(rows) = self.inbound.take(pattern, &region[..length])? {
                match rows.way {
                    Way::Dispatch => {
                        self.send.extend(rows::messages(Way::Combine, rows.exchange, rows.total));
                    }
                    Way::Combine => back.push(rows.exchange),
                }
            }
            // The same memory again, so that a check of it can't pass by old bytes.
            region[..length].fill(0);
            match comm.receive(region, STEP_BYTES, 0)? {
                Attempt::Started(request) => self.receiving.push_back(request),
                Attempt::NotNow(_) => {}
            }
        }
        Ok(back)
    }
}
