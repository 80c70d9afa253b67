//! A port: one direction of one NIC, with its link, its counters and its credit.

use std::sync::Arc;

use laxity_policy::config::InvalidConfig;
use laxity_policy::residual;
use laxity_policy::{
    DomainId, Event, FlowSpec, LinkConfig, LinkSnapshot, Permit, SharedLink, Span, Stage, Time,
};

use super::credit::{PortCredit, alone_bytes};
use super::shadow_link::ShadowLink;
use crate::clients::{AttachedClient, RecordOrigin};
use crate::config::{ALL_DEVICES, Config};
use crate::stats::{PortCounters, PortResidual, PortSnapshot, PortUse};

/// A port. Egress has an even index, ingress an odd one.
#[derive(Debug)]
pub struct DriverPort {
    pub link: SharedLink,
    /// What enforcing would have done to observed flows, from the first of them on.
    shadow: Option<Box<ShadowLink>>,
    pub counters: PortCounters,
    /// Promotions, demotions, foreign bytes and signals at the last [`DriverPort::count`].
    seen: [u64; 4],
    /// Whether an event happened since `poll_action` returned `None`.
    pub dirty: bool,
    /// When to call `poll_action` without an event.
    pub due: Time,
    pub credit: PortCredit,
    user: Option<(u32, Stage)>,
    used: Time,
    /// When two users last used the port at about the same time.
    shared: Option<Time>,
    configured: (u64, u64),
    /// What others leave of the port, if its NIC counts bytes.
    pub residual: Option<PortResidual>,
    /// Whether the kernel does not have the NIC now. Its flows go out unscheduled.
    pub is_absent: bool,
    is_rate_assumed: bool,
    nic: u8,
    name: Arc<str>,
    direction: &'static str,
}

/// How long a port has only one user before that user counts as alone. It is longer than the pauses
/// between the collectives of a batch.
const ALONE_AFTER: Span = Span::from_millis(100);

/// Maximum number of lanes that get missing credit each time that a port is served.
const REFILLS: usize = 8;

/// Reports whether a work request has nothing that would order it among others.
const fn is_anonymous(spec: &FlowSpec) -> bool {
    spec.whole && spec.batch.0 == 0 && spec.request.0 == 0 && spec.deadline.0 == Time::NEVER.0
}

/// Applies `config` to its ports: those in `ports`, and those of NICs that were added.
///
/// # Errors
/// A field is out of range. The old configuration stays in force.
pub fn configure(
    ports: &mut Vec<DriverPort>,
    now: Time,
    config: &Config,
) -> Result<(), InvalidConfig> {
    for nic in &config.nic {
        config.link(nic).validate()?;
    }
    let mut counted = [PortCounters::default(), PortCounters::default()];
    for (at, port) in ports.iter_mut().enumerate() {
        let Some(nic) = config.nic.get(at / 2) else { break };
        port.configure(now, config.link(nic))?;
        port.is_absent = nic.absent;
        port.is_rate_assumed = !nic.rate.is_known();
        // A NIC that `default` stood for has its own name now. What was counted stays `default`'s.
        if *port.name != *nic.name {
            port.name = nic.name.as_str().into();
            port.count();
            core::mem::swap(&mut port.counters, &mut counted[at % 2]);
        }
    }
    for (index, nic) in config.nic.iter().enumerate().skip(ports.len() / 2) {
        let name: Arc<str> = nic.name.as_str().into();
        for (side, direction) in ["egress", "ingress"].into_iter().enumerate() {
            let counters = match &*name {
                ALL_DEVICES => core::mem::take(&mut counted[side]),
                _ => PortCounters::default(),
            };
            ports.push(DriverPort {
                link: SharedLink::new(config.link(nic))?,
                shadow: None,
                counters,
                seen: [0; 4],
                dirty: false,
                due: Time::NEVER,
                credit: PortCredit::default(),
                user: None,
                used: Time::ZERO,
                shared: None,
                configured: (nic.rate.bytes_per_s, nic.window_bytes()),
                residual: None,
                is_absent: nic.absent,
                is_rate_assumed: !nic.rate.is_known(),
                nic: index as u8,
                name: Arc::clone(&name),
                direction,
            });
        }
    }
    Ok(())
}

impl DriverPort {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub const fn direction(&self) -> &'static str {
        self.direction
    }

    pub fn window_bytes(&self) -> u64 {
        self.link.config().window_bytes
    }

    fn configure(&mut self, now: Time, config: LinkConfig) -> Result<(), InvalidConfig> {
        self.dirty = true;
        let (rate, window_bytes) = self.configured;
        if (LinkConfig { rate, window_bytes, ..self.link.config().clone() }) != config {
            // A simulation of other settings begins anew with the next flow.
            self.shadow = None;
        }
        self.configured = (config.rate, config.window_bytes);
        self.link.set_config(now, config)
    }

    /// Applies a rate of at most the configured one, and the window for it.
    pub fn set_rate(&mut self, now: Time, rate: u64) {
        let (most, window) = self.configured;
        let rate = rate.min(most);
        if self.link.config().rate == rate {
            return;
        }
        let chunk = self.link.config().chunk_bytes;
        let window = residual::window_bytes((most, window), chunk, rate);
        self.link.set_capacity(rate, window);
        if let Some(shadow) = &mut self.shadow {
            shadow.set_capacity(now, rate, window);
        }
        self.dirty = true;
    }

    /// Returns how permits use the port. Bytes that were only observed count from their completion.
    pub fn usage(&self) -> PortUse {
        let stages = &self.counters.stages;
        let permitted: u64 = stages.iter().flat_map(|stage| stage.permitted_bytes).sum();
        let completed: u64 = stages.iter().map(|stage| stage.completed_bytes).sum();
        let unspent = self.credit.unspent();
        PortUse {
            rate: self.configured.0,
            permitted_bytes: permitted.max(completed).saturating_add(unspent),
            in_flight_bytes: self.link.in_flight_bytes().saturating_add(unspent),
        }
    }

    pub fn hint(&mut self, now: Time, domain: DomainId, event: Event) {
        let observed =
            self.shadow.as_ref().filter(|shadow| shadow.is_hinted(now)).map(|_| event.clone());
        self.link.handle(now, domain, event);
        if let (Some(shadow), Some(event)) = (&mut self.shadow, observed) {
            shadow.hint(now, event);
        }
        self.dirty = true;
    }

    /// Counts what enforcing would have done to a flow that was sent without a permit.
    pub fn observed(&mut self, now: Time, job: usize, spec: &FlowSpec) {
        if self.shadow.is_none() {
            // The link has the same configuration, so it is valid.
            self.shadow = ShadowLink::new(self.link.config().clone()).ok().map(Box::new);
        }
        if let Some(shadow) = &mut self.shadow {
            shadow.flow(now, job, spec);
        }
    }

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

    /// Reports whether one client, with one stage, was lately the only user of the port.
    #[inline]
    pub fn has_one_user(&self, now: Time) -> bool {
        self.shared.is_none_or(|then| now.since(then) >= ALONE_AFTER)
    }

    /// Reports whether anonymous flows of the port's only user may go at once. No other flow has to
    /// wait then and there is nothing to order, so the window would only cost round trips. A limit
    /// keeps the port usable for the next user.
    #[inline]
    fn has_room_alone(&self, now: Time, bytes: u64) -> bool {
        self.has_one_user(now)
            && self.link.waiting_flows() == 0
            && self.link.in_flight_bytes().saturating_add(bytes) <= alone_bytes(self.link.config())
    }

    /// Returns the first permit of a flow that finds no waiting flow and room in the window.
    /// Returns `None` if the flow has to wait.
    #[inline]
    #[must_use]
    pub fn permit_at_once(
        &mut self,
        now: Time,
        domain: DomainId,
        spec: &FlowSpec,
    ) -> Option<Permit> {
        self.link.peek_permit(now, domain, spec).or_else(|| {
            let goes = is_anonymous(spec) && self.has_room_alone(now, spec.bytes);
            goes.then(|| Permit {
                bytes: spec.bytes,
                level: self.link.link(domain).level_alone(now, spec),
                last: true,
            })
        })
    }

    /// Gives credit of this port, with index `index`, to the lane of a flow of `spec`, if such
    /// flows may use credit.
    #[inline]
    pub fn refill(&mut self, now: Time, from: &mut RecordOrigin<'_>, index: u16, spec: &FlowSpec) {
        let at = usize::from(index);
        if from.state.room == 0 || from.state.ports[at].is_held() || self.is_absent {
            // The client is unscheduled or its flows are held, and credit would let it send. Or it
            // would spend credit on a NIC that is gone.
        } else if spec.stage == Stage::Collective {
            self.refill_collectives(from, at);
        } else if spec.whole {
            let is_alone = is_anonymous(spec) && self.has_one_user(now);
            let consumer = &mut *from.consumer;
            let link = self.link.link(from.state.domain);
            self.credit.refill_idle(link, is_alone, at, consumer);
        }
    }

    /// Gives credit to a lane with collectives, or records that the lane needs some.
    #[inline]
    fn refill_collectives(&mut self, from: &mut RecordOrigin<'_>, index: usize) {
        let link = self.link.link(from.state.domain);
        if !self.credit.refill(link, index, from.consumer) {
            let lacks_credit = &mut from.state.lanes.at(from.lane).lacks_credit[index];
            if !*lacks_credit {
                *lacks_credit = true;
                self.credit.lanes_without_credit.push_back((from.client, from.lane));
            }
        }
    }

    /// Gives credit to some of the lanes that need it.
    pub fn refill_waiting_lanes(&mut self, clients: &mut [Option<AttachedClient>], index: usize) {
        let mut fed = false;
        for _ in 0..REFILLS.min(self.credit.lanes_without_credit.len()) {
            let Some((client, lane)) = self.credit.lanes_without_credit.pop_front() else { return };
            let Some(AttachedClient { state, served, .. }) =
                clients.get_mut(client as usize).and_then(Option::as_mut)
            else {
                continue;
            };
            if !self.credit.is_available(self.link.link(state.domain)) {
                // Lanes of another domain may get some.
                self.credit.lanes_without_credit.push_back((client, lane));
                continue;
            }
            fed = true;
            state.lanes.at(lane).lacks_credit[index] = false;
            let feeds = !state.released
                && !self.is_absent
                && state.room > 0
                && !state.ports[index].is_held();
            if let Some(consumer) = served.consumer(lane).filter(|_| feeds) {
                let mut from = RecordOrigin { client, state, lane, consumer };
                self.refill_collectives(&mut from, index);
            }
        }
        // Other lanes get credit in the next round.
        self.dirty |= fed && !self.credit.lanes_without_credit.is_empty();
    }

    /// Adds what the link and the reader of the NIC's counters have counted since the last call.
    /// Their counts begin at zero again with a new link or a new reader.
    fn count(&mut self) -> LinkSnapshot {
        let link = self.link.snapshot();
        let left = self.residual.map(|it| it.capacity).unwrap_or_default();
        let now = [link.promotions, link.demotions, left.foreign_bytes, left.signals];
        let PortCounters { promotions, demotions, foreign_bytes, signals, .. } = &mut self.counters;
        let counts = [promotions, demotions, foreign_bytes, signals];
        for ((count, now), seen) in counts.into_iter().zip(now).zip(self.seen) {
            *count += now.saturating_sub(seen);
        }
        self.seen = now;
        link
    }

    #[must_use]
    pub fn snapshot(&mut self, now: Time) -> PortSnapshot {
        let link = self.count();
        let would = self.shadow.as_mut().map(|shadow| shadow.minutes(now)).unwrap_or_default();
        let ahead = self.shadow.as_ref().map(|shadow| shadow.ahead_by_job(now));
        let config = self.link.config();
        PortSnapshot {
            nic: self.nic,
            name: Arc::clone(&self.name),
            direction: self.direction,
            rate: self.configured.0,
            rate_in_force: config.rate,
            residual: self.residual,
            window_bytes: config.window_bytes,
            levels: config.levels,
            is_absent: self.is_absent,
            is_rate_assumed: self.is_rate_assumed,
            link,
            counters: self.counters.clone(),
            would,
            ahead: ahead.unwrap_or_default(),
        }
    }
}
