//! The requests that the engine is asked, with their tokens. A model that is computed gets the
//! lab's workloads at a size that two cores compute, and a timed one the same arrivals as the
//! replay.
//!
//! A prompt begins with so many tokens of its prefix as the workload says are reusable, and goes on
//! with tokens that no other has. Both are drawn from seeds: the same configuration asks the same.
//! Objectives come later, when each request has been played alone.

use std::collections::BTreeMap;

use anyhow::bail;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use crate::config::{Engine, LabConfig, WorkloadSource};
use crate::lab;
use crate::plan::place_prefixes;
use crate::trace::{self, Fitting};
use crate::workload::{self, AGENT, CONVERSATION, Request, Synthetic};

/// A request with its place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Asked {
    /// From 1, in order of arrival.
    pub id: u64,
    /// When it arrives, ns after the start.
    pub arrival_ns: u64,
    /// Tokens of the prompt.
    pub tokens: u32,
    /// Leading tokens that it shares with others of its prefix.
    pub reused: u32,
    /// Which prefix.
    pub prefix: u64,
    /// The decode host that is asked.
    pub decode: usize,
}

/// Tokens of a prompt are bytes of text, as the engine's endpoint has them.
const BYTES: u32 = 256;

fn stream(seed: u64, number: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(number);
    rng
}

/// The first tokens of a prefix.
#[must_use]
pub fn prefix_tokens(seed: u64, prefix: u64, count: u32) -> Vec<u32> {
    // Streams of prefixes and of requests' own tokens are apart.
    let mut rng = stream(seed ^ 0x5052_4546_4958, prefix);
    (0..count).map(|_| rng.random_range(0..BYTES)).collect()
}

impl Asked {
    /// Its prompt.
    #[must_use]
    pub fn prompt(&self, seed: u64) -> Vec<u32> {
        let mut tokens = prefix_tokens(seed, self.prefix, self.reused);
        let mut rng = stream(seed, self.id);
        let own = self.tokens - self.reused;
        tokens.extend((0..own).map(|_| rng.random_range(0..BYTES)));
        tokens
    }
}

/// What is asked, and what it was made of.
#[derive(Clone, Debug)]
pub struct Asking {
    /// As generated or read.
    pub requests: Vec<Request>,
    /// With their places.
    pub asked: Vec<Asked>,
    /// How a recording was fitted.
    pub fitting: Option<Fitting>,
}

/// Makes what a configuration asks.
///
/// # Errors
/// The request file cannot be used, or nothing arrives within the duration.
pub fn asking(config: &LabConfig) -> anyhow::Result<Asking> {
    let (requests, fitting) = match config.engine {
        Engine::Timed => {
            let arrivals = lab::arrivals(config)?;
            (arrivals.requests, arrivals.fitting)
        }
        _ => requests(config)?,
    };
    let asked = requests
        .iter()
        .enumerate()
        .map(|(index, request)| Asked {
            id: index as u64 + 1,
            arrival_ns: (request.arrival_s * 1e9) as u64,
            tokens: request.tokens,
            reused: request.reused,
            prefix: request.prefix,
            decode: index % config.decodes,
        })
        .collect();
    Ok(Asking {
        requests,
        asked,
        fitting,
    })
}

/// The requests for a model that is computed.
fn requests(config: &LabConfig) -> anyhow::Result<(Vec<Request>, Option<Fitting>)> {
    let real = config.serving();
    let rate = config.requests_per_second.unwrap_or(1.0);
    let (duration, longest) = (config.duration_s, config.tokens_max);
    let (requests, fitting) = match &config.workload {
        WorkloadSource::File(path) => {
            let recorded = trace::read(path)?;
            let (requests, fitting) =
                trace::fit(&recorded, rate, duration, real.tokens_mean, longest);
            (requests, Some(fitting))
        }
        built_in => {
            let what = if *built_in == WorkloadSource::Agent {
                AGENT
            } else {
                CONVERSATION
            };
            let scaled = Synthetic {
                tokens_mean: real.tokens_mean * what.tokens_mean / CONVERSATION.tokens_mean,
                prefixes: real.prefixes,
                ..what
            };
            let requests = workload::synthesise(&scaled, config.seed, rate, duration, longest);
            (requests, None)
        }
    };
    if requests.is_empty() {
        bail!("nothing arrives in {duration} s: raise requests_per_second or the duration");
    }
    Ok((requests, fitting))
}

/// The prompts whose KV each prefill host has from the start, and each decode host (none): those
/// that the workload shares.
#[must_use]
pub fn held(config: &LabConfig, asked: &[Asked]) -> Vec<Vec<Vec<u32>>> {
    let requests: Vec<Request> = asked
        .iter()
        .map(|asked| Request {
            arrival_s: asked.arrival_ns as f64 / 1e9,
            tokens: asked.tokens,
            reused: asked.reused,
            prefix: asked.prefix,
        })
        .collect();
    let units = place_prefixes(&requests, config.units, config.victim_share);
    let mut held = vec![Vec::new(); config.hosts()];
    for (number, (prefix, tokens)) in shared(asked).into_iter().enumerate() {
        let unit = units.get(&prefix).copied().unwrap_or(0);
        let host = config.prefill_host(unit, number % config.ranks);
        held[host].push(prefix_tokens(config.seed, prefix, tokens));
    }
    held
}

/// The prefixes that are computed before a run, each as long as any request shares it, the most
/// wanted first.
#[must_use]
pub fn shared(asked: &[Asked]) -> Vec<(u64, u32)> {
    let mut longest: BTreeMap<u64, (usize, u32)> = BTreeMap::new();
    for request in asked.iter().filter(|request| request.reused > 0) {
        let (wanted, tokens) = longest.entry(request.prefix).or_default();
        *wanted += 1;
        *tokens = (*tokens).max(request.reused);
    }
    let mut prefixes: Vec<_> = longest.into_iter().collect();
    prefixes.sort_by_key(|&(prefix, (wanted, _))| (std::cmp::Reverse(wanted), prefix));
    prefixes
        .into_iter()
        .map(|(prefix, (_, tokens))| (prefix, tokens))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_a_prefix_begin_alike_and_go_on_apart_and_the_same_seed_asks_the_same() {
        let config = LabConfig::real();
        let once = asking(&config).unwrap();
        assert_eq!(once.asked, asking(&config).unwrap().asked);
        let by_prefix = |prefix| once.asked.iter().filter(move |a| a.prefix == prefix);
        let hot = shared(&once.asked)[0].0;
        let [first, second] = [0, 1].map(|n| by_prefix(hot).nth(n).unwrap());
        let (a, b) = (first.prompt(1), second.prompt(1));
        let alike = first.reused.min(second.reused) as usize;
        assert_eq!(a[..alike], b[..alike]);
        assert_ne!(a[first.reused as usize..], b[second.reused as usize..]);
        assert_ne!(first.prompt(1), first.prompt(2));
        assert_eq!(a.len(), first.tokens as usize);
    }

    #[test]
    fn shared_prefixes_are_as_long_as_anybody_wants_them() {
        let ask = |id, prefix, reused| Asked {
            id,
            arrival_ns: 0,
            tokens: 100,
            reused,
            prefix,
            decode: 0,
        };
        let asked = [ask(1, 7, 16), ask(2, 3, 32), ask(3, 7, 48), ask(4, 9, 0)];
        assert_eq!(shared(&asked), [(7, 48), (3, 32)]);
    }
}
