//! The scheduler's part in the cluster: what it reports, and whose order holds
//! (docs/coordinator.md).
//!
//! Nothing here waits (`coordinator/exchange.rs`), and nothing is on the path of a flow but
//! [`ReportState::completed`], one look into a table. Reports are made by the clock: what may
//! change the order after the debounce of admission, coarse progress with it or after
//! [`PROGRESS_EVERY`].

use std::sync::Arc;

use laxity_policy::{FlowSpec, Span, Time};

use crate::config::Config;
use crate::coordinator::exchange::{CoordinatorExchange, PutOutcome, Update};
use crate::coordinator::order::{ClusterOrder, OrderContent};
use crate::coordinator::outgoing::OutgoingReport;
use crate::coordinator::reports::{ReportState, Urgency};
use crate::driver::fetches::{FetchState, Fetches, Name};

/// Bytes and layers are told no more often than this, unless something else is.
const PROGRESS_EVERY: Span = Span::from_millis(50);
/// When to come back to an exchange that is locked.
const BUSY: Span = Span::from_micros(50);

/// See the module.
#[derive(Debug)]
pub struct Cluster {
    exchange: Arc<CoordinatorExchange>,
    /// What there is to report; every hint goes here, too.
    pub reports: ReportState,
    /// What comes in from other hosts.
    pub fetches: Fetches,
    attends: bool,
    /// Number of the stream, zero without one.
    stream: u64,
    order: Option<ClusterOrder>,
    in_force: bool,
    age_limit: Span,
    debounce: Span,
    /// When to look at the exchange.
    look_at: Time,
    /// Since when there is something to tell.
    untold: Option<Time>,
    told: Time,
    /// The report before has not been taken; whoever takes it calls.
    blocked: bool,
    /// Made while the exchange was locked.
    held: Option<OutgoingReport>,
}

impl Cluster {
    /// A host without a coordinator.
    #[must_use]
    pub fn alone() -> Self {
        let nobody = Arc::new(CoordinatorExchange::new("", ""));
        Self {
            attends: false,
            ..Self::new(nobody, 0, &Config::default())
        }
    }

    /// Whether there is a coordinator, so that reports are kept for it.
    #[inline]
    #[must_use]
    pub const fn attends(&self) -> bool {
        self.attends
    }

    /// No stream yet. Announced bytes are taken to cross `port`.
    #[must_use]
    pub fn new(exchange: Arc<CoordinatorExchange>, port: u32, config: &Config) -> Self {
        let mut cluster = Self {
            exchange,
            reports: ReportState::new(port),
            fetches: Fetches::new(Span::ZERO),
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

    /// Takes a new configuration.
    pub fn configure(&mut self, config: &Config) {
        self.age_limit = Span(config.coordinator.order_age_limit.0);
        self.debounce = Span(config.tuning.order_debounce.0);
        self.fetches
            .set_wait_max(Span(config.coordinator.fetch_wait_max.0));
    }

    /// The coordinator's order, if it holds.
    #[must_use]
    pub fn order_in_force(&self) -> Option<&OrderContent> {
        let order = self.order.as_ref().filter(|_| self.in_force)?;
        Some(&order.content)
    }

    /// The exchange has an update.
    pub fn apply_coordinator_update(&mut self, now: Time) {
        self.exchange.acknowledge();
        self.look_at = now;
        self.blocked = false;
    }

    /// Something was entered in the reports.
    #[inline]
    pub fn noted(&mut self, now: Time) {
        if self.reports.urgency() != Urgency::Nothing {
            self.untold.get_or_insert(now);
        }
    }

    /// A flow comes in from a peer.
    #[cold]
    pub fn fetches(&mut self, now: Time, spec: &FlowSpec, peer: [u8; 16], port: u16) -> FetchState {
        if !self.attends {
            return FetchState::None;
        }
        let name = Name {
            batch: spec.batch.0,
            request: spec.request.0,
            peer,
        };
        let Some((number, waits)) = self.fetches.joined(name, spec.flow, port) else {
            return FetchState::None;
        };
        self.reports.fetches(number, name, spec.bytes);
        self.noted(now);
        match waits {
            true => FetchState::Waits,
            false => FetchState::Proceeds,
        }
    }

    /// When [`Cluster::poll`] is due.
    #[must_use]
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

    /// Looks at the exchange, and reports. Whether another order holds than before.
    pub fn poll(&mut self, now: Time) -> bool {
        if self.due() > now {
            return false;
        }
        for ended in self.fetches.poll(now) {
            self.reports.fetched(ended);
            self.noted(now);
        }
        let changed = self.look(now);
        if changed {
            let order = self.order.as_ref().filter(|_| self.in_force);
            let content = order.map(|order| &*order.content);
            self.fetches.apply_order(now, content);
        }
        changed
    }

    fn look(&mut self, now: Time) -> bool {
        let Some(Update {
            stream,
            snapshot_wanted,
            has_room,
            order,
        }) = self.exchange.look(self.stream)
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
        if self.reports.urgency() != Urgency::Nothing {
            self.untold.get_or_insert(now);
        }
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

    /// Puts what there is to tell into the exchange, as far as one report goes.
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
                // The exchange says so at the next look.
                PutOutcome::StreamEnded => self.look_at = now + BUSY,
            }
        }
        // What is left, or comes, waits for this to be taken: the next look finds that out, or that
        // it was.
        if self.reports.urgency() == Urgency::Nothing {
            self.untold = None;
        } else {
            self.look_at = self.look_at.min(now + self.debounce.max(BUSY));
        }
    }

    /// Whether the order has just become too old.
    fn expire(&mut self, now: Time) -> bool {
        let expired = self.in_force && self.exchange.holds_until(self.age_limit) <= now;
        if expired {
            self.in_force = false;
            self.exchange.set_in_force(false);
            tracing::warn!(
                limit_ms = self.age_limit.0 / 1_000_000,
                "the coordinator's order is too old; this daemon's own holds until there is another"
            );
        }
        expired
    }
}
