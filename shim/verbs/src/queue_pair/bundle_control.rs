//! Making and ending the bundle of a queue pair, by the thread that agrees and by the program's own
//! calls.
//!
//! The candidate's lock is held during control calls, and never while anything waits for the peer
//! or the program. The thread doesn't wait for it. It is taken before the lock of the state.

use core::ffi::c_int;

use laxity_client::Stage;
use laxity_ibverbs::{
    ibv_qp, ibv_qp_attr, ibv_qp_attr_mask as mask, ibv_qp_init_attr, ibv_qp_state, ibv_wc,
};
use parking_lot::MutexGuard;
use smallvec::SmallVec;

use super::{QueuePair, SendReadiness};
use crate::bundle::agent::{self, BundleRequest};
use crate::bundle::candidate::{self, BundleCandidate};
use crate::bundle::message::{BundleEnd, BundleOffer};
use crate::bundle::siblings::BundleSiblings;
use crate::bundle::{self, BundleMember, QueuePairBundle, events, probe, verbs};
use crate::contexts::HookedContext;

/// A queue pair that the program is changing. With bundles off, it holds no lock.
pub(crate) struct CandidateChange<'a>(Option<MutexGuard<'a, Option<Box<BundleCandidate>>>>);

/// Attributes of a ready queue pair that siblings follow.
const RIGHTS: u32 = mask::IBV_QP_ACCESS_FLAGS | mask::IBV_QP_MIN_RNR_TIMER;

impl CandidateChange<'_> {
    fn candidate(&mut self) -> Option<&mut BundleCandidate> {
        self.0.as_mut()?.as_deref_mut()
    }

    /// Applies a change of a ready queue pair to its siblings, before the queue pair itself.
    pub(crate) fn follow(&mut self, attr: &ibv_qp_attr, given: u32) -> Result<(), c_int> {
        let to_send = given & mask::IBV_QP_STATE != 0;
        if (to_send && attr.qp_state != ibv_qp_state::IBV_QPS_RTS)
            || given & (RIGHTS | mask::IBV_QP_STATE) == 0
        {
            return Ok(());
        }
        let Some(siblings) = self.candidate().and_then(|it| it.siblings.as_mut()) else {
            return Ok(());
        };
        // SAFETY: the siblings are alive, since the lock is held.
        unsafe { siblings.follow(attr, given) }
    }

    /// Undoes [`CandidateChange::follow`] after the first queue pair refused the change.
    pub(crate) fn unfollow(&mut self, given: u32) {
        if let Some(candidate) = self.candidate()
            && let Some(mut siblings) = candidate.siblings.take()
        {
            if given & RIGHTS != 0 {
                // A sibling that refuses its former rights keeps the new ones, as it was asked for.
                // SAFETY: the siblings are alive, since the lock is held.
                let _ = unsafe { siblings.follow(candidate.attr(), given & RIGHTS) };
            }
            candidate.siblings = Some(siblings);
        }
    }
}

impl QueuePair {
    /// Records that a queue pair may get a bundle.
    pub(crate) fn be_candidate(&self) {
        *self.candidate.lock() = Some(Box::new(BundleCandidate::new()));
        self.state.lock().is_candidate = true;
    }

    /// Begins a change by the program. The thread that agrees keeps off until its end.
    pub(crate) fn lock_candidate(&self) -> CandidateChange<'_> {
        CandidateChange(bundle::is_on().then(|| self.candidate.lock()))
    }

    /// Hides the room for a barrier from a query, and lets the bundle of a queue pair in error
    /// fail.
    pub(crate) fn queried(&'static self, attr: &mut ibv_qp_attr, init: &mut ibv_qp_init_attr) {
        if !self.state.lock().is_candidate {
            return;
        }
        for cap in [&mut attr.cap, &mut init.cap] {
            cap.max_send_wr = cap.max_send_wr.saturating_sub(1);
        }
        if attr.qp_state == ibv_qp_state::IBV_QPS_ERR {
            self.fail_bundle();
        }
    }

    /// Reports whether a queue pair is a candidate in this life. True if that can't be told now.
    pub(crate) fn lives(&self, life: u32) -> bool {
        let Some(candidate) = self.candidate.try_lock() else { return true };
        candidate.as_ref().is_some_and(|candidate| candidate.life == life && !candidate.is_over)
    }

    /// Reports whether an agreement in this life can still make siblings. True if that can't be
    /// told now.
    pub(crate) fn may_agree(&self, life: u32) -> bool {
        let Some(candidate) = self.candidate.try_lock() else { return true };
        candidate.as_ref().is_some_and(|candidate| candidate.life == life && candidate.is_ready())
    }

    /// Makes siblings. Returns `None` if the program is changing the queue pair or has not polled
    /// its queues, and `Some(None)` if there will be none.
    pub(crate) fn make_siblings(&'static self, life: u32) -> Option<Option<BundleOffer>> {
        let mut lock = self.candidate.try_lock()?;
        let Some(candidate) = lock.as_mut().filter(|candidate| candidate.life == life) else {
            return Some(None);
        };
        let (ibv, context, limits) = {
            let state = self.state.lock();
            if state.readiness == SendReadiness::Broken || !candidate.is_ready() {
                return Some(None);
            }
            (state.ibv.0, state.context, state.limits)
        };
        let (Some(context), Some(limits)) = (context, limits) else { return Some(None) };
        let port = candidate.attr().port_num;
        // SAFETY: the queue pair is not destroyed, since `end_bundle` waits for the lock.
        let made = unsafe {
            let queues = [(*ibv).send_cq, (*ibv).recv_cq];
            if !probe::completes_in_error(context, (*ibv).pd, port)
                || !candidate::claim_queues(queues)?
            {
                None
            } else if !agent::watch(self) {
                candidate::release_queues(queues);
                None
            } else {
                let made = BundleSiblings::make(ibv, candidate, &limits);
                if made.is_none() {
                    candidate::release_queues(queues);
                }
                made
            }
        };
        let Some(made) = made else {
            candidate.is_over = true;
            agent::unwatch(self);
            return Some(None);
        };
        events::add(ibv, &made.pointers());
        let offer = made.offer();
        candidate.siblings = Some(made);
        Some(Some(offer))
    }

    /// Connects the siblings to the peer's, which may then post to them. Returns `None` if the
    /// program is changing the queue pair, and `Some(false)` if there will be no bundle.
    pub(crate) fn connect_siblings(&'static self, life: u32, peers: &BundleOffer) -> Option<bool> {
        let mut lock = self.candidate.try_lock()?;
        let Some(candidate) = lock.as_mut().filter(|c| c.life == life && !c.is_over) else {
            return Some(false);
        };
        let Some(mut siblings) = candidate.siblings.take() else { return Some(false) };
        // The rights may have changed since the siblings were made.
        let may_connect = candidate.permits_reads();
        // SAFETY: the queue pair is not destroyed, since `end_bundle` waits for the lock.
        let connected =
            may_connect.then(|| unsafe { siblings.connect(candidate, peers) }).flatten();
        let page = siblings.page();
        candidate.siblings = Some(siblings);
        let Some(connected) = connected else {
            candidate.is_over = true;
            return Some(false);
        };
        let mut state = self.state.lock();
        let is_alive = state.readiness != SendReadiness::Broken;
        let Some(context) = state.context.filter(|_| is_alive) else { return Some(false) };
        let mut members: SmallVec<_> = SmallVec::new();
        // SAFETY: the queue pair is not destroyed, since `end_bundle` waits for the lock.
        let number = unsafe { (*state.ibv.0).qp_num };
        members.push(BundleMember { ibv: state.ibv.0, number });
        for (_, member) in &connected {
            context.queue_pairs.alias(member.number, self);
            members.push(*member);
        }
        let classes: SmallVec<[u8; 4]> = connected.iter().map(|(class, _)| *class).collect();
        let stages = candidate.members(&classes);
        let mut bundle = QueuePairBundle::new(members, stages, page, peers.page);
        bundle.may_post = candidate.may_post();
        state.bundle = Some(Box::new(bundle));
        Some(true)
    }

    /// Begins to post to siblings.
    pub(crate) fn use_bundle(&self, life: u32) -> Option<bool> {
        let lock = self.candidate.try_lock()?;
        if lock.as_ref().is_none_or(|candidate| candidate.life != life) {
            return Some(false);
        }
        let mut state = self.state.lock();
        let Some(bundle) = &mut state.bundle else { return Some(false) };
        bundle.is_peer_ready = true;
        Some(true)
    }

    /// Lets all of the bundle fail if a sibling did. The thread that agrees calls it from time to
    /// time.
    pub(crate) fn look_for_failures(&'static self) {
        let Some(lock) = self.candidate.try_lock() else { return };
        let Some(siblings) = lock.as_ref().and_then(|candidate| candidate.siblings.as_ref()) else {
            return;
        };
        let Some(poll) = self.state.lock().context.and_then(HookedContext::poll_cq) else { return };
        // SAFETY: the queue lives as long as the siblings, and they are not destroyed, since
        // `end_bundle` waits for the lock. A completion is plain data.
        let failed = unsafe {
            let mut wc = core::mem::zeroed::<ibv_wc>();
            poll(siblings.alarm(), 1, &raw mut wc) != 0
        };
        drop(lock);
        if failed {
            self.fail_bundle();
        }
    }

    /// Destroys the siblings before the first queue pair is destroyed. May wait until the program
    /// acknowledges their events, as the call for its own queue pair does.
    pub(crate) fn end_bundle(&'static self) {
        if !bundle::is_on() {
            return;
        }
        let Some(candidate) = self.candidate.lock().take() else { return };
        let (first, number, context) = {
            let mut state = self.state.lock();
            state.is_candidate = false;
            state.end_bundle();
            (state.ibv.0, state.number(), state.context)
        };
        let Some(siblings) = candidate.siblings else { return };
        agent::unwatch(self);
        if let Some(context) = context {
            let siblings = siblings.numbers();
            context.queue_pairs.end(number, &siblings);
            for sibling in siblings {
                context.queue_pairs.unalias(sibling, self);
            }
        }
        // SAFETY: nothing finds the siblings any more, and the program destroys the first.
        unsafe {
            siblings.destroy();
            candidate::release_queues([(*first).send_cq, (*first).recv_cq]);
        }
        events::remove(first);
    }

    /// Leaves the siblings to the kernel, because their context is closed.
    pub(super) fn abandon_bundle(&'static self) -> bool {
        if !bundle::is_on() {
            return false;
        }
        let candidate = self.candidate.lock().take();
        let had_siblings = candidate.is_some_and(|candidate| candidate.siblings.is_some());
        if had_siblings {
            agent::unwatch(self);
            events::remove(self.state.lock().ibv.0);
        }
        had_siblings
    }

    /// Records a successful change, and starts an agreement when the queue pair becomes ready to
    /// receive, and when it becomes ready to send.
    pub(crate) fn changed(
        &'static self,
        mut change: CandidateChange<'_>,
        (ibv, attr): (*mut ibv_qp, &ibv_qp_attr),
        given: u32,
        classes: Option<([u8; Stage::ALL.len()], u8)>,
    ) {
        let Some(candidate) = change.candidate() else { return };
        candidate.learn(attr, given);
        candidate.classes = classes.or(candidate.classes);
        if let Some(siblings) = &candidate.siblings
            && let Some(bundle) = &mut self.state.lock().bundle
        {
            bundle.may_post = candidate.may_post() && siblings.may_post() && !candidate.is_over;
        }
        if given & mask::IBV_QP_STATE == 0 {
            return;
        }
        match attr.qp_state {
            ibv_qp_state::IBV_QPS_RESET => {
                // Its queue pairs stay known by their numbers, for completions that are left over.
                self.state.lock().end_bundle();
                if let Some(siblings) = &mut candidate.siblings {
                    // SAFETY: the siblings are alive, since the lock is held.
                    unsafe { siblings.reset() };
                }
                candidate.reset();
            }
            ibv_qp_state::IBV_QPS_RTR | ibv_qp_state::IBV_QPS_RTS if candidate.is_ready() => {
                let is_early = attr.qp_state == ibv_qp_state::IBV_QPS_RTR;
                // SAFETY: the program's queue pair is alive.
                let (gid, number) = unsafe { (verbs::gid(ibv, candidate.attr()), (*ibv).qp_num) };
                let peer = candidate.attr();
                // SAFETY: each form of the union is plain bytes.
                let peers_gid = unsafe { peer.ah_attr.grh.dgid.raw };
                let peer = BundleEnd { gid: peers_gid, number: peer.dest_qp_num };
                if let Some(gid) = gid {
                    let own = BundleEnd { gid, number };
                    let life = candidate.life;
                    agent::request(BundleRequest { queue_pair: self, life, own, peer, is_early });
                }
            }
            _ => {}
        }
    }
}
