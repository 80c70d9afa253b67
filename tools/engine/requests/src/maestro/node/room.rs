//! How a node makes room for a stage: which models and stages may leave, which do, and when their
//! memory is free (Maestro §III-C, Algorithm 2).

use super::super::memory::{self, Action, Engine, MemoryPlan, Offer};
use super::super::residency::{Move, Residency};
use super::{Ask, Done, Node, Prepared};
use crate::workflow::{Class, ModelId, Readiness, StageId};
use crate::{Span, Time};

impl Node {
    pub(super) fn prepare(&self, ask: &Ask, now: Time) -> Option<Prepared> {
        if self.at(ask.model) == Readiness::Running {
            let headroom = self.headroom();
            if ask.kv <= headroom {
                return Some(Prepared::default());
            }
            let offers = self.offers(ask, now);
            let plan = memory::plan(ask.kv - headroom, offers, ask.highest, ask.interrupt)?;
            let (after, moves) = self.demoted(&plan);
            return Some(Prepared { plan, after: Some(after), moves, ..Prepared::default() });
        }
        let mut after = self.residency.clone();
        match after.activate(ask.model, self.kv + ask.kv) {
            Ok(activation) => {
                Some(Prepared { activation, after: Some(after), ..Prepared::default() })
            }
            Err(lacking) if ask.highest.is_interrupting() => {
                // `activate` has tried all idle models, so only stages remain. Their models stay,
                // because other stages may need them.
                let mut offers = self.offers(ask, now);
                offers.retain(|offer| offer.action.is_interrupting());
                let plan = memory::plan(lacking, offers, ask.highest, ask.interrupt)?;
                let kv = (self.kv + ask.kv).saturating_sub(plan.frees);
                let activation = after.activate(ask.model, kv).ok()?;
                Some(Prepared { plan, activation, after: Some(after), ..Prepared::default() })
            }
            Err(_) => None,
        }
    }

    /// Returns the time that the weights of a plan's sleeping models take to leave.
    pub(super) fn leaves(&self, plan: &MemoryPlan) -> Span {
        plan.steps
            .iter()
            .filter(|step| step.action == Action::Sleep)
            .filter_map(|step| match step.engine {
                Engine::Model(model) => self.table.get(usize::from(model.0)),
                Engine::Stage(_) => None,
            })
            .fold(Span::ZERO, |sum, model| sum + Span::transfer(model.weights, self.spec.host_rate))
    }

    /// Returns the possible actions for a stage, by Algorithm 2's states: idle, sleeping, active.
    pub(super) fn offers(&self, ask: &Ask, now: Time) -> Vec<Offer> {
        let mut offers = Vec::new();
        for (index, model) in self.table.iter().enumerate() {
            let id = ModelId(index as u16);
            let (at, used) = (self.at(id), self.residency.is_used(id) || id == ask.model);
            if at == Readiness::Running && !used {
                offers.push(Offer {
                    engine: Engine::Model(id),
                    action: Action::Sleep,
                    frees: model.weights,
                    restore: Span::transfer(model.weights, self.spec.host_rate).0,
                });
            }
            if (at == Readiness::Running || at == Readiness::Sleeping) && !used {
                offers.push(Offer {
                    engine: Engine::Model(id),
                    action: Action::Evict,
                    frees: model.context,
                    restore: model.context_start,
                });
            }
        }
        // Stages already count on a part of the leaving weights. A stop frees that much less.
        let claimed = self.leaving.bytes(&self.table).saturating_sub(self.promisable());
        for id in self.leaving.models() {
            let model = &self.table[usize::from(id.0)];
            offers.push(Offer {
                engine: Engine::Model(id),
                action: Action::StopTransition,
                frees: model.weights.saturating_sub(claimed),
                restore: Span::transfer(model.weights, self.spec.disk_rate).0 + model.context_start,
            });
        }
        if ask.highest.is_interrupting() {
            offers.extend(self.stage_offers(ask, now));
        }
        offers
    }

    /// Returns offers of running batch stages. For another batch stage only younger ones count, so
    /// that the oldest finishes.
    fn stage_offers(&self, ask: &Ask, now: Time) -> Vec<Offer> {
        let host_free = self.spec.host.saturating_sub(self.residency.in_host());
        let mut offers = Vec::new();
        for (stage, held) in &self.running {
            let other = *stage != ask.stage && held.ask.class == Class::Batch;
            if !other || (ask.class == Class::Batch && *stage < ask.stage) {
                continue;
            }
            let offer = |action, restore| Offer {
                engine: Engine::Stage(*stage),
                action,
                frees: held.ask.kv,
                restore,
            };
            if held.ask.kv <= host_free {
                let there_and_back = Span::transfer(held.ask.kv, self.spec.host_rate).times(2);
                offers.push(offer(Action::SwapOut, there_and_back.0));
            }
            offers.push(offer(Action::Abort, now.since(held.started).0));
        }
        offers
    }

    pub(super) fn demoted(&self, plan: &MemoryPlan) -> (Residency, Vec<Move>) {
        let (mut after, mut moves) = (self.residency.clone(), Vec::new());
        for step in &plan.steps {
            match (step.engine, step.action) {
                (Engine::Model(model), Action::Sleep) => {
                    after.sleep(model, &mut moves);
                }
                (Engine::Model(model), Action::Evict) if after.at(model) == Readiness::Sleeping => {
                    after.evict(model, &mut moves);
                }
                (Engine::Model(model), Action::StopTransition) => {
                    after.stop(model, &mut moves);
                }
                _ => {}
            }
        }
        (after, moves)
    }

    /// Begins the transitions of a plan and ends those that it stops.
    pub(super) fn transit(&mut self, plan: &MemoryPlan, now: Time, done: &mut Done) {
        for step in &plan.steps {
            match (step.engine, step.action) {
                (Engine::Model(model), Action::Sleep) => {
                    let weights = self.table[usize::from(model.0)].weights;
                    let takes = Span::transfer(weights, self.spec.host_rate);
                    self.link_free = self.leaving.begin(model, now.max(self.link_free), takes);
                    done.leaving.push((model, self.link_free.since(now)));
                }
                (Engine::Model(model), Action::StopTransition) => {
                    self.leaving.end(model);
                    done.stopped.push(model);
                }
                _ => {}
            }
        }
    }

    pub fn slept(&mut self, model: ModelId, now: Time) {
        self.leaving.left(model, now);
    }

    /// Returns the stages that waited for leaving weights and can grow now, with their new KV
    /// limits.
    pub fn grown(&mut self) -> Vec<(StageId, u64)> {
        let mut grown = Vec::new();
        let waiting: Vec<(StageId, u64)> = self.leaving.growing().collect();
        for (stage, bytes) in waiting {
            if self.is_there(bytes) {
                self.leaving.forget(stage);
                grown.extend(self.running.get(&stage).map(|held| (stage, held.ask.kv)));
            }
        }
        grown
    }

    pub(super) fn interrupt(&mut self, plan: &MemoryPlan, done: &mut Done) {
        for step in &plan.steps {
            let Engine::Stage(stage) = step.engine else { continue };
            let room = self.spec.host.saturating_sub(self.residency.in_host());
            let fits = self.running.get(&stage).is_some_and(|held| held.ask.kv <= room);
            if step.action == Action::SwapOut && fits {
                self.swap_out(stage);
                done.swapped.push(stage);
            } else if self.remove(stage).is_some() {
                done.aborted.push(stage);
            }
        }
    }

    pub(super) fn swap_out(&mut self, stage: StageId) {
        if let Some(ask) = self.remove(stage) {
            self.swapped.insert(stage, ask);
            self.count_host();
        }
    }

    pub(super) fn count_host(&mut self) {
        self.residency.host_kv = self.swapped.values().map(|ask| ask.kv).sum();
    }
}
