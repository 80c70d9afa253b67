//! Another prefill host as the peer of exchanges: a communicator in each direction.
//!
//! Rows of both directions share a communicator. A receive is always posted, so neither host can
//! wait for the other to receive, whatever the order of exchanges.

use std::fs;
use std::path::{Path, PathBuf};

use laxity_nccl_host::{Context, Handle, HostError, ReceiveQueue, STEPS, SendQueue};
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
    send: SendQueue<Rows>,
    receive: ReceiveQueue,
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
            send: SendQueue::default(),
            receive: ReceiveQueue::new(listener),
            inbound: Inbound::default(),
        })
    }

    pub(super) fn is_connected(&self) -> bool {
        self.send.is_connected() && self.receive.is_connected()
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
        self.receive.accept()?;
        Ok(())
    }

    fn receive(
        &mut self,
        pattern: &Pattern,
        counters: &mut Counters,
    ) -> Result<Vec<u64>, PeerError> {
        let mut back = Vec::new();
        loop {
            let take = |message: &mut [u8]| {
                counters.received_bytes += message.len() as u64;
                let rows = self.inbound.take(pattern, message);
                // The memory is used again, and a check of it must not pass by old bytes.
                message.fill(0);
                rows
            };
            let Some(rows) = self.receive.next(STEPS, take)? else { return Ok(back) };
            let Some(rows) = rows? else { continue };
            match rows.way {
                Way::Dispatch => {
                    self.send.extend(rows::messages(Way::Combine, rows.exchange, rows.total));
                }
                Way::Combine => back.push(rows.exchange),
            }
        }
    }
}
