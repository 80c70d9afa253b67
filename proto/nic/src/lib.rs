//! A host's NICs: their rates, and what they do with a DSCP, which is its priority, its queue, and
//! whether PFC and ECN hold there.
//!
//! [`query`] asks the kernel by dcbnl netlink, which needs no privilege. [`treatments`] sums up all
//! RDMA ports of a host for [`laxity_types::marking::decide`]. [`counters_of`] finds the counters
//! of what passes a NIC. [`owner`] says which device owns the port of a virtual function or a
//! subfunction. Switches can't be seen from a host.
#![forbid(unsafe_code)]

mod counters;
mod dcbnl;
mod functions;
mod map;
mod ports;
mod rates;

pub use counters::{DirectionCounts, NicCounts, Pauses, device_of};
pub use dcbnl::{DcbError, pauses, query};
pub use functions::{NicCounters, counters_of};
pub use map::{PRIORITIES, PriorityMap, Selection, Trust};
pub use ports::{RdmaPort, ecn, is_called, map_of, owner, rdma_ports, treatments};
pub use rates::{exists, folder_of, is_rdma, nics, rate};
