//! The state of this library in a process, and the thread that handles waiting transfers and those
//! in flight.
//!
//! The thread, `laxity-mooncake`, hands on permitted transfers and reports completions to the
//! daemon, even if the program doesn't ask. A program that waits for one batch before it asks for
//! another would otherwise wait for itself. The thread starts when a transfer first has to wait or
//! is in flight, and sleeps while there is none.

use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use laxity_client::hints::{self, Asked, Transfer, Transfers};
use laxity_client::{Direction, Mode};
use laxity_job::fork::PerProcess;
use laxity_job::monitor::Monitor;
use laxity_job::{Job, symbol};
use parking_lot::RwLock;

use crate::abi::{EnginePtr, WRITE};
use crate::batch::{self, BatchState, TransferBatch};
use crate::engines::{Engines, Handling};
use crate::report;
use crate::runs::Run;

/// Largest number of recorded batches. Transfers of further batches pass through.
const BATCHES_MAX: usize = 1 << 16;
/// Time between two checks of transfers in flight: at first, and at most.
const LOOK: Duration = Duration::from_micros(50);
const LOOK_MAX: Duration = Duration::from_millis(1);
/// Longest sleep while no transfer is in flight and one waits for its permit.
const WAIT_MAX: Duration = Duration::from_millis(20);
/// Longest wait for the thread at the process's end.
const END_WITHIN: Duration = Duration::from_millis(100);

/// The state of this library in a process. It is never freed. A forked child doesn't use its
/// parent's, whose locks may be locked.
#[derive(Debug)]
pub(crate) struct Hub {
    pub(crate) engines: RwLock<Engines>,
    batches: RwLock<HashMap<(usize, u64), Arc<TransferBatch>>>,
    transfers: Transfers,
    is_preloaded: bool,
    worker: Worker,
}

#[derive(Debug, Default)]
struct Worker {
    /// Batches with transfers that wait or are in flight.
    list: Monitor<Vec<Arc<TransferBatch>>>,
    start: OnceLock<()>,
    /// Whether no thread could be started, so that no transfer waits.
    is_missing: AtomicBool,
    ends: AtomicBool,
    /// Whether the thread is in a call of Mooncake, or about to be.
    busy: AtomicUsize,
}

static HUB: PerProcess<Hub> = PerProcess::none();

/// Returns the state, or `None` if this process has made no engine.
pub(crate) fn known() -> Option<&'static Hub> {
    HUB.get()
}

/// Returns the state, and creates it if there is none. Attaches to the daemon or warns.
pub(crate) fn make() -> &'static Hub {
    HUB.get_or_make(|| {
        batch::forget_waiting();
        report::at_end();
        let transfers = hints::transfers();
        hints::warn_if_alone("Mooncake's transfers");
        Hub {
            engines: RwLock::default(),
            batches: RwLock::default(),
            transfers,
            // Only liblaxity.so has this function.
            is_preloaded: symbol::find(c"laxity_verbs_exempt").is_some(),
            worker: Worker::default(),
        }
    })
}

impl Hub {
    /// Returns which library schedules the transfers of an engine.
    pub(crate) fn handling(&self, engine: EnginePtr) -> Handling {
        if Job::of_this_process().mode == Mode::Off {
            return Handling::Pass;
        }
        self.engines.read().handling(engine, self.is_preloaded)
    }

    pub(crate) fn allocated(&self, engine: EnginePtr, id: u64, capacity: usize) {
        if self.handling(engine) != Handling::Gate || self.worker.is_missing.load(Ordering::Relaxed)
        {
            return;
        }
        let mut batches = self.batches.write();
        // An old batch with this number was freed without this library.
        if batches.len() < BATCHES_MAX || batches.contains_key(&(engine as usize, id)) {
            let batch = Arc::new(TransferBatch::new(engine, id, capacity));
            batches.insert((engine as usize, id), batch);
        }
    }

    pub(crate) fn batch(&self, engine: EnginePtr, id: u64) -> Option<Arc<TransferBatch>> {
        self.batches.read().get(&(engine as usize, id)).cloned()
    }

    /// Removes a batch before it is freed, since another batch may get its number at once.
    pub(crate) fn forget(&self, batch: &TransferBatch) {
        self.batches.write().remove(&(batch.engine, batch.id));
    }

    /// Adds a batch again that could not be freed.
    pub(crate) fn remember(&self, batch: &Arc<TransferBatch>) {
        let mut batches = self.batches.write();
        batches.insert((batch.engine, batch.id), Arc::clone(batch));
    }

    /// Hands on all waiting transfers of an engine before it is destroyed.
    pub(crate) fn leave_engine(&self, engine: EnginePtr) {
        let mut batches = self.batches.write();
        let theirs: Vec<_> = batches.extract_if(|key, _| key.0 == engine as usize).collect();
        drop(batches);
        for (_, batch) in theirs {
            let mut state = batch.state.lock();
            batch.flush(&mut state);
            batch.end_transfers(&mut state);
        }
        self.engines.write().destroyed(engine);
    }

    /// Submits the flow of a run. Never blocks.
    pub(crate) fn ask(&self, engine: EnginePtr, run: &Run) -> Transfer {
        let job = Job::of_this_process();
        // The bytes of a READ arrive here, so they load this host's ingress port.
        let (otherwise, direction) = match run.opcode {
            WRITE => (job.profile.stage.write, Direction::Egress),
            _ => (job.profile.stage.read, Direction::Ingress),
        };
        self.transfers.submit(&Asked {
            bytes: run.bytes,
            said: run.said,
            otherwise: Some(otherwise),
            direction,
            peer: self.engines.read().peer(engine, run.target),
            whole: true,
            objective_ns: job.objective_ns(),
            ..Asked::default()
        })
    }

    /// Adds a batch to the thread's list. Its state is locked.
    pub(crate) fn attend(&'static self, batch: &Arc<TransferBatch>, state: &mut BatchState) {
        if state.is_idle() || state.listed {
            return;
        }
        let worker = &self.worker;
        worker.start.get_or_init(|| self.start());
        if worker.is_missing.load(Ordering::Relaxed) {
            batch.flush(state);
            return;
        }
        state.listed = true;
        worker.list.lock().push(Arc::clone(batch));
        worker.list.notify();
    }

    fn start(&'static self) {
        let builder = thread::Builder::new().name(String::from("laxity-mooncake"));
        let started = laxity_job::thread::spawn(builder, move || self.work());
        if let Err(error) = started {
            self.worker.is_missing.store(true, Ordering::Relaxed);
            eprintln!(
                "laxity: cannot start a thread ({error}); Mooncake's transfers go out unscheduled"
            );
        }
    }

    fn work(&'static self) {
        let worker = &self.worker;
        let mut nap = LOOK;
        loop {
            let batches = {
                let mut list = worker.list.lock();
                while list.is_empty() {
                    list = worker.list.wait(list);
                }
                list.clone()
            };
            let (mut happened, mut moves, mut waits) = (false, false, false);
            for batch in batches {
                worker.busy.store(1, Ordering::SeqCst);
                // SeqCst, here and in `end`, so that one of the two sees the other's store.
                if worker.ends.load(Ordering::SeqCst) {
                    worker.busy.store(0, Ordering::SeqCst);
                    return;
                }
                // The thread that holds the lock handles the batch.
                let Some(mut state) = batch.state.try_lock() else {
                    moves = true;
                    worker.busy.store(0, Ordering::SeqCst);
                    continue;
                };
                happened |= batch.settle(&mut state);
                happened |= batch.advance(&mut state, self);
                if state.is_idle() {
                    state.listed = false;
                    worker.list.lock().retain(|listed| !Arc::ptr_eq(listed, &batch));
                } else {
                    waits |= state.waits();
                    moves |= state.moves();
                }
                drop(state);
                worker.busy.store(0, Ordering::SeqCst);
            }
            if happened {
                nap = LOOK;
                continue;
            }
            let limit = if moves { nap } else { WAIT_MAX };
            if waits {
                self.transfers.wait_any(limit);
            } else if moves {
                thread::sleep(limit);
            }
            nap = (nap * 3 / 2).min(LOOK_MAX);
        }
    }

    /// Stops the thread at the process's end, since Mooncake's own objects are destroyed then.
    pub(crate) fn end(&self) {
        self.worker.ends.store(true, Ordering::SeqCst);
        let end = Instant::now() + END_WITHIN;
        while self.worker.busy.load(Ordering::SeqCst) != 0 && Instant::now() < end {
            thread::sleep(LOOK);
        }
    }
}
