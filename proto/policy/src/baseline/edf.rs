//! Earliest deadline first for flows with an explicit deadline; the others share what is left.
//!
//! The "EDF" of MFS §6.3: only the last stage has an explicit deadline, and without one EDF
//! "degenerates into fair sharing" (§3.2). `edf_low` reverses the classes and puts explicit
//! deadlines *below* the implicit ones. It shows how much of a gain comes from serving the last
//! stage last. Deadlines that have passed stay first, which §4.3 criticises as EDF's domino effect.
//! On the wire the first class has `P_2` and the other `P_K`.

use laxity_types::Level;

use super::{is_explicit, key_rank, scope, share_rank, shared};
use crate::config::{Granularity, LinkConfig};
use crate::discipline::{Discipline, QueuePosition};
use crate::link::flows::Flow;
use crate::link::port::Port;
use crate::link::queue::{Group, QueueId, Rank};
use crate::time::Time;

const EXPLICIT: QueueId = 0;
const IMPLICIT: QueueId = 1;

/// The `edf` and `edf_low` policies.
#[derive(Debug)]
pub(crate) struct Edf {
    granularity: Granularity,
    explicit_first: bool,
}

impl Edf {
    /// Creates the `edf` policy.
    pub(crate) fn explicit_first(config: &LinkConfig) -> Self {
        Self { granularity: config.granularity, explicit_first: true }
    }

    /// Creates the `edf_low` policy.
    pub(crate) fn explicit_last(config: &LinkConfig) -> Self {
        Self { explicit_first: false, ..Self::explicit_first(config) }
    }

    fn level(&self, port: &Port, explicit: bool) -> Level {
        if explicit == self.explicit_first { Level::FIRST_UNRESERVED } else { port.ladder.lowest() }
    }
}

impl Discipline for Edf {
    fn place(&self, port: &Port, _now: Time, flow: &Flow) -> QueuePosition {
        let explicit = is_explicit(flow);
        let level = self.level(port, explicit);
        if !explicit {
            return shared(IMPLICIT, self.granularity, level);
        }
        QueuePosition::new(EXPLICIT, scope(self.granularity), flow.deadline.0, level)
    }

    fn rank(&self, _port: &Port, _now: Time, group: &Group) -> Option<Rank> {
        let (deadline, _, _, _) = group.head()?;
        if group.queue == IMPLICIT {
            return share_rank(1 + u8::from(self.explicit_first), group);
        }
        let tier = 1 + u8::from(!self.explicit_first);
        if self.granularity == Granularity::Flow {
            // One group holds all such flows in order, so the rank of the group need not change.
            return key_rank(tier, 0, group);
        }
        key_rank(tier, deadline, group)
    }
}
