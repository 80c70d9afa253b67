//! The source of permits for messages: `laxityd` by way of the client library, or a mock in tests.

use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use laxity_client::{Client, Flow, Lane, Permit, Stage, Stats, Ticket, Verdict};
use parking_lot::Mutex;

use crate::backend::TrafficClasses;
use crate::log;

/// Number of lanes of a process. Threads are spread over them. NCCL has a progress thread per GPU,
/// so each thread usually has a lane of its own.
const LANES: usize = 8;
/// Index of the scavenger's class in a connection's classes, if there are several.
pub(crate) const SCAVENGER_CLASS: usize = 1;
const LEVELS_MAX: u8 = 16;

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
    fn poll(&self, submitted: &mut SubmittedFlow) -> Option<Permit>;
    /// Reports that `bytes` of the flow were delivered.
    fn complete(&self, submitted: &SubmittedFlow, bytes: u64);
    /// Ends the flow. Its remaining bytes are neither sent nor completed.
    fn cancel(&self, submitted: SubmittedFlow);
    /// Returns the number that the daemon gives to the NIC of this name.
    fn nic(&self, name: &str) -> u8;
    /// Returns the classes that permits may name, with that of `stage` first. Without a scheduler,
    /// returns a single 0.
    fn classes(&self, stage: Stage) -> TrafficClasses;
    /// Returns InfiniBand's service level for a stage, or 0 where none is to be set.
    fn service_level(&self, _stage: Stage) -> u8 {
        0
    }
    /// Reports whether the operator wants the classes of the levels also where a class was chosen.
    fn overrides_pins(&self, _stage: Stage) -> bool {
        false
    }
    /// Reports whether there is a daemon, whatever its mode.
    fn is_attached(&self) -> bool {
        true
    }
    /// Returns a number that changes when the results of `nic` and `classes` may have changed.
    fn generation(&self) -> u64;
    /// Returns the client library's statistics. An arbiter without statistics returns zeros.
    fn stats(&self) -> Stats {
        Stats::default()
    }
}

/// An arbiter that asks this host's daemon.
#[derive(Debug)]
pub struct DaemonArbiter {
    client: Client,
    lanes: [Mutex<Option<Lane>>; LANES],
    next: AtomicUsize,
    flows: AtomicU64,
}

impl DaemonArbiter {
    pub fn new(client: Client) -> Self {
        Self {
            client,
            lanes: [const { Mutex::new(None) }; LANES],
            next: AtomicUsize::new(0),
            flows: AtomicU64::new(0),
        }
    }

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

/// Warns of the first class that can't be set. `laxity doctor` shows the others.
fn warn_once(dscp: u8) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    // Relaxed, because only one thread has to log.
    if !WARNED.swap(true, Ordering::Relaxed) {
        log::warn(&format!(
            "connections stay unmarked: the NIC treats DSCP {dscp} differently, or it is unknown \
             how (laxity doctor says more)"
        ));
    }
}

impl Arbiter for DaemonArbiter {
    fn submit(&self, flow: &Flow) -> SubmittedFlow {
        let lane = lane_of(&self.next);
        let mut submitted = SubmittedFlow {
            lane,
            id: self.flows.fetch_add(1, Ordering::Relaxed),
            ..SubmittedFlow::default()
        };
        self.with(lane, |lane| lane.submit_into(flow, &mut submitted.ticket));
        submitted
    }

    fn poll(&self, submitted: &mut SubmittedFlow) -> Option<Permit> {
        let SubmittedFlow { ticket, lane, .. } = submitted;
        self.with(*lane, |lane| lane.poll(ticket))
    }

    fn complete(&self, submitted: &SubmittedFlow, bytes: u64) {
        self.with(submitted.lane, |lane| lane.complete(&submitted.ticket, bytes));
    }

    fn cancel(&self, submitted: SubmittedFlow) {
        self.with(submitted.lane, |lane| lane.cancel(submitted.ticket));
    }

    fn nic(&self, name: &str) -> u8 {
        self.client.nic(name)
    }

    fn classes(&self, stage: Stage) -> TrafficClasses {
        // NCCL by itself leaves its traffic unmarked, so a class may differ from that only if the
        // NIC treats both alike.
        let may_mark = |dscp: u8| {
            let verdict = self.client.verdict(dscp, 0, false);
            verdict.is_some_and(|verdict| verdict.class(0) >> 2 == dscp)
        };
        let own = self.client.dscp_of(stage);
        if own != 0 && !may_mark(own) {
            warn_once(own);
            return TrafficClasses::from_slice(&[0]);
        }
        let mut classes: TrafficClasses = TrafficClasses::from_slice(&[own]);
        // The scavenger's class comes next. If the list gets truncated, scavenger flows still don't
        // travel in a higher class. Without the scavenger's class, all travel in the stage's.
        let scavenger = self.client.dscp(laxity_client::LEVEL_SCAVENGER);
        if !may_mark(scavenger) {
            return classes;
        }
        let levels = [laxity_client::LEVEL_SCAVENGER].into_iter().chain(1..=LEVELS_MAX);
        for dscp in levels.map(|level| self.client.dscp(level)) {
            let has_room = classes[0] != 0 && classes.len() < classes.inline_size();
            if has_room && !classes.contains(&dscp) && may_mark(dscp) {
                classes.push(dscp);
            }
        }
        classes
    }

    fn service_level(&self, stage: Stage) -> u8 {
        self.client.sl_of(stage).unwrap_or(0)
    }

    fn overrides_pins(&self, stage: Stage) -> bool {
        let verdict = self.client.class_of(stage, 0, true);
        matches!(verdict, Some(Verdict::Change(_)))
    }

    fn is_attached(&self) -> bool {
        self.client.is_attached()
    }

    fn generation(&self) -> u64 {
        // The lane looks for a new daemon here, not only when it submits. The flow then names its
        // NIC by that daemon's number.
        self.with(lane_of(&self.next), Lane::try_attach);
        self.client.generation()
    }

    fn stats(&self) -> Stats {
        self.client.stats()
    }
}
