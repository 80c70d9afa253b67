//! Instants and durations in nanoseconds. This module does not read a clock.
//!
//! Inside a host an instant is CLOCK_MONOTONIC (architecture §1); in a simulator it is virtual.
//! Both are the same `u64`, so no conversion is needed. All arithmetic saturates: a deadline near
//! `u64::MAX` means "never", and an instant before the origin becomes the origin.

use core::fmt;
use core::ops::{Add, Sub};

/// An instant, in nanoseconds of the driver's monotonic clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

/// A length of time in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span(pub u64);

impl Time {
    /// The origin of the clock.
    pub const ZERO: Self = Self(0);
    /// An instant that never comes: "no deadline".
    pub const NEVER: Self = Self(u64::MAX);

    /// Returns the time from `earlier` to `self`, zero if `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }

    /// Returns the nanoseconds from `now` to `self`, negative if `self` has passed.
    #[must_use]
    pub const fn remaining_ns(self, now: Self) -> i64 {
        let left = self.0 as i128 - now.0 as i128;
        if left > i64::MAX as i128 {
            i64::MAX
        } else if left < -(i64::MAX as i128) {
            i64::MIN
        } else {
            left as i64
        }
    }
}

impl Span {
    /// A span of no time.
    pub const ZERO: Self = Self(0);

    /// Returns a span of `n` milliseconds.
    pub const fn from_millis(n: u64) -> Self {
        Self(n.saturating_mul(1_000_000))
    }

    /// Returns a span of `n` microseconds.
    pub const fn from_micros(n: u64) -> Self {
        Self(n.saturating_mul(1_000))
    }

    /// Returns the time that `bytes` take, rounded up. At a rate of zero it is the longest span.
    pub const fn transfer(bytes: u64, bytes_per_second: u64) -> Self {
        if bytes_per_second == 0 {
            return Self(u64::MAX);
        }
        // Below 18 GB. A division of 128 bits takes ten times as long.
        if let Some(product) = bytes.checked_mul(1_000_000_000) {
            return Self(product.div_ceil(bytes_per_second));
        }
        let ns = (bytes as u128 * 1_000_000_000).div_ceil(bytes_per_second as u128);
        if ns > u64::MAX as u128 { Self(u64::MAX) } else { Self(ns as u64) }
    }

    /// Returns `self · n`, saturating.
    #[must_use]
    pub const fn times(self, n: u64) -> Self {
        Self(self.0.saturating_mul(n))
    }
}

impl Add<Span> for Time {
    type Output = Self;
    fn add(self, span: Span) -> Self {
        Self(self.0.saturating_add(span.0))
    }
}

impl Sub<Span> for Time {
    type Output = Self;
    fn sub(self, span: Span) -> Self {
        Self(self.0.saturating_sub(span.0))
    }
}

impl Add for Span {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n if n < 10_000 => write!(f, "{n} ns"),
            n if n < 10_000_000 => write!(f, "{:.1} µs", n as f64 / 1e3),
            n if n < 10_000_000_000 => write!(f, "{:.1} ms", n as f64 / 1e6),
            n => write!(f, "{:.1} s", n as f64 / 1e9),
        }
    }
}
