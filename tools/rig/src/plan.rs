//! Where each request goes: its prefill unit, the unit that holds its prefix, its decode host,
//! and when its first token is due. Made once per lab run, before the first policy, so that all
//! policies get the same arrivals at the same places with the same deadlines.
//!
//! The router is KV-aware as Dynamo's is (MFS §6.1): it weighs the estimated wait at each unit
//! against fetching the prefix from elsewhere. It works from its own estimate of the units'
//! backlog, not from feedback: otherwise a policy that is slow in one place would be given
//! another placement, and the runs would not compare.
//!
//! Hot prefixes live on unit 0, the *victim* of MFS §2.2: the most popular ones, up to a given
//! share of all reused tokens. The others are spread. A fetched copy is not kept, so popularity
//! stays where it is (a pool under pressure evicts copies first).

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use crate::config::{LabConfig, Scaling};
use crate::ideal;
use crate::workload::Request;

/// A request with its place and its deadline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedRequest {
    /// From 1, in order of arrival.
    pub id: u64,
    /// When it arrives, ns after the start.
    pub arrival_ns: u64,
    /// Tokens that have to be computed.
    pub new_tokens: u32,
    /// Tokens whose KV cache is reused.
    pub reused: u32,
    /// The unit that prefills it.
    pub unit: usize,
    /// The unit that holds the reused KV cache. Where it is `unit`, nothing is fetched.
    pub holder: usize,
    /// The decode worker that takes it over.
    pub decode: usize,
    /// Contention-free TTFT, ns.
    pub ideal_ns: u64,
    /// TTFT objective, ns after the arrival.
    pub slo_ns: u64,
}

impl PlannedRequest {
    /// Tokens whose KV cache comes over the network.
    #[must_use]
    pub fn fetched(&self) -> u32 {
        if self.holder == self.unit {
            0
        } else {
            self.reused
        }
    }

    /// Tokens whose KV cache decode needs.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        self.new_tokens + self.reused
    }
}

/// Which unit holds which prefix.
#[must_use]
pub fn place_prefixes(
    requests: &[Request],
    units: usize,
    victim_share: f64,
) -> HashMap<u64, usize> {
    let mut reused: BTreeMap<u64, u64> = BTreeMap::new();
    for request in requests {
        *reused.entry(request.prefix).or_default() += u64::from(request.reused);
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

/// Routes every request and gives it its deadline.
#[must_use]
pub fn route(requests: &[Request], config: &LabConfig) -> Vec<PlannedRequest> {
    let scaling = config.scaling();
    let places = place_prefixes(requests, config.units, config.victim_share);
    let mut idle_at_ns = vec![0_u64; config.units];
    requests
        .iter()
        .enumerate()
        .map(|(index, request)| {
            let arrival_ns = (request.arrival_s * 1e9) as u64;
            let holder = places.get(&request.prefix).copied().unwrap_or(0);
            let service = ideal::service_ns(&scaling, request.new_tokens());
            let unit = (0..config.units)
                .min_by_key(|&unit| {
                    let wait = idle_at_ns[unit].saturating_sub(arrival_ns);
                    let fetch = if unit == holder {
                        0
                    } else {
                        fetch_ns(&scaling, request.reused)
                    };
                    (wait + fetch, unit)
                })
                .unwrap_or(0);
            idle_at_ns[unit] = idle_at_ns[unit].max(arrival_ns) + service;
            let fetched = if unit == holder { 0 } else { request.reused };
            let ideal_ns = ideal::ttft_ns(&scaling, request.new_tokens(), request.reused, fetched);
            PlannedRequest {
                id: index as u64 + 1,
                arrival_ns,
                new_tokens: request.new_tokens(),
                reused: request.reused,
                unit,
                holder,
                decode: index % config.decodes,
                ideal_ns,
                slo_ns: (ideal_ns as f64 * config.slo_scale) as u64,
            }
        })
        .collect()
}

/// Time to fetch a prefix, all layers, on an idle fabric.
fn fetch_ns(scaling: &Scaling, tokens: u32) -> u64 {
    let bytes = scaling.kv_bytes(tokens) * u64::from(scaling.layers);
    (bytes as f64 * 1e9 / scaling.goodput_bytes_per_s) as u64
}

/// Time for which the requests keep units busy when each runs alone, s.
fn busy_s(config: &LabConfig, requests: &[Request]) -> f64 {
    let scaling = config.scaling();
    let service = |r: &Request| ideal::service_ns(&scaling, r.new_tokens()) as f64 / 1e9;
    requests.iter().map(service).sum()
}

/// Requests per second that offer the configured load to the units, given what the requests are
/// like.
#[must_use]
pub fn rate_for_load(config: &LabConfig, sample: &[Request]) -> f64 {
    let count = sample.len().max(1) as f64;
    config.load * config.units as f64 * count / busy_s(config, sample).max(1e-9)
}

/// Load that requests which arrive within the configured duration offer.
#[must_use]
pub fn offered_load(config: &LabConfig, requests: &[Request]) -> f64 {
    busy_s(config, requests) / (config.units as f64 * config.duration_s)
}

/// Whether these requests load a decode port more than a prefill port: only then is the receiving
/// side of a hand-over its bottleneck.
#[must_use]
pub fn decode_bound(plan: &[PlannedRequest], config: &LabConfig) -> bool {
    let scaling = config.scaling();
    let layers = u64::from(scaling.layers);
    let mut decode = vec![0_u64; config.decodes];
    let mut prefill = vec![0_u64; config.units];
    for request in plan {
        let kv = layers * scaling.kv_bytes(request.tokens());
        let peers = scaling.ranks as u64 - 1;
        let collective = 2 * layers * peers * scaling.collective_bytes(request.new_tokens);
        decode[request.decode] += kv * scaling.ranks as u64;
        prefill[request.unit] += kv + collective;
        if request.fetched() > 0 {
            prefill[request.holder] += layers * scaling.kv_bytes(request.fetched());
        }
    }
    decode.iter().max() > prefill.iter().max()
}

/// A few requests of the plan, far enough apart to have the fabric to themselves.
#[must_use]
pub fn one_by_one(plan: &[PlannedRequest], count: usize) -> Vec<PlannedRequest> {
    let mut arrival_ns = 0;
    // Every unit and both kinds of reuse should be among them, so step through the plan.
    let step = (plan.len() / count.max(1)).max(1);
    plan.iter()
        .step_by(step)
        .take(count)
        .zip(1..)
        .map(|(request, id)| {
            let alone = PlannedRequest {
                id,
                arrival_ns,
                ..request.clone()
            };
            arrival_ns += request.ideal_ns * 3 / 2;
            alone
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{CONVERSATION, synthesise};
    use proptest::prelude::*;

    fn requests() -> Vec<Request> {
        synthesise(&CONVERSATION, 3, 15.0, 60.0, 8192)
    }

    #[test]
    fn hot_prefixes_live_on_the_victim_up_to_its_share() {
        let requests = requests();
        let places = place_prefixes(&requests, 3, 0.6);
        let total: u64 = requests.iter().map(|r| u64::from(r.reused)).sum();
        let victim: u64 = requests
            .iter()
            .filter(|r| places[&r.prefix] == 0)
            .map(|r| u64::from(r.reused))
            .sum();
        assert!((victim as f64 / total as f64 - 0.6).abs() < 0.05);
        assert_eq!(
            places[&1], 0,
            "the hottest prefix of a Zipf law is number 1"
        );
        assert!(places.values().any(|&unit| unit == 1) && places.values().any(|&unit| unit == 2));
    }

    #[test]
    fn load_is_balanced_although_the_prefixes_are_not() {
        let config = LabConfig::default();
        let plan = route(&requests(), &config);
        for unit in 0..config.units {
            let share = plan.iter().filter(|r| r.unit == unit).count() as f64 / plan.len() as f64;
            assert!((0.2..0.5).contains(&share), "unit {unit} has {share}");
        }
        let fetched = plan.iter().filter(|r| r.fetched() > 0).count() as f64;
        assert!(
            fetched / plan.len() as f64 > 0.2,
            "units fetch from each other"
        );
    }

    #[test]
    fn an_idle_holder_gets_the_request() {
        let config = LabConfig::default();
        let one = Request {
            arrival_s: 0.0,
            tokens: 2000,
            reused: 1000,
            prefix: 5,
        };
        let plan = route(&[one], &config);
        assert_eq!(plan[0].unit, plan[0].holder);
        assert_eq!(plan[0].fetched(), 0);
    }

    #[test]
    fn the_rate_for_a_load_is_proportional_to_it() {
        let config = LabConfig {
            load: 0.5,
            ..LabConfig::default()
        };
        let double = LabConfig {
            load: 1.0,
            ..LabConfig::default()
        };
        let sample = requests();
        let ratio = rate_for_load(&double, &sample) / rate_for_load(&config, &sample);
        assert!((ratio - 2.0).abs() < 1e-9);
    }

    #[test]
    fn one_by_one_leaves_room_between_requests() {
        let plan = route(&requests(), &LabConfig::default());
        let alone = one_by_one(&plan, 8);
        assert_eq!(alone.len(), 8);
        for pair in alone.windows(2) {
            assert!(pair[1].arrival_ns >= pair[0].arrival_ns + pair[0].ideal_ns);
        }
    }

    proptest! {
        #[test]
        fn a_deadline_is_the_same_multiple_of_every_requests_ideal(scale in 1.0..10.0_f64) {
            let config = LabConfig { slo_scale: scale, ..LabConfig::default() };
            for request in route(&requests()[..50], &config) {
                let expected = request.ideal_ns as f64 * scale;
                prop_assert!((request.slo_ns as f64 - expected).abs() <= 1.0);
            }
        }
    }
}
