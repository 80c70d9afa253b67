//! Who computes a prompt, of the prefill processes that a decode process knows: the dispatch tier
//! of `laxity-requests`. A process is the instance of its place in `peers.prefill`.

use laxity_requests::Time;
use laxity_requests::baseline::{Fewest, LeastLoaded, LeastWork, RoundRobin};
use laxity_requests::dispatch::{Decision, Dispatch, Event};
use laxity_requests::hyperflexis::{self, HyperFlexis, Linear};
use serde::{Deserialize, Serialize};

/// Who decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// Whoever has the fewest of this process's prompts, in turn among equals.
    #[default]
    Fewest,
    /// One after the other.
    RoundRobin,
    /// Whoever has the fewest prompt tokens to compute, of all, by its own reports.
    LeastLoaded,
    /// Whoever has the least of this process's prompts to compute, in time by `latency`.
    LeastWork,
    /// HyperFlexis: a prompt waits here until one can take it without breaking a promise.
    Hyperflexis,
}

impl Rule {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Fewest,
        Self::RoundRobin,
        Self::LeastLoaded,
        Self::LeastWork,
        Self::Hyperflexis,
    ];

    /// Its name in configurations.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fewest => "fewest",
            Self::RoundRobin => "round_robin",
            Self::LeastLoaded => "least_loaded",
            Self::LeastWork => "least_work",
            Self::Hyperflexis => "hyperflexis",
        }
    }
}

/// What a place is chosen by.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Places {
    /// The rule.
    pub rule: Rule,
    /// The time of a prompt on a prefill process: `[a, b, c]` of `a + b · tokens + c · tokens²`,
    /// ns.
    pub prefill_ns: [f64; 3],
    /// Tokens of a block.
    pub block_tokens: u32,
}

impl Places {
    pub(super) fn build(&self) -> Box<dyn Dispatch + Send> {
        // Who computes prompts for others decodes nothing.
        let model = Linear {
            prefill: self.prefill_ns,
            decode: [0.0; 3],
        };
        match self.rule {
            Rule::Fewest => Box::new(Fewest::default()),
            Rule::RoundRobin => Box::new(RoundRobin::default()),
            Rule::LeastLoaded => Box::new(LeastLoaded::default()),
            Rule::LeastWork => Box::new(LeastWork::new(model)),
            Rule::Hyperflexis => {
                let options = hyperflexis::Options::new(model, self.block_tokens);
                Box::new(HyperFlexis::new(options))
            }
        }
    }
}

/// Who decides on places, and whether it has to be asked.
pub(super) struct Dispatcher(Box<dyn Dispatch + Send>);

impl std::fmt::Debug for Dispatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Dispatcher").field(&self.0.name()).finish()
    }
}

impl Dispatcher {
    pub(super) fn new(places: &Places) -> Self {
        Self(places.build())
    }

    pub(super) fn handle(&mut self, now: Time, event: &Event) {
        self.0.handle(now, event);
    }

    /// Asked only while somebody waits, live as in a replay.
    pub(super) fn poll(&mut self, now: Time) -> Option<Decision> {
        self.0.poll_decision(now)
    }
}
