//! The loop of the engine: executes commands, computes the scheduler's plans and returns tokens.
//!
//! One thread owns the model's cache, the scheduler and all sequences. Commands (submissions,
//! control messages and parcels of other processes) arrive in one queue. They are executed between
//! two iterations, and some of them between two layers.

pub mod sequence;

mod handle;
mod hints;
mod lifecycle;
mod lockstep;
mod places;
mod remote;
mod step;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use laxity_requests::request::RequestId;

use crate::apart::between::Import;
use crate::apart::reuse::Call;
use crate::apart::{Net, Numbers, Words};
use crate::carry::Kind;
use crate::clock;
use crate::error::StartError;
use crate::kv::SharedBlocks;
use crate::model::Model;
use crate::schedule::{Room, Scheduler, Settings};
use lockstep::Lockstep;
use remote::Remote;
use sequence::Sequence;

pub use handle::{EngineCommand, EngineCommands, EngineGauges, Handle, commands};

/// Pause between two checks whether waiting requests are still wanted.
const LOOK_EVERY: Duration = Duration::from_millis(20);

pub struct Parts {
    pub model: Arc<dyn Model>,
    pub blocks: SharedBlocks,
    /// Whether later prompts reuse KV that another process sent.
    pub keep_fetched: bool,
    pub room: Room,
    pub settings: Settings,
    /// Whether the ranks that share the experts compute in lockstep.
    pub lockstep: bool,
    pub net: Option<Arc<Net>>,
    /// The thread that asks other processes for KV, if there are any.
    pub reuse: Option<Sender<Call>>,
    /// Maximum number of prompts of other processes at the same time.
    pub requests_max: usize,
}

pub(crate) struct Engine {
    model: Arc<dyn Model>,
    blocks: SharedBlocks,
    keep_fetched: bool,
    schedulers: Scheduler,
    net: Option<Arc<Net>>,
    reuse: Option<Sender<Call>>,
    requests_max: usize,
    stopped: bool,
    commands: Receiver<EngineCommand>,
    /// Commands that arrived during a batch and wait for its end.
    deferred: VecDeque<EngineCommand>,
    sequences: HashMap<RequestId, Sequence>,
    /// KV that is on its way to this process, for sequences that wait or are about to be computed.
    imports: HashMap<RequestId, Import>,
    /// Sequences that wait for other processes' answers about KV of their beginning.
    asking: HashMap<RequestId, Sequence>,
    remote: HashMap<RequestId, Remote>,
    /// Requests for which there are too few free blocks.
    outside: VecDeque<Sequence>,
    /// Processes that are gone, with the time of the loss.
    lost: HashMap<SocketAddr, Instant>,
    /// Number of prompts that were sent to other processes, and that of the last one to each.
    sent: u64,
    turns: HashMap<SocketAddr, u64>,
    /// Average time of an iteration that only decodes, in ns.
    step_ns: u64,
    numbers: Numbers,
    exchange: u64,
    lockstep: Option<Lockstep>,
    layer_time_ns: u64,
    gauges: Arc<EngineGauges>,
}

/// Starts an engine in a thread of its own. `commands` is the queue of [`commands`], which the
/// readers of the connections need before the engine starts.
pub fn start(parts: Parts, commands: EngineCommands) -> Result<Handle, StartError> {
    let Parts { model, blocks, keep_fetched, room, settings, lockstep, net, reuse, requests_max } =
        parts;
    let (handle, incoming) = commands;
    let schedulers = Scheduler::new(&settings, room);
    let ranks = net.as_ref().map_or(&[][..], |net| net.peers.ranks.all());
    let lockstep = ranks.first().filter(|_| lockstep).map(|first| Lockstep::new(*first));
    let listens = net.as_ref().map(|net| net.carrier.listens);
    if let Some(net) = &net {
        // This is set only once, because each engine has a queue of its own.
        let _ = handle.gauges.carrier.set(net.carrier.clone());
    }
    // Set only once, too.
    let _ = handle.gauges.blocks.set(blocks.clone());
    let engine = Engine {
        model,
        blocks,
        keep_fetched,
        schedulers,
        net,
        reuse,
        requests_max,
        stopped: false,
        commands: incoming,
        deferred: VecDeque::new(),
        sequences: HashMap::new(),
        imports: HashMap::new(),
        asking: HashMap::new(),
        remote: HashMap::new(),
        outside: VecDeque::new(),
        lost: HashMap::new(),
        sent: 0,
        turns: HashMap::new(),
        step_ns: 0,
        numbers: Numbers::of(listens),
        exchange: 0,
        lockstep,
        layer_time_ns: 0,
        gauges: Arc::clone(&handle.gauges),
    };
    std::thread::Builder::new()
        .name("engine".to_owned())
        .spawn(move || engine.serve())
        .map_err(StartError::thread("the engine"))?;
    Ok(handle)
}

/// A guard that reports the end of the engine's thread, also after a panic.
struct Ended(Arc<EngineGauges>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Release);
    }
}

impl Engine {
    fn serve(mut self) {
        let _ended = Ended(Arc::clone(&self.gauges));
        let mut computed = false;
        loop {
            if computed {
                // There is more to compute, so only take commands that have arrived.
                while let Some(command) = self.deferred.pop_front() {
                    self.take(command);
                }
            } else {
                let next = if self.is_empty() {
                    self.commands.recv().map_err(RecvTimeoutError::from)
                } else {
                    self.commands.recv_timeout(LOOK_EVERY)
                };
                match next {
                    Ok(command) => self.take(command),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => break,
                }
            }
            while let Ok(command) = self.commands.try_recv() {
                self.take(command);
            }
            if self.stopped {
                break;
            }
            self.sweep();
            let called = self.lockstep.as_ref().is_some_and(Lockstep::is_called);
            let plan = self.schedulers.plan(clock::now());
            computed = plan.is_some() || called;
            if computed {
                self.compute(plan.as_ref());
            }
            self.refuse();
            self.show();
        }
    }

    fn is_empty(&self) -> bool {
        self.sequences.is_empty()
            && self.asking.is_empty()
            && self.remote.is_empty()
            && self.outside.is_empty()
    }

    fn take(&mut self, command: EngineCommand) {
        match command {
            EngineCommand::Submit(prompt, submission) => self.submit(prompt, submission),
            EngineCommand::Words(from, words) => self.hear(from, words),
            EngineCommand::Kv(arrival) if arrival.head.kind == Kind::P2d => self.import(&arrival),
            EngineCommand::Kv(_) => {}
            EngineCommand::Found { request, found } => self.found(RequestId(request), found),
            EngineCommand::Lost(peer, why) => self.lose(peer, &why),
            EngineCommand::Stop => self.stopped = true,
        }
    }

    /// Executes the commands that need not wait for the end of the batch: prompts of other
    /// processes, and KV that was found. Commands that may end a sequence of the batch wait, and so
    /// do all commands after the loss of a process.
    fn take_between_layers(&mut self) {
        while let Ok(command) = self.commands.try_recv() {
            let lost =
                self.deferred.iter().any(|command| matches!(command, EngineCommand::Lost(..)));
            match command {
                EngineCommand::Words(from, words @ (Words::Prefill(_) | Words::Step { .. }))
                    if !lost =>
                {
                    self.hear(from, words);
                }
                EngineCommand::Found { request, found } if !lost => {
                    self.found(RequestId(request), found);
                }
                command => self.deferred.push_back(command),
            }
        }
    }

    fn show(&self) {
        let load = self.schedulers.load();
        metrics::gauge!("laxity_engine_requests_running").set(f64::from(load.running));
        metrics::gauge!("laxity_engine_requests_waiting")
            .set(f64::from(load.waiting) + self.outside.len() as f64);
        metrics::counter!("laxity_engine_kv_blocks_evicted_total")
            .absolute(self.blocks.lock().evicted());
    }
}
