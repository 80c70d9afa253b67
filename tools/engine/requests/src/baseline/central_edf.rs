//! Earliest deadline first with admission, with one queue in front of all instances. A simple
//! alternative to HyperFlexis.
//!
//! The request with the earliest deadline of a first token goes to the instance with the fewest
//! prompt tokens to compute. The instance must have fewer such tokens than `batch`. Requests that
//! can't meet their deadline any more go behind all others. An instance refuses a request that
//! makes its step longer than the shortest time per token there, unless the instance is idle.
//!
//! Computed prompts go to the decode instance with the least KV, in the order of the next token's
//! deadline. An instance whose step would be too long is skipped.

use std::collections::{BTreeMap, HashMap};

use crate::dispatch::{Dispatch, DispatchDecision, DispatchEvent, Role};
use crate::hyperflexis::Linear;
use crate::hyperflexis::budget::InstanceLoad;
use crate::ledger::{InstanceTable, Row, Targets};
use crate::request::{InstanceId, RequestId, Spec};
use crate::{Span, Time};

/// The place in the queue: 0 if in time or 1 if late, then the deadline, then the id.
type EdfKey = (u8, Time, RequestId);

#[derive(Clone, Debug, Default)]
pub struct CentralEdf {
    model: Linear,
    batch: u32,
    block_tokens: u32,
    ledger: InstanceTable,
    line: BTreeMap<EdfKey, Spec>,
    decode: BTreeMap<EdfKey, Spec>,
    keys: HashMap<RequestId, EdfKey>,
    /// Whether an event came after which an instance may take more requests.
    stirred: bool,
}

impl CentralEdf {
    /// Creates the policy. An instance with `batch` or more prompt tokens to compute gets no more.
    pub fn new(model: Linear, batch: u32, block_tokens: u32) -> Self {
        Self { model, batch, block_tokens, ..Self::default() }
    }

    fn enqueue(&mut self, spec: &Spec) {
        let key = (0, spec.arrival + Span(Targets::of(spec).ttft), spec.id);
        self.keys.insert(spec.id, key);
        self.line.insert(key, *spec);
    }

    fn dequeue(&mut self, request: RequestId) -> Option<Spec> {
        let key = self.keys.remove(&request)?;
        self.line.remove(&key).or_else(|| self.decode.remove(&key))
    }

    /// Moves requests that can't meet their deadline any more behind all others.
    fn sort_out(&mut self, now: Time) {
        while let Some((key, spec)) = self.line.first_key_value() {
            let tokens = f64::from(spec.prompt);
            let alone = self.model.prefill_ns(tokens, tokens * tokens);
            if key.0 == 1 || key.1 >= now + Span(alone as u64) {
                return;
            }
            let (key, spec) = (*key, *spec);
            self.line.remove(&key);
            let late = (1, key.1, key.2);
            self.keys.insert(spec.id, late);
            self.line.insert(late, spec);
        }
    }

    /// Reports whether an instance has room for a request and its step stays short enough.
    fn takes(&self, row: &Row, spec: &Spec, decode: bool) -> bool {
        if row.is_idle() {
            return true;
        }
        let tokens = spec.prompt.saturating_add(spec.generated);
        let room = row.room(self.block_tokens, 0.0) >= f64::from(tokens);
        let few = decode || row.prompts().tokens < f64::from(self.batch);
        if !few || !room {
            return false;
        }
        let standing = InstanceLoad::of(row);
        let tpot = Targets::of(spec).tpot;
        let with = if decode {
            standing.with_decode(tokens, tpot)
        } else {
            standing.with_prompt(tokens, tpot)
        };
        with.relax_ns(&self.model) > 0.0
    }

    fn pick(&self, spec: &Spec, decode: bool) -> Option<InstanceId> {
        self.ledger
            .rows()
            .filter(|(_, row)| (row.role == Role::Decode) == decode)
            .filter(|(_, row)| self.takes(row, spec, decode))
            .min_by(|(_, x), (_, y)| {
                let weight = |row: &Row| {
                    if decode { row.decodes().1 } else { row.prompts().tokens }
                };
                weight(x).total_cmp(&weight(y)).then(x.requests.cmp(&y.requests))
            })
            .map(|(instance, _)| instance)
    }
}

impl Dispatch for CentralEdf {
    fn handle(&mut self, now: Time, event: &DispatchEvent) {
        self.stirred = true;
        match event {
            DispatchEvent::Arrived(spec) => self.enqueue(spec),
            DispatchEvent::Prefilled { spec, .. } => {
                self.ledger.leave(spec.id);
                let key = (0, spec.deadline(spec.generated), spec.id);
                self.keys.insert(spec.id, key);
                self.decode.insert(key, *spec);
            }
            DispatchEvent::Up { instance, role } => self.ledger.up(now, *instance, *role),
            DispatchEvent::Down { instance, lost } => {
                self.ledger.down(*instance, lost);
                for spec in lost {
                    self.dequeue(spec.id);
                    self.enqueue(spec);
                }
            }
            DispatchEvent::Load { instance, load, .. } => self.ledger.report(now, *instance, *load),
            DispatchEvent::Finished { request, .. } => {
                self.ledger.leave(*request);
            }
            DispatchEvent::Cancelled(request) => {
                self.dequeue(*request);
                self.ledger.leave(*request);
            }
        }
    }

    fn poll_decision(&mut self, now: Time) -> Option<DispatchDecision> {
        if !self.stirred {
            return None;
        }
        self.sort_out(now);
        for decode in [true, false] {
            let line = if decode { &self.decode } else { &self.line };
            let Some(spec) = line.values().next().copied() else { continue };
            // The first request waits for room. Later ones don't overtake it.
            if let Some(instance) = self.pick(&spec, decode) {
                self.dequeue(spec.id);
                self.ledger.place(&spec, Targets::of(&spec).tpot, instance);
                let request = spec.id;
                return Some(DispatchDecision::Place { request, instance });
            }
        }
        self.stirred = false;
        None
    }

    fn waiting(&self) -> usize {
        self.line.len() + self.decode.len()
    }
}
