//! The configuration: one TOML file. Every field is described here and checked here; what is wrong
//! is said with its name, its value and what would do.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use laxity_files::{CONFIG_BYTES_MAX, ReadError};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::apart::Peers as NetPeers;
use crate::apart::experts::Ranks;
use crate::model::ModelShape;
use crate::model::shape::ShapeError;
use crate::model::timed::Timing;
use crate::schedule::places::{Places, Rule};
use crate::schedule::{Room, Settings};

/// What a process does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Prompts and answers.
    #[default]
    Whole,
    /// Prompts, for others.
    Prefill,
    /// Answers; prompts are computed by others.
    Decode,
}

/// What computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compute {
    /// The first GPU that `CUDA_VISIBLE_DEVICES` leaves, where the program was built for them and
    /// there is one; else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// That GPU, or an error: never the CPU instead.
    Cuda,
}

/// All of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// What this process does.
    #[serde(default)]
    pub role: Role,
    /// Where the endpoint listens: completions of `whole` and `decode`, health and metrics of all.
    /// Port 0 takes a free one.
    #[serde(default = "listen")]
    pub listen: SocketAddr,
    /// What computes.
    #[serde(default)]
    pub device: Compute,
    /// The model.
    pub model: ModelShape,
    /// The time of computing: with it nothing is computed, and `device` and weights mean nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timing: Option<Timing>,
    /// The KV cache.
    #[serde(default)]
    pub kv: Kv,
    /// How iterations are made.
    #[serde(default)]
    pub schedule: Settings,
    /// What requests may ask for.
    #[serde(default)]
    pub limits: Limits,
    /// Other processes.
    #[serde(default)]
    pub peers: Option<Peers>,
    /// The daemon.
    #[serde(default)]
    pub laxity: Laxity,
    /// What is shown to whoever looks for a fault.
    #[serde(default)]
    pub debug: Debug,
}

fn listen() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 8000))
}

/// The KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Kv {
    /// Blocks.
    pub blocks: u32,
    /// Tokens a block.
    pub block_tokens: u32,
    /// Whether KV that came from another process is found again by later prompts.
    pub keep_fetched: bool,
}

impl Default for Kv {
    fn default() -> Self {
        Self {
            blocks: 1024,
            block_tokens: 16,
            keep_fetched: true,
        }
    }
}

/// What requests may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Requests at once; more are turned away with status 429.
    pub requests_max: usize,
    /// Tokens of an answer where a request does not say.
    pub output_default: u32,
    /// Most tokens of an answer.
    pub output_max: u32,
    /// Most bytes of a request's body.
    pub body_bytes_max: usize,
    /// Objective for the first token where a request does not say, milliseconds.
    pub ttft_ms: f64,
    /// Objective between tokens, milliseconds.
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

/// Other processes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peers {
    /// Where this process listens for others; they know it by this address, so it is one that they
    /// reach.
    pub listen: SocketAddr,
    /// Who computes prompts: of `decode`.
    #[serde(default)]
    pub prefill: Vec<SocketAddr>,
    /// Who is asked for KV of a prompt's beginning.
    #[serde(default)]
    pub reuse: Vec<SocketAddr>,
    /// Who holds the experts: expert `e` is with the process `e mod n` of these. This process is
    /// one of them.
    #[serde(default)]
    pub experts: Vec<SocketAddr>,
    /// Whether the processes of `experts` compute each layer together, as ranks with data-parallel
    /// attention do. For a timed model only. One that was restarted does not come into step again.
    #[serde(default)]
    pub lockstep: bool,
    /// Whether this process reads KV of `reuse`, as its own daemon permits it. Else those send it,
    /// as theirs do.
    #[serde(default)]
    pub reads: bool,
    /// The NCCL net plugin that carries the exchanges of ranks in step. Without it they go as all
    /// other parcels do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nccl_plugin: Option<PathBuf>,
    /// How long a computation waits for another process before it goes on without, milliseconds.
    #[serde(default = "patience_ms")]
    pub patience_ms: u64,
    /// How long one of `reuse` may take to say whether it has KV before the next is asked,
    /// milliseconds.
    #[serde(default = "ask_ms")]
    pub ask_ms: u64,
    /// Which of `prefill` computes a prompt.
    #[serde(default)]
    pub dispatch: Rule,
    /// Of `least_work` and `hyperflexis`: `[a, b, c]` of `a + b · tokens + c · tokens²`, the time
    /// of a prompt on one of `prefill`, ns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill_ns: Option<[f64; 3]>,
}

const fn ask_ms() -> u64 {
    500
}

const fn patience_ms() -> u64 {
    30_000
}

/// The daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Laxity {
    /// Its socket; without one, transfers go out unscheduled.
    pub socket: Option<PathBuf>,
    /// The name that it knows this process by; without one, role and address.
    pub name: Option<String>,
    /// The number of the NIC in its configuration that leads to the peers.
    pub nic: u8,
    /// A daemon that gives no sign of life for so long is gone, and transfers go out unscheduled,
    /// milliseconds. Without it 400.
    pub stall_ms: Option<u64>,
    /// DSCP of words between processes, that is of all that is no payload. Orders of a few bytes
    /// must not wait behind payload where they share its links.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub words_dscp: Option<u8>,
    /// Its rate, Mbit/s. With it, KV of a part of a prompt is due while the parts after it still
    /// have time for the wire; without, with its request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_mbit: Option<f64>,
}

/// What is shown to whoever looks for a fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Debug {
    /// Whether the endpoint answers `/debug/requests`. It names every client's requests, and the
    /// engine answers between two iterations, so it is off unless somebody asks for it.
    pub requests: bool,
}

/// A configuration that does not do.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {path}: {cause}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        cause: ReadError,
    },
    /// It is no TOML, or has fields that there are not.
    #[error("{path}: {cause}")]
    Syntax {
        /// Which.
        path: PathBuf,
        /// Why, with line and column.
        cause: Box<toml::de::Error>,
    },
    /// The model's sizes do not fit together.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A value that does not do.
    #[error("{field} is {value}: {wanted}")]
    Value {
        /// Its name.
        field: &'static str,
        /// What it is.
        value: String,
        /// What would do.
        wanted: String,
    },
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "numbers and texts, mostly made for it"
)]
pub(crate) fn value(
    field: &'static str,
    value: impl ToString,
    wanted: impl Into<String>,
) -> ConfigError {
    ConfigError::Value {
        field,
        value: value.to_string(),
        wanted: wanted.into(),
    }
}

fn check_dispatch(peers: &Peers) -> Result<(), ConfigError> {
    match peers.prefill_ns {
        None if peers.dispatch == Rule::Hyperflexis => Err(value(
            "peers.dispatch",
            peers.dispatch.name(),
            "it needs peers.prefill_ns, the time of a prompt on a prefill process",
        )),
        Some(all)
            if !all.iter().all(|part| part.is_finite() && *part >= 0.0)
                || all.iter().sum::<f64>() <= 0.0 =>
        {
            Err(value(
                "peers.prefill_ns",
                format!("{all:?}"),
                "three numbers of ns, none below 0 and not all 0",
            ))
        }
        _ => Ok(()),
    }
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = laxity_files::read_to_string(path, CONFIG_BYTES_MAX).map_err(|cause| {
            ConfigError::File {
                path: path.to_owned(),
                cause,
            }
        })?;
        let config: Self = toml::from_str(&text).map_err(|cause| ConfigError::Syntax {
            path: path.to_owned(),
            cause: Box::new(cause),
        })?;
        config.check()?;
        Ok(config)
    }

    /// Checks what has to hold.
    ///
    /// # Errors
    /// The first thing that does not.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.model.check()?;
        if self.model.vocab < crate::endpoint::tokens::VOCAB_MIN {
            return Err(value(
                "model.vocab",
                self.model.vocab,
                format!(
                    "the endpoint's bytes and marks need {} tokens",
                    crate::endpoint::tokens::VOCAB_MIN
                ),
            ));
        }
        if self.kv.blocks == 0 || self.kv.block_tokens == 0 {
            return Err(value(
                "kv.blocks, kv.block_tokens",
                format!("{}, {}", self.kv.blocks, self.kv.block_tokens),
                "both at least 1",
            ));
        }
        if u64::from(self.kv.blocks) * u64::from(self.kv.block_tokens) > u64::from(u32::MAX) {
            return Err(value(
                "kv.blocks",
                self.kv.blocks,
                "times kv.block_tokens it has to stay below 2^32",
            ));
        }
        self.schedule.check()?;
        self.check_timing()?;
        self.check_limits()?;
        if let Some(dscp) = self.laxity.words_dscp.filter(|dscp| *dscp > 63) {
            return Err(value("laxity.words_dscp", dscp, "0 to 63"));
        }
        if let Some(rate) = self.laxity.rate_mbit
            && !(rate.is_finite() && rate > 0.0)
        {
            let wanted = "a positive number of Mbit/s, or leave it out";
            return Err(value("laxity.rate_mbit", rate, wanted));
        }
        self.check_peers()
    }

    fn check_timing(&self) -> Result<(), ConfigError> {
        let Some(timing) = &self.timing else {
            return if cfg!(feature = "compute") {
                Ok(())
            } else {
                let wanted = "this laxity-engine was built without a model that computes: give \
                              timing.layer_us, token_us, expert_us and row_us";
                Err(value("timing", "missing", wanted))
            };
        };
        for (field, time) in timing.all() {
            if !(0.0..=1e9).contains(&time) {
                return Err(value(field, time, "0 to 1000000000 microseconds"));
            }
        }
        if self.model.hidden < 2 {
            let wanted = "at least 2 with [timing]: a row begins with a number of 64 bits";
            return Err(value("model.hidden", self.model.hidden, wanted));
        }
        Ok(())
    }

    fn check_limits(&self) -> Result<(), ConfigError> {
        let limits = &self.limits;
        for (field, number) in [
            ("limits.ttft_ms", limits.ttft_ms),
            ("limits.tpot_ms", limits.tpot_ms),
        ] {
            if !(number.is_finite() && number > 0.0) {
                return Err(value(field, number, "a positive number of milliseconds"));
            }
        }
        if limits.requests_max == 0 || limits.output_max == 0 || limits.output_default == 0 {
            let all = format!(
                "{}, {}, {}",
                limits.requests_max, limits.output_max, limits.output_default
            );
            return Err(value(
                "limits.requests_max, output_max, output_default",
                all,
                "all at least 1",
            ));
        }
        Ok(())
    }

    fn check_peers(&self) -> Result<(), ConfigError> {
        let Some(peers) = &self.peers else {
            return match self.role {
                Role::Whole => Ok(()),
                Role::Prefill | Role::Decode => Err(value(
                    "role",
                    format!("{:?}", self.role).to_lowercase(),
                    "it needs [peers] with listen, and decode needs prefill, too",
                )),
            };
        };
        let fixed = |address: &SocketAddr| address.port() != 0 && !address.ip().is_unspecified();
        if !fixed(&peers.listen) {
            return Err(value(
                "peers.listen",
                peers.listen,
                "others know this process by it: give a real address and port",
            ));
        }
        if (self.role == Role::Decode) == peers.prefill.is_empty() {
            return Err(value(
                "peers.prefill",
                format!("{:?}", peers.prefill),
                "role = \"decode\" needs some, the other roles have none",
            ));
        }
        for (field, list) in [
            ("peers.prefill", &peers.prefill),
            ("peers.reuse", &peers.reuse),
        ] {
            if list.contains(&peers.listen) {
                return Err(value(
                    field,
                    peers.listen,
                    "this process itself is none of its peers",
                ));
            }
            if let Some(address) = list.iter().find(|address| !fixed(address)) {
                return Err(value(field, address, "give a real address and port"));
            }
        }
        if !peers.experts.is_empty() {
            if self.model.moe.is_none() {
                return Err(value(
                    "peers.experts",
                    format!("{:?}", peers.experts),
                    "the model has none (model.moe)",
                ));
            }
            if !peers.experts.contains(&peers.listen) {
                return Err(value(
                    "peers.experts",
                    format!("{:?}", peers.experts),
                    format!("this process ({}) has to be one of them", peers.listen),
                ));
            }
        }
        if peers.lockstep && (peers.experts.len() < 2 || self.timing.is_none()) {
            let wanted = "it needs two of peers.experts, and [timing]";
            return Err(value("peers.lockstep", true, wanted));
        }
        if let Some(plugin) = peers.nccl_plugin.as_ref().filter(|_| !peers.lockstep) {
            let wanted = "it carries exchanges of ranks in step only: set peers.lockstep";
            return Err(value("peers.nccl_plugin", plugin.display(), wanted));
        }
        if self.laxity.stall_ms == Some(0) {
            return Err(value("laxity.stall_ms", 0, "at least 1"));
        }
        if peers.patience_ms == 0 {
            return Err(value("peers.patience_ms", 0, "at least 1"));
        }
        check_dispatch(peers)
    }

    /// The KV cache, as the scheduler knows it.
    #[must_use]
    pub const fn room(&self) -> Room {
        Room {
            blocks: self.kv.blocks,
            block_tokens: self.kv.block_tokens,
        }
    }

    /// How a prefill process is chosen, where there are any.
    #[must_use]
    pub fn places(&self) -> Option<Places> {
        let peers = self
            .peers
            .as_ref()
            .filter(|peers| !peers.prefill.is_empty())?;
        Some(Places {
            rule: peers.dispatch,
            // Of which only the proportions count, where it may be left out: a token is as good as
            // another.
            prefill_ns: peers.prefill_ns.unwrap_or([0.0, 1.0, 0.0]),
            block_tokens: self.kv.block_tokens,
        })
    }

    /// Which other processes there are.
    #[must_use]
    pub fn net_peers(&self) -> NetPeers {
        let Some(peers) = &self.peers else {
            return NetPeers::default();
        };
        let own = peers
            .experts
            .iter()
            .position(|address| *address == peers.listen);
        NetPeers {
            prefill: peers.prefill.clone(),
            reuse: peers.reuse.clone(),
            ranks: Ranks::new(peers.experts.clone(), own.unwrap_or(0)),
        }
    }

    /// How long a computation waits for others.
    #[must_use]
    pub fn patience(&self) -> Duration {
        Duration::from_millis(
            self.peers
                .as_ref()
                .map_or_else(patience_ms, |peers| peers.patience_ms),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TINY: &str = "[model]\nname = \"tiny\"\nlayers = 2\nhidden = 32\nheads = 4\nffn = \
        64\nvocab = 300\ncontext = 256\n";

    #[test]
    fn a_configuration_without_an_end_is_refused() {
        let error = Config::load(Path::new("/dev/zero"))
            .unwrap_err()
            .to_string();
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
            (
                "peers = { listen = \"127.0.0.1:1\" }\nlaxity = { stall_ms = 0 }",
                "laxity.stall_ms is 0",
            ),
            ("role = \"decode\"", "[peers]"),
            ("role = \"sole\"", "sole"),
            ("kv = { blocks = 0 }", "kv.blocks"),
            ("schedule = { tokens = 0 }", "schedule.tokens"),
            ("schedule = { policy = \"lifo\" }", "qoserve"),
            (
                "schedule = { qoserve = { chunk_least = 90, chunk_most = 80 } }",
                "chunk_least is 90: 1 to schedule.qoserve.chunk_most, which is 80",
            ),
            (
                "schedule = { qoserve = { chunk_step = 0 } }",
                "schedule.qoserve.chunk_step",
            ),
            (
                "schedule = { qoserve = { alpha_ms = nan } }",
                "schedule.qoserve.alpha_ms is NaN: 0 to 1000",
            ),
            (
                "schedule = { qoserve = { alpha_low_ms = 9.0 } }",
                "schedule.qoserve.alpha_low_ms is 9: 0 to 8",
            ),
            (
                "schedule = { qoserve = { hints = 1.5 } }",
                "schedule.qoserve.hints",
            ),
            (
                "schedule = { qoserve = { margin = -0.1 } }",
                "schedule.qoserve.margin",
            ),
            (
                "schedule = { qoserve = { busy_ms = inf } }",
                "schedule.qoserve.busy_ms",
            ),
            (
                "schedule = { qoserve = { relegation = \"some\" } }",
                "look_ahead",
            ),
            ("schedule = { qoserve = { chunk = 1 } }", "unknown field"),
            ("schedule = { hmas = { epsilon = 0.0 } }", "epsilon"),
            ("schedule = { hmas = { chunk_min = 0 } }", "chunk_min"),
            (
                "schedule = { hmas = { lane_split_ms = 1 } }",
                "lane_split_ms is 1: 10..=600000",
            ),
            ("schedule = { hmas = { fast_weight = 17 } }", "1..=16"),
            ("schedule = { hmas = { order = \"lifo\" } }", "two_lane"),
            (
                "schedule = { forest = \"/nowhere/forest.json\" }",
                "schedule.forest is /nowhere/forest.json",
            ),
            ("laxity = { rate_mbit = 0.0 }", "laxity.rate_mbit"),
            ("laxity = { words_dscp = 64 }", "laxity.words_dscp is 64"),
            (
                "timing = { layer_us = 1.0, token_us = 1.0, expert_us = 1.0, row_us = -1.0 }",
                "timing.row_us is -1",
            ),
            (
                "role = \"decode\"\npeers = { listen = \"127.0.0.1:1\", prefill = \
                 [\"127.0.0.1:2\"], dispatch = \"hyperflexis\" }",
                "peers.prefill_ns",
            ),
            (
                "peers = { listen = \"127.0.0.1:1\", prefill_ns = [0.0, -1.0, 0.0] }",
                "peers.prefill_ns is [0.0, -1.0, 0.0]",
            ),
            ("limits = { ttft_ms = -1.0 }", "limits.ttft_ms is -1"),
            ("limits = { ttft_ms = nan }", "limits.ttft_ms"),
            ("peers = { listen = \"0.0.0.0:0\" }", "peers.listen"),
            (
                "peers = { listen = \"127.0.0.1:1\", experts = [\"127.0.0.1:1\"] }",
                "model.moe",
            ),
            (
                "peers = { listen = \"127.0.0.1:1\", nccl_plugin = \"/x.so\" }",
                "peers.nccl_plugin is /x.so",
            ),
            (
                "peers = { listen = \"127.0.0.1:1\", lockstep = true }",
                "peers.lockstep is true",
            ),
            (
                "role = \"decode\"\npeers = { listen = \"127.0.0.1:1\" }",
                "peers.prefill",
            ),
            (
                "peers = { listen = \"127.0.0.1:1\", reuse = [\"127.0.0.1:1\"] }",
                "peers.reuse",
            ),
            ("![model]\nname = \"x\"", "missing field"),
        ] {
            let error = load(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
        let error = Config::load(Path::new("/nowhere/engine.toml"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("/nowhere/engine.toml"), "{error}");
    }
}
