//! Contexts that are left alone because whoever opened them asks the daemon himself.
//!
//! The NCCL plugin takes a permit for each message before it posts it. Under this library,
//! preloaded into the same process, each of its work requests would be scheduled a second time,
//! wait behind its own permit, and lose the class that the plugin chose for its queue pair. So it
//! says which contexts are its own.

use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

use laxity_ibverbs::ibv_context;

use crate::contexts;

/// Contexts that can be exempt at a time. More are scheduled as everything else.
const EXEMPT: usize = 64;

/// Null: free. Acquire and Release pair with each other; who exempts a context does so before its
/// first queue pair.
static TABLE: [AtomicPtr<ibv_context>; EXEMPT] =
    [const { AtomicPtr::new(ptr::null_mut()) }; EXEMPT];

/// Whether a context is to be left alone.
pub(crate) fn is_exempt(ibv: *mut ibv_context) -> bool {
    TABLE
        .iter()
        .any(|entry| entry.load(Ordering::Acquire) == ibv)
}

/// The context is closed: another may get its address.
pub(crate) fn forget(ibv: *mut ibv_context) {
    for entry in &TABLE {
        // Only one thread closes a context; a failed exchange means that the entry is another's.
        let _ = entry.compare_exchange(ibv, ptr::null_mut(), Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Makes this library pass everything of a context through, untouched and uncounted, from now until
/// it is closed.
///
/// For libraries that submit their flows to `laxityd` themselves and post to the device afterwards.
/// They find it with `dlsym(RTLD_DEFAULT, "laxity_verbs_exempt")`: if `liblaxity.so` is not in the
/// process, there is nothing to be exempt from. To be called right after the device was opened,
/// before there is a queue pair or another thread that uses the context.
///
/// # Safety
/// Null, or a context that is open and that no other thread uses yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn laxity_verbs_exempt(context: *mut ibv_context) {
    if context.is_null() || is_exempt(context) {
        return;
    }
    let entered = TABLE.iter().any(|entry| {
        entry
            .compare_exchange(
                ptr::null_mut(),
                context,
                Ordering::AcqRel,
                Ordering::Relaxed,
            )
            .is_ok()
    });
    if !entered {
        return;
    }
    // SAFETY: upheld by the caller.
    unsafe { contexts::unhook(context) };
    contexts::let_go(context);
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
        // SAFETY: plain data that may be zero; no part of a `verbs_context`, which would be marked.
        let mut context: Box<ibv_context> = Box::new(unsafe { mem::zeroed() });
        context.ops.post_send = Some(providers_post);
        let ibv: *mut ibv_context = &mut *context;
        let provider = providers_post as *const () as usize;
        // SAFETY: a context with operations, used by this thread only; so below.
        unsafe { contexts::hook(ibv) };
        assert_eq!(posts_by(&context), OURS as *const () as usize);
        assert!(contexts::find(ibv).is_some());

        // SAFETY: as above.
        unsafe { laxity_verbs_exempt(ibv) };
        assert_eq!(posts_by(&context), provider);
        assert!(
            contexts::find(ibv).is_none(),
            "what is left alone is not known"
        );
        // The hooks at the providers' boundary come by again whenever one sets its operations.
        // SAFETY: as above.
        unsafe {
            contexts::unhook(ibv);
            contexts::hook(ibv);
            laxity_verbs_exempt(ibv);
        }
        assert_eq!(posts_by(&context), provider);

        // Closed; the next context may have the same address.
        contexts::let_go(ibv);
        forget(ibv);
        // SAFETY: as above.
        unsafe { contexts::hook(ibv) };
        assert_eq!(posts_by(&context), OURS as *const () as usize);
        contexts::let_go(ibv);
    }
}
