//! The functions of libibverbs that programs link, in front of the real ones.
//!
//! They are exported without a version, which the dynamic linker accepts for a reference to any
//! version. The functions of `IBVERBS_1.0`, which programs linked before 2008 refer to, have other
//! arguments and are not supported.
//!
//! # Safety
//! Callers of each `ibv_*` function here uphold the conditions of its manual page, and other
//! functions get what these got: contexts and queue pairs are alive.

#![allow(clippy::missing_safety_doc, reason = "said above, once for all functions")]

use core::cell::Cell;
use core::ffi::{CStr, c_int};
use core::ptr;

use laxity_ibverbs::{
    ibv_async_event, ibv_context, ibv_device, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask,
    ibv_qp_cap, ibv_qp_init_attr, ibv_qp_state,
};
use laxity_job::symbol::{Symbol, c_name, function_at};

use crate::bundle::{self, candidate, events};
use crate::class;
use crate::contexts;
use crate::exempt;
use crate::queue_pair::QueuePair;
use crate::work::SendLimits;

/// Returns the symbol of a function of libibverbs, whose name ends with a zero byte. Private
/// functions are looked up without a version, because it differs between releases.
pub(crate) const fn of_libibverbs(name: &'static str, version: Option<&'static CStr>) -> Symbol {
    Symbol::new(c_name(name), version, Some(c"libibverbs.so.1"))
}

/// Defines functions in front of libibverbs': `fn name(arguments) -> result, otherwise, |real| {
/// body }`, in this version or in any. In the body, `real` is the library's own function. Without
/// it the function returns `otherwise`.
macro_rules! interpose {
    ($version:expr; $(
        $(#[$doc:meta])*
        fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty, $otherwise:expr,)?
        |$real:ident| $body:block
    )*) => {$(
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) $(-> $result)? {
            static REAL: laxity_job::symbol::Symbol =
                $crate::exports::of_libibverbs(concat!(stringify!($name), "\0"), $version);
            let real = laxity_job::real!(REAL.address(), fn($($type),*) $(-> $result)?);
            let Some($real) = real else { return $($otherwise)? };
            // SAFETY: the caller upholds what this function demands, and `real` demands no more.
            unsafe { $body }
        }
    )*};
}
pub(crate) use interpose;

/// Returns null with the error of a missing function.
fn missing<T>() -> *mut T {
    // SAFETY: errno belongs to the calling thread.
    unsafe { *libc::__errno_location() = libc::ENOSYS };
    ptr::null_mut()
}

interpose! { Some(c"IBVERBS_1.1");
    /// Opens a device like `ibv_open_device`, and hooks its context.
    fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context, missing(), |open| {
        let ibv = hooked(open(device));
        // The program links libibverbs, so it gets events through this library, too.
        if let Some(context) = contexts::find(ibv).filter(|_| !ibv.is_null()) {
            context.be_linked();
        }
        ibv
    }

    /// Closes a device like `ibv_close_device`, and removes its context here.
    fn ibv_close_device(ibv: *mut ibv_context) -> c_int, libc::ENOSYS, |close| {
        contexts::forget_context(ibv);
        exempt::forget(ibv);
        close(ibv)
    }

    /// Creates a queue pair like `ibv_create_qp`, and records it.
    fn ibv_create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp, missing(),
    |create| {
        let context = contexts::find((*pd).context).filter(|context| context.is_ours());
        let Some(context) = context else { return create(pd, attr) };
        let queues = [(*attr).send_cq, (*attr).recv_cq];
        let signals_all = (*attr).sq_sig_all != 0;
        let admitted = context.may_bundle()
            && candidate::admit(pd, queues, (*attr).qp_type, signals_all, &(*attr).cap);
        let cap = &raw mut (*attr).cap;
        // The call writes the queue pair's real limits to `attr`.
        let (qp, is_candidate) = create_with_room(admitted, cap, || create(pd, attr));
        if !qp.is_null() {
            let queue_pair = context.queue_pairs.make((*qp).qp_num);
            let limits = SendLimits::of(&(*attr).cap);
            queue_pair.open(context, qp, Some((limits, (*attr).sq_sig_all != 0)));
            if is_candidate {
                queue_pair.be_candidate();
            }
        }
        qp
    }

    /// Queries a queue pair like `ibv_query_qp`. The program doesn't see the room for a barrier.
    fn ibv_query_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int,
        init: *mut ibv_qp_init_attr) -> c_int, libc::ENOSYS,
    |query| {
        let error = query(qp, attr, mask, init);
        if error == 0 && bundle::is_on() && let Some(queue_pair) = known(qp) {
            queue_pair.queried(&mut *attr, &mut *init);
        }
        error
    }

    /// Acknowledges an event like `ibv_ack_async_event`, for the queue pair that it came from.
    fn ibv_ack_async_event(event: *mut ibv_async_event) |acknowledge| {
        events::acknowledge(&*event, |event| acknowledge(event));
    }

    /// Changes a queue pair like `ibv_modify_qp`, and sets its class.
    fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int, libc::ENOSYS,
    |real| {
        modify(qp, attr, mask, |attr| real(qp, attr, mask))
    }

    /// Destroys a queue pair like `ibv_destroy_qp`, and removes it here.
    fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int, libc::ENOSYS, |destroy| {
        forget(qp);
        destroy(qp)
    }
}

/// Returns an event like `ibv_get_async_event`, as one of the program's own queue pair. The call
/// waits in `read`, where `pthread_cancel` unwinds the thread. So this function may unwind too, and
/// nothing in it needs a destructor.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ibv_get_async_event(
    context: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    type GetEvent = unsafe extern "C-unwind" fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
    static REAL: Symbol = of_libibverbs("ibv_get_async_event\0", Some(c"IBVERBS_1.1"));
    let Some(address) = REAL.address() else { return -1 };
    // SAFETY: upheld by the caller. The type belongs to the name, and the call writes the event.
    unsafe {
        let result = function_at::<GetEvent>(address)(context, event);
        if result == 0 {
            events::received(&mut *event);
        }
        result
    }
}

interpose! { Some(c"IBVERBS_1.10");
    /// Imports a device like `ibv_import_device`, and hooks its context.
    fn ibv_import_device(cmd_fd: c_int) -> *mut ibv_context, missing(), |import| {
        hooked(import(cmd_fd))
    }
}

/// Creates a queue pair. If it may get a bundle, its send queue gets one entry more than the
/// program asks for, and is said to have one entry less than it has: a barrier needs it. Reports
/// whether it has that entry.
///
/// # Safety
/// `create` makes a queue pair with the capacities at `cap`, and writes those that it got.
pub(crate) unsafe fn create_with_room(
    is_admitted: bool,
    cap: *mut ibv_qp_cap,
    create: impl Fn() -> *mut ibv_qp,
) -> (*mut ibv_qp, bool) {
    if is_admitted {
        // SAFETY: upheld by the caller. Plain data, of which a copy is kept.
        unsafe {
            let before = *cap;
            (*cap).max_send_wr += 1;
            let qp = create();
            if !qp.is_null() {
                (*cap).max_send_wr -= 1;
                return (qp, true);
            }
            *cap = before;
        }
    }
    (create(), false)
}

/// Returns what is known about a queue pair of this process.
unsafe fn known(qp: *mut ibv_qp) -> Option<&'static QueuePair> {
    // SAFETY: upheld by the caller.
    let (ibv, number) = unsafe { ((*qp).context, (*qp).qp_num) };
    contexts::find(ibv).filter(|context| context.is_ours())?.queue_pairs.find(number)
}

unsafe fn hooked(ibv: *mut ibv_context) -> *mut ibv_context {
    if !ibv.is_null() {
        // SAFETY: upheld by the caller.
        unsafe { contexts::hook(ibv) };
    }
    ibv
}

/// Closes and removes a queue pair before it is destroyed.
pub(crate) unsafe fn forget(qp: *mut ibv_qp) {
    // SAFETY: upheld by the caller.
    let (ibv, number) = unsafe { ((*qp).context, (*qp).qp_num) };
    if let Some(context) = contexts::find(ibv).filter(|context| context.is_ours())
        && let Some(queue_pair) = context.queue_pairs.find(number)
    {
        queue_pair.end_bundle();
        queue_pair.close();
        context.queue_pairs.remove(number);
    }
}

thread_local! {
    /// Whether this thread is in `modify`, or in a provider that posts or polls. What the provider
    /// changes there belongs to it. Some providers put a queue pair into error while they poll, and
    /// hold its lock, which a post of deferred work requests would wait for.
    static WITHIN: Cell<bool> = const { Cell::new(false) };
}

/// Changes a queue pair by `real`, sets its class, and follows its state.
pub(crate) unsafe fn modify(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
    real: impl FnOnce(*mut ibv_qp_attr) -> c_int,
) -> c_int {
    // SAFETY: upheld by the caller.
    let context = contexts::find(unsafe { (*qp).context }).filter(|context| context.is_ours());
    let (Some(context), false, false) = (context, attr.is_null(), WITHIN.get()) else {
        return real(attr);
    };
    // SAFETY: upheld by the caller. Plain data, of which a copy is changed.
    let mut changed = unsafe { ptr::read(attr) };
    let classes = class::of_stages(&changed, mask);
    class::apply(&mut changed, mask);
    // SAFETY: upheld by the caller.
    unsafe { class::apply_service_level(qp, &mut changed, mask) };
    let to = (mask as u32 & ibv_qp_attr_mask::IBV_QP_STATE != 0).then_some(changed.qp_state);
    // SAFETY: upheld by the caller.
    let queue_pair: &QueuePair = context.queue_pairs.make(unsafe { (*qp).qp_num });
    queue_pair.open(context, qp, None);
    let mut candidate = queue_pair.lock_candidate();
    let followed = queue_pair.before_bundled(&changed, mask as u32);
    if let Err(error) = followed.and_then(|()| candidate.follow(&changed, mask as u32)) {
        return error;
    }
    if let Some(to) = to {
        queue_pair.before_modify(to);
    }
    let result = within(|| real(&mut changed));
    if result != 0 {
        candidate.unfollow(mask as u32);
    }
    if result == 0 && class::has_address(&changed, mask) {
        // SAFETY: each form of the union is plain bytes.
        queue_pair.set_peer(unsafe { changed.ah_attr.grh.dgid.raw });
    }
    if let Some(to) = to {
        queue_pair.after_modify(to, result == 0);
    }
    if result == 0 {
        queue_pair.changed(candidate, (qp, &changed), mask as u32, classes);
    }
    result
}

/// Calls a function of libibverbs or a provider, whose own calls belong to it.
pub(crate) fn within<T>(call: impl FnOnce() -> T) -> T {
    let before = WITHIN.replace(true);
    let result = call();
    WITHIN.set(before);
    result
}

/// Puts a queue pair into the error state, because one of its work requests can't be posted.
pub(crate) fn break_queue_pair(qp: *mut ibv_qp) {
    // SAFETY: a live queue pair and plain data. Within a change, the function only calls the real
    // one. If the call fails, the queue pair is in error already or worse.
    within(|| unsafe {
        let mut attr = core::mem::zeroed::<ibv_qp_attr>();
        attr.qp_state = ibv_qp_state::IBV_QPS_ERR;
        ibv_modify_qp(qp, &mut attr, ibv_qp_attr_mask::IBV_QP_STATE as c_int);
    });
}
