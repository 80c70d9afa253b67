//! Freeing GPU memory at the least harm (Maestro §III-C, Algorithm 2 and eq. 4).
//!
//! Five levels, in this order: an idle model goes to sleep; a sleeping one loses its context; a
//! transition to sleep is stopped; the KV of a stage that runs is swapped out; a stage is aborted.
//! `DetermineBestAction` is not given: within a level, whatever restores cheapest per byte that it
//! frees. An engine is met once per level at which it can free something, so a model that was put
//! to sleep can lose its context, too; its cost is then that of both.
//!
//! Departure: at levels 4 and 5 the unit is a stage, not a model with all its stages: less is
//! disturbed for the same bytes.

use crate::workflow::{ModelId, StageId};

/// Who has memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Engine {
    /// A model.
    Model(ModelId),
    /// A stage that runs, or waits with memory promised.
    Stage(StageId),
}

/// The five levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Action {
    /// Level 1: from running and idle to sleeping.
    Sleep,
    /// Level 2: its context goes.
    Evict,
    /// Level 3: it was going to sleep; it is stopped at once.
    StopTransition,
    /// Level 4: its KV goes to host memory.
    SwapOut,
    /// Level 5: what it did is lost.
    Abort,
}

impl Action {
    /// It interrupts a stage: `I_active`.
    #[must_use]
    pub const fn is_interrupting(self) -> bool {
        matches!(self, Self::SwapOut | Self::Abort)
    }
}

/// Something that can be done.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Offer {
    /// By whom.
    pub engine: Engine,
    /// What.
    pub action: Action,
    /// Bytes that it frees.
    pub frees: u64,
    /// What it costs to restore: `c(e, a)`, ns.
    pub restore: u64,
}

/// What to do.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// In order.
    pub steps: Vec<Offer>,
    /// Stages are interrupted.
    pub interrupts: bool,
    /// Eq. 4: `C_deg = Σ c(e, a) + 1[I_active] · c_int`, ns.
    pub cost: u64,
    /// Bytes that it frees.
    pub frees: u64,
}

/// All that may be done is not enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{frees} bytes can be freed, {needed} are needed")]
pub struct Failure {
    /// Bytes that could be freed.
    pub frees: u64,
    /// Bytes that are needed.
    pub needed: u64,
}

/// Algorithm 2: of what is offered, what frees `needed` bytes. No level above `highest` is used.
/// `interrupt` is `c_int`, ns.
///
/// # Errors
/// If that can't be.
pub fn plan(
    needed: u64,
    mut offers: Vec<Offer>,
    highest: Action,
    interrupt: u64,
) -> Result<Plan, Failure> {
    offers.retain(|offer| offer.frees > 0 && offer.action <= highest);
    // ms per byte, compared without dividing. Of equals the youngest stage goes: the oldest gets
    // done.
    offers.sort_by(|a, b| {
        let per_byte = |x: &Offer, y: &Offer| u128::from(x.restore) * u128::from(y.frees);
        a.action
            .cmp(&b.action)
            .then(per_byte(a, b).cmp(&per_byte(b, a)))
            .then(b.engine.cmp(&a.engine))
    });
    let mut plan = Plan::default();
    for offer in offers {
        if plan.frees >= needed {
            break;
        }
        // A stage is swapped out or aborted, not both.
        let gone = |step: &Offer| step.engine == offer.engine && step.action.is_interrupting();
        if plan.steps.iter().any(gone) {
            continue;
        }
        plan.frees += offer.frees;
        plan.cost = plan.cost.saturating_add(offer.restore);
        plan.interrupts |= offer.action.is_interrupting();
        plan.steps.push(offer);
    }
    if plan.frees < needed {
        return Err(Failure {
            frees: plan.frees,
            needed,
        });
    }
    if plan.interrupts {
        plan.cost = plan.cost.saturating_add(interrupt);
    }
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const fn offer(engine: Engine, action: Action, frees: u64, restore: u64) -> Offer {
        Offer {
            engine,
            action,
            frees,
            restore,
        }
    }

    const IDLE: Offer = offer(Engine::Model(ModelId(1)), Action::Sleep, 100, 900);
    const CONTEXT: Offer = offer(Engine::Model(ModelId(1)), Action::Evict, 10, 5);
    const GOING: Offer = offer(Engine::Model(ModelId(2)), Action::StopTransition, 40, 5);
    const SWAP: Offer = offer(Engine::Stage(StageId(1)), Action::SwapOut, 50, 5);
    const ABORT: Offer = offer(Engine::Stage(StageId(1)), Action::Abort, 50, 5);

    #[test]
    fn idle_models_sleep_before_anything_else_even_if_it_costs_more() {
        let plan = plan(60, vec![SWAP, CONTEXT, IDLE], Action::Abort, 7).unwrap();
        assert_eq!(plan.steps, [IDLE]);
        assert!(!plan.interrupts);
        assert_eq!(plan.cost, 900);
    }

    #[test]
    fn levels_follow_each_other_and_an_interruption_is_charged_once() {
        let all = vec![ABORT, SWAP, GOING, CONTEXT, IDLE];
        let plan = plan(160, all, Action::Abort, 7).unwrap();
        assert_eq!(plan.steps, [IDLE, CONTEXT, GOING, SWAP]);
        assert_eq!(plan.cost, 900 + 5 + 5 + 5 + 7);
    }

    #[test]
    fn a_stage_is_not_swapped_out_and_aborted_at_once() {
        let refused = plan(80, vec![SWAP, ABORT], Action::Abort, 0).unwrap_err();
        assert_eq!(
            refused,
            Failure {
                frees: 50,
                needed: 80
            }
        );
    }

    #[test]
    fn within_a_level_the_cheapest_byte_goes_first() {
        let dear = offer(Engine::Stage(StageId(2)), Action::SwapOut, 100, 1000);
        let cheap = offer(Engine::Stage(StageId(3)), Action::SwapOut, 10, 50);
        let plan = plan(10, vec![dear, cheap], Action::SwapOut, 0).unwrap();
        assert_eq!(plan.steps, [cheap]);
    }

    #[test]
    fn nothing_above_the_highest_level_that_is_allowed_happens() {
        assert!(plan(1, vec![SWAP, ABORT], Action::Evict, 0).is_err());
    }

    proptest! {
        #[test]
        fn a_plan_frees_enough_and_would_not_without_its_last_step(
            needed in 1u64..500,
            sizes in prop::collection::vec((0u64..100, 1u64..1000, 0usize..5), 0..20),
        ) {
            let levels = [
                Action::Sleep, Action::Evict, Action::StopTransition, Action::SwapOut, Action::Abort,
            ];
            let offers: Vec<Offer> = sizes.iter().enumerate().map(|(i, (frees, restore, level))| {
                offer(Engine::Stage(StageId(i as u64)), levels[*level], *frees, *restore)
            }).collect();
            let all: u64 = offers.iter().map(|o| o.frees).sum();
            match plan(needed, offers, Action::Abort, 3) {
                Ok(plan) => {
                    prop_assert!(plan.frees >= needed);
                    let last = plan.steps.last().unwrap();
                    prop_assert!(plan.frees - last.frees < needed);
                    prop_assert!(plan.steps.windows(2).all(|p| p[0].action <= p[1].action));
                }
                Err(failure) => {
                    prop_assert_eq!(failure.frees, all);
                    prop_assert!(all < needed);
                }
            }
        }
    }
}
