//! A difficult arbiter for tests. It has a window of bytes in flight, like a port. It permits
//! within that window in the order that its temper defines, and never goes beyond.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use laxity_client::{Flow, Permit, Stage};
use nccl_net_laxity::arbiter::{Arbiter, SubmittedFlow};
use nccl_net_laxity::backend::TrafficClasses;
use parking_lot::Mutex;
use proptest::prelude::*;

/// The order in which an arbiter permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Temper {
    /// The newest flow comes first.
    Newest,
    /// The largest flow comes first.
    Largest,
    /// A hash of the flow's id and this seed decides.
    Random(u64),
    /// No flow gets a permit.
    Never,
    /// Each flow gets one chunk and nothing more.
    Begins,
}

#[derive(Debug)]
pub(crate) struct Submitted {
    bytes: u64,
    permitted: u64,
    complete: u64,
    rank: u64,
}

#[derive(Debug)]
pub(crate) struct Difficult {
    temper: Temper,
    window: u64,
    chunk: u64,
    next: AtomicU64,
    pub(crate) flows: Mutex<HashMap<u64, Submitted>>,
    /// Permitted bytes that have not been collected, by flow.
    permitted: Mutex<HashMap<u64, u64>>,
    pub(crate) most_in_flight: AtomicU64,
    pub(crate) completed: AtomicU64,
    /// Whether there is no daemon.
    pub(crate) is_gone: AtomicBool,
}

impl Difficult {
    pub(crate) fn new(temper: Temper, window: u64, chunk: u64) -> Self {
        Self {
            temper,
            window,
            chunk,
            next: AtomicU64::new(1),
            flows: Mutex::default(),
            permitted: Mutex::default(),
            most_in_flight: AtomicU64::new(0),
            completed: AtomicU64::new(0),
            is_gone: AtomicBool::new(false),
        }
    }

    /// Returns the number of flows that were ever submitted.
    #[allow(dead_code, reason = "not all tests count flows")]
    pub(crate) fn submitted(&self) -> u64 {
        self.next.load(Ordering::Relaxed) - 1
    }

    /// Permits what the window has room for, strictly in order. A chunk that doesn't fit delays all
    /// flows after it.
    fn decide(&self) {
        if self.temper == Temper::Never {
            return;
        }
        let mut flows = self.flows.lock();
        let open = flows.values().map(|flow| flow.permitted - flow.complete);
        let mut in_flight: u64 = open.sum();
        let mut waiting: Vec<u64> = flows
            .iter()
            .filter(|(_, flow)| flow.permitted < flow.bytes)
            .map(|(id, _)| *id)
            .collect();
        waiting.sort_by_key(|id| (flows[id].rank, *id));
        for id in waiting {
            let flow = flows.get_mut(&id).expect("listed");
            if self.temper == Temper::Begins && flow.permitted > 0 {
                continue;
            }
            let chunk = self.chunk.min(flow.bytes - flow.permitted);
            if in_flight > 0 && in_flight + chunk > self.window {
                break;
            }
            in_flight += chunk;
            flow.permitted += chunk;
            *self.permitted.lock().entry(id).or_default() += chunk;
        }
        self.most_in_flight.fetch_max(in_flight, Ordering::Relaxed);
    }
}

impl Arbiter for Difficult {
    fn submit(&self, flow: &Flow) -> SubmittedFlow {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let rank = match self.temper {
            Temper::Newest => u64::MAX - id,
            Temper::Largest => u64::MAX - flow.bytes,
            Temper::Random(seed) => (id ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20,
            Temper::Never | Temper::Begins => 0,
        };
        let submitted = Submitted { bytes: flow.bytes, permitted: 0, complete: 0, rank };
        self.flows.lock().insert(id, submitted);
        let mut submitted = SubmittedFlow::default();
        submitted.id = id;
        submitted
    }

    fn poll(&self, submitted: &mut SubmittedFlow) -> Option<Permit> {
        self.decide();
        let bytes = self.permitted.lock().remove(&submitted.id)?;
        let flows = self.flows.lock();
        let flow = flows.get(&submitted.id).expect("submitted");
        Some(Permit {
            bytes,
            level: 2,
            dscp: 34,
            last: flow.permitted == flow.bytes,
            bypassed: false,
        })
    }

    fn complete(&self, submitted: &SubmittedFlow, bytes: u64) {
        let mut flows = self.flows.lock();
        let Some(flow) = flows.get_mut(&submitted.id) else { return };
        flow.complete += bytes;
        assert!(flow.complete <= flow.permitted, "more than was permitted");
        self.completed.fetch_add(bytes, Ordering::Relaxed);
        if flow.complete == flow.bytes {
            flows.remove(&submitted.id);
        }
    }

    fn cancel(&self, submitted: SubmittedFlow) {
        self.flows.lock().remove(&submitted.id);
        self.permitted.lock().remove(&submitted.id);
    }

    fn nic(&self, _name: &str) -> u8 {
        0
    }

    fn classes(&self, _stage: Stage) -> TrafficClasses {
        TrafficClasses::from_slice(&[34, 10, 0])
    }

    fn is_attached(&self) -> bool {
        !self.is_gone.load(Ordering::Relaxed)
    }

    fn generation(&self) -> u64 {
        1
    }
}

pub(crate) fn any_temper() -> impl Strategy<Value = Temper> {
    prop_oneof![Just(Temper::Newest), Just(Temper::Largest), any::<u64>().prop_map(Temper::Random),]
}
