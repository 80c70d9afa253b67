//! The choice of the prefill process for a prompt, which a decode process makes with the dispatch
//! tier of `laxity-requests`. A process's instance number is its index in `peers.prefill`.

use laxity_requests::baseline::{LeastLoaded, LeastWork, RoundRobin};
use laxity_requests::dispatch::Dispatch;
use laxity_requests::hyperflexis::{self, HyperFlexis, Linear};
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// The process with the fewest prompts of this decode process, in turn among equals.
    #[default]
    Fewest,
    RoundRobin,
    /// The process that reports the fewest prompt tokens to compute, for all decode processes.
    LeastLoaded,
    /// The process with the least work for this decode process, as time by `prefill_ns`.
    LeastWork,
    /// HyperFlexis: a prompt waits here until a process can compute it without missing a deadline.
    Hyperflexis,
}

impl Rule {
    pub const ALL: [Self; 5] =
        [Self::Fewest, Self::RoundRobin, Self::LeastLoaded, Self::LeastWork, Self::Hyperflexis];

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

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Places {
    pub rule: Rule,
    /// Coefficients `[a, b, c]` of `a + b · tokens + c · tokens²`, which is the time of a prompt on
    /// a prefill process, in ns.
    pub prefill_ns: [f64; 3],
    pub block_tokens: u32,
}

impl Places {
    pub(super) fn build(&self) -> Box<dyn Dispatch + Send> {
        // A process that computes prompts for others decodes nothing.
        let model = Linear { prefill: self.prefill_ns, decode: [0.0; 3] };
        match self.rule {
            Rule::Fewest => Box::new(LeastLoaded::by_requests()),
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
