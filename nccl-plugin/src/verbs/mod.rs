//! RDMA. Messages are written into the receiver's memory over reliable connections of libibverbs,
//! one for each traffic class.
//!
//! ```text
//! receiver  posts a buffer ──── entry: address, key, size (RDMA WRITE) ────▶ fifo in the sender's memory
//! sender    clear, begin, push ── the bytes, by the queue pair of the message's class (RDMA WRITE) ──▶ the buffer
//!           the last piece carries 32 bits that say which buffer is filled, and how far ──▶ completion at the receiver
//! ```
//!
//! A queue pair has one traffic class for life, because the class is part of its address. A
//! connection has one queue pair per class, and a message's class can be chosen until its first
//! byte. Messages may arrive in any order, since each names its buffer.
//!
//! * `library.rs`, `choose.rs`, `options.rs`, `open.rs`, `nic.rs`: the devices and their
//!   capabilities. libibverbs is opened at run time.
//! * `memory.rs`: registrations, each shared by its users.
//! * `hello.rs`, `control_connection.rs`, `connect.rs`: the handshake over TCP. The TCP connection
//!   stays open, so that this end notices when the peer is gone.
//! * `cts.rs`, `pinned.rs`, `completions.rs`, `queue_pair.rs`, `outgoing.rs`, `sender.rs`,
//!   `receiver.rs`: messages.
//! * `one_sided.rs`: operations of a group of ranks (`rma/`).
//!
//! Unlike NCCL's own transport (`net_ib`), this one doesn't spread a message over several queue
//! pairs, or over the ports of a card.

mod choose;
mod completions;
mod connect;
mod control_connection;
mod cts;
mod hello;
mod library;
mod memory;
mod nic;
mod one_sided;
mod open;
mod options;
mod outgoing;
mod pinned;
mod queue_pair;
mod receiver;
mod sender;

use std::net::SocketAddr;
use std::sync::Arc;

use crate::backend::{Backend, Connecting, Device, Listener, POINTER_DMABUF, TrafficClasses};
use crate::fault::{Fault, Result};
use crate::handle::Handle;
use crate::interfaces;
use crate::log;
use crate::settings::Settings;
use nic::Nic;
pub(crate) use nic::RegionKeys;
pub use one_sided::OneSidedPort;
pub use options::VerbsOptions;

/// Opens the RDMA devices of this host. Connections are negotiated over TCP at the interface that
/// NCCL would use.
pub fn open(settings: &Settings) -> core::result::Result<Box<dyn Backend>, String> {
    let meet_at = match interfaces::devices(settings) {
        Ok(found) => found.first().map(|(_, address)| *address),
        Err(fault) if settings.interfaces.is_some() => return Err(fault.to_string()),
        // Without an interface, connections are negotiated at the devices' own addresses.
        Err(_) => None,
    };
    Ok(Box::new(Verbs::open(&settings.rdma, meet_at)?))
}

/// The RDMA devices of this host that are to be used.
#[derive(Debug)]
pub struct Verbs {
    nics: Vec<Arc<Nic>>,
    devices: Vec<Device>,
    /// The TCP address at which connections are negotiated. By default it is the device's own.
    meet_at: Option<SocketAddr>,
}

impl Verbs {
    /// Opens the devices. `meet_at` is the TCP address at which connections are negotiated: that of
    /// the interface that NCCL would use. With `None`, it is the device's own.
    pub fn open(
        options: &VerbsOptions,
        meet_at: Option<SocketAddr>,
    ) -> core::result::Result<Self, String> {
        let nics = open::open_all(options)?;
        for nic in &nics {
            let device = nic.device();
            let link = if nic.link == nic::INFINIBAND { "InfiniBand" } else { "RoCE" };
            log::info(&format!(
                "{}:{} {link} {} Mbit/s, GID {} ({}){}",
                nic.name,
                nic.port,
                device.speed_mbit,
                nic.gid_index,
                device.address,
                if device.pointers & POINTER_DMABUF != 0 { ", takes DMA-BUFs" } else { "" },
            ));
        }
        Ok(Self { devices: nics.iter().map(|nic| nic.device().clone()).collect(), nics, meet_at })
    }

    fn nic(&self, device: usize) -> Result<&Arc<Nic>> {
        self.nics.get(device).ok_or_else(|| {
            Fault::Argument(format!("there is no device {device}: there are {}", self.nics.len()))
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

    fn one_sided_at(&self, device: usize) -> Option<(SocketAddr, Option<OneSidedPort>)> {
        let (port, at) = OneSidedPort::of(self.nics.get(device)?, self.meet_at)?;
        Some((at, Some(port)))
    }

    fn listen(&self, device: usize) -> Result<(Box<dyn Listener>, Handle)> {
        let nic = self.nic(device)?;
        let at = self.meet_at.unwrap_or_else(|| SocketAddr::new(nic.device().address, 0));
        let (listener, handle) = connect::VerbsListener::new(nic, at)?;
        Ok((Box::new(listener), handle))
    }

    fn connect(
        &self,
        device: usize,
        handle: &Handle,
        classes: &TrafficClasses,
        service_level: u8,
    ) -> Result<Box<dyn Connecting>> {
        let nic = self.nic(device)?;
        Ok(Box::new(connect::VerbsConnecting::new(nic, handle, classes, service_level)?))
    }
}
