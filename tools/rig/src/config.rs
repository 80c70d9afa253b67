//! The configuration of a lab run: hosts, fabric, model and workload. Every field has a default.
//!
//! The testbed of MFS §6 (16 GPUs, 100 Gbit/s, Mixtral-8x7B) does not fit on two cores. So the lab
//! keeps the *ratios* that determine contention and scales the rest ([`Scaling`]):
//!
//! * collectives are `comm_share` of an uncontended layer (MFS §2.2: 40–60 %);
//! * the KV bytes and the collective bytes of a token at a layer have the ratio `1 :
//!   collective_to_kv`. For Mixtral-8x7B with EP 8 it is 7 (2 × 8 × 128 × 2 B = 4 KiB of KV, 28 KiB
//!   of dispatch and combine), or 5 if dispatch is in FP8. For Llama-3-8B with SP 4 it is 3 (each
//!   token's KV goes to three peers). The default, 4, is between these two families of MFS §6;
//! * 32 layers are merged into 8, so that there are fewer and larger transfers;
//! * a layer's compute time has a constant part, like any model that has to read its weights.
//!
//! A port's window is *not* to scale. On a fabric with short sender queues it is a bandwidth-delay
//! product. Here a chunk counts as in flight until its receiver has it, including its wait at a
//! busy decode port. So the window has to exceed all connections' buffers together, or the port
//! would idle.

mod check;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::serving::{ServingConfig, TimedConfig};
use crate::vllm::VllmConfig;

pub use check::InvalidLab;
pub(crate) use check::keep_all;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkloadSource {
    /// Built in: 2k tokens on average, half of them reusable (MFS §6.2, QwenA-Conv).
    #[default]
    Conversation,
    /// Built in: 1k tokens on average, 65 % of them reusable (MFS §6.2, QwenB-Agent).
    Agent,
    File(PathBuf),
}

/// The transport of the exchanges with experts (stage 2). Stages 1 and 3 always use the engine's
/// own connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Collectives {
    /// The engine's own connections, like the other stages.
    #[default]
    Sockets,
    NcclPlugin,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    /// `laxity-engine` with a timed model, which only takes the time of computing.
    #[default]
    Timed,
    Real,
    Vllm,
}

impl Engine {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Real => "real",
            Self::Timed => "timed",
            Self::Vllm => "vllm",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LabConfig {
    pub engine: Engine,
    /// Names of the policies, which run one after another on the same arrivals. `none` runs without
    /// a daemon. Other names are passed to `laxityd`.
    pub policies: Vec<String>,
    pub seed: u64,
    pub workload: WorkloadSource,
    pub duration_s: f64,
    /// Time after the last arrival until unfinished requests count as missed, in s.
    pub drain_s: f64,
    /// Offered load: arrival rate over the rate that the prefill units reach on an idle fabric with
    /// one request at a time. `requests_per_second` overrides it.
    pub load: f64,
    /// Arrival rate over all units, in requests per second.
    pub requests_per_second: Option<f64>,
    pub slo_scale: f64,
    pub units: usize,
    pub ranks: usize,
    pub decodes: usize,
    pub port_mbit: u32,
    pub model: ModelConfig,
    /// Maximum number of tokens of a prompt. Longer prompts are clipped.
    pub tokens_max: u32,
    /// Share of the reused tokens whose prefixes are on the first unit, the victim (MFS §2.2).
    pub victim_share: f64,
    /// Whether the host that needs KV blocks reads them, as with RDMA READ. The holder's daemon
    /// then does not see the transfer, and each reader's daemon sees only its own. Otherwise the
    /// holder sends.
    pub reads: bool,
    pub collectives: Collectives,
    /// Path of the NCCL net plugin. By default next to this program, or where it is installed.
    pub nccl_plugin: Option<PathBuf>,
    pub chunk_bytes: u64,
    pub window_bytes: u64,
    /// Maximum bytes of a daemon's port in flight to one peer under `laxity`, 0 for no bound. By
    /// default as a daemon has it.
    pub peer_window_bytes: Option<u64>,
    /// Send and receive buffer of every data connection, in bytes. It bounds what a connection has
    /// in the fabric's queues, which TCP's auto-tuning would let grow.
    pub socket_buffer_bytes: u32,
    /// Length of each class's queue on each port, in bytes. It holds every connection's buffer, so
    /// that nothing is dropped, as in a RoCE fabric. Those buffers also bound the delay.
    pub queue_bytes: u32,
    /// DSCP of each level, from level 1 on. There must be one for every level.
    pub level_dscp: Vec<u8>,
    pub scavenger_dscp: u8,
    /// Share of each port that traffic without permits takes, in both directions.
    pub foreign: f64,
    /// DSCP of that traffic, 0 for unmarked. Without it, the DSCP of the highest level.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub foreign_dscp: Option<u8>,
    /// Whether daemons lower the rate of a port by its foreign traffic. Otherwise they only measure
    /// it.
    pub residual: bool,
    /// Time at which the victim's daemon is killed by SIGKILL, in s after the start of each
    /// scheduled run.
    pub kill_daemon_at: Option<f64>,
    pub coordinator: bool,
    /// Path of the coordinator's configuration file. Without it the coordinator has its defaults.
    pub coordinator_config: Option<PathBuf>,
    /// Time at which the coordinator is killed for good by SIGKILL, in s after the start of each
    /// run.
    pub kill_coordinator_at: Option<f64>,
    /// Whether a few requests are played one by one first, to report the error of the computed
    /// contention-free TTFT.
    pub validate_ideal: bool,
    /// Path of the daemon. By default next to this program, or in `PATH`.
    pub laxityd: Option<PathBuf>,
    /// Path of the engine. By default next to this program, or in `PATH`.
    pub laxity_engine: Option<PathBuf>,
    /// The model of the real engine. Only for `engine = "real"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub real: Option<ServingConfig>,
    /// The settings of the timed engine. Only for `engine = "timed"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timed: Option<TimedConfig>,
    /// The model and the processes of vLLM. Only for `engine = "vllm"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vllm: Option<VllmConfig>,
}

impl Default for LabConfig {
    fn default() -> Self {
        Self {
            engine: Engine::Timed,
            policies: ["none", "two_class", "mfs", "laxity"].map(str::to_owned).into(),
            seed: 1,
            workload: WorkloadSource::default(),
            duration_s: 20.0,
            drain_s: 60.0,
            load: 0.5,
            requests_per_second: None,
            slo_scale: 3.0,
            units: 3,
            ranks: 2,
            decodes: 2,
            port_mbit: 200,
            model: ModelConfig::default(),
            tokens_max: 8192,
            victim_share: 0.75,
            reads: false,
            collectives: Collectives::Sockets,
            nccl_plugin: None,
            chunk_bytes: 32 << 10,
            window_bytes: 1 << 20,
            peer_window_bytes: None,
            socket_buffer_bytes: 64 << 10,
            queue_bytes: 4 << 20,
            level_dscp: vec![46, 34, 26, 18, 18, 10, 10, 10],
            scavenger_dscp: 8,
            foreign: 0.0,
            foreign_dscp: None,
            residual: false,
            kill_daemon_at: None,
            coordinator: false,
            coordinator_config: None,
            kill_coordinator_at: None,
            validate_ideal: true,
            laxityd: None,
            laxity_engine: None,
            real: None,
            timed: None,
            vllm: None,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    pub layers: u16,
    /// Compute time of a layer that does not depend on the tokens, because weights are read, in µs.
    pub layer_base_us: f64,
    pub layer_token_us: f64,
    /// Maximum number of new tokens in one batch of a unit. A longer request runs alone.
    pub batch_tokens: u32,
    pub reference_tokens: u32,
    pub comm_share: f64,
    pub collective_to_kv: f64,
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self {
            layers: 8,
            layer_base_us: 8_000.0,
            layer_token_us: 7.0,
            batch_tokens: 2048,
            reference_tokens: 1000,
            comm_share: 0.5,
            collective_to_kv: 4.0,
        }
    }
}

impl LabConfig {
    /// Returns the configuration as a file that gives the same configuration when it is read. Keys
    /// without a value are comments.
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        const BESIDE: &str = "found beside this program or in PATH";
        let text = toml::to_string_pretty(self)?;
        let mut unset = String::new();
        for (key, example, otherwise) in [
            ("requests_per_second", "4.0", "by `load`"),
            ("foreign_dscp", "0", "that of the highest level"),
            ("kill_daemon_at", "8.0", "no daemon is killed"),
            ("coordinator_config", "\"coordinator.toml\"", "its defaults"),
            ("kill_coordinator_at", "8.0", "it is not killed"),
            (
                "nccl_plugin",
                "\"/usr/local/lib/libnccl-net-laxity.so\"",
                "found beside this program or installed",
            ),
            ("laxity_engine", "\"/usr/local/bin/laxity-engine\"", BESIDE),
            ("laxityd", "\"/usr/local/sbin/laxityd\"", BESIDE),
        ] {
            if !text.lines().any(|line| line.starts_with(&format!("{key} = "))) {
                unset.push_str(&format!("# {key} = {example}  # not set: {otherwise}\n"));
            }
        }
        // After the first table's header, the keys would belong to that table.
        let tables = text.find("\n[").map_or(text.len(), |at| at + 1);
        let (keys, tables) = text.split_at(tables);
        let gap = if unset.is_empty() { "" } else { "\n" };
        Ok(format!("{}\n{unset}{gap}{tables}", keys.trim_end()))
    }

    pub fn foreign_dscp(&self) -> u8 {
        self.foreign_dscp.or(self.level_dscp.first().copied()).unwrap_or(0)
    }

    pub fn hosts(&self) -> usize {
        self.prefills() + self.decodes
    }

    pub fn prefill_host(&self, unit: usize, rank: usize) -> usize {
        unit * self.ranks + rank
    }

    pub fn decode_host(&self, decode: usize) -> usize {
        self.prefills() + decode
    }

    /// Returns the number of prefill hosts, which are the first hosts.
    pub const fn prefills(&self) -> usize {
        self.units * self.ranks
    }

    pub fn host_name(&self, host: usize) -> String {
        match host.checked_sub(self.prefills()) {
            Some(decode) => format!("decode{decode}"),
            None => format!("unit{}.{}", host / self.ranks, host % self.ranks),
        }
    }

    pub fn scaling(&self) -> Scaling {
        let goodput = f64::from(self.port_mbit) * 1e6 / 8.0 * GOODPUT_SHARE;
        let reference = f64::from(self.model.reference_tokens);
        let compute_s = (self.model.layer_base_us + self.model.layer_token_us * reference) / 1e6;
        let comm_s = compute_s * self.model.comm_share / (1.0 - self.model.comm_share);
        let collective = comm_s / 2.0 * goodput / reference;
        Scaling {
            goodput_bytes_per_s: goodput,
            collective_bytes_per_token: collective,
            kv_bytes_per_token: 2.0 * collective / self.model.collective_to_kv,
            layers: self.model.layers,
            layer_base_us: self.model.layer_base_us,
            layer_token_us: self.model.layer_token_us,
            ranks: self.ranks,
        }
    }
}

/// Share of a port's rate that is left after the headers of Ethernet, IP, TCP and the lab's frames,
/// with an MTU of [`crate::fabric::MTU`].
const GOODPUT_SHARE: f64 = 0.985;

/// The sizes and times of the model in this lab.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scaling {
    /// Payload that a port carries, in bytes per second.
    pub goodput_bytes_per_s: f64,
    /// Bytes that a rank sends to all its peers together for each new token of the batch, in one
    /// all-to-all phase of a layer.
    pub collective_bytes_per_token: f64,
    pub kv_bytes_per_token: f64,
    pub layers: u16,
    /// Compute time of a layer that does not depend on the tokens, in µs.
    pub layer_base_us: f64,
    pub layer_token_us: f64,
    pub ranks: usize,
}

impl Scaling {
    /// Returns the bytes that a rank sends to *each* of its peers in one all-to-all phase.
    pub fn collective_bytes(&self, new_tokens: u32) -> u64 {
        bytes(self.collective_bytes_per_token * f64::from(new_tokens) / (self.ranks as f64 - 1.0))
    }

    pub fn kv_bytes(&self, tokens: u32) -> u64 {
        if tokens == 0 { 0 } else { bytes(self.kv_bytes_per_token * f64::from(tokens)) }
    }

    pub fn compute_ns(&self, new_tokens: u32) -> u64 {
        ((self.layer_base_us + self.layer_token_us * f64::from(new_tokens)) * 1e3) as u64
    }
}

fn bytes(exact: f64) -> u64 {
    (exact.round() as u64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scaling_keeps_the_ratios_of_the_paper() {
        let config = LabConfig::default();
        let scaling = config.scaling();
        let tokens = config.model.reference_tokens;
        let comm_s = 2.0 * scaling.collective_bytes(tokens) as f64 * (config.ranks as f64 - 1.0)
            / scaling.goodput_bytes_per_s;
        let compute_s = scaling.compute_ns(tokens) as f64 / 1e9;
        assert!((comm_s / (comm_s + compute_s) - config.model.comm_share).abs() < 0.01);
        let collective = 2.0 * scaling.collective_bytes_per_token;
        let ratio = collective / scaling.kv_bytes_per_token;
        assert!((ratio - config.model.collective_to_kv).abs() < 1e-9);
    }

    #[test]
    fn hosts_are_numbered_units_first() {
        let config = LabConfig::default();
        assert_eq!(config.hosts(), 8);
        assert_eq!(config.host_name(config.prefill_host(1, 1)), "unit1.1");
        assert_eq!(config.host_name(config.decode_host(0)), "decode0");
    }
}
