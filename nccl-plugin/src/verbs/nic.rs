//! An open port of an RDMA device, and the resources that belong to it.

use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use laxity_ibverbs::{ibv_access_flags as access, ibv_context, ibv_mr, ibv_pd};
use parking_lot::Mutex;

use super::hello::End;
use super::library::{AsyncEvent, Library, os_error};
use super::memory::{Cache, PageRange};
use super::options::VerbsOptions;
use crate::backend::{Device, Memory, MemoryRegistration, POINTER_CUDA, POINTER_DMABUF};
use crate::fault::{Fault, Result};
use crate::log;

/// The link layer InfiniBand, `IBV_LINK_LAYER_INFINIBAND` (an anonymous enum).
pub(super) const INFINIBAND: u8 = 1;
/// `IBV_EVENT_DEVICE_FATAL` and `IBV_EVENT_PORT_ERR`, which are the same in all releases.
const DEVICE_FATAL: c_int = 8;
const PORT_ERROR: c_int = 10;
const RELAXED: access::Type = access::IBV_ACCESS_RELAXED_ORDERING;

#[derive(Clone, Copy, Debug)]
struct Keys {
    mr: *mut ibv_mr,
    local: u32,
    remote: u32,
}

/// A registration, as NCCL keeps it ([`crate::backend::MemoryRegistration`]).
#[derive(Debug)]
pub(super) struct Registered {
    id: u64,
    /// Key for work requests of this host.
    pub(super) lkey: u32,
    /// Key for the peer's work requests.
    pub(super) rkey: u32,
    /// The memory's kind, one of `POINTER_*`.
    pub(super) kind: i32,
}

/// Returns this network's data of a registration.
pub(super) fn registered(region: &MemoryRegistration) -> Result<&Registered> {
    (**region).downcast_ref().ok_or_else(|| {
        Fault::Argument("a memory registration of another network was passed".into())
    })
}

/// A registration for one-sided operations, which ends with this value.
#[derive(Debug)]
pub(crate) struct RegionKeys {
    keys: Keys,
    nic: Arc<Nic>,
}

impl RegionKeys {
    /// Returns the key for work requests of this host.
    pub(crate) fn local(&self) -> u32 {
        self.keys.local
    }

    /// Returns the key for other hosts' work requests.
    pub(crate) fn remote(&self) -> u32 {
        self.keys.remote
    }
}

impl Drop for RegionKeys {
    fn drop(&mut self) {
        if let Err(fault) = self.nic.unpin(self.keys) {
            log::info(&fault.to_string());
        }
    }
}

/// An open port of an RDMA device.
#[derive(Debug)]
pub(super) struct Nic {
    pub(super) library: &'static Library,
    pub(super) context: *mut ibv_context,
    pub(super) pd: *mut ibv_pd,
    /// The device's name, as in /sys/class/infiniband.
    pub(super) name: String,
    pub(super) port: u8,
    /// Index of the entry in the GID table, and its GID.
    pub(super) gid_index: u8,
    pub(super) gid: [u8; 16],
    /// InfiniBand's local address. 0 on RoCE.
    pub(super) lid: u16,
    /// The link layer, `INFINIBAND` or Ethernet.
    pub(super) link: u8,
    /// The MTU, as `IBV_MTU_*`.
    pub(super) mtu: u32,
    /// Largest work request in bytes.
    pub(super) piece_max: usize,
    /// Largest number of reads and atomic operations in flight on a queue pair. 0 if the device
    /// knows no atomic operations.
    pub(super) atomics: u8,
    /// Largest number of work requests of a queue pair, and of entries of a completion queue.
    pub(super) work_requests_max: u32,
    pub(super) completions_max: u32,
    pub(super) options: VerbsOptions,
    pub(super) device: Device,
    pub(super) state: NicState,
}

/// The state of an open port that changes.
#[derive(Debug)]
pub(super) struct NicState {
    cache: Mutex<Cache<Keys>>,
    /// The process that opened the port. A forked child must not use it.
    process: u32,
    /// Whether the device failed. Relaxed, because a thread that sees it later only fails later.
    failed: AtomicBool,
}

impl NicState {
    /// Returns the state of a port that this process has just opened.
    pub(super) fn new() -> Self {
        Self {
            cache: Mutex::new(Cache::new()),
            process: std::process::id(),
            failed: AtomicBool::new(false),
        }
    }
}

// SAFETY: libibverbs' objects may be used from any thread (ibv_open_device(3) and the verbs
// specification). The other fields are plain or behind a lock.
unsafe impl Send for Nic {}
// SAFETY: libibverbs' objects may be used from several threads at once.
unsafe impl Sync for Nic {}

// SAFETY: only libibverbs follows the pointer, in any thread.
unsafe impl Send for Keys {}
// SAFETY: nothing changes the keys.
unsafe impl Sync for Keys {}

/// Returns the size of the host's memory pages in bytes.
fn page_bytes() -> usize {
    // SAFETY: the call only returns a number.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

impl Nic {
    /// Returns the fault for something that the device refused.
    pub(super) fn refused(&self, what: &str, error: impl core::fmt::Display) -> Fault {
        Fault::System(format!("{} {what}: {error}", self.name))
    }

    /// Checks whether the other end can be connected to this port.
    pub(super) fn check_link(&self, theirs: &End) -> Result<()> {
        if theirs.link != self.link {
            let name = |link| {
                if link == INFINIBAND { "InfiniBand" } else { "Ethernet" }
            };
            return Err(Fault::Usage(format!(
                "{} is {} and the peer's device is {}: choose devices of one network on all nodes \
                 with NCCL_IB_HCA",
                self.name,
                name(self.link),
                name(theirs.link)
            )));
        }
        Ok(())
    }

    /// Returns the device's description for NCCL.
    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Reports whether this process opened the port.
    pub(super) fn is_ours(&self) -> bool {
        self.state.process == std::process::id()
    }

    fn check_kind(&self, memory: Memory) -> Result<()> {
        if memory.kind & self.device.pointers == 0 {
            let what = match memory.kind {
                POINTER_CUDA => {
                    "memory of a GPU by its address: the module nvidia_peermem is not loaded"
                }
                POINTER_DMABUF => "DMA-BUFs: the kernel or rdma-core is too old",
                _ => "that kind of memory",
            };
            return Err(Fault::System(format!("{} can't register {what}", self.name)));
        }
        Ok(())
    }

    pub(super) fn register(&self, memory: Memory) -> Result<Registered> {
        self.check_kind(memory)?;
        let span = PageRange::of(memory, page_bytes())?;
        let pin = |span: &PageRange| {
            let extra = if self.options.relaxed_ordering { RELAXED } else { 0 };
            self.pin(span, extra)
        };
        let (id, keys) = self.state.cache.lock().take(span, pin)?;
        Ok(Registered { id, lkey: keys.local, rkey: keys.remote, kind: memory.kind })
    }

    /// Registers memory for one-sided operations. Ordering is strict, so that a signal is behind
    /// the data of the puts before it.
    pub(super) fn register_region(self: &Arc<Self>, memory: Memory) -> Result<RegionKeys> {
        self.check_kind(memory)?;
        let span = PageRange::of(memory, page_bytes())?;
        let keys = self.pin(&span, access::IBV_ACCESS_REMOTE_ATOMIC)?;
        Ok(RegionKeys { keys, nic: Arc::clone(self) })
    }

    fn pin(&self, span: &PageRange, extra: access::Type) -> Result<Keys> {
        let flags = access::IBV_ACCESS_LOCAL_WRITE
            | access::IBV_ACCESS_REMOTE_WRITE
            | access::IBV_ACCESS_REMOTE_READ
            | extra;
        let start = span.start as *mut c_void;
        // SAFETY: the domain is this port's own. The kernel checks whether the memory exists.
        let mr = unsafe {
            match (span.dma_buf, self.library.reg_dmabuf_mr, self.library.reg_mr_iova2) {
                (Some((fd, offset)), Some(register), _) => {
                    register(self.pd, offset, span.bytes, span.start as u64, fd, flags as c_int)
                }
                (None, _, Some(register)) if flags & RELAXED != 0 => {
                    register(self.pd, start, span.bytes, span.start as u64, flags)
                }
                // Older libraries know no relaxed ordering.
                _ => (self.library.reg_mr)(self.pd, start, span.bytes, (flags & !RELAXED) as c_int),
            }
        };
        if mr.is_null() {
            return Err(Fault::System(format!(
                "{} refuses to register {} bytes at {:#x}: {}. If this is ENOMEM, raise the limit \
                 of locked memory (ulimit -l)",
                self.name,
                span.bytes,
                span.start,
                os_error()
            )));
        }
        // SAFETY: the registration was just made.
        let (local, remote) = unsafe { ((*mr).lkey, (*mr).rkey) };
        Ok(Keys { mr, local, remote })
    }

    fn unpin(&self, keys: Keys) -> Result<()> {
        if !self.is_ours() {
            return Ok(());
        }
        // SAFETY: the registration was removed from the cache, or its `RegionKeys` is dropped, so
        // nobody else uses it.
        match unsafe { (self.library.dereg_mr)(keys.mr) } {
            0 => Ok(()),
            error => Err(Fault::system(
                &format!("{} refuses to deregister memory", self.name),
                std::io::Error::from_raw_os_error(error),
            )),
        }
    }

    /// Removes one user of a registration.
    pub(super) fn deregister(&self, registered: &Registered) -> Result<()> {
        self.state.cache.lock().give_back(registered.id, |keys| self.unpin(keys))
    }

    /// Handles the device's pending events. Never waits.
    pub(super) fn look(&self) -> Result<()> {
        let mut event = AsyncEvent { element: core::ptr::null_mut(), kind: 0 };
        while self.is_ours() {
            // SAFETY: the context is open, and the struct is this function's own. Each event is
            // acknowledged once.
            if unsafe { (self.library.get_async_event)(self.context, &mut event) } != 0 {
                break;
            }
            let text = format!("{}:{}: {}", self.name, self.port, self.library.event(event.kind));
            match event.kind {
                DEVICE_FATAL => {
                    log::warn(&text);
                    self.state.failed.store(true, Ordering::Relaxed);
                }
                PORT_ERROR => log::warn(&text),
                _ => log::info(&text),
            }
            // SAFETY: the event came from `get_async_event` and is acknowledged once.
            unsafe { (self.library.ack_async_event)(&mut event) };
        }
        if self.state.failed.load(Ordering::Relaxed) {
            return Err(Fault::System(format!("{} has failed (device fatal event)", self.name)));
        }
        Ok(())
    }
}

impl Drop for Nic {
    fn drop(&mut self) {
        if !self.is_ours() {
            return;
        }
        let left: Vec<Keys> = self.state.cache.get_mut().drain().collect();
        for keys in left {
            if let Err(fault) = self.unpin(keys) {
                log::info(&fault.to_string());
            }
        }
        // SAFETY: every resource made from it holds an `Arc` of this port, so all of them are gone.
        unsafe {
            (self.library.dealloc_pd)(self.pd);
            (self.library.close_device)(self.context);
        }
    }
}
