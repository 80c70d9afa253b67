//! What a host's NICs do with a DSCP: its priority, its queue, and whether PFC and ECN hold there.
//!
//! [`query`] asks the kernel by dcbnl netlink, which needs no privilege. [`treatments`] sums up all
//! RDMA ports of a host for [`laxity_types::marking::decide`]. Switches can't be seen from a host.
#![forbid(unsafe_code)]

mod dcbnl;
mod map;
mod ports;

pub use dcbnl::{DcbError, query};
pub use map::{PRIORITIES, PriorityMap, Selection, Trust};
pub use ports::{RdmaPort, ecn, map_of, rdma_ports, treatments};
