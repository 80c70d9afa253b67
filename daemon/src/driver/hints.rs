//! Hints about batches and requests, for every link and for admission.
//!
//! Ids of batches and requests are global to a job, not to a client. The engine, its NCCL ranks and
//! its transfer library are several processes. So hints have one name space for each trust domain
//! ([`crate::domains`]), and a client can lie about the batches of its own domain only. Hints
//! reorder that domain's waiting flows and can send them to the scavenger. They permit nothing,
//! delay nothing for ever and cost bounded memory.
//!
//! A daemon runs admission (RED, Algorithm 1) for each domain on its own hints. While a
//! coordinator's order is in force ([`cluster`](super::cluster)), the links get that order. Batches
//! that it does not rank are merged in from the domain's own order. A coordinator knows no domains.
//! So an id belongs to the domain that reported it first ([`IdOwners`]).

use std::sync::Arc;

use laxity_policy::admission::{
    Admission, AdmissionAction, AdmissionConfig, AdmissionEvent, RequestLoad,
};
use laxity_policy::config::InvalidConfig;
use laxity_policy::{
    BatchId, BatchSpec, DomainId, Event, Layer, Order, PortId, RequestId, Span, Time,
};
use laxity_shm::record::Hint;
use tracing::debug;

use crate::config::Config;
use crate::coordinator::exchange::CoordinatorExchange;
use crate::coordinator::order::OrderContent;
use crate::driver::cluster::ClusterState;
use crate::driver::deadlines::{Deadlines, RequestTraces, TraceOfRequest, trace_id};
use crate::driver::id_owners::{IdOwners, WorkId};
use crate::driver::ports::DriverPort;
use crate::driver::running::Running;

/// The time between two logged events of requests.
const LOG_EVERY: Span = Span::from_millis(1000);

/// The pause after a run of admission, in durations of that run.
const DUTY: u64 = 20;

/// The index of the port that a request's announced bytes cross: a prefill unit sends its KV cache
/// out of the first NIC.
const REQUEST_PORT: usize = 0;

/// The scheduler's state of the batches and requests of all domains.
#[derive(Debug)]
pub struct Hints {
    /// The state of each domain, by its number. The first one is always there.
    domains: Vec<DomainHints>,
    /// The configuration of admission, for new domains.
    admission: AdmissionConfig,
    /// The rate of each port in bytes per second, for new domains.
    rates: Vec<u64>,
    /// The objective of requests without a deadline of their own, for new domains.
    slo: Option<Span>,
    id_owners: IdOwners,
    /// The time until which admission runs for no domain.
    paused_until: Time,
    /// The domain whose admission is looked at first.
    turn: usize,
    logged: Time,
    pub cluster: ClusterState,
}

/// The scheduler's state of the batches and requests of one domain.
#[derive(Debug)]
pub struct DomainHints {
    admission: Admission,
    requests: Deadlines,
    traces: RequestTraces,
    /// Whether the links do not have the cluster order in force yet.
    changed: bool,
    running: Running,
    /// The order that the links have. Its epoch counts these orders, because each source of orders
    /// has its own epochs.
    given: Order,
}

impl Hints {
    pub fn new(now: Time, config: &Config) -> Result<Self, InvalidConfig> {
        let mut hints = Self {
            domains: Vec::new(),
            admission: admission_config(config),
            rates: Vec::new(),
            slo: None,
            id_owners: IdOwners::default(),
            paused_until: Time::ZERO,
            turn: 0,
            logged: Time::ZERO,
            cluster: ClusterState::alone(),
        };
        hints.domains.push(hints.domain(now)?);
        hints.configure(now, config)?;
        Ok(hints)
    }

    fn domain(&self, now: Time) -> Result<DomainHints, InvalidConfig> {
        let mut admission = Admission::new(self.admission.clone())?;
        for (port, &bytes_per_second) in self.rates.iter().enumerate() {
            let port = PortId(port as u32);
            admission.handle(now, AdmissionEvent::PortRate { port, bytes_per_second });
        }
        let mut requests = Deadlines::default();
        requests.slo = self.slo;
        Ok(DomainHints {
            admission,
            requests,
            traces: RequestTraces::default(),
            changed: true,
            running: Running::default(),
            given: Order::default(),
        })
    }

    /// Returns the state of a domain, which [`Self::add_domain`] has to make first.
    #[inline]
    pub fn of(&mut self, domain: DomainId) -> &mut DomainHints {
        let at = usize::from(domain.0).min(self.domains.len() - 1);
        &mut self.domains[at]
    }

    /// Makes the state of a domain. With `anew`, it replaces that of another one with its number.
    pub fn add_domain(&mut self, now: Time, domain: DomainId, anew: bool) {
        let at = usize::from(domain.0);
        while self.domains.len() <= at
            && let Ok(state) = self.domain(now)
        {
            self.domains.push(state);
        }
        if anew && let Ok(state) = self.domain(now) {
            *self.of(domain) = state;
            self.id_owners.forget(domain);
        }
    }

    /// Applies a new configuration.
    ///
    /// # Errors
    /// A field is out of range. The old configuration stays in force.
    pub fn configure(&mut self, now: Time, config: &Config) -> Result<(), InvalidConfig> {
        self.cluster.configure(config);
        self.admission = admission_config(config);
        self.slo = config.slo_ttft.map(|slo| Span(slo.0));
        for domain in &mut self.domains {
            domain.requests.slo = self.slo;
            domain.admission.set_config(now, self.admission.clone())?;
        }
        let rates = config.nic.iter().flat_map(|nic| [nic.rate.bytes_per_s; 2]);
        for (port, bytes_per_second) in rates.enumerate() {
            self.set_rate(now, port, bytes_per_second);
        }
        Ok(())
    }

    fn set_rate(&mut self, now: Time, port: usize, bytes_per_second: u64) {
        if port >= self.rates.len() {
            self.rates.resize(port + 1, self.admission.default_rate);
        }
        self.rates[port] = bytes_per_second;
        let port = PortId(port as u32);
        for domain in &mut self.domains {
            domain.admission.handle(now, AdmissionEvent::PortRate { port, bytes_per_second });
        }
    }

    /// Gives each domain's order to the links again, because a new link has none.
    pub fn give_order_again(&mut self) {
        for domain in &mut self.domains {
            domain.changed = true;
            (domain.given.sigma, domain.given.pruned) = Default::default();
        }
    }

    /// Joins the cluster of the coordinator behind `exchange`.
    pub fn attend(&mut self, exchange: Arc<CoordinatorExchange>, config: &Config) {
        self.cluster = ClusterState::new(exchange, REQUEST_PORT as u32, config);
    }

    /// Reports to the coordinator, and checks which order is in force for [`Self::decide`].
    pub fn exchange_with_coordinator(&mut self, now: Time) {
        if self.cluster.poll(now) {
            self.domains.iter_mut().for_each(|domain| domain.changed = true);
        }
    }

    /// Accounts for bytes of `request` that completed on the port with this index.
    #[inline]
    pub fn completed(
        &mut self,
        now: Time,
        domain: DomainId,
        request: RequestId,
        port: u16,
        bytes: u64,
    ) {
        let state = self.of(domain);
        if request != RequestId(0) && state.admission.active_batches() > 0 {
            let port = PortId(u32::from(port));
            state.admission.handle(now, AdmissionEvent::BytesCompleted { request, port, bytes });
            if self.cluster.attends() && self.id_owners.may(domain, WorkId::Request(request)) {
                self.cluster.reports.completed(request.0, port.0, bytes);
                self.cluster.noted(now);
            }
        }
    }

    /// Returns the trace of a request, if its engine named one.
    pub fn trace_of(&self, domain: DomainId, request: RequestId) -> Option<TraceOfRequest> {
        self.domains.get(usize::from(domain.0))?.traces.of(request)
    }

    /// Logs an event of a request, once a second at most.
    #[cold]
    pub fn log(&mut self, now: Time, domain: DomainId, request: RequestId, event: &'static str) {
        if now.since(self.logged) >= LOG_EVERY {
            self.logged = now;
            let trace_id = trace_id(self.trace_of(domain, request));
            debug!(request = request.0, trace_id, "{event}");
        }
    }

    fn note(&mut self, now: Time, domain: DomainId, hint: &Hint) {
        if !self.cluster.attends() || !self.id_owners.hint(domain, hint) {
            return;
        }
        let deadline = match *hint {
            Hint::RequestJoin { request, .. } => self.of(domain).requests.known(RequestId(request)),
            _ => Time::NEVER,
        };
        let reports = &mut self.cluster.reports;
        match *hint {
            Hint::BatchBegin { batch, layers, layer_time_ns } => {
                reports.batch_began(batch, layers, Span(layer_time_ns));
            }
            Hint::RequestJoin { batch, request, bytes, .. } => {
                reports.joined(batch, request, deadline, bytes);
            }
            Hint::RequestEnd { request } => reports.ended(request),
            Hint::BatchQueued { batch, ahead } => reports.queued(batch, ahead),
            Hint::LayerBegin { batch, layer } => reports.layer(now, batch, layer),
            Hint::BatchEnd { batch } => reports.batch_ended(batch),
            Hint::ComputeEnd { .. } | Hint::RequestTrace { .. } => return,
        }
        self.cluster.noted(now);
    }

    pub fn take(
        &mut self,
        now: Time,
        domain: DomainId,
        pid: u32,
        hint: &Hint,
        ports: &mut [DriverPort],
    ) {
        self.of(domain).take(now, domain, pid, hint, ports);
        self.note(now, domain, hint);
    }

    /// Runs the admission of one domain if it is due, and gives a new order to its links: the
    /// coordinator's if it is in force, else admission's. Domains take turns. Then the admission of
    /// all domains rests for a multiple of the time that `clock` says it took. Returns the size of
    /// a new pruned set.
    pub fn decide(
        &mut self,
        now: Time,
        ports: &mut [DriverPort],
        clock: impl Fn() -> Time,
    ) -> Option<usize> {
        if self.paused_until > now {
            return None;
        }
        let count = self.domains.len();
        let mut turns = (0..count).map(|step| (self.turn + step) % count);
        let at = turns.find(|&at| self.domains[at].due() <= now)?;
        self.turn = at + 1;
        let (began, domain) = (clock(), DomainId(at as u8));
        let id_owners = &self.id_owners;
        let content = self.cluster.order_in_force();
        let others = content.filter(|_| self.domains.len() > 1).map(|content| {
            content.without(
                |batch| !id_owners.may(domain, WorkId::Batch(batch)),
                |request| !id_owners.may(domain, WorkId::Request(request)),
            )
        });
        let state = &mut self.domains[at];
        let before = tracing::enabled!(tracing::Level::DEBUG).then(|| state.given.pruned.clone());
        let order = state.decide(now, others.as_ref().or(content));
        let Some(order) = order else {
            self.pause(now, clock().since(began));
            return None;
        };
        let pruned = order.pruned.len();
        let is_new = |id: &&_| before.as_ref().is_some_and(|old| old.binary_search(id).is_err());
        if let Some(&new) = order.pruned.iter().find(is_new) {
            self.log(now, domain, new, "a request is pruned; not every one is logged");
        }
        broadcast(now, domain, &Event::OrderChanged(order), ports);
        self.pause(now, clock().since(began));
        Some(pruned)
    }

    /// Returns when [`Self::decide`] is due.
    pub fn due(&self) -> Time {
        let due = self.domains.iter().map(DomainHints::due).min().unwrap_or(Time::NEVER);
        due.max(self.paused_until)
    }

    /// Delays the next [`Self::decide`] after a run of length `took` that ended at `now`. So the
    /// runs of all domains take at most one part in [`DUTY`] of the scheduler's time.
    fn pause(&mut self, now: Time, took: Span) {
        self.paused_until = now + took.times(DUTY);
    }
}

impl DomainHints {
    /// Returns the deadline of a flow: its own, its request's, or the configured objective from the
    /// first record of the request.
    #[inline]
    pub fn deadline(&mut self, now: Time, own_ns: u64, request: u64) -> Time {
        if own_ns != 0 {
            return Time(own_ns);
        }
        if request == 0 {
            return Time::NEVER;
        }
        self.requests.of(now, RequestId(request))
    }

    /// Returns the batch and layer of a process's collective that names no batch.
    #[inline]
    pub fn computed_by(&self, pid: u32) -> Option<(BatchId, Layer)> {
        self.running.of(pid)
    }

    fn take(
        &mut self,
        now: Time,
        domain: DomainId,
        pid: u32,
        hint: &Hint,
        ports: &mut [DriverPort],
    ) {
        match *hint {
            Hint::LayerBegin { batch, layer } => {
                self.running.layer_began(pid, BatchId(batch), Layer(layer));
            }
            Hint::ComputeEnd { batch } | Hint::BatchEnd { batch } => {
                self.running.ended(BatchId(batch));
            }
            _ => {}
        }
        self.pass_on(now, domain, hint, ports);
    }

    fn pass_on(&mut self, now: Time, domain: DomainId, hint: &Hint, ports: &mut [DriverPort]) {
        use AdmissionEvent as Between;
        let (between, event) = match *hint {
            Hint::RequestTrace { request, trace, span } => {
                return self.traces.remember(RequestId(request), (trace, span));
            }
            Hint::RequestJoin { batch, request, deadline_ns, bytes } => {
                let member = (domain, BatchId(batch), RequestId(request));
                return self.request_joined(now, member, deadline_ns, bytes, ports);
            }
            Hint::BatchBegin { batch, layers, layer_time_ns } => {
                let (batch, layer_time) = (BatchId(batch), Span(layer_time_ns));
                let arrived = Between::BatchArrived {
                    batch,
                    requests: Vec::new(),
                    compute: layer_time.times(u64::from(layers)),
                };
                let spec = BatchSpec { batch, layers, layer_time };
                (Some(arrived), Event::BatchBegan(spec))
            }
            Hint::RequestEnd { request } => {
                let request = RequestId(request);
                self.requests.forget(request);
                self.traces.forget(request);
                let ended = Between::RequestEnded { request };
                (Some(ended), Event::RequestEnded { request })
            }
            Hint::BatchQueued { batch, ahead } => {
                let (batch, ahead) = (BatchId(batch), BatchId(ahead));
                let queued = Between::BatchQueued { batch, ahead };
                (Some(queued), Event::BatchQueued { batch, ahead })
            }
            Hint::LayerBegin { batch, layer } => {
                let (batch, layer) = (BatchId(batch), Layer(layer));
                let started = Between::BatchStarted { batch };
                (Some(started), Event::LayerBegan { batch, layer })
            }
            Hint::ComputeEnd { batch } => {
                let batch = BatchId(batch);
                (None, Event::ComputeFinished { batch })
            }
            Hint::BatchEnd { batch } => {
                let batch = BatchId(batch);
                self.requests.forget_batch(batch);
                let departed = Between::BatchDeparted { batch };
                (Some(departed), Event::BatchEnded { batch })
            }
        };
        if let Some(between) = between {
            self.admission.handle(now, between);
        }
        broadcast(now, domain, &event, ports);
    }

    /// Adds a request to a batch. Its announced bytes cross only [`REQUEST_PORT`].
    fn request_joined(
        &mut self,
        now: Time,
        (domain, batch, request): (DomainId, BatchId, RequestId),
        deadline_ns: u64,
        bytes: u64,
        ports: &mut [DriverPort],
    ) {
        let deadline = match deadline_ns {
            0 => self.requests.of(now, request),
            own => Time(own),
        };
        if deadline != Time::NEVER {
            self.requests.remember(request, batch, deadline);
        }
        let load = RequestLoad {
            request,
            deadline,
            ports: vec![(PortId(REQUEST_PORT as u32), bytes)],
            started: false,
        };
        self.admission.handle(now, AdmissionEvent::RequestJoined { batch, load });
        for (index, port) in ports.iter_mut().enumerate() {
            let event = Event::RequestJoined {
                batch,
                request,
                deadline,
                bytes: if index == REQUEST_PORT { bytes } else { 0 },
            };
            port.hint(now, domain, event);
        }
    }

    /// Runs admission if it is due. Returns an order that the links do not have yet.
    fn decide(&mut self, now: Time, cluster: Option<&OrderContent>) -> Option<Order> {
        let own = self.admission.poll_action(now);
        if own.is_none() && !core::mem::take(&mut self.changed) {
            return None;
        }
        self.changed = false;
        let own = match own {
            Some(AdmissionAction::OrderChanged(order)) => order,
            None => self.admission.order().clone(),
        };
        let mut order = match cluster {
            Some(content) => content.merged_with(&own, |request| self.requests.batch_of(request)),
            None => own,
        };
        if (&order.sigma, &order.pruned) == (&self.given.sigma, &self.given.pruned) {
            return None;
        }
        order.epoch = self.given.epoch + 1;
        self.given.clone_from(&order);
        Some(order)
    }

    /// Returns when [`Self::decide`] is due.
    fn due(&self) -> Time {
        if self.changed {
            return Time::ZERO;
        }
        self.admission.next_deadline().unwrap_or(Time::NEVER)
    }
}

fn admission_config(config: &Config) -> AdmissionConfig {
    AdmissionConfig {
        drop_budget: config.tuning.drop_budget,
        debounce: Span(config.tuning.order_debounce.0),
        batches_max: config.scheduler.batches_per_domain_max,
        requests_max: config.scheduler.requests_per_domain_max,
        ..AdmissionConfig::for_policy(config.policy)
    }
}

fn broadcast(now: Time, domain: DomainId, event: &Event, ports: &mut [DriverPort]) {
    for port in ports {
        port.hint(now, domain, event.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn admission_rests_for_a_multiple_of_what_it_took() {
        let config = Config::default();
        let mut hints = Hints::new(Time::ZERO, &config).expect("the defaults are valid");
        let begin = Hint::BatchBegin { batch: 1, layers: 1, layer_time_ns: 1 };
        let domain = DomainId::default();
        hints.take(Time::ZERO, domain, 1, &begin, &mut []);
        assert!(hints.due() < Time::NEVER);
        let now = Time(9_000_000);
        hints.pause(now, Span(1_000_000));
        assert_eq!(hints.due(), Time(29_000_000));
    }

    #[test]
    fn the_admissions_of_all_domains_share_one_rest_and_take_turns() {
        let mut hints = Hints::new(Time::ZERO, &Config::default()).expect("valid");
        hints.add_domain(Time::ZERO, DomainId(1), false);
        let clock = std::cell::Cell::new(0);
        let took = || Time(clock.replace(clock.get() + 1000));
        let now = Time(1_000_000_000);
        hints.decide(now, &mut [], took);
        assert_eq!((hints.turn, hints.due()), (1, now + Span(1000 * DUTY)));
        hints.domains[0].changed = true;
        hints.decide(now, &mut [], took);
        assert_eq!(hints.turn, 1, "it rests for all");
        hints.decide(hints.paused_until, &mut [], took);
        assert_eq!(hints.turn, 2, "the other one, though the first is due again");
    }
}
