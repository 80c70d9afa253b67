//! The Statera Agent (H-MAS §3.4.2, Appendix E.2, Algorithm 2), which limits running requests: by
//! memory ([`conformal`]), by number, and by decodes of an iteration.
//!
//! In the paper, control loops adapt the last two limits to a range of utilization. With the memory
//! limit the loops had almost no effect. With iteration time as their signal they did harm. They
//! were removed (`docs/requests/hmas.md`).

pub mod conformal;

pub use conformal::{Bound, Calibration, Score, Source};

/// The options of Statera. The paper has no values. These were chosen on the tuning seeds of
/// `docs/requests/hmas.md`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateraConfig {
    /// Share of answers that may exceed their bound, ε.
    pub epsilon: f64,
    /// Number of recent errors of a bucket that count.
    pub window: usize,
    pub score: Score,
    /// Share of memory that stays free, `δ_frag`. A request fills its blocks completely only at its
    /// end.
    pub fragmentation: f64,
    /// Whether the bound is the prediction itself, without errors (table 2, "freeze Statera").
    pub frozen: bool,
    /// Maximum number of requests that run, `N_run`.
    pub concurrency: u32,
    /// Maximum number of decodes in an iteration, `B_token`.
    pub decodes: u32,
}

impl Default for StateraConfig {
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
