//! A host's NICs: their rates, and what they do with a DSCP, which is its priority, its queue, and
//! whether PFC and ECN hold there.
//!
//! [`query`] asks the kernel by dcbnl netlink, which needs no privilege. [`treatments`] sums up all
//! RDMA ports of a host for [`laxity_types::marking::decide`]. [`counters_of`] finds the counters
//! of what passes a NIC. [`owner`] says which device owns the port of a virtual function or a
//! subfunction. Switches can't be seen from a host.
#![deny(unsafe_code)]

mod counters;
mod dcbnl;
#[allow(unsafe_code, reason = "drivers' statistics have no other way than an ioctl")]
mod ethtool;
mod functions;
mod map;
mod ports;
mod rates;

pub use counters::{DirectionCounts, NicCounts, NicDriver, device_of};
pub use dcbnl::{DcbError, query};
pub use functions::{NicCounters, counters_of};
pub use map::{PRIORITIES, PriorityMap, Selection, Trust};
pub use ports::{RdmaPort, ecn, is_called, map_of, owner, rdma_ports, treatments};
pub use rates::{exists, folder_of, is_rdma, nics, rate};
