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

use std::sync::Arc;

use laxity_policy::admission::{
    Admission, AdmissionAction, AdmissionConfig, AdmissionEvent, RequestLoad,
};
use laxity_policy::config::InvalidConfig;
use laxity_policy::{BatchId, BatchSpec, Event, Layer, Order, PortId, RequestId, Span, Time};
use laxity_shm::record::Record;

use crate::config::Config;
use crate::coordinator::exchange::CoordinatorExchange;
use crate::driver::cluster::Cluster;
use crate::driver::deadlines::Deadlines;
use crate::driver::fetches::Move;
use crate::driver::ports::Port;
use crate::driver::running::Running;

/// Time between two runs of admission, in durations of the last one.
const DUTY: u64 = 20;

/// The port that a request's announced bytes are taken to cross: a prefill unit sends its KV cache
/// out of the first NIC.
const REQUEST_PORT: usize = 0;

/// What is known of batches and requests.
#[derive(Debug)]
pub struct Hints {
    admission: Admission,
    requests: Deadlines,
    /// Admission does not run before this time.
    rested: Time,
    /// The part in a cluster.
    pub cluster: Cluster,
    /// The cluster order in force is not the one that the links have.
    changed: bool,
    /// What each process computes now.
    running: Running,
    /// What the links have. Its epoch counts what they were given: both sources of it have epochs
    /// of their own.
    given: Order,
}

impl Hints {
    /// Nothing is known yet.
    ///
    /// # Errors
    /// A field of the admission's configuration is out of range.
    pub fn new(now: Time, config: &Config) -> Result<Self, InvalidConfig> {
        let mut hints = Self {
            admission: Admission::new(admission_config(config))?,
            requests: Deadlines::default(),
            rested: Time::ZERO,
            cluster: Cluster::alone(),
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
        self.requests.slo = config.slo_ttft.map(|slo| Span(slo.0));
        self.cluster.configure(config);
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
        self.cluster = Cluster::new(exchange, REQUEST_PORT as u32, config);
    }

    /// Reports to the coordinator, and looks whose order holds. [`Self::decide`] then acts on it;
    /// fetches are held and released here. Whether any was.
    pub fn meet(&mut self, now: Time, ports: &mut [Port]) -> bool {
        self.changed |= self.cluster.poll(now);
        let moves = self.cluster.fetches.take_moves();
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
        self.requests.of(now, RequestId(request))
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
            if self.cluster.attends() {
                self.cluster.reports.completed(request.0, port.0, bytes);
                self.cluster.noted(now);
            }
        }
    }

    /// Notes a hint for the coordinator.
    fn note(&mut self, now: Time, record: &Record) {
        if !self.cluster.attends() {
            return;
        }
        let reports = &mut self.cluster.reports;
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
                let deadline = self.requests.known(RequestId(request));
                reports.joined(batch, request, deadline, bytes);
            }
            Record::RequestEnd { request } => reports.ended(request),
            Record::BatchQueued { batch, ahead } => reports.queued(batch, ahead),
            Record::LayerBegin { batch, layer } => reports.layer(now, batch, layer),
            Record::BatchEnd { batch } => reports.batch_ended(batch),
            _ => return,
        }
        self.cluster.noted(now);
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
        use AdmissionEvent as Between;
        let (between, event) = match *record {
            Record::RequestJoin {
                batch,
                request,
                deadline_ns,
                bytes,
            } => {
                let member = (BatchId(batch), RequestId(request));
                return self.request_joined(now, member, deadline_ns, bytes, ports);
            }
            Record::BatchBegin {
                batch,
                layers,
                layer_time_ns,
            } => {
                let (batch, layer_time) = (BatchId(batch), Span(layer_time_ns));
                let arrived = Between::BatchArrived {
                    batch,
                    requests: Vec::new(),
                    compute: layer_time.times(u64::from(layers)),
                };
                let spec = BatchSpec {
                    batch,
                    layers,
                    layer_time,
                };
                (Some(arrived), Event::BatchBegan(spec))
            }
            Record::RequestEnd { request } => {
                let request = RequestId(request);
                self.requests.forget(request);
                let ended = Between::RequestEnded { request };
                (Some(ended), Event::RequestEnded { request })
            }
            Record::BatchQueued { batch, ahead } => {
                let (batch, ahead) = (BatchId(batch), BatchId(ahead));
                let queued = Between::BatchQueued { batch, ahead };
                (Some(queued), Event::BatchQueued { batch, ahead })
            }
            Record::LayerBegin { batch, layer } => {
                let (batch, layer) = (BatchId(batch), Layer(layer));
                let started = Between::BatchStarted { batch };
                (Some(started), Event::LayerBegan { batch, layer })
            }
            Record::ComputeEnd { batch } => {
                let batch = BatchId(batch);
                (None, Event::ComputeFinished { batch })
            }
            Record::BatchEnd { batch } => {
                let batch = BatchId(batch);
                self.requests.forget_batch(batch);
                let departed = Between::BatchDeparted { batch };
                (Some(departed), Event::BatchEnded { batch })
            }
            _ => return,
        };
        if let Some(between) = between {
            self.admission.handle(now, between);
        }
        broadcast(now, &event, ports);
    }

    /// A request is a member of a batch. Its announced bytes cross [`REQUEST_PORT`] alone.
    fn request_joined(
        &mut self,
        now: Time,
        (batch, request): (BatchId, RequestId),
        deadline_ns: u64,
        bytes: u64,
        ports: &mut [Port],
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
        self.admission
            .handle(now, AdmissionEvent::RequestJoined { batch, load });
        for (index, port) in ports.iter_mut().enumerate() {
            let event = Event::RequestJoined {
                batch,
                request,
                deadline,
                bytes: if index == REQUEST_PORT { bytes } else { 0 },
            };
            port.link.handle(now, event);
            port.dirty = true;
        }
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
        let mut order = match self.cluster.order_in_force() {
            Some(content) => content.merged_with(&own, |request| self.requests.batch_of(request)),
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

    #[test]
    fn admission_rests_for_a_multiple_of_what_it_took() {
        let config = Config::default();
        let mut hints = Hints::new(Time::ZERO, &config).expect("the defaults are valid");
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
