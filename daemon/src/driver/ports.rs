//! One direction of one NIC: its arbitration, what is counted there, and its credit.

use std::sync::Arc;

use laxity_policy::config::InvalidConfig;
use laxity_policy::link::Link;
use laxity_policy::{FlowSpec, LinkConfig, Permit, Span, Stage, Time};

use super::credit::{PortCredit, alone_bytes};
use crate::clients::{Client, RecordOrigin};
use crate::config::Config;
use crate::stats::{PortCounters, PortSnapshot};

/// A port: egress is even, ingress odd.
#[derive(Debug)]
pub struct Port {
    /// Its arbitration.
    pub link: Link,
    /// What was counted.
    pub counters: PortCounters,
    /// Something happened since `poll_action` said `None`.
    pub dirty: bool,
    /// When to call `poll_action` though nothing happens.
    pub due: Time,
    /// Its credit.
    pub credit: PortCredit,
    /// Who used the port last, when, and when it was last used by two at about the same time.
    user: Option<(u32, Stage)>,
    used: Time,
    shared: Option<Time>,
    nic: u8,
    name: Arc<str>,
    direction: &'static str,
}

/// A port is its user's alone if nobody else has used it for this long: longer than the pauses
/// between the collectives of a batch.
const ALONE_AFTER: Span = Span::from_millis(100);

/// Hungry lanes fed with credit each time that a port is served.
const FEEDS: usize = 8;

/// A work request of which nothing is known by which it could be ordered among its like.
const fn is_anonymous(spec: &FlowSpec) -> bool {
    spec.whole && spec.batch.0 == 0 && spec.request.0 == 0 && spec.deadline.0 == Time::NEVER.0
}

/// The ports of a configuration.
///
/// # Errors
/// A field of the arbitration is out of range.
pub fn ports(config: &Config) -> Result<Vec<Port>, InvalidConfig> {
    let mut ports = Vec::new();
    for (index, nic) in config.nic.iter().enumerate() {
        let name: Arc<str> = nic.name.as_str().into();
        for direction in ["egress", "ingress"] {
            ports.push(Port {
                link: Link::new(config.link(nic))?,
                counters: PortCounters::default(),
                dirty: false,
                due: Time::NEVER,
                credit: PortCredit::default(),
                user: None,
                used: Time::ZERO,
                shared: None,
                nic: index as u8,
                name: Arc::clone(&name),
                direction,
            });
        }
    }
    Ok(ports)
}

impl Port {
    /// Name of its NIC.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// `egress` or `ingress`.
    #[must_use]
    pub const fn direction(&self) -> &'static str {
        self.direction
    }

    /// Its window.
    #[must_use]
    pub fn window_bytes(&self) -> u64 {
        self.link.config().window_bytes
    }

    /// Takes a new configuration.
    ///
    /// # Errors
    /// A field is out of range; the old configuration stays in force.
    pub fn configure(&mut self, now: Time, config: LinkConfig) -> Result<(), InvalidConfig> {
        self.dirty = true;
        self.link.set_config(now, config)
    }

    /// Takes note of who uses the port.
    #[inline]
    pub fn used_by(&mut self, now: Time, client: u32, stage: Stage) {
        let user = Some((client, stage));
        if self.user != user {
            self.user = user;
            if now.since(self.used) < ALONE_AFTER {
                self.shared = Some(now);
            }
        }
        self.used = now;
    }

    /// Whether one client, with one stage, has had the port to itself lately.
    #[inline]
    #[must_use]
    pub fn has_one_user(&self, now: Time) -> bool {
        self.shared
            .is_none_or(|then| now.since(then) >= ALONE_AFTER)
    }

    /// Whether flows of a user who is alone here, and who says nothing by which they could be
    /// ordered, may go at once. There is nobody whom they could keep waiting, and no better order:
    /// the window would only cost them round trips. Bounded all the same, for whoever comes next.
    #[inline]
    fn has_room_alone(&self, now: Time, bytes: u64) -> bool {
        self.has_one_user(now)
            && self.link.waiting_flows() == 0
            && self.link.in_flight_bytes().saturating_add(bytes) <= alone_bytes(&self.link)
    }

    /// The first permit of a flow that finds nothing waiting and room in the window, `None` if it
    /// has to wait.
    #[inline]
    #[must_use]
    pub fn permit_at_once(&self, now: Time, spec: &FlowSpec) -> Option<Permit> {
        self.link.peek_permit(now, spec).or_else(|| {
            let goes = is_anonymous(spec) && self.has_room_alone(now, spec.bytes);
            goes.then(|| Permit {
                bytes: spec.bytes,
                level: self.link.level_alone(now, spec),
                last: true,
            })
        })
    }

    /// After a flow of `spec`: feeds its lane with credit of this port, whose index is `index`, if
    /// flows like it may use any.
    #[inline]
    pub fn feed(&mut self, now: Time, from: &mut RecordOrigin<'_>, index: u16, spec: &FlowSpec) {
        let at = usize::from(index);
        if from.state.room == 0 || from.state.ports[at].is_held() {
            // It is not scheduled now, or owes: whoever has credit does not ask.
        } else if spec.stage == Stage::Collective {
            self.feed_collectives(now, from, at);
        } else if spec.whole {
            let is_alone = is_anonymous(spec) && self.has_one_user(now);
            let consumer = &mut *from.consumer;
            self.credit.feed_idle(&self.link, is_alone, at, consumer);
        }
    }

    /// Feeds a lane that has collectives, or notes that it is hungry.
    #[inline]
    fn feed_collectives(&mut self, now: Time, from: &mut RecordOrigin<'_>, index: usize) {
        if !self.credit.feed(&self.link, now, index, from.consumer) {
            let hungry = &mut from.state.lanes.at(from.lane).hungry[index];
            if !*hungry {
                *hungry = true;
                self.credit.hungry.push_back((from.client, from.lane));
            }
        }
    }

    /// Feeds some of the lanes that ran out of credit while there was none.
    pub fn feed_hungry(&mut self, now: Time, clients: &mut [Option<Client>], index: usize) {
        for _ in 0..FEEDS.min(self.credit.hungry.len()) {
            if !self.credit.is_available(&self.link, now) {
                return;
            }
            let Some((client, lane)) = self.credit.hungry.pop_front() else {
                return;
            };
            let Some(Client { state, served, .. }) =
                clients.get_mut(client as usize).and_then(Option::as_mut)
            else {
                continue;
            };
            state.lanes.at(lane).hungry[index] = false;
            let feeds = !state.released && state.room > 0 && !state.ports[index].is_held();
            if let Some(consumer) = served.consumer(lane).filter(|_| feeds) {
                let mut from = RecordOrigin {
                    client,
                    state,
                    lane,
                    consumer,
                };
                self.feed_collectives(now, &mut from, index);
            }
        }
        // The others have their turn in the next round.
        self.dirty |= !self.credit.hungry.is_empty() && self.credit.is_available(&self.link, now);
    }

    /// For the snapshot.
    #[must_use]
    pub fn snapshot(&self) -> PortSnapshot {
        let config = self.link.config();
        PortSnapshot {
            nic: self.nic,
            name: Arc::clone(&self.name),
            direction: self.direction,
            rate: config.rate,
            window_bytes: config.window_bytes,
            levels: config.levels,
            link: self.link.snapshot(),
            counters: self.counters.clone(),
        }
    }
}
