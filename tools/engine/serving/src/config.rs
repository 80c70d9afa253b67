//! The configuration, which is one TOML file. An error names the field, its value and the values
//! that are allowed.

mod check;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use laxity_files::{CONFIG_BYTES_MAX, ReadError};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::apart::PeerAddresses;
use crate::apart::experts::Ranks;
use crate::model::ModelShape;
use crate::model::shape::ShapeError;
use crate::model::timed::Timing;
use crate::schedule::{Room, Settings};

/// The role of a process: the part of serving that it does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    #[default]
    Whole,
    Prefill,
    Decode,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compute {
    /// The first GPU in `CUDA_VISIBLE_DEVICES`, or the CPU if there is no GPU or the program was
    /// built without CUDA.
    #[default]
    Auto,
    /// The CPU, also if there is a GPU.
    Cpu,
    /// The first GPU in `CUDA_VISIBLE_DEVICES`. Without a GPU the start fails.
    Cuda,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The part of serving that this process does.
    #[serde(default)]
    pub role: Role,
    /// Address of the endpoint. `whole` and `decode` answer completions there, and every role
    /// answers health and metrics. Port 0 means a free port.
    #[serde(default = "listen")]
    pub listen: SocketAddr,
    #[serde(default)]
    pub device: Compute,
    pub model: ModelShape,
    /// The timed model. With it nothing is computed, and `device` and the weights have no effect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timing: Option<Timing>,
    #[serde(default)]
    pub kv: Kv,
    #[serde(default)]
    pub schedule: Settings,
    #[serde(default)]
    pub limits: Limits,
    /// The other processes that this process exchanges data with.
    pub peers: Option<Peers>,
    #[serde(default)]
    pub laxity: Laxity,
}

fn listen() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 8000))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Kv {
    pub blocks: u32,
    pub block_tokens: u32,
    /// Whether later prompts reuse KV that another process sent.
    pub keep_fetched: bool,
}

impl Default for Kv {
    fn default() -> Self {
        Self { blocks: 1024, block_tokens: 16, keep_fetched: true }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Maximum number of requests at once. The endpoint answers further ones with status 429.
    pub requests_max: usize,
    /// Tokens of an answer if the request does not say.
    pub output_default: u32,
    pub output_max: u32,
    /// Maximum number of bytes of a request's body.
    pub body_bytes_max: usize,
    /// Objective for the first token if the request does not say, in milliseconds.
    pub ttft_ms: f64,
    /// Objective for the time between tokens, in milliseconds.
    pub tpot_ms: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            requests_max: 256,
            output_default: 16,
            output_max: 4096,
            body_bytes_max: 8 << 20,
            ttft_ms: 5_000.0,
            tpot_ms: 200.0,
        }
    }
}

/// The other processes that this process exchanges data with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peers {
    /// Address at which this process listens for its peers. It is also the name by which peers
    /// identify this process, so they must be able to reach it.
    pub listen: SocketAddr,
    /// Addresses of the processes that compute prompts. Only for role `decode`.
    #[serde(default)]
    pub prefill: Vec<SocketAddr>,
    /// Addresses of the processes that are asked for KV of a prompt's beginning.
    #[serde(default)]
    pub reuse: Vec<SocketAddr>,
    /// Addresses of the processes that hold the experts. Expert `e` is on process `e mod n` of this
    /// list, and this process must be in it.
    #[serde(default)]
    pub experts: Vec<SocketAddr>,
    /// Whether the processes of `experts` compute each layer together, like ranks with
    /// data-parallel attention. Only for a timed model. A process that was restarted cannot rejoin.
    #[serde(default)]
    pub lockstep: bool,
    /// Whether this process reads KV of `reuse` under permits of its own daemon. Otherwise the
    /// processes of `reuse` send it under permits of their daemons.
    #[serde(default)]
    pub reads: bool,
    /// The NCCL net plugin that carries the exchanges of ranks in lockstep. Without it they use the
    /// same connections as all other parcels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nccl_plugin: Option<PathBuf>,
    /// Longest wait of a computation for another process, in ms. Then it continues without that
    /// process.
    #[serde(default = "patience_ms")]
    pub patience_ms: u64,
    /// Longest wait for one process of `reuse` to say whether it has KV, in milliseconds. After it
    /// the next process is asked.
    #[serde(default = "ask_ms")]
    pub ask_ms: u64,
}

const fn ask_ms() -> u64 {
    500
}

const fn patience_ms() -> u64 {
    30_000
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Laxity {
    /// Path of the daemon's socket. Without it transfers go out unscheduled.
    pub socket: Option<PathBuf>,
    /// Name of this process at the daemon. Without it the name consists of role and address.
    pub name: Option<String>,
    /// Index, in the daemon's configuration, of the NIC that leads to the peers.
    pub nic: u8,
    /// Milliseconds without a sign of life after which the daemon counts as gone and transfers go
    /// out unscheduled. Default: 400.
    pub stall_ms: Option<u64>,
    /// DSCP of control messages between processes, that is of everything but payload. A class of
    /// their own keeps these few bytes from waiting behind payload.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub words_dscp: Option<u8>,
    /// Rate of the NIC, in Mbit/s. With it, KV of a part of a prompt is due early enough that the
    /// later parts can still be sent in time. Without it, all KV is due with its request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_mbit: Option<f64>,
}

#[derive(Debug, Error)]
pub enum ConfigError {
    #[error("cannot read {path}: {cause}")]
    File { path: PathBuf, cause: ReadError },
    #[error("{path}: {cause}")]
    Syntax { path: PathBuf, cause: Box<toml::de::Error> },
    #[error(transparent)]
    Shape(#[from] ShapeError),
    #[error("{field} is {value}: {wanted}")]
    Value { field: &'static str, value: String, wanted: String },
}

impl Config {
    /// Reads and checks a configuration file.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = laxity_files::read_to_string(path, CONFIG_BYTES_MAX)
            .map_err(|cause| ConfigError::File { path: path.to_owned(), cause })?;
        let config: Self = toml::from_str(&text).map_err(|cause| ConfigError::Syntax {
            path: path.to_owned(),
            cause: Box::new(cause),
        })?;
        config.check()?;
        Ok(config)
    }

    /// Returns the size of the KV cache in the form that the scheduler takes.
    pub const fn room(&self) -> Room {
        Room { blocks: self.kv.blocks, block_tokens: self.kv.block_tokens }
    }

    pub fn net_peers(&self) -> PeerAddresses {
        let Some(peers) = &self.peers else { return PeerAddresses::default() };
        let own = peers.experts.iter().position(|address| *address == peers.listen);
        PeerAddresses {
            prefill: peers.prefill.clone(),
            reuse: peers.reuse.clone(),
            ranks: Ranks { all: peers.experts.clone(), own: own.unwrap_or(0) },
        }
    }

    pub fn patience(&self) -> Duration {
        Duration::from_millis(
            self.peers.as_ref().map_or_else(patience_ms, |peers| peers.patience_ms),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TINY: &str = "model = { name = 'tiny', layers = 2, hidden = 32, heads = 4, ffn = 64, \
                        vocab = 300, context = 256 }";

    #[test]
    fn a_configuration_without_an_end_is_refused() {
        let error = Config::load(Path::new("/dev/zero")).unwrap_err().to_string();
        assert!(error.contains("it is a device"), "{error}");
    }

    fn load(more: &str) -> Result<Config, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("engine.toml");
        let text = match more.strip_prefix("!") {
            Some(text) => text.to_owned(),
            None => format!("{more}\n{TINY}"),
        };
        std::fs::write(&path, text).unwrap();
        Config::load(&path).map_err(|error| error.to_string())
    }

    #[test]
    fn sizes_are_enough() {
        let config = load("").unwrap();
        assert_eq!(config.role, Role::Whole);
        assert_eq!(config.model.kv_heads(), 4);
        let again: Config = toml::from_str(&toml::to_string(&config).unwrap()).unwrap();
        assert_eq!(again, config);
    }

    #[test]
    fn what_is_wrong_is_said_with_its_name() {
        for (text, said) in [
            ("rolle = \"whole\"", "unknown field `rolle`"),
            ("device = \"gpu\"", "unknown variant `gpu`"),
            ("peers = { listen = '[::1]:1' }\nlaxity = { stall_ms = 0 }", "laxity.stall_ms is 0"),
            ("role = \"decode\"", "[peers]"),
            ("role = \"sole\"", "sole"),
            ("kv = { blocks = 0 }", "kv.blocks"),
            ("schedule = { tokens = 0 }", "schedule.tokens"),
            ("schedule = { policy = \"lifo\" }", "qoserve"),
            ("schedule = { qoserve = { chunk = 1 } }", "unknown field"),
            ("schedule = { hmas = { order = \"lifo\" } }", "srtf"),
            ("laxity = { rate_mbit = 0.0 }", "laxity.rate_mbit"),
            ("laxity = { words_dscp = 64 }", "laxity.words_dscp is 64"),
            ("timing = { layer_us=1, token_us=1, expert_us=1, row_us=-1 }", "timing.row_us is -1"),
            ("limits = { ttft_ms = -1.0 }", "limits.ttft_ms is -1"),
            ("limits = { ttft_ms = nan }", "limits.ttft_ms"),
            ("peers = { listen = \"0.0.0.0:0\" }", "peers.listen"),
            ("peers = { listen = '[::1]:1', experts = ['[::1]:1'] }", "model.moe"),
            ("peers = { listen = '[::1]:1', nccl_plugin = '/x.so' }", "peers.nccl_plugin is /x.so"),
            ("peers = { listen = '[::1]:1', lockstep = true }", "peers.lockstep is true"),
            ("role = 'decode'\npeers = { listen = '[::1]:1' }", "peers.prefill"),
            ("peers = { listen = '[::1]:1', reuse = ['[::1]:1'] }", "peers.reuse"),
            ("![model]\nname = \"x\"", "missing field"),
        ] {
            let error = load(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
        let error = Config::load(Path::new("/nowhere/engine.toml")).unwrap_err().to_string();
        assert!(error.contains("/nowhere/engine.toml"), "{error}");
    }
}
