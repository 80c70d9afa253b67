//! Contexts that this library doesn't schedule, because their owner gets permits itself.
//!
//! The NCCL plugin takes a permit for each message before it posts the message. If this library is
//! preloaded in the same process, it would schedule each of the plugin's work requests again. The
//! work request would wait behind its own permit and lose the class that the plugin chose. The
//! plugin therefore exempts its contexts.

use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

use laxity_ibverbs::ibv_context;

use crate::contexts;

/// Largest number of exempt contexts at a time. Further ones are scheduled.
const EXEMPT: usize = 64;

/// The exempt contexts. Null entries are free. Acquire pairs with Release. A context is exempted
/// before its first queue pair.
static TABLE: [AtomicPtr<ibv_context>; EXEMPT] =
    [const { AtomicPtr::new(ptr::null_mut()) }; EXEMPT];

pub(crate) fn is_exempt(ibv: *mut ibv_context) -> bool {
    TABLE.iter().any(|entry| entry.load(Ordering::Acquire) == ibv)
}

/// Ends the exemption of a closed context, since another one may get its address.
pub(crate) fn forget(ibv: *mut ibv_context) {
    for entry in &TABLE {
        // Only one thread closes a context, so a failed exchange means that the entry is another's.
        let _ = entry.compare_exchange(ibv, ptr::null_mut(), Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Makes this library pass everything of a context through, unscheduled and uncounted, until its
/// end.
///
/// The function is for libraries that submit their flows to `laxityd` themselves and then post to
/// the device. They find it with `dlsym(RTLD_DEFAULT, "laxity_verbs_exempt")`. If `liblaxity.so` is
/// not in the process, no exemption is needed. Call it right after the device is opened, before the
/// context has a queue pair or another thread uses it.
///
/// # Safety
/// `context` is null, or an open context that no other thread uses yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn laxity_verbs_exempt(context: *mut ibv_context) {
    if context.is_null() || is_exempt(context) {
        return;
    }
    let entered = TABLE.iter().any(|entry| {
        entry
            .compare_exchange(ptr::null_mut(), context, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    });
    if !entered {
        return;
    }
    // SAFETY: upheld by the caller.
    unsafe { contexts::unhook(context) };
    contexts::forget_context(context);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::post;
    use core::ffi::c_int;
    use core::mem;
    use laxity_ibverbs::{ibv_qp, ibv_send_wr};

    unsafe extern "C" fn providers_post(
        _: *mut ibv_qp,
        _: *mut ibv_send_wr,
        _: *mut *mut ibv_send_wr,
    ) -> c_int {
        0
    }

    fn posts_by(context: &ibv_context) -> usize {
        context.ops.post_send.map_or(0, |f| f as usize)
    }

    const OURS: unsafe extern "C" fn(
        *mut ibv_qp,
        *mut ibv_send_wr,
        *mut *mut ibv_send_wr,
    ) -> c_int = post::post_send;

    #[test]
    fn an_exempt_context_has_its_providers_operations_until_it_is_closed() {
        // SAFETY: plain data that may be zero. A zeroed one isn't in a `verbs_context`.
        let mut context: Box<ibv_context> = Box::new(unsafe { mem::zeroed() });
        context.ops.post_send = Some(providers_post);
        let ibv: *mut ibv_context = &mut *context;
        let provider = providers_post as *const () as usize;
        // SAFETY: a context with operations that only this thread uses.
        unsafe { contexts::hook(ibv) };
        assert_eq!(posts_by(&context), OURS as *const () as usize);
        assert!(contexts::find(ibv).is_some());

        // SAFETY: a context with operations that only this thread uses.
        unsafe { laxity_verbs_exempt(ibv) };
        assert_eq!(posts_by(&context), provider);
        assert!(contexts::find(ibv).is_none(), "what is left alone is not known");
        // `verbs_set_ops` repeats these calls whenever a provider sets its operations.
        // SAFETY: a context with operations that only this thread uses.
        unsafe {
            contexts::unhook(ibv);
            contexts::hook(ibv);
            laxity_verbs_exempt(ibv);
        }
        assert_eq!(posts_by(&context), provider);

        // The context is closed. The next one may have the same address.
        contexts::forget_context(ibv);
        forget(ibv);
        // SAFETY: a context with operations that only this thread uses.
        unsafe { contexts::hook(ibv) };
        assert_eq!(posts_by(&context), OURS as *const () as usize);
        contexts::forget_context(ibv);
    }
}
