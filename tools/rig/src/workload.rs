//! The requests of a run: built-in generators with published statistics, or a request file.
//!
//! *Conversation* and *agent* follow the statistics that MFS §6.2 gives for its Qwen traces: 2k
//! tokens on average with half of them reusable, and 1k with 65 %. Arrivals are Poisson. Lengths
//! have a heavy tail (log-normal). Prefixes have a Zipf popularity, so a few are hot.
//!
//! The same seed gives the same requests. Results include the [`digest`], so anybody can check.

use rand::RngExt as _;
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution as _, Exp, LogNormal, Zipf};
use serde::{Deserialize, Serialize};

/// One prompt, without a placement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    pub arrival_s: f64,
    pub tokens: u32,
    /// Leading tokens whose KV cache exists on some host already. Less than `tokens`.
    pub reused: u32,
    /// Number of the prefix. Equal numbers are in the same place.
    pub prefix: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Synthetic {
    pub tokens_mean: f64,
    /// Standard deviation of the logarithm of the length. A larger one gives a heavier tail.
    pub tokens_sigma: f64,
    pub reuse: f64,
    pub prefixes: u32,
    pub zipf: f64,
}

/// Statistics of QwenA-Conv in MFS §6.2.
pub const CONVERSATION: Synthetic =
    Synthetic { tokens_mean: 2000.0, tokens_sigma: 0.7, reuse: 0.5, prefixes: 256, zipf: 1.0 };

/// Statistics of QwenB-Agent in MFS §6.2. Prompts are shorter, and more requests share a prefix.
pub const AGENT: Synthetic =
    Synthetic { tokens_mean: 1000.0, tokens_sigma: 0.7, reuse: 0.65, prefixes: 64, zipf: 1.2 };

/// Share of requests that open a conversation. They reuse at most a system prompt.
const OPENING_SHARE: f64 = 0.2;

pub fn synthesise(
    what: &Synthetic,
    seed: u64,
    requests_per_s: f64,
    duration_s: f64,
    tokens_max: u32,
) -> Vec<Request> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let gap = Exp::new(requests_per_s).expect("the rate is above zero");
    let sigma = what.tokens_sigma;
    let length = LogNormal::new(what.tokens_mean.ln() - sigma * sigma / 2.0, sigma)
        .expect("sigma is finite");
    let popularity = Zipf::new(f64::from(what.prefixes), what.zipf).expect("zipf is valid");
    // An opening request reuses up to a tenth. The others reuse enough for the published mean.
    let opening_mean = 0.05;
    let turn_mean = (what.reuse - OPENING_SHARE * opening_mean) / (1.0 - OPENING_SHARE);
    let spread = (0.97 - turn_mean).min(turn_mean).min(0.2);
    let mut requests = Vec::new();
    let mut arrival_s = 0.0;
    loop {
        // Every request draws the same number of times, so clipping one does not change later ones.
        arrival_s += gap.sample(&mut rng);
        let tokens = length.sample(&mut rng).round().clamp(64.0, f64::from(tokens_max)) as u32;
        let opening = rng.random::<f64>() < OPENING_SHARE;
        let place = rng.random::<f64>();
        let prefix = popularity.sample(&mut rng) as u64;
        if arrival_s >= duration_s {
            return requests;
        }
        let share = if opening {
            2.0 * opening_mean * place
        } else {
            turn_mean + spread * (2.0 * place - 1.0)
        };
        let reused = (f64::from(tokens) * share) as u32 / BLOCK_TOKENS * BLOCK_TOKENS;
        requests.push(Request { arrival_s, tokens, reused: reused.min(tokens - 1), prefix });
    }
}

const BLOCK_TOKENS: u32 = 16;

/// Returns FNV-1a over all fields of the requests. Runs with the same digest had the same arrivals.
pub fn digest(requests: &[Request]) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut take = |word: u64| {
        for byte in word.to_le_bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    for request in requests {
        take(request.arrival_s.to_bits());
        take(u64::from(request.tokens));
        take(u64::from(request.reused));
        take(request.prefix);
    }
    format!("{hash:016x}")
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Statistics {
    pub requests: usize,
    pub tokens_mean: f64,
    pub reuse: f64,
    pub requests_per_s: f64,
}

pub fn statistics(requests: &[Request], duration_s: f64) -> Statistics {
    let tokens: f64 = requests.iter().map(|r| f64::from(r.tokens)).sum();
    let reused: f64 = requests.iter().map(|r| f64::from(r.reused)).sum();
    let count = requests.len().max(1) as f64;
    Statistics {
        requests: requests.len(),
        tokens_mean: tokens / count,
        reuse: if tokens > 0.0 { reused / tokens } else { 0.0 },
        requests_per_s: requests.len() as f64 / duration_s,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn long(what: &Synthetic) -> Vec<Request> {
        synthesise(what, 7, 50.0, 400.0, u32::MAX)
    }

    #[test]
    fn conversation_and_agent_have_their_published_statistics() {
        for (what, tokens_mean, reuse) in [(CONVERSATION, 2000.0, 0.5), (AGENT, 1000.0, 0.65)] {
            let found = statistics(&long(&what), 400.0);
            assert!((found.tokens_mean / tokens_mean - 1.0).abs() < 0.05, "{found:?}");
            assert!((found.reuse - reuse).abs() < 0.03, "{found:?}");
            assert!((found.requests_per_s / 50.0 - 1.0).abs() < 0.05, "{found:?}");
        }
    }

    #[test]
    fn arrivals_are_poisson_so_gaps_vary_as_much_as_they_last() {
        let requests = long(&CONVERSATION);
        let gaps: Vec<f64> =
            requests.windows(2).map(|pair| pair[1].arrival_s - pair[0].arrival_s).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!((variance.sqrt() / mean - 1.0).abs() < 0.05);
    }

    #[test]
    fn lengths_have_a_heavy_tail_and_prefixes_have_hot_ones() {
        let requests = long(&CONVERSATION);
        let mut lengths: Vec<u32> = requests.iter().map(|r| r.tokens).collect();
        lengths.sort_unstable();
        let p50 = lengths[lengths.len() / 2];
        let p99 = lengths[lengths.len() * 99 / 100];
        assert!(p99 > 4 * p50, "p50 {p50}, p99 {p99}");
        let hottest = requests.iter().filter(|r| r.prefix == 1).count() as f64;
        assert!(hottest / requests.len() as f64 > 0.1);
    }

    proptest! {
        #[test]
        fn the_same_seed_gives_the_same_arrivals_and_another_seed_others(seed in any::<u64>()) {
            let once = synthesise(&AGENT, seed, 20.0, 5.0, 4096);
            let again = synthesise(&AGENT, seed, 20.0, 5.0, 4096);
            let other = synthesise(&AGENT, seed ^ 1, 20.0, 5.0, 4096);
            prop_assert_eq!(digest(&once), digest(&again));
            prop_assert_ne!(digest(&once), digest(&other));
            prop_assert!(once.iter().all(|r| r.reused < r.tokens && r.tokens <= 4096));
            prop_assert!(once.is_sorted_by(|a, b| a.arrival_s <= b.arrival_s));
        }
    }
}
