//! The interface of a policy: where a flow waits, how groups are ranked, when a flow is promoted.
//!
//! [`Link`](crate::link::Link) keeps the queues, the window, the counters and the timers. A
//! [`Discipline`] supplies the rules (MFS §4.5 for `mfs`, architecture §4.2 for the others). Every
//! rule is a pure function of the port's state and `now`. `policies.rs` lists the disciplines.

use core::fmt::Debug;

use laxity_types::Level;

use crate::event::FlowSpec;
use crate::link::flows::{Flow, SlotId, Tie};
use crate::link::port::Port;
use crate::link::queue::{Group, GroupBy, QueueId, Rank, SCAVENGER};
use crate::time::Time;

/// Where a flow waits: in which queue and group, at which level, and in which order there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueuePosition {
    pub(crate) queue: QueueId,
    pub(crate) scope: GroupBy,
    /// Order among the members of the group. Smaller is served first.
    pub(crate) order: u64,
    pub(crate) tie: Tie,
    pub(crate) level: Level,
    /// Whether the level follows the batch's progress, as [`Discipline::level_by_rli`] computes it.
    pub(crate) promotable: bool,
    /// When to call [`Discipline::check`], or [`Time::NEVER`].
    pub(crate) check_at: Time,
}

impl QueuePosition {
    /// Returns a position in `queue` with a fixed level, where equal flows are served by arrival.
    pub(crate) const fn new(queue: QueueId, scope: GroupBy, order: u64, level: Level) -> Self {
        Self {
            queue,
            scope,
            order,
            tie: Tie::Arrival,
            level,
            promotable: false,
            check_at: Time::NEVER,
        }
    }

    /// Returns a position in the scavenger, in the order of arrival.
    pub(crate) const fn scavenger() -> Self {
        Self::new(SCAVENGER, GroupBy::Port, 0, Level::SCAVENGER)
    }
}

/// Outcome of a check of a waiting flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    /// The flow stays where it is. The next check is at this instant.
    Later(Time),
    /// The flow moves to this position.
    Move(QueuePosition),
}

/// Whether a flow can still make its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Feasibility {
    /// The flow can meet its deadline, or has none.
    Alive,
    /// The flow cannot meet its deadline and moves to the scavenger.
    FlowLost,
    /// The flow cannot meet its deadline and moves to this position.
    Behind(QueuePosition),
    /// The request cannot meet its deadline. Its last-stage flows move to the scavenger.
    RequestLost,
}

/// The rule that gives a waiting flow its level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LevelRule {
    /// Any rule of the policy that is not listed here.
    Policy,
    /// Collectives have one level.
    Collective,
    /// The relative layer index of KV reuse (MFS §4.4.1).
    Rli,
    /// Flows of this stage were held up, by other ports (`link/late_reuse.rs`) or by collectives
    /// (`link/held_up.rs`).
    Late,
    /// The laxity: time left minus work left.
    Laxity,
    /// The minimal link utilisation (MFS §4.3).
    Mlu,
    /// The flow goes in one piece, which exceeds the window.
    Piece,
    /// No request waits for flows of this stage, so they go to the scavenger.
    Undated,
    /// The order in force prunes the flow's request.
    Pruned,
    /// The flow, or its request, cannot make its deadline any more.
    Lost,
}

/// A flow on a port where no other flow waits, and which need not wait itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UncontendedFlow<'a> {
    pub(crate) spec: &'a FlowSpec,
    /// The flow's own deadline, or its request's.
    pub(crate) deadline: Time,
    /// The flow's batch, or [`NULL_BATCH`](crate::link::batch_table::NULL_BATCH) if unknown.
    pub(crate) batch: SlotId,
    /// The flow's request, or [`NONE`](crate::link::flows::NONE) if unknown.
    pub(crate) request: SlotId,
}

impl UncontendedFlow<'_> {
    /// Returns the record that the flow would have if it waited.
    pub(crate) fn waiting(&self) -> Flow {
        Flow::new(*self.spec, self.deadline, self.batch, self.request)
    }
}

/// The rules by which one policy serves the flows of a port.
pub(crate) trait Discipline: Debug + Send + Sync {
    /// Returns where `flow` waits when it arrives or when the policy changes. `flow.level` is the
    /// lowest level that the flow may get.
    fn place(&self, port: &Port, now: Time, flow: &Flow) -> QueuePosition;

    /// Returns the rank of a group that has members, or `None` while no member may be served.
    fn rank(&self, port: &Port, now: Time, group: &Group) -> Option<Rank>;

    /// Returns the level for a permit at `now` of the flow at the head of `group`. The link uses
    /// the higher of this level and the flow's current level.
    fn level(&self, _port: &Port, _now: Time, flow: &Flow, _group: &Group) -> Level {
        flow.level
    }

    /// Returns the rule that gives a flow in the levels its level, and when its work must begin,
    /// [`Time::NEVER`] if unknown. It is for operators and decides nothing.
    fn rule(&self, _port: &Port, _now: Time, _flow: &Flow, _group: &Group) -> (LevelRule, Time) {
        (LevelRule::Policy, Time::NEVER)
    }

    /// Returns the level at this RLI of a flow whose level follows its batch's progress.
    fn level_by_rli(&self, _port: &Port, _rli: u32) -> Level {
        Level::SCAVENGER
    }

    /// Returns the level of `flow` if no other flow waits on the port. The result equals that of
    /// [`Discipline::place`] followed by [`Discipline::level`].
    fn lone_level(&self, port: &Port, now: Time, flow: &UncontendedFlow<'_>) -> Level {
        self.place(port, now, &flow.waiting()).level
    }

    /// Returns the level of all collectives if it is fixed. The fast path then skips other rules.
    fn collective_level(&self) -> Option<Level> {
        None
    }

    /// Returns the highest level of flows that go by slack, if the discipline asks whether
    /// collectives hold these up (`link/held_up.rs`).
    fn held_up_from(&self) -> Option<Level> {
        None
    }

    /// Returns the largest permit for a flow that can be cut, given the configured chunk.
    fn chunk_bytes(&self, _spec: &FlowSpec, configured: u64) -> u64 {
        configured
    }

    /// Returns the new position of `flow` after a permit for part of it, or `None` if it stays.
    fn served(&self, _port: &Port, _now: Time, _flow: &Flow, _bytes: u64) -> Option<QueuePosition> {
        None
    }

    /// Decides whether a waiting flow moves. The link calls it when the flow's `check_at` has come.
    fn check(&self, _port: &Port, _now: Time, _flow: &Flow) -> Check {
        Check::Later(Time::NEVER)
    }

    /// Reports whether the flow at the head of `group` can still make its deadline.
    fn feasibility(&self, _port: &Port, _now: Time, _flow: &Flow, _group: &Group) -> Feasibility {
        Feasibility::Alive
    }

    /// Reports whether checks wait for a layer boundary while the batch computes (MFS §4.3).
    fn checks_at_boundaries(&self) -> bool {
        false
    }

    /// Reports whether the current order puts `flow` into the scavenger.
    fn prunes(&self, _port: &Port, _flow: &Flow) -> bool {
        false
    }

    /// Reports whether bytes in flight are bounded by peer (`link/peers.rs`). Groups are then split
    /// by peer, so the rank of a group must depend on its head and on the group's request only.
    fn bounds_peers(&self) -> bool {
        false
    }

    /// Reports whether starved flows are served by turns (`link/starved.rs`). The baselines return
    /// false, because their definitions allow starvation.
    fn relieves_starved(&self) -> bool {
        false
    }

    /// Returns the worst rank at which a waiting group prevents credit for collectives.
    fn credit_bar(&self) -> Rank {
        Rank::LAST
    }
}
