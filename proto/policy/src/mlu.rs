//! Minimal link utilisation: how urgent a flow with an explicit deadline is, and when it will cross
//! the next threshold.
//!
//! Implements MFS §4.3. For one flow, that is one request **and layer**:
//!
//! ```text
//!                size_rem [bytes]
//! mlu = ─────────────────────────────────────────────        (a share, 1 = needs the whole rest)
//!       time_rem [s] · B [bytes/s] · (1 − ρ)
//! ```
//!
//! `B` is the port's rate. `ρ` is the share of that rate that early stages use, because they
//! precede the flow's class. A flow with bytes left and `time_rem ≤ 0` has lost its deadline.
//!
//! Departures. The paper does not say how `ρ` is measured. Here `ρ` is an EWMA in steps of an
//! eighth of the time constant ([`LoadMeter`]). It is capped at [`RHO_MAX`], because promotion is
//! irrevocable: one burst of collectives must not make every flow look infeasible for good.

use crate::time::{Span, Time};

/// Highest load that the urgency metric uses.
pub const RHO_MAX: f64 = 0.95;

/// Returns the `mlu` of a flow at `now`, or `None` if the deadline has passed and bytes are left.
pub fn mlu(size_rem: u64, deadline: Time, now: Time, rate: u64, rho: f64) -> Option<f64> {
    if size_rem == 0 || deadline == Time::NEVER {
        return Some(0.0);
    }
    if deadline <= now {
        return None;
    }
    let time_rem_s = deadline.since(now).0 as f64 * 1e-9;
    Some(size_rem as f64 / (time_rem_s * rate as f64 * (1.0 - rho.clamp(0.0, RHO_MAX))))
}

/// Returns when a flow that is not served reaches `threshold` at a constant `ρ`: the `t` where
/// `mlu(t) = threshold`. Returns `None` if the flow never reaches it.
pub fn crossing(
    size_rem: u64,
    deadline: Time,
    rate: u64,
    rho: f64,
    threshold: f64,
) -> Option<Time> {
    if size_rem == 0 || deadline == Time::NEVER {
        return None;
    }
    let share = threshold * rate as f64 * (1.0 - rho.clamp(0.0, RHO_MAX));
    // The cast saturates: such a flow is due at the origin of the clock.
    let needs = Span((size_rem as f64 / share * 1e9) as u64);
    Some(deadline - needs)
}

/// Returns when to check a flow again that should cross at `crossing`. Service and `ρ` both move
/// the crossing. The next check is therefore at three quarters of the time left, but at least one
/// `period` from now. A level costs O(log) checks, and promotion is at most one period late.
pub fn look_again(now: Time, crossing: Time, period: Span) -> Time {
    let left = crossing.since(now);
    (now + Span(left.0 - left.0 / 4)).max(now + period)
}

/// Steps per time constant of a [`LoadMeter`].
const STEPS: u64 = 8;

/// EWMA of the share of a port's rate that some class takes.
///
/// Time is divided into steps of `τ/8`. Each finished step moves the average by an eighth towards
/// the step's own load, which approximates an exponential with time constant `τ`. The meter uses
/// only additions, multiplications and divisions, because the last bit of `exp` differs between
/// machines.
#[derive(Clone, Debug)]
pub struct LoadMeter {
    step: Span,
    step_capacity: f64,
    step_end: Time,
    step_bytes: u64,
    average: f64,
}

impl LoadMeter {
    /// Creates a meter for a port of `rate` bytes per second.
    pub fn new(rate: u64, time_constant: Span) -> Self {
        let step = Span((time_constant.0 / STEPS).max(1));
        Self {
            step,
            step_capacity: rate as f64 * step.0 as f64 * 1e-9,
            step_end: Time::ZERO,
            step_bytes: 0,
            average: 0.0,
        }
    }

    /// Counts `bytes` that were permitted at `now`.
    pub fn add(&mut self, now: Time, bytes: u64) {
        self.advance(now);
        self.step_bytes = self.step_bytes.saturating_add(bytes);
    }

    /// Returns `ρ` at `now`, from 0 to 1.
    pub fn rho(&self, now: Time) -> f64 {
        if now < self.step_end { self.average.min(1.0) } else { self.advanced(now).0.min(1.0) }
    }

    /// Adds the steps that ended by `now` to the average.
    pub fn advance(&mut self, now: Time) {
        if now < self.step_end {
            return;
        }
        let (average, step_end) = self.advanced(now);
        (self.average, self.step_end, self.step_bytes) = (average, step_end, 0);
    }

    /// Returns the average with all steps that ended by `now`, and the end of the step of `now`.
    fn advanced(&self, now: Time) -> (f64, Time) {
        let passed = now.since(self.step_end).0 / self.step.0;
        let load = self.step_bytes as f64 / self.step_capacity;
        let mut average = self.average + (load - self.average) / STEPS as f64;
        // (7/8)^passed by repeated squaring, so that a long idle time costs no more than a short
        // one. After 512 empty steps the average is negligible: (7/8)^512 < 1e-29.
        let mut decay = 1.0 - 1.0 / STEPS as f64;
        let mut left = passed.min(512);
        while left > 0 {
            if left & 1 == 1 {
                average *= decay;
            }
            decay *= decay;
            left >>= 1;
        }
        let step_end = self.step_end + self.step.times(passed.saturating_add(1));
        (average, step_end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    #[test]
    fn mlu_is_the_share_of_the_rest_of_the_link_that_the_deadline_needs() {
        // At 1 GB/s, 1 MB takes 1 ms of the 10 ms that are left.
        let at = |rho| mlu(1_000_000, Time(10_000_000), Time::ZERO, GB, rho).unwrap();
        assert!((at(0.0) - 0.1).abs() < 1e-12);
        assert!((at(0.5) - 0.2).abs() < 1e-12);
        assert!((at(1.0) - at(RHO_MAX)).abs() < 1e-12, "a full link is not infinitely urgent");
    }

    #[test]
    fn mlu_at_and_past_the_deadline_is_lost_unless_nothing_is_left() {
        let d = Time(100);
        assert_eq!(mlu(1, d, Time(100), GB, 0.0), None);
        assert_eq!(mlu(1, d, Time(101), GB, 0.0), None);
        assert_eq!(mlu(0, d, Time(101), GB, 0.0), Some(0.0));
        assert!(mlu(1, d, Time(99), GB, 0.0).is_some());
        assert_eq!(mlu(1, Time::NEVER, Time(u64::MAX - 1), GB, 0.0), Some(0.0));
    }

    #[test]
    fn without_bytes_nothing_crosses_and_too_many_are_due_at_once() {
        assert_eq!(crossing(0, Time(5), GB, 0.0, 0.1), None);
        assert_eq!(crossing(u64::MAX, Time(5), 1, 0.0, 0.1), Some(Time::ZERO));
    }

    #[test]
    fn the_meter_settles_at_the_load_and_forgets_it() {
        let mut meter = LoadMeter::new(GB, Span::from_millis(10));
        assert_eq!(meter.rho(Time(7)), 0.0);
        for ms in 0..200 {
            meter.add(Time(ms * 1_000_000), 250_000); // a quarter of 1 MB/ms
        }
        let rho = meter.rho(Time(200_000_000));
        assert!((rho - 0.25).abs() < 0.02, "{rho}");
        assert!(meter.rho(Time(210_000_000)) < 0.37 * 0.25 + 0.03);
        assert!(meter.rho(Time(10_000_000_000)) < 1e-12);
        meter.add(Time(5), 1); // time running backwards is survived
        assert!(meter.rho(Time::NEVER) >= 0.0);
    }
}
