//! Work that the engine does for other processes and they for it: prompts that are computed
//! elsewhere, and KV that is requested and given.

use std::net::SocketAddr;
use std::time::Instant;

use laxity_requests::iteration::Event;
use laxity_requests::request::{RequestId, Slo};

use super::Engine;
use super::sequence::{Failure, Outlet, Output, Sequence, Submission};
use super::step::publish;
use crate::apart::between::Import;
use crate::apart::reuse::{Call, Wanted};
use crate::apart::{Destination, PrefillAsk, Spent, Words};
use crate::carry::Arrival;
use crate::clock;
use crate::model::ModelError;

pub(super) struct Remote {
    pub(super) sequence: Sequence,
    pub(super) at: SocketAddr,
    since: Instant,
    first: Option<(u32, Spent, Instant)>,
    /// Whether each token's KV has arrived, by layer. `missing` counts tokens whose KV has not.
    came: Vec<Vec<bool>>,
    missing: usize,
}

impl Remote {
    /// Makes the state of a sequence that is sent out. `missing` counts its KV that has to arrive.
    pub(super) fn new(sequence: Sequence, at: SocketAddr, layers: usize, missing: usize) -> Self {
        let have = sequence.computed;
        let came = (0..sequence.prompt).map(|token| token < have).collect();
        Self { at, since: Instant::now(), first: None, came: vec![came; layers], missing, sequence }
    }
}

pub(super) fn remaining(deadline_ns: u64) -> u64 {
    deadline_ns.saturating_sub(clock::now().0).max(1)
}

/// Records the parts of the time to a first token: the times of its batches in `spent`, the wait
/// for KV since the prefill process reported the token (`said`), and the queueing before both.
fn show_parts(sequence: &Sequence, spent: Spent, said: Instant) {
    let tail_ns = said.elapsed().as_nanos() as u64;
    let all_ns = clock::now().since(sequence.asked.arrival).0;
    let Spent { kv_wait_ns, exchange_ns, .. } = spent;
    for (part, ns) in [
        ("queued", all_ns.saturating_sub(spent.all_ns + tail_ns)),
        ("kv_wait", kv_wait_ns),
        ("exchange", exchange_ns),
        ("compute", spent.all_ns.saturating_sub(kv_wait_ns + exchange_ns)),
        ("p2d_tail", tail_ns),
    ] {
        let name = format!("laxity_engine_ttft_{part}_seconds");
        metrics::histogram!(name).record(ns as f64 / 1e9);
    }
}

impl Engine {
    pub(super) fn hear(&mut self, from: SocketAddr, words: Words) {
        self.lost.remove(&from);
        match words {
            Words::Prefill(asked) => self.prefill_for(from, asked),
            Words::First { request, token, spent } => {
                if let Some(remote) = self.remote.get_mut(&RequestId(request)) {
                    remote.first = Some((token, spent, Instant::now()));
                }
                self.join(RequestId(request));
            }
            Words::Failed { request, why } => {
                tracing::warn!(%from, request, "a prompt is computed here after all: {why:?}");
                self.fall_back(RequestId(request));
            }
            Words::Cancel { request } => {
                let request = RequestId(request);
                if let Some(sequence) = self.withdraw(request) {
                    let why = Failure::Unavailable("cancelled".to_owned());
                    self.end(sequence, Output::Failed(why));
                }
            }
            Words::Step { step, members } => self.hear_step(step, members),
            // These messages go to the thread that requests and gives KV.
            Words::Ask(_)
            | Words::Will { .. }
            | Words::Read(_)
            | Words::Handle { .. }
            | Words::Layer { .. }
            | Words::Computed { .. } => {}
        }
    }

    /// Returns why this process can't compute a prompt for another one, or `None` if it can.
    fn why_not(&self, asked: &PrefillAsk) -> Option<String> {
        let PrefillAsk { tokens, have, .. } = asked;
        if asked.model != self.model.identity() {
            let why = "this process has another model: sizes and weights of all processes must be \
                       the same";
            return Some(why.to_owned());
        }
        let shape = self.model.shape();
        let known = |token: &u32| (*token as usize) < shape.vocab;
        if tokens.is_empty()
            || tokens.len() > shape.context
            || *have >= tokens.len()
            || !tokens.iter().all(known)
        {
            let count = tokens.len();
            return Some(format!("a prompt of {count} tokens, of which {have} are there, is none"));
        }
        let id = RequestId(asked.request);
        if self.sequences.contains_key(&id) || self.asking.contains_key(&id) {
            return Some("there is such a request already".to_owned());
        }
        if let Some(rank) = self.lost_rank() {
            return Some(format!("{rank}, which holds experts, is gone"));
        }
        let most = self.requests_max;
        (self.sequences.len() + self.asking.len() >= most)
            .then(|| format!("{most} prompts are being computed already (limits.requests_max)"))
    }

    fn prefill_for(&mut self, from: SocketAddr, asked: PrefillAsk) {
        let PrefillAsk { request, have, wants_kv, remaining_ns, importance, .. } = asked;
        if let Some(why) = self.why_not(&asked) {
            if let Some(net) = &self.net {
                let why = Failure::Internal(why);
                net.say(from, &Words::Failed { request, why });
            }
            return;
        }
        let submission = Submission {
            output_max: 1,
            arrival: clock::now(),
            prefill: None,
            slo: if asked.interactive {
                Slo::Interactive { ttft: remaining_ns, tbt: 0 }
            } else {
                Slo::Batch { ttlt: remaining_ns }
            },
            importance,
            stop: None,
            outlet: Outlet::Away(Destination { to: from, request, sent: have, wants_kv }),
        };
        self.admit(Sequence::new(RequestId(request), asked.tokens, submission));
    }

    /// Asks other processes for KV of a sequence's beginning. Returns the sequence if there is no
    /// process or no block to ask for.
    pub(super) fn ask(&mut self, mut sequence: Sequence) -> Option<Sequence> {
        let (Some(net), Some(reuse)) = (&self.net, &self.reuse) else { return Some(sequence) };
        let size = self.model.kv().block_tokens();
        let (first, count) = (sequence.computed / size, sequence.reusable(size));
        if net.peers.reuse.is_empty() || first >= count {
            return Some(sequence);
        }
        let model = self.model.identity();
        let wanted = Wanted {
            request: sequence.id.0,
            hashes: sequence.hashes(count, size, &model)[first..].to_vec(),
            first,
            deadline_ns: sequence.deadline_ns(),
        };
        if reuse.send(Call::Find(wanted)).is_err() {
            return Some(sequence);
        }
        self.asking.insert(sequence.id, sequence);
        None
    }

    /// Continues a sequence after other processes were asked. A process may have begun to send KV.
    pub(super) fn found(&mut self, request: RequestId, found: Option<(SocketAddr, usize)>) {
        let Some(mut sequence) = self.asking.remove(&request) else {
            return self.forget_reuse(request);
        };
        if let Some((from, blocks)) = found {
            let first = sequence.computed;
            let tokens = blocks * self.model.kv().block_tokens();
            let reserved = (first + tokens) as u32;
            let taken = if self.schedulers.reserve(request, reserved) {
                self.blocks.lock().take(blocks)
            } else {
                None
            };
            if let Some(taken) = taken {
                sequence.blocks.extend(taken);
                let import = Import { request: request.0, from, blocks: Vec::new(), first, tokens };
                self.imports.insert(request, import);
                metrics::counter!("laxity_engine_prompt_tokens_fetched_total")
                    .increment(tokens as u64);
            } else {
                self.forget_reuse(request);
            }
        }
        self.arrive(sequence);
    }

    /// Returns a lost process that holds experts. Until it returns, no batch can be computed.
    pub(super) fn lost_rank(&self) -> Option<SocketAddr> {
        let ranks = self.net.as_ref()?.peers.ranks.all();
        ranks.iter().copied().find(|rank| self.is_lost(rank))
    }

    pub(super) fn import(&mut self, arrival: &Arrival) {
        let head = &arrival.head;
        let Some(remote) = self.remote.get_mut(&RequestId(head.request)) else { return };
        let (layer, first) = (head.layer as usize, head.place as usize);
        let end = first.saturating_add(arrival.payload.len() / self.model.kv().token_bytes());
        let prompt = remote.sequence.prompt;
        let imported = if remote.at != arrival.from || end > prompt {
            Err(ModelError::new(format!("tokens {first} to {end} of a prompt of {prompt}")))
        } else {
            self.model.kv().import(layer, &remote.sequence.blocks, first, &arrival.payload)
        };
        match imported {
            Ok(tokens) => {
                for came in &mut remote.came[layer][first..first + tokens] {
                    remote.missing -= usize::from(!std::mem::replace(came, true));
                }
                self.join(RequestId(head.request));
            }
            Err(error) => {
                tracing::warn!(from = %arrival.from, "KV that does not fit, a prompt is computed \
                    here after all: {error}");
                self.fall_back(RequestId(head.request));
            }
        }
    }

    /// Continues the answer here if a prompt that was computed elsewhere is complete.
    fn join(&mut self, request: RequestId) {
        let complete = |remote: &Remote| remote.first.filter(|_| remote.missing == 0);
        let Some((token, spent, said)) = self.remote.get(&request).and_then(complete) else {
            return;
        };
        let Some(Remote { mut sequence, .. }) = self.remote.remove(&request) else { return };
        show_parts(&sequence, spent, said);
        metrics::counter!("laxity_engine_prefilled_elsewhere_total").increment(1);
        if sequence.asked.output_max > 1 {
            sequence.computed = sequence.prompt;
            if !self.keep_fetched {
                sequence.published = sequence.blocks.len();
            }
            let (size, model) = (self.model.kv().block_tokens(), self.model.identity());
            publish(&self.blocks, &mut sequence, size, &model);
        }
        let reason = sequence.push(token);
        sequence.tell(Output::Token(token));
        match reason {
            Some(reason) => {
                self.schedulers.handle(clock::now(), &Event::Cancelled(request));
                self.end(sequence, Output::Finished(reason));
            }
            None => self.arrive(sequence),
        }
    }

    /// Computes a prompt here that another process should have computed.
    fn fall_back(&mut self, request: RequestId) {
        let Some(Remote { mut sequence, .. }) = self.remote.remove(&request) else { return };
        self.schedulers.handle(clock::now(), &Event::Cancelled(request));
        self.release(&mut sequence);
        self.compute_after_all(sequence);
    }

    /// Computes prompts here for which nothing came for too long.
    pub(super) fn give_up_waiting(&mut self, now: Instant) {
        let Some(patience) = self.net.as_ref().map(|net| net.patience) else { return };
        let late: Vec<RequestId> = self
            .remote
            .values()
            .filter(|remote| now.duration_since(remote.since) > patience)
            .map(|remote| remote.sequence.id)
            .collect();
        for request in late {
            tracing::warn!(
                request = request.0,
                "no answer within {patience:?}: computed here after all"
            );
            if let (Some(net), Some(remote)) = (&self.net, self.remote.get(&request)) {
                net.say(remote.at, &Words::Cancel { request: request.0 });
            }
            self.fall_back(request);
        }
    }

    /// Handles the loss of another process. Prompts that it had are computed here. Sequences for it
    /// end, and if it holds experts, sequences for all other processes.
    pub(super) fn lose(&mut self, peer: SocketAddr, why: &str) {
        tracing::info!(%peer, "gone: {why}");
        self.lost.insert(peer, Instant::now());
        let remote = self.remote.values().filter(|remote| remote.at == peer);
        let fallen: Vec<RequestId> = remote.map(|remote| remote.sequence.id).collect();
        for request in fallen {
            self.fall_back(request);
        }
        if let Some(reuse) = &self.reuse {
            // The thread ends only with the process, so a failed send has no effect.
            let _ = reuse.send(Call::Lost(peer));
        }
        let has_experts = self.lost_rank() == Some(peer);
        let of_peer = |sequence: &&Sequence| match &sequence.asked.outlet {
            Outlet::Away(to) => to.to == peer || has_experts,
            Outlet::Here(_) => false,
        };
        let sequences = self.sequences.values();
        let asking = self.asking.values();
        let unwanted: Vec<RequestId> =
            sequences.chain(asking).filter(of_peer).map(|sequence| sequence.id).collect();
        for request in unwanted {
            if let Some(sequence) = self.withdraw(request) {
                // Other processes then compute the prompt themselves.
                let why = Failure::Unavailable(format!("{peer} is gone"));
                self.end(sequence, Output::Failed(why));
            }
        }
    }
}
