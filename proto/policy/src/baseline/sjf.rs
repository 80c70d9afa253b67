//! Shortest job first: the flow (or coflow) with the fewest bytes left is next.
//!
//! The "SJF" of MFS §6.3, preemptive by chunk (shortest *remaining* first, as pFabric does). A
//! coflow's size is the sum of its waiting bytes. On the wire, flows have levels by size.

use laxity_types::Level;

use super::{key_rank, scope, size_level};
use crate::config::{Granularity, LinkConfig};
use crate::discipline::{Discipline, QueuePosition};
use crate::link::flows::Flow;
use crate::link::port::Port;
use crate::link::queue::{Group, GroupBy, Rank};
use crate::time::Time;

#[derive(Debug)]
pub(crate) struct Sjf {
    granularity: Granularity,
}

impl Sjf {
    pub(crate) fn new(config: &LinkConfig) -> Self {
        Self { granularity: config.granularity }
    }
}

impl Discipline for Sjf {
    fn place(&self, port: &Port, _now: Time, flow: &Flow) -> QueuePosition {
        let level = size_level(port, Level::HIGHEST, flow.remaining);
        let order = if self.granularity == Granularity::Flow { flow.remaining } else { 0 };
        QueuePosition::new(0, scope(self.granularity), order, level)
    }

    fn rank(&self, _port: &Port, _now: Time, group: &Group) -> Option<Rank> {
        let key = if group.scope == GroupBy::Coflow { group.bytes } else { 0 };
        key_rank(1, key, group)
    }

    fn served(&self, port: &Port, now: Time, flow: &Flow, _bytes: u64) -> Option<QueuePosition> {
        (self.granularity == Granularity::Flow).then(|| self.place(port, now, flow))
    }
}
