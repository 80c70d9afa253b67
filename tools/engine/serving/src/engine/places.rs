//! Prompts on their way to prefill processes. A prompt gets blocks for its KV here, a process is
//! chosen, and the prompt is sent. If all of those processes are gone, it is computed here.

use std::net::SocketAddr;
use std::time::Duration;

use laxity_requests::iteration::Event;
use laxity_requests::request::Slo;

use super::Engine;
use super::remote::{Remote, remaining};
use super::sequence::{Failure, Output, Sequence};
use crate::apart::{PrefillAsk, Words};
use crate::clock;

/// Time for which a lost process gets no prompts, unless it sends a message.
const ASIDE_FOR: Duration = Duration::from_secs(10);

impl Engine {
    /// Reports whether a process was lost a short time ago and has sent nothing since.
    pub(super) fn is_lost(&self, at: &SocketAddr) -> bool {
        self.lost.get(at).is_some_and(|since| since.elapsed() < ASIDE_FOR)
    }

    fn prefill(&self) -> &[SocketAddr] {
        self.net.as_ref().map_or(&[], |net| &net.peers.prefill)
    }

    /// Sends prompts to prefill processes, as far as there are free blocks for their KV.
    pub(super) fn send_out(&mut self) {
        if self.prefill().is_empty() {
            return;
        }
        if self.prefill().iter().all(|at| self.is_lost(at)) {
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
    }

    /// Reserves blocks for a prompt and sends it. Returns the sequence if blocks are short.
    fn make_room(&mut self, mut sequence: Sequence) -> Option<Sequence> {
        let prompt = sequence.prompt as u32;
        let load = self.schedulers.load();
        let needed = prompt.div_ceil(self.schedulers.room.block_tokens);
        // Sequences that lost their blocks come before new ones, or they would never get blocks
        // again. Decoding sequences need one more block soon. Relegated ones come last.
        let alone = load.running == 0 && self.remote.is_empty();
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
            tracing::error!("{lacking} blocks that the scheduler has given out are not there");
            self.schedulers.handle(clock::now(), &Event::Cancelled(sequence.id));
            let why = Failure::Internal("blocks are missing".to_owned());
            self.end(sequence, Output::Failed(why));
            return None;
        };
        sequence.blocks.extend(blocks);
        self.send(sequence);
        None
    }

    /// Returns the process that a router chose for a prompt, or else the one with the fewest
    /// prompts of this process. Equals take turns.
    fn place_of(&self, sequence: &Sequence) -> Option<SocketAddr> {
        let prompts = |at: &SocketAddr| self.remote.values().filter(|r| r.at == *at).count();
        let turn = |at: &SocketAddr| self.turns.get(at).copied().unwrap_or(0);
        let routed = sequence.asked.prefill.and_then(|number| self.prefill().get(number));
        let there = |at: &&SocketAddr| !self.is_lost(at);
        let fewest = || {
            let there = self.prefill().iter().filter(there);
            there.min_by_key(|at| (prompts(at), turn(at)))
        };
        routed.filter(there).or_else(fewest).copied()
    }

    /// Returns the time that a prompt has, in ns. If the objective is for the last token, the
    /// answer needs part of the time. That part is estimated by the iterations here, but is at most
    /// half of what is left.
    fn prompt_remaining(&self, sequence: &Sequence) -> u64 {
        let left = remaining(sequence.deadline_ns());
        match sequence.asked.slo {
            Slo::Interactive { .. } => left,
            Slo::Batch { .. } => {
                let answer = self.step_ns.saturating_mul(u64::from(sequence.asked.output_max));
                left.saturating_sub(answer.min(left / 2)).max(1)
            }
        }
    }

    fn send(&mut self, sequence: Sequence) {
        let Some((net, at)) = self.net.as_ref().zip(self.place_of(&sequence)) else {
            return self.compute_after_all(sequence);
        };
        let have = sequence.computed;
        let wants_kv = sequence.asked.output_max > 1;
        let asked = PrefillAsk {
            request: sequence.id.0,
            tokens: sequence.tokens.clone(),
            have,
            wants_kv,
            remaining_ns: self.prompt_remaining(&sequence),
            interactive: sequence.asked.slo.is_interactive(),
            importance: sequence.asked.importance,
            model: self.model.identity(),
        };
        net.say(at, &Words::Prefill(asked));
        self.sent += 1;
        self.turns.insert(at, self.sent);
        let layers = self.model.shape().layers;
        let missing = if wants_kv { (sequence.prompt - have) * layers } else { 0 };
        let remote = Remote::new(sequence, at, layers, missing);
        self.remote.insert(remote.sequence.id, remote);
    }

    pub(super) fn compute_after_all(&mut self, sequence: Sequence) {
        metrics::counter!("laxity_engine_prefilled_after_all_total").increment(1);
        self.admit(sequence);
    }
}
