//! What applications say of batches and requests: to every link, and to admission.
//!
//! Ids of batches and requests are global to the job, not to a client: the engine that announces a
//! batch, the NCCL ranks that move its collectives and the transfer library that moves its KV
//! cache are several processes. So hints are not name-spaced, and a hostile client that is allowed
//! to attach can lie about batches it does not own. What it gains is bounded: hints move waiting
//! flows between levels and into the order, the scavenger included; they permit nothing, hold
//! nothing back for ever (scavenged work finishes), and cost bounded memory. Where tenants do not
//! trust each other, they get daemons of their own, or do not get access to this one.
//!
//! A daemon runs admission (RED, Algorithm 1) on what it sees. Where a coordinator's order is in
//! force ([`cluster`](super::cluster)), the links get that, with this one's in it as far as it
//! names batches that the coordinator does not rank.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use laxity_policy::admission::{
    Admission, AdmissionAction, AdmissionConfig, AdmissionEvent, RequestLoad,
};
use laxity_policy::config::InvalidConfig;
use laxity_policy::{
    BatchId, BatchSpec, Event, FlowId, FlowSpec, Layer, Order, PortId, RequestId, Span, Time,
};
use laxity_shm::record::Record;

use crate::config::Config;
use crate::coordinator::exchange::CoordinatorExchange;
use crate::driver::cluster::Cluster;
use crate::driver::fetches::{FetchCounters, Move, Name};
use crate::driver::ports::Port;
use crate::driver::running::Running;

/// Requests whose deadlines are remembered; the oldest are forgotten.
const REQUESTS_MAX: usize = 1 << 16;

/// Time between two runs of admission, in durations of the last one.
const DUTY: u64 = 20;

/// The port that a request's announced bytes are taken to cross: a prefill unit sends its KV cache
/// out of the first NIC.
const REQUEST_PORT: usize = 0;

/// What is known of batches and requests.
#[derive(Debug)]
pub struct Hints {
    admission: Admission,
    deadlines: HashMap<RequestId, Known>,
    members: HashMap<BatchId, HashSet<RequestId>>,
    /// In the order of first sight; `Known::sight` says whether an entry still holds.
    ages: VecDeque<(RequestId, u64)>,
    sights: u64,
    slo: Option<Span>,
    /// Admission does not run before this time.
    rested: Time,
    /// The part in a cluster, if there is a coordinator.
    cluster: Option<Box<Cluster>>,
    /// The cluster order in force is not the one that the links have.
    changed: bool,
    /// What each process computes now.
    running: Running,
    /// What the links have. Its epoch counts what they were given: both sources of it have epochs
    /// of their own.
    given: Order,
}

/// What is remembered of a request.
#[derive(Clone, Copy, Debug)]
struct Known {
    deadline: Time,
    /// Its batch, zero if none was named.
    batch: BatchId,
    sight: u64,
}

impl Hints {
    /// Nothing is known yet.
    ///
    /// # Errors
    /// A field of the admission's configuration is out of range.
    pub fn new(now: Time, config: &Config) -> Result<Self, InvalidConfig> {
        let mut hints = Self {
            admission: Admission::new(admission_config(config))?,
            deadlines: HashMap::new(),
            members: HashMap::new(),
            ages: VecDeque::new(),
            sights: 0,
            slo: None,
            rested: Time::ZERO,
            cluster: None,
            changed: false,
            running: Running::default(),
            given: Order::default(),
        };
        hints.configure(now, config)?;
        Ok(hints)
    }

    /// Takes a new configuration.
    ///
    /// # Errors
    /// A field is out of range; the old one stays in force.
    pub fn configure(&mut self, now: Time, config: &Config) -> Result<(), InvalidConfig> {
        self.slo = config.slo_ttft.map(|slo| Span(slo.0));
        if let Some(cluster) = &mut self.cluster {
            cluster.configure(config);
        }
        self.admission.set_config(now, admission_config(config))?;
        let rates = config.nic.iter().flat_map(|nic| [nic.rate.0; 2]);
        for (index, bytes_per_second) in rates.enumerate() {
            let port = PortId(index as u32);
            self.admission.handle(
                now,
                AdmissionEvent::PortRate {
                    port,
                    bytes_per_second,
                },
            );
        }
        Ok(())
    }

    /// Takes part in the cluster whose coordinator is behind `exchange`.
    pub fn attend(&mut self, exchange: Arc<CoordinatorExchange>, config: &Config) {
        self.cluster = Some(Box::new(Cluster::new(
            exchange,
            REQUEST_PORT as u32,
            config,
        )));
    }

    /// Reads what the coordinator's task left in the exchange at the next [`Self::meet`].
    pub fn apply_coordinator_update(&mut self, now: Time) {
        if let Some(cluster) = &mut self.cluster {
            cluster.apply_coordinator_update(now);
        }
    }

    /// When [`Self::meet`] is due.
    #[inline]
    #[must_use]
    pub fn cluster_due(&self) -> Time {
        let cluster = self.cluster.as_ref();
        cluster.map_or(Time::NEVER, |cluster| cluster.due())
    }

    /// Reports to the coordinator, and looks whose order holds. [`Self::decide`] then acts on it;
    /// fetches are held and released here. Whether any was.
    pub fn meet(&mut self, now: Time, ports: &mut [Port]) -> bool {
        let Some(cluster) = &mut self.cluster else {
            return false;
        };
        self.changed |= cluster.poll(now);
        let moves = cluster.take_moves();
        for &Move { port, flow, hold } in &moves {
            let port = &mut ports[usize::from(port)];
            let event = if hold {
                Event::FlowHeld { flow }
            } else {
                Event::FlowReleased { flow }
            };
            port.link.handle(now, event);
            port.dirty = true;
        }
        !moves.is_empty()
    }

    /// A flow comes in from a peer. Gives whether it belongs to a fetch, and whether it is to be
    /// held.
    pub fn fetches(
        &mut self,
        now: Time,
        spec: &FlowSpec,
        peer: [u8; 16],
        port: u16,
    ) -> (bool, bool) {
        let Some(cluster) = &mut self.cluster else {
            return (false, false);
        };
        let name = Name {
            batch: spec.batch.0,
            request: spec.request.0,
            peer,
        };
        cluster.fetches(now, name, spec.flow, port, spec.bytes)
    }

    /// Such a flow is complete, or gone.
    pub fn fetched(&mut self, now: Time, flow: FlowId) {
        if let Some(cluster) = &mut self.cluster {
            cluster.fetched(now, flow);
        }
    }

    /// Whether a fetch waits.
    #[must_use]
    pub fn holds_fetches(&self) -> bool {
        let cluster = self.cluster.as_ref();
        cluster.is_some_and(|cluster| cluster.holds_fetches())
    }

    /// Whether this flow is part of a fetch that waits.
    #[must_use]
    pub fn holds_flow(&self, flow: FlowId) -> bool {
        let cluster = self.cluster.as_ref();
        cluster.is_some_and(|cluster| cluster.holds_flow(flow))
    }

    /// What was counted of fetches.
    #[must_use]
    pub fn fetch_counters(&self) -> FetchCounters {
        let cluster = self.cluster.as_ref();
        cluster.map_or_else(FetchCounters::default, |cluster| cluster.fetch_counters())
    }

    /// The deadline of a flow: its own, its request's, or the configured objective counted from
    /// the first sight of the request.
    #[inline]
    pub fn deadline(&mut self, now: Time, own_ns: u64, request: u64) -> Time {
        if own_ns != 0 {
            return Time(own_ns);
        }
        if request == 0 {
            return Time::NEVER;
        }
        self.request_deadline(now, RequestId(request))
    }

    fn request_deadline(&mut self, now: Time, request: RequestId) -> Time {
        if let Some(known) = self.deadlines.get(&request) {
            return known.deadline;
        }
        match self.slo {
            Some(slo) => self.remember(request, BatchId(0), now + slo),
            None => Time::NEVER,
        }
    }

    fn remember(&mut self, request: RequestId, batch: BatchId, deadline: Time) -> Time {
        self.forget(request);
        self.sights += 1;
        let sight = self.sights;
        let known = Known {
            deadline,
            batch,
            sight,
        };
        self.deadlines.insert(request, known);
        if batch != BatchId(0) {
            self.members.entry(batch).or_default().insert(request);
        }
        self.ages.push_back((request, sight));
        if self.ages.len() > REQUESTS_MAX
            && let Some((oldest, sight)) = self.ages.pop_front()
            && self
                .deadlines
                .get(&oldest)
                .is_some_and(|k| k.sight == sight)
        {
            self.forget(oldest);
        }
        deadline
    }

    /// A request has ended: its id may come again, and is then another's.
    fn forget(&mut self, request: RequestId) {
        if let Some(known) = self.deadlines.remove(&request)
            && let Some(members) = self.members.get_mut(&known.batch)
        {
            members.remove(&request);
            if members.is_empty() {
                self.members.remove(&known.batch);
            }
        }
    }

    /// Bytes of `request` have left the port with this index.
    #[inline]
    pub fn completed(&mut self, now: Time, request: RequestId, port: u16, bytes: u64) {
        if request != RequestId(0) && self.admission.active_batches() > 0 {
            let port = PortId(u32::from(port));
            self.admission.handle(
                now,
                AdmissionEvent::BytesCompleted {
                    request,
                    port,
                    bytes,
                },
            );
            if let Some(cluster) = &mut self.cluster {
                cluster.reports.completed(request.0, port.0, bytes);
                cluster.noted(now);
            }
        }
    }

    /// Notes a hint for the coordinator.
    fn note(&mut self, now: Time, record: &Record) {
        let Some(cluster) = &mut self.cluster else {
            return;
        };
        let reports = &mut cluster.reports;
        match *record {
            Record::BatchBegin {
                batch,
                layers,
                layer_time_ns,
            } => reports.batch_began(batch, layers, Span(layer_time_ns)),
            Record::RequestJoin {
                batch,
                request,
                bytes,
                ..
            } => {
                let known = self.deadlines.get(&RequestId(request));
                let deadline = known.map_or(Time::NEVER, |known| known.deadline);
                reports.joined(batch, request, deadline, bytes);
            }
            Record::RequestEnd { request } => reports.ended(request),
            Record::BatchQueued { batch, ahead } => reports.queued(batch, ahead),
            Record::LayerBegin { batch, layer } => reports.layer(now, batch, layer),
            Record::BatchEnd { batch } => reports.batch_ended(batch),
            _ => return,
        }
        cluster.noted(now);
    }

    /// The batch and layer of a collective that names no batch, of a process.
    #[inline]
    #[must_use]
    pub fn computed_by(&self, pid: u32) -> Option<(BatchId, Layer)> {
        self.running.of(pid)
    }

    /// Passes a hint of a process on. Records that are no hints are ignored.
    pub fn take(&mut self, now: Time, pid: u32, record: &Record, ports: &mut [Port]) {
        match *record {
            Record::LayerBegin { batch, layer } => {
                self.running.layer_began(pid, BatchId(batch), Layer(layer));
            }
            Record::ComputeEnd { batch } | Record::BatchEnd { batch } => {
                self.running.ended(BatchId(batch));
            }
            _ => {}
        }
        self.pass_on(now, record, ports);
        self.note(now, record);
    }

    fn pass_on(&mut self, now: Time, record: &Record, ports: &mut [Port]) {
        let event = match *record {
            Record::BatchBegin {
                batch,
                layers,
                layer_time_ns,
            } => {
                let (batch, layer_time) = (BatchId(batch), Span(layer_time_ns));
                self.admission.handle(
                    now,
                    AdmissionEvent::BatchArrived {
                        batch,
                        requests: Vec::new(),
                        compute: layer_time.times(u64::from(layers)),
                    },
                );
                Event::BatchBegan(BatchSpec {
                    batch,
                    layers,
                    layer_time,
                })
            }
            Record::RequestJoin {
                batch,
                request,
                deadline_ns,
                bytes,
            } => {
                let (batch, request) = (BatchId(batch), RequestId(request));
                let deadline = if deadline_ns == 0 {
                    self.request_deadline(now, request)
                } else {
                    Time(deadline_ns)
                };
                if deadline != Time::NEVER {
                    self.remember(request, batch, deadline);
                }
                let load = RequestLoad {
                    request,
                    deadline,
                    ports: vec![(PortId(REQUEST_PORT as u32), bytes)],
                    started: false,
                };
                self.admission
                    .handle(now, AdmissionEvent::RequestJoined { batch, load });
                for (index, port) in ports.iter_mut().enumerate() {
                    let bytes = if index == REQUEST_PORT { bytes } else { 0 };
                    let event = Event::RequestJoined {
                        batch,
                        request,
                        deadline,
                        bytes,
                    };
                    port.link.handle(now, event);
                    port.dirty = true;
                }
                return;
            }
            Record::RequestEnd { request } => {
                let request = RequestId(request);
                self.forget(request);
                self.admission
                    .handle(now, AdmissionEvent::RequestEnded { request });
                Event::RequestEnded { request }
            }
            Record::BatchQueued { batch, ahead } => {
                let (batch, ahead) = (BatchId(batch), BatchId(ahead));
                self.admission
                    .handle(now, AdmissionEvent::BatchQueued { batch, ahead });
                Event::BatchQueued { batch, ahead }
            }
            Record::LayerBegin { batch, layer } => {
                let batch = BatchId(batch);
                self.admission
                    .handle(now, AdmissionEvent::BatchStarted { batch });
                Event::LayerBegan {
                    batch,
                    layer: Layer(layer),
                }
            }
            Record::ComputeEnd { batch } => Event::ComputeFinished {
                batch: BatchId(batch),
            },
            Record::BatchEnd { batch } => {
                let batch = BatchId(batch);
                for request in self.members.remove(&batch).unwrap_or_default() {
                    self.deadlines.remove(&request);
                }
                self.admission
                    .handle(now, AdmissionEvent::BatchDeparted { batch });
                Event::BatchEnded { batch }
            }
            _ => return,
        };
        broadcast(now, &event, ports);
    }

    /// Runs admission if it is due, and passes a new order to every link: the coordinator's, if one
    /// is in force, else admission's. Gives the size of the pruned set if there was one.
    pub fn decide(&mut self, now: Time, ports: &mut [Port]) -> Option<usize> {
        let own = self.admission.poll_action(now);
        if own.is_none() && !core::mem::take(&mut self.changed) {
            return None;
        }
        self.changed = false;
        let own = match own {
            Some(AdmissionAction::OrderChanged(order)) => order,
            None => self.admission.order().clone(),
        };
        let cluster = self.cluster.as_ref();
        let content = cluster.and_then(|cluster| cluster.order_in_force());
        let mut order = match content {
            Some(content) => {
                let known = |request| self.deadlines.get(&request);
                content.merged_with(&own, |request| {
                    known(request).map_or(BatchId(0), |k| k.batch)
                })
            }
            None => own,
        };
        if (&order.sigma, &order.pruned) == (&self.given.sigma, &self.given.pruned) {
            return None;
        }
        order.epoch = self.given.epoch + 1;
        self.given.clone_from(&order);
        let pruned = order.pruned.len();
        broadcast(now, &Event::OrderChanged(order), ports);
        Some(pruned)
    }

    /// When [`Self::decide`] is due.
    #[must_use]
    pub fn due(&self) -> Time {
        if self.changed {
            return self.rested;
        }
        match self.admission.next_deadline() {
            Some(due) => due.max(self.rested),
            None => Time::NEVER,
        }
    }

    /// [`Self::decide`] took this long, until `now`. It has at most one part in [`DUTY`] of the
    /// scheduler's time, however many batches there are and however often hints change them.
    pub fn rest(&mut self, now: Time, took: Span) {
        self.rested = now + took.times(DUTY);
    }
}

fn admission_config(config: &Config) -> AdmissionConfig {
    AdmissionConfig {
        drop_budget: config.tuning.drop_budget,
        debounce: Span(config.tuning.order_debounce.0),
        ..AdmissionConfig::for_policy(config.policy)
    }
}

fn broadcast(now: Time, event: &Event, ports: &mut [Port]) {
    for port in ports {
        port.link.handle(now, event.clone());
        port.dirty = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use laxity_quantity::Nanos;

    const SLO: Span = Span::from_millis(100);

    fn hints() -> Hints {
        let config = Config {
            slo_ttft: Some(Nanos(SLO.0)),
            ..Config::default()
        };
        Hints::new(Time::ZERO, &config).expect("the defaults are valid")
    }

    #[test]
    fn a_deadline_is_forgotten_with_its_request_and_with_its_batch() {
        let mut hints = hints();
        let (first, later) = (Time(1000), Time(5_000_000_000));
        let end = Record::RequestEnd { request: 7 };
        assert_eq!(hints.deadline(first, 0, 7), first + SLO);
        assert_eq!(hints.deadline(later, 0, 7), first + SLO);
        hints.take(later, 1, &end, &mut []);
        assert_eq!(hints.deadline(later, 0, 7), later + SLO);

        let join = Record::RequestJoin {
            batch: 3,
            request: 8,
            deadline_ns: 0,
            bytes: 1,
        };
        hints.take(first, 1, &join, &mut []);
        assert_eq!(hints.deadline(later, 0, 8), first + SLO);
        hints.take(later, 1, &Record::BatchEnd { batch: 3 }, &mut []);
        assert_eq!(hints.deadline(later, 0, 8), later + SLO);
        assert!(hints.members.is_empty());
    }

    #[test]
    fn what_is_remembered_of_requests_is_bounded_though_they_end_and_return() {
        let mut hints = hints();
        for round in 0..3 * REQUESTS_MAX as u64 {
            let request = 1 + round % 100;
            hints.deadline(Time(round), 0, request);
            hints.take(Time(round), 1, &Record::RequestEnd { request }, &mut []);
            hints.deadline(Time(round), 0, 1_000_000 + round);
        }
        assert!(hints.ages.len() <= REQUESTS_MAX && hints.deadlines.len() <= REQUESTS_MAX);
    }

    #[test]
    fn admission_rests_for_a_multiple_of_what_it_took() {
        let mut hints = hints();
        let begin = Record::BatchBegin {
            batch: 1,
            layers: 1,
            layer_time_ns: 1,
        };
        hints.take(Time::ZERO, 1, &begin, &mut []);
        assert!(hints.due() < Time::NEVER);
        let now = Time(9_000_000);
        hints.rest(now, Span(1_000_000));
        assert_eq!(hints.due(), Time(29_000_000));
    }
}
