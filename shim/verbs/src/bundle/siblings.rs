//! The siblings of a queue pair: making, connecting, changing and destroying them.
//!
//! Each sibling has one receive that never gets a message. It completes when the sibling fails, in
//! a queue that the agent's thread looks at, so the end that only responds learns of the failure.
//!
//! # Safety
//! Unless a function says otherwise, the conditions of [`BundleSiblings::make`] hold.

use core::ffi::c_int;
use core::ptr;

use laxity_ibverbs::{
    ibv_access_flags as access, ibv_cq, ibv_mr, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask as mask,
    ibv_qp_init_attr, ibv_qp_state as state, ibv_qp_type, ibv_recv_wr,
};
use smallvec::SmallVec;

use super::candidate::BundleCandidate;
use super::message::{BundleOffer, OfferedSibling};
use super::{BundleMember, LandingPage, PeerPage, SIBLINGS_MAX, WORDS, verbs, word};
use crate::work::SendLimits;

const PAGE_BYTES: usize = 4096;
const _: () = assert!(2 * WORDS * size_of::<u64>() <= PAGE_BYTES);

/// Attributes of a change in RTS that siblings follow.
const FOLLOWED: u32 = mask::IBV_QP_STATE
    | mask::IBV_QP_CUR_STATE
    | mask::IBV_QP_ACCESS_FLAGS
    | mask::IBV_QP_MIN_RNR_TIMER;

/// Attributes of the change to RTS.
const TO_SEND: u32 = mask::IBV_QP_SQ_PSN
    | mask::IBV_QP_TIMEOUT
    | mask::IBV_QP_RETRY_CNT
    | mask::IBV_QP_RNR_RETRY
    | mask::IBV_QP_MAX_QP_RD_ATOMIC;

#[derive(Debug)]
struct OneSibling {
    ibv: *mut ibv_qp,
    offered: OfferedSibling,
    is_connected: bool,
    /// Whether it may post, and not only respond.
    may_post: bool,
}

/// The siblings of one queue pair, with the objects that they need.
#[derive(Debug)]
pub(crate) struct BundleSiblings {
    siblings: SmallVec<[OneSibling; SIBLINGS_MAX]>,
    alarm: *mut ibv_cq,
    mr: *mut ibv_mr,
    memory: *mut u64,
}

/// Maps a page that a forked child doesn't get, so that a write of this process never moves it away
/// from under the device.
fn map() -> Option<*mut u64> {
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping, which is given back if it can't be kept from children.
    unsafe {
        let memory = libc::mmap(ptr::null_mut(), PAGE_BYTES, protection, flags, -1, 0);
        if memory == libc::MAP_FAILED {
            return None;
        }
        if libc::madvise(memory, PAGE_BYTES, libc::MADV_DONTFORK) != 0 {
            libc::munmap(memory, PAGE_BYTES);
            return None;
        }
        let words: *mut u64 = memory.cast();
        for place in 0..WORDS {
            words.add(place).write(word(place));
        }
        Some(words)
    }
}

/// Returns a random number for the first packet of a sibling, of 24 bits.
fn first_packet() -> Option<u32> {
    let mut bytes = [0; 4];
    super::agent::random(&mut bytes).then(|| u32::from_ne_bytes(bytes) & 0x00ff_ffff)
}

impl BundleSiblings {
    /// Returns siblings of a model, which are not destroyed.
    #[cfg(test)]
    pub(crate) fn of_model(pairs: &[*mut ibv_qp]) -> Self {
        let sibling = |ibv: &*mut ibv_qp| OneSibling {
            ibv: *ibv,
            // SAFETY: the queue pairs of models are never freed.
            offered: OfferedSibling { number: unsafe { (**ibv).qp_num }, ..Default::default() },
            is_connected: true,
            may_post: true,
        };
        Self {
            siblings: pairs.iter().map(sibling).collect(),
            alarm: ptr::null_mut(),
            mr: ptr::null_mut(),
            memory: ptr::null_mut(),
        }
    }

    /// Makes siblings of `first` that aren't connected yet. Returns `None` if anything is refused.
    ///
    /// # Safety
    /// `first` is a live queue pair with this candidate and these limits, and stays alive.
    pub(crate) unsafe fn make(
        first: *mut ibv_qp,
        candidate: &BundleCandidate,
        limits: &SendLimits,
    ) -> Option<Self> {
        let memory = map()?;
        let mut made =
            Self { siblings: SmallVec::new(), alarm: ptr::null_mut(), mr: ptr::null_mut(), memory };
        // SAFETY: upheld by the caller. What was made is destroyed if a later call fails.
        unsafe {
            if made.fill(first, candidate, limits).is_none() {
                made.destroy();
                return None;
            }
        }
        Some(made)
    }

    unsafe fn fill(
        &mut self,
        first: *mut ibv_qp,
        candidate: &BundleCandidate,
        limits: &SendLimits,
    ) -> Option<()> {
        // SAFETY: upheld by the caller.
        unsafe {
            let (context, pd) = ((*first).context, (*first).pd);
            let rights = access::IBV_ACCESS_LOCAL_WRITE | access::IBV_ACCESS_REMOTE_READ;
            self.mr = verbs::reg_mr(pd, self.memory.cast(), PAGE_BYTES, rights as c_int);
            let entries = SIBLINGS_MAX as c_int;
            self.alarm = verbs::create_cq(context, entries, ptr::null_mut(), ptr::null_mut(), 0);
            if self.mr.is_null() || self.alarm.is_null() {
                return None;
            }
            for class in candidate.other_classes() {
                let ibv = self.make_one(first, limits)?;
                let number = (*ibv).qp_num;
                let one = OfferedSibling { class, number, first_packet: first_packet()? };
                self.siblings.push(OneSibling {
                    ibv,
                    offered: one,
                    is_connected: false,
                    may_post: false,
                });
                let mut attr = core::mem::zeroed::<ibv_qp_attr>();
                attr.qp_state = state::IBV_QPS_INIT;
                attr.pkey_index = candidate.attr().pkey_index;
                attr.port_num = candidate.attr().port_num;
                attr.qp_access_flags = candidate.attr().qp_access_flags;
                let given = mask::IBV_QP_STATE
                    | mask::IBV_QP_PKEY_INDEX
                    | mask::IBV_QP_PORT
                    | mask::IBV_QP_ACCESS_FLAGS;
                if verbs::modify_qp(ibv, &raw mut attr, given as c_int) != 0 || !arm(ibv) {
                    return None;
                }
            }
        }
        Some(())
    }

    /// Makes a queue pair that accepts what the first does. Between two signaled work requests in
    /// its send queue there is at most one barrier, so twice the depth is enough.
    unsafe fn make_one(&self, first: *mut ibv_qp, limits: &SendLimits) -> Option<*mut ibv_qp> {
        // SAFETY: upheld by the caller. Plain data, for which zeroes are a value.
        unsafe {
            let mut attr = core::mem::zeroed::<ibv_qp_init_attr>();
            attr.qp_context = (*first).qp_context;
            attr.send_cq = (*first).send_cq;
            attr.recv_cq = self.alarm;
            attr.qp_type = ibv_qp_type::IBV_QPT_RC;
            attr.cap.max_send_wr = 2 * limits.work_requests as u32 + 2;
            attr.cap.max_send_sge = limits.sges.max(1);
            attr.cap.max_inline_data = limits.inline_bytes;
            attr.cap.max_recv_wr = 1;
            attr.cap.max_recv_sge = 1;
            let made = verbs::create_qp((*first).pd, &raw mut attr);
            (!made.is_null()).then_some(made)
        }
    }

    pub(crate) fn offer(&self) -> BundleOffer {
        // SAFETY: `make` registered the page.
        let rkey = unsafe { (*self.mr).rkey };
        BundleOffer {
            page: PeerPage { address: self.memory as u64, rkey },
            siblings: self.siblings.iter().map(|sibling| sibling.offered).collect(),
        }
    }

    pub(crate) fn page(&self) -> LandingPage {
        // SAFETY: `make` registered the page.
        let lkey = unsafe { (*self.mr).lkey };
        LandingPage { memory: self.memory, lkey }
    }

    /// Connects siblings to those of the peer with the same class, and returns them with their
    /// classes. Returns `None` if one is refused, or no class is common.
    pub(crate) unsafe fn connect(
        &mut self,
        candidate: &BundleCandidate,
        peers: &BundleOffer,
    ) -> Option<SmallVec<[(u8, BundleMember); SIBLINGS_MAX]>> {
        let mut connected = SmallVec::new();
        for own in &mut self.siblings {
            let class = own.offered.class;
            let Some(peer) = peers.siblings.iter().find(|peer| peer.class == class) else {
                continue;
            };
            // SAFETY: upheld by the caller.
            if !unsafe { connect_one(own, peer, candidate) } {
                return None;
            }
            own.is_connected = true;
            own.may_post = candidate.may_post();
            connected.push((class, BundleMember { ibv: own.ibv, number: own.offered.number }));
        }
        (!connected.is_empty()).then_some(connected)
    }

    /// Applies a change of the first queue pair in RTS to connected siblings. Returns the error of
    /// one that refuses it.
    ///
    /// # Safety
    /// The siblings are alive. `attr` has the fields that `given` names.
    pub(crate) unsafe fn follow(&mut self, attr: &ibv_qp_attr, given: u32) -> Result<(), c_int> {
        for sibling in self.siblings.iter_mut().filter(|sibling| sibling.is_connected) {
            // The siblings may have been connected before the first queue pair becomes ready to
            // send.
            let becomes_ready = !sibling.may_post && given & mask::IBV_QP_STATE != 0;
            let followed = if becomes_ready { FOLLOWED | TO_SEND } else { FOLLOWED };
            // SAFETY: upheld by the caller. Plain data, of which a copy is used.
            let error = unsafe {
                let mut copy = ptr::read(attr);
                copy.sq_psn = sibling.offered.first_packet;
                verbs::modify_qp(sibling.ibv, &raw mut copy, (given & followed) as c_int)
            };
            if error != 0 {
                return Err(error);
            }
            sibling.may_post |= becomes_ready;
        }
        Ok(())
    }

    /// Reports whether all connected siblings may post.
    pub(crate) fn may_post(&self) -> bool {
        self.siblings.iter().all(|sibling| sibling.may_post || !sibling.is_connected)
    }

    /// Moves all siblings to RESET, after which they are not used again. One that refuses is moved
    /// to the error state.
    ///
    /// # Safety
    /// The siblings are alive.
    pub(crate) unsafe fn reset(&mut self) {
        for sibling in &mut self.siblings {
            sibling.is_connected = false;
            // SAFETY: upheld by the caller.
            unsafe {
                if !verbs::change_state(sibling.ibv, state::IBV_QPS_RESET) {
                    verbs::change_state(sibling.ibv, state::IBV_QPS_ERR);
                }
            }
        }
    }

    pub(crate) fn pointers(&self) -> SmallVec<[*mut ibv_qp; SIBLINGS_MAX]> {
        self.siblings.iter().map(|sibling| sibling.ibv).collect()
    }

    pub(crate) fn numbers(&self) -> SmallVec<[u32; SIBLINGS_MAX]> {
        self.siblings.iter().map(|sibling| sibling.offered.number).collect()
    }

    /// Returns the queue in which a failure of a sibling shows.
    pub(crate) const fn alarm(&self) -> *mut ibv_cq {
        self.alarm
    }

    /// Destroys the siblings, then the queue of alarms, and unmaps the page.
    ///
    /// # Safety
    /// The objects are alive, and nothing uses them any more.
    pub(crate) unsafe fn destroy(self) {
        // SAFETY: upheld by the caller. What can't be destroyed is left to the kernel.
        unsafe {
            for sibling in &self.siblings {
                verbs::destroy_qp(sibling.ibv);
            }
            if !self.alarm.is_null() {
                verbs::destroy_cq(self.alarm);
            }
            if self.mr.is_null() || verbs::dereg_mr(self.mr) == 0 {
                libc::munmap(self.memory.cast(), PAGE_BYTES);
            }
        }
    }
}

/// Posts the receive that completes when a sibling fails.
///
/// # Safety
/// `ibv` is a live queue pair that accepts receives.
unsafe fn arm(ibv: *mut ibv_qp) -> bool {
    // SAFETY: upheld by the caller. Plain data, for which zeroes are a value.
    unsafe {
        let mut wr = core::mem::zeroed::<ibv_recv_wr>();
        let mut bad = ptr::null_mut();
        let post = (*(*ibv).context).ops.post_recv;
        post.is_some_and(|post| post(ibv, &raw mut wr, &raw mut bad) == 0)
    }
}

/// Moves a sibling to RTR and RTS like the first queue pair, in the class of its own. An end that
/// only responds stays in RTR.
///
/// # Safety
/// The sibling is alive.
unsafe fn connect_one(
    own: &OneSibling,
    peer: &OfferedSibling,
    candidate: &BundleCandidate,
) -> bool {
    let first = candidate.attr();
    // SAFETY: upheld by the caller. Plain data, of which copies are changed.
    unsafe {
        let mut attr = ptr::read(first);
        attr.qp_state = state::IBV_QPS_RTR;
        attr.dest_qp_num = peer.number;
        attr.rq_psn = peer.first_packet;
        attr.ah_attr.grh.traffic_class = own.offered.class;
        let given = mask::IBV_QP_STATE
            | mask::IBV_QP_AV
            | mask::IBV_QP_PATH_MTU
            | mask::IBV_QP_DEST_QPN
            | mask::IBV_QP_RQ_PSN
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | mask::IBV_QP_MIN_RNR_TIMER
            | mask::IBV_QP_ACCESS_FLAGS;
        if verbs::modify_qp(own.ibv, &raw mut attr, given as c_int) != 0 {
            return false;
        }
        if !candidate.may_post() {
            return true;
        }
        let mut attr = ptr::read(first);
        attr.qp_state = state::IBV_QPS_RTS;
        attr.sq_psn = own.offered.first_packet;
        let given = mask::IBV_QP_STATE | TO_SEND;
        verbs::modify_qp(own.ibv, &raw mut attr, given as c_int) == 0
    }
}
