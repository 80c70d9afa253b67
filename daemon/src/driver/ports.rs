//! One direction of one NIC: its arbitration, what is counted there, and its credit.

use std::collections::VecDeque;
use std::sync::Arc;

use laxity_policy::config::InvalidConfig;
use laxity_policy::link::Link;
use laxity_policy::{LinkConfig, Span, Stage, Time};
use laxity_shm::consumer::Consumer;
use laxity_shm::layout::CREDIT_PORTS;

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
    /// Lanes that ran out of credit while there was none, as (client, lane).
    pub hungry: VecDeque<(u32, u16)>,
    /// Credit that is handed out and not spent, over all lanes, in bytes.
    credit_out: u64,
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
                hungry: VecDeque::new(),
                credit_out: 0,
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

    /// Hands credit to a lane that has used up half of its share. False if the port has none to
    /// give now, so that the lane is to be fed later.
    ///
    /// A lane's share is an eighth of the window, and it gets at most a quarter of what is left
    /// for credit at all, half the window: later lanes get less, never nothing. Credit cannot be
    /// taken back, so what is out bounds by how much a port may exceed its window.
    #[inline]
    pub fn feed(&mut self, now: Time, index: usize, consumer: &mut Consumer) -> bool {
        let share = self.link.config().window_bytes / 8;
        self.feed_from(self.credit_left(now) / 4, share, index, consumer)
    }

    /// The same for a lane of flows that may use credit only while nothing waits here. It is not
    /// fed later: then something did.
    #[inline]
    pub fn feed_idle(&mut self, alone: bool, index: usize, consumer: &mut Consumer) {
        if self.link.waiting_flows() > 0 {
            return;
        }
        let window = self.link.config().window_bytes;
        let (most, left) = if alone {
            let most = self.alone_bytes();
            (most, most.saturating_sub(self.link.in_flight_bytes()))
        } else {
            // In all as much as to one; but what is in flight has to be within the window.
            let left = match self.link.idle_allowance() {
                0 => 0,
                _ => self
                    .alone_bytes()
                    .saturating_sub(self.link.in_flight_bytes()),
            };
            (window / 2, left)
        };
        // Work requests are as large as their program makes them: less than one is no use. What
        // others hold and do not use keeps nobody from the least: it is leave as long as nothing
        // waits, and ends at once when something does.
        let give = left.saturating_sub(self.credit_out) / 2;
        self.feed_from(give.max(left.min(window / 16)), most, index, consumer);
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
    #[must_use]
    pub fn has_room_alone(&self, now: Time, bytes: u64) -> bool {
        self.has_one_user(now)
            && self.link.waiting_flows() == 0
            && self.link.in_flight_bytes().saturating_add(bytes) <= self.alone_bytes()
    }

    /// Bytes that a user who is alone may have in flight: 10 ms of the port, 16 MiB at most.
    pub(super) fn alone_bytes(&self) -> u64 {
        let config = self.link.config();
        (config.rate / 100).min(16 << 20).max(config.window_bytes)
    }

    #[inline]
    fn feed_from(&mut self, most: u64, share: u64, index: usize, consumer: &mut Consumer) -> bool {
        if index >= CREDIT_PORTS {
            return true;
        }
        let (granted, spent) = consumer.credit(index);
        let held = granted.saturating_sub(spent);
        if held > share / 2 {
            return true;
        }
        let give = (share - held).min(most);
        if give == 0 {
            return false;
        }
        consumer.grant_credit(index, granted.saturating_add(give));
        self.credit_out += give;
        true
    }

    /// Bytes of credit that may be handed out now, over all lanes.
    fn credit_left(&self, now: Time) -> u64 {
        let most = self.link.config().window_bytes / 2;
        let allowance = self.link.credit_allowance(now).min(most);
        allowance.saturating_sub(self.credit_out)
    }

    /// Whether [`Port::feed`] would give anything to a lane that has nothing.
    #[must_use]
    pub fn has_credit(&self, now: Time) -> bool {
        self.credit_left(now) >= 4
    }

    /// Credit was spent, or is held by a lane that is gone.
    #[inline]
    pub fn credit_back(&mut self, bytes: u64) {
        self.credit_out = self.credit_out.saturating_sub(bytes);
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
