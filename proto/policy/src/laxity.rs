//! The default policy: the paper's structure, with least laxity wherever laxity is known.
//!
//! architecture §4.2; builds on MFS §3.2 (defer and promote), §4.4.1 (RLI) and §4.4.2 (doomed work
//! must not hijack the order). Rules, in order:
//!
//! 1. `P_1`: last-stage flows bound by their *receiver* whose slack has run out. Elsewhere the
//!    last stage is never promoted above collectives: what it gains for one request, the
//!    collectives that it holds up lose for all the members of their batches;
//! 2. collectives, by the laxity of their batch;
//! 3. KV reuse, by the laxity of its batch and inside the batch by RLI, and the last stage, by
//!    the laxity of its request, together: the least laxity first, KV reuse first among equals;
//! 4. the scavenger.
//!
//! Laxity at time `t` is time left minus work left. Comparing two at the same `t`, `t` cancels:
//!
//! ```text
//! batch    key = min{ D_r : D_r ≥ t + C } − C       C = layers left · layer time  [ns]
//! request  key = D_r − S_r / B                      S_r = its last-stage bytes waiting here
//! ```
//!
//! so a key stays valid between events. Members that cannot make it (`D_r < t + C`) do not
//! count: doomed work never sets a batch's urgency, and a batch that is doomed altogether comes
//! after all others of its kind. A request with `key < t` is doomed too: its last stage goes to
//! the scavenger, as a whole, since a first token needs all of it.
//!
//! A flow's own deadline counts whatever else is known of it. A deadline that no request brought
//! into a batch is one of the batch's while the flow waits, and a flow of no known batch has the
//! key `D`. Once `D` has passed such a flow stands with the doomed batches: KV reuse is never
//! scavenged. Flows without any deadline come after those with one: KV reuse of known batches by
//! RLI, then the rest by arrival. What starves all the same is served by turns
//! (`link/starved.rs`).
//!
//! Departure from the first design (architecture §9), which put all KV reuse above all of the last
//! stage and compared RLI across batches before laxity. Theorem 1, the reason for RLI, is about one
//! request: across batches "RLI 0 of a loose batch" is not more urgent than "RLI 2 of a tight one",
//! and blocks fetched for a batch that waits in a queue are not more urgent than the last bytes of
//! a request that is due. Chosen among some dozen variants on a few instances of
//! `tests/stages.rs`, then compared on fresh ones (12 seeds, five mixes of stages, offered load
//! 0.4, 0.6 and 0.8; one port, one request a batch): it met 4 % to 100 % more deadlines than the
//! order of that design, in all fifteen. Urgency inherited from the batches queued behind one was
//! tried too, and gained nothing.
//!
//! Levels tell the fabric the same order: `P_1` and `P_2` as above, the rest by slack in steps of
//! the threshold base, the first at [`SLACK_PERIODS`] promotion periods. With two levels `P_1` is
//! shared with the collectives. KV reuse needed within [`NEAR_LAYERS`] layers carries `P_2` too:
//! where it leaves the unit that holds it, it meets the collectives of that unit, a message keeps
//! its level for life, and one that starves below them stalls a whole batch, as a late collective
//! would. What that was worth is in docs/notes/simulator.md.

use laxity_types::{Layer, Level, Stage};

use crate::config::LinkConfig;
use crate::discipline::{Check, Discipline, Feasibility, Lone, QueuePosition};
use crate::link::batch_table::NULL_BATCH;
use crate::link::flows::{Flow, NONE, Slot};
use crate::link::port::Port;
use crate::link::queue::{Group, QueueId, Rank, Scope};
use crate::scavenger;
use crate::time::{Span, Time};

const COLLECTIVE: QueueId = 0;
const REUSE: QueueId = 1;
const LAST_STAGE: QueueId = 2;
const URGENT: QueueId = 3;

/// Key of a batch or flow of which no deadline is known: after all that have one.
const UNKNOWN: u64 = u64::MAX - 1;
/// Key of a batch none of whose members can make it, or of a late flow: after all others.
const DOOMED: u64 = u64::MAX;
/// RLI of what no layer orders: last among equal keys, where arrival decides.
const NO_LAYER: u64 = u64::MAX;

/// Promotion periods of slack below which a flow of rule 3 has the highest level of that rule.
const SLACK_PERIODS: u64 = 4;

/// Layers ahead for which KV reuse carries the level of collectives on the wire.
const NEAR_LAYERS: u32 = 8;

/// See the module.
#[derive(Debug)]
pub(crate) struct Laxity {
    /// Level of collectives.
    collective: Level,
    rate: u64,
    /// A receiver-bound flow is urgent once it needs this share of the port.
    urgent_share: f64,
    period: Span,
    /// Slack from which a flow of rule 3 is one level lower, in ns, ascending; infinite where
    /// there is no lower level.
    edges_ns: [f64; Level::COUNT_MAX as usize],
}

impl Laxity {
    pub(crate) fn new(config: &LinkConfig) -> Self {
        let collective = Level::FIRST_UNRESERVED.min(Level(config.levels - 1));
        let mut edges_ns = [f64::INFINITY; Level::COUNT_MAX as usize];
        let mut edge_ns = config.promotion_period.times(SLACK_PERIODS).0 as f64;
        for edge in edges_ns
            .iter_mut()
            .take(usize::from(config.levels - collective.0 - 1))
        {
            *edge = edge_ns;
            edge_ns *= config.threshold_base;
        }
        Self {
            collective,
            rate: config.rate,
            urgent_share: config.threshold_scale.min(1.0),
            period: config.promotion_period,
            edges_ns,
        }
    }

    /// Latest start: when `bytes` have to begin for the last to be there at `deadline`.
    fn latest_start(&self, deadline: Time, bytes: u64) -> Time {
        if deadline == Time::NEVER {
            return Time::NEVER;
        }
        deadline - Span::transfer(bytes, self.rate)
    }

    /// The key that `deadline` gives to work with `compute_left` before it.
    fn own_key(now: Time, deadline: Time, compute_left: Span) -> u64 {
        match deadline {
            Time::NEVER => UNKNOWN,
            deadline if deadline < now + compute_left => DOOMED,
            deadline => (deadline - compute_left).0,
        }
    }

    /// The batch's key, given the deadline of a flow of it; `now` decides only who can still
    /// make it. A flow of no known batch has the key of its own deadline.
    fn batch_key(port: &Port, now: Time, batch: Slot, own: Time) -> u64 {
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

    /// The key that the batch of `flow` would have once `flow` waits: its deadline is one of the
    /// batch's from then on.
    fn lone_key(port: &Port, now: Time, flow: &Lone<'_>) -> u64 {
        let key = Self::batch_key(port, now, flow.batch, flow.deadline);
        if flow.batch == NULL_BATCH || flow.deadline == Time::NEVER {
            return key;
        }
        let batch = port.batches.batch(flow.batch);
        if !batch.has_deadlines()
            || port
                .batches
                .speaks_for(flow.request, flow.batch, flow.deadline)
        {
            return key;
        }
        key.min(Self::own_key(now, flow.deadline, batch.compute_left))
    }

    /// Where an early-stage flow waits of which no batch is known: by its own deadline.
    fn place_lone(queue: QueueId, now: Time, flow: &Flow, level: Level) -> QueuePosition {
        let key = Self::own_key(now, flow.deadline, Span::ZERO);
        QueuePosition::new(queue, Scope::Port, key, level)
    }

    /// Last-stage bytes that wait with `flow`, whose group may not exist yet.
    fn waiting_with(port: &Port, flow: &Flow) -> u64 {
        if flow.group == NONE {
            return flow.remaining;
        }
        let group = port.queues.get(flow.group);
        if group.scope == Scope::Request {
            group.bytes
        } else {
            flow.remaining
        }
    }

    /// Level of a flow of rule 3 with this key.
    fn slack_level(&self, now: Time, key: Time) -> Level {
        let slack_ns = key.since(now).0 as f64;
        let below = |edge_ns: &&f64| slack_ns >= **edge_ns;
        Level(self.collective.0 + 1 + self.edges_ns.iter().filter(below).count() as u8)
    }

    /// Level of KV reuse on the wire: that of collectives if it is needed soon.
    fn reuse_level(&self, port: &Port, now: Time, batch: Slot, layer: Layer, key: Time) -> Level {
        let known = batch != NULL_BATCH && port.batches.batch(batch).is_announced();
        if known && port.rli(batch, layer) <= NEAR_LAYERS {
            return self.collective;
        }
        self.slack_level(now, key)
    }

    /// When a receiver-bound flow becomes urgent: when it needs `urgent_share` of the port.
    fn urgent_at(&self, flow: &Flow, bytes: u64) -> Time {
        if flow.deadline == Time::NEVER {
            return Time::NEVER;
        }
        let needs_ns = Span::transfer(bytes, self.rate).0 as f64 / self.urgent_share;
        flow.deadline - Span(needs_ns as u64)
    }

    fn next_look(&self, now: Time, urgent_at: Time) -> Time {
        let left = urgent_at.since(now);
        if urgent_at == Time::NEVER || left.0 / 2 < self.period.0 {
            urgent_at
        } else {
            now + Span(left.0 / 2)
        }
    }

    fn place_last(&self, port: &Port, now: Time, flow: &Flow) -> QueuePosition {
        let latest = self.latest_start(flow.deadline, flow.remaining);
        if latest < now && flow.remaining > 0 {
            return QueuePosition::scavenger();
        }
        if flow.spec.receiver_bound {
            let urgent_at = self.urgent_at(flow, Self::waiting_with(port, flow));
            if urgent_at <= now {
                return QueuePosition::new(URGENT, Scope::Port, latest.0, Level::HIGHEST);
            }
            let mut position = self.deferred(now, flow, latest);
            position.check_at = self.next_look(now, urgent_at);
            return position;
        }
        self.deferred(now, flow, latest)
    }

    fn deferred(&self, now: Time, flow: &Flow, latest: Time) -> QueuePosition {
        let level = self.slack_level(now, latest);
        if flow.request == NONE {
            QueuePosition::new(LAST_STAGE, Scope::Port, latest.0, level)
        } else {
            QueuePosition::new(LAST_STAGE, Scope::Request, 0, level)
        }
    }

    /// The key of a group of last-stage flows.
    fn last_stage_key(&self, port: &Port, group: &Group) -> Time {
        let Some((order, _, _, slot)) = group.head() else {
            return Time::NEVER;
        };
        if group.scope == Scope::Request {
            self.latest_start(port.flows.get(slot).deadline, group.bytes)
        } else {
            Time(order)
        }
    }
}

/// Whether `flow` belongs in the scavenger. KV reuse never does: a batch runs with all its members,
/// pruned or not, and without the blocks of one all of them stall (docs/notes/pruned-kv-reuse.md).
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
            Stage::Collective => QueuePosition::new(COLLECTIVE, Scope::Batch, 0, self.collective),
            Stage::KvReuse => {
                let key = Self::batch_key(port, now, flow.batch, flow.deadline);
                let level = self.reuse_level(port, now, flow.batch, flow.spec.layer, Time(key));
                if flow.batch == NULL_BATCH {
                    return Self::place_lone(REUSE, now, flow, level);
                }
                let order = u64::from(flow.spec.layer.0);
                QueuePosition::new(REUSE, Scope::Batch, order, level)
            }
            _ => self.place_last(port, now, flow),
        }
    }

    fn lone_level(&self, port: &Port, now: Time, flow: &Lone<'_>) -> Level {
        if flow.spec.stage == Stage::KvReuse {
            let key = Time(Self::lone_key(port, now, flow));
            self.reuse_level(port, now, flow.batch, flow.spec.layer, key)
        } else {
            self.place(port, now, &flow.waiting()).level
        }
    }

    fn rank(&self, port: &Port, now: Time, group: &Group) -> Option<Rank> {
        let (order, _, seq, slot) = group.head()?;
        let flow = port.flows.get(slot);
        let lone = group.scope == Scope::Port;
        let batch_key = || Self::batch_key(port, now, group.batch, flow.deadline);
        let (tier, major, minor) = match group.queue {
            URGENT => (1, order, 0),
            COLLECTIVE if lone => (2, order, 0),
            COLLECTIVE => (2, batch_key(), 0),
            REUSE if lone => (3, order, if order < UNKNOWN { 0 } else { NO_LAYER }),
            REUSE => (
                3,
                batch_key(),
                u64::from(port.rli(group.batch, flow.spec.layer)),
            ),
            _ => match self.last_stage_key(port, group) {
                Time::NEVER => (3, UNKNOWN, NO_LAYER),
                key => (3, key.0, NO_LAYER),
            },
        };
        Some(Rank {
            tier,
            major,
            minor,
            seq,
        })
    }

    fn level(&self, port: &Port, now: Time, flow: &Flow, group: &Group) -> Level {
        match group.queue {
            REUSE => {
                let key = Self::batch_key(port, now, flow.batch, flow.deadline);
                self.reuse_level(port, now, flow.batch, flow.spec.layer, Time(key))
            }
            LAST_STAGE => self.slack_level(now, self.last_stage_key(port, group)),
            _ => flow.level,
        }
    }

    fn collective_level(&self) -> Option<Level> {
        Some(self.collective)
    }

    fn served(&self, _port: &Port, now: Time, flow: &Flow, _bytes: u64) -> Option<QueuePosition> {
        // Inside a request's group arrival decides and the group's key follows its bytes; a flow
        // without a request, and an urgent one, carries its own key, which service moves.
        let urgent = flow.level == Level::HIGHEST;
        if flow.spec.stage != Stage::P2d || (flow.request != NONE && !urgent) {
            return None;
        }
        let latest = self.latest_start(flow.deadline, flow.remaining);
        let queue = if urgent { URGENT } else { LAST_STAGE };
        let mut position =
            QueuePosition::new(queue, Scope::Port, latest.0, self.slack_level(now, latest));
        position.check_at = flow.check_at;
        Some(position)
    }

    fn check(&self, port: &Port, now: Time, flow: &Flow) -> Check {
        let urgent_at = self.urgent_at(flow, Self::waiting_with(port, flow));
        if urgent_at <= now {
            let latest = self.latest_start(flow.deadline, flow.remaining);
            Check::Move(QueuePosition::new(
                URGENT,
                Scope::Port,
                latest.0,
                Level::HIGHEST,
            ))
        } else {
            Check::Later(self.next_look(now, urgent_at))
        }
    }

    fn feasibility(&self, port: &Port, now: Time, flow: &Flow, group: &Group) -> Feasibility {
        if flow.spec.stage.is_early() {
            // Late, and nothing else is known of it: after all that can still make theirs.
            let late = group.scope == Scope::Port && flow.order.0 < UNKNOWN && flow.deadline < now;
            let behind = QueuePosition::new(group.queue, Scope::Port, DOOMED, flow.level);
            return if late {
                Feasibility::Behind(behind)
            } else {
                Feasibility::Alive
            };
        }
        if flow.remaining == 0 || flow.deadline == Time::NEVER {
            return Feasibility::Alive;
        }
        if flow.request != NONE && port.batches.request(flow.request).lost {
            return match group.queue {
                LAST_STAGE | URGENT => Feasibility::FlowLost,
                _ => Feasibility::Alive,
            };
        }
        match group.queue {
            LAST_STAGE if self.last_stage_key(port, group) < now => Feasibility::RequestLost,
            URGENT if self.latest_start(flow.deadline, flow.remaining) < now => {
                Feasibility::RequestLost
            }
            _ => Feasibility::Alive,
        }
    }

    fn prunes(&self, port: &Port, flow: &Flow) -> bool {
        gives_way(port, flow)
    }

    fn relieves_starved(&self) -> bool {
        true
    }

    fn credit_bar(&self) -> Rank {
        Rank {
            tier: 2,
            major: u64::MAX,
            minor: u64::MAX,
            seq: u64::MAX,
        }
    }
}
