//! Two static classes: collectives above all KV traffic, as operators configure today.
//!
//! This baseline is not in the paper. It shows what one line of switch configuration achieves.
//! Inside a class flows share fairly, as under static DSCP. Collectives have `P_2` and KV traffic
//! has `P_K`. Weights and background go to the scavenger.

use laxity_types::{Level, Stage};

use super::{share_rank, shared};
use crate::config::{Granularity, LinkConfig};
use crate::discipline::{Discipline, QueuePosition};
use crate::link::flows::Flow;
use crate::link::port::Port;
use crate::link::queue::{Group, QueueId, Rank};
use crate::time::Time;

const COLLECTIVE: QueueId = 0;
const KV: QueueId = 1;

#[derive(Debug)]
pub(crate) struct TwoClass;

impl TwoClass {
    pub(crate) fn new(_config: &LinkConfig) -> Self {
        Self
    }
}

impl Discipline for TwoClass {
    fn place(&self, port: &Port, _now: Time, flow: &Flow) -> QueuePosition {
        match flow.spec.stage {
            Stage::Collective => shared(COLLECTIVE, Granularity::Flow, Level::FIRST_UNRESERVED),
            Stage::KvReuse | Stage::P2d => shared(KV, Granularity::Flow, port.ladder.lowest()),
            _ => QueuePosition::scavenger(),
        }
    }

    fn rank(&self, _port: &Port, _now: Time, group: &Group) -> Option<Rank> {
        share_rank(1 + group.queue, group)
    }

    fn collective_level(&self) -> Option<Level> {
        Some(Level::FIRST_UNRESERVED)
    }

    fn credit_bar(&self) -> Rank {
        Rank { tier: 1, major: u64::MAX, minor: u64::MAX, seq: u64::MAX }
    }
}
