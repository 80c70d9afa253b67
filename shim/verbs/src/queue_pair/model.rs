//! A model of queue pairs whose work requests execute, complete and fail at random, and programs
//! that post to them through this library. It checks what the program sees.
//!
//! The model is stricter than devices: a place in a send queue is freed only by a polled completion
//! of the same queue pair, a completion queue must never hold more than the program asked for, and
//! completions may come long after a barrier's data.

use core::ffi::{c_int, c_void};
use core::mem;
use core::ptr;
use std::cell::RefCell;
use std::collections::VecDeque;

use laxity_client::Stage;
use laxity_ibverbs::{
    ibv_context, ibv_cq, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_state, ibv_qp_type,
    ibv_send_flags, ibv_send_wr, ibv_wc, ibv_wc_status as status, ibv_wr_opcode as op,
};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::{QueuePair, SendReadiness};
use crate::bundle::agent;
use crate::bundle::candidate::BundleCandidate;
use crate::bundle::siblings::BundleSiblings;
use crate::bundle::{
    self, BundleMember, LandingPage, PeerPage, QueuePairBundle, WORDS, barrier_place, word,
};
use crate::contexts;
use crate::exports;
use crate::work::SendLimits;

mod changes;
mod random_programs;

/// A work request in a send queue.
#[derive(Clone, Copy, Debug)]
struct ModelRequest {
    id: u64,
    signaled: bool,
    landing: *mut u64,
    place: usize,
    slot: u64,
}

/// A completion that is not in the queue yet, or the place that an unsignaled one holds in order.
#[derive(Clone, Copy, Debug)]
struct ModelCompletion {
    request: ModelRequest,
    status: status::Type,
}

#[derive(Debug, Default)]
struct ModelPair {
    number: u32,
    depth: u64,
    /// Counts of work requests that were posted, and of those whose places are free again.
    posted: u64,
    freed: u64,
    queue: VecDeque<ModelRequest>,
    done: VecDeque<ModelCompletion>,
    is_in_error: bool,
}

#[derive(Debug)]
struct ModelState {
    pairs: Vec<ModelPair>,
    completed: VecDeque<(usize, ModelCompletion)>,
    /// Entries of the completion queue.
    capacity: usize,
    /// What the responder executed, without barriers.
    executed: Vec<u64>,
    barriers: u64,
}

// SAFETY: the pointers lead to memory that lives as long as the test process.
unsafe impl Send for ModelState {}

/// A device with one connection.
struct ModelDevice {
    state: Mutex<ModelState>,
    context: Box<ibv_context>,
    cq: Box<ibv_cq>,
    pairs: Vec<ibv_qp>,
}

fn device(user: *mut c_void) -> &'static ModelDevice {
    // SAFETY: the devices of tests are never freed.
    unsafe { &*user.cast::<ModelDevice>() }
}

fn index(device: &ModelDevice, qp: *mut ibv_qp) -> usize {
    device.pairs.iter().position(|own| ptr::eq(own, qp)).expect("a queue pair")
}

/// Changes the state of a model's queue pair. Tests have no others.
pub(crate) fn fake_state(qp: *mut ibv_qp, to: ibv_qp_state::Type) -> Option<bool> {
    // SAFETY: tests only use queue pairs of models, which have a device.
    let device = device(unsafe { (*qp).qp_context });
    let mut state = device.state.lock();
    let pair = &mut state.pairs[index(device, qp)];
    if to == ibv_qp_state::IBV_QPS_RESET {
        *pair = ModelPair { number: pair.number, depth: pair.depth, ..ModelPair::default() };
    } else if to == ibv_qp_state::IBV_QPS_ERR {
        pair.is_in_error = true;
        pair.flush();
    }
    Some(true)
}

impl ModelPair {
    fn flush(&mut self) {
        for request in self.queue.drain(..) {
            self.done.push_back(ModelCompletion { request, status: status::IBV_WC_WR_FLUSH_ERR });
        }
    }
}

impl ModelState {
    /// Executes the first work request of a queue pair, or lets it fail.
    fn execute(&mut self, index: usize, fails: bool) {
        let pair = &mut self.pairs[index];
        let Some(request) = pair.queue.pop_front() else { return };
        if fails {
            let status = status::IBV_WC_REM_ACCESS_ERR;
            pair.done.push_back(ModelCompletion { request, status });
            pair.is_in_error = true;
            pair.flush();
            return;
        }
        if request.landing.is_null() {
            self.executed.push(request.id);
        } else {
            self.barriers += 1;
            // SAFETY: the page of the bundle.
            unsafe { request.landing.write_volatile(word(request.place)) };
        }
        pair.done.push_back(ModelCompletion { request, status: status::IBV_WC_SUCCESS });
    }

    /// Puts the next completion of a queue pair into the completion queue.
    fn complete(&mut self, index: usize) {
        let Some(done) = self.pairs[index].done.pop_front() else { return };
        if done.request.signaled || done.status != status::IBV_WC_SUCCESS {
            self.completed.push_back((index, done));
            assert!(self.completed.len() <= self.capacity, "the completion queue overflows");
        }
    }
}

unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    mut list: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the library passes valid lists of a model's queue pair.
    unsafe {
        let device = device((*qp).qp_context);
        let mut state = device.state.lock();
        let pair = &mut state.pairs[index(device, qp)];
        while let Some(wr) = list.as_ref() {
            let is_barrier = barrier_place(wr.wr_id).is_some();
            if pair.posted - pair.freed >= pair.depth {
                *bad = list;
                return libc::ENOMEM;
            }
            pair.posted += 1;
            let signaled = wr.send_flags & ibv_send_flags::IBV_SEND_SIGNALED != 0;
            let (landing, place) = if is_barrier {
                let place = (wr.wr.rdma.remote_addr / 8) as usize % WORDS;
                ((*wr.sg_list).addr as *mut u64, place)
            } else {
                (ptr::null_mut(), 0)
            };
            let request =
                ModelRequest { id: wr.wr_id, signaled, landing, place, slot: pair.posted };
            pair.queue.push_back(request);
            list = wr.next;
        }
        if pair.is_in_error {
            pair.flush();
        }
    }
    0
}

thread_local! {
    /// What happens when the program's next poll reaches the device.
    static AT_POLL: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    if let Some(happens) = AT_POLL.take() {
        happens();
    }
    // SAFETY: the caller's queue is a model's, and its array has room.
    unsafe {
        let device = device((*cq).cq_context);
        let mut state = device.state.lock();
        let mut got = 0;
        while got < entries {
            let Some((index, done)) = state.completed.pop_front() else { break };
            let pair = &mut state.pairs[index];
            pair.freed = pair.freed.max(done.request.slot);
            let mut one = mem::zeroed::<ibv_wc>();
            one.wr_id = done.request.id;
            one.status = done.status;
            one.qp_num = pair.number;
            wc.add(got as usize).write(one);
            got += 1;
        }
        got
    }
}

/// A program's connection over a model.
struct ModelConnection {
    device: &'static ModelDevice,
    queue_pair: &'static QueuePair,
    depth: usize,
}

impl ModelConnection {
    /// Makes a ready queue pair with `siblings` others. With three members, P2D has its own.
    fn new(depth: usize, siblings: usize) -> Self {
        static NUMBER: core::sync::atomic::AtomicU32 = core::sync::atomic::AtomicU32::new(1);
        let first = NUMBER.fetch_add(8, core::sync::atomic::Ordering::Relaxed);
        bundle::IS_ON_IN_TEST.set(true);
        let zeroed_pair = |_| {
            // SAFETY: plain data, for which zeroes are a value.
            unsafe { mem::zeroed::<ibv_qp>() }
        };
        let pairs: Vec<ibv_qp> = (0..=siblings).map(zeroed_pair).collect();
        let state = ModelState {
            pairs: (0..=siblings)
                .map(|at| ModelPair {
                    number: first + at as u32,
                    depth: if at == 0 { depth + 1 } else { 2 * depth + 2 } as u64,
                    ..ModelPair::default()
                })
                .collect(),
            completed: VecDeque::new(),
            capacity: depth,
            executed: Vec::new(),
            barriers: 0,
        };
        let device = Box::leak(Box::new(ModelDevice {
            state: Mutex::new(state),
            // SAFETY: plain data, for which zeroes are a value.
            context: Box::new(unsafe { mem::zeroed() }),
            // SAFETY: plain data, for which zeroes are a value.
            cq: Box::new(unsafe { mem::zeroed() }),
            pairs,
        }));
        let user: *mut c_void = ptr::from_mut(device).cast();
        let context: *mut ibv_context = &raw mut *device.context;
        device.context.ops.post_send = Some(post_send);
        device.context.ops.poll_cq = Some(poll_cq);
        let cq: *mut ibv_cq = &raw mut *device.cq;
        device.cq.context = context;
        device.cq.cq_context = user;
        for (at, pair) in device.pairs.iter_mut().enumerate() {
            pair.context = context;
            pair.send_cq = cq;
            pair.qp_context = user;
            pair.qp_type = ibv_qp_type::IBV_QPT_RC;
            pair.qp_num = first + at as u32;
        }
        // SAFETY: a context that only this thread uses.
        unsafe { contexts::hook(context) };
        let hooked = contexts::find(context).expect("a hooked context");
        let queue_pair = hooked.queue_pairs.make(first);
        let limits = SendLimits { work_requests: depth, sges: 4, inline_bytes: 0 };
        queue_pair.open(hooked, &raw mut device.pairs[0], Some((limits, false)));
        queue_pair.be_candidate();
        queue_pair.state.lock().readiness = SendReadiness::Ready;
        Self { device, queue_pair, depth }
    }

    fn pair(&self, at: usize) -> *mut ibv_qp {
        ptr::from_ref::<ibv_qp>(&self.device.pairs[at]).cast_mut()
    }

    /// Reports whether the queue pair is ready and has no bundle.
    fn may_be_bundled(&self) -> bool {
        let state = self.queue_pair.state.lock();
        state.readiness == SendReadiness::Ready && state.bundle.is_none()
    }

    /// Bundles the queue pairs, as the thread that agrees does.
    fn bundle(&self) {
        let members: SmallVec<[BundleMember; 4]> = (0..self.device.pairs.len())
            .map(|at| BundleMember { ibv: self.pair(at), number: self.device.pairs[at].qp_num })
            .collect();
        let hooked = contexts::find(self.device.pairs[0].context).expect("a context");
        for member in &members[1..] {
            hooked.queue_pairs.alias(member.number, self.queue_pair);
        }
        let mut stages = [0; Stage::ALL.len()];
        stages[Stage::KvReuse.index()] = 1;
        stages[Stage::P2d.index()] = if members.len() > 2 { 2 } else { 0 };
        let memory: &'static mut [u64] = Vec::leak(vec![0; 2 * WORDS]);
        let page = LandingPage { memory: memory.as_mut_ptr(), lkey: 1 };
        let peer = PeerPage { address: 0, rkey: 3 };
        let pairs: Vec<_> = members[1..].iter().map(|member| member.ibv).collect();
        let mut bundle = QueuePairBundle::new(members, stages, page, peer);
        bundle.may_post = true;
        bundle.is_peer_ready = true;
        let mut candidate = self.queue_pair.candidate.lock();
        let candidate: &mut BundleCandidate = candidate.as_mut().expect("a candidate");
        candidate.siblings = Some(BundleSiblings::of_model(&pairs));
        assert!(agent::watch(self.queue_pair), "there are few bundles");
        let mut state = self.queue_pair.state.lock();
        state.bundle = Some(Box::new(bundle));
        state.has_polled = true;
    }

    /// Posts work requests of these ids, opcodes and signals, as the program does. Returns the
    /// number of those that were taken.
    fn post(&self, wanted: &[(u64, op::Type, bool)]) -> (c_int, usize) {
        let mut list: Vec<ibv_send_wr> = wanted
            .iter()
            .map(|(id, opcode, signaled)| {
                // SAFETY: plain data, for which zeroes are a value.
                let mut wr = unsafe { mem::zeroed::<ibv_send_wr>() };
                wr.wr_id = *id;
                wr.opcode = *opcode;
                if *signaled {
                    wr.send_flags = ibv_send_flags::IBV_SEND_SIGNALED;
                }
                wr
            })
            .collect();
        for at in 1..list.len() {
            list[at - 1].next = &raw mut list[at];
        }
        let post = self.device.context.ops.post_send.expect("the library's function");
        let (head, mut bad) = (list.as_mut_ptr(), ptr::null_mut());
        // SAFETY: a valid list for a ready queue pair.
        unsafe {
            let error = post(self.pair(0), head, &raw mut bad);
            let taken = if error == 0 { list.len() } else { crate::list::position(head, bad) };
            (error, taken)
        }
    }

    /// Polls as the program does.
    fn poll(&self, entries: usize) -> Vec<ibv_wc> {
        let poll = self.device.context.ops.poll_cq.expect("the library's function");
        // SAFETY: plain data, for which zeroes are a value.
        let mut out: Vec<ibv_wc> = vec![unsafe { mem::zeroed() }; entries];
        let cq = ptr::from_ref::<ibv_cq>(&self.device.cq).cast_mut();
        // SAFETY: the array has room.
        let got = unsafe { poll(cq, entries as c_int, out.as_mut_ptr()) };
        out.truncate(usize::try_from(got).expect("no error"));
        out
    }

    /// Changes the state as the program does.
    fn modify(&self, to: ibv_qp_state::Type) -> c_int {
        // SAFETY: plain data, for which zeroes are a value.
        let mut attr = unsafe { mem::zeroed::<ibv_qp_attr>() };
        attr.qp_state = to;
        let qp = self.pair(0);
        let mask = ibv_qp_attr_mask::IBV_QP_STATE as c_int;
        // SAFETY: a live queue pair.
        unsafe {
            exports::modify(qp, &raw mut attr, mask, |_| {
                fake_state(qp, to);
                0
            })
        }
    }
}

impl ModelConnection {
    /// Changes the peer's rights as the program does.
    fn change_rights(&self, rights: u32) -> c_int {
        // SAFETY: plain data, for which zeroes are a value.
        let mut attr = unsafe { mem::zeroed::<ibv_qp_attr>() };
        attr.qp_access_flags = rights;
        let mask = ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS as c_int;
        // SAFETY: a live queue pair. Its model has no rights.
        unsafe { exports::modify(self.pair(0), &raw mut attr, mask, |_| 0) }
    }
}

impl Drop for ModelConnection {
    fn drop(&mut self) {
        contexts::forget_context(self.device.pairs[0].context);
    }
}
