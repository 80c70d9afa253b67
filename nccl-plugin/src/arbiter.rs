//! The source of permits for messages: `laxityd` by way of the client library, or a mock in tests.

use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use laxity_client::{Client, Flow, Lane, Permit, Stage, Stats, Ticket};
use parking_lot::Mutex;

use crate::backend::Classes;

/// Number of lanes of a process. Connections are spread over them. NCCL has a progress thread per
/// GPU, so each thread usually has a lane of its own.
const LANES: usize = 8;
/// Index of the scavenger's class in a connection's classes, if there are several.
pub(crate) const SCAVENGER_CLASS: usize = 1;
/// Largest number of levels that a daemon has.
const LEVELS_MAX: u8 = 16;

/// A flow that was submitted.
#[derive(Debug, Default)]
pub struct SubmittedFlow {
    /// The client library's ticket of the flow.
    pub ticket: Ticket,
    /// The arbiter's number of the flow.
    pub id: u64,
    lane: usize,
}

/// The interface through which a connection submits flows and gets permits.
pub trait Arbiter: Send + Sync {
    /// Submits a flow. Never blocks.
    fn submit(&self, flow: &Flow) -> SubmittedFlow;
    /// Returns a permit for further bytes of the flow, if there is one.
    fn poll(&self, pass: &mut SubmittedFlow) -> Option<Permit>;
    /// Reports that `bytes` of the flow have left the wire.
    fn complete(&self, pass: &SubmittedFlow, bytes: u64);
    /// Ends the flow. Its remaining bytes are neither sent nor completed.
    fn cancel(&self, pass: SubmittedFlow);
    /// Returns the number of a NIC.
    fn nic(&self, name: &str) -> u8;
    /// Returns the classes that permits may name, with that of `stage` first. Without a scheduler,
    /// returns a single 0.
    fn classes(&self, stage: Stage) -> Classes;
    /// Returns a number that changes when the results of `nic` and `classes` may have changed.
    fn generation(&self) -> u64;
    /// Returns the client library's statistics. An arbiter without statistics returns zeros.
    fn stats(&self) -> Stats {
        Stats::default()
    }
}

/// An arbiter that asks this host's daemon.
#[derive(Debug)]
pub struct Daemon {
    client: Client,
    lanes: [Mutex<Option<Lane>>; LANES],
    next: AtomicUsize,
    flows: AtomicU64,
}

impl Daemon {
    /// Returns an arbiter that uses this client.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self {
            client,
            lanes: [const { Mutex::new(None) }; LANES],
            next: AtomicUsize::new(0),
            flows: AtomicU64::new(0),
        }
    }

    /// Returns the client.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }

    fn with<T>(&self, lane: usize, act: impl FnOnce(&mut Lane) -> T) -> T {
        let mut lane = self.lanes[lane % LANES].lock();
        act(lane.get_or_insert_with(|| self.client.lane()))
    }
}

/// Returns the index of the calling thread's lane. The thread-local holds the index plus one.
fn lane_of(next: &AtomicUsize) -> usize {
    thread_local! {
        static LANE: core::cell::Cell<usize> = const { core::cell::Cell::new(0) };
    }
    LANE.with(|lane| {
        if lane.get() == 0 {
            // Relaxed, because the counter only spreads threads over the lanes.
            lane.set(next.fetch_add(1, Ordering::Relaxed) % LANES + 1);
        }
        lane.get() - 1
    })
}

impl Arbiter for Daemon {
    fn submit(&self, flow: &Flow) -> SubmittedFlow {
        let lane = lane_of(&self.next);
        let mut pass = SubmittedFlow {
            lane,
            id: self.flows.fetch_add(1, Ordering::Relaxed),
            ..SubmittedFlow::default()
        };
        self.with(lane, |lane| lane.submit_into(flow, &mut pass.ticket));
        pass
    }

    fn poll(&self, pass: &mut SubmittedFlow) -> Option<Permit> {
        let SubmittedFlow { ticket, lane, .. } = pass;
        self.with(*lane, |lane| lane.poll(ticket))
    }

    fn complete(&self, pass: &SubmittedFlow, bytes: u64) {
        self.with(pass.lane, |lane| lane.complete(&pass.ticket, bytes));
    }

    fn cancel(&self, pass: SubmittedFlow) {
        self.with(pass.lane, |lane| lane.cancel(pass.ticket));
    }

    fn nic(&self, name: &str) -> u8 {
        self.client.nic(name)
    }

    fn classes(&self, stage: Stage) -> Classes {
        let mut classes: Classes = Classes::from_slice(&[self.client.dscp_of(stage)]);
        // The scavenger's class comes next. If the list gets truncated, scavenger flows still don't
        // travel in a higher class.
        let levels = [laxity_client::LEVEL_SCAVENGER].into_iter().chain(1..=LEVELS_MAX);
        for dscp in levels.map(|level| self.client.dscp(level)) {
            if classes[0] != 0 && !classes.contains(&dscp) && classes.len() < classes.inline_size()
            {
                classes.push(dscp);
            }
        }
        classes
    }

    fn generation(&self) -> u64 {
        // The lane looks for a new daemon here, not only when it submits. The flow then names its
        // NIC by that daemon's number.
        self.with(lane_of(&self.next), Lane::seek);
        self.client.generation()
    }

    fn stats(&self) -> Stats {
        self.client.stats()
    }
}
