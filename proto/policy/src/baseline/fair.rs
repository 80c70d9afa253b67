//! Fair sharing: max-min between flows (or coflows), which is what a network does by itself.
//!
//! The "FS" of MFS §6.3: start-time fair queueing in chunks. The flow with the fewest bytes served
//! since it joined is next. All flows have the lowest level on the wire.

use super::{share_rank, shared};
use crate::config::{Granularity, LinkConfig};
use crate::discipline::{Discipline, QueuePosition};
use crate::link::flows::Flow;
use crate::link::port::Port;
use crate::link::queue::{Group, Rank};
use crate::time::Time;

#[derive(Debug)]
pub(crate) struct Fair {
    granularity: Granularity,
}

impl Fair {
    pub(crate) fn new(config: &LinkConfig) -> Self {
        Self { granularity: config.granularity }
    }
}

impl Discipline for Fair {
    fn place(&self, port: &Port, _now: Time, _flow: &Flow) -> QueuePosition {
        shared(0, self.granularity, port.ladder.lowest())
    }

    fn rank(&self, _port: &Port, _now: Time, group: &Group) -> Option<Rank> {
        share_rank(1, group)
    }
}
