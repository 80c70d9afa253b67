//! The model that the engine serves in the lab, computed (`real`) or timed, and the settings of the
//! lab that have no effect on it.
//!
//! The computed model is small enough for two cores, and its transfers are large enough for slow
//! links. With the defaults a token has 512 bytes of KV a layer. With half of the experts on the
//! other host, it exchanges 2 KiB with them, four times as much.
//!
//! The timed model has the sizes and times of [`Scaling`](crate::config::Scaling). The hosts of a
//! unit compute in lockstep, each its own requests. A token has one expert on each host. Its KV is
//! on one host, and is as large as that of all ranks together. A request alone takes as long as one
//! that is split over the unit.

use laxity_requests::engine_policy::Policy;
use serde::{Deserialize, Serialize};

use crate::config::{Collectives, Engine, InvalidLab, LabConfig, keep_all};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Device {
    /// The CPU. Answers must be identical under every policy, or the run fails.
    #[default]
    Cpu,
    /// The GPU, with an engine that was built for it. Sums depend on the batch there, so different
    /// answers are only counted.
    Cuda,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServingConfig {
    pub device: Device,
    /// Threads of a process that compute. Threads that send and receive are extra.
    pub threads: usize,
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub ffn: usize,
    pub vocab: usize,
    pub experts: usize,
    pub experts_per_token: usize,
    pub weights_seed: u64,
    pub kv_blocks: u32,
    pub block_tokens: u32,
    pub chunk_tokens: u32,
    pub order: Policy,
    /// Mean tokens of a prompt of the conversation workload. Other workloads keep their ratio to
    /// it.
    pub tokens_mean: f64,
    pub prefixes: u32,
    pub output_tokens: u32,
    /// Time without a sign of life after which a daemon counts as gone, in ms.
    pub stall_ms: u64,
}

impl Default for ServingConfig {
    fn default() -> Self {
        Self {
            device: Device::Cpu,
            threads: 1,
            layers: 4,
            hidden: 256,
            heads: 8,
            kv_heads: 2,
            head_dim: 32,
            ffn: 128,
            vocab: 512,
            experts: 8,
            experts_per_token: 2,
            weights_seed: 1,
            kv_blocks: 2048,
            block_tokens: 16,
            chunk_tokens: 256,
            order: Policy::Edf,
            tokens_mean: 320.0,
            prefixes: 24,
            output_tokens: 4,
            stall_ms: 5_000,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TimedConfig {
    pub order: Policy,
    pub kv_blocks: u32,
    pub output_tokens: u32,
    /// Time without a sign of life after which a daemon counts as gone, in ms.
    pub stall_ms: u64,
}

impl Default for TimedConfig {
    fn default() -> Self {
        Self { order: Policy::Fcfs, kv_blocks: 16_384, output_tokens: 2, stall_ms: 5_000 }
    }
}

/// The times of a process, in the form of the engine's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Times {
    layer_us: f64,
    token_us: f64,
    expert_us: f64,
    row_us: f64,
}

impl Times {
    /// Returns the time of a layer with this many tokens on each rank, in ns. A rank's own experts
    /// wait for all rows, and then compute the other ranks' rows.
    pub fn layer_ns(&self, tokens: u32) -> f64 {
        let tokens = f64::from(tokens);
        (self.layer_us + 2.0 * self.expert_us + (self.token_us + self.row_us) * tokens) * 1e3
    }
}

/// Times of a decode host. They are short so that decode does not delay answers.
const DECODE: Times = Times { layer_us: 250.0, token_us: 1.0, expert_us: 250.0, row_us: 1.0 };
const OUTPUT_TOKENS_MAX: u32 = 65_536;

impl ServingConfig {
    pub const fn context(&self, tokens_max: u32) -> u32 {
        tokens_max.saturating_add(self.output_tokens)
    }

    pub const fn kv_bytes(&self) -> usize {
        2 * self.kv_heads * self.head_dim * 4
    }

    /// Returns the average bytes that a token sends to and receives from experts on other hosts in
    /// a layer.
    pub fn expert_bytes(&self, ranks: usize) -> f64 {
        let away = (ranks - 1) as f64 / ranks as f64;
        2.0 * self.experts_per_token as f64 * away * (self.hidden * 4) as f64
    }
}

impl LabConfig {
    /// Returns the defaults for the real engine, which has fewer hosts and slower ports.
    pub fn real() -> Self {
        Self {
            engine: Engine::Real,
            real: Some(ServingConfig::default()),
            duration_s: 20.0,
            drain_s: 20.0,
            requests_per_second: Some(2.5),
            units: 1,
            ranks: 2,
            decodes: 2,
            port_mbit: 50,
            tokens_max: 1024,
            chunk_bytes: 16 << 10,
            window_bytes: 512 << 10,
            ..Self::default()
        }
    }

    /// Returns the defaults with all settings of the timed engine.
    pub fn timed() -> Self {
        Self { timed: Some(TimedConfig::default()), ..Self::default() }
    }

    pub fn serving(&self) -> ServingConfig {
        match self.engine {
            Engine::Timed => {}
            Engine::Real => return self.real.clone().unwrap_or_default(),
            Engine::Vllm => return self.vllm.clone().unwrap_or_default().serving(),
        }
        let (timed, scaling) = (self.timed.clone().unwrap_or_default(), self.scaling());
        let ranks = self.ranks as f64;
        // Keys and values have 4 bytes each. The width of a head must be even.
        let head_dim = 2 * (scaling.kv_bytes_per_token * ranks / 16.0).round().max(1.0) as usize;
        // A row goes to each other host and back.
        let row_bytes = scaling.collective_bytes_per_token * ranks / (ranks - 1.0);
        ServingConfig {
            layers: usize::from(scaling.layers),
            hidden: ((row_bytes / 4.0).round() as usize).max(2),
            heads: 1,
            kv_heads: 1,
            head_dim,
            experts: 4 * self.ranks,
            experts_per_token: self.ranks,
            kv_blocks: timed.kv_blocks,
            block_tokens: 16,
            chunk_tokens: self.model.batch_tokens.div_ceil(self.ranks as u32),
            order: timed.order,
            output_tokens: timed.output_tokens,
            stall_ms: timed.stall_ms,
            ..ServingConfig::default()
        }
    }

    /// Returns the times of a host's process, or `None` if it is not timed. Attention and experts
    /// each take half of a layer.
    pub fn times(&self, host: usize) -> Option<Times> {
        if self.engine != Engine::Timed {
            return None;
        }
        if host >= self.prefills() {
            return Some(DECODE);
        }
        let layer_us = self.model.layer_base_us / 2.0;
        let row_us = self.model.layer_token_us / 2.0;
        // A rank computes its own rows and the others' rows one after the other.
        Some(Times { layer_us, token_us: row_us, expert_us: layer_us / 2.0, row_us })
    }

    /// Returns why a setting has no effect on an engine, or `None` if it has an effect.
    pub fn no_use_with(engine: Engine, field: &str) -> Option<&'static str> {
        Some(match (engine, field) {
            (Engine::Timed | Engine::Real, "connector") => "only vLLM has one",
            (Engine::Timed, _) => return None,
            (Engine::Vllm, "collectives") => {
                "vLLM's prefill processes are whole, and exchange nothing: set collectives under \
                 [vllm] for an exchange beside them"
            }
            (Engine::Vllm, "nccl_plugin") => return None,
            (Engine::Vllm, "reads") => "the connector decides who reads",
            (Engine::Real, "reads") => return None,
            (_, "collectives" | "nccl_plugin") => {
                "the real engine sends experts' tokens itself, through Laxity's client"
            }
            (_, "validate_ideal") => "each request is always played alone first",
            (_, "load") => {
                "what the engine can do is not known before it runs: set requests_per_second"
            }
            (Engine::Vllm, "model") => "the model is computed: set its sizes under [vllm]",
            (Engine::Vllm, "victim_share") => "each prefill process keeps what it computed",
            (_, "victim_share") => "prefixes lie where the engine computed them",
            (_, "model") => "the model is computed: set its sizes under [real]",
            _ => return None,
        })
    }

    pub(crate) fn check_engine(&self) -> Result<(), InvalidLab> {
        let fail = |field, problem: String| Err(InvalidLab { field, problem });
        for (engine, is_set) in [
            (Engine::Real, self.real.is_some()),
            (Engine::Timed, self.timed.is_some()),
            (Engine::Vllm, self.vllm.is_some()),
        ] {
            if self.engine != engine && is_set {
                return fail(engine.name(), format!("is for engine = \"{}\"", engine.name()));
            }
        }
        let unused = Self::default();
        for (field, changed) in [
            ("load", self.load != unused.load),
            ("victim_share", self.victim_share != unused.victim_share),
            ("collectives", self.collectives != Collectives::Sockets),
            ("nccl_plugin", self.nccl_plugin.is_some()),
            ("reads", self.reads),
            ("model", self.model != unused.model),
            ("validate_ideal", self.validate_ideal != unused.validate_ideal),
        ] {
            if let Some(why) = Self::no_use_with(self.engine, field).filter(|_| changed) {
                let name = self.engine.name();
                return fail(field, format!("means nothing to the {name} engine: {why}"));
            }
        }
        match self.engine {
            Engine::Timed => self.check_timed(),
            Engine::Real => self.check_real(),
            Engine::Vllm => self.check_vllm(),
        }
    }

    fn check_timed(&self) -> Result<(), InvalidLab> {
        let timed = self.timed.clone().unwrap_or_default();
        let answers = (1..=OUTPUT_TOKENS_MAX).contains(&timed.output_tokens);
        let least = self.serving().context(self.tokens_max).div_ceil(16);
        let blocks = format!("must be at least {least}: one request of tokens_max takes them");
        keep_all([
            (answers, "timed.output_tokens", format!("must be 1 to {OUTPUT_TOKENS_MAX}")),
            (timed.kv_blocks >= least, "timed.kv_blocks", blocks),
            (timed.stall_ms > 0, "timed.stall_ms", "must be at least 1".to_owned()),
        ])
    }

    fn check_real(&self) -> Result<(), InvalidLab> {
        let given = self.requests_per_second.is_some();
        keep_all([(given, "requests_per_second", "has to be set for the real engine")])?;
        let real = self.serving();
        let at_least = |field, value: u64, least: u64| {
            (value >= least, field, format!("is {value}, and must be at least {least}"))
        };
        let (kv_blocks, answer) = (real.kv_blocks, real.output_tokens);
        let shortest = format!("is {answer}, and must be at most {OUTPUT_TOKENS_MAX}");
        let most = u32::MAX - answer;
        let prompt = format!("must be at most {most}: the answer is counted with it");
        keep_all([
            at_least("real.threads", real.threads as u64, 1),
            at_least("real.layers", real.layers as u64, 1),
            at_least("real.vocab", real.vocab as u64, 260),
            at_least("real.experts", real.experts as u64, self.ranks as u64),
            at_least("real.prefixes", u64::from(real.prefixes), 1),
            at_least("real.output_tokens", u64::from(answer), 1),
            at_least("real.block_tokens", u64::from(real.block_tokens), 1),
            at_least("real.stall_ms", real.stall_ms, 1),
            (answer <= OUTPUT_TOKENS_MAX, "real.output_tokens", shortest),
            (self.tokens_max <= most, "tokens_max", prompt),
        ])?;
        let context = (self.tokens_max + answer).div_ceil(real.block_tokens);
        let blocks = format!("is {kv_blocks}: one request of tokens_max takes {context}");
        let is_long = real.tokens_mean.is_finite() && real.tokens_mean >= 64.0;
        keep_all([
            (kv_blocks >= context, "real.kv_blocks", blocks),
            (is_long, "real.tokens_mean", "must be at least 64".to_owned()),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timed_engine_moves_the_bytes_of_all_ranks() {
        let config = LabConfig::timed();
        let (serving, scaling) = (config.serving(), config.scaling());
        let near = |ours: f64, of_a_rank: f64| (ours / (of_a_rank * 2.0) - 1.0).abs() < 0.05;
        assert!(near(serving.kv_bytes() as f64, scaling.kv_bytes_per_token));
        let collective = serving.expert_bytes(config.ranks);
        assert!(near(collective, 2.0 * scaling.collective_bytes_per_token));
        assert!(config.times(0).is_some() && LabConfig::real().times(0).is_none());
    }

    #[test]
    fn what_means_nothing_to_the_engine_is_refused_with_the_reason() {
        let refused = |change: fn(&mut LabConfig)| {
            let mut config = LabConfig::real();
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        assert!(refused(|c| c.load = 0.7).contains("requests_per_second"));
        assert!(refused(|c| c.collectives = Collectives::NcclPlugin).starts_with("collectives"));
        assert!(refused(|c| c.model.layers = 3).contains("[real]"));
        assert!(refused(|c| c.requests_per_second = None).starts_with("requests_per_second"));
        assert!(refused(|c| c.real.as_mut().unwrap().kv_blocks = 3).starts_with("real.kv_blocks"));
        let answers = refused(|c| c.real.as_mut().unwrap().output_tokens = u32::MAX - 1000);
        assert!(answers.starts_with("real.output_tokens"), "{answers}");
        assert!(refused(|c| c.tokens_max = u32::MAX).starts_with("tokens_max"));
        assert!(refused(|c| c.engine = Engine::Timed).starts_with("real"));
        assert!(refused(|c| c.timed = Some(TimedConfig::default())).starts_with("timed"));
    }
}
