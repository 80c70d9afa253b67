//! Contexts whose operations are replaced by this library's, and their original operations.

use core::ffi::c_int;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::ffi::CStr;

use laxity_client::Mode;
use laxity_ibverbs::{
    ibv_context, ibv_cq, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_mw, ibv_mw_type, ibv_pd, ibv_qp,
    ibv_qp_init_attr_ex, ibv_send_wr, ibv_wc, verbs_context,
};
use laxity_job::fork::PerProcess;
use laxity_job::{Job, fork};
use parking_lot::{Mutex, MutexGuard};

use crate::bundle::{self, candidate, probe};
use crate::table::QueuePairTable;
use crate::{builder, exempt, lanes, poll, poll_ex, post, report};

pub(crate) type PostSend =
    unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
pub(crate) type PollCq = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
pub(crate) type CreateQpEx =
    unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp;
pub(crate) type AllocMw = unsafe extern "C" fn(*mut ibv_pd, ibv_mw_type::Type) -> *mut ibv_mw;
pub(crate) type CreateCqEx =
    unsafe extern "C" fn(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex;

/// Largest number of hooked contexts in a process. Further ones are not hooked.
const CONTEXTS: usize = 64;
/// Number of entries of [`HookedContext::polled`].
const POLLED: usize = 64;
/// Value of `ibv_context.abi_compat` in a context that is part of a `verbs_context`.
const EXTENDED: usize = usize::MAX;

/// A function pointer that may change. Relaxed everywhere: it is set before the program gets the
/// context, and all callers get the context from the program.
#[derive(Debug)]
struct FunctionCell(AtomicUsize);

impl FunctionCell {
    const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }
}

/// Defines functions that read a function pointer of this type from a cell.
macro_rules! accessors {
    ($get:ident, $type:ty) => {
        impl HookedContext {
            #[inline]
            pub(crate) fn $get(&self) -> Option<$type> {
                let address = self.$get.0.load(Ordering::Relaxed);
                // SAFETY: the value is 0, which is `None`, or comes from a field of this type.
                unsafe { core::mem::transmute::<usize, Option<$type>>(address) }
            }
        }
    };
}

/// A hooked context. It is never freed, since other threads may read it, but its entry is used
/// again.
#[derive(Debug)]
pub(crate) struct HookedContext {
    /// The program's context. Null if this entry is free. Acquire and Release, since the other
    /// fields are set before it.
    ibv: AtomicPtr<ibv_context>,
    /// The fork epoch in which the context was hooked.
    epoch: AtomicU32,
    post_send: FunctionCell,
    poll_cq: FunctionCell,
    create_qp_ex: FunctionCell,
    create_cq_ex: FunctionCell,
    alloc_mw: FunctionCell,
    /// Whether the program opened the context by a function of this library. Relaxed: it is set
    /// before the program gets the context.
    is_linked: AtomicBool,
    /// Number of the NIC in the daemon's configuration (low byte), and the daemon's generation plus
    /// one. Relaxed, because it is one word.
    nic: AtomicU64,
    /// Times at which completion queues were last polled, in [`lanes::tick`]s. A part of the
    /// queue's address is the index. Relaxed: queues with the same index are treated as one.
    polled: [AtomicU32; POLLED],
    pub(crate) queue_pairs: QueuePairTable,
}

accessors!(post_send, PostSend);
accessors!(poll_cq, PollCq);
accessors!(create_qp_ex, CreateQpEx);
accessors!(create_cq_ex, CreateCqEx);
accessors!(alloc_mw, AllocMw);

static TABLE: [HookedContext; CONTEXTS] = [const {
    HookedContext {
        ibv: AtomicPtr::new(ptr::null_mut()),
        epoch: AtomicU32::new(0),
        post_send: FunctionCell::new(),
        poll_cq: FunctionCell::new(),
        create_qp_ex: FunctionCell::new(),
        create_cq_ex: FunctionCell::new(),
        alloc_mw: FunctionCell::new(),
        is_linked: AtomicBool::new(false),
        nic: AtomicU64::new(0),
        polled: [const { AtomicU32::new(0) }; POLLED],
        queue_pairs: QueuePairTable::new(),
    }
}; CONTEXTS];
static USED: AtomicUsize = AtomicUsize::new(0);
/// Lock for hooking and releasing a context.
static CHANGE: PerProcess<Mutex<()>> = PerProcess::none();

fn change() -> MutexGuard<'static, ()> {
    CHANGE.get_or_make(Mutex::default).lock()
}

#[inline]
pub(crate) fn find(ibv: *mut ibv_context) -> Option<&'static HookedContext> {
    TABLE[..USED.load(Ordering::Acquire).min(CONTEXTS)]
        .iter()
        .find(|context| context.ibv.load(Ordering::Acquire) == ibv)
}

/// Replaces a provider's function by this library's and stores the provider's. A field that already
/// has this library's function stays unchanged.
macro_rules! put_before {
    ($field:expr, $ours:path, $cell:expr) => {
        if let Some(real) = $field
            && real as usize != $ours as *const () as usize
        {
            $cell.0.store(real as usize, Ordering::Relaxed);
            $field = Some($ours);
        }
    };
}

/// Restores the provider's function if this library's is in the field.
macro_rules! put_back {
    ($field:expr, $ours:path, $theirs:expr) => {
        if $field.map(|f| f as usize) == Some($ours as *const () as usize) {
            $field = $theirs;
        }
    };
}

/// Replaces the operations of a context after a provider or libibverbs has set them.
///
/// # Safety
/// `ibv` is a context whose operations are set and that no other thread uses yet.
pub(crate) unsafe fn hook(ibv: *mut ibv_context) {
    let job = Job::of_this_process();
    job.complain();
    if job.mode == Mode::Off || exempt::is_exempt(ibv) {
        return;
    }
    fork::watch();
    report::at_end();
    let _change = change();
    let context = match find(ibv) {
        Some(context) => context,
        None => {
            let used = USED.load(Ordering::Relaxed);
            let free = TABLE[..used]
                .iter()
                .position(|context| context.ibv.load(Ordering::Relaxed).is_null());
            let Some(context) = TABLE.get(free.unwrap_or(used)) else { return };
            USED.store(used.max(free.unwrap_or(used) + 1), Ordering::Release);
            context
        }
    };
    if context.epoch.swap(fork::epoch(), Ordering::Relaxed) != fork::epoch() {
        context.queue_pairs.forget_all();
    }
    context.nic.store(0, Ordering::Relaxed);
    // SAFETY: upheld by the caller.
    unsafe {
        let ops = &mut (*ibv).ops;
        put_before!(ops.post_send, post::post_send, context.post_send);
        put_before!(ops.poll_cq, poll::poll_cq, context.poll_cq);
        if let Some(verbs) = extended(ibv) {
            put_before!((*verbs).create_qp_ex, builder::create_qp_ex, context.create_qp_ex);
            put_before!((*verbs).create_cq_ex, poll_ex::create_cq_ex, context.create_cq_ex);
        }
        if job.bundle_secret.is_some() {
            put_before!(ops.alloc_mw, alloc_mw, context.alloc_mw);
        }
    }
    context.ibv.store(ibv, Ordering::Release);
}

/// Restores the provider's own operations before they are set again.
///
/// # Safety
/// The conditions of [`hook`] hold.
pub(crate) unsafe fn unhook(ibv: *mut ibv_context) {
    let Some(context) = find(ibv) else { return };
    // SAFETY: upheld by the caller. Only fields with this library's functions are changed.
    unsafe {
        let ops = &mut (*ibv).ops;
        put_back!(ops.post_send, post::post_send, context.post_send());
        put_back!(ops.poll_cq, poll::poll_cq, context.poll_cq());
        if let Some(verbs) = extended(ibv) {
            put_back!((*verbs).create_qp_ex, builder::create_qp_ex, context.create_qp_ex());
            put_back!((*verbs).create_cq_ex, poll_ex::create_cq_ex, context.create_cq_ex());
        }
        put_back!(ops.alloc_mw, alloc_mw, context.alloc_mw());
    }
}

/// Frees the entry of a context that is closed.
pub(crate) fn forget_context(ibv: *mut ibv_context) {
    let Some(context) = find(ibv) else { return };
    if !context.is_ours() {
        return;
    }
    // The program may close the context with queue pairs in it. They must post nothing more.
    context.queue_pairs.close_all();
    probe::forget(ibv);
    let _change = change();
    context.is_linked.store(false, Ordering::Relaxed);
    context.ibv.store(ptr::null_mut(), Ordering::Release);
}

/// Replaces `context->ops.alloc_mw`. A memory window of type 2 works with one queue pair only, so
/// it can't be made in a protection domain with queue pairs that may get bundles.
///
/// # Safety
/// The conditions of `ibv_alloc_mw` hold.
unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type::Type) -> *mut ibv_mw {
    // SAFETY: upheld by the caller. errno belongs to the calling thread.
    unsafe {
        let real = find((*pd).context).and_then(HookedContext::alloc_mw);
        let is_allowed = kind != ibv_mw_type::IBV_MW_TYPE_2 || candidate::note_window(pd);
        match real.filter(|_| is_allowed) {
            Some(real) => real(pd, kind),
            None => {
                *libc::__errno_location() = libc::EOPNOTSUPP;
                ptr::null_mut()
            }
        }
    }
}

/// Returns the extended context around a context.
///
/// # Safety
/// `ibv` is a valid context.
unsafe fn extended(ibv: *mut ibv_context) -> Option<*mut verbs_context> {
    // SAFETY: upheld by the caller. The marker shows that the context is part of a `verbs_context`.
    unsafe {
        ((*ibv).abi_compat as usize == EXTENDED)
            .then(|| ibv.byte_sub(core::mem::offset_of!(verbs_context, context)).cast())
    }
}

impl HookedContext {
    /// Reports whether this process hooked the context, and not its parent before a fork.
    #[inline]
    pub(crate) fn is_ours(&self) -> bool {
        self.epoch.load(Ordering::Relaxed) == fork::epoch()
    }

    pub(crate) fn be_linked(&self) {
        self.is_linked.store(true, Ordering::Relaxed);
    }

    /// Reports whether queue pairs of the context may get bundles. Where the program doesn't link
    /// libibverbs, it would see events of siblings as they are.
    pub(crate) fn may_bundle(&self) -> bool {
        bundle::is_on() && self.is_linked.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn nic(&self) -> u8 {
        let client = lanes::client();
        let known = self.nic.load(Ordering::Relaxed);
        let asked = client.generation() + 1;
        if known >> 8 == asked {
            return known as u8;
        }
        let nic = client.nic(&self.device());
        self.nic.store(asked << 8 | u64::from(nic), Ordering::Relaxed);
        nic
    }

    fn polled_entry(&self, cq: *const ibv_cq) -> &AtomicU32 {
        // The addresses of separate allocations differ in these bits.
        let address = cq as usize;
        &self.polled[(address >> 5 ^ address >> 11) % POLLED]
    }

    #[inline]
    pub(crate) fn note_poll(&self, cq: *const ibv_cq) {
        self.polled_entry(cq).store(lanes::tick(), Ordering::Relaxed);
    }

    /// Returns the tick in which a completion queue was last polled.
    pub(crate) fn last_polled(&self, cq: *const ibv_cq) -> u32 {
        self.polled_entry(cq).load(Ordering::Relaxed)
    }

    fn device(&self) -> String {
        let ibv = self.ibv.load(Ordering::Acquire);
        if ibv.is_null() {
            return String::new();
        }
        // SAFETY: an open context has a device, whose name is a C string.
        unsafe {
            let device = (*ibv).device;
            if device.is_null() {
                return String::new();
            }
            CStr::from_ptr((*device).name.as_ptr()).to_string_lossy().into_owned()
        }
    }
}
