//! The way of a sequence through the engine: how it comes in, reuses KV that is in the cache, goes
//! to the scheduler and ends.

use std::sync::atomic::Ordering;
use std::time::Instant;

use laxity_requests::iteration::{Event, Refused};
use laxity_requests::request::RequestId;

use super::Engine;
use super::sequence::{Failure, Outlet, Output, Sequence, Submission};
use crate::apart::inbox::Key;
use crate::apart::reuse::Call;
use crate::apart::{PrefixQuery, Words};
use crate::clock;

impl Engine {
    pub(super) fn submit(&mut self, prompt: Vec<u32>, submission: Submission) {
        let sequence = Sequence::new(RequestId(self.numbers.next()), prompt, submission);
        let needed = sequence.spec(0).tokens_max().div_ceil(self.schedulers.room.block_tokens);
        if needed > self.schedulers.room.blocks || sequence.tokens.is_empty() {
            return self.end(sequence, Output::Failed(Failure::TooLong));
        }
        if self.net.as_ref().is_some_and(|net| !net.peers.prefill.is_empty()) {
            self.outside.push_back(sequence);
            self.send_out();
        } else {
            self.admit(sequence);
        }
    }

    /// Reuses the blocks of a prompt that are in the cache. Returns the number of tokens.
    pub(super) fn find(&mut self, sequence: &mut Sequence) -> usize {
        let size = self.model.kv().block_tokens();
        let model = self.model.identity();
        let count = sequence.reusable(size);
        let found = self.blocks.lock().find(sequence.hashes(count, size, &model));
        let tokens = found.len() * size;
        sequence.published = found.len();
        sequence.blocks = found;
        sequence.computed = tokens;
        tokens
    }

    pub(super) fn admit(&mut self, mut sequence: Sequence) {
        let ready = self.find(&mut sequence);
        if ready > 0 && !self.schedulers.reserve(sequence.id, ready as u32) {
            self.release(&mut sequence);
        }
        let found = sequence.computed as u64;
        metrics::counter!("laxity_engine_prompt_tokens_found_total").increment(found);
        if let Some(sequence) = self.ask(sequence) {
            self.arrive(sequence);
        }
    }

    /// Passes a sequence to the scheduler, with the number of tokens that are ready.
    pub(super) fn arrive(&mut self, sequence: Sequence) {
        let import = self.imports.get(&sequence.id).map_or(0, |import| import.tokens);
        let spec = sequence.spec(sequence.computed + import);
        self.sequences.insert(sequence.id, sequence);
        self.schedulers.handle(clock::now(), &Event::Arrived(spec));
        self.refuse();
    }

    pub(super) fn refuse(&mut self) {
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
    pub(super) fn release(&mut self, sequence: &mut Sequence) {
        self.blocks.lock().release(&std::mem::take(&mut sequence.blocks));
        sequence.computed = 0;
        sequence.published = 0;
        let request = sequence.id;
        if let Some(import) = self.imports.remove(&request) {
            self.say_computed(import.from, vec![PrefixQuery::batch(request.0)], vec![request.0]);
            self.forget_reuse(request);
        }
    }

    pub(super) fn forget_reuse(&self, request: RequestId) {
        if let Some(reuse) = &self.reuse {
            // The thread ends only with the process, so a failed send has no effect.
            let _ = reuse.send(Call::Forget(request.0));
        }
        if let Some(net) = &self.net {
            let layers = 0..self.model.shape().layers as u16;
            net.inbox.forget(layers.map(|layer| Key::Reuse(request.0, layer)));
        }
    }

    /// Ends a sequence that the scheduler does not have (any more).
    pub(super) fn end(&mut self, mut sequence: Sequence, output: Output) {
        self.release(&mut sequence);
        match (&sequence.asked.outlet, output) {
            (Outlet::Here(_), output) => {
                sequence.tell(output);
                self.gauges.open.fetch_sub(1, Ordering::Relaxed);
            }
            (Outlet::Away(to), output) => {
                let (Some(net), request) = (&self.net, to.request) else { return };
                if let Output::Failed(why) = output {
                    net.say(to.to, &Words::Failed { request, why });
                }
                net.carrier.end_request(request);
            }
        }
    }

    /// Removes a sequence from the scheduler in any of its states.
    pub(super) fn withdraw(&mut self, request: RequestId) -> Option<Sequence> {
        let here = self.sequences.remove(&request).or_else(|| self.asking.remove(&request));
        let sequence = here.or_else(|| Some(self.remote.remove(&request)?.sequence))?;
        self.forget_reuse(request);
        self.schedulers.handle(clock::now(), &Event::Cancelled(request));
        Some(sequence)
    }

    /// Ends requests that are not wanted any more, and continues those whose wait was too long.
    pub(super) fn sweep(&mut self) {
        let unwanted = |sequence: &Sequence| !sequence.is_wanted();
        let gone: Vec<RequestId> = self
            .sequences
            .values()
            .chain(self.asking.values())
            .chain(self.remote.values().map(|remote| &remote.sequence))
            .filter(|sequence| unwanted(sequence))
            .map(|sequence| sequence.id)
            .collect();
        for request in gone {
            if let (Some(net), Some(remote)) = (&self.net, self.remote.get(&request)) {
                net.say(remote.at, &Words::Cancel { request: request.0 });
            }
            if let Some(sequence) = self.withdraw(request) {
                metrics::counter!("laxity_engine_abandoned_total").increment(1);
                self.end(sequence, Output::Failed(Failure::Unavailable("cancelled".to_owned())));
            }
        }
        let outside = std::mem::take(&mut self.outside);
        let (gone, stay): (Vec<_>, Vec<_>) = outside.into_iter().partition(unwanted);
        self.outside = stay.into();
        for sequence in gone {
            self.end(sequence, Output::Failed(Failure::Unavailable("cancelled".to_owned())));
        }
        self.give_up_waiting(Instant::now());
        self.send_out();
    }
}
