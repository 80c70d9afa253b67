//! Earliest deadline first over flows with an explicit deadline; the others share what is left.
//!
//! The "EDF" of MFS §6.3: only the last stage has an explicit deadline, and without one EDF
//! "degenerates into fair sharing" (§3.2). `edf_low` is the same upside down: the explicit
//! deadlines *below* the implicit ones, which asks how much of a gain comes from nothing but
//! putting the last stage last. Deadlines that have passed stay first (the domino effect that
//! §4.3 holds against EDF). On the wire: the first class `P_2`, the other `P_K`.

use laxity_types::Level;

use super::{is_explicit, key_rank, scope, share_rank, shared, tie};
use crate::config::{Granularity, LinkConfig, Ties};
use crate::discipline::{Discipline, QueuePosition};
use crate::link::flows::Flow;
use crate::link::port::Port;
use crate::link::queue::{Group, QueueId, Rank};
use crate::time::Time;

const EXPLICIT: QueueId = 0;
const IMPLICIT: QueueId = 1;

/// See the module.
#[derive(Debug)]
pub(crate) struct Edf {
    granularity: Granularity,
    ties: Ties,
    explicit_first: bool,
}

impl Edf {
    /// `edf`.
    pub(crate) fn explicit_first(config: &LinkConfig) -> Self {
        Self {
            granularity: config.granularity,
            ties: config.ties,
            explicit_first: true,
        }
    }

    /// `edf_low`.
    pub(crate) fn explicit_last(config: &LinkConfig) -> Self {
        Self {
            explicit_first: false,
            ..Self::explicit_first(config)
        }
    }

    fn level(&self, port: &Port, explicit: bool) -> Level {
        if explicit == self.explicit_first {
            Level::FIRST_UNRESERVED
        } else {
            port.ladder.lowest()
        }
    }
}

impl Discipline for Edf {
    fn place(&self, port: &Port, _now: Time, flow: &Flow) -> QueuePosition {
        let explicit = is_explicit(flow);
        let level = self.level(port, explicit);
        if !explicit {
            return shared(IMPLICIT, self.granularity, level);
        }
        QueuePosition {
            tie: tie(self.ties),
            ..QueuePosition::new(EXPLICIT, scope(self.granularity), flow.deadline.0, level)
        }
    }

    fn rank(&self, _port: &Port, _now: Time, group: &Group) -> Option<Rank> {
        let (deadline, _, _, _) = group.head()?;
        if group.queue == IMPLICIT {
            return share_rank(1 + u8::from(self.explicit_first), group);
        }
        let tier = 1 + u8::from(!self.explicit_first);
        if self.granularity == Granularity::Flow {
            // One group for all of them: its members are in order, its own rank need not move.
            return key_rank(tier, 0, self.ties, group);
        }
        key_rank(tier, deadline, self.ties, group)
    }
}
