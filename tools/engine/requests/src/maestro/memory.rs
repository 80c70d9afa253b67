//! The least harmful way to free GPU memory (Maestro §III-C, Algorithm 2 and eq. 4).
//!
//! There are five levels, in this order: an idle model sleeps, a sleeping model loses its context,
//! a transition to sleep is stopped, a running stage's KV is swapped out, and a stage is aborted.
//! The paper doesn't define `DetermineBestAction`. Here the action with the least restore cost per
//! byte goes first within a level. A model can sleep and then lose its context, at the cost of
//! both.
//!
//! Departure from the paper: levels 4 and 5 affect single stages, not a model with all its stages.
//! That disturbs less for the same bytes.

use crate::workflow::{ModelId, StageId};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Engine {
    Model(ModelId),
    /// A stage that runs, or that waits with permitted memory.
    Stage(StageId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Action {
    /// Level 1: an idle running model sleeps.
    Sleep,
    /// Level 2: a sleeping model loses its context.
    Evict,
    /// Level 3: a model's transition to sleep ends at once, and its weights are dropped.
    StopTransition,
    /// Level 4: a stage's KV moves to host memory.
    SwapOut,
    /// Level 5: a stage is aborted and loses its work.
    Abort,
}

impl Action {
    /// Reports whether the action interrupts a stage: `I_active`.
    pub const fn is_interrupting(self) -> bool {
        matches!(self, Self::SwapOut | Self::Abort)
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Offer {
    pub engine: Engine,
    pub action: Action,
    /// Bytes that the action frees.
    pub frees: u64,
    /// Cost to restore the state afterwards: `c(e, a)`, ns.
    pub restore: u64,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemoryPlan {
    pub steps: Vec<Offer>,
    /// Total cost by eq. 4: `C_deg = Σ c(e, a) + 1[I_active] · c_int`, ns.
    pub cost: u64,
    pub frees: u64,
}

/// Chooses offers that free `needed` bytes, by Algorithm 2. Uses no level above `highest`.
/// `interrupt` is `c_int` in ns. Returns `None` if all permitted offers free too little.
pub fn plan(
    needed: u64,
    mut offers: Vec<Offer>,
    highest: Action,
    interrupt: u64,
) -> Option<MemoryPlan> {
    offers.retain(|offer| offer.frees > 0 && offer.action <= highest);
    // The cost per byte is compared without a division. Of equal offers the youngest stage is
    // first, so that the oldest finishes.
    offers.sort_by(|a, b| {
        let per_byte = |x: &Offer, y: &Offer| u128::from(x.restore) * u128::from(y.frees);
        a.action
            .cmp(&b.action)
            .then(per_byte(a, b).cmp(&per_byte(b, a)))
            .then(b.engine.cmp(&a.engine))
    });
    let mut plan = MemoryPlan::default();
    for offer in offers {
        if plan.frees >= needed {
            break;
        }
        // A stage is swapped out or aborted, but not both.
        let gone = |step: &Offer| step.engine == offer.engine && step.action.is_interrupting();
        if plan.steps.iter().any(gone) {
            continue;
        }
        plan.frees += offer.frees;
        plan.cost = plan.cost.saturating_add(offer.restore);
        plan.steps.push(offer);
    }
    if plan.steps.iter().any(|step| step.action.is_interrupting()) {
        plan.cost = plan.cost.saturating_add(interrupt);
    }
    (plan.frees >= needed).then_some(plan)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const fn offer(engine: Engine, action: Action, frees: u64, restore: u64) -> Offer {
        Offer { engine, action, frees, restore }
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
        assert_eq!(plan(80, vec![SWAP, ABORT], Action::Abort, 0), None);
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
        assert!(plan(1, vec![SWAP, ABORT], Action::Evict, 0).is_none());
    }

    proptest! {
        #[test]
        fn a_plan_frees_enough_and_would_not_without_its_last_step(
            needed in 1u64..500,
            sizes in prop::collection::vec((0u64..100, 1u64..1000, 0usize..5), 0..20),
        ) {
            use Action::{Abort, Evict, Sleep, StopTransition, SwapOut};
            let levels = [Sleep, Evict, StopTransition, SwapOut, Abort];
            let offers: Vec<Offer> = sizes.iter().enumerate().map(|(i, (frees, restore, level))| {
                offer(Engine::Stage(StageId(i as u64)), levels[*level], *frees, *restore)
            }).collect();
            let all: u64 = offers.iter().map(|o| o.frees).sum();
            match plan(needed, offers, Action::Abort, 3) {
                Some(plan) => {
                    prop_assert!(plan.frees >= needed);
                    let last = plan.steps.last().unwrap();
                    prop_assert!(plan.frees - last.frees < needed);
                    prop_assert!(plan.steps.windows(2).all(|p| p[0].action <= p[1].action));
                }
                None => prop_assert!(all < needed),
            }
        }
    }
}
