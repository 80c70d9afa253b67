//! The requests that the engine gets, with their tokens. A timed model gets the workloads
//! unchanged, and a computed model gets them at a size that two cores can compute.
//!
//! A prompt begins with the reusable tokens of its prefix and continues with tokens of its own.
//! Both are drawn from seeds, so a configuration always gives the same prompts. The objectives of a
//! timed model are computed here ([`Ideal`]). Those of a computed model are known only after each
//! request was played alone.
//!
//! Hot prefixes are on unit 0, the *victim* of MFS §2.2. They are the most popular ones, up to a
//! given share of all reused tokens. The others are spread over the units. A fetched copy is not
//! kept, so a prefix stays on its unit (a full pool evicts copies first).

use std::collections::{BTreeMap, HashMap};

use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use crate::config::{Engine, LabConfig, WorkloadSource};
use crate::error::LabError;
use crate::ideal::{self, Ideal};
use crate::trace::{self, Fitting};
use crate::workload::{self, AGENT, CONVERSATION, Request, Synthetic};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Asked {
    /// Number of the request, from 1, in order of arrival.
    pub id: u64,
    pub arrival_ns: u64,
    pub tokens: u32,
    pub reused: u32,
    pub prefix: u64,
    pub decode: usize,
    /// Where the request is computed, if the lab decides it.
    pub placed: Option<Placed>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placed {
    pub host: usize,
    pub fetched: u32,
    pub ideal_ns: u64,
}

/// Number of different tokens of a prompt. The engine's endpoint takes bytes of text as tokens.
const BYTES: u32 = 256;

fn stream(seed: u64, number: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(number);
    rng
}

pub fn prefix_tokens(seed: u64, prefix: u64, count: u32) -> Vec<u32> {
    // The constant separates the streams of prefixes from those of requests' own tokens.
    let mut rng = stream(seed ^ 0x5052_4546_4958, prefix);
    (0..count).map(|_| rng.random_range(0..BYTES)).collect()
}

impl Asked {
    pub fn prompt(&self, seed: u64) -> Vec<u32> {
        let mut tokens = prefix_tokens(seed, self.prefix, self.reused);
        let mut rng = stream(seed, self.id);
        let own = self.tokens - self.reused;
        tokens.extend((0..own).map(|_| rng.random_range(0..BYTES)));
        tokens
    }
}

#[derive(Clone, Debug)]
pub struct Asking {
    pub requests: Vec<Request>,
    pub asked: Vec<Asked>,
    /// How a recording was fitted, if the requests come from one.
    pub fitting: Option<Fitting>,
}

/// Makes the requests of a configuration. The result is deterministic.
pub fn asking(config: &LabConfig) -> Result<Asking, LabError> {
    let (requests, fitting) = requests(config)?;
    let asked = requests.iter().enumerate().map(|(index, request)| Asked {
        id: index as u64 + 1,
        arrival_ns: (request.arrival_s * 1e9) as u64,
        tokens: request.tokens,
        reused: request.reused,
        prefix: request.prefix,
        decode: index % config.decodes,
        placed: None,
    });
    let mut asked: Vec<Asked> = asked.collect();
    place(config, &mut asked);
    Ok(Asking { requests, asked, fitting })
}

/// A function that makes the requests for a rate (requests per second) and a duration in seconds.
type Source = dyn Fn(f64, f64) -> (Vec<Request>, Option<Fitting>);

fn source(config: &LabConfig) -> Result<Box<Source>, LabError> {
    let (seed, longest) = (config.seed, config.tokens_max);
    let real = (config.engine != Engine::Timed).then(|| config.serving());
    let mean = real.as_ref().map_or(CONVERSATION.tokens_mean, |real| real.tokens_mean);
    Ok(match &config.workload {
        WorkloadSource::File(path) => {
            let recorded = trace::read(path)?;
            Box::new(move |rate, seconds| {
                let (requests, fitting) = trace::fit(&recorded, rate, seconds, mean, longest);
                (requests, Some(fitting))
            })
        }
        built_in => {
            let agent = *built_in == WorkloadSource::Agent;
            let what = if agent { AGENT } else { CONVERSATION };
            let scaled = Synthetic {
                tokens_mean: mean * what.tokens_mean / CONVERSATION.tokens_mean,
                prefixes: real.map_or(what.prefixes, |real| real.prefixes),
                ..what
            };
            Box::new(move |rate, s| (workload::synthesise(&scaled, seed, rate, s, longest), None))
        }
    })
}

fn requests(config: &LabConfig) -> Result<(Vec<Request>, Option<Fitting>), LabError> {
    // The rate for a load depends on the requests' sizes, which a large sample shows.
    const SAMPLE_RATE: f64 = 100.0;
    const SAMPLE_S: f64 = 50.0;
    const WINDOW_FITS: usize = 4;
    let (make, duration) = (source(config)?, config.duration_s);
    let rate = config.requests_per_second.unwrap_or_else(|| {
        let mut rate = rate_for_load(config, &make(SAMPLE_RATE, SAMPLE_S).0);
        // A short window differs from the average, especially of a bursty recording. Adjust the
        // rate until these requests offer the load, so that seeds are comparable.
        for _ in 0..WINDOW_FITS {
            let offered =
                busy_s(config, &make(rate, duration).0) / (config.units as f64 * duration);
            rate *= (config.load / offered.max(1e-3)).clamp(0.5, 2.0);
        }
        rate
    });
    let (requests, fitting) = make(rate, duration);
    if requests.is_empty() {
        return Err(LabError::Plan(format!(
            "nothing arrives in {duration} s: raise the load, the rate or the duration"
        )));
    }
    Ok((requests, fitting))
}

/// Returns the unit of each prefix. `uses` are the prefixes of requests with their reused tokens.
fn place_prefixes(
    uses: impl Iterator<Item = (u64, u32)>,
    units: usize,
    victim_share: f64,
) -> HashMap<u64, usize> {
    let mut reused: BTreeMap<u64, u64> = BTreeMap::new();
    for (prefix, tokens) in uses {
        *reused.entry(prefix).or_default() += u64::from(tokens);
    }
    let total: u64 = reused.values().sum();
    let mut by_heat: Vec<(u64, u64)> = reused.into_iter().collect();
    by_heat.sort_by_key(|&(prefix, tokens)| (std::cmp::Reverse(tokens), prefix));
    let mut on_victim = 0;
    let mut elsewhere = 0;
    let mut places = HashMap::new();
    for (prefix, tokens) in by_heat {
        let victim = (on_victim + tokens) as f64 <= victim_share * total as f64;
        let unit = if victim || units == 1 {
            on_victim += tokens;
            0
        } else {
            elsewhere += 1;
            1 + elsewhere % (units - 1)
        };
        places.insert(prefix, unit);
    }
    places
}

/// Returns how long the requests keep units busy when each runs alone, in s.
fn busy_s(config: &LabConfig, requests: &[Request]) -> f64 {
    let scaling = config.scaling();
    let service = |r: &Request| ideal::service_ns(&scaling, r.tokens - r.reused) as f64 / 1e9;
    requests.iter().map(service).sum()
}

/// Returns the requests per second that offer the configured load, for requests like the sample.
fn rate_for_load(config: &LabConfig, sample: &[Request]) -> f64 {
    let count = sample.len().max(1) as f64;
    config.load * config.units as f64 * count / busy_s(config, sample).max(1e-9)
}

/// Returns the prefill host that holds each prefix from the start. [`place_prefixes`] chooses the
/// unit, and its hosts take turns.
fn holders(asked: &[Asked], config: &LabConfig) -> BTreeMap<u64, usize> {
    let uses = asked.iter().map(|request| (request.prefix, request.reused));
    let units = place_prefixes(uses, config.units, config.victim_share);
    let mut next = vec![0; config.units];
    let mut holders = BTreeMap::new();
    for request in asked.iter().filter(|request| request.reused > 0) {
        holders.entry(request.prefix).or_insert_with(|| {
            let unit = units.get(&request.prefix).copied().unwrap_or(0);
            next[unit] += 1;
            config.prefill_host(unit, next[unit] % config.ranks)
        });
    }
    holders
}

/// Chooses a prefill host for each request of the timed engine, like a router that is aware of KV
/// (Dynamo's, MFS §6.1). It compares the estimated wait at each host with the cost of fetching the
/// prefix. It uses its own estimate of the hosts' backlog instead of feedback. With feedback a slow
/// policy would get another placement, and runs would not be comparable.
fn place(config: &LabConfig, asked: &mut [Asked]) {
    let Some(ideal) = Ideal::new(config) else { return };
    let holders = holders(asked, config);
    let mut idle_at_ns = vec![0_u64; config.prefills()];
    for request in asked {
        let new = request.tokens - request.reused;
        let fetched_at = |host| match holders.get(&request.prefix) {
            Some(holder) if *holder != host => request.reused,
            _ => 0,
        };
        let own_ns = ideal.ttft_ns(new, request.reused, 0);
        let host = (0..idle_at_ns.len()).min_by_key(|&host| {
            let wait = idle_at_ns[host].saturating_sub(request.arrival_ns);
            let alone = ideal.ttft_ns(new, request.reused, fetched_at(host));
            // Of equal hosts the longest idle one is chosen. Otherwise the first hosts of the first
            // unit would get most requests of a cluster that is hardly loaded.
            (wait + alone, idle_at_ns[host], host)
        });
        let host = host.unwrap_or(0);
        idle_at_ns[host] = idle_at_ns[host].max(request.arrival_ns) + own_ns;
        let fetched = fetched_at(host);
        request.placed =
            Some(Placed { host, fetched, ideal_ns: ideal.ttft_ns(new, request.reused, fetched) });
    }
}

/// Returns, for each host, the shared prompts whose KV it holds from the start. Decode hosts hold
/// none.
pub fn held(config: &LabConfig, asked: &[Asked]) -> Vec<Vec<Vec<u32>>> {
    let holders = holders(asked, config);
    let mut held = vec![Vec::new(); config.hosts()];
    for (prefix, tokens) in shared(asked) {
        held[holders[&prefix]].push(prefix_tokens(config.seed, prefix, tokens));
    }
    held
}

/// Returns the prefixes that are computed before a run, with the most tokens that a request shares,
/// most popular first.
pub fn shared(asked: &[Asked]) -> Vec<(u64, u32)> {
    let mut longest: BTreeMap<u64, (usize, u32)> = BTreeMap::new();
    for request in asked.iter().filter(|request| request.reused > 0) {
        let (wanted, tokens) = longest.entry(request.prefix).or_default();
        *wanted += 1;
        *tokens = (*tokens).max(request.reused);
    }
    let mut prefixes: Vec<_> = longest.into_iter().collect();
    prefixes.sort_by_key(|&(prefix, (wanted, _))| (std::cmp::Reverse(wanted), prefix));
    prefixes.into_iter().map(|(prefix, (_, tokens))| (prefix, tokens)).collect()
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
            placed: None,
        };
        let asked = [ask(1, 7, 16), ask(2, 3, 32), ask(3, 7, 48), ask(4, 9, 0)];
        assert_eq!(shared(&asked), [(7, 48), (3, 32)]);
    }

    fn conversation() -> Vec<Request> {
        workload::synthesise(&CONVERSATION, 3, 15.0, 60.0, 8192)
    }

    #[test]
    fn hot_prefixes_live_on_the_victim_up_to_its_share() {
        let requests = conversation();
        let places = place_prefixes(requests.iter().map(|r| (r.prefix, r.reused)), 3, 0.6);
        let total: u64 = requests.iter().map(|r| u64::from(r.reused)).sum();
        let victim = requests.iter().filter(|r| places[&r.prefix] == 0);
        let victim: u64 = victim.map(|r| u64::from(r.reused)).sum();
        assert!((victim as f64 / total as f64 - 0.6).abs() < 0.05);
        assert_eq!(places[&1], 0, "the hottest prefix of a Zipf law is number 1");
        assert!(places.values().any(|&unit| unit == 1) && places.values().any(|&unit| unit == 2));
    }

    #[test]
    fn load_is_balanced_although_the_prefixes_are_not_and_an_idle_holder_gets_its_request() {
        let config = LabConfig::default();
        let once = asking(&config).unwrap();
        let placed = |one: &Asked| one.placed.expect("the timed engine's are placed");
        for host in 0..config.prefills() {
            let here = once.asked.iter().filter(|one| placed(one).host == host);
            let share = here.count() as f64 / once.asked.len() as f64;
            assert!((0.04..0.35).contains(&share), "host {host} has {share}");
        }
        let fetch = once.asked.iter().filter(|one| placed(one).fetched > 0);
        assert!(fetch.count() * 5 > once.asked.len(), "hosts fetch");
        let mut one = once.asked[..1].to_vec();
        place(&config, &mut one);
        assert_eq!(placed(&one[0]).fetched, 0);
    }

    #[test]
    fn idle_hosts_take_turns() {
        let config = LabConfig::default();
        let mut few = asking(&config).unwrap().asked;
        let hosts = config.prefills();
        few.truncate(hosts);
        // An hour passes between two requests, which reuse nothing.
        for (number, asked) in few.iter_mut().enumerate() {
            asked.arrival_ns = number as u64 * 3_600_000_000_000;
            asked.reused = 0;
        }
        place(&config, &mut few);
        let chosen = few.iter().map(|one| one.placed.expect("it is placed").host);
        let mut chosen: Vec<usize> = chosen.collect();
        chosen.sort_unstable();
        assert_eq!(chosen, (0..hosts).collect::<Vec<_>>());
    }

    #[test]
    fn the_rate_for_a_load_is_proportional_to_it() {
        let at = |load| {
            let config = LabConfig { load, ..LabConfig::default() };
            rate_for_load(&config, &conversation())
        };
        assert!((at(1.0) / at(0.5) - 2.0).abs() < 1e-9);
    }
}
