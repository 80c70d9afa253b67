//! Computing time of a layer: a roofline for every operator of a prefill step, with efficiencies
//! that are fitted to recorded operator profiles.
//!
//! The module `operator` has the formulas and their assumptions, [`coefficients`] the numbers in
//! them. `fits/fit.py` computes these numbers from profiles of Vidur (Agrawal et al., MLSys 2024).
//! For operators without a profile they come from published figures.
//!
//! What is measured and what is extrapolated:
//!
//! * Matrix products, norms, rotary embedding, activation and residual add: fitted on A100 (hidden
//!   4096 and 8192, 1 to 32768 tokens, TP 1 to 8) and on H100 (hidden 4096, 1 to 4096 tokens).
//!   Other sizes, experts and the router are extrapolations through the same forms.
//! * All-reduce: fitted on A100 within one server (2, 4, 8 GPUs; 2 KiB to 64 MiB). H100 takes the
//!   same latencies and the same shares of its NVLink.
//! * Attention and Gated DeltaNet: published figures, no profiles.
//! * Not modelled: launch gaps, host time, clocks that throttle under load, and overlap of
//!   operators.
//!
//! Runs use `+ − × ÷`, minimum and maximum only, so that virtual times are identical on every
//! machine.

pub mod coefficients;
mod gpu;
mod operator;

pub use coefficients::Coefficients;
pub use gpu::Gpu;

use crate::model::{LinearAttention, Model};
use operator::{AllReduce, Attention, Gemm, LinearCost};

/// Durations in nanoseconds of a layer on a rank, whose `tp` GPUs split every matrix.
///
/// A layer begins with [`Self::attention_ns`]. A dense model then has [`Self::mlp_ns`]. A model
/// with experts has [`Self::experts_ns`] and, in parallel, [`Self::shared_ns`]. A rank without
/// tokens takes no time.
#[derive(Clone, Debug, PartialEq)]
pub struct Compute {
    full: BlockCost,
    attention: Attention,
    linear: Option<BlockCost>,
    full_attention_every: u32,
    mlp: BlockCost,
    experts: Experts,
    shared: Option<BlockCost>,
    ends: Ends,
}

/// The cost of two matrix products with what comes before, between and after them.
#[derive(Clone, Debug, PartialEq)]
struct BlockCost {
    first: Gemm,
    last: Gemm,
    router: Option<Gemm>,
    streams: LinearCost,
    reduce: AllReduce,
}

impl BlockCost {
    fn ns(&self, tokens: f64) -> f64 {
        self.grouped_ns(tokens, 1.0, tokens)
    }

    /// Returns the time of `rows` rows over `groups` matrices of weights, of which `reduced` rows
    /// are left after the sum.
    fn grouped_ns(&self, rows: f64, groups: f64, reduced: f64) -> f64 {
        let router = self.router.map_or(0.0, |router| router.ns(rows, 1.0));
        self.first.ns(rows, groups)
            + self.last.ns(rows, groups)
            + router
            + self.streams.ns(rows)
            + self.reduce.ns(reduced)
    }
}

#[derive(Clone, Debug, PartialEq)]
struct Experts {
    mlp: BlockCost,
    /// Tokens per (token, expert) pair on a rank. Element `i` is for `i + 1` used experts.
    copies_per_pair: Vec<f64>,
}

#[derive(Clone, Debug, PartialEq)]
struct Ends {
    embedding: LinearCost,
    reduce: AllReduce,
    head: Gemm,
}

impl Compute {
    /// Returns the durations of a model on ranks of `tp` GPUs. Heads and columns that `tp` does not
    /// divide are padded. Key-value heads are replicated if there are fewer than GPUs.
    ///
    /// # Panics
    /// Panics if `tp` is zero.
    pub fn new(gpu: &Gpu, model: &Model, tp: u32) -> Self {
        assert!(tp > 0, "a rank has one GPU at least");
        let parts = Parts { gpu, model, tp };
        let heads = parts.split(model.heads);
        let kv_heads = parts.split(model.kv_heads);
        let head_dim = f64::from(model.head_dim);
        let kv_bytes = 2.0 * kv_heads * head_dim * model.kv_bytes_per_value;
        Self {
            full: parts.full_attention(heads, kv_heads, head_dim),
            attention: Attention::new(&gpu.coefficients, gpu, heads, head_dim, kv_bytes),
            linear: model.linear_attention.as_ref().map(|linear| parts.linear_attention(linear)),
            full_attention_every: u32::from(model.full_attention_every),
            mlp: parts.mlp(model.ffn),
            experts: Experts {
                mlp: parts.experts(),
                copies_per_pair: copies_per_pair(model.experts, model.top_k),
            },
            shared: (model.shared_ffn > 0).then(|| parts.mlp(model.shared_ffn)),
            ends: parts.ends(),
        }
    }

    /// Returns the time of a layer (counted from 0) before its MLP: norms, QKV, attention, output
    /// projection, TP all-reduce, residual add, and the router if there are experts. `tokens` new
    /// tokens of this rank attend to `pairs` tokens in total (`n (n + 1) / 2` for a prompt of `n`).
    /// Linear attention ignores `pairs`.
    pub fn attention_ns(&self, tokens: u64, pairs: u64, layer: u16) -> u64 {
        self.mixed_attention_ns((tokens, pairs), (0, 0), layer)
    }

    /// Returns the time of [`Self::attention_ns`] for an iteration of continuous batching. In
    /// addition to the prompt tokens, `decodes` requests compute one token each and attend to
    /// `context` tokens in total, whose keys and values are read once.
    pub fn mixed_attention_ns(
        &self,
        (tokens, pairs): (u64, u64),
        (decodes, context): (u64, u64),
        layer: u16,
    ) -> u64 {
        let rows = (tokens + decodes) as f64;
        if rows == 0.0 {
            return 0;
        }
        let full = (u32::from(layer) + 1).is_multiple_of(self.full_attention_every);
        whole(match &self.linear {
            Some(linear) if !full => linear.ns(rows),
            _ => {
                let prompts = match tokens {
                    0 => 0.0,
                    _ => self.attention.ns(tokens as f64, pairs as f64),
                };
                let others = match decodes {
                    0 => 0.0,
                    _ => self.attention.ns(1.0, context as f64),
                };
                self.full.ns(rows) + prompts + others
            }
        })
    }

    /// Returns the time of the experts of one layer on one rank, for `tokens` (token, expert) pairs
    /// on `experts` experts. It includes reading the weights of these experts, sorting the tokens
    /// by expert, summing the results, and the TP all-reduce.
    pub fn experts_ns(&self, tokens: u64, experts: u32) -> u64 {
        if tokens == 0 {
            return 0;
        }
        let Experts { mlp, copies_per_pair } = &self.experts;
        let used = (experts as usize).clamp(1, copies_per_pair.len());
        let (rows, groups) = (tokens as f64, used as f64);
        whole(mlp.grouped_ns(rows, groups, rows * copies_per_pair[used - 1]))
    }

    /// Returns the time of the shared experts for a rank's tokens, or 0 if there are none. They
    /// need no dispatch and can run during one.
    pub fn shared_ns(&self, tokens: u64) -> u64 {
        match &self.shared {
            Some(shared) if tokens > 0 => whole(shared.ns(tokens as f64)),
            _ => 0,
        }
    }

    /// Returns the time of a layer's dense MLP on one rank, with TP all-reduce and residual add.
    pub fn mlp_ns(&self, tokens: u64) -> u64 {
        if tokens == 0 {
            return 0;
        }
        whole(self.mlp.ns(tokens as f64))
    }

    /// Returns the time of the embedding and the head. The embedding looks `tokens` tokens up. The
    /// head computes the logits of the last token of each of `requests` requests.
    pub fn ends_ns(&self, tokens: u64, requests: u64) -> u64 {
        if tokens == 0 {
            return 0;
        }
        let Ends { embedding, reduce, head } = &self.ends;
        let rows = tokens as f64;
        let head = if requests > 0 { head.ns(requests as f64, 1.0) } else { 0.0 };
        whole(embedding.ns(rows) + reduce.ns(rows) + head)
    }
}

fn whole(ns: f64) -> u64 {
    (ns + 0.5) as u64
}

/// Returns the ratio of distinct tokens to (token, expert) pairs on a rank, for each number `e` of
/// evenly used experts: `(1 − Π (1 − e / (E − j))) / (k e / E)`, j < k.
fn copies_per_pair(experts: u32, top_k: u32) -> Vec<f64> {
    let all = f64::from(experts);
    let ratio = |used: u32| {
        let used = f64::from(used);
        let none: f64 = (0..top_k).map(|j| (1.0 - used / (all - f64::from(j))).max(0.0)).product();
        (1.0 - none) / (f64::from(top_k) * used / all)
    };
    (1..=experts).map(ratio).collect()
}

struct Parts<'a> {
    gpu: &'a Gpu,
    model: &'a Model,
    tp: u32,
}

impl Parts<'_> {
    /// Returns one GPU's part of `all` heads or columns, rounded up.
    fn split(&self, all: u32) -> f64 {
        f64::from(all.div_ceil(self.tp))
    }

    fn hidden(&self) -> f64 {
        f64::from(self.model.hidden)
    }

    fn gemm(&self, columns: f64, depth: f64) -> Gemm {
        let of = &self.gpu.coefficients.gemm;
        Gemm::new(of, self.gpu, columns, depth, self.model.bytes_per_value)
    }

    fn stream(&self, of: &coefficients::StreamCoefficients, values: f64) -> LinearCost {
        LinearCost::stream(of, self.gpu, values * self.model.bytes_per_value)
    }

    fn reduce(&self) -> AllReduce {
        let of = &self.gpu.coefficients.all_reduce;
        let bytes = self.hidden() * self.model.bytes_per_value;
        AllReduce::new(of, self.gpu, self.tp, bytes)
    }

    fn block(&self, columns: f64, depth: f64, between: LinearCost) -> BlockCost {
        let of = &self.gpu.coefficients.stream;
        let hidden = self.hidden();
        let norm = self.stream(&of.norm, 2.0 * hidden);
        let mut streams = norm.then(norm).then(between).then(self.stream(&of.add, 3.0 * hidden));
        let router = self.model.has_experts().then(|| {
            // Logits have 32 bits, so each counts as two 16-bit values read and two written.
            let experts = f64::from(self.model.experts);
            streams = streams.then(self.stream(&of.activation, 4.0 * experts));
            self.gemm(experts, hidden)
        });
        BlockCost {
            first: self.gemm(columns, hidden),
            last: self.gemm(hidden, depth),
            router,
            streams,
            reduce: self.reduce(),
        }
    }

    fn full_attention(&self, heads: f64, kv_heads: f64, head_dim: f64) -> BlockCost {
        let of = &self.gpu.coefficients.stream;
        let width = heads * head_dim;
        let turned = width + kv_heads * head_dim;
        let mut columns = turned + kv_heads * head_dim;
        let mut between = self.stream(&of.rope, 2.0 * turned);
        if self.model.query_gate {
            columns += width;
            between = between.then(self.stream(&of.activation, 3.0 * width));
        }
        self.block(columns, width, between)
    }

    fn linear_attention(&self, linear: &LinearAttention) -> BlockCost {
        let of = &self.gpu.coefficients;
        let tp = f64::from(self.tp);
        let heads = self.split(linear.value_heads);
        let width = linear.value_width() as f64 / tp;
        let mixed = linear.mixed_width() as f64 / tp;
        let convolution = self.stream(&of.stream.activation, 2.0 * mixed);
        let gated_norm = self.stream(&of.stream.norm, 3.0 * width);
        let rule = LinearCost::delta_net(&of.linear_attention, self.gpu, heads);
        let between = convolution.then(rule).then(gated_norm);
        self.block(linear.projected_width() as f64 / tp, width, between)
    }

    fn mlp(&self, ffn: u32) -> BlockCost {
        let of = &self.gpu.coefficients.stream;
        let inner = self.split(ffn);
        let activation = self.stream(&of.activation, 3.0 * inner);
        BlockCost {
            first: self.gemm(2.0 * inner, self.hidden()),
            last: self.gemm(self.hidden(), inner),
            router: None,
            streams: activation.then(self.stream(&of.add, 3.0 * self.hidden())),
            reduce: self.reduce(),
        }
    }

    fn experts(&self) -> BlockCost {
        let of = &self.gpu.coefficients.stream;
        let moved = self.stream(&of.add, 2.0 * self.hidden());
        let mlp = self.mlp(self.model.ffn);
        BlockCost { streams: mlp.streams.then(moved), ..mlp }
    }

    fn ends(&self) -> Ends {
        let of = &self.gpu.coefficients.stream;
        let hidden = self.hidden();
        Ends {
            embedding: self
                .stream(&of.embedding, 2.0 * hidden)
                .then(self.stream(&of.norm, 2.0 * hidden)),
            reduce: self.reduce(),
            head: self.gemm(self.split(self.model.vocab), hidden),
        }
    }
}

#[cfg(test)]
mod tests;
