//! The loop of the engine: executes commands, computes the scheduler's plans and returns tokens.
//!
//! One thread owns the model's cache, the scheduler and all sequences. Commands (submissions,
//! control messages and parcels of other processes) arrive in one queue. They are executed between
//! two iterations, and some of them between two layers.

pub mod sequence;

mod account;
mod hints;
mod lockstep;
mod places;
mod remote;
mod step;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use laxity_requests::Span;
use laxity_requests::iteration::{Event, Load, Refused};
use laxity_requests::qoserve::Forest;
use laxity_requests::request::RequestId;

use crate::apart::between::Import;
use crate::apart::inbox::Key;
use crate::apart::reuse::Call;
use crate::apart::{Asked, Net, Numbers, Spent, Words};
use crate::carry::{Arrival, Carrier, Counts, Kind};
use crate::clock;
use crate::kv::SharedBlocks;
use crate::model::Model;
use crate::schedule::places::Places;
use crate::schedule::{Room, Schedulers, Settings};
use lockstep::Lockstep;
use places::Placing;
use remote::Remote;
use sequence::{Failure, Outlet, Output, Sequence, Submission};

/// Pause between two checks whether waiting requests are still wanted.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A process that sent prompts here, and the load that was last reported to it.
#[derive(Clone, Copy, Debug, Default)]
struct Asker {
    /// Ordinal of the latest prompt, as the sender counts.
    latest: u64,
    /// The load that was last reported, the time of the report, and the latest prompt at that time.
    told: Option<(Load, Instant, u64)>,
}

/// The parts of an engine.
#[derive(Debug)]
pub struct Parts {
    /// The model that computes the sequences.
    pub model: Arc<dyn Model>,
    /// The blocks of the KV cache.
    pub blocks: SharedBlocks,
    /// Whether later prompts reuse KV that another process sent.
    pub keep_fetched: bool,
    /// The size of the KV cache for the scheduler.
    pub room: Room,
    /// The settings of the request scheduler.
    pub settings: Settings,
    /// The predictor of iteration times, if they are not learned.
    pub forest: Option<Forest>,
    /// The rule that chooses prefill processes, if there are any.
    pub places: Option<Places>,
    /// Whether the ranks that share the experts compute in lockstep.
    pub lockstep: bool,
    /// Path of the record of decisions.
    pub record: Option<PathBuf>,
    /// The connections to other processes.
    pub net: Option<Arc<Net>>,
    /// The thread that asks other processes for KV, if there are any.
    pub reuse: Option<Sender<Call>>,
    /// Most prompts of other processes at the same time.
    pub requests_max: usize,
}

/// A command to the engine.
#[derive(Debug)]
pub enum EngineCommand {
    /// Compute a request.
    Submit(Submission),
    /// Handle a control message of another process.
    Words(SocketAddr, Words),
    /// Handle KV of another process.
    Kv(Arrival),
    /// Continue a request after other processes were asked for KV of its beginning.
    Found {
        /// Number of the request.
        request: u64,
        /// The process that sends blocks and their number, or `None` if no process has any.
        found: Option<(SocketAddr, usize)>,
    },
    /// Handle the loss of another process.
    Lost(SocketAddr, String),
    /// Return the list of all requests.
    Account(tokio::sync::oneshot::Sender<serde_json::Value>),
    /// End the engine. Open requests are given up.
    Stop,
}

/// The state of an engine for other threads.
#[derive(Debug, Default)]
pub struct EngineGauges {
    /// Requests that were accepted and have not ended.
    pub open: AtomicUsize,
    /// Blocks that sequences refer to.
    pub blocks_used: AtomicUsize,
    /// Number of tokens that were computed.
    pub tokens: AtomicUsize,
    /// Prompt tokens that were found in the cache.
    pub found_here: AtomicUsize,
    /// Prompt tokens whose KV came from another process.
    pub found_elsewhere: AtomicUsize,
    /// Prompts that another process computed.
    pub prefilled_elsewhere: AtomicUsize,
    /// Prompts that were computed here because no other process did.
    pub prefilled_after_all: AtomicUsize,
    /// Number of batches that failed.
    pub failures: AtomicUsize,
    /// Start of the current batch, in ns. 0 between two batches.
    pub computing_since: AtomicU64,
    /// Whether the engine's thread has ended.
    pub ended: AtomicBool,
    carrier: OnceLock<Carrier>,
}

impl EngineGauges {
    /// Returns the counters of the carrier, if there are other processes.
    #[must_use]
    pub fn counts(&self) -> Option<Counts> {
        self.carrier.get().map(Carrier::counts)
    }
}

/// A handle of an engine. Clones share the engine, which ends when all are dropped.
#[derive(Clone, Debug)]
pub struct Handle {
    commands: Sender<EngineCommand>,
    gauges: Arc<EngineGauges>,
}

impl Handle {
    /// Sends a command. Returns false if the engine has ended.
    #[must_use]
    pub fn command(&self, command: EngineCommand) -> bool {
        if matches!(command, EngineCommand::Submit(_)) {
            // Counting here lets the limit of requests see them before the engine handles them.
            self.gauges.open.fetch_add(1, Ordering::Relaxed);
        }
        self.commands.send(command).is_ok()
    }

    /// Ends the engine and waits at most `patience` until it has written its record.
    pub fn stop(&self, patience: Duration) {
        let end = Instant::now() + patience;
        let mut told = self.command(EngineCommand::Stop);
        while told && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
            told = !self.gauges.ended.load(Ordering::Acquire);
        }
    }

    /// Returns the state of the engine.
    #[must_use]
    pub fn gauges(&self) -> &EngineGauges {
        &self.gauges
    }
}

/// The state of the engine's thread.
#[derive(Debug)]
pub(crate) struct Engine {
    model: Arc<dyn Model>,
    blocks: SharedBlocks,
    keep_fetched: bool,
    schedulers: Schedulers,
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
    /// Requests with blocks that wait for a prefill process.
    placing: HashMap<RequestId, Placing>,
    /// Processes that are gone, with the time of the loss.
    lost: HashMap<SocketAddr, Instant>,
    /// Whether each prefill process is present.
    up: Vec<bool>,
    /// Processes that sent prompts here.
    heard: HashMap<SocketAddr, Asker>,
    /// Number of prompts that were sent to other processes.
    ordinal: u64,
    /// Time of the last iteration.
    took: Span,
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
///
/// # Errors
/// Fails if the cache does not fit in memory, or the record cannot be written.
pub fn start(parts: Parts, commands: EngineCommands) -> anyhow::Result<Handle> {
    let Parts {
        model,
        blocks,
        keep_fetched,
        room,
        settings,
        forest,
        places,
        lockstep,
        record,
        net,
        reuse,
        requests_max,
    } = parts;
    let (handle, incoming) = commands;
    let schedulers = Schedulers::new(&settings, forest, room, places, record.as_deref())
        .with_context(|| {
            format!(
                "cannot write the record {}",
                record.unwrap_or_default().display()
            )
        })?;
    let ranks = net.as_ref().map_or(&[][..], |net| net.peers.ranks.all());
    let lockstep = ranks
        .first()
        .filter(|_| lockstep)
        .map(|first| Lockstep::new(*first));
    let listens = net.as_ref().map(|net| net.carrier.listens());
    if let Some(net) = &net {
        // This is set only once, because each engine has a queue of its own.
        let _ = handle.gauges.carrier.set(net.carrier.clone());
    }
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
        placing: HashMap::new(),
        lost: HashMap::new(),
        up: Vec::new(),
        heard: HashMap::new(),
        ordinal: 0,
        took: Span::ZERO,
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
        .context("no thread for the engine")?;
    Ok(handle)
}

/// Both ends of the queue of an engine.
pub type EngineCommands = (Handle, Receiver<EngineCommand>);

/// Makes the queue of an engine that is to be started.
#[must_use]
pub fn commands() -> EngineCommands {
    let (commands, incoming) = channel();
    let gauges = Arc::new(EngineGauges::default());
    (Handle { commands, gauges }, incoming)
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
                let waits = !self.is_empty();
                let next = if waits {
                    self.commands.recv_timeout(LOOK_EVERY)
                } else {
                    self.schedulers.flush();
                    self.commands
                        .recv()
                        .map_err(|_| RecvTimeoutError::Disconnected)
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
            computed = self.turn();
            self.refuse();
            // Report changes that no iteration caused: a process came, left or failed.
            self.report(&BTreeSet::new());
            self.show();
        }
        self.schedulers.flush();
    }

    fn is_empty(&self) -> bool {
        self.sequences.is_empty()
            && self.asking.is_empty()
            && self.remote.is_empty()
            && self.placing.is_empty()
            && self.outside.is_empty()
    }

    /// Computes one iteration if there is one. Returns whether it did.
    fn turn(&mut self) -> bool {
        let called = self.lockstep.as_ref().is_some_and(Lockstep::is_called);
        let plan = self.schedulers.plan(clock::now());
        if plan.is_none() && !called {
            return false;
        }
        let gauges = Arc::clone(&self.gauges);
        let since = &gauges.computing_since;
        since.store(clock::now().0, Ordering::Relaxed);
        self.compute(plan.as_ref());
        since.store(0, Ordering::Relaxed);
        true
    }

    fn take(&mut self, command: EngineCommand) {
        match command {
            EngineCommand::Submit(submission) => self.submit(submission),
            EngineCommand::Words(from, words) => self.hear(from, words),
            EngineCommand::Kv(arrival) if arrival.head.kind == Kind::P2d => self.import(&arrival),
            EngineCommand::Kv(_) => {}
            EngineCommand::Found { request, found } => self.found(RequestId(request), found),
            EngineCommand::Lost(peer, why) => self.lose(peer, &why),
            EngineCommand::Account(to) => {
                // The asker may be gone.
                let _ = to.send(self.account());
            }
            EngineCommand::Stop => self.stopped = true,
        }
    }

    /// Executes the commands that need not wait for the end of the batch: prompts of other
    /// processes, and KV that was found. Commands that may end a sequence of the batch wait, and so
    /// do all commands after the loss of a process.
    fn take_between_layers(&mut self) {
        while let Ok(command) = self.commands.try_recv() {
            let lost = self
                .deferred
                .iter()
                .any(|command| matches!(command, EngineCommand::Lost(..)));
            match command {
                EngineCommand::Words(
                    from,
                    words @ (Words::Prefill { .. } | Words::Step { .. }),
                ) if !lost => {
                    self.hear(from, words);
                }
                EngineCommand::Found { request, found } if !lost => {
                    self.found(RequestId(request), found);
                }
                command => self.deferred.push_back(command),
            }
        }
    }

    fn submit(&mut self, submission: Submission) {
        let sequence = Sequence {
            id: self.numbers.request(),
            name: submission.name,
            prompt: submission.prompt.len(),
            tokens: submission.prompt,
            output_max: submission.output_max,
            blocks: Vec::new(),
            computed: 0,
            published: 0,
            hashes: Vec::new(),
            failures: 0,
            spent: Spent::default(),
            arrival: submission.arrival,
            prefill: submission.prefill,
            slo: submission.slo,
            importance: submission.importance,
            sampling: submission.sampling,
            stop: submission.stop,
            outlet: Outlet::Here(submission.outlet),
        };
        let needed = sequence
            .spec(0)
            .tokens_max()
            .div_ceil(self.schedulers.room().block_tokens);
        if needed > self.schedulers.room().blocks || sequence.tokens.is_empty() {
            return self.end(sequence, Output::Failed(Failure::TooLong));
        }
        if self
            .net
            .as_ref()
            .is_some_and(|net| !net.peers.prefill.is_empty())
        {
            self.outside.push_back(sequence);
            self.send_out();
        } else {
            self.admit(sequence);
        }
    }

    /// Reuses the blocks of a prompt that are in the cache. Returns the number of tokens.
    fn find(&mut self, sequence: &mut Sequence) -> usize {
        let size = self.model.kv().block_tokens();
        let model = self.model.identity();
        let count = sequence.reusable(size);
        let found = self.blocks.find(sequence.hashes(count, size, &model));
        let tokens = found.len() * size;
        sequence.published = found.len();
        sequence.blocks = found;
        sequence.computed = tokens;
        tokens
    }

    /// Accepts a sequence that is to be computed here.
    pub(super) fn admit(&mut self, mut sequence: Sequence) {
        let ready = self.find(&mut sequence);
        if ready > 0
            && !self
                .schedulers
                .reserve(clock::now(), sequence.id, ready as u32)
        {
            self.let_go(&mut sequence);
        }
        self.gauges
            .found_here
            .fetch_add(sequence.computed, Ordering::Relaxed);
        match self.ask(sequence) {
            None => {}
            Some(sequence) => self.arrive(sequence),
        }
    }

    /// Passes a sequence to the scheduler, with the number of tokens that are ready.
    fn arrive(&mut self, sequence: Sequence) {
        let import = self
            .imports
            .get(&sequence.id)
            .map_or(0, |import| import.tokens);
        let spec = sequence.spec(sequence.computed + import);
        self.sequences.insert(sequence.id, sequence);
        self.schedulers.handle(clock::now(), &Event::Arrived(spec));
        self.refuse();
    }

    fn refuse(&mut self) {
        for refusal in self.schedulers.refusals() {
            let why = match refusal.why {
                Refused::TooLong => Failure::TooLong,
                Refused::Known | Refused::Senseless => {
                    Failure::Internal(format!("the scheduler refused it: {:?}", refusal.why))
                }
            };
            if let Some(sequence) = self.sequences.remove(&refusal.request) {
                self.end(sequence, Output::Failed(why));
            }
        }
    }

    /// Releases a sequence's blocks. If it is computed again, then from its beginning.
    fn let_go(&mut self, sequence: &mut Sequence) {
        self.blocks.release(&std::mem::take(&mut sequence.blocks));
        sequence.computed = 0;
        sequence.published = 0;
        self.forget_import(sequence.id);
    }

    fn forget_import(&mut self, request: RequestId) {
        if let Some(import) = self.imports.remove(&request) {
            self.say_computed(import.from, vec![Asked::batch(request.0)], vec![request.0]);
            self.forget_reuse(request);
        }
    }

    fn forget_reuse(&self, request: RequestId) {
        if let Some(reuse) = &self.reuse {
            // The thread ends only with the process, so a failed send has no effect.
            let _ = reuse.send(Call::Forget(request.0));
        }
        if let Some(net) = &self.net {
            let layers = 0..self.model.shape().layers as u16;
            net.inbox
                .forget(layers.map(|layer| Key::Reuse(request.0, layer)));
        }
    }

    /// Ends a sequence that the scheduler does not have (any more).
    fn end(&mut self, mut sequence: Sequence, output: Output) {
        self.let_go(&mut sequence);
        match (&sequence.outlet, output) {
            (Outlet::Here(_), output) => {
                sequence.tell(output);
                self.gauges.open.fetch_sub(1, Ordering::Relaxed);
            }
            (Outlet::Away(to), Output::Failed(why)) => {
                let request = to.request;
                if let Some(net) = &self.net {
                    net.say(to.to, &Words::Failed { request, why });
                    net.carrier.end_request(request);
                }
            }
            (Outlet::Away(to), _) => {
                if let Some(net) = &self.net {
                    net.carrier.end_request(to.request);
                }
            }
        }
    }

    /// Removes a sequence from the scheduler in any of its states.
    fn withdraw(&mut self, request: RequestId) -> Option<Sequence> {
        let sequence = self
            .sequences
            .remove(&request)
            .or_else(|| self.asking.remove(&request))
            .or_else(|| {
                let remote = self.remote.remove(&request)?;
                self.leave_place(request);
                Some(remote.sequence)
            })
            .or_else(|| {
                let placing = self.placing.remove(&request)?;
                self.leave_place(request);
                Some(placing.sequence)
            })?;
        self.forget_reuse(request);
        self.schedulers
            .handle(clock::now(), &Event::Cancelled(request));
        Some(sequence)
    }

    /// Ends requests that are not wanted any more, and continues those whose wait was too long.
    fn sweep(&mut self) {
        let unwanted = |sequence: &Sequence| !sequence.is_wanted();
        let gone: Vec<RequestId> = self
            .sequences
            .values()
            .chain(self.asking.values())
            .chain(self.remote.values().map(|remote| &remote.sequence))
            .chain(self.placing.values().map(|placing| &placing.sequence))
            .filter(|sequence| unwanted(sequence))
            .map(|sequence| sequence.id)
            .collect();
        for request in gone {
            let at = self.remote.get(&request).map(|remote| remote.at);
            if let (Some(net), Some(at)) = (&self.net, at) {
                let request = request.0;
                net.say(at, &Words::Cancel { request });
            }
            if let Some(sequence) = self.withdraw(request) {
                metrics::counter!("laxity_engine_abandoned_total").increment(1);
                self.end(
                    sequence,
                    Output::Failed(Failure::Unavailable("cancelled".to_owned())),
                );
            }
        }
        let outside = std::mem::take(&mut self.outside);
        let (gone, stay): (Vec<_>, Vec<_>) = outside.into_iter().partition(unwanted);
        self.outside = stay.into();
        for sequence in gone {
            self.end(
                sequence,
                Output::Failed(Failure::Unavailable("cancelled".to_owned())),
            );
        }
        let now = Instant::now();
        self.give_up_waiting(now);
        self.send_out();
    }

    fn show(&self) {
        let used = self.blocks.used();
        self.gauges.blocks_used.store(used, Ordering::Relaxed);
        let load = self.schedulers.load();
        metrics::gauge!("laxity_engine_kv_blocks_used").set(used as f64);
        metrics::gauge!("laxity_engine_requests_running").set(f64::from(load.running));
        metrics::gauge!("laxity_engine_requests_waiting")
            .set(f64::from(load.waiting) + (self.outside.len() + self.placing.len()) as f64);
        let found = |count: &AtomicUsize| count.load(Ordering::Relaxed) as u64;
        metrics::counter!("laxity_engine_prompt_tokens_found_total")
            .absolute(found(&self.gauges.found_here));
        metrics::counter!("laxity_engine_prompt_tokens_fetched_total")
            .absolute(found(&self.gauges.found_elsewhere));
        metrics::counter!("laxity_engine_prefilled_elsewhere_total")
            .absolute(found(&self.gauges.prefilled_elsewhere));
        metrics::counter!("laxity_engine_kv_blocks_evicted_total").absolute(self.blocks.evicted());
    }
}
