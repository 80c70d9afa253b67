//! The usable ports of the host's RDMA devices, and their capabilities.

use core::ffi::{CStr, c_int};
use core::mem;
use std::ffi::CString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use laxity_ibverbs::{
    ibv_atomic_cap, ibv_context, ibv_device_attr, ibv_gid, ibv_mtu, ibv_pd, ibv_port_attr,
    ibv_port_state,
};

use super::choose::{self, Gid, GidKind};
use super::library::{self, Library, os_error};
use super::nic::{INFINIBAND, Nic, NicState};
use super::options::VerbsOptions;
use crate::backend::{Device, POINTER_CUDA, POINTER_DMABUF, POINTER_HOST};
use crate::log;

const ETHERNET: u8 = 2;
/// Largest message in bytes, `NCCL_MAX_NET_SIZE_BYTES`.
const MESSAGE_MAX: usize = 1 << 40;
/// Largest work request in bytes, even if the port allows more.
const PIECE_MAX: usize = 1 << 30;
/// Largest number of reads and atomic operations in flight, even if the device allows more.
const ATOMICS_MAX: c_int = 16;
/// Files that exist if the kernel can give a GPU's memory to a NIC by its address.
const PEER_MEMORY: [&str; 3] = [
    "/sys/kernel/mm/memory_peers/nv_mem/version",
    "/sys/kernel/mm/memory_peers/nv_mem_nc/version",
    "/sys/module/nvidia_peermem/version",
];

fn sysfs(name: &str) -> PathBuf {
    Path::new("/sys/class/infiniband").join(name)
}

/// Returns the folder of the device's card. The ports of a card are functions of one PCI device and
/// count as one NIC, so the function is 0.
fn pci_path(name: &str) -> Option<CString> {
    let path = fs::canonicalize(sysfs(name).join("device")).ok()?;
    let mut bytes = path.into_os_string().into_encoded_bytes();
    let function = bytes.len().checked_sub(2).is_some_and(|at| bytes[at] == b'.');
    if function && let Some(last) = bytes.last_mut() {
        *last = b'0';
    }
    CString::new(bytes).ok()
}

/// Opens all ports that are active and wanted, in the order of libibverbs.
pub(super) fn open_all(options: &VerbsOptions) -> Result<Vec<Arc<Nic>>, String> {
    let library = Library::get()?;
    let mut count: c_int = 0;
    // SAFETY: the count is this function's own.
    let list = unsafe { (library.get_device_list)(&mut count) };
    if list.is_null() {
        return Err(format!("the kernel has no RDMA devices: {}", os_error()));
    }
    let mut found = Vec::new();
    let mut passed_over = Vec::new();
    for at in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list has `count` entries. Each is a device with a C string as its name.
        let (device, name) = unsafe {
            let device = *list.add(at);
            let name = CStr::from_ptr((*device).name.as_ptr());
            (device, name.to_string_lossy().into_owned())
        };
        let mut port = 1;
        loop {
            // SAFETY: the device is in a list that is not freed yet. Each port has its own context.
            let context = unsafe { (library.open_device)(device) };
            if context.is_null() {
                passed_over.push(format!("{name} can't be opened: {}", os_error()));
                break;
            }
            // SAFETY: the context is open and unused.
            unsafe { library::exempt(context) };
            // SAFETY: the context is open. The call stores it in the port or closes it.
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
    // SAFETY: `get_device_list` returned the list. Open contexts do not need it.
    unsafe { (library.free_device_list)(list) };
    if found.is_empty() {
        if passed_over.is_empty() {
            return Err(String::from("there is no RDMA device"));
        }
        return Err(format!("no RDMA device can be used: {}", passed_over.join("; ")));
    }
    for why in passed_over {
        log::info(&why);
    }
    Ok(found)
}

impl Nic {
    /// Returns the device's number of ports, and the port that was asked for.
    ///
    /// # Safety
    /// `context` is open, and nobody else uses it.
    unsafe fn open(
        library: &'static Library,
        context: *mut ibv_context,
        name: &str,
        port: u8,
        options: &VerbsOptions,
    ) -> (u8, Result<Self, String>) {
        // SAFETY: plain data that may be zero.
        let mut attr: ibv_device_attr = unsafe { mem::zeroed() };
        // SAFETY: the context is open. The struct is this function's own.
        let refused = unsafe { (library.query_device)(context, &mut attr) };
        let opened = if refused == 0 {
            // SAFETY: upheld by the caller.
            unsafe { Self::open_port(library, context, name, port, &attr, options) }
        } else {
            Err(format!("{name} does not answer: {}", std::io::Error::from_raw_os_error(refused)))
        };
        if opened.is_err() {
            // SAFETY: the context is open, owned here, and has no resources.
            unsafe { (library.close_device)(context) };
        }
        (attr.phys_port_cnt, opened)
    }

    /// # Safety
    /// The conditions of `open` hold. After an error the context has no resources.
    unsafe fn open_port(
        library: &'static Library,
        context: *mut ibv_context,
        name: &str,
        port: u8,
        attr: &ibv_device_attr,
        options: &VerbsOptions,
    ) -> Result<Self, String> {
        let here = format!("{name}:{port}");
        if !options.wanted.takes(name, port) {
            let hca = options.hca.as_deref().unwrap_or_default();
            return Err(format!("{here} is not among NCCL_IB_HCA={hca}"));
        }
        // SAFETY: upheld by the caller.
        let state = unsafe { usable_port(library, context, &here, port) }?;
        let gid =
            // SAFETY: the context is open.
            unsafe { gid(library, context, name, port, &state, options) }.ok_or_else(|| {
                match options.gid_index {
                    Some(index) => format!("{here} has no GID at NCCL_IB_GID_INDEX={index}"),
                    None => format!("{here} has no GID: has its network interface an address?"),
                }
            })?;
        // SAFETY: the context is open.
        let pd = unsafe { (library.alloc_pd)(context) };
        if pd.is_null() {
            return Err(format!("{here} gives no protection domain: {}", os_error()));
        }
        // SAFETY: the domain was just made.
        let dma_buf = unsafe { takes_dma_buf(library, pd) };
        let by_address = PEER_MEMORY.iter().any(|path| Path::new(path).exists());
        let pointers = POINTER_HOST
            | if by_address { POINTER_CUDA } else { 0 }
            | if dma_buf { POINTER_DMABUF } else { 0 };
        let device = device((name, port), attr, &gid, pointers);
        // SAFETY: the context is open. Non-blocking, so that a check for events never waits.
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
            mtu: state.active_mtu.clamp(ibv_mtu::IBV_MTU_256, ibv_mtu::IBV_MTU_4096),
            piece_max: (state.max_msg_sz as usize).clamp(4096, PIECE_MAX),
            atomics: if attr.atomic_cap == ibv_atomic_cap::IBV_ATOMIC_NONE {
                0
            } else {
                let both = attr.max_qp_rd_atom.min(attr.max_qp_init_rd_atom);
                both.clamp(1, ATOMICS_MAX) as u8
            },
            work_requests_max: u32::try_from(attr.max_qp_wr).unwrap_or(0).max(16),
            completions_max: u32::try_from(attr.max_cqe).unwrap_or(0).max(16),
            options: options.clone(),
            device,
            state: NicState::new(),
        })
    }
}

/// Returns a port's attributes if it can be used.
///
/// # Safety
/// `context` is open.
unsafe fn usable_port(
    library: &Library,
    context: *mut ibv_context,
    here: &str,
    port: u8,
) -> Result<ibv_port_attr, String> {
    // SAFETY: plain data that may be zero. The function writes the fields of older releases, and
    // only those are used here.
    let mut state: ibv_port_attr = unsafe { mem::zeroed() };
    // SAFETY: the context is open. The struct is this function's own.
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
    Ok(state)
}

/// Returns a port's description for NCCL.
fn device((name, port): (&str, u8), attr: &ibv_device_attr, gid: &Gid, pointers: i32) -> Device {
    let rate = fs::read_to_string(sysfs(name).join(format!("ports/{port}/rate")));
    let speed_mbit = rate.ok().and_then(|text| choose::rate_mbit(&text)).unwrap_or(10_000);
    let guid = match u64::from_be(attr.sys_image_guid) {
        0 => u64::from_be(attr.node_guid),
        guid => guid,
    };
    Device {
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
    }
}

/// Returns the entry of a port's GID table that is to be used.
///
/// # Safety
/// `context` is open.
unsafe fn gid(
    library: &Library,
    context: *mut ibv_context,
    name: &str,
    port: u8,
    state: &ibv_port_attr,
    options: &VerbsOptions,
) -> Option<Gid> {
    let read = |index: u8| {
        let mut gid = ibv_gid { raw: [0; 16] };
        // SAFETY: the context is open. The union is this function's own, and any bytes are valid.
        let raw = unsafe {
            let refused = (library.query_gid)(context, port, c_int::from(index), &mut gid);
            (refused == 0).then_some(gid.raw)?
        };
        // A link-local address with only zeros after the prefix counts as empty.
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

/// Reports whether the kernel takes DMA-BUFs for this device. It tries an invalid one. A kernel
/// without DMA-BUFs reports that the operation is unsupported, other kernels that the file
/// descriptor is invalid.
///
/// # Safety
/// `pd` is alive.
unsafe fn takes_dma_buf(library: &Library, pd: *mut ibv_pd) -> bool {
    let Some(register) = library.reg_dmabuf_mr else { return false };
    // SAFETY: upheld by the caller. File descriptor -1 doesn't exist, so nothing is registered.
    let mr = unsafe { register(pd, 0, 0, 0, -1, 0) };
    let error = os_error().raw_os_error();
    if !mr.is_null() {
        // SAFETY: the registration was just made.
        unsafe { (library.dereg_mr)(mr) };
    }
    !matches!(error, Some(libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::ENOSYS))
}
