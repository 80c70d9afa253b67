//! The configuration of each host's engine, as the file that the engine reads.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::client::ENDPOINT;
use crate::config::LabConfig;
use crate::daemons::daemon_socket;
use crate::fabric;
use crate::serving::Device;

const PEERS_PORT: u16 = 7500;

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
    let (serving, times) = (config.serving(), config.times(host));
    let prefills = host < config.prefills();
    let mut engine = json!({
        "role": if prefills { "prefill" } else { "decode" },
        "listen": ENDPOINT,
        "device": match serving.device {
            Device::Cpu => "cpu",
            Device::Cuda => "cuda",
        },
        "model": {
            "name": "lab",
            "layers": serving.layers,
            "hidden": serving.hidden,
            "heads": serving.heads,
            "kv_heads": serving.kv_heads,
            "head_dim": serving.head_dim,
            "ffn": serving.ffn,
            "vocab": serving.vocab,
            "context": serving.context(config.tokens_max),
            "moe": { "experts": serving.experts, "per_token": serving.experts_per_token },
            "weights": { "seed": serving.weights_seed },
        },
        "kv": {
            "blocks": serving.kv_blocks,
            "block_tokens": serving.block_tokens,
            // A timed engine keeps no fetched copies, so hot prefixes stay on their hosts.
            "keep_fetched": times.is_none(),
        },
        "schedule": { "policy": serving.order, "tokens": serving.chunk_tokens },
        "limits": { "requests_max": 4096, "output_max": serving.output_tokens },
        "peers": peers(config, host, times.is_some()),
        "laxity": {
            "name": config.host_name(host),
            "words_dscp": fabric::WORDS_DSCP,
            "stall_ms": serving.stall_ms,
        },
    });
    if let Some(times) = times {
        engine["timing"] = json!(times);
        engine["timing"]["holds"] = json!(holds_file(folder, host));
    }
    if let Some(plugin) = plugin {
        engine["peers"]["nccl_plugin"] = json!(plugin);
    }
    if scheduled {
        engine["laxity"]["socket"] = json!(daemon_socket(folder, host));
    }
    toml::to_string(&toml::Table::try_from(engine)?)
}

fn peers(config: &LabConfig, host: usize, is_timed: bool) -> Value {
    let prefill_hosts = config.prefills();
    let prefills = host < prefill_hosts;
    let unit = host / config.ranks;
    // Each host begins with its successor, so that the hosts do not all ask the same one.
    let others = (1..prefill_hosts).map(|step| peer((host + step) % prefill_hosts));
    let experts = unit * config.ranks..(unit + 1) * config.ranks;
    let list = |wanted: bool, peers: Vec<SocketAddr>| if wanted { peers } else { Vec::new() };
    // The wait is long, so that no host computes KV itself because a link is slow. That would hide
    // the effect of the link.
    let patience_ms = ((config.duration_s + config.drain_s) * 1e3) as u64;
    json!({
        "listen": peer(host),
        "prefill": list(!prefills, (0..prefill_hosts).map(peer).collect()),
        "reuse": list(prefills, others.collect()),
        "experts": list(prefills, experts.map(peer).collect()),
        "lockstep": is_timed && prefills,
        "reads": config.reads,
        "patience_ms": patience_ms,
        "ask_ms": patience_ms,
    })
}

#[cfg(test)]
mod tests {
    use laxity_requests::engine_policy::Policy;

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
            assert_eq!(table["schedule"]["policy"].as_str(), Some(&*policy.to_string()));
        }
        let unknown = toml::from_str::<LabConfig>("[real]\norder = 'lifo'\n").unwrap_err();
        for policy in Policy::ALL {
            assert!(unknown.message().contains(&policy.to_string()), "{unknown}");
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
