//! The configuration of vLLM in the lab: the model, and what its processes are told.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::{Engine, InvalidLab, LabConfig, keep_all};
use crate::serving::{Device, ServingConfig};

/// How vLLM moves KV from prefill to decode hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Connector {
    /// `NixlConnector`: the decode host reads.
    #[default]
    Nixl,
    /// `MooncakeConnector`: the prefill host writes, when the decode host asks for it.
    Mooncake,
}

/// Largest number of bytes of a token at a layer, far beyond that of any model.
const TOKEN_BYTES_MAX: u32 = 1 << 20;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VllmConfig {
    /// The Python that has vLLM and the package `laxity`. By default `target/vllm/bin/python` of
    /// the checkout that this program was built in.
    pub python: Option<PathBuf>,
    pub connector: Connector,
    /// Whether prefill hosts reuse each other's KV through Mooncake's store.
    pub store: bool,
    /// Whether layers of prefill hosts wait for an exchange by the NCCL plugin (stage 2).
    pub collectives: bool,
    /// Bytes that a token of a batch sends to other prefill hosts at each layer, and gets back.
    pub collective_token_bytes: u32,
    /// Time from which on the vLLM of the last prefill host is killed by SIGKILL, when it has a
    /// request, and started again, in s after the start of each run.
    pub kill_prefill_at: Option<f64>,
    /// The same for the vLLM of the last decode host.
    pub kill_decode_at: Option<f64>,
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub ffn: usize,
    pub vocab: usize,
    pub weights_seed: u64,
    pub step_tokens: u32,
    pub step_requests: u32,
    /// Mean tokens of a prompt of the conversation workload. Other workloads keep their ratio to
    /// it.
    pub tokens_mean: f64,
    pub prefixes: u32,
    pub output_tokens: u32,
    /// Time without a sign of life after which a daemon counts as gone, in ms.
    pub stall_ms: u64,
    pub arguments: Vec<String>,
}

impl Default for VllmConfig {
    fn default() -> Self {
        Self {
            python: None,
            connector: Connector::Nixl,
            store: false,
            collectives: false,
            // Rows of the model's width in 32 bits, to two experts.
            collective_token_bytes: 2 * 256 * 4,
            kill_prefill_at: None,
            kill_decode_at: None,
            layers: 4,
            hidden: 256,
            heads: 4,
            kv_heads: 4,
            head_dim: 128,
            ffn: 512,
            vocab: 512,
            weights_seed: 1,
            step_tokens: 1024,
            step_requests: 16,
            tokens_mean: 256.0,
            prefixes: 24,
            output_tokens: 4,
            stall_ms: 5_000,
            arguments: Vec::new(),
        }
    }
}

impl VllmConfig {
    pub(crate) fn serving(&self) -> ServingConfig {
        ServingConfig {
            device: Device::Cpu,
            layers: self.layers,
            hidden: self.hidden,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            ffn: self.ffn,
            vocab: self.vocab,
            experts: 0,
            experts_per_token: 0,
            weights_seed: self.weights_seed,
            chunk_tokens: self.step_tokens,
            tokens_mean: self.tokens_mean,
            prefixes: self.prefixes,
            output_tokens: self.output_tokens,
            stall_ms: self.stall_ms,
            ..ServingConfig::default()
        }
    }
}

impl LabConfig {
    /// Returns the defaults for vLLM: few processes, because each takes a gigabyte and half a
    /// minute to start. Keys and values are wide (16 KiB a token, 4 MiB a request) and ports slow,
    /// so that transfers meet at the decode host's port.
    pub fn vllm() -> Self {
        Self {
            engine: Engine::Vllm,
            vllm: Some(VllmConfig::default()),
            policies: ["none", "two_class", "laxity_no_hints", "laxity"].map(str::to_owned).into(),
            duration_s: 30.0,
            drain_s: 30.0,
            requests_per_second: Some(2.0),
            units: 2,
            ranks: 1,
            decodes: 1,
            port_mbit: 100,
            tokens_max: 768,
            chunk_bytes: 64 << 10,
            window_bytes: 1 << 20,
            ..Self::default()
        }
    }

    fn check_kill(&self, vllm: &VllmConfig) -> Result<(), InvalidLab> {
        let (field, at, hosts) = match (vllm.kill_prefill_at, vllm.kill_decode_at) {
            (None, None) => return Ok(()),
            (Some(at), _) => ("vllm.kill_prefill_at", at, self.prefills()),
            (None, Some(at)) => ("vllm.kill_decode_at", at, self.decodes),
        };
        let problem = if vllm.kill_prefill_at.and(vllm.kill_decode_at).is_some() {
            "is one death, and kill_decode_at another: a run has one"
        } else if !(0.0..=self.duration_s).contains(&at) {
            "must lie between 0 and duration_s, while requests arrive"
        } else if hosts < 2 {
            "needs two hosts of this kind: the requests of the others must not notice"
        } else if vllm.store || vllm.connector != Connector::Nixl {
            "needs NIXL and no store: what others leave behind was never looked at"
        } else {
            return Ok(());
        };
        Err(InvalidLab { field, problem: problem.to_owned() })
    }

    pub(crate) fn check_vllm(&self) -> Result<(), InvalidLab> {
        const SOME: &str = "must be at least 1";
        let vllm = self.vllm.clone().unwrap_or_default();
        let exchanges = !vllm.collectives || self.prefills() >= 2;
        keep_all([
            (self.requests_per_second.is_some(), "requests_per_second", "has to be set for vLLM"),
            (vllm.layers > 0, "vllm.layers", SOME),
            (vllm.hidden > 0, "vllm.hidden", SOME),
            (vllm.kv_heads > 0, "vllm.kv_heads", SOME),
            (vllm.ffn > 0, "vllm.ffn", SOME),
            (vllm.step_requests > 0, "vllm.step_requests", SOME),
            (vllm.prefixes > 0, "vllm.prefixes", SOME),
            (vllm.output_tokens > 0, "vllm.output_tokens", SOME),
            (vllm.stall_ms > 0, "vllm.stall_ms", SOME),
            (exchanges, "vllm.collectives", "needs two prefill hosts: set units or ranks"),
        ])?;
        self.check_kill(&vllm)?;
        let bytes = (1..=TOKEN_BYTES_MAX).contains(&vllm.collective_token_bytes);
        let plugin = self.nccl_plugin.is_none() || vllm.collectives;
        let no_plugin = "has a use for vLLM only with vllm.collectives = true";
        let width = vllm.head_dim >= 32 && vllm.head_dim.is_multiple_of(32);
        let heads = vllm.heads > 0 && vllm.heads.is_multiple_of(vllm.kv_heads);
        let step = vllm.step_tokens >= self.tokens_max.saturating_add(vllm.output_tokens);
        let mean = vllm.tokens_mean.is_finite() && vllm.tokens_mean >= 64.0;
        keep_all([
            (bytes, "vllm.collective_token_bytes", "must be 1 to 1048576"),
            (plugin, "nccl_plugin", no_plugin),
            (width, "vllm.head_dim", "must be a multiple of 32"),
            (heads, "vllm.heads", "must be a multiple of vllm.kv_heads"),
            (vllm.vocab >= 260, "vllm.vocab", "must be at least 260: prompts are bytes"),
            (step, "vllm.step_tokens", "must hold a prompt of tokens_max and its answer"),
            (mean, "vllm.tokens_mean", "must be at least 64"),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_vllm_cannot_serve_or_has_no_use_for_is_refused_by_name() {
        let refused = |change: fn(&mut LabConfig)| {
            let mut config = LabConfig::vllm();
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        assert!(refused(|c| c.load = 0.7).contains("requests_per_second"));
        assert!(refused(|c| c.reads = true).starts_with("reads"));
        assert!(refused(|c| c.model.layers = 3).contains("[vllm]"));
        assert!(refused(|c| c.tokens_max = 4096).starts_with("vllm.step_tokens"));
        assert!(refused(|c| c.vllm.as_mut().unwrap().heads = 3).starts_with("vllm.heads"));
        assert!(refused(|c| c.vllm.as_mut().unwrap().head_dim = 48).starts_with("vllm.head_dim"));
        assert!(refused(|c| c.vllm.as_mut().unwrap().layers = 0).starts_with("vllm.layers"));
        assert!(refused(|c| c.engine = Engine::Real).starts_with("vllm"));
        assert!(refused(|c| c.nccl_plugin = Some("/p.so".into())).starts_with("nccl_plugin"));
        let one_host = refused(|c| {
            c.units = 1;
            c.vllm.as_mut().unwrap().collectives = true;
        });
        assert!(one_host.starts_with("vllm.collectives"), "{one_host}");
        let with_store = refused(|c| {
            let vllm = c.vllm.as_mut().unwrap();
            (vllm.kill_prefill_at, vllm.store) = (Some(1.0), true);
        });
        assert!(with_store.starts_with("vllm.kill_prefill_at"), "{with_store}");
        let one_decode = refused(|c| c.vllm.as_mut().unwrap().kill_decode_at = Some(1.0));
        assert!(one_decode.starts_with("vllm.kill_decode_at"), "{one_decode}");
        let alone = LabConfig { ranks: 1, ..LabConfig::real() };
        assert!(alone.validate().unwrap_err().to_string().starts_with("ranks"));
    }
}
