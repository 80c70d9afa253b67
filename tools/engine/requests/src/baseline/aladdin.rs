//! ALADDIN's placement (Nie, Fonseca, Liu, arXiv 2405.06856), with which HyperFlexis compares
//! itself where there is one task (figure 7).
//!
//! Requests are packed: each goes to the *fullest* instance that can take it and keep what it
//! promised (best fit), so that instances at the end of the line can be given back. One can take it
//! if
//! * a step of all that are there and of it is no longer than the tightest time per token,
//! * its prompt, behind those that wait there, is computed before its deadline,
//! * those that decode can stand still that long: what each step makes good until the shortest of
//!   them should end covers it,
//! * the KV that it and the others are expected to need fits.
//!
//! How full: `√(requests² + tokens²)`, both as shares of what an instance can have. How long a
//! request gets is the mean of its application so far.
//!
//! Departures. The half of ALADDIN that sizes the cluster is not here: figure 7 has a fixed number
//! of instances. Where it would start an instance, the request goes to the one with the fewest
//! prompt tokens to compute. Its correction of mispredicted lengths moves the bounds of a worker;
//! here a report by the instance says what stands there.

use std::collections::{HashMap, VecDeque};

use crate::Time;
use crate::dispatch::{Decision, Dispatch, Event, Role};
use crate::hyperflexis::Linear;
use crate::hyperflexis::budget::InstanceLoad;
use crate::ledger::{InstanceTable, Row, Targets};
use crate::request::{ApplicationId, InstanceId, RequestId, Spec};

/// Requests of an instance that count as full.
const REQUESTS: f64 = 256.0;

/// See the module.
#[derive(Clone, Debug)]
pub struct Aladdin {
    model: Linear,
    block_tokens: u32,
    ledger: InstanceTable,
    held: VecDeque<(Spec, bool)>,
    applications: HashMap<RequestId, ApplicationId>,
    /// Requests and tokens of an application so far.
    history: HashMap<ApplicationId, (f64, f64)>,
}

impl Aladdin {
    /// Over instances that take what `model` says.
    #[must_use]
    pub fn new(model: Linear, block_tokens: u32) -> Self {
        Self {
            model,
            block_tokens,
            ledger: InstanceTable::default(),
            held: VecDeque::new(),
            applications: HashMap::new(),
            history: HashMap::new(),
        }
    }

    fn output(&self, spec: &Spec) -> f64 {
        let most = f64::from(spec.output_max);
        self.history
            .get(&spec.application)
            .map_or(most / 2.0, |(requests, tokens)| tokens / requests)
            .min(most)
    }

    fn takes(&self, now: Time, row: &Row, spec: &Spec, decode: bool) -> bool {
        let tokens = spec.prompt.saturating_add(spec.generated);
        let output = self.output(spec);
        let targets = Targets::of(spec);
        let before = InstanceLoad::of(row);
        let with = if decode {
            before.with_decode(tokens, targets.tpot)
        } else {
            before.with_prompt(tokens, targets.tpot)
        };
        let relax = with.relax_ns(&self.model);
        let room = row.room(self.block_tokens, 0.0) >= f64::from(tokens) + output;
        if relax <= 0.0 || !room {
            return false;
        }
        if decode {
            return true;
        }
        let prompts = with.prefill_ns(&self.model);
        let left = (spec.arrival.0.saturating_add(targets.ttft)).saturating_sub(now.0) as f64;
        // Half of an output is what a request that decodes has to go on average.
        let makes_good = relax * output / 2.0;
        prompts <= left && (before.decoding <= 0.0 || prompts <= makes_good)
    }

    fn fullness(row: &Row, block_tokens: u32) -> f64 {
        let all = f64::from(row.load.blocks) * f64::from(block_tokens);
        let used = all - row.room(block_tokens, 0.0);
        let tokens = if all > 0.0 { used / all } else { 0.0 };
        (f64::from(row.requests()) / REQUESTS).hypot(tokens)
    }

    fn pick(&self, now: Time, spec: &Spec, decode: bool) -> Option<InstanceId> {
        let rows = || {
            self.ledger
                .rows()
                .filter(|(_, row)| (row.role == Role::Decode) == decode)
        };
        let fullest = rows()
            .filter(|(_, row)| self.takes(now, row, spec, decode))
            .map(|(instance, row)| (Self::fullness(row, self.block_tokens), instance))
            // Of equals the first: what is empty at the end stays so.
            .reduce(|best, one| if one.0 > best.0 { one } else { best });
        if let Some((_, instance)) = fullest {
            return Some(instance);
        }
        let weight = |row: &Row| {
            if decode {
                row.decodes().1
            } else {
                row.prompts().tokens
            }
        };
        rows()
            .min_by(|(_, x), (_, y)| weight(x).total_cmp(&weight(y)))
            .map(|(instance, _)| instance)
    }

    fn leave(&mut self, request: RequestId) -> Option<ApplicationId> {
        self.ledger.leave(request);
        self.held.retain(|(spec, _)| spec.id != request);
        self.applications.remove(&request)
    }
}

impl Dispatch for Aladdin {
    fn name(&self) -> &'static str {
        "aladdin"
    }

    fn handle(&mut self, now: Time, event: &Event) {
        match event {
            Event::Arrived(spec) => {
                self.applications.insert(spec.id, spec.application);
                self.held.push_back((*spec, false));
            }
            Event::Prefilled { spec, .. } => {
                self.ledger.leave(spec.id);
                self.held.push_back((*spec, true));
            }
            Event::Up { instance, role } => self.ledger.up(now, *instance, *role),
            Event::Down { instance, lost } => {
                self.ledger.down(*instance, lost);
                for spec in lost {
                    self.held.retain(|(other, _)| other.id != spec.id);
                    self.held.push_back((*spec, false));
                }
            }
            Event::Load { instance, load, .. } => self.ledger.report(now, *instance, *load),
            Event::Finished {
                request, generated, ..
            } => {
                if let Some(application) = self.leave(*request) {
                    let history = self.history.entry(application).or_default();
                    history.0 += 1.0;
                    history.1 += f64::from(*generated);
                }
            }
            Event::Cancelled(request) => {
                self.leave(*request);
            }
        }
    }

    fn poll_decision(&mut self, now: Time) -> Option<Decision> {
        let picked = self
            .held
            .iter()
            .enumerate()
            .find_map(|(at, (spec, decode))| {
                let instance = self.pick(now, spec, *decode)?;
                Some((at, instance))
            });
        let (at, instance) = picked?;
        let (spec, _) = self.held.remove(at)?;
        self.ledger.place(&spec, Targets::of(&spec).tpot, instance);
        let request = spec.id;
        Some(Decision::Place { request, instance })
    }

    fn next_deadline(&self) -> Option<Time> {
        None
    }

    fn waiting(&self) -> usize {
        self.held.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iteration::Load;
    use crate::request::{ClassId, Importance, Slo};

    const MODEL: Linear = Linear {
        prefill: [1e6, 1e4, 0.0],
        decode: [1e6, 0.0, 1e6],
    };

    fn spec(number: u64, tbt: u64) -> Spec {
        Spec {
            id: RequestId(number),
            arrival: Time::ZERO,
            prompt: 100,
            output_max: 100,
            ready: 0,
            generated: 0,
            class: ClassId(0),
            application: ApplicationId(0),
            importance: Importance::Important,
            slo: Slo::Interactive {
                ttft: 100_000_000,
                tbt,
            },
        }
    }

    fn placed(aladdin: &mut Aladdin, spec: Spec) -> InstanceId {
        aladdin.handle(Time::ZERO, &Event::Arrived(spec));
        let Some(Decision::Place { instance, .. }) = aladdin.poll_decision(Time::ZERO) else {
            panic!("it has a place")
        };
        instance
    }

    fn with(decoding: [u32; 2]) -> Aladdin {
        let mut aladdin = Aladdin::new(MODEL, 16);
        for (at, decoding) in decoding.into_iter().enumerate() {
            let instance = InstanceId(at as u32);
            let role = Role::Whole;
            aladdin.handle(Time::ZERO, &Event::Up { instance, role });
            let load = Load {
                decoding,
                running: decoding,
                decode_context: u64::from(decoding) * 100,
                blocks: 10_000,
                blocks_free: 10_000 - decoding * 7,
                ..Load::default()
            };
            let took = 0;
            aladdin.handle(
                Time::ZERO,
                &Event::Load {
                    instance,
                    load,
                    took,
                },
            );
        }
        aladdin
    }

    #[test]
    fn the_fullest_instance_that_keeps_its_promises_is_taken() {
        // 1 ms and 1 ms for each that decodes.
        assert_eq!(
            placed(&mut with([5, 20]), spec(9, 50_000_000)),
            InstanceId(1)
        );
        assert_eq!(
            placed(&mut with([5, 20]), spec(9, 20_000_000)),
            InstanceId(0)
        );
    }

    #[test]
    fn where_nobody_can_keep_them_the_least_loaded_is_taken() {
        let mut aladdin = with([30, 30]);
        let first = placed(&mut aladdin, spec(8, 10_000_000));
        let second = placed(&mut aladdin, spec(9, 10_000_000));
        assert_ne!(first, second);
    }
}
