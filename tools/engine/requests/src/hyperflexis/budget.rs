//! What an instance can take: the token budget (§5.1 eq. 5, appendix B eq. 7), the maturity time
//! (Algorithm 1), and the probability of a first token in time.
//!
//! While prompts are computed, requests that decode stand still for `E_p`. They make that good by
//! `TPOT − E_d` in each step that follows: after `E_p / (TPOT − E_d)` steps of `E_d` the instance
//! is *mature*, and can stand still again. A request that comes right after a dispatch waits until
//! then, so that has to fit into its TTFT:
//!
//! ```text
//! E_p + E_p / (TPOT − E_d) · E_d  =  E_p · TPOT / (TPOT − E_d)  ≤  TTFT                     (7)
//! n_token ≤ (TTFT · TPOT − TTFT · E_d − a · TPOT) / (b · TPOT)       E_p = a + b · n_token     (5)
//! ```
//!
//! Holes and how they are filled. `TPOT ≤ E_d`: there is no budget. Eq. 5 leaves out `c`: it gives
//! the bound at which a scan ends, and each candidate is checked by eq. 7 with the squares of the
//! real prompts. Prompts that wait at the instance count as candidates do; `E_d` is that of the
//! step in which all of them decode. `calculate_p` has no formula (Algorithm 1: "based on
//! t_remaining and resource utilization"): [`probability`].

use super::latency::Linear;
use crate::dispatch::Role;
use crate::ledger::{InstanceTable, Prompts, Row};
use crate::request::InstanceId;

/// What would stand at an instance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InstanceLoad {
    /// For what it is.
    pub role: Role,
    /// Prompts to compute.
    pub prompts: Prompts,
    /// Requests that decode now.
    pub decoding: f64,
    /// Tokens that they attend to.
    pub context: f64,
    /// The tightest time per token, ns.
    pub tpot: f64,
}

impl InstanceLoad {
    /// What stands there now.
    #[must_use]
    pub fn of(row: &Row) -> Self {
        let (decoding, context) = row.decodes();
        Self {
            role: row.role,
            prompts: row.prompts(),
            decoding,
            context,
            tpot: row.tpot_min().map_or(f64::INFINITY, |tpot| tpot as f64),
        }
    }

    /// What a step takes at an instance now, ns.
    #[must_use]
    pub fn of_now(ledger: &InstanceTable, instance: InstanceId, model: &Linear) -> f64 {
        ledger
            .row(instance)
            .map_or(0.0, |row| Self::of(row).decode_ns(model))
    }

    /// With a request more whose prompt is to be computed.
    #[must_use]
    pub fn with_prompt(mut self, tokens: u32, tpot: u64) -> Self {
        self.prompts = self.prompts.with(tokens);
        self.tpot = self.tpot.min(tpot as f64);
        self
    }

    /// With a request more that decodes.
    #[must_use]
    pub fn with_decode(mut self, context: u32, tpot: u64) -> Self {
        self.decoding += 1.0;
        self.context += f64::from(context);
        self.tpot = self.tpot.min(tpot as f64);
        self
    }

    /// `E_p`: computing all prompts, ns.
    #[must_use]
    pub fn prefill_ns(&self, model: &Linear) -> f64 {
        model.prefill_ns(self.prompts.tokens, self.prompts.squares)
    }

    /// `E_d`: a step in which all decode, ns. Nobody decodes on an instance that only computes
    /// prompts.
    #[must_use]
    pub fn decode_ns(&self, model: &Linear) -> f64 {
        if self.role == Role::Prefill {
            return 0.0;
        }
        let requests = self.decoding + self.prompts.requests;
        model.decode_ns(requests, self.context + self.prompts.tokens)
    }

    /// `TPOT − E_d`, ns: what a step makes good.
    #[must_use]
    pub fn relax_ns(&self, model: &Linear) -> f64 {
        self.tpot - self.decode_ns(model)
    }

    /// Time until the instance is mature, ns, if it begins now. Without relaxation at all: until
    /// the next step is done.
    #[must_use]
    pub fn maturity_ns(&self, model: &Linear) -> f64 {
        self.maturity_after_ns(model, 0.0)
    }

    /// The same, after `stood` ns in which those that decode stood still already.
    #[must_use]
    pub fn maturity_after_ns(&self, model: &Linear, stood: f64) -> f64 {
        let prefill = self.prefill_ns(model);
        let decode = self.decode_ns(model);
        let relax = self.tpot - decode;
        if self.role == Role::Prefill || prefill + stood <= 0.0 {
            return prefill;
        }
        if relax <= 0.0 {
            return prefill + decode;
        }
        if relax.is_infinite() {
            return prefill;
        }
        prefill + (prefill + stood) / relax * decode
    }

    /// Eq. 7, with the squares: whoever came right after this was dispatched would have its first
    /// token within `ttft` ns.
    #[must_use]
    pub fn fits(&self, model: &Linear, ttft: f64) -> bool {
        let prefill = self.prefill_ns(model);
        if self.role == Role::Prefill {
            return prefill <= ttft;
        }
        let decode = self.decode_ns(model);
        if self.tpot.is_infinite() {
            return prefill <= ttft;
        }
        decode < self.tpot && prefill * self.tpot <= ttft * (self.tpot - decode)
    }
}

/// Eq. 5: tokens of prompts that an instance may have to compute, if a step takes `decode` ns.
#[must_use]
pub fn tokens(model: &Linear, ttft: f64, tpot: f64, decode: f64) -> f64 {
    let [a, b, _] = model.prefill;
    if decode >= tpot {
        return 0.0;
    }
    // TTFT (TPOT − E_d) / TPOT, for a TPOT that may be infinite.
    let allowed = ttft * (1.0 - decode / tpot);
    if b <= 0.0 {
        return if allowed >= a { f64::INFINITY } else { 0.0 };
    }
    ((allowed - a) / b).max(0.0)
}

/// How likely a first token comes in time, `remaining` ns before its deadline once its prompt is
/// computed, on an instance that is used to a share of `utilization`: `remaining / (TTFT · (1 −
/// utilization) + ε)`, from 0 to 1.
///
/// The less an instance is used, the more an old request has to have left: there is one that takes
/// it sooner than this one.
#[must_use]
pub fn probability(remaining: f64, ttft: f64, utilization: f64) -> f64 {
    const EPSILON_NS: f64 = 1.0;
    (remaining / (ttft * (1.0 - utilization.clamp(0.0, 1.0)) + EPSILON_NS)).clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: Linear = Linear {
        prefill: [8e6, 60_000.0, 0.0],
        decode: [7e6, 12.0, 20_000.0],
    };

    fn standing(prompt: u32) -> InstanceLoad {
        InstanceLoad {
            role: Role::Whole,
            prompts: Prompts::default(),
            decoding: 10.0,
            context: 3_000.0,
            tpot: 50e6,
        }
        .with_prompt(prompt, 60_000_000)
    }

    #[test]
    fn eq_5_is_where_eq_7_ends_if_there_is_no_quadratic_term() {
        let ttft = 700e6;
        for decode in [0.0, 10e6, 49e6] {
            let n = tokens(&MODEL, ttft, 50e6, decode);
            let waits = |n: f64| MODEL.prefill_ns(n, 0.0) * 50e6 / (50e6 - decode);
            assert!(waits(n) <= ttft * 1.000_001);
            assert!(waits(n + 2.0) > ttft);
        }
    }

    #[test]
    fn no_budget_is_left_where_a_step_takes_as_long_as_a_token_may() {
        assert!(tokens(&MODEL, 700e6, 50e6, 50e6) == 0.0);
        let mut full = standing(1);
        full.context = 1e9;
        assert!(!full.fits(&MODEL, 1e12));
    }

    #[test]
    fn squares_count_against_a_prompt_that_the_linear_bound_lets_in() {
        let mut model = MODEL;
        let n = tokens(&model, 700e6, 50e6, standing(0).decode_ns(&model)) as u32;
        let below = n - n / 10;
        assert!(standing(below).fits(&model, 700e6));
        model.prefill[2] = 10.0;
        assert!(!standing(below).fits(&model, 700e6));
    }

    #[test]
    fn maturity_is_when_steps_have_made_good_what_the_prompts_cost() {
        let at = standing(1_000);
        let (prefill, decode) = (at.prefill_ns(&MODEL), at.decode_ns(&MODEL));
        let steps = prefill / (at.tpot - decode);
        // All that decodes stood still for `prefill` and then had `steps` tokens: their mean time
        // is TPOT.
        let mean = (prefill + steps * decode) / steps;
        assert!((mean - at.tpot).abs() < 1.0);
        assert!((at.maturity_ns(&MODEL) - (prefill + steps * decode)).abs() < 1.0);
        assert!(at.maturity_after_ns(&MODEL, 1e6) > at.maturity_ns(&MODEL));
    }

    #[test]
    fn an_instance_of_prompts_is_mature_when_they_are_computed() {
        let mut at = standing(1_000);
        at.role = Role::Prefill;
        assert!((at.maturity_ns(&MODEL) - at.prefill_ns(&MODEL)).abs() < 1e-3);
    }

    #[test]
    fn without_relaxation_the_next_step_is_waited_for() {
        let mut at = standing(1_000);
        at.tpot = 1.0;
        let sum = at.prefill_ns(&MODEL) + at.decode_ns(&MODEL);
        assert!((at.maturity_ns(&MODEL) - sum).abs() < 1e-3);
    }

    #[test]
    fn what_is_late_has_no_chance_and_what_is_fresh_has_all_of_it() {
        assert!(probability(-1.0, 1e9, 0.5) == 0.0);
        assert!(probability(1e9, 1e9, 0.5) == 1.0);
        let p = probability(1e8, 1e9, 0.5);
        assert!((p - 0.2).abs() < 1e-6);
        assert!(probability(1e8, 1e9, 1.0) == 1.0);
    }
}
