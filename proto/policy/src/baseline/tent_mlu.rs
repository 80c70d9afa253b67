//! TENT with its arbitration by predicted MLU: Mooncake's transfer engine as it is since July 2026.
//!
//! arXiv 2604.00368, and the pull requests of kvcache-ai/Mooncake that added deadlines: #2764
//! (transfers that cannot be in time are dropped), #2794 (slices for one NIC are posted by
//! predicted MLU) and #3780 (what MLU is predicted from). `tent_edf` is the older rule. At time `t`
//! a flow of `size_rem` bytes on a port of rate `B` has
//!
//! ```text
//! MLU = (size_rem / B) / (D − t)     infinite if D ≤ t, 0 without a deadline
//! ```
//!
//! Rules, in order:
//! 1. static priorities by stage: collectives, KV reuse, last stage;
//! 2. inside a priority the highest MLU is first, equals by arrival;
//! 3. a flow of the last stage with `MLU ≥ 1` is dropped.
//!
//! Departures:
//! * TENT sees no collectives. They have the first priority, the most favourable one;
//! * TENT cancels a dropped transfer, and the engine computes its KV cache again. Here decode
//!   cannot start without the transfer, so it moves to the scavenger. KV reuse is never dropped,
//!   because its whole batch waits;
//! * MLU is predicted when a flow arrives, after each of its permits, and once per promotion period
//!   in between, not before each post. The bytes that are posted already, at most a window, are not
//!   counted as ahead: they are ahead of all candidates alike;
//! * TENT also admits transfers by earliest deadline (#2763), in front of the NIC. All that is
//!   admitted meets again at the NIC, where MLU decides. Here everything is admitted;
//! * promotion by a fixed slack (#2814) is left out, because it is off by default.

use laxity_types::{Level, Stage};

use super::key_rank;
use crate::config::LinkConfig;
use crate::discipline::{Check, Discipline, Feasibility, QueuePosition};
use crate::link::flows::Flow;
use crate::link::port::Port;
use crate::link::queue::{Group, GroupBy, QueueId, Rank};
use crate::time::{Span, Time};

/// Steps of `1 / MLU` per unit.
const STEPS: u128 = 1 << 16;

/// The policy that orders flows by stage, and then by predicted MLU.
#[derive(Debug)]
pub(crate) struct TentMlu {
    period: Span,
}

impl TentMlu {
    pub(crate) fn new(config: &LinkConfig) -> Self {
        Self { period: config.promotion_period.max(Span(1)) }
    }

    /// Returns the time that the rest of the flow takes on an otherwise idle port.
    fn needs(port: &Port, flow: &Flow) -> Span {
        Span::transfer(flow.remaining, port.full_rate)
    }

    /// Reports whether the flow is of the last stage and cannot be in time.
    fn is_hopeless(port: &Port, now: Time, flow: &Flow) -> bool {
        let dated = flow.spec.stage == Stage::P2d && flow.deadline != Time::NEVER;
        dated && flow.deadline.since(now) <= Self::needs(port, flow)
    }

    /// Returns `1 / MLU` in [`STEPS`], so that the highest MLU comes first.
    fn order(port: &Port, now: Time, flow: &Flow) -> u64 {
        if flow.deadline == Time::NEVER {
            return u64::MAX;
        }
        let window = u128::from(flow.deadline.since(now).0);
        let inverse = window * STEPS / u128::from(Self::needs(port, flow).0.max(1));
        u64::try_from(inverse).unwrap_or(u64::MAX - 1)
    }
}

impl Discipline for TentMlu {
    fn place(&self, port: &Port, now: Time, flow: &Flow) -> QueuePosition {
        if Self::is_hopeless(port, now, flow) {
            return QueuePosition::scavenger();
        }
        let queue: QueueId = match flow.spec.stage {
            Stage::Collective => 0,
            Stage::KvReuse => 1,
            Stage::P2d => 2,
            _ => return QueuePosition::scavenger(),
        };
        let level = Level(queue + 2).min(port.ladder.lowest());
        let order = Self::order(port, now, flow);
        let check_at =
            if order == u64::MAX || order == 0 { Time::NEVER } else { now + self.period };
        QueuePosition { check_at, ..QueuePosition::new(queue, GroupBy::Port, order, level) }
    }

    fn rank(&self, _port: &Port, _now: Time, group: &Group) -> Option<Rank> {
        key_rank(1 + group.queue, 0, group)
    }

    fn served(&self, port: &Port, now: Time, flow: &Flow, _bytes: u64) -> Option<QueuePosition> {
        Some(self.place(port, now, flow))
    }

    fn check(&self, port: &Port, now: Time, flow: &Flow) -> Check {
        Check::Move(self.place(port, now, flow))
    }

    fn feasibility(&self, port: &Port, now: Time, flow: &Flow, _group: &Group) -> Feasibility {
        if Self::is_hopeless(port, now, flow) { Feasibility::FlowLost } else { Feasibility::Alive }
    }

    fn credit_bar(&self) -> Rank {
        Rank { tier: 1, major: u64::MAX, minor: u64::MAX, seq: u64::MAX }
    }
}
