//! Queue pairs: creation, connection, use and destruction.

use core::ffi::c_int;
use core::mem;
use core::ptr;
use std::collections::VecDeque;
use std::sync::Arc;

use laxity_ibverbs::{
    atomic_t, ibv_access_flags as access, ibv_ah_attr, ibv_gid, ibv_global_route, ibv_qp,
    ibv_qp_attr, ibv_qp_attr_mask as mask, ibv_qp_cap, ibv_qp_init_attr, ibv_qp_state, ibv_qp_type,
    ibv_send_flags as send, ibv_send_wr, ibv_sge, ibv_wc_status, ibv_wr_opcode,
};
use smallvec::SmallVec;

use super::completions::{BATCH, Completion, Completions, SharedReceive};
use super::hello::{ClassQueuePair, End};
use super::library::os_error;
use super::nic::{INFINIBAND, Nic};
use crate::fault::{Fault, Result};

/// Inline bytes of a work request that a queue pair is asked for. A fifo entry and small messages
/// fit.
pub(super) const INLINE_BYTES: usize = 64;
/// Largest number of RDMA READs in flight, in each direction, where only flushes use them.
const READS: u8 = 1;
/// The code for 0.64 ms, the sender's wait if the receiver has no buffer, which it always has.
const RECEIVER_NOT_READY: u8 = 12;
const RECEIVER_NOT_READY_RETRIES: u8 = 7;
const HOPS: u8 = 255;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// A write into the peer's memory.
    Write,
    /// A write into the peer's memory that delivers these 32 bits to the peer.
    Announce(u32),
    /// A read from the peer's memory.
    Read,
    /// An addition to a word of the peer's memory. The word's earlier value is read.
    Add(u64),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct WorkRequest {
    pub(super) id: u64,
    pub(super) work: Work,
    pub(super) local: u64,
    pub(super) lkey: u32,
    pub(super) remote: u64,
    pub(super) rkey: u32,
    pub(super) bytes: u32,
    /// Whether the device reports the request's completion.
    pub(super) signaled: bool,
    /// Whether the CPU can read the memory, so that a few bytes can go inline.
    pub(super) readable: bool,
}

#[derive(Debug)]
pub(super) struct OwnedQueuePair {
    qp: *mut ibv_qp,
    inline: usize,
    /// Largest number of reads and atomic operations in flight, in each direction.
    reads: u8,
    nic: Arc<Nic>,
}

// SAFETY: libibverbs takes a queue pair in any thread.
unsafe impl Send for OwnedQueuePair {}

impl OwnedQueuePair {
    /// Creates a queue pair that is not connected, but ready to be. The peer may read and write.
    pub(super) fn new(
        nic: &Arc<Nic>,
        completions: &Completions,
        shared: Option<&SharedReceive>,
        work_requests: u32,
    ) -> Result<Self> {
        Self::ready(nic, completions, shared, work_requests, 0)
    }

    /// Creates a queue pair for one-sided operations in both directions.
    pub(super) fn one_sided(
        nic: &Arc<Nic>,
        completions: &Completions,
        work_requests: u32,
    ) -> Result<Self> {
        let extra = access::IBV_ACCESS_REMOTE_ATOMIC;
        let mut made = Self::ready(nic, completions, None, work_requests, extra)?;
        made.reads = nic.atomics;
        Ok(made)
    }

    fn ready(
        nic: &Arc<Nic>,
        completions: &Completions,
        shared: Option<&SharedReceive>,
        work_requests: u32,
        extra: access::Type,
    ) -> Result<Self> {
        let made = Self::make(nic, completions, shared, work_requests, INLINE_BYTES);
        // A device may support no inline data.
        let made = made.or_else(|_| Self::make(nic, completions, shared, work_requests, 0))?;
        made.initialize(extra)?;
        Ok(made)
    }

    /// Makes the queue pair ready to be connected.
    fn initialize(&self, extra: access::Type) -> Result<()> {
        let nic = &self.nic;
        // SAFETY: plain data that may be zero.
        let mut attr: ibv_qp_attr = unsafe { mem::zeroed() };
        attr.qp_state = ibv_qp_state::IBV_QPS_INIT;
        attr.pkey_index = nic.options.pkey_index;
        attr.port_num = nic.port;
        attr.qp_access_flags = access::IBV_ACCESS_LOCAL_WRITE
            | access::IBV_ACCESS_REMOTE_WRITE
            | access::IBV_ACCESS_REMOTE_READ
            | extra;
        let change = mask::IBV_QP_STATE
            | mask::IBV_QP_PKEY_INDEX
            | mask::IBV_QP_PORT
            | mask::IBV_QP_ACCESS_FLAGS;
        self.modify(&mut attr, change, "can't initialize a queue pair (NCCL_IB_PKEY?)")
    }

    fn make(
        nic: &Arc<Nic>,
        completions: &Completions,
        shared: Option<&SharedReceive>,
        work_requests: u32,
        inline: usize,
    ) -> Result<Self> {
        let mut attr = ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: completions.cq,
            recv_cq: completions.cq,
            srq: shared.map_or(ptr::null_mut(), |shared| shared.srq),
            cap: ibv_qp_cap {
                max_send_wr: work_requests.min(nic.work_requests_max),
                max_recv_wr: 0,
                max_send_sge: 1,
                max_recv_sge: 0,
                max_inline_data: inline as u32,
            },
            qp_type: ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: domain and queues are alive and of this device. The struct is local.
        let qp = unsafe { (nic.library.create_qp)(nic.pd, &mut attr) };
        if qp.is_null() {
            return Err(nic.refused("gives no queue pair", os_error()));
        }
        let inline = attr.cap.max_inline_data as usize;
        Ok(Self { qp, inline, reads: READS, nic: Arc::clone(nic) })
    }

    pub(super) fn number(&self) -> u32 {
        // SAFETY: the queue pair is alive.
        unsafe { (*self.qp).qp_num }
    }

    fn modify(&self, attr: &mut ibv_qp_attr, change: mask::Type, what: &str) -> Result<()> {
        // SAFETY: the queue pair is alive. The struct is this function's own.
        match unsafe { (self.nic.library.modify_qp)(self.qp, attr, change as c_int) } {
            0 => Ok(()),
            error => {
                let error = std::io::Error::from_raw_os_error(error.abs());
                Err(self.nic.refused(what, error))
            }
        }
    }

    /// Connects the queue pair with `theirs` of the other end, in one class. The network uses the
    /// class's lowest two bits (ECN).
    pub(super) fn connect(
        &self,
        ours: &ClassQueuePair,
        theirs: &ClassQueuePair,
        end: &End,
    ) -> Result<()> {
        let nic = &self.nic;
        // SAFETY: plain data that may be zero.
        let mut attr: ibv_qp_attr = unsafe { mem::zeroed() };
        attr.qp_state = ibv_qp_state::IBV_QPS_RTR;
        attr.path_mtu = nic.mtu.min(end.mtu);
        attr.dest_qp_num = theirs.number;
        attr.rq_psn = theirs.first_packet;
        attr.max_dest_rd_atomic = self.reads;
        attr.min_rnr_timer = RECEIVER_NOT_READY;
        // Within one InfiniBand subnet, LIDs route packets. Otherwise a global header does, which
        // carries the class.
        let by_lid = nic.link == INFINIBAND && end.lid != 0 && end.gid[..8] == nic.gid[..8];
        attr.ah_attr = ibv_ah_attr {
            grh: ibv_global_route {
                dgid: ibv_gid { raw: end.gid },
                flow_label: 0,
                sgid_index: nic.gid_index,
                hop_limit: HOPS,
                traffic_class: nic.options.class_of(ours.dscp),
            },
            dlid: end.lid,
            sl: nic.options.service_level.unwrap_or(ours.service_level),
            src_path_bits: 0,
            static_rate: 0,
            is_global: u8::from(!by_lid),
            port_num: nic.port,
        };
        let change = mask::IBV_QP_STATE
            | mask::IBV_QP_AV
            | mask::IBV_QP_PATH_MTU
            | mask::IBV_QP_DEST_QPN
            | mask::IBV_QP_RQ_PSN
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | mask::IBV_QP_MIN_RNR_TIMER;
        self.modify(
            &mut attr,
            change,
            "finds no way to the peer (is its address routed from here?)",
        )?;
        attr.qp_state = ibv_qp_state::IBV_QPS_RTS;
        attr.sq_psn = ours.first_packet;
        attr.timeout = nic.options.timeout;
        attr.retry_cnt = nic.options.retries;
        attr.rnr_retry = RECEIVER_NOT_READY_RETRIES;
        attr.max_rd_atomic = self.reads;
        let change = mask::IBV_QP_STATE
            | mask::IBV_QP_SQ_PSN
            | mask::IBV_QP_TIMEOUT
            | mask::IBV_QP_RETRY_CNT
            | mask::IBV_QP_RNR_RETRY
            | mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(&mut attr, change, "can't begin to send")
    }

    /// Posts `waiting` work requests, as far as there is room, and moves what is kept about each to
    /// `in_flight`.
    ///
    /// # Safety
    /// The conditions of [`Self::post`] hold for all of them.
    pub(super) unsafe fn post_waiting<T>(
        &self,
        waiting: &mut VecDeque<(WorkRequest, T)>,
        in_flight: &mut VecDeque<T>,
        room: usize,
    ) -> Result<()> {
        while !waiting.is_empty() && in_flight.len() < room {
            let count = BATCH.min(room - in_flight.len()).min(waiting.len());
            let requests: SmallVec<[WorkRequest; BATCH]> =
                waiting.iter().take(count).map(|(request, _)| *request).collect();
            // SAFETY: upheld by the caller.
            let taken = unsafe { self.post(&requests) }?;
            in_flight.extend(waiting.drain(..taken).map(|(_, kept)| kept));
            if taken < count {
                break;
            }
        }
        Ok(())
    }

    /// Posts work requests in one call, at most [`BATCH`]. Returns how many the queue took. It is
    /// full if these are fewer.
    ///
    /// # Safety
    /// The local memory of each request stays registered and isn't accessed in conflict with it.
    /// This holds until its completion or that of a later request has been seen, or the queue pair
    /// is gone.
    ///
    /// # Errors
    /// The device refused for another reason than lack of room.
    pub(super) unsafe fn post(&self, requests: &[WorkRequest]) -> Result<usize> {
        let count = requests.len().min(BATCH);
        if count == 0 {
            return Ok(0);
        }
        let mut pieces: [ibv_sge; BATCH] = [ibv_sge { addr: 0, length: 0, lkey: 0 }; BATCH];
        // SAFETY: plain data that may be zero.
        let mut list: [ibv_send_wr; BATCH] = unsafe { mem::zeroed() };
        for (at, request) in requests[..count].iter().enumerate() {
            pieces[at] = ibv_sge { addr: request.local, length: request.bytes, lkey: request.lkey };
            let piece = &raw mut pieces[at];
            let entry = &mut list[at];
            entry.wr_id = request.id;
            entry.num_sge = c_int::from(request.bytes > 0);
            entry.sg_list = piece;
            entry.opcode = match request.work {
                Work::Write => ibv_wr_opcode::IBV_WR_RDMA_WRITE,
                Work::Announce(immediate) => {
                    entry.imm_data_invalidated_rkey_union.imm_data = immediate.to_be();
                    ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM
                }
                Work::Read => ibv_wr_opcode::IBV_WR_RDMA_READ,
                Work::Add(_) => ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD,
            };
            if request.signaled {
                entry.send_flags |= send::IBV_SEND_SIGNALED;
            }
            if request.readable && request.bytes > 0 && request.bytes as usize <= self.inline {
                entry.send_flags |= send::IBV_SEND_INLINE;
            }
            if let Work::Add(compare_add) = request.work {
                let (remote_addr, rkey) = (request.remote, request.rkey);
                entry.wr.atomic = atomic_t { remote_addr, compare_add, swap: 0, rkey };
            } else {
                entry.wr.rdma.remote_addr = request.remote;
                entry.wr.rdma.rkey = request.rkey;
            }
        }
        let first = list.as_mut_ptr();
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is alive, with its context's table of operations. The list ends
        // within the array, and what it names stays until the call has returned. The caller upholds
        // the conditions on the memory.
        let result = unsafe {
            for at in 0..count - 1 {
                (*first.add(at)).next = first.add(at + 1);
            }
            let Some(post) = (*(*self.qp).context).ops.post_send else {
                return Err(Fault::Internal("the provider can't send".into()));
            };
            post(self.qp, first, &mut bad)
        };
        if result == 0 {
            return Ok(count);
        }
        // The device took all requests before the refused one.
        let taken = (0..count).position(|at| ptr::eq(bad, first.wrapping_add(at))).unwrap_or(0);
        if result.abs() == libc::ENOMEM {
            return Ok(taken);
        }
        let error = std::io::Error::from_raw_os_error(result.abs());
        Err(self.nic.refused("takes no work requests", error))
    }
}

impl Drop for OwnedQueuePair {
    fn drop(&mut self) {
        if self.nic.is_ours() {
            // SAFETY: the queue pair is alive, and only this value owns it.
            unsafe { (self.nic.library.destroy_qp)(self.qp) };
        }
    }
}

/// Returns the fault of a failed completion, with a hint what to do about it.
pub(super) fn failure(nic: &Nic, peer: &str, completion: &Completion) -> Fault {
    let status = nic.library.status(completion.status);
    let hint = match completion.status {
        ibv_wc_status::IBV_WC_RETRY_EXC_ERR => {
            ": the peer's device does not answer. Is it gone, the link down, or the network losing \
             packets (PFC, ECN; \
             NCCL_IB_TIMEOUT and NCCL_IB_RETRY_CNT say how long to try)?"
        }
        ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR => {
            ": the peer has no buffer for what it was promised"
        }
        ibv_wc_status::IBV_WC_WR_FLUSH_ERR => ": the connection was broken before",
        ibv_wc_status::IBV_WC_REM_ACCESS_ERR => {
            ": the peer's device refuses access to its buffer: was that deregistered while it was \
             posted?"
        }
        ibv_wc_status::IBV_WC_LOC_PROT_ERR => {
            ": memory that is not registered, or no more: was it deregistered while it was sent?"
        }
        _ => "",
    };
    let text = format!("{} to {peer}: {status}{hint}", nic.name);
    match completion.status {
        ibv_wc_status::IBV_WC_LOC_LEN_ERR
        | ibv_wc_status::IBV_WC_LOC_QP_OP_ERR
        | ibv_wc_status::IBV_WC_LOC_EEC_OP_ERR
        | ibv_wc_status::IBV_WC_LOC_PROT_ERR
        | ibv_wc_status::IBV_WC_LOC_ACCESS_ERR
        | ibv_wc_status::IBV_WC_FATAL_ERR
        | ibv_wc_status::IBV_WC_GENERAL_ERR => Fault::System(text),
        _ => Fault::Remote(text),
    }
}
