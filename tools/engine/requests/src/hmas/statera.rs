//! The Statera Agent (H-MAS §3.4.2, Appendix E.2, Algorithm 2): how much may run. A fence on memory
//! ([`conformal`]) and two fixed limits: requests that run, and decodes of an iteration.
//!
//! The paper moves both limits by loops that keep utilization in a band. Behind the fence the loops
//! hardly ever acted, and with the time of an iteration as their signal they did harm. They were
//! removed (`docs/requests/hmas.md`).

pub mod conformal;

pub use conformal::{Bound, Calibration, Score, Source};

/// What Statera is set to. The paper gives none of these numbers; those here were set on the tuning
/// seeds of `docs/requests/hmas.md`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// Part of answers that may be longer than their bound, ε.
    pub epsilon: f64,
    /// Errors of a bucket that count, the latest.
    pub window: usize,
    /// What an error is.
    pub score: Score,
    /// Memory that is not promised to anybody, `δ_frag`: blocks are filled to the last only at the
    /// end of a request.
    pub fragmentation: f64,
    /// The bound is the prediction itself, whatever errors are seen (table 2, "freeze Statera").
    pub frozen: bool,
    /// Requests that run at most, `N_run`.
    pub concurrency: u32,
    /// Decodes of an iteration at most, `B_token`.
    pub decodes: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            epsilon: 0.1,
            window: 500,
            score: Score::Additive,
            fragmentation: 0.02,
            frozen: false,
            concurrency: 256,
            decodes: 256,
        }
    }
}

/// The agent.
#[derive(Clone, Debug)]
pub struct Statera {
    /// As it was set.
    pub config: Config,
    calibration: Calibration,
}

impl Statera {
    /// Set so.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            config,
            calibration: Calibration::new(config.epsilon, config.window, config.score),
        }
    }

    /// A request ended: the error of its prediction is taken down.
    pub fn complete(&mut self, prompt: u32, predicted: u32, real: u32) {
        self.calibration.learn(prompt, predicted, real);
    }

    /// Tokens that a request will generate at most, but for ε of them.
    #[must_use]
    pub fn bound(&self, prompt: u32, predicted: u32, output_max: u32) -> Bound {
        if self.config.frozen {
            return Bound {
                tokens: predicted.clamp(1, output_max.max(1)),
                source: Source::Prediction,
            };
        }
        self.calibration.bound(prompt, predicted, output_max)
    }
}
