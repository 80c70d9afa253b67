//! The scheduler's settings: `[schedule]` of the configuration.
//! Each policy has a table of its own name for its parameters. All tables are checked, but only
//! that of the chosen policy has an effect.
//!
//! HyperFlexis and Maestro have no iteration policy. They have dispatch and workflow tiers over
//! replicas with continuous batching.

pub use laxity_requests::engine_policy::Policy;
use laxity_requests::hmas::pool::{Hints, Kind};
use laxity_requests::hmas::statera;
use laxity_requests::qoserve::{self, Chunking};
use laxity_requests::{Span, hmas};
use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, value};

/// The settings of the request scheduler.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// The policy that makes iterations.
    pub policy: Policy,
    /// Most tokens of an iteration, including those of running answers (the chunk). `qoserve` has
    /// its own limits.
    pub tokens: u32,
    /// Blocks that must stay free when a prompt starts while others run.
    pub watermark: u32,
    /// Parameters of `qoserve`.
    pub qoserve: QoServe,
    /// Parameters of `hmas`.
    pub hmas: Hmas,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            policy: Policy::Fcfs,
            tokens: 256,
            watermark: 0,
            qoserve: QoServe::default(),
            hmas: Hmas::default(),
        }
    }
}

/// The requests that QoServe relegates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Relegation {
    /// No requests.
    Off,
    /// Requests whose deadline has passed or is within an iteration.
    Strict,
    /// Requests that would be late even if they were served at once.
    #[default]
    LookAhead,
}

/// Whether QoServe interrupts a prompt for a more urgent one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Preemption {
    Never,
    /// If the interrupted prompt does not become late by it.
    #[default]
    Selective,
    Always,
}

/// Margin of a learned latency, as a share.
const MARGIN: f64 = 0.05;

/// Parameters of QoServe ([`qoserve::Options`]).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct QoServe {
    /// Prompt tokens of an iteration without slack.
    pub chunk_least: u32,
    /// Most tokens of an iteration, including those of running answers.
    pub chunk_most: u32,
    /// Granularity of the chunk, in tokens.
    pub chunk_step: u32,
    /// Milliseconds that each token left to compute adds to the deadline.
    pub alpha_ms: f64,
    /// Value of `alpha_ms` without load. Default: `alpha_ms`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alpha_low_ms: Option<f64>,
    /// Waiting time of prompts above which there is load, in ms.
    pub busy_ms: f64,
    /// The requests that are relegated.
    pub relegation: Relegation,
    /// If the first waiting `paid` request has less than this share of its time left, `free`
    /// requests are relegated. 0 ignores importance.
    pub hints: f64,
    /// Whether prompts are interrupted for more urgent ones.
    pub preemption: Preemption,
    /// Share that is added to predicted iteration times. Default: [`MARGIN`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub margin: Option<f64>,
    /// Whether relegated requests keep their blocks.
    pub keep_blocks: bool,
}

impl Default for QoServe {
    fn default() -> Self {
        Self {
            chunk_least: 64,
            chunk_most: 2_500,
            chunk_step: 32,
            alpha_ms: 8.0,
            alpha_low_ms: None,
            busy_ms: 10_000.0,
            relegation: Relegation::LookAhead,
            hints: 0.25,
            preemption: Preemption::Selective,
            margin: None,
            keep_blocks: false,
        }
    }
}

fn ns(ms: f64) -> u64 {
    // The value was checked to be a number of a sensible size.
    (ms * 1e6) as u64
}

/// Longest time of a setting, in ms. It is an hour.
const MS_MAX: f64 = 3_600_000.0;

fn within(
    field: &'static str,
    number: f64,
    bounds: std::ops::RangeInclusive<f64>,
) -> Result<(), ConfigError> {
    // NaN is not within any bounds.
    if bounds.contains(&number) {
        return Ok(());
    }
    let wanted = format!("{} to {}", bounds.start(), bounds.end());
    Err(value(field, number, wanted))
}

impl QoServe {
    fn check(&self) -> Result<(), ConfigError> {
        let (least, most) = (self.chunk_least, self.chunk_most);
        if least == 0 || least > most {
            let wanted = format!("1 to schedule.qoserve.chunk_most, which is {most}");
            return Err(value("schedule.qoserve.chunk_least", least, wanted));
        }
        if self.chunk_step == 0 {
            return Err(value("schedule.qoserve.chunk_step", 0, "at least 1"));
        }
        // A second for each token would move a deadline by hours.
        within("schedule.qoserve.alpha_ms", self.alpha_ms, 0.0..=1_000.0)?;
        if let Some(low) = self.alpha_low_ms {
            within("schedule.qoserve.alpha_low_ms", low, 0.0..=self.alpha_ms)?;
        }
        within("schedule.qoserve.busy_ms", self.busy_ms, 0.0..=MS_MAX)?;
        within("schedule.qoserve.hints", self.hints, 0.0..=1.0)?;
        let margin = self.margin.unwrap_or(MARGIN);
        within("schedule.qoserve.margin", margin, 0.0..=10.0)
    }

    pub(super) fn options(&self) -> qoserve::Options {
        qoserve::Options {
            chunking: Chunking::Dynamic {
                least: self.chunk_least,
                most: self.chunk_most,
                step: self.chunk_step,
            },
            alpha: match self.alpha_low_ms {
                None => qoserve::Alpha::Fixed(ns(self.alpha_ms)),
                Some(low) => qoserve::Alpha::Adaptive {
                    low: ns(low),
                    high: ns(self.alpha_ms),
                    busy: Span(ns(self.busy_ms)),
                },
            },
            relegation: match self.relegation {
                Relegation::Off => qoserve::Relegation::Off,
                Relegation::Strict => qoserve::Relegation::Strict,
                Relegation::LookAhead => qoserve::Relegation::LookAhead,
            },
            hints: (self.hints > 0.0).then_some(self.hints),
            preemption: match self.preemption {
                Preemption::Never => qoserve::Preemption::Never,
                Preemption::Selective => qoserve::Preemption::Selective,
                Preemption::Always => qoserve::Preemption::Always,
            },
            margin: self.margin.unwrap_or(MARGIN),
            keep_blocks: self.keep_blocks,
        }
    }
}

/// Parameters of H-MAS ([`hmas::Config`]). The chunk is `schedule.tokens`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Hmas {
    /// The order of waiting requests.
    pub order: Kind,
    /// Least prompt tokens of an iteration, however many requests decode.
    pub chunk_min: u32,
    /// Whether the fence and its limits are used, instead of memory limits only.
    pub statera: bool,
    /// Share of answers that may be longer than the fence expects.
    pub epsilon: f64,
    /// Time above which a request goes to the slow lane, in ms.
    pub lane_split_ms: u64,
    /// Work of the fast lane for each unit of work of the slow lane.
    pub fast_weight: u32,
}

impl Default for Hmas {
    fn default() -> Self {
        let hints = Hints::default();
        Self {
            order: Kind::Sjf,
            chunk_min: 64,
            statera: true,
            epsilon: 0.1,
            lane_split_ms: hints.lane_split.0 / 1_000_000,
            fast_weight: hints.fast_weight,
        }
    }
}

impl Hmas {
    fn check(&self) -> Result<(), ConfigError> {
        within("schedule.hmas.epsilon", self.epsilon, 0.001..=0.999)?;
        if self.chunk_min == 0 {
            return Err(value("schedule.hmas.chunk_min", 0, "at least 1"));
        }
        if !Hints::SPLITS_MS.contains(&self.lane_split_ms) {
            let wanted = format!("{:?}", Hints::SPLITS_MS);
            return Err(value("schedule.hmas.lane_split_ms", self.lane_split_ms, wanted));
        }
        if !Hints::WEIGHTS.contains(&self.fast_weight) {
            let wanted = format!("{:?}", Hints::WEIGHTS);
            return Err(value("schedule.hmas.fast_weight", self.fast_weight, wanted));
        }
        Ok(())
    }

    pub(super) fn config(&self, chunk: u32) -> hmas::Config {
        hmas::Config {
            chunk,
            chunk_min: self.chunk_min.min(chunk),
            statera: self.statera.then(|| statera::Config {
                epsilon: self.epsilon,
                // With errors in tokens, as in the paper, the fence does not keep its guarantee
                // (docs/requests/hmas.md).
                score: statera::Score::Relative,
                ..statera::Config::default()
            }),
            hints: Hints {
                lane_split: Span::from_millis(self.lane_split_ms),
                fast_weight: self.fast_weight,
            },
        }
    }
}

impl Settings {
    /// Checks the values.
    ///
    /// # Errors
    /// Returns the first invalid value.
    pub fn check(&self) -> Result<(), ConfigError> {
        if self.tokens == 0 {
            let wanted = "an iteration computes at least 1 token";
            return Err(value("schedule.tokens", 0, wanted));
        }
        self.qoserve.check()?;
        self.hmas.check()
    }

    /// Reports whether the policy uses predictions of iteration times.
    pub const fn predicts(&self) -> bool {
        matches!(self.policy, Policy::Qoserve | Policy::Hmas)
    }

    pub fn summary(&self) -> String {
        match self.policy {
            Policy::Fcfs | Policy::Edf | Policy::Srpf => {
                format!("{}, chunks of {} tokens", self.policy.name(), self.tokens)
            }
            Policy::Qoserve => format!(
                "qoserve, chunks of {} to {} tokens, latency learned as it runs",
                self.qoserve.chunk_least, self.qoserve.chunk_most
            ),
            Policy::Hmas => format!(
                "hmas, {}, {} tokens at most, latency learned as it runs",
                self.hmas.order.name(),
                self.tokens
            ),
        }
    }
}
