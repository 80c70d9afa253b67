//! The scheduler's part in the cluster: its reports, and the order in force (docs/coordinator.md).
//!
//! Nothing here waits (`coordinator/exchange.rs`). The path of a flow only calls
//! [`ReportState::completed`], and for a read also [`ClusterState::fetches`]. Reports are made by
//! the clock. A change that may affect the order waits for admission's debounce. Coarse progress
//! goes along, or alone after [`PROGRESS_EVERY`].

use std::sync::Arc;

use laxity_policy::{FlowSpec, Span, Time};

use crate::config::Config;
use crate::coordinator::exchange::{CoordinatorExchange, PutOutcome, Update};
use crate::coordinator::order::{ClusterOrder, OrderContent};
use crate::coordinator::outgoing::OutgoingReport;
use crate::coordinator::reports::{ReportState, Urgency};
use crate::driver::fetches::{FetchName, Fetches};

/// The time between reports that have only bytes and layers.
const PROGRESS_EVERY: Span = Span::from_millis(50);
/// The wait before another look at an exchange that is locked.
const BUSY: Span = Span::from_micros(50);

#[derive(Debug)]
pub struct ClusterState {
    exchange: Arc<CoordinatorExchange>,
    /// The reports. Every hint is recorded there, too.
    pub reports: ReportState,
    pub fetches: Fetches,
    attends: bool,
    /// The number of the stream, zero without one.
    stream: u64,
    order: Option<ClusterOrder>,
    in_force: bool,
    age_limit: Span,
    debounce: Span,
    look_at: Time,
    /// Since when there is something to report.
    untold: Option<Time>,
    told: Time,
    /// Whether the last report was not taken yet. A notification follows when it is.
    blocked: bool,
    /// A report that was made while the exchange was locked.
    held: Option<OutgoingReport>,
}

impl ClusterState {
    /// Makes the state of a host without a coordinator.
    pub fn alone() -> Self {
        let nobody = Arc::new(CoordinatorExchange::new("", ""));
        Self { attends: false, ..Self::new(nobody, 0, &Config::default()) }
    }

    /// Reports whether there is a coordinator, so that reports are kept for it.
    #[inline]
    pub const fn attends(&self) -> bool {
        self.attends
    }

    /// Makes a state without a stream. Only completed bytes on `port` are reported.
    pub fn new(exchange: Arc<CoordinatorExchange>, port: u32, config: &Config) -> Self {
        let mut cluster = Self {
            exchange,
            reports: ReportState::new(port),
            fetches: Fetches::default(),
            attends: true,
            stream: 0,
            order: None,
            in_force: false,
            age_limit: Span::ZERO,
            debounce: Span::ZERO,
            look_at: Time::NEVER,
            untold: None,
            told: Time::ZERO,
            blocked: false,
            held: None,
        };
        cluster.configure(config);
        cluster
    }

    pub fn configure(&mut self, config: &Config) {
        self.age_limit = Span(config.coordinator.order_age_limit.0);
        self.debounce = Span(config.tuning.order_debounce.0);
    }

    /// Returns the content of the coordinator's order, if it is in force.
    pub fn order_in_force(&self) -> Option<&OrderContent> {
        let order = self.order.as_ref().filter(|_| self.in_force)?;
        Some(&order.content)
    }

    /// Schedules a look at the exchange, which has an update.
    pub fn apply_coordinator_update(&mut self, now: Time) {
        self.exchange.acknowledge();
        self.look_at = now;
        self.blocked = false;
    }

    /// Records the time of a change in the reports.
    #[inline]
    pub fn noted(&mut self, now: Time) {
        if self.reports.urgency() != Urgency::Nothing {
            self.untold.get_or_insert(now);
        }
    }

    /// Adds an incoming flow from a peer to its fetch. Returns false if the flow is in none.
    #[cold]
    pub fn fetches(&mut self, now: Time, spec: &FlowSpec, peer: [u8; 16]) -> bool {
        if !self.attends {
            return false;
        }
        let name = FetchName { batch: spec.batch.0, request: spec.request.0, peer };
        let Some(number) = self.fetches.joined(name, spec.flow) else { return false };
        self.reports.fetches(number, name, spec.bytes);
        self.noted(now);
        true
    }

    /// Returns when [`ClusterState::poll`] is due.
    pub fn due(&self) -> Time {
        let mut due = self.look_at.min(self.fetches.due());
        if self.in_force {
            due = due.min(self.exchange.holds_until(self.age_limit));
        }
        if let Some(since) = self.untold.filter(|_| self.stream != 0 && !self.blocked) {
            let gathered = match self.reports.urgency() {
                Urgency::Nothing => Time::NEVER,
                Urgency::Later => since + PROGRESS_EVERY,
                Urgency::Now => since + self.debounce,
            };
            due = due.min(gathered.max(self.told + self.debounce));
        }
        due
    }

    /// Looks at the exchange and makes a report. Returns whether the order in force changed.
    pub fn poll(&mut self, now: Time) -> bool {
        if self.due() > now {
            return false;
        }
        for ended in self.fetches.poll(now) {
            self.reports.fetched(ended);
            self.noted(now);
        }
        self.look(now)
    }

    fn look(&mut self, now: Time) -> bool {
        let Some(Update { stream, snapshot_wanted, has_room, order }) =
            self.exchange.look(self.stream)
        else {
            self.look_at = now + BUSY;
            return self.expire(now);
        };
        self.look_at = Time::NEVER;
        if let Some(stream) = stream {
            self.stream = stream;
            self.held = None;
            if stream == 0 {
                self.reports.mute();
                self.untold = None;
            } else {
                self.reports.attend();
            }
        } else if snapshot_wanted {
            self.reports.restate();
        }
        self.noted(now);
        self.blocked = !has_room;
        if has_room && (self.held.is_some() || self.untold.is_some()) {
            self.report(now);
        }
        let mut changed = false;
        if let Some(order) = order {
            let was = self.order.take().filter(|_| self.in_force);
            let same = |a: &ClusterOrder, b: &ClusterOrder| Arc::ptr_eq(&a.content, &b.content);
            changed = match (&was, &order) {
                (Some(was), Some(now)) => !same(was, now),
                (None, None) => false,
                _ => true,
            };
            self.in_force = order.is_some();
            self.order = order;
            self.exchange.set_in_force(self.in_force);
        }
        self.expire(now) || changed
    }

    /// Puts one report with what has changed into the exchange.
    fn report(&mut self, now: Time) {
        self.told = now;
        let made = self.held.take();
        let events_max = self.exchange.events_max();
        let made = made.or_else(|| self.reports.next_report(now, events_max));
        if let Some(report) = made {
            match self.exchange.put(self.stream, report) {
                PutOutcome::Accepted => {}
                PutOutcome::Busy(report) => {
                    self.held = Some(report);
                    self.look_at = now + BUSY;
                }
                // The next look at the exchange shows the end of the stream.
                PutOutcome::StreamEnded => self.look_at = now + BUSY,
            }
        }
        // Further changes wait until this report is taken. The next look at the exchange finds out.
        if self.reports.urgency() == Urgency::Nothing {
            self.untold = None;
        } else {
            self.look_at = self.look_at.min(now + self.debounce.max(BUSY));
        }
    }

    /// Ends an order in force that has reached its age limit. Returns whether it did.
    fn expire(&mut self, now: Time) -> bool {
        let expired = self.in_force && self.exchange.holds_until(self.age_limit) <= now;
        if expired {
            self.in_force = false;
            self.exchange.set_in_force(false);
            tracing::warn!(
                limit_ms = self.age_limit.0 / 1_000_000,
                "the cluster order is too old; this daemon uses its own order until a new one comes"
            );
        }
        expired
    }
}
