//! Prompts on their way to prefill processes. A prompt gets blocks for its KV here, a process is
//! chosen (`schedule::places`), and the prompt is sent. A prompt that gets no process in time is
//! computed here.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use laxity_requests::dispatch::{self, Decision, Role};
use laxity_requests::iteration::{Event, Load};
use laxity_requests::request::{InstanceId, RequestId, Slo};

use super::Engine;
use super::remote::{Remote, remaining};
use super::sequence::{Failure, Output, Sequence};
use crate::apart::Words;
use crate::clock;

/// Time for which a lost process gets no prompts, unless it sends a message.
const ASIDE_FOR: Duration = Duration::from_secs(10);

/// A sequence with blocks for its prompt, for which no process is chosen yet.
#[derive(Debug)]
pub(super) struct Placing {
    pub(super) sequence: Sequence,
    since: Instant,
}

impl Engine {
    /// Reports whether a process was lost a short time ago and has sent nothing since.
    pub(super) fn is_lost(&self, at: &SocketAddr) -> bool {
        self.lost.get(at).is_some_and(|since| since.elapsed() < ASIDE_FOR)
    }

    fn prefill(&self) -> &[SocketAddr] {
        self.net.as_ref().map_or(&[], |net| &net.peers.prefill)
    }

    /// Reports changes in the presence of prefill processes to the dispatcher.
    pub(super) fn muster(&mut self) {
        let there: Vec<bool> = self.prefill().iter().map(|at| !self.is_lost(at)).collect();
        self.up.resize(there.len(), false);
        for (number, there) in there.into_iter().enumerate() {
            if there == std::mem::replace(&mut self.up[number], there) {
                continue;
            }
            let instance = InstanceId(number as u32);
            let event = if there {
                let role = Role::Prefill;
                dispatch::Event::Up { instance, role }
            } else {
                // Requests of the lost process are computed here.
                let lost = Vec::new();
                dispatch::Event::Down { instance, lost }
            };
            self.schedulers.dispatch(clock::now(), &event);
        }
    }

    /// Handles the load that a process reports. Prompts on their way that the report does not
    /// include are added to it.
    pub(super) fn load_of(&mut self, from: SocketAddr, mut load: Load, took_ns: u64, latest: u64) {
        let Some(number) = self.prefill().iter().position(|at| *at == from) else {
            return;
        };
        let coming = self.remote.values();
        for remote in coming.filter(|remote| remote.at == from && remote.ordinal > latest) {
            let sequence = &remote.sequence;
            load.waiting += 1;
            load.prefill_tokens += (sequence.prompt - sequence.computed) as u64;
        }
        let event =
            dispatch::Event::Load { instance: InstanceId(number as u32), load, took: took_ns };
        self.schedulers.dispatch(clock::now(), &event);
    }

    /// Reports to the dispatcher that a prompt left its process.
    pub(super) fn leave_place(&mut self, request: RequestId) {
        let event = dispatch::Event::Cancelled(request);
        self.schedulers.dispatch(clock::now(), &event);
    }

    /// Reports to the dispatcher that a prompt was computed where it was placed.
    pub(super) fn end_place(&mut self, sequence: &Sequence, at: SocketAddr) {
        let Some(number) = self.prefill().iter().position(|other| *other == at) else {
            return;
        };
        let now = clock::now();
        let event = dispatch::Event::Finished {
            request: sequence.id,
            instance: InstanceId(number as u32),
            class: sequence.spec(0).class,
            ttft: now.since(sequence.arrival).0,
            tpot: 0,
            generated: 1,
        };
        self.schedulers.dispatch(now, &event);
    }

    /// Sends prompts to prefill processes, as far as there are free blocks for their KV.
    pub(super) fn send_out(&mut self) {
        if self.prefill().is_empty() {
            return;
        }
        self.muster();
        if !self.up.contains(&true) {
            let placing: Vec<RequestId> = self.placing.keys().copied().collect();
            for request in placing {
                self.take_back(request);
            }
            for sequence in std::mem::take(&mut self.outside) {
                self.compute_after_all(sequence);
            }
            return;
        }
        while let Some(sequence) = self.outside.pop_front() {
            if let Some(sequence) = self.make_room(sequence) {
                self.outside.push_front(sequence);
                break;
            }
        }
        self.set_off();
    }

    /// Reserves blocks for a prompt and asks for a process. Returns the sequence if blocks are
    /// short.
    fn make_room(&mut self, mut sequence: Sequence) -> Option<Sequence> {
        let prompt = sequence.prompt as u32;
        let load = self.schedulers.load();
        let needed = prompt.div_ceil(self.schedulers.room().block_tokens);
        // Sequences that lost their blocks come before new ones, or they would never get blocks
        // again. Decoding sequences need one more block soon. Relegated ones come last.
        let alone = load.running == 0 && self.remote.is_empty() && self.placing.is_empty();
        let leave = if alone { 0 } else { load.decoding };
        if load.in_line() > 0
            || needed + leave > load.blocks_free
            || !self.schedulers.reserve(sequence.id, prompt)
        {
            return Some(sequence);
        }
        let have = self.find(&mut sequence);
        metrics::counter!("laxity_engine_prompt_tokens_found_total").increment(have as u64);
        let size = self.model.kv().block_tokens();
        let lacking = sequence.prompt.div_ceil(size) - sequence.blocks.len();
        let Some(blocks) = self.blocks.lock().take(lacking) else {
            tracing::error!(
                "{lacking} blocks are not there, though the scheduler has given them out"
            );
            self.schedulers.handle(clock::now(), &Event::Cancelled(sequence.id));
            let why = Failure::Internal("blocks are missing".to_owned());
            self.end(sequence, Output::Failed(why));
            return None;
        };
        sequence.blocks.extend(blocks);
        let routed = sequence.prefill.filter(|number| self.up[*number]);
        if let Some(at) = routed.map(|number| self.prefill()[number]) {
            self.send(sequence, at);
            return None;
        }
        let event = dispatch::Event::Arrived(sequence.spec(have));
        self.schedulers.dispatch(clock::now(), &event);
        let placing = Placing { since: Instant::now(), sequence };
        self.placing.insert(placing.sequence.id, placing);
        None
    }

    /// Sends prompts to their chosen processes. Prompts that waited too long are computed here.
    fn set_off(&mut self) {
        while !self.placing.is_empty() {
            match self.schedulers.place(clock::now()) {
                None => break,
                Some(Decision::Refuse(request)) => self.take_back(request),
                Some(Decision::Place { request, instance }) => {
                    let at = self.prefill().get(instance.0 as usize).copied();
                    if let (Some(at), Some(placing)) = (at, self.placing.remove(&request)) {
                        self.send(placing.sequence, at);
                    }
                }
            }
        }
        let Some(patience) = self.net.as_ref().map(|net| net.patience) else {
            return;
        };
        let late: Vec<RequestId> = self
            .placing
            .values()
            .filter(|placing| placing.since.elapsed() > patience)
            .map(|placing| placing.sequence.id)
            .collect();
        for request in late {
            self.take_back(request);
        }
    }

    /// Computes a prompt here that got no process.
    fn take_back(&mut self, request: RequestId) {
        let Some(Placing { mut sequence, .. }) = self.placing.remove(&request) else {
            return;
        };
        self.leave_place(request);
        self.schedulers.handle(clock::now(), &Event::Cancelled(request));
        self.let_go(&mut sequence);
        self.compute_after_all(sequence);
    }

    /// Returns the time that a prompt has, in ns. If the objective is for the last token, the
    /// answer needs part of the time. That part is estimated by the iterations here, but is at most
    /// half of what is left.
    fn prompt_remaining(&self, sequence: &Sequence) -> u64 {
        let left = remaining(sequence.deadline_ns());
        match sequence.slo {
            Slo::Interactive { .. } => left,
            Slo::Batch { .. } => {
                let answer = self.step_ns.saturating_mul(u64::from(sequence.output_max));
                left.saturating_sub(answer.min(left / 2)).max(1)
            }
        }
    }

    fn send(&mut self, sequence: Sequence, at: SocketAddr) {
        let have = sequence.computed;
        let wants_kv = sequence.output_max > 1;
        self.ordinal += 1;
        if let Some(net) = &self.net {
            net.say(
                at,
                &Words::Prefill {
                    request: sequence.id.0,
                    tokens: sequence.tokens.clone(),
                    have,
                    wants_kv,
                    remaining_ns: self.prompt_remaining(&sequence),
                    interactive: sequence.slo.is_interactive(),
                    importance: sequence.importance,
                    ordinal: self.ordinal,
                    model: self.model.identity(),
                },
            );
        }
        let layers = self.model.shape().layers;
        let missing = if wants_kv { (sequence.prompt - have) * layers } else { 0 };
        let remote = Remote::new(sequence, at, self.ordinal, layers, missing);
        self.remote.insert(remote.sequence.id, remote);
    }

    pub(super) fn compute_after_all(&mut self, sequence: Sequence) {
        metrics::counter!("laxity_engine_prefilled_after_all_total").increment(1);
        self.admit(sequence);
    }
}
