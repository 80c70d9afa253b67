//! A latency model that learns from the iterations of one replica while policies use it.
//!
//! ```text
//! E = f + t · tokens + p · pairs + r · requests + c · context      (ns; HyperFlexis eq. 1 and 2 in one, as [`Composition`] counts)
//! ```
//!
//! The fit is relative least squares without negative coefficients, like `hyperflexis::latency`,
//! but recursive: old iterations count less and less. The model uses no clock and no random
//! numbers. The same iterations give the same predictions, so a recorded run can be repeated.
//!
//! A prediction should rather be too long than too short (QoServe §3.6.1), and a fit is in the
//! middle. So predictions are multiplied by a factor, the caution. It follows the 0.9 quantile of
//! measured over predicted time. A new model starts with samples of an assumed machine, at low
//! weight: 20 ms plus 0.1 ms per token.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Span;
use crate::latency::{Composition, Latency};
use crate::least_squares::{non_negative, product};

const TERMS: usize = 5;

/// Typical sizes of the terms. Scaling by them keeps the equations solvable in floating point.
const SCALES: [f64; TERMS] = [1.0, 100.0, 100_000.0, 10.0, 10_000.0];

/// Factor on the weight of all earlier iterations at each new one: about the last 1000 count.
const KEPT: f64 = 0.999;

/// Coefficients of the assumed machine: ns, and ns per token, pair, request and token of context.
const PRIOR: [f64; TERMS] = [20e6, 100e3, 1.0, 100e3, 100.0];

/// Weight of one sample of the assumed machine. A measured sample has weight 1.
const PRIOR_WEIGHT: f64 = 0.01;

/// The quantile of measured over predicted time that the caution follows.
const CAUTION: f64 = 0.9;

/// Relative step by which one iteration changes the caution.
const CAUTION_STEP: f64 = 0.05;

/// Iterations between two fits, after the first `FIT_EVERY` iterations.
const FIT_EVERY: u64 = 8;

struct Fit {
    normal: [[f64; TERMS]; TERMS],
    right: [f64; TERMS],
    coefficients: [f64; TERMS],
    caution: f64,
    iterations: u64,
}

fn terms(of: &Composition) -> [f64; TERMS] {
    let all = [
        1.0,
        f64::from(of.prefill_tokens) + f64::from(of.decodes),
        of.prefill_pairs as f64,
        f64::from(of.chunks) + f64::from(of.decodes),
        of.decode_context as f64,
    ];
    std::array::from_fn(|at| all[at] / SCALES[at])
}

impl Fit {
    fn new() -> Self {
        let coefficients = std::array::from_fn(|at| PRIOR[at] * SCALES[at]);
        let mut fit = Self {
            normal: [[0.0; TERMS]; TERMS],
            right: [0.0; TERMS],
            coefficients,
            caution: 1.5,
            iterations: 0,
        };
        for (prefix, tokens) in [(0, 16), (0, 256), (1_000, 256), (0, 2_048), (4_000, 1_024)] {
            fit.stand_in(&Composition::default().with_chunk(prefix, tokens));
        }
        for (decodes, context) in [(1, 100), (1, 4_000), (16, 500), (64, 1_000)] {
            let mut of = Composition::default();
            for _ in 0..decodes {
                of = of.with_decode(context);
            }
            fit.stand_in(&of);
        }
        fit
    }

    fn stand_in(&mut self, of: &Composition) {
        let took = product(&terms(of), &self.coefficients);
        self.add(of, took, PRIOR_WEIGHT);
    }

    fn add(&mut self, of: &Composition, took: f64, weight: f64) {
        let row = terms(of).map(|term| term / took);
        for (at, term) in row.iter().enumerate() {
            self.right[at] += weight * term;
            for (cell, other) in self.normal[at].iter_mut().zip(&row) {
                *cell += weight * term * other;
            }
        }
    }

    fn ran(&mut self, of: &Composition, took: f64) {
        let expected = product(&terms(of), &self.coefficients);
        if expected > 0.0 && self.iterations > 0 {
            let above = took > self.caution * expected;
            let step = if above { CAUTION } else { CAUTION - 1.0 };
            self.caution = (self.caution * (1.0 + CAUTION_STEP * step)).clamp(1.0, 4.0);
        }
        for (row, right) in self.normal.iter_mut().zip(&mut self.right) {
            row.iter_mut().for_each(|cell| *cell *= KEPT);
            *right *= KEPT;
        }
        self.add(of, took, 1.0);
        self.iterations += 1;
        if self.iterations < FIT_EVERY || self.iterations.is_multiple_of(FIT_EVERY) {
            self.coefficients =
                non_negative(&self.normal, &self.right, 1e-10).unwrap_or(self.coefficients);
        }
    }
}

/// A shared handle of a model: clones refer to the same one. Policies read it, the driver feeds it.
#[derive(Clone)]
pub struct Learned(Arc<Mutex<Fit>>);

impl Default for Learned {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Fit::new())))
    }
}

impl Learned {
    fn fit(&self) -> MutexGuard<'_, Fit> {
        // A poisoned lock is harmless because the numbers are valid after each statement.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Learns from one iteration. Ignores iterations that are empty or took no time.
    pub fn ran(&self, of: &Composition, took: Span) {
        if !of.is_empty() && took > Span::ZERO {
            self.fit().ran(of, took.0 as f64);
        }
    }

    pub fn iterations(&self) -> u64 {
        self.fit().iterations
    }
}

impl Latency for Learned {
    fn iteration(&self, of: &Composition) -> Span {
        if of.is_empty() {
            return Span::ZERO;
        }
        let fit = self.fit();
        // The cast saturates at both ends.
        Span((product(&terms(of), &fit.coefficients) * fit.caution).ceil() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the time of an iteration on a machine with known coefficients, in ns.
    fn machine(of: &Composition) -> f64 {
        let tokens = f64::from(of.prefill_tokens) + f64::from(of.decodes);
        3e6 + 40e3 * tokens
            + 2.0 * of.prefill_pairs as f64
            + 30e3 * (f64::from(of.chunks) + f64::from(of.decodes))
            + 50.0 * of.decode_context as f64
    }

    /// Returns iteration `number` of a fixed sequence like that of an engine.
    fn iteration(number: u32) -> Composition {
        let mut of = Composition::default();
        if !number.is_multiple_of(3) {
            of = of.with_chunk(number * 37 % 900, 16 + number * 61 % 240);
        }
        for decode in 0..number % 7 {
            of = of.with_decode(50 + (number * 13 + decode * 101) % 700);
        }
        if of.is_empty() {
            of = of.with_decode(100);
        }
        of
    }

    /// Returns the factor by which a machine deviates from the linear model, 0.9 to 1.1.
    fn uneven(number: u32) -> f64 {
        0.9 + f64::from(number * 7_919 % 201) / 1_000.0
    }

    #[test]
    fn a_machine_is_learned_and_answers_are_rather_too_long_than_too_short() {
        let learned = Learned::default();
        let before = learned.iteration(&iteration(1)).0 as f64 / machine(&iteration(1));
        assert!(before > 3.0, "the stand-in is another machine: {before}");
        for number in 1..400 {
            let of = iteration(number);
            learned.ran(&of, Span((machine(&of) * uneven(number)) as u64));
        }
        let mut short = 0;
        for number in 400..600 {
            let of = iteration(number);
            let said = learned.iteration(&of).0 as f64;
            let ratio = said / machine(&of);
            assert!((0.95..1.3).contains(&ratio), "{ratio} for {of:?}");
            short += u32::from(said < machine(&of) * uneven(number));
        }
        assert!(short <= 40, "{short} of 200 took longer than was said");
        // The model extrapolates to a chunk that is larger than any it learned from.
        let large = Composition::default().with_chunk(0, 1_000);
        let ratio = learned.iteration(&large).0 as f64 / machine(&large);
        assert!((0.8..1.5).contains(&ratio), "{ratio}");
    }

    #[test]
    fn the_same_iterations_give_the_same_answers_to_the_bit() {
        let (one, other) = (Learned::default(), Learned::default());
        for number in 1..300 {
            let of = iteration(number);
            for learned in [&one, &other] {
                learned.ran(&of, Span((machine(&of) * uneven(number)) as u64));
            }
            let next = iteration(number + 1);
            assert_eq!(one.iteration(&next), other.iteration(&next));
        }
    }

    #[test]
    fn a_machine_that_becomes_another_is_learned_anew() {
        let learned = Learned::default();
        let large = Composition::default().with_chunk(0, 200);
        for (slower, rounds) in [(1.0, 1_000), (5.0, 3_000)] {
            for number in 1..rounds {
                let of = iteration(number);
                learned.ran(&of, Span((machine(&of) * slower) as u64));
            }
            let ratio = learned.iteration(&large).0 as f64 / (machine(&large) * slower);
            assert!((0.9..1.5).contains(&ratio), "{ratio} at {slower}");
        }
    }

    #[test]
    fn what_says_nothing_teaches_nothing() {
        let learned = Learned::default();
        learned.ran(&Composition::default(), Span(5));
        learned.ran(&Composition::default().with_decode(3), Span::ZERO);
        assert_eq!(learned.iterations(), 0);
        assert_eq!(learned.iteration(&Composition::default()), Span::ZERO);
        // With one token only, four coefficients can't be determined. They keep their value or are
        // zero.
        for _ in 0..5_000 {
            learned.ran(&Composition::default().with_decode(10), Span(1_000_000));
        }
        let said = learned.iteration(&Composition::default().with_decode(10));
        assert!((900_000..4_000_000).contains(&said.0), "{said:?}");
    }
}
