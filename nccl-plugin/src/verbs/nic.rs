//! A port of an RDMA device, opened: what it is, and what belongs to it.

use core::ffi::{CStr, c_int, c_void};
use core::mem;
use core::sync::atomic::{AtomicBool, Ordering};
use std::ffi::CString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use laxity_ibverbs::{
    ibv_access_flags as access, ibv_context, ibv_device_attr, ibv_gid, ibv_mr, ibv_mtu, ibv_pd,
    ibv_port_attr, ibv_port_state,
};
use parking_lot::Mutex;

use super::choose::{self, Gid, GidKind};
use super::library::{AsyncEvent, Library};
use super::memory::{Cache, Span};
use super::options::Options;
use crate::backend::{Device, Memory, POINTER_CUDA, POINTER_DMABUF, POINTER_HOST};
use crate::fault::{Fault, Result};
use crate::log;

/// `IBV_LINK_LAYER_*` (an anonymous enum).
pub(super) const INFINIBAND: u8 = 1;
const ETHERNET: u8 = 2;
/// `IBV_EVENT_DEVICE_FATAL`, `IBV_EVENT_PORT_ERR`: the same in all releases.
const DEVICE_FATAL: c_int = 8;
const PORT_ERROR: c_int = 10;
/// `NCCL_MAX_NET_SIZE_BYTES`.
const MESSAGE_MAX: usize = 1 << 40;
/// One work request never carries more, whatever the port says.
const PIECE_MAX: usize = 1 << 30;
/// Where a kernel says that it can give a GPU's memory to a NIC by its address.
const PEER_MEMORY: [&str; 3] = [
    "/sys/kernel/mm/memory_peers/nv_mem/version",
    "/sys/kernel/mm/memory_peers/nv_mem_nc/version",
    "/sys/module/nvidia_peermem/version",
];

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
    device: Device,
    cache: Mutex<Cache<Keys>>,
    /// The process that opened it: a child that was forked off may not touch it.
    process: u32,
    /// Relaxed: whoever sees it a moment later fails a moment later.
    failed: AtomicBool,
}

// SAFETY: libibverbs' objects may be used from any thread (ibv_open_device(3) and the verbs
// specification); all else is plain or behind a lock.
unsafe impl Send for Nic {}
// SAFETY: as above.
unsafe impl Sync for Nic {}

// SAFETY: a pointer that only libibverbs follows, which takes it in any thread.
unsafe impl Send for Keys {}

/// The last error of the calling thread.
fn os_error() -> std::io::Error {
    std::io::Error::last_os_error()
}

fn sysfs(name: &str) -> PathBuf {
    Path::new("/sys/class/infiniband").join(name)
}

/// The folder of the device's card. The ports of a card are functions of one PCI device and count
/// as one NIC, so the function is 0.
fn pci_path(name: &str) -> Option<CString> {
    let path = fs::canonicalize(sysfs(name).join("device")).ok()?;
    let mut bytes = path.into_os_string().into_encoded_bytes();
    let function = bytes
        .len()
        .checked_sub(2)
        .is_some_and(|at| bytes[at] == b'.');
    if function && let Some(last) = bytes.last_mut() {
        *last = b'0';
    }
    CString::new(bytes).ok()
}

/// Pages of host memory.
fn page_bytes() -> usize {
    // SAFETY: asks for a number.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Opens all ports that are active and wanted, in the order of libibverbs.
///
/// # Errors
/// There is none: a sentence why.
pub(super) fn open_all(options: &Options) -> core::result::Result<Vec<Arc<Nic>>, String> {
    let library = Library::get()?;
    let mut count: c_int = 0;
    // SAFETY: the count is ours.
    let list = unsafe { (library.get_device_list)(&mut count) };
    if list.is_null() {
        return Err(format!("the kernel has no RDMA devices: {}", os_error()));
    }
    let mut found = Vec::new();
    let mut passed_over = Vec::new();
    for at in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list has that many entries, each a device with a C string for a name.
        let (device, name) = unsafe {
            let device = *list.add(at);
            let name = CStr::from_ptr((*device).name.as_ptr());
            (device, name.to_string_lossy().into_owned())
        };
        let mut port = 1;
        loop {
            // SAFETY: a device of a list that is not freed yet. A port has a context of its own.
            let context = unsafe { (library.open_device)(device) };
            if context.is_null() {
                passed_over.push(format!("{name} can't be opened: {}", os_error()));
                break;
            }
            // SAFETY: open, and nothing was done with it yet.
            unsafe { super::library::exempt(context) };
            // SAFETY: open; from here it is the opened port's, or closed.
            let (ports, opened) = unsafe { Nic::open(library, context, &name, port, options) };
            match opened {
                Ok(nic) => found.push(Arc::new(nic)),
                Err(why) => passed_over.push(why),
            }
            if port >= ports {
                break;
            }
            port += 1;
        }
    }
    // SAFETY: the list that was given; open contexts do not need it.
    unsafe { (library.free_device_list)(list) };
    if found.is_empty() {
        if passed_over.is_empty() {
            return Err(String::from("there is no RDMA device"));
        }
        return Err(format!(
            "no RDMA device can be used: {}",
            passed_over.join("; ")
        ));
    }
    for why in passed_over {
        log::info(&why);
    }
    Ok(found)
}

impl Nic {
    /// How many ports the device has, and the one that was asked for.
    ///
    /// # Safety
    /// `context` is open, and nobody else's.
    unsafe fn open(
        library: &'static Library,
        context: *mut ibv_context,
        name: &str,
        port: u8,
        options: &Options,
    ) -> (u8, core::result::Result<Self, String>) {
        // SAFETY: plain data that may be zero.
        let mut attr: ibv_device_attr = unsafe { mem::zeroed() };
        // SAFETY: open; the struct is ours.
        let refused = unsafe { (library.query_device)(context, &mut attr) };
        let opened = if refused == 0 {
            // SAFETY: upheld by the caller.
            unsafe { Self::open_port(library, context, name, port, &attr, options) }
        } else {
            Err(format!(
                "{name} does not answer: {}",
                std::io::Error::from_raw_os_error(refused)
            ))
        };
        if opened.is_err() {
            // SAFETY: open, ours, and without anything in it.
            unsafe { (library.close_device)(context) };
        }
        (attr.phys_port_cnt, opened)
    }

    /// # Safety
    /// As for `open`. On an error nothing is left in the context.
    unsafe fn open_port(
        library: &'static Library,
        context: *mut ibv_context,
        name: &str,
        port: u8,
        attr: &ibv_device_attr,
        options: &Options,
    ) -> core::result::Result<Self, String> {
        let here = format!("{name}:{port}");
        if !options.wanted.takes(name, port) {
            let hca = options.hca.as_deref().unwrap_or_default();
            return Err(format!("{here} is not among NCCL_IB_HCA={hca}"));
        }
        // SAFETY: plain data that may be zero. The function fills in what older programs know; that
        // is all that is looked at here.
        let mut state: ibv_port_attr = unsafe { mem::zeroed() };
        // SAFETY: open; the struct is ours.
        let refused = unsafe { (library.query_port)(context, port, &mut state) };
        if refused != 0 {
            return Err(format!(
                "{here} does not answer: {}",
                std::io::Error::from_raw_os_error(refused)
            ));
        }
        if state.state != ibv_port_state::IBV_PORT_ACTIVE {
            return Err(format!("{here} is not active: is the link up?"));
        }
        if state.link_layer != INFINIBAND && state.link_layer != ETHERNET {
            return Err(format!("{here} is neither InfiniBand nor RoCE"));
        }
        let gid =
            // SAFETY: open.
            unsafe { gid(library, context, name, port, &state, options) }.ok_or_else(|| {
                match options.gid_index {
                    Some(index) => format!("{here} has no GID at NCCL_IB_GID_INDEX={index}"),
                    None => format!("{here} has no GID: has its network interface an address?"),
                }
            })?;
        // SAFETY: open.
        let pd = unsafe { (library.alloc_pd)(context) };
        if pd.is_null() {
            return Err(format!("{here} gives no protection domain: {}", os_error()));
        }
        // SAFETY: it was just made.
        let dma_buf = unsafe { takes_dma_buf(library, pd) };
        let by_address = PEER_MEMORY.iter().any(|path| Path::new(path).exists());
        let pointers = POINTER_HOST
            | if by_address { POINTER_CUDA } else { 0 }
            | if dma_buf { POINTER_DMABUF } else { 0 };
        let speed_mbit = match choose::speed_mbit(state.active_speed, state.active_width) {
            0 => fs::read_to_string(sysfs(name).join(format!("ports/{port}/rate")))
                .ok()
                .and_then(|text| choose::rate_mbit(&text))
                .unwrap_or(10_000),
            speed => speed,
        };
        let guid = match u64::from_be(attr.sys_image_guid) {
            0 => u64::from_be(attr.node_guid),
            guid => guid,
        };
        let device = Device {
            name: CString::new(name).unwrap_or_default(),
            pci_path: pci_path(name),
            guid,
            pointers,
            speed_mbit,
            port: i32::from(port),
            latency_us: 0.0,
            comms_max: attr.max_qp.max(1),
            registers_globally: true,
            force_flush: false,
            message_max: MESSAGE_MAX,
            address: choose::address(gid.raw),
        };
        // SAFETY: open. So that looking for an event never waits for one.
        unsafe {
            let fd = (*context).async_fd;
            let flags = libc::fcntl(fd, libc::F_GETFL);
            libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
        }
        Ok(Self {
            library,
            context,
            pd,
            name: name.to_owned(),
            port,
            gid_index: gid.index,
            gid: gid.raw,
            lid: state.lid,
            link: state.link_layer,
            mtu: state
                .active_mtu
                .clamp(ibv_mtu::IBV_MTU_256, ibv_mtu::IBV_MTU_4096),
            piece_max: (state.max_msg_sz as usize).clamp(4096, PIECE_MAX),
            work_requests_max: u32::try_from(attr.max_qp_wr).unwrap_or(0).max(16),
            completions_max: u32::try_from(attr.max_cqe).unwrap_or(0).max(16),
            options: options.clone(),
            device,
            cache: Mutex::new(Cache::new()),
            process: std::process::id(),
            failed: AtomicBool::new(false),
        })
    }

    /// What NCCL is told.
    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Whether this process opened it.
    pub(super) fn is_ours(&self) -> bool {
        self.process == std::process::id()
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
        let (id, keys) = self.cache.lock().take(span, |span| self.pin(span))?;
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
        self.cache
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
                    self.failed.store(true, Ordering::Relaxed);
                }
                PORT_ERROR => log::warn(&text),
                _ => log::info(&text),
            }
            // SAFETY: as above.
            unsafe { (self.library.ack_async_event)(&mut event) };
        }
        if self.failed.load(Ordering::Relaxed) {
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
        let left: Vec<Keys> = self.cache.get_mut().drain().collect();
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

/// The entry of a port's GID table that is to be used.
///
/// # Safety
/// `context` is open.
unsafe fn gid(
    library: &Library,
    context: *mut ibv_context,
    name: &str,
    port: u8,
    state: &ibv_port_attr,
    options: &Options,
) -> Option<Gid> {
    let read = |index: u8| {
        let mut gid = ibv_gid { raw: [0; 16] };
        // SAFETY: open; the union is ours, and bytes in any case.
        let raw = unsafe {
            let refused = (library.query_gid)(context, port, c_int::from(index), &mut gid);
            (refused == 0).then_some(gid.raw)?
        };
        // Link-local with nothing behind the prefix is as empty as nothing.
        let empty = raw[2..].iter().all(|byte| *byte == 0);
        let kind =
            fs::read_to_string(sysfs(name).join(format!("ports/{port}/gid_attrs/types/{index}")));
        let kind = kind.map_or(GidKind::Other, |text| GidKind::parse(&text));
        (!empty).then_some(Gid { index, raw, kind })
    };
    if let Some(index) = options.gid_index.filter(|_| state.link_layer == ETHERNET) {
        return read(index);
    }
    if state.link_layer == INFINIBAND {
        return read(0);
    }
    let entries = u8::try_from(state.gid_tbl_len).unwrap_or(u8::MAX);
    let all: Vec<Gid> = (0..entries).filter_map(read).collect();
    choose::best(&all)
}

/// Whether the kernel takes DMA-BUFs for this device: asked with one that there can't be. What it
/// does not know at all it refuses as such; what it knows it refuses for the file descriptor.
///
/// # Safety
/// `pd` is alive.
unsafe fn takes_dma_buf(library: &Library, pd: *mut ibv_pd) -> bool {
    let Some(register) = library.reg_dmabuf_mr else {
        return false;
    };
    // SAFETY: upheld by the caller; there is no file descriptor -1, so nothing is registered.
    let mr = unsafe { register(pd, 0, 0, 0, -1, 0) };
    let error = os_error().raw_os_error();
    if !mr.is_null() {
        // SAFETY: it was just made.
        unsafe { (library.dereg_mr)(mr) };
    }
    !matches!(
        error,
        Some(libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::ENOSYS)
    )
}
