//! RDMA: messages are written into the receiver's memory by reliable connections of libibverbs, one
//! for each traffic class.
//!
//! ```text
//! receiver  posts a buffer ──── entry: address, key, size, tag (RDMA WRITE) ────▶ fifo in the sender's memory
//! sender    clear, begin, push ── the bytes, by the queue pair of the message's class (RDMA WRITE) ──▶ the buffer
//!           the last piece carries 32 bits that say which buffer is filled, and how far ──▶ completion at the receiver
//! ```
//!
//! A queue pair has one traffic class for life (it is part of its address), so a connection has as
//! many as there are classes, and a message's class is free to choose until its first byte. Order
//! between messages is the receiver's affair: each names its buffer.
//!
//! * `library.rs`, `choose.rs`, `options.rs`, `open.rs`, `nic.rs`: which devices there are, and what they can
//!   do. libibverbs is opened at run time.
//! * `memory.rs`: registrations, one each, however often they are asked for.
//! * `hello.rs`, `control_connection.rs`, `connect.rs`: the handshake over TCP, which stays open to notice the
//!   peer's end.
//! * `cts.rs`, `pinned.rs`, `completions.rs`, `queue_pair.rs`, `outgoing.rs`, `sender.rs`, `receiver.rs`: messages.
//!
//! Where NCCL's own transport (`net_ib`) spreads a message over several queue pairs, or over the
//! ports of a card, this does not.

mod choose;
mod completions;
mod connect;
mod control_connection;
mod cts;
mod hello;
mod library;
mod memory;
mod nic;
mod open;
mod options;
mod outgoing;
mod pinned;
mod queue_pair;
mod receiver;
mod sender;

use std::net::SocketAddr;
use std::sync::Arc;

use crate::backend::{Backend, Classes, Connecting, Device, Listener, POINTER_DMABUF};
use crate::fault::{Fault, Result};
use crate::handle::Handle;
use crate::interfaces;
use crate::log;
use crate::settings::Settings;
use nic::Nic;
pub use options::Options;

/// The RDMA devices of this host. Connections are agreed on over TCP at the interface that NCCL
/// would use for that.
///
/// # Errors
/// Why there are none.
pub fn open(settings: &Settings) -> core::result::Result<Box<dyn Backend>, String> {
    let meet_at = match interfaces::devices(settings) {
        Ok(found) => found.first().map(|(_, address)| *address),
        Err(fault) if settings.interfaces.is_some() => return Err(fault.to_string()),
        // The devices have addresses of their own.
        Err(_) => None,
    };
    Ok(Box::new(Verbs::open(&settings.rdma, meet_at)?))
}

/// The RDMA devices of this host that are to be used.
#[derive(Debug)]
pub struct Verbs {
    nics: Vec<Arc<Nic>>,
    devices: Vec<Device>,
    /// Where connections are agreed on; by default at the device's own address.
    meet_at: Option<SocketAddr>,
}

impl Verbs {
    /// Opens them. `meet_at`: the address (of the interface that `NCCL_SOCKET_IFNAME` names) at
    /// which connections are agreed on over TCP.
    ///
    /// # Errors
    /// None can be used: a sentence why. TCP can do without.
    pub fn open(
        options: &Options,
        meet_at: Option<SocketAddr>,
    ) -> core::result::Result<Self, String> {
        let nics = open::open_all(options)?;
        for nic in &nics {
            let device = nic.device();
            let link = if nic.link == nic::INFINIBAND {
                "InfiniBand"
            } else {
                "RoCE"
            };
            log::info(&format!(
                "{}:{} {link} {} Mbit/s, GID {} ({}){}",
                nic.name,
                nic.port,
                device.speed_mbit,
                nic.gid_index,
                device.address,
                if device.pointers & POINTER_DMABUF != 0 {
                    ", takes DMA-BUFs"
                } else {
                    ""
                },
            ));
        }
        Ok(Self {
            devices: nics.iter().map(|nic| nic.device().clone()).collect(),
            nics,
            meet_at,
        })
    }

    fn nic(&self, device: usize) -> Result<&Arc<Nic>> {
        self.nics.get(device).ok_or_else(|| {
            Fault::Argument(format!(
                "there is no device {device}: there are {}",
                self.nics.len()
            ))
        })
    }
}

impl Backend for Verbs {
    fn name(&self) -> &'static str {
        "verbs"
    }

    fn devices(&self) -> &[Device] {
        &self.devices
    }

    fn listen(&self, device: usize) -> Result<(Box<dyn Listener>, Handle)> {
        let nic = self.nic(device)?;
        let at = self
            .meet_at
            .unwrap_or_else(|| SocketAddr::new(nic.device().address, 0));
        let (listener, handle) = connect::Listener::new(nic, at)?;
        Ok((Box::new(listener), handle))
    }

    fn connect(
        &self,
        device: usize,
        handle: &Handle,
        classes: &Classes,
    ) -> Result<Box<dyn Connecting>> {
        let nic = self.nic(device)?;
        Ok(Box::new(connect::Connecting::new(nic, handle, classes)?))
    }
}
