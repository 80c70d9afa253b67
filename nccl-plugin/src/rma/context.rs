//! A set of ordering domains of a group, by which NCCL calls operations.

use core::ffi::c_void;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use laxity_client::Direction;
use laxity_shm::sleep::now_ns;
use parking_lot::Mutex;

use super::gate::{Around, Gate, OneSidedCall, RmaOperation, RmaTransfer, Wire};
use super::group::RmaGroup;
use super::region::{Far, RmaRegion};
use super::registry::NumberedObjects;
use super::request::{RmaRequest, RmaRequestState};
use crate::fault::{Fault, Result};

/// Largest number of ordering domains. NCCL asks for up to a few hundred.
const CONTEXTS_MAX: usize = 1 << 16;
/// Time between two checks whether a daemon is attached, since a check is a system call.
const LOOK_NS: u64 = 1_000_000;

static REQUESTS: NumberedObjects<RmaRequest> = NumberedObjects::new("request");

/// A place in a region, as NCCL names it.
#[derive(Clone, Debug)]
pub struct RegionSide {
    pub region: Arc<RmaRegion>,
    pub offset: u64,
}

/// The two ends of a put or a get.
#[derive(Clone, Debug)]
pub struct TransferEnds {
    /// The place in this rank's part of the region.
    pub near: RegionSide,
    /// The place in the other rank's part.
    pub far: RegionSide,
}

/// A put with a signal behind it. Either may be missing.
#[derive(Clone, Debug, Default)]
pub struct Put {
    pub ends: Option<TransferEnds>,
    pub bytes: u64,
    /// The word to add to, and the value.
    pub signal: Option<(RegionSide, u64)>,
}

pub struct RmaContext {
    group: Arc<RmaGroup>,
    wire: Arc<dyn Wire>,
    around: Around,
    contexts: usize,
    /// Two gates for each rank: one for puts and signals, and one for gets.
    gates: Vec<Mutex<Gate>>,
    this: Weak<Self>,
    /// Whether no daemon is attached, so that operations need no permit.
    passes: AtomicBool,
    looked_ns: AtomicU64,
}

impl RmaContext {
    /// Creates `contexts` ordering domains.
    pub fn new(group: &Arc<RmaGroup>, contexts: i32, around: Around) -> Result<Arc<Self>> {
        let count = usize::try_from(contexts).unwrap_or(0);
        if !(1..=CONTEXTS_MAX).contains(&count) {
            return Err(Fault::Argument(format!("{contexts} contexts")));
        }
        let gates = (0..group.ranks()).flat_map(|rank| {
            [Direction::Egress, Direction::Ingress]
                .map(|direction| Mutex::new(Gate::new(rank, direction, count)))
        });
        let gates = gates.collect();
        let wire = group.open(count, &around)?;
        Ok(Arc::new_cyclic(|this| Self {
            wire,
            group: Arc::clone(group),
            passes: AtomicBool::new(!around.arbiter.is_attached()),
            around,
            contexts: count,
            gates,
            this: Weak::clone(this),
            looked_ns: AtomicU64::new(0),
        }))
    }

    /// Takes a put, a signal, or both. Returns the request.
    ///
    /// # Errors
    /// A place is outside of its region, or there is no such context or rank.
    pub fn put(&self, context: i32, rank: u32, put: Put) -> Result<*mut c_void> {
        let ends = put.ends.filter(|_| put.bytes > 0);
        if ends.is_none() && put.bytes > 0 {
            return Err(Fault::Argument("a put of bytes without a region".into()));
        }
        if let Some((side, _)) = &put.signal {
            side.region.check_remote(rank as usize, side.offset, 8)?;
        }
        let signal = put.signal.map(|(side, value)| (side.far(), value));
        self.call(context, rank, false, ends.as_ref(), put.bytes, signal)
    }

    /// Takes a get. Returns the request.
    pub fn get(
        &self,
        context: i32,
        rank: u32,
        ends: Option<&TransferEnds>,
        bytes: u64,
    ) -> Result<*mut c_void> {
        if ends.is_none() && bytes > 0 {
            return Err(Fault::Argument("a get of bytes without a region".into()));
        }
        self.call(context, rank, true, ends.filter(|_| bytes > 0), bytes, None)
    }

    fn call(
        &self,
        context: i32,
        rank: u32,
        reads: bool,
        ends: Option<&TransferEnds>,
        bytes: u64,
        signal: Option<(Far, u64)>,
    ) -> Result<*mut c_void> {
        let rank = rank as usize;
        let context = usize::try_from(context).ok().filter(|context| *context < self.contexts);
        let (Some(context), true) = (context, rank < self.group.ranks()) else {
            return Err(Fault::Argument(format!(
                "a call for rank {rank} of {} in a context beyond {}",
                self.group.ranks(),
                self.contexts
            )));
        };
        let transfer = |ends: &TransferEnds| {
            ends.far.region.check_remote(rank, ends.far.offset, bytes)?;
            let near = ends.near.region.place(ends.near.offset, bytes)?;
            Ok(RmaTransfer { near, far: ends.far.far(), bytes })
        };
        let transfer = ends.map(transfer).transpose()?;
        let (request, part) = RmaRequest::new(Weak::clone(&self.this), rank, reads);
        // The gate of this rank itself holds nothing.
        let passes = rank == self.group.rank() || self.passes.load(Ordering::Relaxed);
        let call = OneSidedCall { context, transfer, signal, part };
        self.gate(rank, reads).lock().offer(call, passes, &self.around, &*self.wire);
        Ok(REQUESTS.add(request))
    }

    /// Makes data of gets that are done visible at this rank. `region` is any region of the memory
    /// that the gets wrote to. Returns the request, since some releases of NCCL test a null one.
    pub fn flush(&self, context: i32, region: &Arc<RmaRegion>) -> Result<*mut c_void> {
        let found = usize::try_from(context).ok().filter(|context| *context < self.contexts);
        let context = found.ok_or_else(|| Fault::Argument(format!("context {context}")))?;
        let rank = self.group.rank();
        let (request, part) = RmaRequest::new(Weak::clone(&self.this), rank, true);
        if self.wire.flushes() && region.memory.bytes > 0 {
            let far = Far { region: Arc::clone(region), offset: 0 };
            self.wire.post(context, rank, RmaOperation::Flush(far), part);
        } else {
            part.succeed();
        }
        Ok(REQUESTS.add(request))
    }

    fn gate(&self, rank: usize, reads: bool) -> &Mutex<Gate> {
        &self.gates[2 * rank + usize::from(reads)]
    }

    /// Submits held operations, posts permitted ones, and reports completions.
    pub fn progress(&self) {
        self.look();
        self.wire.progress();
        for gate in &self.gates {
            self.tick(gate);
        }
    }

    /// Looks from time to time whether a daemon is attached.
    fn look(&self) {
        let now = now_ns();
        // Relaxed, because it doesn't matter which of several threads looks.
        if now.saturating_sub(self.looked_ns.load(Ordering::Relaxed)) > LOOK_NS {
            self.looked_ns.store(now, Ordering::Relaxed);
            let _ = self.around.arbiter.generation();
            self.passes.store(!self.around.arbiter.is_attached(), Ordering::Relaxed);
        }
    }

    fn tick(&self, gate: &Mutex<Gate>) {
        let mut gate = gate.lock();
        if !gate.is_idle() {
            let passes = self.passes.load(Ordering::Relaxed);
            gate.tick(passes, &self.around, &*self.wire);
        }
    }

    /// Reports whether a rank was lost.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.wire.has_failed()
    }

    /// Ends the context. Requests that are not done are forgotten.
    pub fn close(&self) {
        for gate in &self.gates {
            gate.lock().close(&self.around);
        }
        REQUESTS.remove_all(|request| request.context.ptr_eq(&self.this));
    }
}

impl RegionSide {
    fn far(&self) -> Far {
        Far { region: Arc::clone(&self.region), offset: self.offset }
    }
}

/// Reports whether a request is done. It is not in use any more then.
pub fn test_request(number: *mut c_void) -> Result<bool> {
    let request = REQUESTS.get(number)?;
    let context = request.context.upgrade();
    if let Some(context) = &context {
        context.look();
        if request.state() == RmaRequestState::Pending {
            context.wire.progress();
        }
        // Also if the request is done: NCCL 2.30 calls nothing else after `ncclPutSignal`, so this
        // reports the bytes.
        context.tick(context.gate(request.rank, request.reads));
    }
    match request.state() {
        RmaRequestState::Pending => Ok(false),
        RmaRequestState::Done => {
            REQUESTS.remove(number)?;
            Ok(true)
        }
        RmaRequestState::Failed => {
            let fault = context.and_then(|context| context.group.fault(request.rank));
            Err(fault.unwrap_or_else(|| {
                Fault::Argument(format!(
                    "an operation for rank {} failed: its region was deregistered",
                    request.rank
                ))
            }))
        }
    }
}
