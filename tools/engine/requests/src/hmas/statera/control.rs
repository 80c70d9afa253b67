//! The two loops that keep utilisation in a band (H-MAS §3.4.2, Algorithm 2 C): a budget of tokens
//! for each iteration, a limit on concurrency for longer.
//!
//! `e = ū − clip(ū, [u_low, u_high])`; the inner loop sets `B ← Proj(B₀ − η_B e)`, the outer `N ←
//! Proj(N − η_N ē)` with `ē` the mean over `W` iterations.
//!
//! Holes. Algorithm 2 calls the inner loop proportional and writes `B ← B − η_B e`, which
//! accumulates: [`Loop`] has both. A GPU is 100 % used by any batch, so `ū` is memory in use, or
//! the time of an iteration over a target: [`Signal`]. "Decode tokens issued in each cycle"
//! (§3.4.2) and "per-cycle token budget" (table 3) are two things: [`Reading`]. Gains, band and
//! window are not given.

use std::collections::VecDeque;

/// What utilisation is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Signal {
    /// KV blocks held over blocks.
    Occupancy,
    /// Time of an iteration over a target, ms.
    StepTime {
        /// The target.
        target_ms: f64,
    },
}

/// How the inner loop acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loop {
    /// On the error now: `B₀ − η e`.
    Proportional,
    /// On the sum of errors: `B − η e`, as Algorithm 2 is written.
    Accumulating,
}

/// What the budget counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// Decodes of an iteration (§3.4.2).
    Decodes,
    /// All tokens of an iteration, prompts' too (table 3).
    Iteration,
}

/// What the loops are set to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// What is kept in the band.
    pub signal: Signal,
    /// `[u_low, u_high]`.
    pub band: (f64, f64),
    /// Step of extremum seeking of the band's upper end, by throughput; `None`: the band stays.
    pub seek: Option<f64>,
    /// Iterations that `ū` is a mean of.
    pub smooth: usize,
    /// The inner loop.
    pub inner: Loop,
    /// What its budget counts.
    pub reading: Reading,
    /// `η_B`, tokens for an error of 1.
    pub tokens_gain: f64,
    /// `[B_min, B_max]`.
    pub tokens: (u32, u32),
    /// `η_N`, requests for an error of 1.
    pub concurrency_gain: f64,
    /// `[N_min, N_max]`.
    pub concurrency: (u32, u32),
    /// `W`.
    pub window: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            signal: Signal::Occupancy,
            band: (0.7, 0.9),
            seek: None,
            smooth: 8,
            inner: Loop::Proportional,
            reading: Reading::Decodes,
            tokens_gain: 1024.0,
            tokens: (64, 256),
            concurrency_gain: 8.0,
            concurrency: (16, 256),
            window: 32,
        }
    }
}

/// Iterations after which the band is moved, if it is.
const SEEK_EVERY: u32 = 512;

/// Extremum seeking.
#[derive(Clone, Copy, Debug, Default)]
struct Seek {
    up: bool,
    iterations: u32,
    tokens: u64,
    took_ms: f64,
    before: Option<f64>,
}

/// The loops.
#[derive(Clone, Debug)]
pub struct Control {
    config: Config,
    recent: VecDeque<f64>,
    errors: VecDeque<f64>,
    band: (f64, f64),
    tokens: f64,
    concurrency: f64,
    utilisation: f64,
    seek: Seek,
}

impl Control {
    /// Set so; it begins with the most of both (Algorithm 1, line 1).
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            config,
            recent: VecDeque::with_capacity(config.smooth + 1),
            errors: VecDeque::with_capacity(config.window + 1),
            band: config.band,
            tokens: f64::from(config.tokens.1),
            concurrency: f64::from(config.concurrency.1),
            utilisation: 0.0,
            seek: Seek::default(),
        }
    }

    /// An iteration was run: so much of memory is held, so long it took, so many tokens it
    /// computed.
    pub fn cycle(&mut self, occupancy: f64, took_ms: f64, tokens: u32) {
        let Config {
            signal,
            smooth,
            window,
            inner,
            ..
        } = self.config;
        let u = match signal {
            Signal::Occupancy => occupancy,
            Signal::StepTime { target_ms } => took_ms / target_ms,
        };
        self.utilisation = mean(&mut self.recent, u, smooth);
        self.seek(took_ms, tokens);
        let error = self.utilisation - self.utilisation.clamp(self.band.0, self.band.1);
        let (least, most) = self.config.tokens;
        let from = match inner {
            Loop::Proportional => f64::from(most),
            Loop::Accumulating => self.tokens,
        };
        self.tokens =
            (from - self.config.tokens_gain * error).clamp(f64::from(least), f64::from(most));
        let (least, most) = self.config.concurrency;
        let average = mean(&mut self.errors, error, window);
        self.concurrency = (self.concurrency - self.config.concurrency_gain * average)
            .clamp(f64::from(least), f64::from(most));
    }

    fn seek(&mut self, took_ms: f64, tokens: u32) {
        let Some(step) = self.config.seek else { return };
        let seek = &mut self.seek;
        seek.iterations += 1;
        seek.tokens += u64::from(tokens);
        seek.took_ms += took_ms;
        if seek.iterations < SEEK_EVERY || seek.took_ms <= 0.0 {
            return;
        }
        let throughput = seek.tokens as f64 / seek.took_ms;
        if seek.before.is_some_and(|before| throughput < before) {
            seek.up = !seek.up;
        }
        let width = self.config.band.1 - self.config.band.0;
        let high = self.band.1 + if seek.up { step } else { -step };
        let high = high.clamp(width + 0.1, self.config.band.1.max(0.98));
        self.band = (high - width, high);
        *seek = Seek {
            up: seek.up,
            before: Some(throughput),
            ..Seek::default()
        };
    }

    /// `B_token`.
    #[must_use]
    pub const fn tokens(&self) -> u32 {
        self.tokens as u32
    }

    /// `N_run`.
    #[must_use]
    pub const fn concurrency(&self) -> u32 {
        self.concurrency as u32
    }

    /// `ū`.
    #[must_use]
    pub const fn utilisation(&self) -> f64 {
        self.utilisation
    }
}

/// The mean of the latest so many values, this one the last.
fn mean(values: &mut VecDeque<f64>, value: f64, most: usize) -> f64 {
    values.push_back(value);
    if values.len() > most.max(1) {
        values.pop_front();
    }
    values.iter().sum::<f64>() / values.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_much_use_takes_from_the_budget_at_once_and_from_concurrency_in_time() {
        let mut control = Control::new(Config {
            smooth: 1,
            ..Config::default()
        });
        control.cycle(1.0, 20.0, 100);
        assert_eq!(control.tokens(), 153);
        assert_eq!(control.concurrency(), 255);
        for _ in 0..100 {
            control.cycle(1.0, 20.0, 100);
        }
        assert_eq!(control.tokens(), 153, "proportional: it does not add up");
        assert!(control.concurrency() < 200);
        for _ in 0..1000 {
            control.cycle(0.2, 20.0, 100);
        }
        assert_eq!((control.tokens(), control.concurrency()), (256, 256));
    }

    #[test]
    fn as_algorithm_2_is_written_the_budget_adds_up() {
        let mut control = Control::new(Config {
            smooth: 1,
            inner: Loop::Accumulating,
            ..Config::default()
        });
        for _ in 0..100 {
            control.cycle(1.0, 20.0, 100);
        }
        assert_eq!(control.tokens(), 64);
    }

    #[test]
    fn inside_the_band_nothing_moves() {
        let mut control = Control::new(Config::default());
        for _ in 0..100 {
            control.cycle(0.8, 20.0, 100);
        }
        assert_eq!((control.tokens(), control.concurrency()), (256, 256));
    }
}
