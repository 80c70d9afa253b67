//! The limits of an instance: the token budget (§5.1 eq. 5, appendix B eq. 7), the maturity time
//! (Algorithm 1), and the probability of a first token in time.
//!
//! Decoding requests pause for `E_p` while prompts are computed. Each later step of `E_d` recovers
//! `TPOT − E_d` of that time. After `E_p / (TPOT − E_d)` steps the instance is *mature* and can
//! pause again. A request that arrives right after a dispatch waits until then, so this time has to
//! fit into its TTFT:
//!
//! ```text
//! E_p + E_p / (TPOT − E_d) · E_d  =  E_p · TPOT / (TPOT − E_d)  ≤  TTFT                     (7)
//! n_token ≤ (TTFT · TPOT − TTFT · E_d − a · TPOT) / (b · TPOT)       E_p = a + b · n_token     (5)
//! ```
//!
//! The paper leaves four points open. If `TPOT ≤ E_d`, the budget is 0. Eq. 5 omits `c`, so it only
//! ends a scan. Eq. 7 checks each candidate with the squares of the real prompts. Prompts that wait
//! at the instance count like candidates, and `E_d` is the step in which all of them decode.
//! `calculate_p` has no formula (Algorithm 1: "based on t_remaining and resource utilization"); see
//! [`probability`].

use super::latency::Linear;
use crate::dispatch::Role;
use crate::ledger::{InstanceTable, Prompts, Row};
use crate::request::InstanceId;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InstanceLoad {
    pub role: Role,
    pub prompts: Prompts,
    pub decoding: f64,
    /// Number of tokens that the decoding requests attend to.
    pub context: f64,
    /// Shortest time per token of all requests, ns.
    pub tpot: f64,
    /// Whether decoding requests pause while prompts are computed.
    pub pauses: bool,
}

impl InstanceLoad {
    pub fn of(row: &Row) -> Self {
        let (decoding, context) = row.decodes();
        Self {
            role: row.role,
            prompts: row.prompts(),
            decoding,
            context,
            tpot: row.tpot_min().map_or(f64::INFINITY, |tpot| tpot as f64),
            pauses: true,
        }
    }

    /// Returns how long a decode step takes at an instance now, in ns.
    pub fn of_now(ledger: &InstanceTable, instance: InstanceId, model: &Linear) -> f64 {
        ledger.row(instance).map_or(0.0, |row| Self::of(row).decode_ns(model))
    }

    pub fn with_prompt(mut self, tokens: u32, tpot: u64) -> Self {
        self.prompts = self.prompts.with(tokens);
        self.tpot = self.tpot.min(tpot as f64);
        self
    }

    pub fn with_decode(mut self, context: u32, tpot: u64) -> Self {
        self.decoding += 1.0;
        self.context += f64::from(context);
        self.tpot = self.tpot.min(tpot as f64);
        self
    }

    /// Returns `E_p`, the time to compute all prompts, in ns.
    pub fn prefill_ns(&self, model: &Linear) -> f64 {
        model.prefill_ns(self.prompts.tokens, self.prompts.squares)
    }

    /// Returns `E_d`, the time of a step in which all requests decode, in ns. It is 0 on a prefill
    /// instance, which doesn't decode.
    pub fn decode_ns(&self, model: &Linear) -> f64 {
        if self.role == Role::Prefill {
            return 0.0;
        }
        let requests = self.decoding + self.prompts.requests;
        model.decode_ns(requests, self.context + self.prompts.tokens)
    }

    /// Returns `TPOT − E_d`, the time that each step recovers, in ns.
    pub fn relax_ns(&self, model: &Linear) -> f64 {
        self.tpot - self.decode_ns(model)
    }

    /// Returns the time until the instance is mature if it begins now, in ns. If steps recover no
    /// time, this is the end of the next step.
    pub fn maturity_ns(&self, model: &Linear) -> f64 {
        self.maturity_after_ns(model, 0.0)
    }

    /// Returns [`Self::maturity_ns`] after decoding requests have already paused for `stood` ns.
    pub fn maturity_after_ns(&self, model: &Linear, stood: f64) -> f64 {
        let prefill = self.prefill_ns(model);
        let decode = self.decode_ns(model);
        if !self.pauses {
            return prefill + decode;
        }
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

    /// Reports whether eq. 7 holds, with squared lengths: a request that arrives right after this
    /// dispatch would have its first token within `ttft` ns.
    pub fn fits(&self, model: &Linear, ttft: f64) -> bool {
        let prefill = self.prefill_ns(model);
        if self.role == Role::Prefill {
            return prefill <= ttft;
        }
        let decode = self.decode_ns(model);
        if !self.pauses {
            return decode < self.tpot && prefill + decode <= ttft;
        }
        if self.tpot.is_infinite() {
            return prefill <= ttft;
        }
        decode < self.tpot && prefill * self.tpot <= ttft * (self.tpot - decode)
    }
}

/// Returns how many prompt tokens an instance may have to compute if a step takes `decode` ns (eq.
/// 5).
pub fn tokens(model: &Linear, ttft: f64, tpot: f64, decode: f64) -> f64 {
    let [a, b, _] = model.prefill;
    if decode >= tpot {
        return 0.0;
    }
    // This is TTFT (TPOT − E_d) / TPOT, in a form that permits an infinite TPOT.
    let allowed = ttft * (1.0 - decode / tpot);
    if b <= 0.0 {
        return if allowed >= a { f64::INFINITY } else { 0.0 };
    }
    ((allowed - a) / b).max(0.0)
}

/// Returns the probability of a first token in time: `remaining / (TTFT · (1 − utilization) + ε)`,
/// limited to 0 to 1. `remaining` is the time in ns between the end of the prompt and the deadline.
/// `utilization` is that of the instance.
///
/// A less used instance demands more remaining time from an old request, because another instance
/// can serve it sooner.
pub fn probability(remaining: f64, ttft: f64, utilization: f64) -> f64 {
    const EPSILON_NS: f64 = 1.0;
    (remaining / (ttft * (1.0 - utilization.clamp(0.0, 1.0)) + EPSILON_NS)).clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: Linear = Linear { prefill: [8e6, 60_000.0, 0.0], decode: [7e6, 12.0, 20_000.0] };

    fn standing(prompt: u32) -> InstanceLoad {
        InstanceLoad {
            role: Role::Whole,
            prompts: Prompts::default(),
            decoding: 10.0,
            context: 3_000.0,
            tpot: 50e6,
            pauses: true,
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
        // Decoding requests pause for `prefill` and then get `steps` tokens, so their mean time is
        // TPOT.
        let mean = (prefill + steps * decode) / steps;
        assert!((mean - at.tpot).abs() < 1.0);
        assert!((at.maturity_ns(&MODEL) - (prefill + steps * decode)).abs() < 1.0);
        assert!(at.maturity_after_ns(&MODEL, 1e6) > at.maturity_ns(&MODEL));
    }

    #[test]
    fn without_pauses_an_instance_is_mature_when_its_prompts_are_computed() {
        let at = InstanceLoad { pauses: false, ..standing(1_000) };
        let ends = at.prefill_ns(&MODEL) + at.decode_ns(&MODEL);
        assert!((at.maturity_after_ns(&MODEL, 1e6) - ends).abs() < 1.0);
        assert!(at.fits(&MODEL, ends + 1.0) && !at.fits(&MODEL, ends - 1.0));
        assert!(!standing(1_000).fits(&MODEL, ends + 1.0));
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
