//! The latency model of §3 (eq. 1 and 2). As in appendix A, it is fitted by relative least squares
//! over measured steps.
//!
//! ```text
//! E_p = a  + b  Σ l      + c  Σ l²     a prefill step, prompts of l tokens            (1)
//! E_d = a' + b' Σ l_cur  + c' B        a decode step, B requests with l_cur tokens    (2)
//! ```
//!
//! Departures from the paper: coefficients can't be negative. A profile without long prompts gives
//! a `c` of any sign, and a negative one makes long prompts free. The paper's engine computes
//! prompts or tokens in a step. Here a step can have both (chunked prefill) and takes `E_p + b' Σ
//! l_cur + c' B`, because weights are read once. A chunk after a prefix counts `l² + 2 l · prefix`
//! instead of `l²`, for the same pairs of tokens.

use serde::{Deserialize, Serialize};

use crate::Span;
use crate::latency::{Composition, Latency};
use crate::least_squares::non_negative;

/// Batch sizes of the paper's profile (appendix A).
pub const BATCHES: [u32; 11] = [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192];

/// Lengths of the paper's profile (appendix A).
pub const LENGTHS: [u32; 16] =
    [4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 284, 512, 768, 1024, 1536, 2020];

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    pub of: Composition,
    pub took: Span,
}

/// The coefficients of the model: ns, ns per token, and ns per squared token or per request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Linear {
    /// `a`, `b` and `c` of eq. 1.
    pub prefill: [f64; 3],
    /// `a'`, `b'` and `c'` of eq. 2.
    pub decode: [f64; 3],
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FitError {
    #[error(
        "{found} {kind} steps that took time were measured, 3 are needed: profile more batch sizes \
         and lengths"
    )]
    TooFew { kind: &'static str, found: usize },
}

impl Linear {
    /// Returns eq. 1 in ns for prompts with these sums of tokens and squared lengths. Without
    /// tokens it is 0.
    pub fn prefill_ns(&self, tokens: f64, squares: f64) -> f64 {
        if tokens <= 0.0 {
            return 0.0;
        }
        let [a, b, c] = self.prefill;
        a + b * tokens + c * squares
    }

    /// Returns eq. 2 in ns. Without requests it is 0.
    pub fn decode_ns(&self, requests: f64, context: f64) -> f64 {
        if requests <= 0.0 {
            return 0.0;
        }
        let [a, b, c] = self.decode;
        a + b * context + c * requests
    }

    /// Fits both equations. Steps with both prompts and decodes are ignored, because neither
    /// equation describes them.
    /// Fails if there are fewer than three steps of one kind.
    pub fn fit(samples: &[Sample]) -> Result<Self, FitError> {
        let rows = |decode: bool| -> Vec<([f64; 3], f64)> {
            samples
                .iter()
                .filter(|s| s.took > Span::ZERO && !s.of.is_empty())
                .filter(|s| if decode { s.of.prefill_tokens == 0 } else { s.of.decodes == 0 })
                .map(|s| {
                    let row = if decode {
                        [1.0, s.of.decode_context as f64, f64::from(s.of.decodes)]
                    } else {
                        [1.0, f64::from(s.of.prefill_tokens), squares(&s.of)]
                    };
                    (row, s.took.0 as f64)
                })
                .collect()
        };
        let fit = |decode: bool, kind: &'static str| {
            let rows = rows(decode);
            if rows.len() < 3 {
                let found = rows.len();
                return Err(FitError::TooFew { kind, found });
            }
            Ok(least_squares(&rows))
        };
        Ok(Self { prefill: fit(false, "prefill")?, decode: fit(true, "decode")? })
    }
}

impl Latency for Linear {
    fn iteration(&self, of: &Composition) -> Span {
        let prefill = self.prefill_ns(f64::from(of.prefill_tokens), squares(of));
        let mut decode = self.decode_ns(f64::from(of.decodes), of.decode_context as f64);
        if prefill > 0.0 && decode > 0.0 {
            decode -= self.decode[0];
        }
        Span((prefill + decode) as u64)
    }
}

fn squares(of: &Composition) -> f64 {
    (2 * of.prefill_pairs) as f64 - f64::from(of.prefill_tokens)
}

/// Measures the steps of the paper's profile on `machine`. Steps of more than `tokens_max` tokens
/// are skipped, because they wouldn't fit into memory.
pub fn profile(machine: &dyn Latency, tokens_max: u32) -> Vec<Sample> {
    let mut samples = Vec::new();
    for batch in BATCHES {
        for length in LENGTHS {
            if batch * length > tokens_max {
                continue;
            }
            let mut prefill = Composition::default();
            let mut decode = Composition::default();
            for _ in 0..batch {
                prefill = prefill.with_chunk(0, length);
                decode = decode.with_decode(length);
            }
            for of in [prefill, decode] {
                let took = machine.iteration(&of);
                samples.push(Sample { of, took });
            }
        }
    }
    samples
}

/// Returns the coefficients, none negative, with the least sum of squared relative residuals.
fn least_squares(rows: &[([f64; 3], f64)]) -> [f64; 3] {
    // Columns are scaled to 1, because squared lengths are 10⁷ times the constant.
    let mut scale = [0.0_f64; 3];
    for (row, _) in rows {
        for (most, value) in scale.iter_mut().zip(row) {
            *most = most.max(value.abs());
        }
    }
    let mut normal = [[0.0; 3]; 3];
    let mut right = [0.0; 3];
    for (row, took) in rows {
        let scaled: [f64; 3] =
            std::array::from_fn(|i| if scale[i] > 0.0 { row[i] / scale[i] } else { 0.0 } / took);
        for i in 0..3 {
            right[i] += scaled[i];
            for j in 0..3 {
                normal[i][j] += scaled[i] * scaled[j];
            }
        }
    }
    let best = non_negative(&normal, &right, 1e-12).unwrap_or_default();
    std::array::from_fn(|i| if scale[i] > 0.0 { best[i] / scale[i] } else { 0.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRUTH: Linear = Linear { prefill: [8e6, 60_000.0, 1.5], decode: [7e6, 12.0, 20_000.0] };

    #[test]
    fn a_profile_of_a_machine_that_is_such_a_model_gives_its_coefficients() {
        let fitted = Linear::fit(&profile(&TRUTH, 100_000)).expect("enough steps");
        let all = |of: Linear| of.prefill.into_iter().chain(of.decode);
        for (got, wanted) in all(fitted).zip(all(TRUTH)) {
            // Times are whole nanoseconds.
            assert!((got / wanted - 1.0).abs() < 1e-3, "{got} for {wanted}");
        }
    }

    #[test]
    fn no_coefficient_is_below_zero_though_the_best_fit_would_have_one() {
        // The time is concave in the length, so an unlimited fit has c < 0.
        struct Concave;
        impl Latency for Concave {
            fn iteration(&self, of: &Composition) -> Span {
                let tokens = f64::from(of.prefill_tokens + of.decodes);
                Span((1e6 * tokens.sqrt()) as u64)
            }
        }
        let fitted = Linear::fit(&profile(&Concave, 100_000)).expect("enough steps");
        for value in fitted.prefill.iter().chain(&fitted.decode) {
            assert!(*value >= 0.0, "{fitted:?}");
        }
        assert!(fitted.prefill[2] == 0.0, "{fitted:?}");
    }

    #[test]
    fn too_few_steps_are_an_error_that_says_which() {
        let one = &profile(&TRUTH, 4);
        let error = Linear::fit(one).expect_err("one batch");
        assert!(error.to_string().contains("prefill"), "{error}");
    }

    #[test]
    fn weights_are_read_once_in_a_step_that_has_both() {
        let prompt = Composition::default().with_chunk(0, 100);
        let token = Composition::default().with_decode(99);
        let both = prompt.with_decode(99);
        let sum = TRUTH.iteration(&prompt).0 + TRUTH.iteration(&token).0;
        assert_eq!(TRUTH.iteration(&both).0 + TRUTH.decode[0] as u64, sum);
    }
}
