//! Work requests: their properties, and copies that outlive the call that posted them.

use core::ptr;
use core::slice;

use laxity_ibverbs::{ibv_qp_cap, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode};
use smallvec::SmallVec;

const SIGNALED: u32 = ibv_send_flags::IBV_SEND_SIGNALED;
const INLINE: u32 = ibv_send_flags::IBV_SEND_INLINE;

pub(crate) fn is_signaled(wr: &ibv_send_wr) -> bool {
    wr.send_flags & SIGNALED != 0
}

fn is_inline(wr: &ibv_send_wr) -> bool {
    wr.send_flags & INLINE != 0
}

/// Returns the pieces of memory of a work request.
///
/// # Safety
/// `wr` is as a caller of `ibv_post_send` makes it.
pub(crate) unsafe fn sges(wr: &ibv_send_wr) -> &[ibv_sge] {
    match usize::try_from(wr.num_sge) {
        Ok(count) if count > 0 && !wr.sg_list.is_null() => {
            // SAFETY: upheld by the caller.
            unsafe { slice::from_raw_parts(wr.sg_list, count) }
        }
        _ => &[],
    }
}

/// Returns the total bytes of the pieces. A piece of length 0 counts as 0, not as 2^31.
pub(crate) fn length(sges: &[ibv_sge]) -> u64 {
    sges.iter().map(|sge| u64::from(sge.length)).sum()
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SendLimits {
    pub(crate) work_requests: usize,
    pub(crate) sges: u32,
    pub(crate) inline_bytes: u32,
}

impl SendLimits {
    pub(crate) fn of(cap: &ibv_qp_cap) -> Self {
        let (sges, inline_bytes) = (cap.max_send_sge, cap.max_inline_data);
        Self { work_requests: cap.max_send_wr as usize, sges, inline_bytes }
    }
}

/// Reports whether the provider accepts a work request. If not, the program gets an error at once.
///
/// # Safety
/// The conditions of [`sges`] hold.
pub(crate) unsafe fn is_valid(wr: &ibv_send_wr, limits: Option<&SendLimits>) -> bool {
    let Some(limits) = limits else { return true };
    if wr.num_sge < 0 || wr.num_sge as u32 > limits.sges || wr.opcode > LAST_OPCODE {
        return false;
    }
    // SAFETY: upheld by the caller.
    !is_inline(wr) || length(unsafe { sges(wr) }) <= u64::from(limits.inline_bytes)
}

const LAST_OPCODE: ibv_wr_opcode::Type = ibv_wr_opcode::IBV_WR_ATOMIC_WRITE;

/// A copy of a work request with all data that it points to.
pub(crate) struct DeferredRequest {
    wr: ibv_send_wr,
    sges: Sges,
    /// Payload of an inline work request. The program may overwrite its own after the post.
    inline: Inline,
}

/// The pieces of memory. Most work requests have one.
type Sges = SmallVec<[ibv_sge; 1]>;
/// Inline payload. It is usually a flag or a header.
pub(crate) type Inline = SmallVec<[u8; 32]>;

// SAFETY: `request` sets the pointers before each use. Others lead into its own vectors, or are
// handles of libibverbs that the program may use from any thread.
unsafe impl Send for DeferredRequest {}

impl DeferredRequest {
    /// Copies a work request.
    ///
    /// # Safety
    /// `wr` is as a caller of `ibv_post_send` makes it.
    pub(crate) unsafe fn copy(wr: &ibv_send_wr) -> Self {
        // SAFETY: plain data. The pointers in it are replaced before they are used.
        let mut own = unsafe { ptr::read(wr) };
        own.next = ptr::null_mut();
        // SAFETY: upheld by the caller.
        let sges = unsafe { sges(wr) };
        if is_inline(wr) {
            let mut inline = Inline::with_capacity(length(sges) as usize);
            for sge in sges {
                // SAFETY: an inline piece is readable memory of the program.
                inline.extend_from_slice(unsafe {
                    bytes(sge.addr as *const u8, sge.length as usize)
                });
            }
            Self::inline(own, inline)
        } else {
            Self { wr: own, sges: sges.into(), inline: Inline::new() }
        }
    }

    /// Returns a work request that is being built and has no memory yet.
    pub(crate) fn new(wr: ibv_send_wr) -> Self {
        Self { wr, sges: Sges::new(), inline: Inline::new() }
    }

    fn inline(wr: ibv_send_wr, inline: Inline) -> Self {
        let mut work = Self::new(wr);
        work.set_inline(inline);
        work
    }

    pub(crate) fn set_inline(&mut self, inline: Inline) {
        self.wr.send_flags |= INLINE;
        self.set_sges(&[ibv_sge { addr: 0, length: inline.len() as u32, lkey: 0 }]);
        self.inline = inline;
    }

    pub(crate) fn set_sges(&mut self, sges: &[ibv_sge]) {
        self.sges.clear();
        self.sges.extend_from_slice(sges);
    }

    /// Removes the memory and signals the work request. On a queue pair in error, it then completes
    /// with an error in its turn.
    pub(crate) fn clear_payload(&mut self) {
        self.sges.clear();
        self.inline.clear();
        self.wr.send_flags = SIGNALED;
        self.wr.opcode = ibv_wr_opcode::IBV_WR_SEND;
    }

    /// Returns the work request for a post by itself. Its pointers are valid until `self` changes.
    pub(crate) fn request(&mut self) -> &mut ibv_send_wr {
        if let [sge] = self.sges.as_mut_slice()
            && is_inline(&self.wr)
        {
            sge.addr = self.inline.as_ptr() as u64;
        }
        self.wr.next = ptr::null_mut();
        self.wr.sg_list = self.sges.as_mut_ptr();
        self.wr.num_sge = self.sges.len() as i32;
        &mut self.wr
    }
}

/// Returns the bytes at an address, or none if `length` is 0.
///
/// # Safety
/// `length` bytes at `address` are readable, unless `length` is 0.
pub(crate) unsafe fn bytes<'a>(address: *const u8, length: usize) -> &'a [u8] {
    if length == 0 {
        return &[];
    }
    // SAFETY: upheld by the caller.
    unsafe { slice::from_raw_parts(address, length) }
}

impl core::fmt::Debug for DeferredRequest {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Work")
            .field("wr_id", &self.wr.wr_id)
            .field("opcode", &self.wr.opcode)
            .field("sges", &self.sges.len())
            .field("inline", &self.inline.len())
            .finish_non_exhaustive()
    }
}
