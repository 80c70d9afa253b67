//! Exchanges of ranks in lockstep over an NCCL net plugin. There is one communicator to and one
//! from each other rank. Parcels are `isend`s and `irecv`s on them.
//!
//! A thread of its own owns the plugin, like NCCL's proxy thread, because the interface is polled
//! and has no file descriptor. The thread sleeps while no exchange is in progress. Otherwise it
//! polls every [`POLL_EVERY`].
//!
//! Like NCCL, a rank posts its receives only when it begins an exchange. Data of a faster rank wait
//! in the connection until then.
//!
//! The flows are the plugin's own. It submits them to the host's daemon under its own client name,
//! and marks what it sends. They name no batch, so the daemon assigns them to the batch whose layer
//! began last in their process.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use laxity_nccl_host::{Context, HANDLE_BYTES, Handle, HostError};
use thiserror::Error;

mod peer;

use super::inbox::{Inbox, Key};
use peer::{ExchangeError, Peer};

/// Pause between two polls of transfers. A message of 64 KiB takes 2.6 ms on the lab's ports.
const POLL_EVERY: Duration = Duration::from_micros(150);

/// Index of the device. The plugin gets only one interface.
const DEVICE: usize = 0;

#[derive(Debug, Error)]
pub enum PluginError {
    #[error(transparent)]
    Host(#[from] HostError),
    #[error("the plugin has no device")]
    NoDevice,
    #[error("no thread for the plugin: {0}")]
    Thread(io::Error),
    #[error("the plugin's thread ended")]
    Ended,
    #[error("a handle has {0} bytes, not {HANDLE_BYTES}")]
    Handle(usize),
    #[error("{0} is no rank of this group")]
    Stranger(SocketAddr),
    #[error("exchanges with {rank}: {cause}")]
    Exchange { rank: SocketAddr, cause: ExchangeError },
}

enum PluginCommand {
    Connect(SocketAddr, Box<Handle>),
    /// Send a parcel to a rank, and receive one from it into the inbox.
    Exchange(SocketAddr, Key, Vec<u8>),
}

/// A handle of the plugin's thread. Clones share the thread.
#[derive(Clone, Debug)]
pub struct Plugin(Sender<PluginCommand>);

impl Plugin {
    /// Loads a plugin and listens once for each other rank. `tell` sends a rank the handle for it.
    /// Fails if the plugin cannot be used, or no thread can be started.
    pub fn start(
        file: &Path,
        ranks: Vec<SocketAddr>,
        inbox: Arc<Inbox>,
        tell: impl Fn(SocketAddr, Vec<u8>) + Send + 'static,
    ) -> Result<Self, PluginError> {
        let (orders, incoming) = channel();
        let (started, starts) = channel();
        let file = file.to_owned();
        let thread = std::thread::Builder::new().name("collectives".to_owned());
        let spawned = thread.spawn(move || {
            let listening = |handles: Vec<(SocketAddr, Handle)>| {
                let _ = started.send(Ok(()));
                for (rank, handle) in handles {
                    tell(rank, handle.to_vec());
                }
            };
            if let Err(error) = serve(&file, &ranks, &incoming, &inbox, listening) {
                tracing::error!("the NCCL plugin failed: {error}");
                // Threads that wait for an exchange get an error instead of a timeout.
                for rank in ranks {
                    inbox.lose(rank);
                }
                let _ = started.send(Err(error));
            }
        });
        spawned.map_err(PluginError::Thread)?;
        starts.recv().map_err(|_| PluginError::Ended)??;
        Ok(Self(orders))
    }

    /// Connects to a rank at its handle.
    /// Fails if the bytes are no handle, which means that the rank has another version.
    pub fn connect(&self, rank: SocketAddr, handle: &[u8]) -> Result<(), PluginError> {
        let handle = Handle::try_from(handle).map_err(|_| PluginError::Handle(handle.len()))?;
        // A failed thread logged its error.
        let _ = self.0.send(PluginCommand::Connect(rank, Box::new(handle)));
        Ok(())
    }

    /// Sends a parcel to a rank, and receives one from it under `key`.
    pub fn exchange(&self, rank: SocketAddr, key: Key, payload: Vec<u8>) {
        let _ = self.0.send(PluginCommand::Exchange(rank, key, payload));
    }
}

fn serve(
    file: &Path,
    ranks: &[SocketAddr],
    orders: &Receiver<PluginCommand>,
    inbox: &Inbox,
    listening: impl FnOnce(Vec<(SocketAddr, Handle)>),
) -> Result<(), PluginError> {
    let plugin = laxity_nccl_host::Plugin::load(file)?;
    // All ranks compute the same lowest port. A communicator's number must not be 0.
    let group = ranks.iter().min().map_or(0, |rank| u64::from(rank.port()));
    let context = plugin.init(1 + group)?;
    if context.devices()? == 0 {
        return Err(PluginError::NoDevice);
    }
    let (mut all, mut handles) = (Vec::new(), Vec::new());
    for &rank in ranks {
        let (peer, handle) = Peer::listen(&context, rank)?;
        all.push(peer);
        handles.push((rank, handle));
    }
    listening(handles);
    loop {
        let mut next = if all.iter().any(Peer::is_busy) {
            orders.recv_timeout(POLL_EVERY)
        } else {
            orders.recv().map_err(RecvTimeoutError::from)
        };
        while let Ok(order) = next {
            take(order, &context, &mut all)?;
            next = orders.recv_timeout(Duration::ZERO);
        }
        if matches!(next, Err(RecvTimeoutError::Disconnected)) {
            return Ok(());
        }
        for peer in &mut all {
            peer.turn(inbox).map_err(|cause| PluginError::Exchange { rank: peer.rank, cause })?;
        }
    }
}

fn take(order: PluginCommand, context: &Context, peers: &mut [Peer]) -> Result<(), PluginError> {
    let (PluginCommand::Connect(rank, _) | PluginCommand::Exchange(rank, ..)) = &order;
    let peer =
        peers.iter_mut().find(|peer| peer.rank == *rank).ok_or(PluginError::Stranger(*rank))?;
    match order {
        PluginCommand::Connect(_, handle) => peer.connect(context, *handle),
        PluginCommand::Exchange(_, key, payload) => peer.exchange(key, payload),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plugin_that_is_not_there_is_named() {
        let ranks = vec!["127.0.0.1:1".parse().unwrap()];
        let file = Path::new("/nowhere/plugin.so");
        let error = Plugin::start(file, ranks, Arc::default(), |_, _| {}).unwrap_err();
        assert!(error.to_string().contains("/nowhere/plugin.so"), "{error}");
    }
}
