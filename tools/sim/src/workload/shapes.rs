//! What made-up workloads look like: the numbers behind [`Source`]'s generators.
//!
//! | shape | stands for | mean prompt | reuse | block |
//! |---|---|---|---|---|
//! | conversation | QwenA-Conv, MFS §6.2 | 2 k tokens | 50 % | 16 |
//! | agent | QwenB-Agent, MFS §6.2 | 1 k tokens | 65 % | 16 |
//! | long conversation | Mooncake's conversations, MFS §6.3 | 15 k tokens | 40 % | 512 |
//! | long agent | Mooncake's tools and agents, MFS §6.3 | 9 k tokens | 65 % | 512 |
//!
//! Mean and reuse are the paper's; reuse is that of a cache without bounds, in tokens (see
//! [`Summary`](super::Summary)). Measured over 16 seeds, 20 000 requests in 60 s, lowest to
//! highest:
//!
//! | shape | mean prompt | reuse | median / 99th percentile |
//! |---|---|---|---|
//! | conversation | 1917–2053 | 0.482–0.511 | 0.95 k / 15 k |
//! | agent | 996–1018 | 0.649–0.664 | 0.75 k / 4.3 k |
//! | long conversation | 14.8 k–15.4 k | 0.387–0.414 | 8.9 k / 95 k |
//! | long agent | 8.9 k–9.2 k | 0.640–0.662 | 7 k / 39 k |
//!
//! Fewer requests reuse less, because each template is new once: agents 0.63 of 5000 requests, 0.54
//! of
//! 1000. So does any recording that is cut short.
//!
//! What else is known has gone into the shapes:
//!
//! * *Turns* of a session: after turn `k` it goes on with probability `(α + k − 1) / (α + β + k −
//!   1)`, so the longer a session has lasted the likelier is another turn (the chance of going on
//!   is beta-distributed over sessions). Mooncake's published conversations, taken apart into
//!   sessions by their blocks, go on with 25, 39, 49, 56, 60, 66 % after turns 1 to 6; α = 1.17 and
//!   β = 3.45 give that within 2 points. Of Qwen-B less than 0.1 % of requests are later turns and
//!   97 % of the hits come from single requests (Wang et al., *KVCache Cache in the Wild*, ATC
//!   '25); agents here go on seldom.
//! * *Think time* is log-normal with σ = 1.04, the fit to those conversations (mean 212 s, median
//!   123 s, 99th percentile 1458 s). Qwen-A: 80 % of reuse within 10 minutes, a mean of 373 s if
//!   exponential, as they say it is.
//! * *Texts* are a mixture of typed ones and documents, both log-normal. Mooncake's first prompts
//!   are log-normal with σ = 1.15; of its later turns' texts half have at most 26 tokens, a tenth
//!   more than 4 k.
//! * *Shared prefixes*: all of Mooncake's conversations share their first 512 tokens. Agents share
//!   templates with Zipf popularity; 10 % of all blocks have 77 % of the hits in Qwen's traces.
//!
//! What is made up: the sizes of Qwen's texts, the number of templates and the long agents' turns,
//! chosen so that mean and reuse come out. The long conversations are the published trace (12 k
//! tokens, 37 % reuse), a quarter longer and with slightly more turns, since the paper says 15 k
//! and 40 %.

use crate::scenario::Source;

/// What a made-up workload looks like. Lengths are in tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Prefixes that sessions share: system prompts, templates.
    pub prefixes: u32,
    /// Exponent of their Zipf popularity.
    pub zipf: f64,
    /// Their mean length over requests. The lengths of a seed's prefixes are scaled to have it.
    pub prefix_mean: f64,
    /// How their lengths spread: standard deviation of the logarithm.
    pub prefix_sigma: f64,
    /// What follows the prefix in a session's first prompt.
    pub first: Text,
    /// What each later prompt adds to the one before and its answer.
    pub later: Text,
    /// Generated tokens.
    pub output: LogNormal,
    /// See the head of this file.
    pub alpha: f64,
    /// See the head of this file.
    pub beta: f64,
    /// Mean time from a turn to the next, seconds.
    pub think_mean_s: f64,
    /// Length of the recording that the numbers are from, seconds.
    pub recorded_s: f64,
    /// Longest prompt, where a session ends.
    pub longest: u32,
}

/// A text of random length: a document in a share of all cases, otherwise typed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Text {
    /// Length of a typed one.
    pub typed: LogNormal,
    /// Length of a document.
    pub document: LogNormal,
    /// How many are documents.
    pub documents: f64,
}

/// A log-normal distribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogNormal {
    /// Its median.
    pub median: f64,
    /// Standard deviation of the logarithm.
    pub sigma: f64,
}

/// Standard deviation of the logarithm of think times.
pub const THINK_SIGMA: f64 = 1.04;

/// Turns of a session at most.
pub const MOST_TURNS: u32 = 64;

const fn log_normal(median: f64, sigma: f64) -> LogNormal {
    LogNormal { median, sigma }
}

const CONVERSATION: Shape = Shape {
    block_tokens: 16,
    prefixes: 16,
    zipf: 1.0,
    prefix_mean: 260.0,
    prefix_sigma: 0.8,
    first: Text {
        typed: log_normal(75.0, 1.2),
        document: log_normal(1430.0, 1.0),
        documents: 0.4,
    },
    later: Text {
        typed: log_normal(45.0, 1.2),
        document: log_normal(790.0, 1.0),
        documents: 0.25,
    },
    output: log_normal(230.0, 0.9),
    alpha: 1.2,
    beta: 3.2,
    think_mean_s: 373.0,
    recorded_s: 7200.0,
    longest: 32_768,
};

const AGENT: Shape = Shape {
    block_tokens: 16,
    prefixes: 256,
    zipf: 1.0,
    prefix_mean: 645.0,
    prefix_sigma: 0.7,
    first: Text {
        typed: log_normal(80.0, 1.2),
        document: log_normal(600.0, 1.0),
        documents: 0.2,
    },
    later: Text {
        typed: log_normal(60.0, 1.0),
        document: log_normal(600.0, 1.0),
        documents: 0.2,
    },
    output: log_normal(60.0, 1.0),
    alpha: 0.08,
    beta: 3.0,
    think_mean_s: 20.0,
    recorded_s: 7200.0,
    longest: 16_384,
};

const LONG_CONVERSATION: Shape = Shape {
    block_tokens: 512,
    prefixes: 1,
    zipf: 1.0,
    prefix_mean: 512.0,
    prefix_sigma: 0.0,
    first: Text {
        typed: log_normal(6500.0, 1.15),
        document: log_normal(6500.0, 1.15),
        documents: 0.0,
    },
    later: Text {
        typed: log_normal(30.0, 1.5),
        document: log_normal(3400.0, 1.0),
        documents: 0.35,
    },
    output: log_normal(300.0, 0.6),
    alpha: 1.3,
    beta: 3.1,
    think_mean_s: 212.0,
    recorded_s: 3600.0,
    longest: 131_072,
};

const LONG_AGENT: Shape = Shape {
    block_tokens: 512,
    prefixes: 128,
    zipf: 1.0,
    prefix_mean: 5200.0,
    prefix_sigma: 0.6,
    first: Text {
        typed: log_normal(600.0, 1.2),
        document: log_normal(3400.0, 1.1),
        documents: 0.4,
    },
    later: Text {
        typed: log_normal(100.0, 1.2),
        document: log_normal(2000.0, 1.0),
        documents: 0.3,
    },
    output: log_normal(120.0, 0.9),
    alpha: 0.5,
    beta: 3.0,
    think_mean_s: 60.0,
    recorded_s: 3600.0,
    longest: 131_072,
};

/// The shape of a source that is made up; `None` for one that is read from a file.
#[must_use]
pub fn of(source: Source) -> Option<Shape> {
    match source {
        Source::Conversation => Some(CONVERSATION),
        Source::Agent => Some(AGENT),
        Source::LongConversation => Some(LONG_CONVERSATION),
        Source::LongAgent => Some(LONG_AGENT),
        Source::Mooncake | Source::Azure | Source::Qwen | Source::Burstgpt => None,
    }
}
