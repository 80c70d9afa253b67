//! The worker's gate to its host's `laxityd`: flows go in, permitted chunks come out on the
//! connection of their class.
//!
//! All flows are submitted at once as they arise; a flow keeps the class of its first permit for
//! its whole life, since TCP connections of different classes would reorder it. A chunk is
//! complete when the receiver has said so, which is when it has left every queue on its way.
//!
//! What is *read* goes the other way: the flow is submitted where it comes in, and a permit is a
//! message to the holder, which sends the bytes without asking anybody, in the class that its end
//! of the connection has, as a NIC answers an RDMA READ.
//!
//! Under `none` there is no daemon and no client: every flow is written to its connection when it
//! arises, unmarked, and TCP shares the ports.

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::time::Duration;

use laxity_client::{Client, Direction, Flow, Hint, Lane, Options, Stage, Ticket, peers};

use crate::daemons::LANE_SLOTS;
use crate::fabric::{self, WireClass, class_of};
use crate::frame::{Head, Kind};
use crate::message::{ClientRecord, Progress};
use crate::prefill::NewFlow;
use crate::transport::Transport;

/// Eight daemons and workers share two cores and whatever else runs: give a daemon that does not
/// get the processor time. Its death is noticed at once all the same, by the socket's hang-up.
pub const STALL_TIMEOUT: Duration = Duration::from_millis(400);

/// Collectives that find room in the lane though others do not: they must not wait behind those.
const COLLECTIVES_MAX: usize = 128;

/// Flows that may be in the lane at once when one of `kind` is submitted. What exceeds it waits
/// here, in order: a lane that is full would let them pass unscheduled.
fn submitted_max(kind: Kind) -> usize {
    let all = LANE_SLOTS as usize - 64;
    match stage(kind) {
        Stage::Collective => all,
        _ => all - COLLECTIVES_MAX,
    }
}

/// A flow that was submitted and is not complete.
struct Sending {
    ticket: Ticket,
    head: Head,
    way: Way,
    class: Option<usize>,
    permitted: u64,
    arrived: u64,
}

struct Scheduled {
    client: Client,
    lane: Lane,
    sending: HashMap<u64, Sending>,
    /// Flows that wait for a permit, in order of submission.
    waiting: Vec<u64>,
    backlog: VecDeque<(NewFlow, Head, Way)>,
}

/// Which way a flow goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Out, to this host.
    To(usize),
    /// In, from this host.
    From(usize),
}

/// Bytes of a flow that the holder is to be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// The holder.
    pub from: usize,
    /// The flow, and from where on.
    pub head: Head,
    /// How many.
    pub bytes: u64,
}

/// How flows get on the wire.
pub struct Gate {
    classes: Vec<WireClass>,
    unmarked: usize,
    scheduled: Option<Scheduled>,
    reads: Vec<Read>,
}

fn stage(kind: Kind) -> Stage {
    match kind {
        Kind::KvReuse => Stage::KvReuse,
        Kind::Dispatch | Kind::Combine => Stage::Collective,
        Kind::P2d => Stage::P2d,
    }
}

impl Gate {
    /// Without a daemon.
    #[must_use]
    pub fn open(classes: &[WireClass]) -> Self {
        Self {
            classes: classes.to_vec(),
            unmarked: class_of(classes, 0),
            scheduled: None,
            reads: Vec::new(),
        }
    }

    /// With the daemon that listens on `socket`. That it is not there is no error: flows then go
    /// out unscheduled until it is.
    #[must_use]
    pub fn scheduled(socket: &Path, name: &str, classes: &[WireClass]) -> Self {
        let client = Client::attach(Options {
            socket: socket.to_owned(),
            name: name.to_owned(),
            stall_timeout: STALL_TIMEOUT,
            reattach_every: Duration::from_millis(100),
            ..Options::default()
        });
        let lane = client.lane();
        let scheduled = Scheduled {
            client,
            lane,
            sending: HashMap::new(),
            waiting: Vec::new(),
            backlog: VecDeque::new(),
        };
        Self {
            scheduled: Some(scheduled),
            ..Self::open(classes)
        }
    }

    /// Takes a flow.
    pub fn submit(&mut self, flow: &NewFlow, head: Head, way: Way, transport: &mut Transport) {
        match (self.scheduled.as_mut(), way) {
            (None, Way::To(to)) => transport.send(to, self.unmarked, &head, flow.bytes),
            (None, Way::From(from)) => self.reads.push(Read {
                from,
                head,
                bytes: flow.bytes,
            }),
            (Some(scheduled), _) if scheduled.waiting.len() >= submitted_max(head.kind) => {
                scheduled.backlog.push_back((*flow, head, way));
            }
            (Some(scheduled), _) => scheduled.submit(flow, head, way),
        }
    }

    /// Sends what another host reads here.
    pub fn answer(&mut self, to: usize, head: &Head, bytes: u64, transport: &mut Transport) {
        let class = match &self.scheduled {
            Some(scheduled) => {
                let dscp = scheduled.client.dscp_of(stage(head.kind));
                class_of(&self.classes, dscp)
            }
            None => self.unmarked,
        };
        transport.send(to, class, head, bytes);
    }

    /// What holders are to be asked for since the last call.
    pub fn take_reads(&mut self) -> Vec<Read> {
        std::mem::take(&mut self.reads)
    }

    /// Puts what has been permitted on the wire.
    pub fn poll(&mut self, transport: &mut Transport) {
        let Some(scheduled) = self.scheduled.as_mut() else {
            return;
        };
        loop {
            scheduled.collect(&self.classes, transport, &mut self.reads);
            // Permits make room in the lane for what waits here.
            let mut submitted = 0;
            while let Some((_, head, _)) = scheduled.backlog.front()
                && scheduled.waiting.len() < submitted_max(head.kind)
                && let Some((flow, head, way)) = scheduled.backlog.pop_front()
            {
                scheduled.submit(&flow, head, way);
                submitted += 1;
            }
            if submitted == 0 {
                return;
            }
        }
    }

    /// The receiver has bytes of a flow.
    pub fn arrived(&mut self, flow: u64, bytes: u64) {
        let Some(scheduled) = self.scheduled.as_mut() else {
            return;
        };
        let Some(sending) = scheduled.sending.get_mut(&flow) else {
            return;
        };
        sending.arrived += bytes;
        scheduled.lane.complete(&sending.ticket, bytes);
        if sending.arrived >= sending.head.total {
            scheduled.sending.remove(&flow);
        }
    }

    /// Tells the daemon how the model is getting on.
    pub fn hint(&mut self, now_ns: u64, progress: Progress) {
        let Some(scheduled) = self.scheduled.as_mut() else {
            return;
        };
        scheduled.lane.hint(match progress {
            Progress::BatchBegin {
                batch,
                layers,
                layer_time_ns,
            } => Hint::BatchBegin {
                batch,
                layers,
                layer_time_ns,
            },
            Progress::RequestJoin {
                batch,
                request,
                remaining_ns,
                bytes,
            } => Hint::RequestJoin {
                batch,
                request,
                deadline_ns: now_ns.saturating_add_signed(remaining_ns),
                bytes,
            },
            Progress::BatchQueued { batch, ahead } => Hint::BatchQueued { batch, ahead },
            Progress::LayerBegin { batch, layer } => Hint::LayerBegin { batch, layer },
            Progress::ComputeEnd { batch } => Hint::ComputeEnd { batch },
            Progress::RequestEnd { request } => Hint::RequestEnd { request },
            Progress::BatchEnd { batch } => Hint::BatchEnd { batch },
        });
    }

    /// Something waits for a permit.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.scheduled
            .as_ref()
            .is_some_and(|scheduled| !scheduled.waiting.is_empty())
    }

    /// What the client library counted.
    #[must_use]
    pub fn record(&self) -> ClientRecord {
        self.scheduled
            .as_ref()
            .map_or_else(ClientRecord::default, |scheduled| {
                let stats = scheduled.client.stats();
                ClientRecord {
                    scheduled_bytes: stats.scheduled_bytes,
                    bypassed_bytes: stats.bypassed_bytes,
                    unscheduled_ns: stats.unscheduled_ns,
                    reattaches: stats.reattaches,
                }
            })
    }
}

impl Scheduled {
    fn submit(&mut self, flow: &NewFlow, head: Head, way: Way) {
        let (direction, peer) = match way {
            Way::To(_) => (Direction::Egress, 0),
            Way::From(from) => {
                let address = fabric::address(from).to_ipv6_mapped();
                (Direction::Ingress, peers::number(address.octets()))
            }
        };
        let ticket = self.lane.submit(&Flow {
            stage: stage(flow.kind),
            direction,
            nic: 0,
            layer: flow.layer,
            bytes: flow.bytes,
            batch: flow.batch,
            request: flow.request,
            deadline_ns: flow.deadline_ns,
            receiver_bound: flow.receiver_bound,
            whole: false,
            peer,
        });
        let sending = Sending {
            ticket,
            head,
            way,
            class: None,
            permitted: 0,
            arrived: 0,
        };
        self.sending.insert(head.flow, sending);
        self.waiting.push(head.flow);
    }

    fn collect(&mut self, classes: &[WireClass], transport: &mut Transport, reads: &mut Vec<Read>) {
        let (lane, all) = (&mut self.lane, &mut self.sending);
        self.waiting.retain(|flow| {
            let Some(sending) = all.get_mut(flow) else {
                return false;
            };
            while let Some(permit) = lane.poll(&mut sending.ticket) {
                let class = *sending
                    .class
                    .get_or_insert_with(|| class_of(classes, permit.dscp));
                let head = Head {
                    offset: sending.permitted,
                    ..sending.head
                };
                match sending.way {
                    Way::To(to) => transport.send(to, class, &head, permit.bytes),
                    Way::From(from) => reads.push(Read {
                        from,
                        head,
                        bytes: permit.bytes,
                    }),
                }
                sending.permitted += permit.bytes;
                if permit.last {
                    return false;
                }
            }
            true
        });
    }
}
