//! Two classes with weights 99 : 1, collectives over everything else.
//!
//! DualPath (Wu et al., arXiv 2602.21548) carries the collectives of a model in one virtual lane
//! and all other traffic, KV cache included, in a second one. The arbiter gives the first about
//! 99 % of a busy port, so the second never starves. `two_class` is the same without the 1 %.
//!
//! Here the second class is the scavenger, because the scavenger has just that guarantee: while
//! collectives wait, it gets [`scavenger_permille`](LinkConfig::scavenger_permille) of the port, 10
//! by default. Inside a class flows share fairly.
//!
//! Departures:
//! * a virtual lane is a property of each link. The daemon shares its own port this way, and the
//!   fabric serves the two levels as it is configured to. The simulator shares each port this way;
//! * weights and background are in the second class, too. DualPath moves none;
//! * DualPath also reads KV cache over the NICs of idle decode engines. That is routing, and no
//!   policy of a port.

use laxity_types::{Level, Stage};

use super::{share_rank, shared};
use crate::config::{Granularity, LinkConfig};
use crate::discipline::{Discipline, QueuePosition};
use crate::link::flows::{Flow, Tie};
use crate::link::port::Port;
use crate::link::queue::{Group, Rank};
use crate::time::Time;

/// The policy that serves collectives and all else in a ratio of 99 : 1.
#[derive(Debug)]
pub(crate) struct TwoClass99;

impl TwoClass99 {
    pub(crate) fn new(_config: &LinkConfig) -> Self {
        Self
    }
}

impl Discipline for TwoClass99 {
    fn place(&self, _port: &Port, _now: Time, flow: &Flow) -> QueuePosition {
        match flow.spec.stage {
            Stage::Collective => shared(0, Granularity::Flow, Level::FIRST_UNRESERVED),
            _ => QueuePosition { tie: Tie::Share, ..QueuePosition::scavenger() },
        }
    }

    fn rank(&self, _port: &Port, _now: Time, group: &Group) -> Option<Rank> {
        share_rank(1, group)
    }

    fn collective_level(&self) -> Option<Level> {
        Some(Level::FIRST_UNRESERVED)
    }
}
