//! The models and nodes of Maestro's evaluation: five Qwen3 models on A100s of 40 GB (Table V and
//! figures 8 and 10).
//!
//! Sizes are from the models' `config.json` files. The resulting bytes of weights are within a few
//! percent of Table V. The context memory of each model is from there. Times are those of this
//! crate's roofline, with 3 ms of host time per iteration.

use laxity_requests::Span;
use laxity_requests::latency::{Composition, Latency as _};
use laxity_requests::workflow::{ClusterId, ModelSpec, NodeSpec};

use super::super::PaperError;
use super::super::latency::Roofline;
use crate::compute::Gpu;
use crate::model::Model;

pub(super) const GB: u64 = 1_000_000_000;
pub(super) const SLOTS: u32 = 16;
const CONTEXT: u32 = 1500;
const BENCHMARK: u32 = 4;

/// Name, layers, hidden, heads and ffn of each model, and Table V's context in MB.
const QWEN3: [(&str, u16, u32, u32, u32, u64); 5] = [
    ("Qwen3-0.6B", 28, 1024, 16, 3072, 194),
    ("Qwen3-1.7B", 28, 2048, 16, 6144, 194),
    ("Qwen3-4B", 36, 2560, 32, 9728, 256),
    ("Qwen3-8B", 36, 4096, 32, 12288, 245),
    ("Qwen3-14B", 40, 5120, 40, 17408, 286),
];

#[derive(Clone, Debug)]
pub(super) struct ServedModel {
    pub(super) spec: ModelSpec,
    roofline: Roofline,
    /// Time of a decode iteration in nanoseconds, by the number of stages.
    decode: Vec<f64>,
}

impl ServedModel {
    /// Returns the time of a prompt on an otherwise idle GPU, in nanoseconds.
    pub(super) fn prefill(&self, prompt: u32) -> f64 {
        let of = Composition::default().with_chunk(0, prompt);
        self.roofline.iteration(&of).0 as f64
    }

    /// Returns the time per token of each of `batch` stages that decode together, in nanoseconds.
    pub(super) fn decode(&self, batch: usize) -> f64 {
        self.decode[batch.clamp(1, self.decode.len() - 1)]
    }

    /// Returns the time of a stage on an otherwise idle GPU, in nanoseconds.
    pub(super) fn alone(&self, prompt: u32, output: u32) -> f64 {
        self.prefill(prompt) + f64::from(output) * self.decode(1)
    }
}

/// Returns an A100 of 40 GB: the rates of the 80 GB version, with its own memory (1555 GB/s,
/// NVIDIA's data sheet).
fn gpu() -> Result<Gpu, PaperError> {
    let mut gpu = Gpu::named("a100")?;
    gpu.memory_bytes = 40 * GB;
    gpu.memory_bytes_per_second = 1.555e12;
    Ok(gpu)
}

pub(super) fn models() -> Result<Vec<ServedModel>, PaperError> {
    let gpu = gpu()?;
    let served =
        |(name, layers, hidden, heads, ffn, context): (&'static str, u16, u32, u32, u32, u64)| {
            let model = Model {
                name: name.to_owned(),
                layers,
                hidden,
                heads,
                kv_heads: 8,
                head_dim: 128,
                query_gate: false,
                ffn,
                experts: 1,
                top_k: 1,
                shared_ffn: 0,
                vocab: 151_936,
                bytes_per_value: 2.0,
                kv_bytes_per_value: 2.0,
                full_attention_every: 1,
                linear_attention: None,
            };
            let roofline = Roofline::new(&gpu, &model, 1, Span::from_millis(3));
            let decodes = |batch: u32| {
                let of = (0..batch).fold(Composition::default(), |of, _| of.with_decode(CONTEXT));
                roofline.iteration(&of).0
            };
            let prompt = |tokens| {
                let of = Composition::default().with_chunk(0, tokens);
                roofline.iteration(&of).0
            };
            let (one, many) = (prompt(1), prompt(2048));
            ServedModel {
                spec: ModelSpec {
                    weights: roofline.weights_bytes,
                    context: context * 1_000_000,
                    kv_per_token: roofline.kv_bytes_per_token,
                    prefill_base: one,
                    prefill_per_token: many.saturating_sub(one) / 2047,
                    decode_per_token: decodes(BENCHMARK),
                    // A running process creates CUDA graphs and loads kernels again, which takes
                    // seconds.
                    context_start: 6_000_000_000,
                },
                decode: (0..=SLOTS).map(|batch| decodes(batch.max(1)) as f64).collect(),
                roofline,
            }
        };
    Ok(QWEN3.map(served).to_vec())
}

/// Returns a node with one GPU: PCIe 4 to the host, NVMe, and a store over 10 Gb/s. Its half TB of
/// host memory and 1 TB of disk are half of the paper's servers, which have two GPUs each.
pub(super) const fn node(cluster: u16) -> NodeSpec {
    NodeSpec {
        cluster: ClusterId(cluster),
        gpu: 40 * GB,
        other: 1_500_000_000,
        host: 500 * GB,
        disk: 1000 * GB,
        host_rate: 25 * GB,
        disk_rate: 3 * GB,
        remote_rate: GB + GB / 4,
        slots: SLOTS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_those_of_table_v_within_a_tenth() {
        // The table uses GiB, and the two smallest models share the weights of embedding and head.
        let table = [1.12, 3.21, 7.55, 15.27, 27.52];
        for (model, gib) in models().expect("built in").iter().zip(table).skip(2) {
            let here = model.spec.weights as f64 / f64::from(1 << 30);
            assert!((here / gib - 1.0).abs() < 0.1, "{gib} GiB: {here}");
        }
    }

    #[test]
    fn decoding_together_is_cheaper_than_one_after_the_other() {
        for model in models().expect("built in") {
            assert!(model.decode(8) < 2.0 * model.decode(1));
            assert!(model.decode(8) > model.decode(1));
        }
    }
}
