//! The `mfs` policy: the rules of the paper without Laxity's changes.
//!
//! Implements MFS §4.5 over §4.3 (MLU for the last stage) and §4.4.1 (RLI for early stages):
//!
//! 1. `P_1`: urgent last-stage flows only;
//! 2. early stages, by level, then RLI, then the batch's position in `σ`, then arrival;
//! 3. last stage `P_2 … P_K`, by level, `σ`, arrival;
//! 4. the scavenger.
//!
//! With the thresholds that §4.3 recommends (`U = 0.5, E = 4`, so `Q_1 = 0.125`) a flow enters
//! `P_1` once it needs an eighth of the port. That is far before the last safe moment of §3: with
//! the numbers of Table 1, C is promoted at once and B misses
//! (`tests/policy/paper_examples.rs`).
//!
//! Departure: under these rules alone, work above them can starve a last stage without a deadline
//! and KV reuse of a distant layer. As in `laxity`, starved flows take turns on a small share of
//! the port (`link/starved.rs`). The rules ignore deadlines of KV reuse and collectives, because
//! the paper's are implicit.
//!
//! The paper leaves three points open. This module reads them so:
//! * MLU is taken per flow, that is per request and layer. Taken over all bytes that the request
//!   has left, it gained nothing beyond noise.
//! * §4.5 gives early stages precedence over *waiting* last-stage flows of every level (rule 2
//!   before rule 3). §4.2 reads as if the level came first; that changed no figure.
//! * A last-stage flow without a deadline waits in `P_K`. A last-stage flow whose deadline has
//!   passed goes to the scavenger (§4.3 calls it lost).

use laxity_types::{Level, Stage};

use crate::discipline::{
    Check, Discipline, Feasibility, LevelRule, QueuePosition, UncontendedFlow,
};
use crate::link::flows::Flow;
use crate::link::port::Port;
use crate::link::queue::{Group, GroupBy, QueueId, Rank};
use crate::mlu;
use crate::rmlq::promoted;
use crate::scavenger;
use crate::time::{Span, Time};

const REUSE: QueueId = 0;
const COLLECTIVE: QueueId = 1;
/// The queue of last-stage flows of `P_l` is `LAST_STAGE + l`.
const LAST_STAGE: QueueId = 2;

#[derive(Debug)]
pub(crate) struct Mfs;

impl Mfs {
    /// Returns the tier and the major number of a [`Rank`] under rules 1 to 3.
    fn rank_of(level: Level, last_stage: bool, rli: u32) -> (u8, u64) {
        let tier = match (level, last_stage) {
            (Level::HIGHEST, true) => 0,
            (_, true) => 2,
            _ => 1,
        };
        let rli = u64::from(rli.min(u32::from(u16::MAX) + 1));
        (tier, u64::from(level.0) << 32 | u64::from(last_stage) << 31 | rli)
    }

    /// Returns where a last-stage flow waits, or `None` if its deadline has passed.
    fn place_last(port: &Port, now: Time, flow: &Flow) -> Option<QueuePosition> {
        let rho = port.load.rho(now);
        let rate = port.full_rate;
        let urgency = mlu::mlu(flow.remaining, flow.deadline, now, rate, rho)?;
        let level = promoted(port.ladder.level_of(urgency), flow.level.min(port.ladder.lowest()));
        let mut position = QueuePosition::new(LAST_STAGE + level.0, GroupBy::Batch, 0, level);
        position.check_at = Self::next_look(port, now, flow, level, rho);
        Some(position)
    }

    fn next_look(port: &Port, now: Time, flow: &Flow, level: Level, rho: f64) -> Time {
        let rate = port.full_rate;
        let crossing = port.ladder.leaves_at(level).and_then(|threshold| {
            mlu::crossing(flow.remaining, flow.deadline, rate, rho, threshold)
        });
        let Some(crossing) = crossing else { return Time::NEVER };
        let period = port.config.promotion_period;
        let at_boundaries = now < port.batches.batch(flow.batch).periodic_from(period);
        // A boundary promotes the flows that crossed before it, so it needs the exact instant.
        let period = if at_boundaries { Span(1) } else { period };
        mlu::look_again(now, crossing, period)
    }
}

impl Discipline for Mfs {
    fn place(&self, port: &Port, now: Time, flow: &Flow) -> QueuePosition {
        if scavenger::claims(port, &flow.spec, flow.batch, flow.request) {
            return QueuePosition::scavenger();
        }
        match flow.spec.stage {
            Stage::Collective => {
                QueuePosition::new(COLLECTIVE, GroupBy::Batch, 0, Level::FIRST_UNRESERVED)
            }
            Stage::KvReuse => {
                let level = port.ladder.early(port.rli(flow.batch, flow.spec.layer));
                let order = u64::from(flow.spec.layer.0);
                QueuePosition {
                    promotable: true,
                    ..QueuePosition::new(REUSE, GroupBy::Batch, order, level)
                }
            }
            _ => Self::place_last(port, now, flow).unwrap_or(QueuePosition::scavenger()),
        }
    }

    fn lone_level(&self, port: &Port, now: Time, flow: &UncontendedFlow<'_>) -> Level {
        if scavenger::claims(port, flow.spec, flow.batch, flow.request) {
            return Level::SCAVENGER;
        }
        match flow.spec.stage {
            Stage::P2d => {
                // The level that `place` gives. The time of the next check is not needed here.
                let rho = port.load.rho(now);
                let urgency = mlu::mlu(flow.spec.bytes, flow.deadline, now, port.full_rate, rho);
                urgency.map_or(Level::SCAVENGER, |urgency| port.ladder.level_of(urgency))
            }
            Stage::KvReuse => port.ladder.early(port.rli(flow.batch, flow.spec.layer)),
            _ => self.place(port, now, &flow.waiting()).level,
        }
    }

    fn rank(&self, port: &Port, _now: Time, group: &Group) -> Option<Rank> {
        let (_, _, seq, slot) = group.head()?;
        let (tier, major) = match group.queue {
            COLLECTIVE => Self::rank_of(Level::FIRST_UNRESERVED, false, 0),
            REUSE => {
                let rli = port.rli(group.batch, port.flows.get(slot).spec.layer);
                Self::rank_of(port.ladder.early(rli), false, rli)
            }
            queue => Self::rank_of(Level(queue - LAST_STAGE), true, 0),
        };
        let minor = u64::from(port.batches.batch(group.batch).sigma);
        Some(Rank { tier, major, minor, seq })
    }

    fn level(&self, port: &Port, _now: Time, flow: &Flow, group: &Group) -> Level {
        if group.queue == REUSE {
            port.ladder.early(port.rli(flow.batch, flow.spec.layer))
        } else {
            flow.level
        }
    }

    fn rule(&self, _: &Port, _: Time, _: &Flow, group: &Group) -> (LevelRule, Time) {
        let rule = match group.queue {
            REUSE => LevelRule::Rli,
            COLLECTIVE => LevelRule::Collective,
            _ => LevelRule::Mlu,
        };
        (rule, Time::NEVER)
    }

    fn level_by_rli(&self, port: &Port, rli: u32) -> Level {
        port.ladder.early(rli)
    }

    fn collective_level(&self) -> Option<Level> {
        Some(Level::FIRST_UNRESERVED)
    }

    fn check(&self, port: &Port, now: Time, flow: &Flow) -> Check {
        match Self::place_last(port, now, flow) {
            None => Check::Move(QueuePosition::scavenger()),
            Some(position) if position.level < flow.level => Check::Move(position),
            Some(position) => Check::Later(position.check_at),
        }
    }

    fn feasibility(&self, _port: &Port, now: Time, flow: &Flow, group: &Group) -> Feasibility {
        let lost = group.queue > LAST_STAGE && flow.remaining > 0 && flow.deadline <= now;
        if lost { Feasibility::FlowLost } else { Feasibility::Alive }
    }

    fn checks_at_boundaries(&self) -> bool {
        true
    }

    fn prunes(&self, port: &Port, flow: &Flow) -> bool {
        scavenger::claims(port, &flow.spec, flow.batch, flow.request)
    }

    fn relieves_starved(&self) -> bool {
        true
    }

    fn credit_bar(&self) -> Rank {
        let (tier, major) = Self::rank_of(Level::FIRST_UNRESERVED, false, 0);
        Rank { tier, major, minor: u64::MAX, seq: u64::MAX }
    }
}
