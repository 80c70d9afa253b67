//! Contexts whose operations were swapped for ours, and what they were before.

use core::ffi::c_int;
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::ffi::CStr;

use laxity_client::Mode;
use laxity_ibverbs::{
    ibv_context, ibv_cq, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_qp, ibv_qp_init_attr_ex, ibv_send_wr,
    ibv_wc, verbs_context,
};
use laxity_job::exit::at_exit;
use laxity_job::{Job, fork};
use parking_lot::Mutex;

use crate::table::Table;
use crate::{builder, exempt, lanes, poll, poll_ex, post, report};

pub(crate) type PostSend =
    unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
pub(crate) type PollCq = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
pub(crate) type CreateQpEx =
    unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp;
pub(crate) type CreateCqEx =
    unsafe extern "C" fn(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex;

/// Contexts of one process that are hooked at a time. One more is left alone.
const CONTEXTS: usize = 64;
/// Entries of [`Context::polled`].
const POLLED: usize = 64;
/// `ibv_context.abi_compat` of a context that is part of a `verbs_context`.
const EXTENDED: usize = usize::MAX;

/// A function pointer that may change. Relaxed everywhere: it is set before the context is handed
/// to the program, and whoever calls through the context got it from there.
#[derive(Debug)]
struct Cell(AtomicUsize);

impl Cell {
    const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }
}

/// Casts between a function pointer of this type and a cell.
macro_rules! accessors {
    ($get:ident, $type:ty) => {
        impl Context {
            /// What the provider set.
            #[inline]
            pub(crate) fn $get(&self) -> Option<$type> {
                let address = self.$get.0.load(Ordering::Relaxed);
                // SAFETY: 0, which is `None`, or what `hook` took from a field of this type.
                unsafe { core::mem::transmute::<usize, Option<$type>>(address) }
            }
        }
    };
}

/// A context that is hooked. Never freed, but used again: whoever holds one may look at it any
/// time.
#[derive(Debug)]
pub(crate) struct Context {
    /// Null: free. Acquire and Release: the rest is set before it.
    ibv: AtomicPtr<ibv_context>,
    /// Forks before it was hooked.
    epoch: AtomicU32,
    post_send: Cell,
    poll_cq: Cell,
    create_qp_ex: Cell,
    create_cq_ex: Cell,
    /// Number of the NIC in the daemon's configuration (low byte) and the generation of the daemon
    /// that was asked, plus one. Relaxed: one word.
    nic: AtomicU64,
    /// When completion queues were last polled, in [`lanes::tick`]s, by a part of their address.
    /// Relaxed: those that share an entry are taken for one.
    polled: [AtomicU32; POLLED],
    pub(crate) queue_pairs: Table,
}

accessors!(post_send, PostSend);
accessors!(poll_cq, PollCq);
accessors!(create_qp_ex, CreateQpEx);
accessors!(create_cq_ex, CreateCqEx);

static TABLE: [Context; CONTEXTS] = [const {
    Context {
        ibv: AtomicPtr::new(ptr::null_mut()),
        epoch: AtomicU32::new(0),
        post_send: Cell::new(),
        poll_cq: Cell::new(),
        create_qp_ex: Cell::new(),
        create_cq_ex: Cell::new(),
        nic: AtomicU64::new(0),
        polled: [const { AtomicU32::new(0) }; POLLED],
        queue_pairs: Table::new(),
    }
}; CONTEXTS];
/// Entries that were ever used.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Held while a context is hooked or let go of.
static CHANGE: Mutex<()> = Mutex::new(());

/// How long to wait for it.
const PATIENCE: core::time::Duration = core::time::Duration::from_secs(1);

/// The entry of a context.
#[inline]
pub(crate) fn find(ibv: *mut ibv_context) -> Option<&'static Context> {
    TABLE[..USED.load(Ordering::Acquire).min(CONTEXTS)]
        .iter()
        .find(|context| context.ibv.load(Ordering::Acquire) == ibv)
}

/// Puts our function in front of a provider's, and remembers the provider's. A function that is
/// ours already is not taken for the provider's.
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

/// Puts the provider's function back, if ours is in front of it.
macro_rules! put_back {
    ($field:expr, $ours:path, $theirs:expr) => {
        if $field.map(|f| f as usize) == Some($ours as *const () as usize) {
            $field = $theirs;
        }
    };
}

/// Swaps the operations of a context that a provider or libibverbs has just set, or set anew.
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
    at_exit(report::end);
    // A fork may have left it locked: better one context that is not hooked than a process that
    // hangs.
    let Some(_change) = CHANGE.try_lock_for(PATIENCE) else {
        return;
    };
    let context = match find(ibv) {
        Some(context) => context,
        None => {
            let used = USED.load(Ordering::Relaxed);
            let free = TABLE[..used]
                .iter()
                .position(|context| context.ibv.load(Ordering::Relaxed).is_null());
            let Some(context) = TABLE.get(free.unwrap_or(used)) else {
                return;
            };
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
            put_before!(
                (*verbs).create_qp_ex,
                builder::create_qp_ex,
                context.create_qp_ex
            );
            put_before!(
                (*verbs).create_cq_ex,
                poll_ex::create_cq_ex,
                context.create_cq_ex
            );
        }
    }
    context.ibv.store(ibv, Ordering::Release);
}

/// Puts the provider's own operations back, before they are set anew.
///
/// # Safety
/// As for [`hook`].
pub(crate) unsafe fn unhook(ibv: *mut ibv_context) {
    let Some(context) = find(ibv) else { return };
    // SAFETY: upheld by the caller; only what is ours is put back.
    unsafe {
        let ops = &mut (*ibv).ops;
        put_back!(ops.post_send, post::post_send, context.post_send());
        put_back!(ops.poll_cq, poll::poll_cq, context.poll_cq());
        if let Some(verbs) = extended(ibv) {
            put_back!(
                (*verbs).create_qp_ex,
                builder::create_qp_ex,
                context.create_qp_ex()
            );
            put_back!(
                (*verbs).create_cq_ex,
                poll_ex::create_cq_ex,
                context.create_cq_ex()
            );
        }
    }
}

/// The context is closed: its entry is free.
pub(crate) fn let_go(ibv: *mut ibv_context) {
    let Some(context) = find(ibv) else { return };
    if !context.is_ours() {
        return;
    }
    // Queue pairs that the program leaves to the end of the context: nothing of them may be posted
    // any more.
    context.queue_pairs.close_all();
    let _change = CHANGE.try_lock_for(PATIENCE);
    context.ibv.store(ptr::null_mut(), Ordering::Release);
}

/// The extended context around a context.
///
/// # Safety
/// `ibv` is a valid context.
unsafe fn extended(ibv: *mut ibv_context) -> Option<*mut verbs_context> {
    // SAFETY: upheld by the caller; the marker says that it is part of a `verbs_context`.
    unsafe {
        ((*ibv).abi_compat as usize == EXTENDED).then(|| {
            ibv.byte_sub(core::mem::offset_of!(verbs_context, context))
                .cast()
        })
    }
}

impl Context {
    /// Whether it was hooked in this process, and not before a fork.
    #[inline]
    pub(crate) fn is_ours(&self) -> bool {
        self.epoch.load(Ordering::Relaxed) == fork::epoch()
    }

    /// By which number the daemon knows the NIC.
    #[inline]
    pub(crate) fn nic(&self) -> u8 {
        let client = lanes::client();
        let known = self.nic.load(Ordering::Relaxed);
        let asked = client.generation() + 1;
        if known >> 8 == asked {
            return known as u8;
        }
        let nic = client.nic(&self.device());
        self.nic
            .store(asked << 8 | u64::from(nic), Ordering::Relaxed);
        nic
    }

    fn polled_entry(&self, cq: *const ibv_cq) -> &AtomicU32 {
        // Allocated one by one, they differ in these bits.
        let address = cq as usize;
        &self.polled[(address >> 5 ^ address >> 11) % POLLED]
    }

    /// A completion queue is polled.
    #[inline]
    pub(crate) fn polls(&self, cq: *const ibv_cq) {
        self.polled_entry(cq)
            .store(lanes::tick(), Ordering::Relaxed);
    }

    /// When that was last.
    pub(crate) fn last_polled(&self, cq: *const ibv_cq) -> u32 {
        self.polled_entry(cq).load(Ordering::Relaxed)
    }

    /// The device's name.
    fn device(&self) -> String {
        let ibv = self.ibv.load(Ordering::Acquire);
        if ibv.is_null() {
            return String::new();
        }
        // SAFETY: a context that is open has a device, whose name is a C string.
        unsafe {
            let device = (*ibv).device;
            if device.is_null() {
                return String::new();
            }
            CStr::from_ptr((*device).name.as_ptr())
                .to_string_lossy()
                .into_owned()
        }
    }
}
