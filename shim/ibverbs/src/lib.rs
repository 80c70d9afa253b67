//! The types and constants of libibverbs that Laxity uses, without linking libibverbs.
//!
//! [`generated`] comes from the header `<infiniband/verbs.h>`. The types here are written by hand:
//! unions inside structs get usable names, and tables of operations name only the used slots.
//! `tests/layout.rs` compares all of them with the installed header.
//!
//! `ibv_post_send`, `ibv_poll_cq` and similar functions are inline in C. They call through
//! [`ibv_context::ops`], and so do the users of this crate.

#![forbid(unsafe_code)]
#![allow(
    missing_docs,
    non_camel_case_types,
    reason = "names are those of libibverbs, and its manual pages explain them"
)]

use core::ffi::{c_char, c_int, c_uint, c_void};

use libc::{pthread_cond_t, pthread_mutex_t};

mod generated;

pub use generated::*;

type __be16 = u16;
type __be32 = u32;
type __be64 = u64;

/// Defines types of which only the address is used.
macro_rules! opaque {
    ($($name:ident)*) => {
        $(
            #[doc = concat!("`struct ", stringify!($name), "`, of which only the address is used.")]
            #[repr(C)]
            pub struct $name([u8; 0]);
        )*
    };
}

opaque!(ibv_ah ibv_comp_channel ibv_mw ibv_rwq_ind_table ibv_wc_tm_info ibv_xrcd);

/// The GID of a device port.
#[derive(Clone, Copy)]
#[repr(C)]
pub union ibv_gid {
    /// The 16 bytes in network byte order.
    pub raw: [u8; 16],
    /// Subnet prefix and interface in network byte order. They define the alignment.
    pub global: [__be64; 2],
}

/// The immediate data or key of a completion or a work request.
#[derive(Clone, Copy)]
#[repr(C)]
pub union imm_data_invalidated_rkey_union_t {
    /// Immediate data in network byte order.
    pub imm_data: __be32,
    /// Remote key that was or will be invalidated.
    pub invalidated_rkey: u32,
}

/// A work completion.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_wc {
    pub wr_id: u64,
    pub status: ibv_wc_status::Type,
    pub opcode: ibv_wc_opcode::Type,
    pub vendor_err: u32,
    pub byte_len: u32,
    pub imm_data_invalidated_rkey_union: imm_data_invalidated_rkey_union_t,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

/// Remote address and key of an RDMA READ or WRITE.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct rdma_t {
    pub remote_addr: u64,
    pub rkey: u32,
}

/// Remote address, key and operands of an atomic operation.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct atomic_t {
    pub remote_addr: u64,
    pub compare_add: u64,
    pub swap: u64,
    pub rkey: u32,
}

/// Destination of a datagram: address handle, queue pair and key.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ud_t {
    pub ah: *mut ibv_ah,
    pub remote_qpn: u32,
    pub remote_qkey: u32,
}

/// Operands of a work request. `ibv_send_wr::opcode` and the queue pair's type select the field.
#[derive(Clone, Copy)]
#[repr(C)]
pub union wr_t {
    pub rdma: rdma_t,
    pub atomic: atomic_t,
    pub ud: ud_t,
}

/// Memory window that a work request binds.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct bind_mw_t {
    pub mw: *mut ibv_mw,
    pub rkey: u32,
    pub bind_info: ibv_mw_bind_info,
}

/// Header and size for TCP segmentation offload.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct tso_t {
    pub hdr: *mut c_void,
    pub hdr_sz: u16,
    pub mss: u16,
}

/// Further operands of a work request. `ibv_send_wr::opcode` selects the field.
#[derive(Clone, Copy)]
#[repr(C)]
pub union bind_mw_tso_union_t {
    pub bind_mw: bind_mw_t,
    pub tso: tso_t,
}

/// A work request for a send queue.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_send_wr {
    pub wr_id: u64,
    pub next: *mut Self,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
    pub opcode: ibv_wr_opcode::Type,
    pub send_flags: c_uint,
    pub imm_data_invalidated_rkey_union: imm_data_invalidated_rkey_union_t,
    pub wr: wr_t,
    /// Number of the remote shared receive queue, for XRC.
    pub remote_srqn: u32,
    pub bind_mw_tso_union: bind_mw_tso_union_t,
}

/// The operations of a context. Slots that Laxity does not use have no name.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_context_ops {
    unused_0: [*mut c_void; 7],
    /// The function behind `ibv_alloc_mw`, with the type of the memory window.
    pub alloc_mw: Option<unsafe extern "C" fn(*mut ibv_pd, c_uint) -> *mut ibv_mw>,
    unused_8: [*mut c_void; 3],
    /// The function behind `ibv_poll_cq`.
    pub poll_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int>,
    unused_12: [*mut c_void; 8],
    /// The function behind `ibv_post_srq_recv`.
    pub post_srq_recv: Option<
        unsafe extern "C" fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int,
    >,
    unused_21: [*mut c_void; 4],
    /// The function behind `ibv_post_send`.
    pub post_send:
        Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int>,
    /// The function behind `ibv_post_recv`.
    pub post_recv:
        Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int>,
    unused_27: [*mut c_void; 5],
}

/// An asynchronous event of a device.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_async_event {
    /// The object that the event is about, or the number of a port, by the event's type.
    pub element: *mut c_void,
    pub event_type: c_uint,
}

/// The extended context. Slots that Laxity does not use have no name. New slots come at the front,
/// so only distances from [`Self::context`] are the same in all releases.
#[repr(C)]
pub struct verbs_context {
    unused_0: [*mut c_void; 25],
    /// The function behind `ibv_create_cq_ex`.
    pub create_cq_ex:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex>,
    unused_26: [*mut c_void; 7],
    /// The function behind `ibv_create_qp_ex`.
    pub create_qp_ex:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp>,
    unused_34: [*mut c_void; 5],
    /// Size of this struct, in bytes, in the library that created it.
    pub sz: usize,
    /// The context that programs use.
    pub context: ibv_context,
}
