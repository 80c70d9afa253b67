//! The configuration of each host's engine, as the file that the engine reads.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use laxity_requests::engine_policy::Policy;
use serde::Serialize;

use crate::client::ENDPOINT;
use crate::config::LabConfig;
use crate::daemons::daemon_socket;
use crate::fabric;
use crate::serving::{Device, ServingConfig, Times};

/// Port on which engines listen for each other.
const PEERS_PORT: u16 = 7500;

#[derive(Serialize)]
struct EngineToml<'a> {
    role: &'a str,
    listen: SocketAddr,
    device: &'a str,
    model: Model<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timing: Option<Timing>,
    kv: Kv,
    schedule: Schedule,
    limits: Limits,
    peers: Peers<'a>,
    laxity: Daemon,
}

#[derive(Serialize)]
struct Model<'a> {
    name: &'a str,
    layers: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    ffn: usize,
    vocab: usize,
    context: u32,
    moe: Moe,
    weights: Weights,
}

#[derive(Serialize)]
struct Moe {
    experts: usize,
    per_token: usize,
}

#[derive(Serialize)]
struct Weights {
    seed: u64,
}

#[derive(Serialize)]
struct Timing {
    #[serde(flatten)]
    times: Times,
    holds: PathBuf,
}

#[derive(Serialize)]
struct Kv {
    blocks: u32,
    block_tokens: u32,
    keep_fetched: bool,
}

#[derive(Serialize)]
struct Schedule {
    policy: Policy,
    tokens: u32,
}

#[derive(Serialize)]
struct Limits {
    requests_max: usize,
    output_max: u32,
}

#[derive(Serialize)]
struct Peers<'a> {
    listen: SocketAddr,
    prefill: Vec<SocketAddr>,
    reuse: Vec<SocketAddr>,
    experts: Vec<SocketAddr>,
    lockstep: bool,
    reads: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    nccl_plugin: Option<&'a Path>,
    dispatch: &'static str,
    patience_ms: u64,
    ask_ms: u64,
}

#[derive(Serialize)]
struct Daemon {
    #[serde(skip_serializing_if = "Option::is_none")]
    socket: Option<PathBuf>,
    name: String,
    words_dscp: u8,
    stall_ms: u64,
}

fn peer(host: usize) -> SocketAddr {
    SocketAddr::from((fabric::address(host), PEERS_PORT))
}

/// Returns the file that lists the prompts whose KV a host's engine holds from the start.
pub(super) fn holds_file(folder: &Path, host: usize) -> PathBuf {
    folder.join(format!("holds{host}.json"))
}

pub fn engine_toml(
    config: &LabConfig,
    folder: &Path,
    host: usize,
    scheduled: bool,
    plugin: Option<&Path>,
) -> Result<String, toml::ser::Error> {
    let serving = config.serving();
    let times = config.times(host);
    let prefills = host < config.units * config.ranks;
    toml::to_string(&EngineToml {
        role: if prefills { "prefill" } else { "decode" },
        listen: ENDPOINT,
        device: match serving.device {
            Device::Cpu => "cpu",
            Device::Cuda => "cuda",
        },
        model: model(&serving, config.tokens_max),
        timing: times.map(|times| Timing { times, holds: holds_file(folder, host) }),
        kv: Kv {
            blocks: serving.kv_blocks,
            block_tokens: serving.block_tokens,
            // A timed engine keeps no fetched copies, so hot prefixes stay on their hosts.
            keep_fetched: times.is_none(),
        },
        schedule: Schedule { policy: serving.order, tokens: serving.chunk_tokens },
        limits: Limits { requests_max: 4096, output_max: serving.output_tokens },
        peers: peers(config, host, times.is_some(), plugin),
        laxity: Daemon {
            socket: scheduled.then(|| daemon_socket(folder, host)),
            name: config.host_name(host),
            words_dscp: fabric::WORDS_DSCP,
            stall_ms: serving.stall_ms,
        },
    })
}

fn model(serving: &ServingConfig, tokens_max: u32) -> Model<'_> {
    Model {
        name: "lab",
        layers: serving.layers,
        hidden: serving.hidden,
        heads: serving.heads,
        kv_heads: serving.kv_heads,
        head_dim: serving.head_dim,
        ffn: serving.ffn,
        vocab: serving.vocab,
        context: serving.context(tokens_max),
        moe: Moe { experts: serving.experts, per_token: serving.experts_per_token },
        weights: Weights { seed: serving.weights_seed },
    }
}

/// Returns the processes with which a host exchanges KV caches and experts' tokens.
fn peers<'a>(
    config: &LabConfig,
    host: usize,
    is_timed: bool,
    plugin: Option<&'a Path>,
) -> Peers<'a> {
    let prefill_hosts = config.units * config.ranks;
    let prefills = host < prefill_hosts;
    let unit = host / config.ranks;
    // Each host begins with its successor, so that the hosts do not all ask the same one.
    let others = (1..prefill_hosts).map(|step| peer((host + step) % prefill_hosts));
    // The wait is long, so that no host computes KV itself because a link is slow. That would hide
    // the effect of the link.
    let patience = Duration::from_secs_f64(config.duration_s + config.drain_s);
    Peers {
        listen: peer(host),
        prefill: if prefills { Vec::new() } else { (0..prefill_hosts).map(peer).collect() },
        reuse: if prefills { others.collect() } else { Vec::new() },
        experts: if prefills {
            (unit * config.ranks..(unit + 1) * config.ranks).map(peer).collect()
        } else {
            Vec::new()
        },
        lockstep: is_timed && prefills,
        reads: config.reads,
        nccl_plugin: plugin,
        // Both rules are fair. Only `least_loaded` considers what other decode hosts send.
        dispatch: if is_timed { "least_loaded" } else { "fewest" },
        patience_ms: patience.as_millis() as u64,
        ask_ms: patience.as_millis() as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_of_the_engine_can_be_asked_for_and_reaches_its_configuration() {
        for policy in Policy::ALL {
            let text = format!("engine = 'real'\n[real]\norder = '{policy}'\n");
            let read: LabConfig = toml::from_str(&text).unwrap();
            let mut config = LabConfig::real();
            config.real = read.real;
            config.validate().unwrap();
            let written = engine_toml(&config, Path::new("lab"), 0, false, None).unwrap();
            let table: toml::Table = toml::from_str(&written).unwrap();
            assert_eq!(table["schedule"]["policy"].as_str(), Some(policy.name()));
        }
        let unknown = toml::from_str::<LabConfig>("[real]\norder = 'lifo'\n").unwrap_err();
        for policy in Policy::ALL {
            assert!(unknown.message().contains(policy.name()), "{unknown}");
        }
    }

    #[test]
    fn each_host_has_its_role_and_knows_the_others() {
        let config = LabConfig::real();
        let table = |host, scheduled| -> toml::Table {
            engine_toml(&config, Path::new("/run/lab/1"), host, scheduled, None)
                .unwrap()
                .parse()
                .unwrap()
        };
        let prefill = table(0, true);
        assert_eq!(prefill["role"].as_str(), Some("prefill"));
        assert_eq!(prefill["peers"]["experts"].as_array().unwrap().len(), 2);
        assert_eq!(prefill["peers"]["reuse"][0].as_str(), Some("10.77.0.2:7500"));
        assert_eq!(prefill["laxity"]["socket"].as_str(), Some("/run/lab/1/laxityd0.sock"));
        let decode = table(3, false);
        assert_eq!(decode["role"].as_str(), Some("decode"));
        assert_eq!(decode["peers"]["prefill"].as_array().unwrap().len(), 2);
        assert!(decode["laxity"].get("socket").is_none(), "unscheduled is without a socket");
    }
}
