//! The Statera Agent (H-MAS §3.4.2, Appendix E.2, Algorithm 2): how much may run. A fence on memory
//! ([`conformal`]), a budget of tokens and a limit on concurrency ([`control`]).

pub mod conformal;
pub mod control;

pub use conformal::{Bound, Calibration, Score, Source};
pub use control::{Control, Loop, Reading, Signal};

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
    /// The two loops.
    pub control: control::Config,
    /// Ablations: what stands still.
    pub frozen: Frozen,
}

/// Parts of Statera that stand still (table 2, "freeze Statera").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Frozen {
    /// The bound is the prediction itself, whatever errors are seen.
    pub bound: bool,
    /// Budget and concurrency stay at their largest.
    pub limits: bool,
}

impl Frozen {
    /// All of it.
    pub const ALL: Self = Self {
        bound: true,
        limits: true,
    };
}

impl Default for Config {
    fn default() -> Self {
        Self {
            epsilon: 0.1,
            window: 500,
            score: Score::Additive,
            fragmentation: 0.02,
            control: control::Config::default(),
            frozen: Frozen::default(),
        }
    }
}

/// The agent.
#[derive(Clone, Debug)]
pub struct Statera {
    /// As it was set.
    pub config: Config,
    calibration: Calibration,
    control: Control,
}

impl Statera {
    /// Set so.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            config,
            calibration: Calibration::new(config.epsilon, config.window, config.score),
            control: Control::new(config.control),
        }
    }

    /// A request ended: `e_r = l_real − l_pred` is taken down.
    pub fn complete(&mut self, prompt: u32, predicted: u32, real: u32) {
        self.calibration.learn(prompt, predicted, real);
    }

    /// Tokens that a request will generate at most, but for ε of them.
    #[must_use]
    pub fn bound(&self, prompt: u32, predicted: u32, output_max: u32) -> Bound {
        if self.config.frozen.bound {
            return Bound {
                tokens: predicted.clamp(1, output_max.max(1)),
                source: Source::Prediction,
            };
        }
        self.calibration.bound(prompt, predicted, output_max)
    }

    /// An iteration was run: the loops turn.
    pub fn cycle(&mut self, occupancy: f64, took_ms: f64, tokens: u32) {
        if !self.config.frozen.limits {
            self.control.cycle(occupancy, took_ms, tokens);
        }
    }

    /// `N_run`.
    #[must_use]
    pub fn concurrency(&self) -> u32 {
        self.control.concurrency()
    }

    /// `B_token`.
    #[must_use]
    pub const fn tokens(&self) -> u32 {
        self.control.tokens()
    }

    /// What the loops see.
    #[must_use]
    pub const fn utilisation(&self) -> f64 {
        self.control.utilisation()
    }
}
