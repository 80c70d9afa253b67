//! One iteration: turns a plan of the scheduler into a batch and computes it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use laxity_requests::Span;
use laxity_requests::iteration::{Event, Plan};
use laxity_requests::request::RequestId;

use super::Engine;
use super::sequence::{Failure, Outlet, Output, Reason, Sequence};
use crate::apart::between::{Between, Export, Import, Transfers};
use crate::apart::experts::RemoteExperts;
use crate::apart::lockstep::{InStep, Iteration};
use crate::apart::{Spent, Words};
use crate::clock;
use crate::model::{AllLocal, ExpertPeers, Piece, Result, fail, greedy};

/// Number of failed batches after which a request is given up.
const FAILURES_MAX: u32 = 2;

struct Member {
    request: RequestId,
    /// Number of tokens whose KV is there after the batch.
    end: usize,
    wants_output: bool,
}

impl Engine {
    /// Computes a plan and reports the result to the scheduler. Without a plan, only takes part in
    /// the step of the other ranks.
    pub(super) fn compute(&mut self, planned: Option<&Plan>) {
        let start = Instant::now();
        let nothing = Plan::default();
        let plan = planned.unwrap_or(&nothing);
        for dropped in &plan.drops {
            if let Some(mut sequence) = self.sequences.remove(&dropped.request) {
                self.release(&mut sequence);
                self.sequences.insert(dropped.request, sequence);
                metrics::counter!("laxity_engine_dropped_total").increment(1);
            }
        }
        let iteration = self.begin_step(plan);
        let batch = match &iteration {
            Some(iteration) => iteration.batch,
            None => self.numbers.next(),
        };
        let finished = self.batch(plan, batch, iteration);
        self.end_step();
        let finished = match finished {
            // The scheduler must hear of a plan that only drops blocks, or it waits for its end.
            Ok(_) if planned.is_none() => return,
            Ok(finished) => finished,
            Err(error) => {
                let count = plan.chunks.len() + plan.steps.len();
                tracing::error!("a batch of {count} failed: {error}");
                metrics::counter!("laxity_engine_batches_failed_total").increment(1);
                self.end_batch_hints(plan, batch);
                if planned.is_none() {
                    return;
                }
                return self.recover(plan, start, &error.to_string());
            }
        };
        let took = start.elapsed();
        self.measure(plan, took);
        let ids: Vec<RequestId> = finished.iter().map(|(request, _)| *request).collect();
        let took = Span(took.as_nanos() as u64);
        self.schedulers.handle(clock::now(), &Event::Done { took, finished: ids });
        for (request, reason) in finished {
            if let Some(sequence) = self.sequences.remove(&request) {
                self.end(sequence, Output::Finished(reason));
            }
        }
    }

    /// Updates the metrics and the estimates of times after an iteration.
    fn measure(&mut self, plan: &Plan, took: Duration) {
        let composition = plan.composition();
        metrics::counter!("laxity_engine_prompt_tokens_total")
            .increment(u64::from(composition.prefill_tokens));
        metrics::counter!("laxity_engine_answer_tokens_total")
            .increment(u64::from(composition.decodes));
        metrics::histogram!("laxity_engine_iteration_seconds").record(took.as_secs_f64());
        let took = took.as_nanos() as u64;
        if plan.chunks.is_empty() {
            // A new value has weight 1/8, because answers are long.
            self.step_ns = match self.step_ns {
                0 => took,
                before => before - before / 8 + took / 8,
            };
            return;
        }
        // A new value has weight 1/2, which suffices for the daemon's estimates.
        let layer = took / self.model.shape().layers as u64;
        self.layer_time_ns = match self.layer_time_ns {
            0 => layer,
            before => (before + layer) / 2,
        };
        if let Some(net) = &self.net {
            net.running().layer_time_ns = self.layer_time_ns;
        }
    }

    /// Returns the members of a batch and their pieces, with blocks for all of them.
    fn pieces(&mut self, plan: &Plan) -> Result<(Vec<Member>, Vec<Piece>)> {
        let chunks =
            plan.chunks.iter().map(|chunk| (chunk.request, chunk.prefix, chunk.tokens, chunk.last));
        let steps = plan.steps.iter().map(|step| (step.request, step.context, 1, true));
        let size = self.model.kv().block_tokens();
        let (mut members, mut pieces) = (Vec::new(), Vec::new());
        for (request, start, count, wants_output) in chunks.chain(steps) {
            let number = request.0;
            let Some(sequence) = self.sequences.get_mut(&request) else {
                fail!("the scheduler plans request {number}, which is not here");
            };
            let (start, end) = (start as usize, (start + count) as usize);
            let Some(tokens) = sequence.tokens.get(start..end) else {
                let count = sequence.tokens.len();
                fail!("request {number} has {count} tokens, none from {start} to {end}");
            };
            let here =
                sequence.computed + self.imports.get(&request).map_or(0, |import| import.tokens);
            if here < start {
                fail!("request {number} is planned from token {start} on, but {here} are there");
            }
            let lacking = end.div_ceil(size).saturating_sub(sequence.blocks.len());
            let Some(blocks) = self.blocks.lock().take(lacking) else {
                fail!("{lacking} blocks that request {number} has been given are not there");
            };
            sequence.blocks.extend(blocks);
            pieces.push(Piece {
                tokens: tokens.to_vec(),
                start,
                blocks: sequence.blocks.clone(),
                wants_output,
            });
            members.push(Member { request, end, wants_output });
        }
        Ok((members, pieces))
    }

    /// Returns the deadline of the KV of tokens `sent` to `end` of a prompt, in ns.
    fn due_ns(&self, sequence: &Sequence, end: usize, sent: usize) -> u64 {
        let deadline = sequence.deadline_ns();
        let Some(net) = &self.net else { return deadline };
        let token = self.model.kv().token_bytes() * self.model.shape().layers;
        let after = net.wire_ns(sequence.prompt.saturating_sub(end) * token);
        let own = net.wire_ns(end.saturating_sub(sent) * token);
        due_ns(deadline, clock::now().0, own, after)
    }

    fn exports(&self, members: &[Member]) -> Vec<Export> {
        let mut exports = Vec::new();
        for member in members {
            let Some(sequence) = self.sequences.get(&member.request) else { continue };
            if let Outlet::Away(to) = &sequence.asked.outlet
                && to.wants_kv
            {
                exports.push(Export {
                    to: to.to,
                    request: to.request,
                    deadline_ns: self.due_ns(sequence, member.end, to.sent),
                    scavenged: self.schedulers.is_relegated(member.request),
                    blocks: sequence.blocks.clone(),
                    first: to.sent,
                    tokens: member.end.saturating_sub(to.sent),
                });
            }
        }
        exports
    }

    /// Computes a batch. Returns the requests that end with it, with the reasons.
    fn batch(
        &mut self,
        plan: &Plan,
        batch: u64,
        iteration: Option<Iteration>,
    ) -> Result<Vec<(RequestId, Reason)>> {
        let (members, pieces) = self.pieces(plan)?;
        if pieces.is_empty() && iteration.is_none() {
            return Ok(Vec::new());
        }
        let (exports, imports) = (self.exports(&members), self.imports_of(&members));
        let imported: Vec<(RequestId, usize)> = imports
            .iter()
            .map(|import| (RequestId(import.request), import.first + import.tokens))
            .collect();
        let hints = self.hints(plan);
        let holders = self.holders(batch, &imported);
        if hints {
            self.begin_batch_hints(plan, batch, &exports);
        }
        let transfers = Transfers { batch, hints, imports, exports, holders: holders.clone() };
        let deadline_ns = self.earliest(&members);
        let (outputs, spent) = self.forward(&pieces, transfers, deadline_ns, iteration)?;
        for member in &members {
            if let Some(sequence) = self.sequences.get_mut(&member.request) {
                sequence.spent.add(spent);
            }
        }
        self.end_batch_hints(plan, batch);
        let size = self.model.kv().block_tokens();
        for &(request, end) in &imported {
            if let Some(sequence) = self.sequences.get_mut(&request) {
                sequence.computed = sequence.computed.max(end);
                if !self.keep_fetched {
                    sequence.published = sequence.published.max(end / size);
                }
            }
            self.imports.remove(&request);
        }
        self.tell_holders(holders, &imported);
        Ok(self.outputs(&members, &outputs))
    }

    /// Returns the KV from other processes that members of a batch need.
    fn imports_of(&self, members: &[Member]) -> Vec<Import> {
        let imports = members.iter();
        let imports = imports.filter_map(|member| self.imports.get(&member.request));
        let with_blocks = imports.map(|import| {
            let blocks = self.sequences.get(&RequestId(import.request));
            let blocks = blocks.map_or(Vec::new(), |sequence| sequence.blocks.clone());
            Import { blocks, ..import.clone() }
        });
        with_blocks.collect()
    }

    /// Returns the earliest deadline of the requests that are not relegated, or 0 for none.
    fn earliest(&self, members: &[Member]) -> u64 {
        let members = members.iter();
        members
            .filter(|member| !self.schedulers.is_relegated(member.request))
            .filter_map(|member| self.sequences.get(&member.request))
            .map(Sequence::deadline_ns)
            .min()
            .unwrap_or(0)
    }

    /// Computes pieces with the model, with all transfers to and from other processes.
    fn forward(
        &mut self,
        pieces: &[Piece],
        of: Transfers,
        deadline_ns: u64,
        iteration: Option<Iteration>,
    ) -> Result<(Vec<Vec<f32>>, Spent)> {
        let hidden = self.model.shape().hidden;
        let (model, net) = (Arc::clone(&self.model), self.net.clone());
        let waited = || net.as_ref().map_or(Spent::default(), |net| net.waited());
        let (began, before) = (Instant::now(), waited());
        let mut exchange = self.exchange;
        let outputs = {
            let (mut remote, mut in_step);
            let mut local = AllLocal;
            let peers: &mut dyn ExpertPeers = match (&net, iteration) {
                (Some(net), Some(iteration)) => {
                    let (experts, came) = (model.experts(), Vec::new());
                    in_step = InStep { net, experts, hidden, iteration, came };
                    &mut in_step
                }
                (Some(net), None) if net.peers.ranks.is_apart() => {
                    remote = RemoteExperts {
                        net,
                        hidden,
                        batch: if of.hints { of.batch } else { 0 },
                        deadline_ns,
                        exchange: &mut exchange,
                        open: Vec::new(),
                        began,
                    };
                    &mut remote
                }
                _ => &mut local,
            };
            let meanwhile = &mut || self.take_between_layers();
            let mut watch = Between { net: net.as_deref(), of, meanwhile };
            model.forward(pieces, &mut watch, peers)
        };
        self.exchange = exchange;
        let after = waited();
        let spent = Spent {
            kv_wait_ns: after.kv_wait_ns - before.kv_wait_ns,
            exchange_ns: after.exchange_ns - before.exchange_ns,
            all_ns: began.elapsed().as_nanos() as u64,
        };
        Ok((outputs?, spent))
    }

    fn outputs(&mut self, members: &[Member], outputs: &[Vec<f32>]) -> Vec<(RequestId, Reason)> {
        let (size, model) = (self.model.kv().block_tokens(), self.model.identity());
        let mut outputs = outputs.iter();
        let mut finished = Vec::new();
        for member in members {
            let output = member.wants_output.then(|| outputs.next()).flatten();
            let Some(sequence) = self.sequences.get_mut(&member.request) else { continue };
            sequence.computed = member.end;
            publish(&self.blocks, sequence, size, &model);
            if let Outlet::Away(to) = &mut sequence.asked.outlet {
                to.sent = to.sent.max(member.end);
            }
            let Some(output) = output else { continue };
            let token = greedy(output);
            let reason = sequence.push(token);
            sequence.tell(Output::Token(token));
            if let (Outlet::Away(to), Some(net)) = (&sequence.asked.outlet, &self.net) {
                let request = to.request;
                let spent = sequence.spent;
                net.say(to.to, &Words::First { request, token, spent });
            }
            if let Some(reason) = reason {
                finished.push((member.request, reason));
            }
        }
        finished
    }

    /// Handles a failed batch. Its requests are computed again from their beginning, or given up.
    fn recover(&mut self, plan: &Plan, start: Instant, error: &str) {
        let chunks = plan.chunks.iter().map(|chunk| chunk.request);
        let members: BTreeSet<RequestId> =
            chunks.chain(plan.steps.iter().map(|step| step.request)).collect();
        for request in &members {
            self.schedulers.handle(clock::now(), &Event::Cancelled(*request));
        }
        let took = Span(start.elapsed().as_nanos() as u64);
        let finished = Vec::new();
        self.schedulers.handle(clock::now(), &Event::Done { took, finished });
        // Without the lost experts another attempt would fail, too.
        let hopeless = self.lost_rank().is_some();
        for request in members {
            let Some(mut sequence) = self.sequences.remove(&request) else { continue };
            self.release(&mut sequence);
            sequence.failures += 1;
            if hopeless || sequence.failures >= FAILURES_MAX {
                let why = Failure::Unavailable(format!("it could not be computed: {error}"));
                self.end(sequence, Output::Failed(why));
            } else {
                self.arrive(sequence);
            }
        }
    }
}

/// Returns the deadline of the KV of a part of a prompt: that of the request, less the time that
/// the KV of later parts takes on the wire. It is not before the KV can arrive, unless the
/// request's deadline is.
fn due_ns(deadline: u64, now: u64, own: u64, after: u64) -> u64 {
    let earliest = now.saturating_add(own).min(deadline);
    deadline.saturating_sub(after).max(earliest)
}

pub(super) fn publish(
    blocks: &crate::kv::SharedBlocks,
    sequence: &mut Sequence,
    block_tokens: usize,
    model: &[u8; 16],
) {
    let full = (sequence.computed / block_tokens).min(sequence.blocks.len());
    sequence.hashes(full, block_tokens, model);
    for block in sequence.published..full {
        blocks.lock().publish(sequence.blocks[block], sequence.hashes[block]);
    }
    sequence.published = sequence.published.max(full);
}

#[cfg(test)]
mod tests {
    use super::due_ns;

    #[test]
    fn parts_of_a_prompt_leave_time_for_those_after_them_and_ask_for_nothing_impossible() {
        assert_eq!(due_ns(1_000, 100, 50, 300), 700);
        assert_eq!(due_ns(1_000, 100, 50, 0), 1_000, "the last part");
        assert_eq!(due_ns(1_000, 600, 50, 900), 650, "not before it can be there");
        assert_eq!(due_ns(1_000, 980, 50, 900), 1_000, "with its request");
        assert_eq!(due_ns(1_000, 5_000, 50, 900), 1_000, "which is late");
    }
}
