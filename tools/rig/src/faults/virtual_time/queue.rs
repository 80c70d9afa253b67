//! A queue of transfers of a virtual process: a thread of an application, on one lane.

use std::time::Duration;

use laxity_client::{Client, Direction, Flow, Hint, Lane, Sleep, Stage, Ticket};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::settings::NIC;
use crate::faults::frame::Frame;

/// Transfers of a queue in order that are open at once. Only the newest waits for a permit.
const DEPTH_IN_ORDER: usize = 4;
const DEPTH: usize = 6;
/// Mean time between the end of a submit and the next one.
const PAUSE_NS: f64 = 3_000_000.0;
/// Time before a full lane is tried again.
const FULL_NS: u64 = 50_000;
/// Time of a submit or a poll.
const POLL_NS: u64 = 1_000;
/// Waits that are shorter are not reported.
const REPORTED_NS: u64 = 2_000_000;
const TRANSFERS_PER_BATCH: u64 = 8;
/// Longest sleep of which the scheduler knows nothing. No wake-up ends such a sleep.
const UNANNOUNCED: Duration = Duration::from_millis(1);

pub(super) enum Done {
    Frame(Frame),
    /// Bytes of a transfer go to the wire.
    Post {
        number: u64,
        bytes: u64,
        direction: Direction,
        bypassed: bool,
    },
    Wrong(&'static str),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Style {
    /// Whether the next transfer is submitted only once this one is permitted, as NCCL does. If
    /// not, transfers overtake each other.
    pub(super) in_order: bool,
    /// Whether transfers are work requests, which go as a whole and wait at a full lane, as in the
    /// library for verbs.
    pub(super) whole: bool,
}

struct OpenTransfer {
    number: u64,
    ticket: Ticket,
    bytes: u64,
    direction: Direction,
    posted: u64,
    completed: u64,
    begin_ns: u64,
    starved_ns: u64,
}

pub(super) struct VirtualQueue {
    queue: u32,
    style: Style,
    /// The first id of the queue's batches and requests.
    ids: u64,
    lane: Lane,
    rng: ChaCha8Rng,
    next: u64,
    open: Vec<OpenTransfer>,
    /// A work request that found the lane full.
    deferred: Option<(Flow, u64)>,
    pub(super) sleep: Option<Sleep>,
    pause_until_ns: u64,
    /// Transfers to submit at once, whatever is open.
    pub(super) burst: u32,
    pub(super) finishing: bool,
    pub(super) ended: bool,
}

impl VirtualQueue {
    pub(super) fn new(
        client: &Client,
        (process, queue): (u32, u32),
        style: Style,
        seed: u64,
    ) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(u64::from(queue));
        Self {
            queue,
            style,
            ids: u64::from(process + 1) << 40 | u64::from(queue) << 32,
            lane: client.lane(),
            rng,
            next: 0,
            open: Vec::new(),
            deferred: None,
            sleep: None,
            pause_until_ns: 0,
            burst: 0,
            finishing: false,
            ended: false,
        }
    }

    /// Returns what keeps the queue from its end.
    pub(super) fn open(&self) -> Option<String> {
        if self.ended {
            return None;
        }
        let (queue, deferred) = (self.queue, self.deferred.is_some());
        let first = self.open.first().map(|first| {
            let OpenTransfer { number, bytes, posted, completed, .. } = first;
            format!("transfer {number} has posted {posted} and completed {completed} of {bytes}")
        });
        Some(format!("queue {queue} defers one: {deferred}, {}", first.unwrap_or_default()))
    }

    /// Polls, submits, and goes to sleep. Returns when to act again at the latest. `starved_ns` is
    /// the time in which the process did not run so far.
    pub(super) fn act(
        &mut self,
        client: &Client,
        (now_ns, starved_ns): (u64, u64),
        done: &mut Vec<Done>,
    ) -> Option<u64> {
        let mut unwoken = false;
        if let Some(sleep) = self.sleep.take() {
            unwoken = sleep.limit() > UNANNOUNCED && !sleep.is_over();
            self.lane.slept();
        }
        self.poll(now_ns, starved_ns, done);
        let is_permit = |done: &Done| matches!(done, Done::Post { bypassed: false, .. });
        if unwoken && done.iter().any(is_permit) {
            done.push(Done::Wrong("a permit came without a wake-up"));
        }
        while self.may_submit(now_ns) {
            if !self.submit(client, (now_ns, starved_ns), done) {
                return Some(now_ns + FULL_NS);
            }
            self.poll(now_ns, starved_ns, done);
        }
        if self.finishing && self.open.is_empty() && self.deferred.is_none() && self.burst == 0 {
            self.end(done);
            return None;
        }
        if self.open.iter().any(|open| !open.ticket.is_done()) {
            let Some(sleep) = self.lane.prepare_sleep() else { return Some(now_ns + POLL_NS) };
            let until = now_ns + sleep.limit().as_nanos() as u64;
            self.sleep = Some(sleep);
            // A thread that waits may have more to submit.
            return Some(if self.has_more() { until.min(self.pause_until_ns) } else { until });
        }
        // Otherwise it acts when bytes have arrived.
        self.has_more().then(|| self.pause_until_ns.max(now_ns + POLL_NS))
    }

    fn has_more(&self) -> bool {
        !self.finishing && self.has_room()
    }

    fn has_room(&self) -> bool {
        if self.style.in_order {
            let is_permitted = self.open.last().is_none_or(|open| open.ticket.is_done());
            is_permitted && self.open.len() < DEPTH_IN_ORDER
        } else {
            self.open.len() < DEPTH
        }
    }

    fn may_submit(&self, now_ns: u64) -> bool {
        self.burst > 0
            || self.deferred.is_some()
            || !self.finishing && now_ns >= self.pause_until_ns && self.has_room()
    }

    fn poll(&mut self, now_ns: u64, starved_ns: u64, done: &mut Vec<Done>) {
        for open in &mut self.open {
            while let Some(permit) = self.lane.poll(&mut open.ticket) {
                let (queue, number, bytes) = (self.queue, open.number, permit.bytes);
                if now_ns - open.begin_ns > REPORTED_NS {
                    let starved_ms = (starved_ns - open.starved_ns) / 1_000_000;
                    let starved_ms = starved_ms.try_into().unwrap_or(u16::MAX);
                    let (begin_ns, end_ns) = (open.begin_ns, now_ns);
                    let waited = Frame::Waited { queue, begin_ns, end_ns, starved_ms };
                    done.push(Done::Frame(waited));
                }
                (open.begin_ns, open.starved_ns) = (now_ns, starved_ns);
                if bytes > 0 {
                    let offset = open.posted;
                    done.push(Done::Frame(Frame::Sent { queue, number, offset, bytes }));
                    let (direction, bypassed) = (open.direction, permit.bypassed);
                    done.push(Done::Post { number, bytes, direction, bypassed });
                }
                open.posted += bytes;
                if open.ticket.is_done() {
                    done.push(Done::Frame(Frame::Done { queue, number }));
                }
            }
        }
    }

    /// Submits a transfer. Returns false if it has to be tried again.
    fn submit(
        &mut self,
        client: &Client,
        (now_ns, starved_ns): (u64, u64),
        done: &mut Vec<Done>,
    ) -> bool {
        let (queue, number) = (self.queue, self.next);
        let (mut flow, begin_ns) = match self.deferred.take() {
            Some(deferred) => deferred,
            None => {
                let flow = self.draw(now_ns);
                let (bytes, in_order) = (flow.bytes, self.style.in_order);
                done.push(Done::Frame(Frame::Submitted { queue, number, bytes, in_order }));
                (flow, now_ns)
            }
        };
        let mut ticket = Ticket::default();
        if self.style.whole {
            if !self.lane.submit_whole_into(&mut flow, || client.nic(NIC), &mut ticket) {
                self.deferred = Some((flow, begin_ns));
                return false;
            }
        } else {
            flow.nic = client.nic(NIC);
            self.lane.submit_into(&flow, &mut ticket);
        }
        self.next += 1;
        self.burst = self.burst.saturating_sub(1);
        let pause = -PAUSE_NS * (1.0 - self.rng.random::<f64>()).ln();
        self.pause_until_ns = now_ns + pause as u64;
        self.open.push(OpenTransfer {
            number,
            ticket,
            bytes: flow.bytes,
            direction: flow.direction,
            posted: 0,
            completed: 0,
            begin_ns,
            starved_ns,
        });
        true
    }

    fn draw(&mut self, now_ns: u64) -> Flow {
        let rng = &mut self.rng;
        let bytes = match (self.burst, rng.random_range(0..4)) {
            (1.., _) => rng.random_range(1..=8),
            (0, 0) => rng.random_range(1024..=32_768),
            _ => rng.random_range(1..=1024),
        };
        let stages =
            [Stage::P2d, Stage::Collective, Stage::KvReuse, Stage::Weights, Stage::Background];
        let ids = self.ids;
        let batch = ids + self.next / TRANSFERS_PER_BATCH;
        let request = ids + self.next / 4;
        if self.next.is_multiple_of(TRANSFERS_PER_BATCH) {
            for request in [request, request + 1] {
                let deadline_ns = now_ns + rng.random_range(1_000_000..100_000_000);
                self.lane.hint(Hint::BatchBegin { batch, layers: 8, layer_time_ns: 500_000 });
                self.lane.hint(Hint::RequestJoin { batch, request, deadline_ns, bytes: 1 << 20 });
            }
        }
        let layer = (self.next % TRANSFERS_PER_BATCH) as u16;
        self.lane.hint(Hint::LayerBegin { batch, layer });
        if self.next % TRANSFERS_PER_BATCH == TRANSFERS_PER_BATCH - 1 {
            self.lane.hint(Hint::RequestEnd { request: request - 1 });
            self.lane.hint(Hint::RequestEnd { request });
            self.lane.hint(Hint::BatchEnd { batch });
        }
        Flow {
            stage: stages[rng.random_range(0..stages.len())],
            direction: [Direction::Egress, Direction::Ingress][rng.random_range(0..2)],
            layer,
            whole: self.style.whole,
            bytes: 8 * bytes,
            batch,
            request,
            ..Flow::default()
        }
    }

    /// Completes delivered bytes. Returns what is wrong about it.
    pub(super) fn complete(&mut self, number: u64, bytes: u64) -> Option<String> {
        let Some(at) = self.open.iter().position(|open| open.number == number) else {
            return Some(format!("transfer {number} completes again"));
        };
        let open = &mut self.open[at];
        self.lane.complete(&open.ticket, bytes);
        open.completed += bytes;
        if open.completed == open.bytes && open.ticket.is_done() {
            self.open.remove(at);
        }
        None
    }

    fn end(&mut self, done: &mut Vec<Done>) {
        if !std::mem::replace(&mut self.ended, true) {
            let (queue, count) = (self.queue, self.next);
            done.push(Done::Frame(Frame::Ended { queue, count }));
        }
    }
}
