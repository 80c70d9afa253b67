//! What makes a policy: where a flow waits, how groups stand against each other, when to promote.
//!
//! [`Link`](crate::link::Link) keeps the queues, the window, the accounts and the timers. A
//! [`Discipline`] is the rule that fills them in (MFS §4.5 for `mfs`, architecture §4.2 for the
//! others). Every rule is a pure function of the port's state and `now`. `policies.rs` has the list
//! of disciplines.

use core::fmt::Debug;

use laxity_types::Level;

use crate::event::FlowSpec;
use crate::link::flows::{Flow, Slot, Tie};
use crate::link::port::Port;
use crate::link::queue::{Group, QueueId, Rank, SCAVENGER, Scope};
use crate::time::Time;

/// Where a flow waits: in which queue and group, at which level, and in which order there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueuePosition {
    pub(crate) queue: QueueId,
    pub(crate) scope: Scope,
    /// Order among the members of the group.
    pub(crate) order: u64,
    pub(crate) tie: Tie,
    pub(crate) level: Level,
    /// The level is that of [`Discipline::climb`] at each moment, for the group as a whole.
    pub(crate) climbs: bool,
    /// When to ask [`Discipline::check`], [`Time::NEVER`] for not at all.
    pub(crate) check_at: Time,
}

impl QueuePosition {
    /// In `queue`, served by arrival, at a level that stays.
    pub(crate) const fn new(queue: QueueId, scope: Scope, order: u64, level: Level) -> Self {
        Self {
            queue,
            scope,
            order,
            tie: Tie::Arrival,
            level,
            climbs: false,
            check_at: Time::NEVER,
        }
    }

    /// In the scavenger, in the order of arrival.
    pub(crate) const fn scavenger() -> Self {
        Self::new(SCAVENGER, Scope::Port, 0, Level::SCAVENGER)
    }
}

/// Outcome of looking at a waiting flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    /// Nothing to do; look again then.
    Later(Time),
    /// It belongs elsewhere now.
    Move(QueuePosition),
}

/// Whether a flow can still make its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Feasibility {
    /// It can, or has none.
    Alive,
    /// It cannot: scavenger.
    FlowLost,
    /// It cannot, and waits there from now on.
    Behind(QueuePosition),
    /// Its whole request cannot: scavenger for this flow and the last-stage flows after it.
    RequestLost,
}

/// A flow that nothing waits beside, and that need not wait itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lone<'a> {
    pub(crate) spec: &'a FlowSpec,
    /// The flow's own deadline, or its request's.
    pub(crate) deadline: Time,
    /// Its batch; [`NULL_BATCH`](crate::link::batch_table::NULL_BATCH) if none is known.
    pub(crate) batch: Slot,
    /// Its request, [`NONE`](crate::link::flows::NONE) if none is known.
    pub(crate) request: Slot,
}

impl Lone<'_> {
    /// The record that it would have if it waited.
    pub(crate) fn waiting(&self) -> Flow {
        Flow::new(*self.spec, self.deadline, self.batch, self.request)
    }
}

/// One policy.
pub(crate) trait Discipline: Debug + Send + Sync {
    /// Where `flow` waits when it arrives (or when the policy changes under it). `flow.level`
    /// is the lowest level that it may get.
    fn place(&self, port: &Port, now: Time, flow: &Flow) -> QueuePosition;

    /// Standing of a group that has members, `None` while none of them may be served.
    fn rank(&self, port: &Port, now: Time, group: &Group) -> Option<Rank>;

    /// Level of the flow at the head of `group` for a permit now. The link takes the higher of
    /// this and the level that the flow has.
    fn level(&self, _port: &Port, _now: Time, flow: &Flow, _group: &Group) -> Level {
        flow.level
    }

    /// Level of a climbing flow at this RLI.
    fn climb(&self, _port: &Port, _rli: u32) -> Level {
        Level::SCAVENGER
    }

    /// Level of `flow` if it is alone on the port: what [`Discipline::place`] and
    /// [`Discipline::level`] would come to.
    fn lone_level(&self, port: &Port, now: Time, flow: &Lone<'_>) -> Level {
        self.place(port, now, &flow.waiting()).level
    }

    /// The level that every collective gets, if that is one: spares the fast path the rest.
    fn collective_level(&self) -> Option<Level> {
        None
    }

    /// Where `flow` waits after a permit that left something over, `None` if that is where it is.
    fn served(&self, _port: &Port, _now: Time, _flow: &Flow, _bytes: u64) -> Option<QueuePosition> {
        None
    }

    /// Looks at a flow whose time to be looked at has come.
    fn check(&self, _port: &Port, _now: Time, _flow: &Flow) -> Check {
        Check::Later(Time::NEVER)
    }

    /// Whether the flow at the head of `group` is worth serving.
    fn feasibility(&self, _port: &Port, _now: Time, _flow: &Flow, _group: &Group) -> Feasibility {
        Feasibility::Alive
    }

    /// Whether checks wait for a layer boundary while the batch computes (MFS §4.3).
    fn checks_at_boundaries(&self) -> bool {
        false
    }

    /// Whether the order that holds puts `flow` into the scavenger.
    fn prunes(&self, _port: &Port, _flow: &Flow) -> bool {
        false
    }

    /// Whether flows that have waited for long are served by turns (`link/starved.rs`). The
    /// baselines starve whom their definitions starve.
    fn relieves_starved(&self) -> bool {
        false
    }

    /// A waiting group of this rank or above leaves no credit for collectives.
    fn credit_bar(&self) -> Rank {
        Rank::LAST
    }
}
