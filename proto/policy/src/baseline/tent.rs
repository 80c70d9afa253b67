//! Priority, then deadline, with promotion on slack: as Mooncake's TENT orders its own traffic.
//!
//! This baseline is not in the paper. Each stage has a static priority (collectives, KV reuse, last
//! stage). Equal priorities go by deadline, and a flow whose slack
//!
//! ```text
//! slack = D − t − size_rem / B   [ns]
//! ```
//!
//! falls below `slack_threshold` moves to a class above all. TENT itself sees no collectives. Here
//! they have the first priority, the most favourable one that TENT's rule allows. A flow whose
//! deadline has passed is not promoted, but a promoted flow stays promoted. On the wire promoted
//! flows have `P_1`, and each stage has one level below.

use laxity_types::{Level, Stage};

use super::key_rank;
use crate::config::LinkConfig;
use crate::discipline::{Check, Discipline, QueuePosition};
use crate::link::flows::Flow;
use crate::link::port::Port;
use crate::link::queue::{Group, GroupBy, QueueId, Rank};
use crate::time::{Span, Time};

const PROMOTED: QueueId = 0;

/// The `tent_edf` policy.
#[derive(Debug)]
pub(crate) struct Tent {
    threshold: Span,
}

impl Tent {
    pub(crate) fn new(config: &LinkConfig) -> Self {
        Self { threshold: config.slack_threshold }
    }

    /// Returns when the flow's slack falls to the threshold.
    fn promoted_at(&self, port: &Port, flow: &Flow) -> Time {
        if flow.deadline == Time::NEVER {
            return Time::NEVER;
        }
        flow.deadline - Span::transfer(flow.remaining, port.full_rate) - self.threshold
    }

    fn in_queue(queue: QueueId, flow: &Flow, level: Level) -> QueuePosition {
        QueuePosition::new(queue, GroupBy::Port, flow.deadline.0, level)
    }
}

impl Discipline for Tent {
    fn place(&self, port: &Port, now: Time, flow: &Flow) -> QueuePosition {
        let queue: QueueId = match flow.spec.stage {
            Stage::Collective => 1,
            Stage::KvReuse => 2,
            Stage::P2d => 3,
            _ => return QueuePosition::scavenger(),
        };
        let promoted_at = self.promoted_at(port, flow);
        if promoted_at <= now && flow.deadline > now {
            return Self::in_queue(PROMOTED, flow, Level::HIGHEST);
        }
        let level = Level(queue + 1).min(port.ladder.lowest());
        let check_at = if flow.deadline > now { promoted_at } else { Time::NEVER };
        QueuePosition { check_at, ..Self::in_queue(queue, flow, level) }
    }

    fn rank(&self, _port: &Port, _now: Time, group: &Group) -> Option<Rank> {
        key_rank(group.queue, 0, group)
    }

    fn check(&self, port: &Port, now: Time, flow: &Flow) -> Check {
        let promoted_at = self.promoted_at(port, flow);
        if flow.deadline <= now {
            Check::Later(Time::NEVER)
        } else if promoted_at <= now {
            Check::Move(Self::in_queue(PROMOTED, flow, Level::HIGHEST))
        } else {
            Check::Later(promoted_at)
        }
    }

    fn credit_bar(&self) -> Rank {
        Rank { tier: 1, major: u64::MAX, minor: u64::MAX, seq: u64::MAX }
    }
}
