//! Karuna: flows with a deadline get just the rate that meets it, the others go by size.
//!
//! Chen et al., SIGCOMM 2016, as MFS §6.3 uses it. A deadline flow has the rate
//! `r = size_rem / time_rem`: after a chunk of `c` bytes at `t` its next chunk is due at
//!
//! ```text
//! t + c / r = t + c · (D − t) / size_rem        size_rem before the chunk, [bytes]; D − t [ns]
//! ```
//!
//! A due chunk precedes everything else, so the minimal rate is met. `karuna` delays a deadline
//! flow even on an idle port, so it is not work-conserving. `karuna_wc` gives idle time to deadline
//! flows. Karuna paces packets. Here a flow is paced in chunks of at most [`PACED_BYTES`], because
//! its first chunk leaves at once: a flow as large as a chunk would not be paced at all. A flow
//! whose deadline has passed goes by size like one without. On the wire, deadline
//! flows have `P_1` and the others have levels by size from `P_2`.

use laxity_types::{Level, Stage};

use super::{is_explicit, size_level};
use crate::config::LinkConfig;
use crate::discipline::{Check, Discipline, QueuePosition};
use crate::event::FlowSpec;
use crate::link::flows::Flow;
use crate::link::port::Port;
use crate::link::queue::{Group, GroupBy, QueueId, Rank};
use crate::time::{Span, Time};

/// Largest permit of a flow with a deadline, in bytes.
const PACED_BYTES: u64 = 256 << 10;

const DUE: QueueId = 0;
const BY_SIZE: QueueId = 1;
const PACED: QueueId = 2;

/// The `karuna` and `karuna_wc` policies.
#[derive(Debug)]
pub(crate) struct Karuna {
    work_conserving: bool,
}

impl Karuna {
    /// Creates the `karuna` policy.
    pub(crate) fn strict(_config: &LinkConfig) -> Self {
        Self { work_conserving: false }
    }

    /// Creates the `karuna_wc` policy.
    pub(crate) fn work_conserving(_config: &LinkConfig) -> Self {
        Self { work_conserving: true }
    }

    fn due(at: Time) -> QueuePosition {
        QueuePosition::new(DUE, GroupBy::Port, at.0, Level::HIGHEST)
    }

    fn by_size(port: &Port, flow: &Flow) -> QueuePosition {
        let level = size_level(port, Level::FIRST_UNRESERVED, flow.remaining);
        QueuePosition::new(BY_SIZE, GroupBy::Port, flow.remaining, level)
    }
}

impl Discipline for Karuna {
    fn place(&self, port: &Port, now: Time, flow: &Flow) -> QueuePosition {
        if is_explicit(flow) && flow.deadline > now {
            Self::due(now)
        } else {
            Self::by_size(port, flow)
        }
    }

    fn rank(&self, _port: &Port, _now: Time, group: &Group) -> Option<Rank> {
        let (_, _, seq, _) = group.head()?;
        let tier = match group.queue {
            DUE => 1,
            BY_SIZE => 2,
            _ if self.work_conserving => 3,
            _ => return None,
        };
        Some(Rank { tier, major: 0, minor: 0, seq })
    }

    fn chunk_bytes(&self, spec: &FlowSpec, configured: u64) -> u64 {
        if spec.stage == Stage::P2d { configured.min(PACED_BYTES) } else { configured }
    }

    fn served(&self, port: &Port, now: Time, flow: &Flow, bytes: u64) -> Option<QueuePosition> {
        if !is_explicit(flow) || flow.deadline <= now {
            return Some(Self::by_size(port, flow));
        }
        let left = u128::from(flow.deadline.since(now).0);
        let size = u128::from(flow.remaining) + u128::from(bytes);
        let pause = Span((u128::from(bytes) * left / size) as u64);
        let next = now + pause;
        if pause == Span::ZERO {
            return Some(Self::due(next));
        }
        Some(QueuePosition {
            check_at: next,
            ..QueuePosition::new(PACED, GroupBy::Port, next.0, Level::HIGHEST)
        })
    }

    fn check(&self, port: &Port, now: Time, flow: &Flow) -> Check {
        if flow.deadline <= now {
            Check::Move(Self::by_size(port, flow))
        } else {
            Check::Move(Self::due(flow.check_at))
        }
    }

    fn credit_bar(&self) -> Rank {
        // A deadline flow that waits for its pace does not prevent credit.
        Rank { tier: 2, major: u64::MAX, minor: u64::MAX, seq: u64::MAX }
    }
}
