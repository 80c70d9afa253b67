//! The gate of one rank and direction: operations that wait for their permit, in order.
//!
//! The operations that are held at a tick become one batch, which is one flow at the daemon. Later
//! operations join the next batch. As bytes of the batch are permitted, they go out in the order of
//! arrival, so a signal goes behind everything that its context sent to the rank before.
//!
//! An operation passes without a permit if it has 8 bytes or fewer and nothing of its context is
//! held: barriers and counts delay GPUs and cost nothing. Everything passes without a daemon, and
//! once the rank is lost. The batch of an operation that is held for too long goes out unscheduled.
//!
//! No order of permits causes a deadlock: the target posts no buffer, so permitted bytes leave
//! without any other operation.

use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use laxity_client::{Direction, Flow, Stage};
use laxity_shm::sleep::now_ns;

use super::region::{Far, Place};
use super::request::RequestPart;
use crate::arbiter::{Arbiter, SubmittedFlow};
use crate::report::Report;

/// Largest operation in bytes that needs no permit.
const SMALL_BYTES_MAX: u64 = 8;

/// The parts of the process that a context uses.
#[derive(Clone)]
pub struct Around {
    pub arbiter: Arc<dyn Arbiter>,
    pub report: Arc<Report>,
    /// Longest hold of an operation.
    pub wait_max: Duration,
    /// The NIC's name in the daemon's configuration.
    pub nic: String,
    pub stage: Stage,
    /// The class of queue pairs as a DSCP, and their service level on InfiniBand.
    pub dscp: u8,
    pub service_level: u8,
}

/// Bytes that move between this rank's region and another rank's.
#[derive(Debug)]
pub(crate) struct RmaTransfer {
    pub(crate) near: Place,
    pub(crate) far: Far,
    pub(crate) bytes: u64,
}

/// An operation as a network performs it.
#[derive(Debug)]
pub(crate) enum RmaOperation {
    Put(RmaTransfer),
    Get(RmaTransfer),
    /// Adds a value to a word of the rank, behind all earlier puts and signals of the context.
    Signal(Far, u64),
    /// Makes data of gets that are done visible, at the rank itself.
    Flush(Far),
}

/// A network that performs operations. It keeps the order of puts and signals of a context and
/// rank. Never blocks.
pub(crate) trait Wire: Send + Sync {
    fn post(&self, context: usize, rank: usize, operation: RmaOperation, part: RequestPart);
    /// Looks for operations that have completed, and ends their requests. Each test of a request
    /// calls it.
    fn progress(&self) {}
    /// Whether a rank of the group was lost.
    fn has_failed(&self) -> bool;
    /// Whether this rank is lost or has left, so that its operations fail.
    fn is_over(&self, rank: usize) -> bool;
    /// Whether the data of a get that is done need a flush.
    fn flushes(&self) -> bool {
        false
    }
}

/// An operation as NCCL calls it.
pub(super) struct OneSidedCall {
    pub(super) context: usize,
    /// The bytes, unless there are none.
    pub(super) transfer: Option<RmaTransfer>,
    pub(super) signal: Option<(Far, u64)>,
    /// The token of the call itself. It ends when everything is posted.
    pub(super) part: RequestPart,
}

impl OneSidedCall {
    fn bytes(&self) -> u64 {
        self.transfer.as_ref().map_or(0, |transfer| transfer.bytes)
    }
}

struct Held {
    call: OneSidedCall,
    since_ns: u64,
}

/// Operations that were submitted together. The default is a batch without a flow.
#[derive(Default)]
struct HeldBatch {
    /// The flow, unless the batch was cancelled.
    flow: Option<SubmittedFlow>,
    bytes: u64,
    /// Bytes that are complete, and how many of them the arbiter knows.
    complete: Arc<AtomicU64>,
    reported: u64,
}

pub(super) struct Gate {
    rank: usize,
    direction: Direction,
    held: VecDeque<Held>,
    /// Number of held operations by context.
    counts: Vec<u32>,
    /// The batch of the first operations, with their number and the bytes permitted and not posted.
    asked: Option<(HeldBatch, usize, u64)>,
    /// Batches that are posted and not complete.
    posted: Vec<HeldBatch>,
    /// The daemon's generation and its number of the NIC.
    nic: Option<(u64, u8)>,
}

impl HeldBatch {
    /// Reports completed bytes to the arbiter. Returns whether bytes are outstanding.
    fn settle(&mut self, arbiter: &dyn Arbiter) -> bool {
        let complete = self.complete.load(Ordering::Relaxed);
        let Some(flow) = &self.flow else { return false };
        if complete > self.reported {
            arbiter.complete(flow, complete - self.reported);
            self.reported = complete;
        }
        complete < self.bytes
    }
}

impl Gate {
    pub(super) fn new(rank: usize, direction: Direction, contexts: usize) -> Self {
        let counts = vec![0; contexts];
        let (held, posted) = (VecDeque::new(), Vec::new());
        Self { rank, direction, held, counts, asked: None, posted, nic: None }
    }

    /// Takes an operation. It goes at once, or is held.
    pub(super) fn offer(
        &mut self,
        call: OneSidedCall,
        passes: bool,
        around: &Around,
        wire: &dyn Wire,
    ) {
        around.report.one_sided.operations.add(1);
        around.report.one_sided.bytes.add(call.bytes());
        if self.counts[call.context] == 0 && (passes || call.bytes() <= SMALL_BYTES_MAX) {
            let mut call = call;
            let bytes = call.bytes();
            self.post(&mut call, bytes, None, wire);
            call.part.succeed();
            return;
        }
        around.report.one_sided.held.add(1);
        self.counts[call.context] += 1;
        self.held.push_back(Held { call, since_ns: now_ns() });
    }

    /// Posts the next `bytes` of an operation, and its signal if these are the last.
    fn post(
        &self,
        call: &mut OneSidedCall,
        bytes: u64,
        account: Option<&Arc<AtomicU64>>,
        wire: &dyn Wire,
    ) {
        if let Some(rest) = &mut call.transfer {
            let piece = RmaTransfer { near: rest.near.clone(), far: rest.far.clone(), bytes };
            rest.near = rest.near.behind(bytes);
            rest.far.offset += bytes;
            rest.bytes -= bytes;
            let operation = match self.direction {
                Direction::Egress => RmaOperation::Put(piece),
                Direction::Ingress => RmaOperation::Get(piece),
            };
            wire.post(call.context, self.rank, operation, call.part.another(bytes, account));
            if rest.bytes > 0 {
                return;
            }
        }
        if let Some((far, value)) = call.signal.take() {
            let part = call.part.another(0, None);
            wire.post(call.context, self.rank, RmaOperation::Signal(far, value), part);
        }
    }

    /// Submits held operations, collects permits, and posts permitted operations.
    pub(super) fn tick(&mut self, passes: bool, around: &Around, wire: &dyn Wire) {
        self.posted.retain_mut(|batch| batch.settle(&*around.arbiter));
        if let Some((batch, ..)) = &mut self.asked {
            batch.settle(&*around.arbiter);
        }
        let now = if self.held.is_empty() { 0 } else { now_ns() };
        while !self.held.is_empty() {
            let passes = passes || wire.is_over(self.rank);
            if passes {
                self.withdraw(around);
            }
            let (mut batch, count, mut permitted) = match self.asked.take() {
                Some(asked) => asked,
                None if passes => (HeldBatch::default(), self.held.len(), 0),
                None => (self.submit(around), self.held.len(), 0),
            };
            if let Some(flow) = &mut batch.flow {
                while let Some(permit) = around.arbiter.poll(flow) {
                    permitted += permit.bytes;
                    if permit.last || permit.bytes == 0 {
                        break;
                    }
                }
            }
            let mut count = self.release(count, &batch, &mut permitted, wire);
            if count > 0
                && self.is_overdue(now, around)
                && let Some(flow) = batch.flow.take()
            {
                around.arbiter.cancel(flow);
                around.report.one_sided.overdue.add(count as u64);
                count = self.release(count, &batch, &mut permitted, wire);
            }
            if count > 0 {
                self.asked = Some((batch, count, permitted));
                return;
            }
            if batch.settle(&*around.arbiter) {
                self.posted.push(batch);
            }
        }
    }

    fn is_overdue(&self, now: u64, around: &Around) -> bool {
        self.held.front().is_some_and(|first| {
            u128::from(now.saturating_sub(first.since_ns)) > around.wait_max.as_nanos()
        })
    }

    fn submit(&mut self, around: &Around) -> HeldBatch {
        let generation = around.arbiter.generation();
        let nic = match self.nic {
            Some((known, nic)) if known == generation => nic,
            _ => around.arbiter.nic(&around.nic),
        };
        self.nic = Some((generation, nic));
        let bytes = self.held.iter().map(|held| held.call.bytes()).sum();
        let (stage, direction) = (around.stage, self.direction);
        let flow = Flow { stage, direction, nic, bytes, ..Flow::default() };
        let flow = (bytes > 0).then(|| around.arbiter.submit(&flow));
        HeldBatch { flow, bytes, ..HeldBatch::default() }
    }

    /// Posts the first `count` operations as far as they are permitted. Returns how many are left.
    fn release(
        &mut self,
        mut count: usize,
        batch: &HeldBatch,
        permitted: &mut u64,
        wire: &dyn Wire,
    ) -> usize {
        while count > 0
            && let Some(mut held) = self.held.pop_front()
        {
            let rest = held.call.bytes();
            let bytes = if batch.flow.is_some() { rest.min(*permitted) } else { rest };
            *permitted = permitted.saturating_sub(bytes);
            if bytes > 0 || rest == 0 {
                self.post(&mut held.call, bytes, Some(&batch.complete), wire);
            }
            if bytes < rest {
                self.held.push_front(held);
                break;
            }
            self.counts[held.call.context] -= 1;
            held.call.part.succeed();
            count -= 1;
        }
        count
    }

    /// Cancels the flow of the batch that waits. Its operations go out unscheduled.
    fn withdraw(&mut self, around: &Around) {
        if let Some((batch, ..)) = &mut self.asked
            && let Some(flow) = batch.flow.take()
        {
            around.arbiter.cancel(flow);
        }
    }

    /// Ends all flows. Held operations fail.
    pub(super) fn close(&mut self, around: &Around) {
        self.withdraw(around);
        self.held.clear();
        for flow in self.posted.drain(..).filter_map(|batch| batch.flow) {
            around.arbiter.cancel(flow);
        }
    }

    /// Reports whether a tick would do nothing.
    pub(super) fn is_idle(&self) -> bool {
        self.held.is_empty() && self.posted.is_empty()
    }
}
