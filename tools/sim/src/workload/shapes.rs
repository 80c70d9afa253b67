//! Shapes of generated workloads: the parameters of [`Source`]'s generators.
//!
//! | shape | stands for | mean prompt | reuse | block |
//! |---|---|---|---|---|
//! | conversation | QwenA-Conv, MFS §6.2 | 2 k tokens | 50 % | 16 |
//! | agent | QwenB-Agent, MFS §6.2 | 1 k tokens | 65 % | 16 |
//! | long conversation | Mooncake's conversations, MFS §6.3 | 15 k tokens | 40 % | 512 |
//! | long agent | Mooncake's tools and agents, MFS §6.3 | 9 k tokens | 65 % | 512 |
//!
//! Mean and reuse are the paper's. Reuse is that of an unbounded cache, in tokens (see
//! [`Summary`](super::Summary)). Measured over 16 seeds with 20 000 requests in 60 s, lowest to
//! highest:
//!
//! | shape | mean prompt | reuse | median / 99th percentile |
//! |---|---|---|---|
//! | conversation | 1917–2053 | 0.482–0.511 | 0.95 k / 15 k |
//! | agent | 996–1018 | 0.649–0.664 | 0.75 k / 4.3 k |
//! | long conversation | 14.8 k–15.4 k | 0.387–0.414 | 8.9 k / 95 k |
//! | long agent | 8.9 k–9.2 k | 0.640–0.662 | 7 k / 39 k |
//!
//! Fewer requests have less reuse, because each template is new once: 0.63 for 5000 agent requests
//! and 0.54 for 1000. The same holds for a truncated recording.
//!
//! The shapes also reflect:
//!
//! * *Turns* of a session: after turn `k` it continues with probability `(α + k − 1) / (α + β + k −
//!   1)`, so longer sessions are more likely to continue. Mooncake's published conversations, split
//!   into sessions by their blocks, continue with 25, 39, 49, 56, 60, 66 % after turns 1 to 6. α =
//!   1.17 and β = 3.45 match this within 2 points. Less than 0.1 % of Qwen-B's requests are later
//!   turns, and 97 % of the hits come from single requests (Wang et al., *KVCache Cache in the
//!   Wild*, ATC '25). Agents here seldom continue.
//! * *Think time* is log-normal with σ = 1.04, fitted to Mooncake's conversations (mean 212 s,
//!   median 123 s, 99th percentile 1458 s). In Qwen-A 80 % of reuse is within 10 minutes, so the
//!   mean of an exponential distribution is 373 s.
//! * *Texts* are a mixture of typed texts and documents, both log-normal. Mooncake's first prompts
//!   are log-normal with σ = 1.15. Half of its later turns' texts have at most 26 tokens, and a
//!   tenth more than 4 k.
//! * *Shared prefixes*: all of Mooncake's conversations share their first 512 tokens. Agents share
//!   templates with Zipf popularity. In Qwen's traces 10 % of all blocks have 77 % of the hits.
//!
//! Assumptions without a source are the sizes of Qwen's texts, the number of templates and the
//! turns of long agents. They are chosen to match mean and reuse. Long conversations are the
//! published trace (12 k tokens, 37 % reuse), a quarter longer and with slightly more turns, to
//! match the paper's 15 k and 40 %.

use crate::scenario::Source;

#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    pub block_tokens: u32,
    /// Number of prefixes that sessions share, such as system prompts and templates.
    pub prefixes: u32,
    pub zipf: f64,
    /// Mean length of the prefixes over requests. Lengths are scaled to match it for each seed.
    pub prefix_mean: f64,
    pub prefix_sigma: f64,
    pub first: Text,
    pub later: Text,
    pub output: LogNormal,
    /// Parameter α of the probability that a session continues.
    pub alpha: f64,
    /// Parameter β of the probability that a session continues.
    pub beta: f64,
    /// Mean time from a turn to the next, in seconds.
    pub think_mean_s: f64,
    /// Length of the recording that the parameters are from, in seconds.
    pub recorded_s: f64,
    pub longest: u32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Text {
    pub typed: LogNormal,
    pub document: LogNormal,
    /// Share of texts that are documents.
    pub documents: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogNormal {
    pub median: f64,
    pub sigma: f64,
}

pub const THINK_SIGMA: f64 = 1.04;

pub const MOST_TURNS: u32 = 64;

const fn log_normal(median: f64, sigma: f64) -> LogNormal {
    LogNormal { median, sigma }
}

const fn text(typed: LogNormal, document: LogNormal, documents: f64) -> Text {
    Text { typed, document, documents }
}

const CONVERSATION: Shape = Shape {
    block_tokens: 16,
    prefixes: 16,
    zipf: 1.0,
    prefix_mean: 260.0,
    prefix_sigma: 0.8,
    first: text(log_normal(75.0, 1.2), log_normal(1430.0, 1.0), 0.4),
    later: text(log_normal(45.0, 1.2), log_normal(790.0, 1.0), 0.25),
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
    first: text(log_normal(80.0, 1.2), log_normal(600.0, 1.0), 0.2),
    later: text(log_normal(60.0, 1.0), log_normal(600.0, 1.0), 0.2),
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
    first: text(log_normal(6500.0, 1.15), log_normal(6500.0, 1.15), 0.0),
    later: text(log_normal(30.0, 1.5), log_normal(3400.0, 1.0), 0.35),
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
    first: text(log_normal(600.0, 1.2), log_normal(3400.0, 1.1), 0.4),
    later: text(log_normal(100.0, 1.2), log_normal(2000.0, 1.0), 0.3),
    output: log_normal(120.0, 0.9),
    alpha: 0.5,
    beta: 3.0,
    think_mean_s: 60.0,
    recorded_s: 3600.0,
    longest: 131_072,
};

/// Returns the shape of a generated source, or `None` for one that is read from a file.
pub fn of(source: Source) -> Option<Shape> {
    match source {
        Source::Conversation => Some(CONVERSATION),
        Source::Agent => Some(AGENT),
        Source::LongConversation => Some(LONG_CONVERSATION),
        Source::LongAgent => Some(LONG_AGENT),
        Source::Mooncake | Source::Azure | Source::Qwen | Source::Burstgpt => None,
    }
}
