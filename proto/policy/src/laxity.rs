//! The default policy: the paper's structure, with laxity wherever it is known.
//!
//! architecture §4.2; builds on MFS §3.2 (defer and promote), §4.4.1 (RLI) and §4.4.2 (doomed work
//! must not make a batch urgent). Rules, in order:
//!
//! 1. collectives, by the laxity of their batch. The last stage is never promoted above them: it
//!    would help one request, and the delayed collectives would harm all members of their batches;
//! 2. KV reuse and the last stage together, the smallest key first, KV reuse first among equals. KV
//!    reuse has the laxity of its batch, and inside a batch RLI decides. The last stage has the
//!    deadline of its request. Its laxity decides about its level;
//! 3. the scavenger.
//!
//! Laxity at time `t` is time left minus work left. In a comparison at the same `t`, `t` cancels:
//!
//! ```text
//! batch    key = min{ D_r : D_r ≥ t + C } − C       C = layers left · layer time  [ns]
//! request  key = D_r
//!          begins by  D_r − S_r / B                 S_r = its last-stage bytes waiting here
//!          doomed     D_r − (S_r + F) / r < t       F = bytes in flight that go before it
//! ```
//!
//! so a key stays valid between events. Members that cannot meet their deadline (`D_r < t + C`) do
//! not count, so that doomed work never makes a batch urgent. A batch whose members are all doomed
//! comes after all others of its kind. The last stage of a doomed request goes to the scavenger as
//! a whole, since a first token needs all of it. `B` is the port's rate, and `r` that at which the
//! receiver's bytes are delivered at present, of which only a few windows are judged by it
//! (`link/backlog_rate.rs`). With `B` in its place, requests that were late by a little took the
//! port from others.
//!
//! The last stage had the key `D_r − S_r / B` before. With every chunk that was served, `S_r` fell
//! and the request went behind others of equal laxity. So these took turns, and where the port gave
//! less than `B`, all of them were late (docs/notes/whole-transfers.md).
//!
//! A flow's own deadline always counts. If no member of the batch has that deadline, the batch has
//! it while the flow waits. A flow of no known batch has the key `D`. Once `D` has passed, such a
//! flow ranks with the doomed batches: KV reuse is never scavenged. Flows without any deadline come
//! after those with one: KV reuse of known batches by RLI, then the rest, the smallest first, with
//! a bound on how long a larger one waits for smaller ones:
//!
//! ```text
//! flow     key = A + 32 · S / B        A = its arrival [ns], S = its bytes, B = the port's bytes/ns
//! ```
//!
//! So of these flows only those overtake it that arrive within 32 times its own time. By arrival,
//! many small transfers would wait for each large one (docs/notes/whole-transfers.md). Starved
//! flows are served by turns (`link/starved.rs`).
//!
//! Departure from the first design (architecture §9), which put all KV reuse above all of the last
//! stage and compared RLI across batches before laxity. Theorem 1, the reason for RLI, is about one
//! request: across batches "RLI 0 of a loose batch" is not more urgent than "RLI 2 of a tight one",
//! and blocks for a batch that waits in a queue are not more urgent than the last bytes of a
//! request that is due. The present order was chosen from some dozen variants on a few instances.
//! On fresh ones (12 seeds, five mixes of stages, offered load 0.4, 0.6 and 0.8; one port, one
//! request a batch) it met 4 % to 100 % more deadlines than the first design, in all fifteen cases.
//!
//! Levels express the same order on the wire: collectives have `P_2`, as under `mfs`, and the rest
//! go by slack in steps of the threshold base, the first at [`SLACK_PERIODS`] promotion periods.
//! Where collectives leave no room below them, the last stage shares their level
//! (`link/held_up.rs`). With more than two levels, only KV reuse can have `P_1` (see below).
//!
//! A flow that goes in one piece and exceeds the window has the first of these levels at once. Its
//! piece takes long, and can't be promoted any more on its way. Otherwise several such pieces of
//! different levels would be in flight at a time, and share the port if its queues are not strict.
//!
//! Such a piece is doomed by the mean rate `p` that earlier ones reached (`link/piece_rate.rs`),
//! with its own bytes `S`, if it is of the last stage, or KV reuse of no known batch:
//!
//! ```text
//! doomed   ⇔   D − S_r / B < t  or  D − S / p < t                    [ns]
//! ```
//!
//! KV reuse that is needed soon is an exception, because the port of the unit that stores it serves
//! other batches, and a message keeps its level for life:
//!
//! * within [`BLOCKING_LAYERS`] layers it has the level of collectives: its batch waits for it now;
//! * within [`NEAR_LAYERS`] layers it has a level of its own, `P_3`. The last stage begins at
//!   `P_4`: it delays one request, and a block that is late stalls a batch;
//! * the latter has the level of collectives, too, while KV reuse is late. If that is not enough,
//!   both have `P_1` (`link/late_reuse.rs`).
//!
//! Earlier, all near KV reuse had the level of collectives. That made all-to-alls 1 to 3 % longer.
//! Past the knee, this costs more than earlier blocks gain. docs/notes/never-below.md has the
//! measurements.

use laxity_types::{Layer, Level, Stage};

use crate::config::LinkConfig;
use crate::discipline::{Discipline, Feasibility, LevelRule, QueuePosition, UncontendedFlow};
use crate::link::batch_table::NULL_BATCH;
use crate::link::flows::{Flow, NONE, SlotId};
use crate::link::port::Port;
use crate::link::queue::{Group, GroupBy, QueueId, Rank};
use crate::rli::{BLOCKING_LAYERS, NEAR_LAYERS};
use crate::rmlq::promoted;
use crate::scavenger;
use crate::time::{Span, Time};

const COLLECTIVE: QueueId = 0;
const REUSE: QueueId = 1;
const LAST_STAGE: QueueId = 2;
/// Flows without a deadline: P2D, and KV reuse of no known batch.
const UNDATED: QueueId = 3;

/// Key of a batch or flow without a known deadline. It comes after all keys with one.
const UNKNOWN: u64 = u64::MAX - 1;
/// Key of a late flow or of a batch whose members are all doomed. It comes after all others.
const DOOMED: u64 = u64::MAX;
/// RLI of a flow that no layer orders. It is last among equal keys, where arrival decides.
const NO_LAYER: u64 = u64::MAX;
/// Comes after every RLI of a layer.
const AFTER_LAYERS: u64 = 1 << 32;

/// A flow without a deadline is overtaken only by smaller flows that arrive within this many times
/// its own time (its size by the port's rate).
const OVERTAKEN_TIMES: u64 = 32;

/// Promotion periods of slack below which a flow of rule 2 has the highest level of that rule.
const SLACK_PERIODS: u64 = 4;

#[derive(Debug)]
pub(crate) struct Laxity {
    collective: Level,
    /// Level of KV reuse that is needed within [`NEAR_LAYERS`] layers.
    near: Level,
    /// Highest level of the rest of rule 2. With three levels it is the level of near KV reuse.
    by_slack: Level,
    /// Slack from which a flow of rule 2 is one level lower, in ns, ascending; infinite where there
    /// is no lower level.
    edges_ns: [f64; Level::COUNT_MAX as usize],
}

impl Laxity {
    pub(crate) fn new(config: &LinkConfig) -> Self {
        let collective = Level::FIRST_UNRESERVED.min(Level(config.levels - 1));
        let near = Level(collective.0 + 1);
        let by_slack = Level(near.0 + 1).min(Level(config.levels));
        let mut edges_ns = [f64::INFINITY; Level::COUNT_MAX as usize];
        let mut edge_ns = config.promotion_period.times(SLACK_PERIODS).0 as f64;
        for edge in edges_ns.iter_mut().take(usize::from(config.levels - by_slack.0)) {
            *edge = edge_ns;
            edge_ns *= config.threshold_base;
        }
        Self { collective, near, by_slack, edges_ns }
    }

    /// Returns when `bytes` must begin so that the last one arrives by `deadline`.
    fn latest_start(port: &Port, deadline: Time, bytes: u64) -> Time {
        deadline - Span::transfer(bytes, port.full_rate)
    }

    /// Returns the key of `deadline` for work that follows `compute_left` of computation.
    fn own_key(now: Time, deadline: Time, compute_left: Span) -> u64 {
        match deadline {
            Time::NEVER => UNKNOWN,
            deadline if deadline < now + compute_left => DOOMED,
            deadline => (deadline - compute_left).0,
        }
    }

    /// Returns the key of the batch, or that of deadline `own` for a flow of no known batch or of a
    /// batch without deadlines. `now` only decides which members are doomed.
    fn batch_key(port: &Port, now: Time, batch: SlotId, own: Time) -> u64 {
        if batch == NULL_BATCH {
            return Self::own_key(now, own, Span::ZERO);
        }
        let batch = port.batches.batch(batch);
        if batch.has_deadlines() {
            let key = |deadline: Time| (deadline - batch.compute_left).0;
            return batch.tightest_viable(now).map_or(DOOMED, key);
        }
        Self::own_key(now, own, batch.compute_left)
    }

    /// Returns the key that the batch of `flow` would have if `flow` waited. The deadline of a
    /// waiting flow counts for its batch.
    fn lone_key(port: &Port, now: Time, flow: &UncontendedFlow<'_>) -> u64 {
        let key = Self::batch_key(port, now, flow.batch, flow.deadline);
        if flow.batch == NULL_BATCH || flow.deadline == Time::NEVER {
            return key;
        }
        let batch = port.batches.batch(flow.batch);
        if !batch.has_deadlines()
            || port.batches.speaks_for(flow.request, flow.batch, flow.deadline)
        {
            return key;
        }
        key.min(Self::own_key(now, flow.deadline, batch.compute_left))
    }

    /// Returns the position of a flow that neither a deadline nor a batch orders: by size.
    fn place_undated(port: &Port, flow: &Flow, level: Level) -> QueuePosition {
        let own = Span::transfer(flow.spec.bytes, port.full_rate);
        let key = flow.arrived + own.times(OVERTAKEN_TIMES);
        QueuePosition::new(UNDATED, GroupBy::Port, key.0, level)
    }

    /// Returns the position of an early-stage flow of no known batch, by its own deadline.
    fn place_lone(queue: QueueId, now: Time, flow: &Flow, level: Level) -> QueuePosition {
        let key = Self::own_key(now, flow.deadline, Span::ZERO);
        QueuePosition::new(queue, GroupBy::Port, key, level)
    }

    /// Returns the level of a flow of rule 2 with this key.
    fn slack_level(&self, now: Time, key: Time) -> Level {
        let slack_ns = key.since(now).0 as f64;
        let below = |edge_ns: &&f64| slack_ns >= **edge_ns;
        Level(self.by_slack.0 + self.edges_ns.iter().filter(below).count() as u8)
    }

    /// Returns the level of KV reuse on the wire, and the rule that gives it.
    fn reuse_level(
        &self,
        port: &Port,
        now: Time,
        batch: SlotId,
        layer: Layer,
        key: Time,
    ) -> (Level, LevelRule) {
        let known = batch != NULL_BATCH && port.batches.batch(batch).is_announced();
        match port.rli(batch, layer) {
            rli if !known || rli > NEAR_LAYERS => (self.slack_level(now, key), LevelRule::Laxity),
            _ if port.late_reuse.leads(now) => (Level::HIGHEST, LevelRule::Late),
            rli if rli <= BLOCKING_LAYERS => (self.collective, LevelRule::Rli),
            _ if port.late_reuse.shares(now) => (self.collective, LevelRule::Late),
            _ => (self.near, LevelRule::Rli),
        }
    }

    fn place_last(&self, port: &Port, now: Time, flow: &Flow) -> QueuePosition {
        if flow.deadline == Time::NEVER {
            return Self::place_undated(port, flow, self.last_level(port, now, flow, Time::NEVER));
        }
        let latest = Self::latest_start(port, flow.deadline, flow.remaining);
        let level = self.last_level(port, now, flow, latest);
        let until = || Self::feasible_until(port, now, flow, level, flow.remaining);
        if flow.remaining > 0 && until() < now {
            return QueuePosition::scavenger();
        }
        if flow.request == NONE {
            QueuePosition::new(LAST_STAGE, GroupBy::Port, flow.deadline.0, level)
        } else {
            QueuePosition::new(LAST_STAGE, GroupBy::Request, 0, level)
        }
    }

    /// Returns the level of a last-stage flow that has to begin by `latest`.
    fn last_level(&self, port: &Port, now: Time, flow: &Flow, latest: Time) -> Level {
        if port.is_oversized(flow) {
            return self.by_slack;
        }
        if Self::is_held_up(port, now, flow) {
            return self.collective;
        }
        self.slack_level(now, latest)
    }

    /// Reports whether a last-stage flow has the level of collectives (`link/held_up.rs`).
    fn is_held_up(port: &Port, now: Time, flow: &Flow) -> bool {
        flow.deadline != Time::NEVER && port.held_up.shares(now)
    }

    /// Returns until when a last-stage flow of this level can make its deadline, if `bytes` of its
    /// request wait.
    fn feasible_until(port: &Port, now: Time, flow: &Flow, level: Level, bytes: u64) -> Time {
        match port.piece_time(flow) {
            Some(own) => Self::latest_start(port, flow.deadline, bytes).min(flow.deadline - own),
            None => flow.deadline - port.delivery_time(now, flow.spec.peer, level, bytes),
        }
    }

    /// Returns until when KV reuse of no batch, or a collective, can make its own deadline.
    fn early_until(port: &Port, flow: &Flow) -> Time {
        match flow.spec.stage {
            Stage::KvReuse if flow.deadline != Time::NEVER => {
                port.piece_time(flow).map_or(flow.deadline, |own| flow.deadline - own)
            }
            _ => flow.deadline,
        }
    }

    /// Returns when the group must begin at the latest, from which its level follows.
    fn last_stage_latest(port: &Port, group: &Group) -> Time {
        let Some((_, _, _, slot)) = group.head() else { return Time::NEVER };
        let flow = port.flows.get(slot);
        Self::latest_start(port, flow.deadline, Self::waiting_bytes(flow, group))
    }

    /// Returns the bytes that a last-stage flow needs in time, those of its request if it has one.
    fn waiting_bytes(flow: &Flow, group: &Group) -> u64 {
        if group.scope == GroupBy::Request { group.bytes } else { flow.remaining }
    }
}

/// Reports whether `flow` belongs in the scavenger. KV reuse never does: a batch runs with all its
/// members, pruned or not, and stalls if one lacks its blocks (docs/notes/pruned-kv-reuse.md).
fn gives_way(port: &Port, flow: &Flow) -> bool {
    flow.spec.stage != Stage::KvReuse
        && scavenger::claims(port, &flow.spec, flow.batch, flow.request)
}

impl Discipline for Laxity {
    fn place(&self, port: &Port, now: Time, flow: &Flow) -> QueuePosition {
        if gives_way(port, flow) {
            return QueuePosition::scavenger();
        }
        match flow.spec.stage {
            Stage::Collective if flow.batch == NULL_BATCH => {
                Self::place_lone(COLLECTIVE, now, flow, self.collective)
            }
            Stage::Collective => QueuePosition::new(COLLECTIVE, GroupBy::Batch, 0, self.collective),
            Stage::KvReuse => {
                let key = Self::batch_key(port, now, flow.batch, flow.deadline);
                let level = self.reuse_level(port, now, flow.batch, flow.spec.layer, Time(key)).0;
                if flow.batch == NULL_BATCH {
                    return match flow.deadline {
                        Time::NEVER => Self::place_undated(port, flow, level),
                        _ => Self::place_lone(REUSE, now, flow, level),
                    };
                }
                let order = u64::from(flow.spec.layer.0);
                QueuePosition::new(REUSE, GroupBy::Batch, order, level)
            }
            _ => self.place_last(port, now, flow),
        }
    }

    fn lone_level(&self, port: &Port, now: Time, flow: &UncontendedFlow<'_>) -> Level {
        if flow.spec.stage == Stage::KvReuse {
            let key = Time(Self::lone_key(port, now, flow));
            self.reuse_level(port, now, flow.batch, flow.spec.layer, key).0
        } else {
            self.place(port, now, &flow.waiting()).level
        }
    }

    fn rank(&self, port: &Port, now: Time, group: &Group) -> Option<Rank> {
        let (order, _, seq, slot) = group.head()?;
        let flow = port.flows.get(slot);
        let lone = group.scope == GroupBy::Port;
        let batch_key = || Self::batch_key(port, now, group.batch, flow.deadline);
        let (tier, major, minor) = match group.queue {
            COLLECTIVE if lone => (1, order, 0),
            COLLECTIVE => (1, batch_key(), 0),
            REUSE if lone => (2, order, if order < UNKNOWN { 0 } else { NO_LAYER }),
            UNDATED => (2, UNKNOWN, order.saturating_add(AFTER_LAYERS)),
            REUSE => (2, batch_key(), u64::from(port.rli(group.batch, flow.spec.layer))),
            _ => (2, flow.deadline.0, NO_LAYER),
        };
        Some(Rank { tier, major, minor, seq })
    }

    fn level(&self, port: &Port, now: Time, flow: &Flow, group: &Group) -> Level {
        match group.queue {
            REUSE => {
                let key = Self::batch_key(port, now, flow.batch, flow.deadline);
                self.reuse_level(port, now, flow.batch, flow.spec.layer, Time(key)).0
            }
            LAST_STAGE => self.last_level(port, now, flow, Self::last_stage_latest(port, group)),
            _ => flow.level,
        }
    }

    fn rule(&self, port: &Port, now: Time, flow: &Flow, group: &Group) -> (LevelRule, Time) {
        let key = Time(Self::batch_key(port, now, flow.batch, flow.deadline));
        let (rule, key) = match group.queue {
            COLLECTIVE => (LevelRule::Collective, key),
            _ if port.is_oversized(flow) && !flow.spec.stage.is_early() => (LevelRule::Piece, key),
            LAST_STAGE => {
                let held_up = Self::is_held_up(port, now, flow);
                let rule = if held_up { LevelRule::Late } else { LevelRule::Laxity };
                (rule, Self::last_stage_latest(port, group))
            }
            _ => (self.reuse_level(port, now, flow.batch, flow.spec.layer, key).1, key),
        };
        (rule, if key.0 < UNKNOWN { key } else { Time::NEVER })
    }

    fn collective_level(&self) -> Option<Level> {
        Some(self.collective)
    }

    fn held_up_from(&self) -> Option<Level> {
        Some(self.by_slack)
    }

    fn feasibility(&self, port: &Port, now: Time, flow: &Flow, group: &Group) -> Feasibility {
        if flow.spec.stage.is_early() {
            // A late flow without a batch ranks after all that can meet their deadlines.
            let lone = group.scope == GroupBy::Port && flow.order.0 < UNKNOWN;
            let late = lone && Self::early_until(port, flow) < now;
            let behind = QueuePosition::new(group.queue, GroupBy::Port, DOOMED, flow.level);
            return if late { Feasibility::Behind(behind) } else { Feasibility::Alive };
        }
        if flow.remaining == 0 || flow.deadline == Time::NEVER {
            return Feasibility::Alive;
        }
        if flow.request != NONE && port.batches.request(flow.request).lost {
            return match group.queue {
                LAST_STAGE => Feasibility::FlowLost,
                _ => Feasibility::Alive,
            };
        }
        let until = || {
            let latest = || Self::last_stage_latest(port, group);
            let level = || promoted(flow.level, self.last_level(port, now, flow, latest()));
            let level = flow.wire.unwrap_or_else(level);
            Self::feasible_until(port, now, flow, level, Self::waiting_bytes(flow, group))
        };
        match group.queue {
            LAST_STAGE if until() < now => Feasibility::RequestLost,
            _ => Feasibility::Alive,
        }
    }

    fn prunes(&self, port: &Port, flow: &Flow) -> bool {
        gives_way(port, flow)
    }

    fn bounds_peers(&self) -> bool {
        true
    }

    fn relieves_starved(&self) -> bool {
        true
    }

    fn credit_bar(&self) -> Rank {
        Rank { tier: 1, major: u64::MAX, minor: u64::MAX, seq: u64::MAX }
    }
}
