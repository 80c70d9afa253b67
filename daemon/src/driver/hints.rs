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
//! A daemon runs admission (RED, Algorithm 1) on what it sees; a coordinator would replace its
//! order (architecture §4.4).

use std::collections::{HashMap, VecDeque};

use laxity_policy::admission::{
    Admission, AdmissionAction, AdmissionConfig, AdmissionEvent, RequestLoad,
};
use laxity_policy::config::InvalidConfig;
use laxity_policy::{BatchId, BatchSpec, Event, Layer, PortId, RequestId, Span, Time};
use laxity_shm::record::Record;

use crate::config::Config;
use crate::driver::ports::Port;

/// Requests whose deadlines are remembered; the oldest are forgotten.
const REQUESTS_MAX: usize = 1 << 16;

/// The port that a request's announced bytes are taken to cross: a prefill unit sends its KV cache
/// out of the first NIC.
const REQUEST_PORT: usize = 0;

/// What is known of batches and requests.
#[derive(Debug)]
pub struct Hints {
    admission: Admission,
    deadlines: HashMap<RequestId, Time>,
    ages: VecDeque<RequestId>,
    slo: Option<Span>,
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
            ages: VecDeque::new(),
            slo: None,
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
        if let Some(&deadline) = self.deadlines.get(&request) {
            return deadline;
        }
        match self.slo {
            Some(slo) => self.remember(request, now + slo),
            None => Time::NEVER,
        }
    }

    fn remember(&mut self, request: RequestId, deadline: Time) -> Time {
        if self.deadlines.insert(request, deadline).is_none() {
            self.ages.push_back(request);
            if self.ages.len() > REQUESTS_MAX
                && let Some(oldest) = self.ages.pop_front()
            {
                self.deadlines.remove(&oldest);
            }
        }
        deadline
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
        }
    }

    /// Passes a hint on. Records that are no hints are ignored.
    pub fn take(&mut self, now: Time, record: &Record, ports: &mut [Port]) {
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
                    self.remember(request, Time(deadline_ns))
                };
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
                self.admission
                    .handle(now, AdmissionEvent::BatchDeparted { batch });
                Event::BatchEnded { batch }
            }
            _ => return,
        };
        broadcast(now, &event, ports);
    }

    /// Runs admission if it is due, and passes a new order to every link. Gives the size of the
    /// pruned set if there was one.
    pub fn decide(&mut self, now: Time, ports: &mut [Port]) -> Option<usize> {
        let AdmissionAction::OrderChanged(order) = self.admission.poll_action(now)?;
        let pruned = order.pruned.len();
        broadcast(now, &Event::OrderChanged(order), ports);
        Some(pruned)
    }

    /// When [`Self::decide`] is due.
    #[must_use]
    pub fn due(&self) -> Time {
        self.admission.next_deadline().unwrap_or(Time::NEVER)
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
