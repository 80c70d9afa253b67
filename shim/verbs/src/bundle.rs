//! Bundles: further queue pairs (*siblings*) beside a program's RC queue pair (the *first*), one
//! for each other traffic class, so that transfers of several stages to one peer have their own
//! classes (docs/notes/queue-pair-bundles.md). Off unless the job has a secret (`LAXITY_BUNDLES`).
//!
//! ```text
//! both ends at RTS ─▶ agent.rs: a thread agrees with the peer's library (handshake.rs, message.rs)
//!                      └▶ siblings.rs: makes and connects siblings. They share the send CQ
//! ibv_post_send    ─▶ queue_pair/bundled.rs: all wait in one queue, and leave it in order
//!                      └▶ the queue pair of their class, after a barrier if it is another one
//! ibv_poll_cq      ─▶ poll.rs: completions of siblings get the number of the first
//! ```
//!
//! # Order
//! One queue pair of a bundle is the *current* one, and work requests go to it until one has to go
//! to another. A *barrier* comes first: an unsignaled READ of 8 bytes of the peer's library, over
//! the current queue pair. When its data have arrived, the peer's NIC has executed all earlier work
//! requests of that queue pair, in their order. So fences, atomics and the order of stages hold
//! across the change as far as the NIC's own order does. The barrier doesn't prove that data of a
//! WRITE are placed in other memory than the word that it reads, such as that of a GPU. Whether its
//! data have arrived is seen in memory, so a change never waits for the program to poll.
//!
//! # Which work requests leave the first queue pair
//! Signaled READs and WRITEs. SENDs and WRITEs with an immediate need the receive queue of the
//! first, and atomics its order at the responder. The place of an unsignaled one in the send queue
//! is freed by a later completion of the *same* queue pair. For that reason the first queue pair
//! isn't left either while its last work request is unsignaled.
//!
//! # Completions
//! Siblings complete in the program's own completion queue, so its size, its events and each status
//! are as without a bundle. The number of the queue pair is replaced on the way.
//!
//! # Failure
//! When one queue pair of a bundle fails, all of it goes to the error state, at both ends: see
//! `queue_pair/bundled.rs` and [`siblings`].

pub(crate) mod agent;
pub(crate) mod candidate;
pub(crate) mod events;
pub(crate) mod handshake;
pub(crate) mod message;
pub(crate) mod probe;
pub(crate) mod siblings;
pub(crate) mod verbs;

#[cfg(test)]
use core::cell::Cell;
use core::ptr;
use core::sync::atomic::{AtomicUsize, Ordering};
use std::collections::VecDeque;

use laxity_client::Stage;
use laxity_ibverbs::{ibv_qp, ibv_send_wr, ibv_sge, ibv_wc, ibv_wr_opcode, rdma_t};
use laxity_job::Job;
use laxity_job::fork::PerProcess;
use smallvec::SmallVec;

/// Largest number of siblings of a queue pair.
pub(crate) const SIBLINGS_MAX: usize = 3;
/// Words of a [`LandingPage`] on each side: those that the peer reads, and those where READs land.
pub(crate) const WORDS: usize = 32;
/// The id of the first place's barrier. Those of the other places follow. Programs use addresses
/// and small numbers.
pub(crate) const BARRIER_ID: u64 = 0x6c61_7869_7479_6272;

/// Returns the place of the barrier with this id.
pub(crate) const fn barrier_place(wr_id: u64) -> Option<usize> {
    let place = wr_id.wrapping_sub(BARRIER_ID);
    if place < WORDS as u64 { Some(place as usize) } else { None }
}

/// Number of completions that bundles hold back. Relaxed, because it is a hint that saves a search.
static HELD: PerProcess<AtomicUsize> = PerProcess::none();

/// Reports whether bundles hold completions back.
pub(crate) fn has_held() -> bool {
    HELD.get().is_some_and(|held| held.load(Ordering::Relaxed) > 0)
}

/// Reports whether this job bundles queue pairs.
#[inline]
pub(crate) fn is_on() -> bool {
    #[cfg(test)]
    if IS_ON_IN_TEST.get() {
        return true;
    }
    Job::of_this_process().bundle_secret.is_some()
}

#[cfg(test)]
thread_local! {
    /// Whether this thread's calls are those of a job with bundles.
    pub(crate) static IS_ON_IN_TEST: Cell<bool> = const { Cell::new(false) };
}

/// Returns the value of a word that the peer reads. Each place has its own, so that a word of an
/// earlier barrier is never taken for a later one's.
pub(crate) const fn word(place: usize) -> u64 {
    0x4c58_4259_0000_0001 + place as u64
}

/// Memory of a bundle: [`WORDS`] constant words that the peer reads, then as many words where this
/// side's barriers land. It stays mapped as long as the bundle lives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LandingPage {
    pub(crate) memory: *mut u64,
    pub(crate) lkey: u32,
}

/// The words of the peer's page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PeerPage {
    pub(crate) address: u64,
    pub(crate) rkey: u32,
}

/// A queue pair of a bundle.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BundleMember {
    pub(crate) ibv: *mut ibv_qp,
    pub(crate) number: u32,
}

/// A completion that is held back, and the member that it came from.
#[derive(Clone, Copy)]
pub(crate) struct HeldCompletion(pub(crate) u8, pub(crate) ibv_wc);

impl core::fmt::Debug for HeldCompletion {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_tuple("HeldCompletion").field(&self.0).field(&self.1.wr_id).finish()
    }
}

/// What a bundle does with the first waiting work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BundleRoute {
    /// It goes to the current queue pair.
    Post,
    /// It waits for the outstanding barrier.
    Wait,
    /// A barrier has to be posted to the current queue pair first.
    Barrier,
}

/// The queue pairs of a bundle, and the one that is current.
#[derive(Debug)]
pub(crate) struct QueuePairBundle {
    /// The program's own queue pair is the first.
    pub(crate) members: SmallVec<[BundleMember; SIBLINGS_MAX + 1]>,
    /// The member that carries each stage.
    stages: [u8; Stage::ALL.len()],
    current: usize,
    /// Whether the current queue pair got work requests after its last barrier.
    is_dirty: bool,
    /// The place of the outstanding barrier's word.
    barrier: Option<usize>,
    next_place: usize,
    page: LandingPage,
    peer: PeerPage,
    /// Whether this end may post, and not only respond.
    pub(crate) may_post: bool,
    /// Whether the peer said that its siblings are ready.
    pub(crate) is_peer_ready: bool,
    /// Whether all of the bundle is in the error state, or on the way there.
    pub(crate) is_broken: bool,
    /// Completions that came before earlier ones of another queue pair.
    pub(crate) held: VecDeque<HeldCompletion>,
}

// SAFETY: verbs on the queue pairs may be called from any thread, and the page is only accessed
// with the lock of the queue pair that owns the bundle.
unsafe impl Send for QueuePairBundle {}

impl QueuePairBundle {
    /// Makes a bundle of a program's queue pair and its connected siblings.
    pub(crate) fn new(
        members: SmallVec<[BundleMember; SIBLINGS_MAX + 1]>,
        stages: [u8; Stage::ALL.len()],
        page: LandingPage,
        peer: PeerPage,
    ) -> Self {
        Self {
            members,
            stages,
            current: 0,
            is_dirty: true,
            barrier: None,
            next_place: 0,
            page,
            peer,
            may_post: false,
            is_peer_ready: false,
            is_broken: false,
            held: VecDeque::new(),
        }
    }

    /// Returns the queue pair that gets work requests now.
    pub(crate) fn current(&self) -> (u8, *mut ibv_qp) {
        (self.current as u8, self.members[self.current].ibv)
    }

    /// Returns the index of the queue pair with this number.
    pub(crate) fn member(&self, number: u32) -> Option<u8> {
        let at = self.members.iter().position(|member| member.number == number)?;
        Some(at as u8)
    }

    pub(crate) fn sibling_numbers(&self) -> SmallVec<[u32; SIBLINGS_MAX]> {
        self.members[1..].iter().map(|member| member.number).collect()
    }

    /// Reports whether the outstanding barrier is the one of this member and place.
    pub(crate) fn is_outstanding(&self, member: u8, place: usize) -> bool {
        self.barrier == Some(place) && self.current == usize::from(member)
    }

    pub(crate) fn hold(&mut self, member: u8, wc: ibv_wc) {
        self.held.push_back(HeldCompletion(member, wc));
        HELD.get_or_make(AtomicUsize::default).fetch_add(1, Ordering::Relaxed);
    }

    /// Removes and returns the held completion at this place.
    pub(crate) fn take_held(&mut self, at: usize) -> Option<HeldCompletion> {
        let held = self.held.remove(at)?;
        HELD.get_or_make(AtomicUsize::default).fetch_sub(1, Ordering::Relaxed);
        Some(held)
    }

    pub(crate) const fn has_barrier(&self) -> bool {
        self.barrier.is_some()
    }

    /// Returns the member for a work request. `leaves_as` is its stage, or `None` if it may not
    /// leave the first queue pair.
    pub(crate) fn wanted(&self, leaves_as: Option<Stage>) -> u8 {
        match leaves_as {
            Some(stage) if self.may_post && self.is_peer_ready => self.stages[stage.index()],
            _ => 0,
        }
    }

    /// Ends the outstanding barrier if its data have arrived. Reports whether they have.
    pub(crate) fn settle_barrier(&mut self) -> bool {
        let landed = self.barrier.is_some_and(|place| self.has_landed(place));
        if landed {
            self.barrier = None;
            self.is_dirty = false;
        }
        landed
    }

    /// Ends the outstanding barrier, of which a failure was reported. Reports whether there was one
    /// whose data had not arrived.
    pub(crate) fn end_barrier(&mut self) -> bool {
        !self.settle_barrier() && self.barrier.take().is_some()
    }

    /// Decides about a work request that wants a member. `tail_is_signaled` says whether the last
    /// work request of the current queue pair is signaled.
    pub(crate) fn route(&mut self, wanted: u8, tail_is_signaled: bool) -> BundleRoute {
        let wanted = usize::from(wanted);
        if self.barrier.is_some() {
            return BundleRoute::Wait;
        }
        let stays = self.is_broken
            || wanted == self.current
            // Places of unsignaled work requests are freed by a later one of the same queue pair.
            || (self.current == 0 && !tail_is_signaled);
        if !stays {
            if self.is_dirty {
                return BundleRoute::Barrier;
            }
            self.current = wanted;
        }
        self.is_dirty = true;
        BundleRoute::Post
    }

    /// Posts a barrier to the current queue pair by `post`. Returns `post`'s error.
    pub(crate) fn post_barrier<E>(
        &mut self,
        post: impl FnOnce(*mut ibv_qp, *mut ibv_send_wr) -> Result<(), E>,
    ) -> Result<(), E> {
        let place = self.next_place;
        let landing = self.landing(place);
        // SAFETY: a word of the page, which is mapped. No READ to it is outstanding.
        unsafe { landing.write_volatile(0) };
        let mut sge =
            ibv_sge { addr: landing as u64, length: size_of::<u64>() as u32, lkey: self.page.lkey };
        // SAFETY: plain data, for which zeroes are a value.
        let mut wr = unsafe { core::mem::zeroed::<ibv_send_wr>() };
        wr.wr_id = BARRIER_ID + place as u64;
        wr.opcode = ibv_wr_opcode::IBV_WR_RDMA_READ;
        wr.next = ptr::null_mut();
        wr.sg_list = &raw mut sge;
        wr.num_sge = 1;
        let remote_addr = self.peer.address + (place * size_of::<u64>()) as u64;
        wr.wr.rdma = rdma_t { remote_addr, rkey: self.peer.rkey };
        post(self.members[self.current].ibv, &raw mut wr)?;
        self.next_place = (place + 1) % WORDS;
        self.barrier = Some(place);
        Ok(())
    }

    fn landing(&self, place: usize) -> *mut u64 {
        // SAFETY: the page has twice WORDS words.
        unsafe { self.page.memory.add(WORDS + place) }
    }

    fn has_landed(&self, place: usize) -> bool {
        // SAFETY: a word of the page, which is mapped. The device may write it at any time.
        unsafe { self.landing(place).read_volatile() == word(place) }
    }
}

impl Drop for QueuePairBundle {
    fn drop(&mut self) {
        if !self.held.is_empty() {
            HELD.get_or_make(AtomicUsize::default).fetch_sub(self.held.len(), Ordering::Relaxed);
        }
    }
}
