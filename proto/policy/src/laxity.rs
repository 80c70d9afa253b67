//! The default policy: the paper's structure, with least laxity wherever laxity is known.
//!
//! DESIGN §4.2; builds on MFS §3.2 (defer and promote), §4.4.1 (RLI) and §4.4.2 (doomed work
//! must not hijack the order). Rules, in order:
//!
//! 1. `P_1`: last-stage flows bound by their *receiver* whose slack has run out. Elsewhere the
//!    last stage is never promoted above early stages: what it gains for one request, the
//!    collectives that it holds up lose for all the members of their batches;
//! 2. collectives, by the laxity of their batch;
//! 3. KV reuse, by RLI, then by the laxity of its batch;
//! 4. last stage, by the laxity of its request, continuously;
//! 5. the scavenger.
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
//! Levels tell the fabric the same order: `P_1` and `P_2` as above; the rest is halved between
//! KV reuse (by RLI) and the last stage (by slack, in steps of the threshold base). With two or
//! three levels `P_1` is shared with the collectives. The slack steps start at
//! [`SLACK_PERIODS`] promotion periods.

use crate::config::LinkConfig;
use crate::discipline::{Check, Discipline, Hope, Place};
use crate::ids::{Level, Stage};
use crate::link::Port;
use crate::link::flows::{Flow, NONE};
use crate::link::queue::{Group, Lane, Rank, Scope};
use crate::link::roster::NULL_BATCH;
use crate::scavenger;
use crate::time::{Span, Time};

const COLLECTIVE: Lane = 0;
const REUSE: Lane = 1;
const LAST_STAGE: Lane = 2;
const URGENT: Lane = 3;

/// Key of a batch of which no deadline is known: after all that have one.
const UNKNOWN: u64 = u64::MAX - 1;
/// Key of a batch none of whose members can make it: after all others.
const DOOMED: u64 = u64::MAX;

/// Promotion periods of slack below which a last-stage flow has the highest level of its stage.
const SLACK_PERIODS: u64 = 16;

/// Which levels the stages have on the wire.
#[derive(Clone, Copy, Debug)]
struct WireLevels {
    collective: u8,
    reuse: u8,
    reuse_count: u8,
    last_stage: u8,
    last_stage_count: u8,
}

impl WireLevels {
    fn new(levels: u8) -> Self {
        match levels {
            ..=2 => Self {
                collective: 1,
                reuse: 2,
                reuse_count: 1,
                last_stage: 2,
                last_stage_count: 1,
            },
            3 => Self {
                collective: 1,
                reuse: 2,
                reuse_count: 1,
                last_stage: 3,
                last_stage_count: 1,
            },
            _ => {
                let reuse_count = (levels - 2).div_ceil(2);
                Self {
                    collective: 2,
                    reuse: 3,
                    reuse_count,
                    last_stage: 3 + reuse_count,
                    last_stage_count: levels - 2 - reuse_count,
                }
            }
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Laxity {
    wire: WireLevels,
    rate: u64,
    /// A receiver-bound flow is urgent once it needs this share of the port.
    urgent_share: f64,
    period: Span,
    slack_step: Span,
    slack_base: f64,
}

impl Laxity {
    pub(crate) fn new(config: &LinkConfig) -> Self {
        Self {
            wire: WireLevels::new(config.levels),
            rate: config.rate,
            urgent_share: config.threshold_scale.min(1.0),
            period: config.promotion_period,
            slack_step: config.promotion_period.times(SLACK_PERIODS),
            slack_base: config.threshold_base,
        }
    }

    /// Latest start: when `bytes` have to begin for the last to be there at `deadline`.
    fn latest_start(&self, deadline: Time, bytes: u64) -> Time {
        if deadline == Time::NEVER {
            return Time::NEVER;
        }
        deadline - Span::transfer(bytes, self.rate)
    }

    /// The batch's key; `now` decides only who can still make it.
    fn batch_key(port: &Port, now: Time, group: &Group) -> u64 {
        if group.batch == NULL_BATCH {
            return UNKNOWN;
        }
        let batch = port.roster.batch(group.batch);
        let key = |deadline: Time| (deadline - batch.compute_left).0;
        if !batch.members.is_empty() {
            return batch.tightest_viable(now).map_or(DOOMED, key);
        }
        // Nobody said who is in it: the flow's own word counts.
        match group.head().map(|head| port.flows.get(head.3).deadline) {
            None | Some(Time::NEVER) => UNKNOWN,
            Some(deadline) if deadline < now + batch.compute_left => DOOMED,
            Some(deadline) => key(deadline),
        }
    }

    /// Last-stage bytes that wait with `flow`, whose group may not exist yet.
    fn waiting_with(port: &Port, flow: &Flow) -> u64 {
        if flow.group == NONE {
            return flow.remaining;
        }
        let group = port.queue.get(flow.group);
        if group.scope == Scope::Request {
            group.bytes
        } else {
            flow.remaining
        }
    }

    fn slack_level(&self, now: Time, latest_start: Time) -> Level {
        let slack_ns = latest_start.since(now).0 as f64;
        let mut edge_ns = self.slack_step.0 as f64;
        let mut step = 0;
        while step + 1 < self.wire.last_stage_count && slack_ns >= edge_ns {
            edge_ns *= self.slack_base;
            step += 1;
        }
        Level(self.wire.last_stage + step)
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

    fn place_last(&self, port: &Port, now: Time, flow: &Flow) -> Place {
        let latest = self.latest_start(flow.deadline, flow.remaining);
        if latest < now && flow.remaining > 0 {
            return Place::scavenger();
        }
        if flow.spec.receiver_bound {
            let urgent_at = self.urgent_at(flow, Self::waiting_with(port, flow));
            if urgent_at <= now {
                return Place::new(URGENT, Scope::Port, latest.0, Level::HIGHEST);
            }
            let mut place = self.deferred(now, flow, latest);
            place.check_at = self.next_look(now, urgent_at);
            return place;
        }
        self.deferred(now, flow, latest)
    }

    fn deferred(&self, now: Time, flow: &Flow, latest: Time) -> Place {
        let level = self.slack_level(now, latest);
        if flow.request == NONE {
            Place::new(LAST_STAGE, Scope::Port, latest.0, level)
        } else {
            Place::new(LAST_STAGE, Scope::Request, 0, level)
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

impl Discipline for Laxity {
    fn place(&self, port: &Port, now: Time, flow: &Flow) -> Place {
        if scavenger::claims(port, flow) {
            return Place::scavenger();
        }
        match flow.spec.stage {
            Stage::Collective => {
                Place::new(COLLECTIVE, Scope::Batch, 0, Level(self.wire.collective))
            }
            Stage::KvReuse => {
                let level = self.climb(port, port.rli(flow.batch, flow.spec.layer));
                let order = u64::from(flow.spec.layer.0);
                Place {
                    climbs: true,
                    ..Place::new(REUSE, Scope::Batch, order, level)
                }
            }
            _ => self.place_last(port, now, flow),
        }
    }

    fn rank(&self, port: &Port, now: Time, group: &Group) -> Option<Rank> {
        let (order, _, seq, slot) = group.head()?;
        Some(match group.lane {
            URGENT => Rank {
                tier: 1,
                major: order,
                minor: 0,
                seq,
            },
            COLLECTIVE => Rank {
                tier: 2,
                major: Self::batch_key(port, now, group),
                minor: 0,
                seq,
            },
            REUSE => {
                let rli = u64::from(port.rli(group.batch, port.flows.get(slot).spec.layer));
                Rank {
                    tier: 3,
                    major: rli,
                    minor: Self::batch_key(port, now, group),
                    seq,
                }
            }
            _ => Rank {
                tier: 4,
                major: self.last_stage_key(port, group).0,
                minor: 0,
                seq,
            },
        })
    }

    fn level(&self, port: &Port, now: Time, flow: &Flow, group: &Group) -> Level {
        match group.lane {
            REUSE => self.climb(port, port.rli(flow.batch, flow.spec.layer)),
            LAST_STAGE => self.slack_level(now, self.last_stage_key(port, group)),
            _ => flow.level,
        }
    }

    fn climb(&self, _port: &Port, rli: u32) -> Level {
        Level(self.wire.reuse + rli.min(u32::from(self.wire.reuse_count) - 1) as u8)
    }

    fn collective_level(&self) -> Option<Level> {
        Some(Level(self.wire.collective))
    }

    fn served(&self, _port: &Port, now: Time, flow: &Flow, _bytes: u64) -> Option<Place> {
        // Inside a request's group arrival decides and the group's key follows its bytes; a flow
        // without a request, and an urgent one, carries its own key, which service moves.
        let urgent = flow.level == Level::HIGHEST;
        if flow.spec.stage != Stage::P2d || (flow.request != NONE && !urgent) {
            return None;
        }
        let latest = self.latest_start(flow.deadline, flow.remaining);
        let lane = if urgent { URGENT } else { LAST_STAGE };
        let mut place = Place::new(lane, Scope::Port, latest.0, self.slack_level(now, latest));
        place.check_at = flow.check_at;
        Some(place)
    }

    fn check(&self, port: &Port, now: Time, flow: &Flow) -> Check {
        let urgent_at = self.urgent_at(flow, Self::waiting_with(port, flow));
        if urgent_at <= now {
            let latest = self.latest_start(flow.deadline, flow.remaining);
            Check::Move(Place::new(URGENT, Scope::Port, latest.0, Level::HIGHEST))
        } else {
            Check::Later(self.next_look(now, urgent_at))
        }
    }

    fn hope(&self, port: &Port, now: Time, flow: &Flow, group: &Group) -> Hope {
        if flow.remaining == 0 || flow.deadline == Time::NEVER {
            return Hope::Alive;
        }
        if flow.request != NONE && port.roster.request(flow.request).lost {
            return match group.lane {
                LAST_STAGE | URGENT => Hope::FlowLost,
                _ => Hope::Alive,
            };
        }
        match group.lane {
            LAST_STAGE if self.last_stage_key(port, group) < now => Hope::RequestLost,
            URGENT if self.latest_start(flow.deadline, flow.remaining) < now => Hope::RequestLost,
            _ => Hope::Alive,
        }
    }

    fn prunes(&self) -> bool {
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
