//! The scheduler's settings: `[schedule]` of the configuration, and the first line of a record. A
//! policy's own numbers stand in a table of its name, and are checked whether it is in force or
//! not; what a policy does not use is left alone.
//!
//! What is not here: HyperFlexis and Maestro have no iteration policy of their own (theirs are the
//! dispatch and workflow tiers, over replicas that batch continuously).

use std::path::{Path, PathBuf};

pub use laxity_requests::engine_policy::Policy;
use laxity_requests::hmas::pool::{Hints, Kind};
use laxity_requests::hmas::statera;
use laxity_requests::qoserve::latency_file::BYTES_MAX;
use laxity_requests::qoserve::{self, Chunking, Forest, Trained};
use laxity_requests::{Span, hmas};
use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, value};

/// How iterations are made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Who decides.
    pub policy: Policy,
    /// Tokens an iteration computes at most, those of running answers included: the chunk. Of
    /// `qoserve`, see there.
    pub tokens: u32,
    /// Blocks that a prompt which starts leaves free while others run.
    pub watermark: u32,
    /// Of `qoserve` and `hmas`: a forest that says how long an iteration takes, in a file that
    /// `laxity sim train-latency` wrote. Without one that is learned from the iterations as they
    /// are measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forest: Option<PathBuf>,
    /// Of `qoserve`.
    pub qoserve: QoServe,
    /// Of `hmas`.
    pub hmas: Hmas,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            policy: Policy::Fcfs,
            tokens: 256,
            watermark: 0,
            forest: None,
            qoserve: QoServe::default(),
            hmas: Hmas::default(),
        }
    }
}

/// Whom QoServe gives up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Relegation {
    /// Nobody.
    Off,
    /// Whose deadline is past or within an iteration.
    Strict,
    /// Who would be late even if served at once.
    #[default]
    LookAhead,
}

/// Whether QoServe leaves a prompt that has begun for a more urgent one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Preemption {
    /// No.
    Never,
    /// Yes, but for one that would be late for it.
    #[default]
    Selective,
    /// Yes.
    Always,
}

/// The margin of a latency that is learned.
const MARGIN: f64 = 0.05;

/// QoServe's numbers ([`qoserve::Options`]).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct QoServe {
    /// Prompt tokens of an iteration even without slack.
    pub chunk_least: u32,
    /// Tokens of an iteration at most, those of running answers included.
    pub chunk_most: u32,
    /// Sizes that are told apart.
    pub chunk_step: u32,
    /// What a token that is left to compute counts, ms of deadline.
    pub alpha_ms: f64,
    /// The same without load; as `alpha_ms` if it is not said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alpha_low_ms: Option<f64>,
    /// Load is: prompts in line for longer than this, ms.
    pub busy_ms: f64,
    /// Who is given up.
    pub relegation: Relegation,
    /// Requests of importance `free` are given up while one of importance `paid` at the head of the
    /// line has less than this share of its time left. 0: importance is not looked at.
    pub hints: f64,
    /// Preemption of prompts.
    pub preemption: Preemption,
    /// An iteration is taken to last longer than predicted by this share. Without it, by that which
    /// the forest's file says, or [`MARGIN`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub margin: Option<f64>,
    /// Whoever is given up keeps its blocks.
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
    // Checked to be a number of a sensible size.
    (ms * 1e6) as u64
}

/// Longest time that is a setting: an hour.
const MS_MAX: f64 = 3_600_000.0;

fn within(
    field: &'static str,
    number: f64,
    bounds: std::ops::RangeInclusive<f64>,
) -> Result<(), ConfigError> {
    // Not so of what is no number.
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
        // A second for each token would put any deadline into the next century.
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

/// H-MAS' numbers ([`hmas::Config`]). The chunk is `schedule.tokens`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Hmas {
    /// The order of the line.
    pub order: Kind,
    /// Prompt tokens of an iteration at least, however many decode.
    pub chunk_min: u32,
    /// Fence and limits; without, only memory limits.
    pub statera: bool,
    /// Part of answers that may be longer than the fence expects.
    pub epsilon: f64,
    /// Two lanes: requests that take longer are slow, ms.
    pub lane_split_ms: u64,
    /// Two lanes: work of the fast lane for one part of the slow one's.
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
            return Err(value(
                "schedule.hmas.lane_split_ms",
                self.lane_split_ms,
                wanted,
            ));
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
                // As the paper has it, errors in tokens, the fence does not hold what it promises
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

fn read_forest(path: &Path) -> Result<Trained, ConfigError> {
    let wanted = |error: String| {
        let how =
            "a file that `laxity sim train-latency` wrote, or leave it out: then it is learned";
        value(
            "schedule.forest",
            path.display(),
            format!("{error}; give {how}"),
        )
    };
    let read = laxity_files::read_to_string(path, BYTES_MAX);
    let text = read.map_err(|error| wanted(error.to_string()))?;
    Trained::parse(&text).map_err(|error| wanted(error.to_string()))
}

impl Settings {
    /// Checks what has to hold, and that the forest can be read.
    ///
    /// # Errors
    /// The first thing that does not.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.check_numbers()?;
        self.with_forest().map(drop)
    }

    /// Checks what has to hold of all but the forest.
    ///
    /// # Errors
    /// The first thing that does not.
    pub fn check_numbers(&self) -> Result<(), ConfigError> {
        if self.tokens == 0 {
            let wanted = "an iteration computes at least 1 token";
            return Err(value("schedule.tokens", 0, wanted));
        }
        self.qoserve.check()?;
        self.hmas.check()
    }

    /// These settings, with the margin of the forest's file if they have none; and the forest, if
    /// there is one.
    ///
    /// # Errors
    /// It cannot be read, or is none.
    pub fn with_forest(&self) -> Result<(Self, Option<Forest>), ConfigError> {
        let mut settings = self.clone();
        let Some(path) = self.forest.as_deref() else {
            return Ok((settings, None));
        };
        let Trained { forest, margin } = read_forest(path)?;
        settings.qoserve.margin.get_or_insert(margin);
        settings.qoserve.check()?;
        Ok((settings, Some(forest)))
    }

    /// Whether how long iterations take is asked at all.
    #[must_use]
    pub const fn predicts(&self) -> bool {
        matches!(self.policy, Policy::Qoserve | Policy::Hmas)
    }

    /// What it comes to, in words.
    #[must_use]
    pub fn summary(&self) -> String {
        let latency = match &self.forest {
            Some(path) => format!("latency by {}", path.display()),
            None => "latency learned as it runs".to_owned(),
        };
        match self.policy {
            Policy::Fcfs | Policy::Edf | Policy::Srpf => {
                format!("{}, chunks of {} tokens", self.policy.name(), self.tokens)
            }
            Policy::Qoserve => format!(
                "qoserve, chunks of {} to {} tokens, {latency}",
                self.qoserve.chunk_least, self.qoserve.chunk_most
            ),
            Policy::Hmas => format!(
                "hmas, {}, {} tokens at most, {latency}",
                self.hmas.order.name(),
                self.tokens
            ),
        }
    }
}
