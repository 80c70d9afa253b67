//! One-sided operations: NCCL's interface for device-initiated networking by a CPU proxy ("GIN
//! PROXY") and for `ncclPutSignal`. `LAXITY_RMA=1` switches it on.
//!
//! ```text
//! NCCL ── ncclRmaPlugin_v14 … v16 ──▶ abi/rma.rs ──▶ context.rs   one set of ordering domains
//!                                                      │
//!                                   gate.rs: held until the bytes of its batch are permitted
//!                                                      ▼
//!                                   verbs/one_sided.rs, or over TCP link.rs
//!
//! group.rs, mesh.rs: the ranks' control connections, all to all; registering memory
//! ```
//!
//! NCCL never repeats a call here: each operation is taken at once. One that needs a permit is held
//! behind its request, in the order of its context and rank. GPUs spin until it is done, so every
//! hold is bounded. docs/nccl.md is the user's guide.
//!
//! The objects that NCCL holds are numbers that [`registry`] resolves. NCCL 2.30.7 passes the
//! network plugin's contexts to some calls, and a number of another kind is simply not found.

mod context;
pub(crate) mod frame;
mod gate;
mod group;
mod link;
mod mesh;
mod region;
pub(crate) mod registry;
mod request;

/// What a network beneath a group uses.
pub(crate) mod wire {
    pub(crate) use super::gate::{RmaOperation, Wire};
    pub(crate) use super::mesh::Mesh;
    pub(crate) use super::region::Far;
    pub(crate) use super::request::RequestPart;
}

pub use context::{Put, RegionSide, RmaContext, TransferEnds, test_request};
pub use frame::{Frame, HEAD_BYTES, HELLO_BYTES, RmaHello};
pub use gate::Around;
pub use group::{RmaGroup, RmaListener};
pub use region::RmaRegion;

/// NCCL may have 32 times as many unfinished operations per context and rank. The plugin itself has
/// no limit.
pub(crate) const RECEIVES_MAX: i32 = 8;
