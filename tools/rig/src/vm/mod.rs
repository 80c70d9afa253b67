//! The SoftRoCE lab: real verbs in a virtual machine, on a host whose kernel has no RDMA.
//!
//! ```text
//! laxity lab exec ── Vm::boot ──▶ keeper ──▶ QEMU (emulated, no privileges needed)
//!       ▲                                     └─ guest: the host's files, read-only below an overlay
//!       │ frames over virtio-serial                └─ first_process ─ job_process ─ the program
//!       └───────────────────────────────────────────────────────────────┘
//! ```
//!
//! The guest boots Debian's stock kernel ([`image`]) and runs this program as its first process
//! ([`guest`]). That builds two RDMA devices with a router between them ([`network`]) and runs one
//! [`job::VmJob`]. The guest ends with the caller ([`keeper`]).

pub mod channel;
pub mod clock;
pub mod counters;
pub mod exec;
pub mod failure;
pub mod guest;
pub mod image;
pub mod job;
pub mod keeper;
pub mod machine;
pub mod memory_group;
pub mod network;
pub mod qemu;
pub mod start;
pub mod task;
pub mod verbs;
pub mod vmlinux;

pub use failure::VmError;
pub use job::{Exec, VmJob};
pub use machine::{Input, Stream, Vm, VmConfig, VmReport, lacks, run};
pub use network::NetworkConfig;
