//! NCCL's interface for one-sided operations, as functions that all versions of the table share.
//!
//! `listen` and `connect` take any context, because NCCL 2.30.7 passes the network plugin's. Of a
//! context's configuration only the number of domains and the traffic class are read: some headers
//! of v14 end before `rankStride`, and every context reaches every rank here. The flags of an
//! operation say whether more follows, which changes nothing here.

use core::ffi::c_int;
use core::ptr;
use std::sync::Arc;

use super::rma_table::{RegionPlace, RmaConfig, RmaProperties, RmaTarget, SignalCall};
use super::table::Properties;
use super::versions::V12;
use super::{Code, Opaque, OpaqueOut, guarded, not_null, returning};
use crate::backend::{Memory, POINTER_DMABUF};
use crate::context::{Context, TRAFFIC_CLASS_UNSET};
use crate::fault::{Fault, Result};
use crate::handle::HANDLE_BYTES;
use crate::log::{self, Logger};
use crate::plugin;
use crate::rma::registry::NumberedObjects;
use crate::rma::{
    Put, RegionSide, RmaContext, RmaGroup, RmaListener, RmaRegion, TransferEnds, test_request,
};

/// The code by which `init` steps aside, `ncclInvalidUsage`.
const ASIDE: Code = 5;
/// Adds one to the signal's word, `NCCL_NET_SIGNAL_OP_INC`.
const SIGNAL_INC: u32 = 1;
/// Adds the value to the signal's word, `NCCL_NET_SIGNAL_OP_ADD`.
const SIGNAL_ADD: u32 = 2;
/// More ranks than any communicator has.
const RANKS_MAX: c_int = 1 << 20;

static COMMUNICATORS: NumberedObjects<Context> = NumberedObjects::new("communicator");
static LISTENERS: NumberedObjects<RmaListener> = NumberedObjects::new("listenComm");
static GROUPS: NumberedObjects<Communicator> = NumberedObjects::new("collComm");
static CONTEXTS: NumberedObjects<RmaContext> = NumberedObjects::new("context");
static REGIONS: NumberedObjects<RmaRegion> = NumberedObjects::new("mhandle");

/// A group with its communicator.
struct Communicator {
    group: Arc<RmaGroup>,
    context: Arc<Context>,
}

/// Returns the communicator's context, or one for all if the number is not this interface's.
fn communicator(number: Opaque) -> Result<Arc<Context>> {
    COMMUNICATORS.get(number).or_else(|_| Ok(plugin::get()?.context_of_all()))
}

/// Makes a communicator. Without `LAXITY_RMA`, refuses, and NCCL goes on with its own backend.
pub(super) unsafe extern "C" fn init(
    context: OpaqueOut,
    comm_id: u64,
    logger: Option<Logger>,
) -> Code {
    log::set(logger);
    let mut is_on = false;
    let made = || {
        is_on = plugin::settings().one_sided;
        if !is_on {
            log::info("LAXITY_RMA is off: NCCL uses its own backend for one-sided operations");
            return Ok(ptr::null_mut());
        }
        let context = plugin::get_or_make()?.context(comm_id, TRAFFIC_CLASS_UNSET);
        Ok(COMMUNICATORS.add(context))
    };
    // SAFETY: upheld by the caller.
    let code = unsafe { returning("init", context, made) };
    if is_on { code } else { ASIDE }
}

/// Forgets a communicator. One that was split off from it may still pass its number, which then
/// stands for the context that all communicators share.
pub(super) unsafe extern "C" fn finalize(context: Opaque) -> Code {
    guarded("finalize", || {
        let _ = COMMUNICATORS.remove(context);
        Ok(())
    })
}

/// Writes the number of NICs. It is 0 if `LAXITY_RMA` is off or a NIC lacks atomic operations.
pub(super) unsafe extern "C" fn devices(count: *mut c_int) -> Code {
    let number = || {
        if !plugin::settings().one_sided {
            return Ok(0);
        }
        Ok(plugin::get()?.one_sided_devices() as c_int)
    };
    // SAFETY: upheld by the caller.
    unsafe { returning("devices", count, number) }
}

/// Writes a NIC's properties. They name a proxy, and have the layout of network v12.
pub(super) unsafe extern "C" fn get_properties(
    device: c_int,
    properties: *mut Properties<V12>,
) -> Code {
    let found = || Ok(Properties::one_sided(plugin::get()?.device(device)?, device));
    // SAFETY: upheld by the caller.
    unsafe { returning("getProperties", properties, found) }
}

pub(super) unsafe extern "C" fn get_rma_properties(
    comm: Opaque,
    properties: *mut RmaProperties,
) -> Code {
    // The safe answer. A signal is behind the puts of its own rank only.
    let found =
        || GROUPS.get(comm).map(|_| RmaProperties { flushes_all_puts_on_any_signal: false });
    // SAFETY: upheld by the caller.
    unsafe { returning("getRmaProperties", properties, found) }
}

/// Listens for the ranks of a group. Writes the handle that NCCL carries to them.
pub(super) unsafe extern "C" fn listen(
    context: Opaque,
    device: c_int,
    handle: Opaque,
    listen_comm: OpaqueOut,
) -> Code {
    let made = || {
        let handle = not_null(handle.cast::<[u8; HANDLE_BYTES]>(), "the handle")?;
        let listener = plugin::get()?.listen_one_sided(&*communicator(context)?, device)?;
        // SAFETY: upheld by the caller.
        unsafe { handle.write(listener.handle()) };
        Ok(LISTENERS.add(Arc::new(listener)))
    };
    // SAFETY: upheld by the caller.
    unsafe { returning("listen", listen_comm, made) }
}

/// Connects a group. Blocks until all ranks have called it, for 120 s or until `closeListen`.
pub(super) unsafe extern "C" fn connect(
    context: Opaque,
    handles: OpaqueOut,
    ranks: c_int,
    rank: c_int,
    listen_comm: Opaque,
    comm: OpaqueOut,
) -> Code {
    let made = || {
        let handles = not_null(handles, "the array of handles")?;
        if !(0..ranks).contains(&rank) || ranks > RANKS_MAX {
            return Err(Fault::Argument(format!("rank {rank} of {ranks}")));
        }
        let handle = |at: usize| {
            // SAFETY: upheld by the caller.
            let handle = unsafe { handles.add(at).read() }.cast::<[u8; HANDLE_BYTES]>();
            // SAFETY: upheld by the caller. Bytes have no alignment.
            not_null(handle, "a handle").map(|handle| unsafe { handle.read() })
        };
        let all: Vec<_> = (0..ranks as usize).map(handle).collect::<Result<_>>()?;
        let context = communicator(context)?;
        let group = RmaGroup::connect(&*LISTENERS.get(listen_comm)?, &all, rank as usize)?;
        Ok(GROUPS.add(Arc::new(Communicator { group, context })))
    };
    // SAFETY: upheld by the caller.
    unsafe { returning("connect", comm, made) }
}

/// Makes a context. Over RDMA, blocks until all ranks have called it, and fails for all or none.
pub(super) unsafe extern "C" fn create_context(
    comm: Opaque,
    config: *mut RmaConfig,
    context: OpaqueOut,
) -> Code {
    let made = || {
        let config = not_null(config, "the configuration")?;
        let of = GROUPS.get(comm)?;
        // SAFETY: upheld by the caller.
        let config = unsafe { config.read() };
        let around =
            plugin::get()?.around_one_sided(&of.context, config.traffic_class, of.group.device)?;
        RmaContext::new(&of.group, config.contexts, around).map(|made| CONTEXTS.add(made))
    };
    // SAFETY: upheld by the caller.
    unsafe { returning("createContext", context, made) }
}

unsafe fn register(comm: Opaque, memory: Memory, handle: OpaqueOut) -> Code {
    let made = || GROUPS.get(comm)?.group.register(memory).map(|region| REGIONS.add(region));
    // SAFETY: upheld by the caller.
    unsafe { returning("regMrSym", handle, made) }
}

/// Registers `size` bytes. Blocks until all ranks have called it. Every registration is strictly
/// ordered, so the flags change nothing.
pub(super) unsafe extern "C" fn reg_mr_sym(
    comm: Opaque,
    data: Opaque,
    size: usize,
    kind: c_int,
    _flags: u64,
    handle: OpaqueOut,
) -> Code {
    let memory = Memory { address: data as usize, bytes: size, kind, dma_buf: None };
    // SAFETY: upheld by the caller.
    unsafe { register(comm, memory, handle) }
}

/// Registers `size` bytes of a GPU, from `offset` bytes of the DMA-BUF `descriptor`.
pub(super) unsafe extern "C" fn reg_mr_sym_dma_buf(
    comm: Opaque,
    data: Opaque,
    size: usize,
    _kind: c_int,
    offset: u64,
    descriptor: c_int,
    _flags: u64,
    handle: OpaqueOut,
) -> Code {
    let (address, dma_buf) = (data as usize, Some((descriptor, offset)));
    let memory = Memory { address, bytes: size, kind: POINTER_DMABUF, dma_buf };
    // SAFETY: upheld by the caller.
    unsafe { register(comm, memory, handle) }
}

/// Ends a registration, also after its group. The memory is not touched afterwards.
pub(super) unsafe extern "C" fn dereg_mr_sym(comm: Opaque, handle: Opaque) -> Code {
    guarded("deregMrSym", || {
        let region = REGIONS.remove(handle)?;
        match GROUPS.get(comm) {
            Ok(of) => of.group.deregister(&region),
            // The group may be closed already.
            Err(_) => region.end(),
        }
        Ok(())
    })
}

/// Ends a context. Requests that are not done are forgotten.
pub(super) unsafe extern "C" fn destroy_context(context: Opaque) -> Code {
    guarded("destroyContext", || CONTEXTS.remove(context).map(|context| context.close()))
}

/// Ends a group, and any collective call that waits. Takes up to 2 s to send what was posted.
pub(super) unsafe extern "C" fn close_coll(comm: Opaque) -> Code {
    guarded("closeColl", || GROUPS.remove(comm).map(|comm| comm.group.close()))
}

/// Ends a listener, and a `connect` that waits on it.
pub(super) unsafe extern "C" fn close_listen(listen_comm: Opaque) -> Code {
    guarded("closeListen", || LISTENERS.remove(listen_comm).map(|listener| listener.close()))
}

/// Returns both ends of a transfer, unless it has no bytes.
fn ends(near: RegionPlace, far: RegionPlace, bytes: usize) -> Result<Option<TransferEnds>> {
    if bytes == 0 {
        return Ok(None);
    }
    Ok(Some(TransferEnds { near: side(near)?, far: side(far)? }))
}

fn side((handle, offset): RegionPlace) -> Result<RegionSide> {
    Ok(RegionSide { region: REGIONS.get(handle)?, offset })
}

/// Takes a put of `bytes`, a signal, or both. Never blocks. Every signal is strong, because
/// operations of a domain and rank keep their order.
pub(super) unsafe fn put(
    (context, domain, rank): RmaTarget,
    near: RegionPlace,
    far: RegionPlace,
    bytes: usize,
    signal: Option<SignalCall>,
    request: OpaqueOut,
) -> Code {
    let taken = || {
        let word_and_value = |(word, value, operation): SignalCall| match operation {
            SIGNAL_INC => Ok((side(word)?, 1)),
            SIGNAL_ADD => Ok((side(word)?, value)),
            other => Err(Fault::Argument(format!("signal operation {other}"))),
        };
        let (ends, signal) = (ends(near, far, bytes)?, signal.map(word_and_value).transpose()?);
        CONTEXTS.get(context)?.put(domain, rank, Put { ends, bytes: bytes as u64, signal })
    };
    // SAFETY: upheld by the caller.
    unsafe { returning("iput", request, taken) }
}

/// Takes a get of `bytes`. Never blocks.
pub(super) unsafe fn get(
    (context, domain, rank): RmaTarget,
    near: RegionPlace,
    far: RegionPlace,
    bytes: usize,
    request: OpaqueOut,
) -> Code {
    let taken = || {
        let ends = ends(near, far, bytes)?;
        CONTEXTS.get(context)?.get(domain, rank, ends.as_ref(), bytes as u64)
    };
    // SAFETY: upheld by the caller.
    unsafe { returning("iget", request, taken) }
}

/// Makes gets that are done visible to GPUs. Any rank will do; NCCL passes the signals' region.
pub(super) unsafe extern "C" fn iflush(
    context: Opaque,
    domain: c_int,
    handle: Opaque,
    _rank: u32,
    request: OpaqueOut,
) -> Code {
    let taken = || CONTEXTS.get(context)?.flush(domain, &REGIONS.get(handle)?);
    // SAFETY: upheld by the caller.
    unsafe { returning("iflush", request, taken) }
}

/// Writes 1 if the request is done. It ends then. A failed request stays an error, with the reason.
pub(super) unsafe extern "C" fn test(_comm: Opaque, request: Opaque, done: *mut c_int) -> Code {
    // SAFETY: upheld by the caller.
    unsafe { returning("test", done, || test_request(request).map(c_int::from)) }
}

/// Posts held operations that have permits, and reports completions. Not all releases of NCCL call
/// it.
pub(super) unsafe extern "C" fn rma_progress(context: Opaque) -> Code {
    guarded("rmaProgress", || CONTEXTS.get(context).map(|context| context.progress()))
}

/// Writes whether a rank was lost. A rank that closed its group is not.
pub(super) unsafe extern "C" fn query_last_error(context: Opaque, failed: *mut bool) -> Code {
    let found = || CONTEXTS.get(context).map(|context| context.has_failed());
    // SAFETY: upheld by the caller.
    unsafe { returning("queryLastError", failed, found) }
}
