//! One rank of a prefill unit: forms batches (the leader, rank 0), runs their layers, says which
//! flows to send and when. No I/O and no clock: time comes in, [`Effect`]s go out.
//!
//! A layer, as in MFS §3.1: wait until its reused KV has been fetched (stage 1); compute half;
//! dispatch to all peers and wait for all of theirs (stage 2); compute the other half; combine
//! (stage 2). Then the layer's KV of every request goes to its decode host (stage 3), while the
//! next layer runs.
//!
//! Batching is FCFS with a budget of new tokens. One batch is formed ahead while another runs,
//! and takes requests until it starts: that is when their prefixes are asked for, all layers at
//! once, lowest first (lookahead; MFS §2.2, stage 1). A request longer than the budget runs alone.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::rc::Rc;

use crate::config::{Collectives, LabConfig, Scaling};
use crate::frame::{Head, Kind};
use crate::message::{BatchRecord, Message, Progress};
use crate::plan::PlannedRequest;

/// What all workers know of a run.
#[derive(Debug)]
pub struct Setting {
    /// Configuration.
    pub config: LabConfig,
    /// Sizes and times.
    pub scaling: Scaling,
    /// The requests, in order of their ids, which begin at 1.
    pub plan: Vec<PlannedRequest>,
    /// When time began.
    pub begin_ns: u64,
}

impl Setting {
    /// A request by its id; `None` if there is none such.
    #[must_use]
    pub fn request(&self, id: u64) -> Option<&PlannedRequest> {
        self.plan
            .get(usize::try_from(id).ok()?.checked_sub(1)?)
            .filter(|r| r.id == id)
    }

    fn deadline_ns(&self, request: &PlannedRequest) -> u64 {
        self.begin_ns
            .saturating_add(request.arrival_ns)
            .saturating_add(request.slo_ns)
    }

    /// Whether decode ports have so far been loaded more than those of prefill hosts. From what
    /// has arrived, not from the plan: no deployed host knows the future either.
    fn decode_bound(&self, now_ns: u64) -> bool {
        let arrived = self
            .plan
            .partition_point(|r| self.begin_ns.saturating_add(r.arrival_ns) <= now_ns);
        crate::plan::decode_bound(&self.plan[..arrived], &self.config)
    }
}

/// A flow that is to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewFlow {
    /// What it is.
    pub kind: Kind,
    /// To which host.
    pub to: usize,
    /// For which layer.
    pub layer: u16,
    /// For which batch.
    pub batch: u64,
    /// For which request, 0 if for all of the batch.
    pub request: u64,
    /// How much.
    pub bytes: u64,
    /// Reading of CLOCK_MONOTONIC at which the first token is due, ns.
    pub deadline_ns: u64,
    /// The receiver's port is the bottleneck.
    pub receiver_bound: bool,
}

/// What a rank wants done.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Send a flow.
    Send(NewFlow),
    /// Read a flow, whose `to` is this host, from another.
    Read {
        /// The host that holds it.
        from: usize,
        /// The flow.
        flow: NewFlow,
    },
    /// Tell another worker, or this one.
    Post(usize, Message),
    /// Tell this host's daemon.
    Hint(Progress),
    /// Call [`Rank::computed`] at this time.
    ComputeUntil(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    AwaitKv,
    ComputeFirst,
    Dispatch,
    ComputeSecond,
    Combine,
}

/// A batch at this rank.
#[derive(Debug, Default)]
struct Batch {
    requests: Vec<u64>,
    new_tokens: u32,
    deadline_ns: u64,
    /// Hosts that serve this batch's prefixes.
    holders: BTreeSet<usize>,
    /// Bytes still to be fetched, by layer.
    to_fetch: Vec<u64>,
    /// Peers whose part has arrived, by layer, for dispatch and combine.
    arrived: HashMap<(u16, Kind), usize>,
    unfinished: usize,
    computed: bool,
    record: BatchRecord,
}

/// The state of one rank.
pub struct Rank {
    setting: Rc<Setting>,
    unit: usize,
    rank: usize,
    batches: HashMap<u64, Batch>,
    /// Leader: requests that are in no batch yet.
    queue: VecDeque<u64>,
    /// Leader: the batch that takes requests.
    forming: Option<u64>,
    batch_last: u64,
    /// Batches that were started, the running one first.
    started: VecDeque<u64>,
    layer: u16,
    step: Step,
    step_since_ns: u64,
    collective_ns: Vec<u64>,
    records: Vec<BatchRecord>,
    effects: Vec<Effect>,
}

impl Rank {
    /// A rank that has nothing to do yet.
    #[must_use]
    pub fn new(setting: Rc<Setting>, unit: usize, rank: usize) -> Self {
        Self {
            setting,
            unit,
            rank,
            batches: HashMap::new(),
            queue: VecDeque::new(),
            forming: None,
            batch_last: 0,
            started: VecDeque::new(),
            layer: 0,
            step: Step::AwaitKv,
            step_since_ns: 0,
            collective_ns: Vec::new(),
            records: Vec::new(),
            effects: Vec::new(),
        }
    }

    /// What is to be done since the last call.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// Durations of the all-to-all phases and the batches run so far.
    pub fn take_records(&mut self) -> (Vec<u64>, Vec<BatchRecord>) {
        (
            std::mem::take(&mut self.collective_ns),
            std::mem::take(&mut self.records),
        )
    }

    /// A request arrived at the unit (leader only).
    pub fn request_arrived(&mut self, now_ns: u64, request: u64) {
        self.queue.push_back(request);
        self.fill(now_ns);
    }

    /// A control message arrived.
    pub fn message(&mut self, now_ns: u64, message: &Message) {
        match *message {
            Message::Join {
                batch,
                request,
                behind,
            } => self.join(now_ns, batch, request, behind),
            Message::Start { batch } => {
                self.started.push_back(batch);
                if self.started.len() == 1 {
                    self.begin_batch(now_ns);
                }
            }
            Message::Fetch {
                batch,
                request,
                to,
                layer_bytes,
                remaining_ns,
            } => {
                let deadline_ns = now_ns.saturating_add_signed(remaining_ns);
                for flow in self.reused(batch, request, to, layer_bytes, deadline_ns) {
                    self.effects.push(Effect::Send(flow));
                }
            }
            Message::Progress(progress) => {
                self.effects.push(Effect::Hint(progress));
                self.say_again(progress);
            }
            Message::Finished { request } => self.finished(request),
            Message::Arrived(_) | Message::Read { .. } | Message::Handle { .. } => {}
        }
    }

    /// The last byte of a flow arrived.
    pub fn received(&mut self, now_ns: u64, head: &Head) {
        // A peer's dispatch can be here before the leader's word that the batch exists.
        let batch = self.batches.entry(head.batch).or_default();
        match head.kind {
            Kind::KvReuse => {
                if let Some(left) = batch.to_fetch.get_mut(usize::from(head.layer)) {
                    *left = left.saturating_sub(head.total);
                }
            }
            Kind::Dispatch | Kind::Combine => {
                *batch.arrived.entry((head.layer, head.kind)).or_default() += 1;
            }
            Kind::P2d => {}
        }
        self.advance(now_ns);
    }

    /// The compute time that was asked for is over.
    pub fn computed(&mut self, now_ns: u64) {
        match self.step {
            Step::ComputeFirst => self.exchange(now_ns, Step::Dispatch, Kind::Dispatch),
            Step::ComputeSecond => self.exchange(now_ns, Step::Combine, Kind::Combine),
            Step::AwaitKv | Step::Dispatch | Step::Combine => {}
        }
        self.advance(now_ns);
    }

    /// A plugin's collectives name no batch: the daemon takes them to be of the batch whose layer
    /// began last in their process. That is not a batch of another unit, of which it was told
    /// because its blocks are here.
    fn say_again(&mut self, heard: Progress) {
        if self.setting.config.collectives == Collectives::NcclPlugin
            && matches!(heard, Progress::LayerBegin { .. })
            && let Some(&batch) = self.started.front()
        {
            let layer = self.layer;
            self.effects
                .push(Effect::Hint(Progress::LayerBegin { batch, layer }));
        }
    }

    fn host(&self, rank: usize) -> usize {
        self.setting.config.prefill_host(self.unit, rank)
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        self.setting.config.unit_peers(self.unit, self.rank)
    }

    /// Leader: to all ranks of the unit, itself included.
    fn tell_unit(&mut self, now_ns: u64, message: &Message) {
        for peer in self.peers() {
            self.effects.push(Effect::Post(peer, message.clone()));
        }
        self.message(now_ns, message);
    }

    /// Leader: moves requests from the queue into the batch that forms, and starts it if the unit
    /// is idle.
    fn fill(&mut self, now_ns: u64) {
        let setting = Rc::clone(&self.setting);
        while let Some(request) = self.queue.front().and_then(|&id| setting.request(id)) {
            let formed = self.forming.and_then(|batch| self.batches.get(&batch));
            let full = formed.is_some_and(|batch| {
                batch.new_tokens + request.new_tokens > setting.config.model.batch_tokens
            });
            if full {
                break;
            }
            let batch = *self.forming.get_or_insert_with(|| {
                self.batch_last += 1;
                // Unique over all units and never 0.
                (self.unit as u64 + 1) * 1_000_000 + self.batch_last
            });
            self.queue.pop_front();
            let behind = self.started.front().copied().unwrap_or(0);
            self.tell_unit(
                now_ns,
                &Message::Join {
                    batch,
                    request: request.id,
                    behind,
                },
            );
        }
        if self.started.is_empty()
            && let Some(batch) = self.forming.take()
        {
            self.tell_unit(now_ns, &Message::Start { batch });
            // The unit is busy now: what did not fit forms the batch behind.
            self.fill(now_ns);
        }
    }

    fn join(&mut self, now_ns: u64, batch: u64, request: u64, behind: u64) {
        let setting = Rc::clone(&self.setting);
        let Some(request) = setting.request(request) else {
            return;
        };
        let scaling = &setting.scaling;
        let deadline_ns = setting.deadline_ns(request);
        let remaining_ns = deadline_ns.cast_signed() - now_ns.cast_signed();
        let entry = self.batches.entry(batch).or_default();
        let first = entry.requests.is_empty();
        entry.requests.push(request.id);
        entry.unfinished += 1;
        entry.new_tokens += request.new_tokens;
        entry.deadline_ns = if first {
            deadline_ns
        } else {
            entry.deadline_ns.min(deadline_ns)
        };
        entry.to_fetch.resize(usize::from(scaling.layers), 0);
        let layers = u64::from(scaling.layers);
        let new_tokens = entry.new_tokens;
        let holders: Vec<_> = entry.holders.iter().copied().collect();
        let joins = |bytes| Progress::RequestJoin {
            batch,
            request: request.id,
            remaining_ns,
            bytes,
        };
        // Said again with every member: the layer time is that of the batch as it is now.
        let begin = Self::batch_begin(scaling, batch, new_tokens);
        let queued = (behind != 0).then_some(Progress::BatchQueued {
            batch,
            ahead: behind,
        });
        self.effects.push(Effect::Hint(begin));
        if first {
            self.effects.extend(queued.map(Effect::Hint));
        }
        for holder in holders {
            self.effects
                .push(Effect::Post(holder, Message::Progress(begin)));
        }
        // What this host sends in the name of the request. Collectives belong to the batch, and
        // its layer time has them in it.
        let handed_over = layers * scaling.kv_bytes(request.tokens());
        self.effects.push(Effect::Hint(joins(handed_over)));
        if request.fetched() == 0 {
            return;
        }
        // This rank's share of the prefix lies at the same rank of the unit that holds it.
        let holder = setting.config.prefill_host(request.holder, self.rank);
        let layer_bytes = scaling.kv_bytes(request.fetched());
        let to = self.host(self.rank);
        let entry = self.batches.entry(batch).or_default();
        for layer in &mut entry.to_fetch {
            *layer += layer_bytes;
        }
        if setting.config.reads {
            for flow in self.reused(batch, request.id, to, layer_bytes, deadline_ns) {
                let read = Effect::Read { from: holder, flow };
                self.effects.push(read);
            }
            return;
        }
        if entry.holders.insert(holder) {
            self.introduce(holder, behind);
            let tell = [Some(begin), queued].into_iter().flatten();
            self.effects
                .extend(tell.map(|hint| Effect::Post(holder, Message::Progress(hint))));
        }
        let joined = joins(layers * layer_bytes);
        self.effects
            .push(Effect::Post(holder, Message::Progress(joined)));
        let fetch = Message::Fetch {
            batch,
            request: request.id,
            to,
            layer_bytes,
            remaining_ns,
        };
        self.effects.push(Effect::Post(holder, fetch));
    }

    /// A request's reused blocks, layer by layer.
    fn reused(
        &self,
        batch: u64,
        request: u64,
        to: usize,
        layer_bytes: u64,
        deadline_ns: u64,
    ) -> impl Iterator<Item = NewFlow> + use<> {
        (0..self.setting.scaling.layers).map(move |layer| NewFlow {
            kind: Kind::KvReuse,
            to,
            layer,
            batch,
            request,
            bytes: layer_bytes,
            deadline_ns,
            receiver_bound: false,
        })
    }

    fn batch_begin(scaling: &Scaling, batch: u64, new_tokens: u32) -> Progress {
        Progress::BatchBegin {
            batch,
            layers: scaling.layers,
            layer_time_ns: crate::ideal::service_ns(scaling, new_tokens)
                / u64::from(scaling.layers),
        }
    }

    /// Makes the running batch known at a host that serves the one behind it: how soon the blocks
    /// there are needed depends on how far this one is (MFS §4.4.1, RLI of a queued batch).
    fn introduce(&mut self, holder: usize, ahead: u64) {
        let runs = self.started.front() == Some(&ahead);
        let Some(entry) = self.batches.get_mut(&ahead).filter(|_| runs) else {
            return;
        };
        if entry.holders.insert(holder) {
            let begin = Self::batch_begin(&self.setting.scaling, ahead, entry.new_tokens);
            let layer = Progress::LayerBegin {
                batch: ahead,
                layer: self.layer,
            };
            self.effects
                .extend([begin, layer].map(|hint| Effect::Post(holder, Message::Progress(hint))));
        }
    }

    /// Progress of the running batch, to this host's daemon and to those that serve the batch.
    fn progress(&mut self, batch: u64, progress: Progress) {
        self.effects.push(Effect::Hint(progress));
        for &holder in self
            .batches
            .get(&batch)
            .map_or(&BTreeSet::new(), |b| &b.holders)
        {
            self.effects
                .push(Effect::Post(holder, Message::Progress(progress)));
        }
    }

    fn begin_batch(&mut self, now_ns: u64) {
        let Some(&batch) = self.started.front() else {
            return;
        };
        if let Some(entry) = self.batches.get_mut(&batch) {
            entry.record.begun_ns = now_ns;
        }
        self.begin_layer(now_ns, batch, 0);
        self.advance(now_ns);
    }

    fn begin_layer(&mut self, now_ns: u64, batch: u64, layer: u16) {
        self.layer = layer;
        self.step = Step::AwaitKv;
        self.step_since_ns = now_ns;
        self.progress(batch, Progress::LayerBegin { batch, layer });
    }

    fn compute(&mut self, now_ns: u64, step: Step, new_tokens: u32) {
        self.step = step;
        let half = self.setting.scaling.compute_ns(new_tokens) / 2;
        self.effects.push(Effect::ComputeUntil(now_ns + half));
    }

    fn exchange(&mut self, now_ns: u64, step: Step, kind: Kind) {
        let Some(&batch) = self.started.front() else {
            return;
        };
        let Some(entry) = self.batches.get(&batch) else {
            return;
        };
        self.step = step;
        self.step_since_ns = now_ns;
        let bytes = self.setting.scaling.collective_bytes(entry.new_tokens);
        let deadline_ns = entry.deadline_ns;
        for to in self.peers() {
            self.effects.push(Effect::Send(NewFlow {
                kind,
                to,
                layer: self.layer,
                batch,
                request: 0,
                bytes,
                deadline_ns,
                receiver_bound: false,
            }));
        }
    }

    /// Takes the running batch as far as what has arrived allows.
    fn advance(&mut self, now_ns: u64) {
        let Some(&id) = self.started.front() else {
            return;
        };
        let peers = self.setting.config.ranks - 1;
        let Some(batch) = self.batches.get_mut(&id) else {
            return;
        };
        let waited_ns = now_ns - self.step_since_ns;
        let exchanged = |batch: &Batch, layer, kind| {
            batch
                .arrived
                .get(&(layer, kind))
                .is_some_and(|&count| count >= peers)
        };
        match self.step {
            Step::AwaitKv if batch.to_fetch.get(usize::from(self.layer)) == Some(&0) => {
                batch.record.kv_stall_ns += waited_ns;
                let new_tokens = batch.new_tokens;
                self.compute(now_ns, Step::ComputeFirst, new_tokens);
            }
            Step::Dispatch if exchanged(batch, self.layer, Kind::Dispatch) => {
                batch.record.collective_ns += waited_ns;
                self.collective_ns.push(waited_ns);
                let new_tokens = batch.new_tokens;
                self.compute(now_ns, Step::ComputeSecond, new_tokens);
            }
            Step::Combine if exchanged(batch, self.layer, Kind::Combine) => {
                batch.record.collective_ns += waited_ns;
                self.collective_ns.push(waited_ns);
                self.layer_done(now_ns, id);
            }
            _ => {}
        }
    }

    fn layer_done(&mut self, now_ns: u64, id: u64) {
        let setting = Rc::clone(&self.setting);
        let layer = self.layer;
        let receiver_bound = setting.decode_bound(now_ns);
        let Some(batch) = self.batches.get_mut(&id) else {
            return;
        };
        for request in batch
            .requests
            .iter()
            .filter_map(|&request| setting.request(request))
        {
            self.effects.push(Effect::Send(NewFlow {
                kind: Kind::P2d,
                to: setting.config.decode_host(request.decode),
                layer,
                batch: id,
                request: request.id,
                bytes: setting.scaling.kv_bytes(request.tokens()),
                deadline_ns: setting.deadline_ns(request),
                receiver_bound,
            }));
        }
        if layer + 1 < setting.scaling.layers {
            self.begin_layer(now_ns, id, layer + 1);
            self.advance(now_ns);
            return;
        }
        batch.computed = true;
        batch.record.computed_ns = now_ns;
        batch.record.requests.clone_from(&batch.requests);
        self.records.push(batch.record.clone());
        self.progress(id, Progress::ComputeEnd { batch: id });
        self.started.pop_front();
        self.retire(id);
        self.begin_batch(now_ns);
        if self.rank == 0 {
            self.fill(now_ns);
        }
    }

    /// A request has its first token. (A request is in one batch; few batches live.)
    fn finished(&mut self, request: u64) {
        let found = self
            .batches
            .iter()
            .find(|(_, batch)| batch.requests.contains(&request));
        let Some((&id, _)) = found else { return };
        self.progress(id, Progress::RequestEnd { request });
        if let Some(batch) = self.batches.get_mut(&id) {
            batch.unfinished = batch.unfinished.saturating_sub(1);
        }
        self.retire(id);
    }

    fn retire(&mut self, id: u64) {
        if self
            .batches
            .get(&id)
            .is_some_and(|batch| batch.computed && batch.unfinished == 0)
        {
            self.progress(id, Progress::BatchEnd { batch: id });
            self.batches.remove(&id);
        }
    }
}

#[cfg(test)]
#[path = "prefill_tests.rs"]
mod tests;
