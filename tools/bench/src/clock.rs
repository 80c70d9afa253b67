//! The clock of all figures: `lfence; rdtsc` … `rdtscp; lfence`, calibrated against
//! CLOCK_MONOTONIC, less its own cost. If the processor has no usable counter (another
//! architecture, or a TSC that stops or changes its rate), the clock is CLOCK_MONOTONIC and the
//! report names it.

use std::fs;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    counter: bool,
    ns_per_tick: f64,
    overhead_ticks: u64,
    resolution_ticks: u64,
}

const OVERHEAD_SAMPLES: usize = 20_001;

impl Clock {
    pub(crate) fn calibrate() -> Self {
        let mut clock = Self {
            counter: counter_is_usable(),
            ns_per_tick: 1.0,
            overhead_ticks: 0,
            resolution_ticks: 1,
        };
        if clock.counter {
            clock.ns_per_tick = clock.measure_rate();
        }
        let mut empty: Vec<u64> = (0..OVERHEAD_SAMPLES)
            .map(|_| {
                let begin = clock.begin();
                clock.end().saturating_sub(begin)
            })
            .collect();
        empty.sort_unstable();
        clock.overhead_ticks = empty[OVERHEAD_SAMPLES / 2];
        let steps = empty.windows(2).map(|pair| pair[1] - pair[0]).filter(|step| *step > 0);
        clock.resolution_ticks = steps.min().unwrap_or(1);
        clock
    }

    /// Returns the nanoseconds per tick. It is the median of several windows, so that one
    /// preemption between the two clocks can't change it.
    fn measure_rate(self) -> f64 {
        let mut rates: Vec<f64> = (0..9)
            .map(|_| {
                let wall = Instant::now();
                let begin = self.begin();
                while wall.elapsed() < Duration::from_millis(4) {}
                let ns = wall.elapsed().as_nanos() as f64;
                ns / (self.end() - begin).max(1) as f64
            })
            .collect();
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    }

    /// Reads the time before the measured code. Older instructions have completed, and later ones
    /// have not begun.
    #[inline(always)]
    pub(crate) fn begin(self) -> u64 {
        #[cfg(target_arch = "x86_64")]
        if self.counter {
            // SAFETY: `lfence` and `rdtsc` exist on every x86-64 processor and touch no memory.
            return unsafe {
                core::arch::x86_64::_mm_lfence();
                let ticks = core::arch::x86_64::_rdtsc();
                core::arch::x86_64::_mm_lfence();
                ticks
            };
        }
        monotonic_ns()
    }

    /// Reads the time after the measured code, which has completed. Later instructions have not
    /// begun.
    #[inline(always)]
    pub(crate) fn end(self) -> u64 {
        #[cfg(target_arch = "x86_64")]
        if self.counter {
            let mut core = 0;
            // SAFETY: `counter_is_usable` saw `rdtscp` among the processor's flags; it writes
            // only the local `core`.
            return unsafe {
                let ticks = core::arch::x86_64::__rdtscp(&mut core);
                core::arch::x86_64::_mm_lfence();
                ticks
            };
        }
        monotonic_ns()
    }

    #[inline(always)]
    pub(crate) fn between_ns(self, begin: u64, end: u64) -> f64 {
        end.saturating_sub(begin).saturating_sub(self.overhead_ticks) as f64 * self.ns_per_tick
    }

    /// Returns the step of the clock, which is 10 ns on some processors at any frequency.
    pub(crate) fn resolution_ns(self) -> f64 {
        self.resolution_ticks as f64 * self.ns_per_tick
    }

    /// Returns the number of ticks in `ns`, for pauses.
    pub(crate) fn ticks(self, ns: f64) -> u64 {
        (ns / self.ns_per_tick) as u64
    }

    /// Keeps the core busy for `ticks` without memory accesses.
    #[inline(always)]
    pub(crate) fn pause(self, ticks: u64) {
        let begin = self.begin();
        while self.begin().wrapping_sub(begin) < ticks {}
    }

    pub(crate) fn describe(self) -> String {
        let overhead = self.overhead_ticks as f64 * self.ns_per_tick;
        if self.counter {
            format!(
                "lfence+rdtsc … rdtscp at {:.3} GHz in steps of {:.1} ns (interpolated), \
                 {overhead:.1} ns per bracket subtracted",
                1.0 / self.ns_per_tick,
                self.resolution_ns()
            )
        } else {
            format!("CLOCK_MONOTONIC, {overhead:.1} ns per bracket subtracted")
        }
    }
}

pub(crate) fn monotonic_ns() -> u64 {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)
        .map_or(0, |t| t.tv_sec() as u64 * 1_000_000_000 + t.tv_nsec() as u64)
}

/// Reports whether the TSC has a constant rate, never stops, and can be read with `rdtscp`.
fn counter_is_usable() -> bool {
    if !cfg!(target_arch = "x86_64") {
        return false;
    }
    let Ok(cpuinfo) = fs::read_to_string("/proc/cpuinfo") else { return false };
    let Some(flags) = cpuinfo.lines().find(|line| line.starts_with("flags")) else { return false };
    ["rdtscp", "constant_tsc", "nonstop_tsc"]
        .iter()
        .all(|wanted| flags.split_whitespace().any(|flag| flag == *wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_takes_at_least_as_long_as_it_says() {
        let clock = Clock::calibrate();
        let begin = monotonic_ns();
        clock.pause(clock.ticks(200_000.0));
        assert!(monotonic_ns() - begin >= 190_000);
    }
}
