//! A program's queue pair that may get a bundle, and what its siblings have to copy from it.

use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use laxity_client::Stage;
use laxity_ibverbs::{
    ibv_access_flags, ibv_cq, ibv_pd, ibv_qp_attr, ibv_qp_attr_mask as mask, ibv_qp_cap,
    ibv_qp_type,
};
use laxity_job::fork::PerProcess;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::SIBLINGS_MAX;
use super::siblings::BundleSiblings;

/// Largest send queue of a queue pair with a bundle. Each sibling has twice as many entries, which
/// are pinned memory.
pub(crate) const DEPTH_MAX: u32 = 512;

/// Attributes that the program set by changes to RTR, without which there is no bundle.
const NEEDED: u32 = mask::IBV_QP_ACCESS_FLAGS
    | mask::IBV_QP_PKEY_INDEX
    | mask::IBV_QP_PORT
    | mask::IBV_QP_AV
    | mask::IBV_QP_PATH_MTU
    | mask::IBV_QP_DEST_QPN
    | mask::IBV_QP_MAX_DEST_RD_ATOMIC
    | mask::IBV_QP_MIN_RNR_TIMER;

/// Attributes that an end needs that posts, by the change to RTS.
const NEEDED_TO_POST: u32 = mask::IBV_QP_TIMEOUT
    | mask::IBV_QP_RETRY_CNT
    | mask::IBV_QP_RNR_RETRY
    | mask::IBV_QP_MAX_QP_RD_ATOMIC;

/// All attributes that siblings copy, or that say nothing about them. With any other, such as an
/// alternative path or a limit of the rate, there is no bundle.
const UNDERSTOOD: u32 = NEEDED
    | NEEDED_TO_POST
    | mask::IBV_QP_STATE
    | mask::IBV_QP_CUR_STATE
    | mask::IBV_QP_RQ_PSN
    | mask::IBV_QP_SQ_PSN;

/// Stages whose class gets a sibling. Others keep the class of the first queue pair.
const STAGES: [Stage; 3] = [Stage::KvReuse, Stage::Collective, Stage::P2d];

/// A queue pair that may get a bundle.
pub(crate) struct BundleCandidate {
    /// Changes when the queue pair is reset, so that an agreement from before is dropped.
    pub(crate) life: u32,
    attr: ibv_qp_attr,
    known: u32,
    /// The traffic class of each stage, and that of the first queue pair.
    pub(crate) classes: Option<([u8; Stage::ALL.len()], u8)>,
    /// Siblings, also those of an agreement that failed. They are destroyed only with the first
    /// queue pair, because the program may not have acknowledged their events earlier.
    pub(crate) siblings: Option<BundleSiblings>,
    /// Whether no bundle is made any more.
    pub(crate) is_over: bool,
}

impl core::fmt::Debug for BundleCandidate {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("BundleCandidate").field("life", &self.life).finish_non_exhaustive()
    }
}

// SAFETY: the attributes are plain data, and verbs may be called from any thread.
unsafe impl Send for BundleCandidate {}

/// Returns a number that no candidate of this process had, since queue pairs are used again.
fn next_life() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl BundleCandidate {
    pub(crate) fn new() -> Self {
        Self {
            life: next_life(),
            // SAFETY: plain data, for which zeroes are a value.
            attr: unsafe { core::mem::zeroed() },
            known: 0,
            classes: None,
            siblings: None,
            is_over: false,
        }
    }

    /// Records the attributes of a successful change.
    pub(crate) fn learn(&mut self, attr: &ibv_qp_attr, given: u32) {
        self.known |= given;
        self.is_over |= given & !UNDERSTOOD != 0;
        let own = &mut self.attr;
        macro_rules! copy {
            ($($bit:ident: $field:ident),*) => {
                $(if given & mask::$bit != 0 { own.$field = attr.$field; })*
            };
        }
        copy!(
            IBV_QP_ACCESS_FLAGS: qp_access_flags, IBV_QP_PKEY_INDEX: pkey_index,
            IBV_QP_PORT: port_num, IBV_QP_PATH_MTU: path_mtu, IBV_QP_DEST_QPN: dest_qp_num,
            IBV_QP_MAX_DEST_RD_ATOMIC: max_dest_rd_atomic, IBV_QP_MIN_RNR_TIMER: min_rnr_timer,
            IBV_QP_TIMEOUT: timeout, IBV_QP_RETRY_CNT: retry_cnt, IBV_QP_RNR_RETRY: rnr_retry,
            IBV_QP_MAX_QP_RD_ATOMIC: max_rd_atomic
        );
        if given & mask::IBV_QP_AV != 0 {
            // SAFETY: plain data, of which a copy is made.
            own.ah_attr = unsafe { core::ptr::read(&raw const attr.ah_attr) };
        }
    }

    /// Begins another life after a reset. Siblings of the former one are not used again.
    pub(crate) fn reset(&mut self) {
        self.life = next_life();
        self.known = 0;
        self.is_over = self.siblings.is_some();
    }

    /// Returns the program's attributes.
    pub(crate) const fn attr(&self) -> &ibv_qp_attr {
        &self.attr
    }

    /// Reports whether this end may post READs, and not only respond.
    pub(crate) const fn may_post(&self) -> bool {
        self.known & NEEDED_TO_POST == NEEDED_TO_POST && self.attr.max_rd_atomic > 0
    }

    /// Reports whether the peer may post READs, as its barriers do.
    pub(crate) const fn permits_reads(&self) -> bool {
        self.attr.qp_access_flags & ibv_access_flags::IBV_ACCESS_REMOTE_READ != 0
            && self.attr.max_dest_rd_atomic > 0
    }

    /// Reports whether siblings can be made: all attributes are known, the peer may post READs, and
    /// the stages have different classes.
    pub(crate) fn is_ready(&self) -> bool {
        let attr = &self.attr;
        !self.is_over
            && self.siblings.is_none()
            && self.known & NEEDED == NEEDED
            && attr.ah_attr.is_global != 0
            && self.permits_reads()
            && !self.other_classes().is_empty()
    }

    /// Returns the classes that need a sibling.
    pub(crate) fn other_classes(&self) -> SmallVec<[u8; SIBLINGS_MAX]> {
        let mut others = SmallVec::new();
        if let Some((classes, own)) = &self.classes {
            for class in STAGES.map(|stage| classes[stage.index()]) {
                if class != *own && !others.contains(&class) {
                    others.push(class);
                }
            }
        }
        others
    }

    /// Returns the member of each stage. Siblings are members from 1 on, in the order of
    /// `siblings`, which has their classes.
    pub(crate) fn members(&self, siblings: &[u8]) -> [u8; Stage::ALL.len()] {
        let mut members = [0; Stage::ALL.len()];
        if let Some((classes, own)) = &self.classes {
            for stage in STAGES {
                let class = classes[stage.index()];
                let sibling = siblings.iter().position(|of| class != *own && *of == class);
                members[stage.index()] = sibling.map_or(0, |at| at as u8 + 1);
            }
        }
        members
    }
}

/// What decides whether a queue pair may get a bundle, by address. A later object at an address
/// replaces the entry.
#[derive(Debug, Default)]
struct PlainObjects {
    /// Domains that the kernel made for the program itself.
    domains: Vec<usize>,
    /// Queues whose completions the program takes by the extended interface.
    extended_queues: Vec<usize>,
    /// Queues in which siblings complete, as often as queue pairs with siblings use them.
    bundled_queues: Vec<usize>,
    /// Queues of `ibv_create_cq_ex` that no interface has polled yet.
    unpolled_queues: Vec<usize>,
    /// Domains with a candidate, which get no memory window of type 2.
    used_domains: Vec<usize>,
}

impl PlainObjects {
    fn forget_unpolled(&mut self, cq: *mut ibv_cq) {
        if let Some(at) = self.unpolled_queues.iter().position(|known| *known == cq as usize) {
            self.unpolled_queues.swap_remove(at);
            UNPOLLED.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

static OBJECTS: PerProcess<Mutex<PlainObjects>> = PerProcess::none();

fn objects() -> parking_lot::MutexGuard<'static, PlainObjects> {
    OBJECTS.get_or_make(Mutex::default).lock()
}

/// Records a protection domain that the kernel made. Domains of threads are made without it.
pub(crate) fn note_domain(pd: *mut ibv_pd) {
    if !super::is_on() {
        return;
    }
    let mut objects = objects();
    objects.used_domains.retain(|known| *known != pd as usize);
    if !objects.domains.contains(&(pd as usize)) {
        objects.domains.push(pd as usize);
    }
}

/// Forgets a protection domain that the kernel freed, before another object gets its address.
pub(crate) fn forget_domain(pd: *mut ibv_pd) {
    if !super::is_on() {
        return;
    }
    let mut objects = objects();
    objects.domains.retain(|known| *known != pd as usize);
    objects.used_domains.retain(|known| *known != pd as usize);
}

/// Number of queues that were made by `ibv_create_cq_ex` and not polled yet.
static UNPOLLED: AtomicUsize = AtomicUsize::new(0);

/// Records a new queue that may be polled by either interface.
pub(crate) fn note_new_queue(cq: *mut ibv_cq) {
    if !super::is_on() {
        return;
    }
    let mut objects = objects();
    let PlainObjects { extended_queues, bundled_queues, unpolled_queues, .. } = &mut *objects;
    for known in [extended_queues, bundled_queues] {
        known.retain(|known| *known != cq as usize);
    }
    if !unpolled_queues.contains(&(cq as usize)) {
        unpolled_queues.push(cq as usize);
        UNPOLLED.fetch_add(1, Ordering::Relaxed);
    }
}

/// Records that `ibv_poll_cq` polls a queue.
#[inline]
pub(crate) fn note_polled(cq: *mut ibv_cq) {
    // A queue that is missed here is found by its next poll.
    if UNPOLLED.load(Ordering::Relaxed) != 0 {
        objects().forget_unpolled(cq);
    }
}

/// Records that a queue is polled by the extended interface. Its completions have fields that only
/// a provider can read, so the queue gets no siblings. Returns false if it has some, and the
/// program must go on with `ibv_poll_cq`.
pub(crate) fn note_extended(cq: *mut ibv_cq) -> bool {
    if !super::is_on() {
        return true;
    }
    let mut objects = objects();
    objects.forget_unpolled(cq);
    if objects.bundled_queues.contains(&(cq as usize)) {
        return false;
    }
    if !objects.extended_queues.contains(&(cq as usize)) {
        objects.extended_queues.push(cq as usize);
    }
    true
}

/// Records that siblings of one queue pair will complete in these queues. Returns `Some(false)` if
/// they can't, because the extended interface polls one of them, and `None` if it is not known yet
/// which interface does.
pub(crate) fn claim_queues(queues: [*mut ibv_cq; 2]) -> Option<bool> {
    let mut objects = objects();
    let addresses = queues.map(|cq| cq as usize);
    if addresses.iter().any(|cq| objects.unpolled_queues.contains(cq)) {
        return None;
    }
    if addresses.iter().any(|cq| objects.extended_queues.contains(cq)) {
        return Some(false);
    }
    objects.bundled_queues.extend(addresses);
    Some(true)
}

/// Takes a claim back.
pub(crate) fn release_queues(queues: [*mut ibv_cq; 2]) {
    let mut objects = objects();
    for cq in queues.map(|cq| cq as usize) {
        let at = objects.bundled_queues.iter().position(|known| *known == cq);
        at.map(|at| objects.bundled_queues.swap_remove(at));
    }
}

/// Records a memory window of type 2. It works with one queue pair only, so the domain gets no
/// bundles. Returns false if it has some already, and the window must not be made.
pub(crate) fn note_window(pd: *mut ibv_pd) -> bool {
    let mut objects = objects();
    if objects.used_domains.contains(&(pd as usize)) {
        return false;
    }
    objects.domains.retain(|known| *known != pd as usize);
    true
}

/// Reports whether a queue pair with these attributes may get a bundle, and keeps windows of type 2
/// out of its domain if so.
pub(crate) fn admit(
    pd: *mut ibv_pd,
    queues: [*mut ibv_cq; 2],
    kind: ibv_qp_type::Type,
    signals_all: bool,
    cap: &ibv_qp_cap,
) -> bool {
    let is_single = std::env::var_os("MLX5_SINGLE_THREADED").is_some_and(|value| value != "0");
    if kind != ibv_qp_type::IBV_QPT_RC
        || signals_all
        || !(1..=DEPTH_MAX).contains(&cap.max_send_wr)
        || cap.max_send_sge == 0
        || is_single
    {
        return false;
    }
    let mut objects = objects();
    let is_extended = |cq: *mut ibv_cq| objects.extended_queues.contains(&(cq as usize));
    if !objects.domains.contains(&(pd as usize)) || queues.into_iter().any(is_extended) {
        return false;
    }
    if !objects.used_domains.contains(&(pd as usize)) {
        objects.used_domains.push(pd as usize);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bundle::IS_ON_IN_TEST;

    #[test]
    fn objects_are_recorded_only_in_a_job_with_bundles() {
        let (pd, cq) = (0x1230 as *mut ibv_pd, 0x4560 as *mut ibv_cq);
        let known = || {
            let objects = OBJECTS.get()?.lock();
            let has_domain = objects.domains.contains(&(pd as usize));
            Some((has_domain, objects.extended_queues.contains(&(cq as usize))))
        };
        note_domain(pd);
        note_extended(cq);
        assert_eq!(known().unwrap_or_default(), (false, false));
        IS_ON_IN_TEST.set(true);
        note_domain(pd);
        note_extended(cq);
        assert_eq!(known(), Some((true, true)));
        forget_domain(pd);
        assert_eq!(known(), Some((false, true)), "a thread's domain may get the address");
        let other = 0x7890 as *mut ibv_cq;
        assert_eq!(claim_queues([other, cq]), Some(false), "the extended interface polls one");
        note_new_queue(cq);
        assert_eq!(claim_queues([other, cq]), None, "it may poll one of them");
        note_polled(cq);
        assert_eq!(claim_queues([other, cq]), Some(true));
        assert_eq!(claim_queues([cq, cq]), Some(true));
        assert!(!note_extended(cq), "siblings complete there");
        release_queues([cq, cq]);
        assert!(!note_extended(cq), "those of another queue pair do");
        release_queues([other, cq]);
        assert!(note_extended(cq), "none is left");
        note_new_queue(cq);
        note_polled(cq);
        assert_eq!(claim_queues([other, cq]), Some(true), "another queue has the address");
    }

    #[test]
    fn an_attribute_that_siblings_do_not_have_leaves_the_queue_pair_as_it_is() {
        // SAFETY: plain data, for which zeroes are a value.
        let attr = unsafe { core::mem::zeroed() };
        let is_over = |given: u32| {
            let mut candidate = BundleCandidate::new();
            candidate.learn(&attr, NEEDED | given);
            candidate.is_over
        };
        assert!(!is_over(mask::IBV_QP_STATE | NEEDED_TO_POST | mask::IBV_QP_SQ_PSN));
        // ALT_PATH, PATH_MIG_STATE, CAP and RATE_LIMIT.
        for given in [1 << 14, 1 << 18, 1 << 19, 1 << 25] {
            assert!(is_over(given), "{given:#x}");
        }
    }
}
