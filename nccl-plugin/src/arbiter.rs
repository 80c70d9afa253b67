//! Who says when a message may go: `laxityd` by way of the client library, or, in tests, whoever
//! wants to be difficult.

use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use laxity_client::{Client, Flow, Lane, Permit, Stage, Stats, Ticket};
use parking_lot::Mutex;

use crate::backend::Classes;

/// Lanes of a process: connections are dealt out over them. A progress thread per GPU is what NCCL
/// has; each finds its lane free.
const LANES: usize = 8;
/// Where in a connection's classes the scavenger's is, if it has several.
pub(crate) const SCAVENGER_CLASS: usize = 1;
/// Levels that a daemon may have.
const LEVELS_MAX: u8 = 16;

/// A flow that was submitted.
#[derive(Debug, Default)]
pub struct SubmittedFlow {
    /// The client library's part.
    pub ticket: Ticket,
    /// The arbiter's own number for it.
    pub id: u64,
    lane: usize,
}

/// Where flows are submitted.
pub trait Arbiter: Send + Sync {
    /// Submits a flow; never blocks.
    fn submit(&self, flow: &Flow) -> SubmittedFlow;
    /// What may go now beyond what earlier permits said.
    fn poll(&self, pass: &mut SubmittedFlow) -> Option<Permit>;
    /// `bytes` of it have left the wire.
    fn complete(&self, pass: &SubmittedFlow, bytes: u64);
    /// What was not permitted will not be sent, what is not complete never will be.
    fn cancel(&self, pass: SubmittedFlow);
    /// The number of a NIC.
    fn nic(&self, name: &str) -> u8;
    /// The classes that permits may name, that of `stage` first; a single 0 if nobody schedules.
    fn classes(&self, stage: Stage) -> Classes;
    /// Changes when what `nic` and `classes` say may have.
    fn generation(&self) -> u64;
    /// What was counted, if anybody counts.
    fn stats(&self) -> Stats {
        Stats::default()
    }
}

/// The daemon of this host.
#[derive(Debug)]
pub struct Daemon {
    client: Client,
    lanes: [Mutex<Option<Lane>>; LANES],
    next: AtomicUsize,
    flows: AtomicU64,
}

impl Daemon {
    /// By this attachment.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self {
            client,
            lanes: [const { Mutex::new(None) }; LANES],
            next: AtomicUsize::new(0),
            flows: AtomicU64::new(0),
        }
    }

    /// The attachment.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }

    fn with<T>(&self, lane: usize, act: impl FnOnce(&mut Lane) -> T) -> T {
        let mut lane = self.lanes[lane % LANES].lock();
        act(lane.get_or_insert_with(|| self.client.lane()))
    }
}

/// Of each thread: the lane it uses, plus one.
fn lane_of(next: &AtomicUsize) -> usize {
    thread_local! {
        static LANE: core::cell::Cell<usize> = const { core::cell::Cell::new(0) };
    }
    LANE.with(|lane| {
        if lane.get() == 0 {
            // Relaxed: only that threads spread matters.
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
        // The scavenger's next: whatever has to be left out, nothing of it may travel higher.
        let levels = [laxity_client::LEVEL_SCAVENGER]
            .into_iter()
            .chain(1..=LEVELS_MAX);
        for dscp in levels.map(|level| self.client.dscp(level)) {
            if classes[0] != 0 && !classes.contains(&dscp) && classes.len() < classes.inline_size()
            {
                classes.push(dscp);
            }
        }
        classes
    }

    fn generation(&self) -> u64 {
        // A daemon that this thread's lane would find only as it submits is found here, so that the
        // flow names its NIC by a number of that daemon.
        self.with(lane_of(&self.next), Lane::seek);
        self.client.generation()
    }

    fn stats(&self) -> Stats {
        self.client.stats()
    }
}
