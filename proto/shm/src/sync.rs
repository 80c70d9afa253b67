//! Atomics and fences, in the processor's version or in loom's model.
//!
//! The module also has the asymmetric barrier. The side that runs often (a submit, a permit)
//! executes [`light_fence`], which costs nothing. The side that is about to sleep executes
//! [`heavy_fence`], a system call that makes every running thread of the registered processes
//! execute a full barrier. Together they order "store, then load" on both sides as two sequentially
//! consistent fences would. Loom has no such pair, so there both are a `SeqCst` fence: the model is
//! as strong as the pair, not stronger.

#[cfg(not(loom))]
pub(crate) use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

/// The cheap half of the asymmetric barrier. It prevents only the compiler from moving accesses
/// across. The other side's [`heavy_fence`] prevents the processor from doing so.
#[inline(always)]
pub fn light_fence() {
    #[cfg(not(loom))]
    core::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}

/// The expensive half of the asymmetric barrier. Returns `false` if the kernel refuses
/// `membarrier`. Then only a real fence on the other side would give the order, so the caller has
/// to limit its sleep instead.
#[cfg(not(loom))]
pub fn heavy_fence() -> bool {
    fence(Ordering::SeqCst);
    crate::sleep::membarrier(libc::MEMBARRIER_CMD_GLOBAL_EXPEDITED)
}

/// The expensive half of the asymmetric barrier, as loom models it.
#[cfg(loom)]
pub fn heavy_fence() -> bool {
    fence(Ordering::SeqCst);
    true
}

/// Prefetches the cache line of `place`. Correctness does not depend on it.
#[inline(always)]
pub(crate) fn prefetch<T>(place: &T) {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    // SAFETY: a prefetch reads nothing and never faults; SSE is part of x86-64.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(core::ptr::from_ref(place).cast());
    }
    #[cfg(all(target_arch = "aarch64", not(loom)))]
    // SAFETY: a prefetch reads nothing and never faults.
    unsafe {
        core::arch::asm!(
            "prfm pldl1keep, [{0}]",
            in(reg) core::ptr::from_ref(place),
            options(nostack, preserves_flags, readonly)
        );
    }
    #[cfg(any(loom, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
    let _ = place;
}
