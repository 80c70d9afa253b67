//! Requests for KV of prompts' beginnings, to and from other processes. They are handled in a
//! thread of its own, so that they do not wait for an iteration.
//!
//! A question goes to one process after another until one has blocks. That process sends them layer
//! by layer, and the engine gets [`EngineCommand::Found`]. A process that does not answer in time,
//! or is gone, counts as having none.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use laxity_client::Hint;

use super::between::kv_head;
use super::inbox::Key;
use super::{Net, PrefixQuery, Running, Words};
use crate::carry::Kind;
use crate::clock;
use crate::engine::{EngineCommand, Handle};
use crate::kv::{BlockHash, SharedBlocks};
use crate::model::Model;

/// Pause between two searches for questions without an answer.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Full blocks of a prompt that other processes may have.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub request: u64,
    /// Hashes of the blocks, from the first missing one.
    pub hashes: Vec<BlockHash>,
    /// Index of the first missing block.
    pub first: usize,
    /// Deadline of the first token, in ns.
    pub deadline_ns: u64,
}

pub enum Call {
    Find(Wanted),
    /// Stop asking for KV of this request, which is not wanted any more.
    Forget(u64),
    Words(SocketAddr, Words),
    Lost(SocketAddr),
}

struct Question {
    wanted: Wanted,
    at: SocketAddr,
    left: VecDeque<SocketAddr>,
    since: Instant,
}

struct Reuse {
    net: Arc<Net>,
    model: Arc<dyn Model>,
    blocks: SharedBlocks,
    engine: Handle,
    questions: HashMap<u64, Question>,
}

/// Starts the thread. It ends when all senders of calls are dropped.
pub fn serve(
    calls: Receiver<Call>,
    net: Arc<Net>,
    model: Arc<dyn Model>,
    blocks: SharedBlocks,
    engine: Handle,
) -> std::io::Result<()> {
    let reuse = Reuse { net, model, blocks, engine, questions: HashMap::new() };
    std::thread::Builder::new().name("reuse".to_owned()).spawn(move || reuse.run(&calls))?;
    Ok(())
}

impl Reuse {
    fn run(mut self, calls: &Receiver<Call>) {
        loop {
            let call = if self.questions.is_empty() {
                calls.recv().map_err(RecvTimeoutError::from)
            } else {
                calls.recv_timeout(LOOK_EVERY)
            };
            match call {
                Ok(call) => self.take(call),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            let patience = self.net.ask_patience;
            self.ask_next_where(|question| question.since.elapsed() > patience);
        }
    }

    fn take(&mut self, call: Call) {
        match call {
            Call::Find(wanted) => {
                let left = self.net.peers.reuse.iter().copied().collect();
                self.ask(wanted, left);
            }
            Call::Forget(request) => {
                if self.questions.remove(&request).is_some() {
                    self.forget(request);
                }
            }
            Call::Words(from, Words::Ask(asked)) => self.give(from, &asked),
            Call::Words(from, Words::Will { request, blocks }) => {
                self.answered(from, request, blocks);
            }
            Call::Words(from, Words::Read(part)) => self.net.carrier.give(from, part),
            Call::Words(_, Words::Layer { layer, batches }) => {
                self.net.begin_layer(layer, &batches);
            }
            Call::Words(_, Words::Computed { batches, requests }) => {
                self.net.end_batches(&batches, &requests);
            }
            Call::Words(..) => {}
            Call::Lost(peer) => self.ask_next_where(|question| question.at == peer),
        }
    }

    /// Reads KV that another process has, as one flow for each layer.
    fn read(&self, wanted: &Wanted, from: SocketAddr, blocks: usize) {
        let (kv, layers) = (self.model.kv(), self.model.shape().layers);
        let size = kv.block_tokens();
        let bytes = (blocks * size * kv.token_bytes()) as u64;
        let (request, first) = (wanted.request, wanted.first * size);
        let all = bytes * layers as u64;
        self.announce(request, *self.net.running(), wanted.deadline_ns, all);
        let batch = PrefixQuery::batch(request);
        for layer in 0..layers {
            let head = kv_head(Kind::KvReuse, layer, batch, request, first);
            self.net.carrier.read(from, head, wanted.deadline_ns, bytes);
        }
    }

    /// Announces to the daemon the batch that the KV belongs to. How soon a layer is needed depends
    /// on the asker's progress (MFS §4.4.1, RLI of a queued batch).
    fn announce(&self, request: u64, after: Running, deadline_ns: u64, bytes: u64) {
        let layers = self.model.shape().layers as u16;
        let (batch, layer_time_ns) = (PrefixQuery::batch(request), after.layer_time_ns);
        let begin = |batch| Hint::BatchBegin { batch, layers, layer_time_ns };
        let join = Hint::RequestJoin { batch, request, deadline_ns, bytes };
        let mut hints = vec![begin(batch), join];
        let Running { batch: ahead, layer, .. } = after;
        if ahead != 0 {
            // The daemon has hints about batches of this process already.
            if !self.net.reads {
                let batch = ahead;
                hints.extend([begin(batch), Hint::LayerBegin { batch, layer }]);
            }
            hints.push(Hint::BatchQueued { batch, ahead });
        }
        for hint in hints {
            self.net.carrier.hint(hint);
        }
    }

    fn keys(&self, request: u64) -> impl Iterator<Item = Key> + use<> {
        let layers = 0..self.model.shape().layers as u16;
        layers.map(move |layer| Key::Reuse(request, layer))
    }

    fn forget(&self, request: u64) {
        self.net.inbox.forget(self.keys(request));
    }

    /// Asks the next process, or reports to the engine that none has the KV.
    fn ask(&mut self, wanted: Wanted, mut left: VecDeque<SocketAddr>) {
        let request = wanted.request;
        let Some(at) = left.pop_front() else { return self.tell(request, None) };
        for key in self.keys(request) {
            self.net.inbox.expect(key, at);
        }
        let running = *self.net.running();
        let words = Words::Ask(PrefixQuery {
            request,
            hashes: wanted.hashes.clone(),
            first: wanted.first,
            remaining_ns: wanted.deadline_ns.saturating_sub(clock::now().0).max(1),
            after: running,
            reads: self.net.reads,
        });
        self.net.say(at, &words);
        let question = Question { wanted, at, left, since: Instant::now() };
        self.questions.insert(request, question);
    }

    fn ask_next_where(&mut self, which: impl Fn(&Question) -> bool) {
        let over = |(request, question): (&u64, &Question)| which(question).then_some(*request);
        let over: Vec<u64> = self.questions.iter().filter_map(over).collect();
        for request in over {
            if let Some(question) = self.questions.remove(&request) {
                self.forget(request);
                self.ask(question.wanted, question.left);
            }
        }
    }

    fn tell(&self, request: u64, found: Option<(SocketAddr, usize)>) {
        // A failed command means that the engine ended and needs no answer.
        let _ = self.engine.command(EngineCommand::Found { request, found });
    }

    fn answered(&mut self, from: SocketAddr, request: u64, blocks: usize) {
        let asked = self.questions.get(&request).filter(|asked| asked.at == from);
        let Some(most) = asked.map(|asked| asked.wanted.hashes.len()) else { return };
        // The other process may send any number, so it is compared with the question.
        if (1..=most).contains(&blocks) {
            if let Some(question) = self.questions.remove(&request)
                && self.net.reads
            {
                self.read(&question.wanted, from, blocks);
            }
            self.tell(request, Some((from, blocks)));
        } else {
            self.ask_next_where(|question| question.wanted.request == request);
        }
    }

    /// Gives another process the KV that is here, as one flow for each layer.
    fn give(&self, to: SocketAddr, asked: &PrefixQuery) {
        let (shape, size) = (self.model.shape(), self.model.kv().block_tokens());
        let (request, first) = (asked.request, asked.first);
        // More blocks than the model's context allows cannot belong to a prompt.
        let context = shape.context / size;
        let hashes = if first.saturating_add(asked.hashes.len()) > context {
            &[]
        } else {
            &asked.hashes[..]
        };
        let found = self.blocks.lock().find(hashes);
        let blocks = found.len();
        self.net.say(to, &Words::Will { request, blocks });
        if found.is_empty() {
            return;
        }
        let deadline_ns = clock::now().0.saturating_add(asked.remaining_ns);
        let tokens = blocks * size;
        let bytes = tokens * self.model.kv().token_bytes() * shape.layers;
        if !asked.reads {
            self.announce(request, asked.after, deadline_ns, bytes as u64);
        }
        let batch = PrefixQuery::batch(request);
        for layer in 0..shape.layers {
            match self.model.kv().export(layer, &found, 0, tokens) {
                Ok(payload) => {
                    let head = kv_head(Kind::KvReuse, layer, batch, request, first * size);
                    if asked.reads {
                        self.net.carrier.offer(to, head, payload);
                    } else {
                        self.net.carrier.send(to, head, deadline_ns, payload);
                    }
                }
                // The asker gives up after its longest wait and computes the prompt itself.
                Err(error) => tracing::error!("KV of layer {layer} for {to}: {error}"),
            }
        }
        self.blocks.lock().release(&found);
    }
}
