//! A port of an RDMA device, opened: what it is, and what belongs to it.

use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicBool, Ordering};

use laxity_ibverbs::{ibv_access_flags as access, ibv_context, ibv_mr, ibv_pd};
use parking_lot::Mutex;

use super::hello::End;
use super::library::{AsyncEvent, Library, os_error};
use super::memory::{Cache, Span};
use super::options::Options;
use crate::backend::{Device, Memory, POINTER_CUDA, POINTER_DMABUF, Region};
use crate::fault::{Fault, Result};
use crate::log;

/// `IBV_LINK_LAYER_*` (an anonymous enum).
pub(super) const INFINIBAND: u8 = 1;
/// `IBV_EVENT_DEVICE_FATAL`, `IBV_EVENT_PORT_ERR`: the same in all releases.
const DEVICE_FATAL: c_int = 8;
const PORT_ERROR: c_int = 10;

/// What the hardware knows a registration by.
#[derive(Clone, Copy, Debug)]
struct Keys {
    mr: *mut ibv_mr,
    local: u32,
    remote: u32,
}

/// A registration, as it is kept by NCCL ([`crate::backend::Region`]).
#[derive(Debug)]
pub(super) struct Registered {
    id: u64,
    /// For our own work requests.
    pub(super) lkey: u32,
    /// For the peer's.
    pub(super) rkey: u32,
    /// `POINTER_*`.
    pub(super) kind: i32,
}

/// What is behind a registration of ours.
///
/// # Errors
/// It is of another network.
pub(super) fn registered(region: &Region) -> Result<&Registered> {
    (**region).downcast_ref().ok_or_else(|| {
        Fault::Argument(String::from(
            "a memory registration of another network was passed",
        ))
    })
}

/// A port of a device, open.
#[derive(Debug)]
pub(super) struct Nic {
    pub(super) library: &'static Library,
    pub(super) context: *mut ibv_context,
    pub(super) pd: *mut ibv_pd,
    /// Name, as in /sys/class/infiniband.
    pub(super) name: String,
    pub(super) port: u8,
    /// Entry of the GID table and what stands there.
    pub(super) gid_index: u8,
    pub(super) gid: [u8; 16],
    /// InfiniBand's own address; 0 on RoCE.
    pub(super) lid: u16,
    /// `INFINIBAND` or Ethernet.
    pub(super) link: u8,
    /// As `IBV_MTU_*`.
    pub(super) mtu: u32,
    /// Bytes of a work request at most.
    pub(super) piece_max: usize,
    /// Work requests of a queue pair, entries of a completion queue.
    pub(super) work_requests_max: u32,
    pub(super) completions_max: u32,
    pub(super) options: Options,
    pub(super) device: Device,
    pub(super) state: NicState,
}

/// What changes while a port is open.
#[derive(Debug)]
pub(super) struct NicState {
    cache: Mutex<Cache<Keys>>,
    /// The process that opened it: a child that was forked off may not touch it.
    process: u32,
    /// Relaxed: whoever sees it a moment later fails a moment later.
    failed: AtomicBool,
}

impl NicState {
    /// Of a port that this process has just opened.
    pub(super) fn new() -> Self {
        Self {
            cache: Mutex::new(Cache::new()),
            process: std::process::id(),
            failed: AtomicBool::new(false),
        }
    }
}

// SAFETY: libibverbs' objects may be used from any thread (ibv_open_device(3) and the verbs
// specification); all else is plain or behind a lock.
unsafe impl Send for Nic {}
// SAFETY: as above.
unsafe impl Sync for Nic {}

// SAFETY: a pointer that only libibverbs follows, which takes it in any thread.
unsafe impl Send for Keys {}

/// Pages of host memory.
fn page_bytes() -> usize {
    // SAFETY: asks for a number.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

impl Nic {
    /// What the device refuses, and why.
    pub(super) fn refused(&self, what: &str, error: impl core::fmt::Display) -> Fault {
        Fault::System(format!("{} {what}: {error}", self.name))
    }

    /// Whether an end can be connected to this port at all.
    ///
    /// # Errors
    /// It can't, and why.
    pub(super) fn check_link(&self, theirs: &End) -> Result<()> {
        if theirs.link != self.link {
            let name = |link| {
                if link == INFINIBAND {
                    "InfiniBand"
                } else {
                    "Ethernet"
                }
            };
            return Err(Fault::Usage(format!(
                "{} is {} and the peer's device is {}: choose devices of one network on all nodes with \
                 NCCL_IB_HCA",
                self.name,
                name(self.link),
                name(theirs.link)
            )));
        }
        Ok(())
    }

    /// What NCCL is told.
    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Whether this process opened it.
    pub(super) fn is_ours(&self) -> bool {
        self.state.process == std::process::id()
    }

    /// Registers memory.
    ///
    /// # Errors
    /// The device can't, or not that kind.
    pub(super) fn register(&self, memory: Memory) -> Result<Registered> {
        if memory.kind & self.device.pointers == 0 {
            let what = match memory.kind {
                POINTER_CUDA => {
                    "memory of a GPU by its address: the module nvidia_peermem is not loaded"
                }
                POINTER_DMABUF => "DMA-BUFs: the kernel or rdma-core is too old",
                _ => "that kind of memory",
            };
            return Err(Fault::System(format!(
                "{} can't register {what}",
                self.name
            )));
        }
        let span = Span::of(memory, page_bytes())?;
        let (id, keys) = self.state.cache.lock().take(span, |span| self.pin(span))?;
        Ok(Registered {
            id,
            lkey: keys.local,
            rkey: keys.remote,
            kind: memory.kind,
        })
    }

    fn pin(&self, span: &Span) -> Result<Keys> {
        let flags = access::IBV_ACCESS_LOCAL_WRITE
            | access::IBV_ACCESS_REMOTE_WRITE
            | access::IBV_ACCESS_REMOTE_READ;
        let relaxed = access::IBV_ACCESS_RELAXED_ORDERING;
        let start = span.start as *mut c_void;
        // SAFETY: the domain is ours. Whether there is such memory is for the kernel to find out.
        let mr = unsafe {
            match (
                span.dma_buf,
                self.library.reg_dmabuf_mr,
                self.library.reg_mr_iova2,
            ) {
                (Some((fd, offset)), Some(register), _) => {
                    let flags = if self.options.relaxed_ordering {
                        flags | relaxed
                    } else {
                        flags
                    };
                    register(
                        self.pd,
                        offset,
                        span.bytes,
                        span.start as u64,
                        fd,
                        flags as c_int,
                    )
                }
                (None, _, Some(register)) if self.options.relaxed_ordering => register(
                    self.pd,
                    start,
                    span.bytes,
                    span.start as u64,
                    flags | relaxed,
                ),
                _ => (self.library.reg_mr)(self.pd, start, span.bytes, flags as c_int),
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
        // SAFETY: it was just made.
        let (local, remote) = unsafe { ((*mr).lkey, (*mr).rkey) };
        Ok(Keys { mr, local, remote })
    }

    fn unpin(&self, keys: Keys) -> Result<()> {
        if !self.is_ours() {
            return Ok(());
        }
        // SAFETY: taken out of the cache, so nobody has it any more.
        match unsafe { (self.library.dereg_mr)(keys.mr) } {
            0 => Ok(()),
            error => Err(Fault::system(
                &format!("{} refuses to let go of memory", self.name),
                std::io::Error::from_raw_os_error(error),
            )),
        }
    }

    /// One user of a registration less.
    ///
    /// # Errors
    /// The device refused.
    pub(super) fn deregister(&self, registered: &Registered) -> Result<()> {
        self.state
            .cache
            .lock()
            .give_back(registered.id, |keys| self.unpin(keys))
    }

    /// Looks for what the device has to say; never waits.
    ///
    /// # Errors
    /// It is broken.
    pub(super) fn look(&self) -> Result<()> {
        let mut event = AsyncEvent {
            element: core::ptr::null_mut(),
            kind: 0,
        };
        while self.is_ours() {
            // SAFETY: open, and the struct is ours; each event is acknowledged once.
            if unsafe { (self.library.get_async_event)(self.context, &mut event) } != 0 {
                break;
            }
            let text = format!(
                "{}:{}: {}",
                self.name,
                self.port,
                self.library.event(event.kind)
            );
            match event.kind {
                DEVICE_FATAL => {
                    log::warn(&text);
                    self.state.failed.store(true, Ordering::Relaxed);
                }
                PORT_ERROR => log::warn(&text),
                _ => log::info(&text),
            }
            // SAFETY: as above.
            unsafe { (self.library.ack_async_event)(&mut event) };
        }
        if self.state.failed.load(Ordering::Relaxed) {
            return Err(Fault::System(format!(
                "{} has failed (device fatal event)",
                self.name
            )));
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
        // SAFETY: all that was made of it holds an `Arc` of this, so it is gone.
        unsafe {
            (self.library.dealloc_pd)(self.pd);
            (self.library.close_device)(self.context);
        }
    }
}
