//! Times of single operators on one GPU: rooflines (Williams, Waterman, Patterson, CACM 2009) with
//! coefficients from `coefficients`. Everything that does not depend on the number of tokens is
//! computed once per model.
//!
//! *Matrix product* of `m` × `k` by `k` × `n`, values of `b` bytes, with peak rate `P` and memory
//! rate `W`:
//!
//! ```text
//! t = overhead + max(2 (m + rows)(n + columns)(k + depth) / (P · compute),
//!                    b (m·k + k·n + m·n) / (W · memory))
//! ```
//!
//! The additions model tiles that are not full and pipelines that must fill. A product reaches
//! `compute · m/(m + rows) · n/(n + columns) · k/(k + depth)` of the peak. With few tokens the time
//! is that of reading the weights. A grouped product of experts is one launch: each of `g` groups
//! has its own weights to read and tiles to fill, so `rows` and `k·n` count `g` times. The model
//! assumes that a grouped kernel is as efficient as a dense one. MegaBlocks reports 98.6 % of
//! cuBLAS's throughput (Gale et al., MLSys 2023).
//!
//! *Operators that only read and write*: `t = overhead + bytes / (W · memory)`.
//!
//! *All-reduce* of `s` bytes over `w` GPUs whose NVLink carries `L` in each direction. The time is
//! the minimum over two methods, because NCCL has protocols for small and for large sizes:
//!
//! ```text
//! t = latency + hop (w − 1) + s · 2 (w − 1)/w / (L · nvlink)
//! ```
//!
//! *Attention* of tokens that attend to `pairs` tokens in all, with `h` heads of width `d`:
//!
//! ```text
//! t = overhead + max(4 h d (pairs + context · tokens) / (P · compute),
//!                    pairs / min(tokens, 512) · bytes of a token's keys and values / (W · memory))
//! ```
//!
//! The first term is `compute · c/(c + context)` of the peak for a mean context of `c`. Keys and
//! values are read once per 512 queries, because tiles of one head run in parallel and share them
//! in L2. For many requests with few new tokens each this is too little. The overhead and the share
//! of the memory rate are those of matrix products.
//!
//! *Gated DeltaNet*: `t = overhead + tokens (token + heads · bytes / W)`.

use super::coefficients as of;
use super::gpu::Gpu;

const QUERIES_PER_READ: f64 = 512.0;

/// Cost of `fixed + per_row · rows` nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct LinearCost {
    fixed: f64,
    per_row: f64,
}

impl LinearCost {
    pub(crate) fn stream(of: &of::StreamCoefficients, gpu: &Gpu, bytes: f64) -> Self {
        Self {
            fixed: of.overhead_us * 1e3,
            per_row: bytes * 1e9 / (gpu.memory_bytes_per_second * of.memory),
        }
    }

    pub(crate) fn delta_net(of: &of::LinearAttentionCoefficients, gpu: &Gpu, heads: f64) -> Self {
        let bytes = heads * of.bytes_per_head;
        Self {
            fixed: of.overhead_us * 1e3,
            per_row: of.token_ns + bytes * 1e9 / gpu.memory_bytes_per_second,
        }
    }

    pub(crate) fn then(self, next: Self) -> Self {
        Self { fixed: self.fixed + next.fixed, per_row: self.per_row + next.per_row }
    }

    pub(crate) fn ns(&self, rows: f64) -> f64 {
        self.fixed + self.per_row * rows
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Gemm {
    overhead: f64,
    padding: f64,
    compute_per_row: f64,
    memory_per_row: f64,
    memory_per_group: f64,
}

impl Gemm {
    pub(crate) fn new(
        of: &of::GemmCoefficients,
        gpu: &Gpu,
        columns: f64,
        depth: f64,
        bytes: f64,
    ) -> Self {
        let flops_per_ns = gpu.peak_flops * of.compute / 1e9;
        let bytes_per_ns = gpu.memory_bytes_per_second * of.memory / 1e9;
        Self {
            overhead: of.overhead_us * 1e3,
            padding: of.rows,
            compute_per_row: 2.0 * (columns + of.columns) * (depth + of.depth) / flops_per_ns,
            memory_per_row: (columns + depth) * bytes / bytes_per_ns,
            memory_per_group: columns * depth * bytes / bytes_per_ns,
        }
    }

    /// Returns the time for `rows` rows in total over `groups` matrices of weights, in nanoseconds.
    pub(crate) fn ns(&self, rows: f64, groups: f64) -> f64 {
        let compute = (rows + groups * self.padding) * self.compute_per_row;
        let memory = rows * self.memory_per_row + groups * self.memory_per_group;
        self.overhead + compute.max(memory)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct AllReduce {
    small: LinearCost,
    large: LinearCost,
}

impl AllReduce {
    pub(crate) fn new(of: &of::AllReduceCoefficients, gpu: &Gpu, gpus: u32, bytes: f64) -> Self {
        if gpus < 2 {
            return Self::default();
        }
        let gpus = f64::from(gpus);
        let carried = bytes * 2.0 * (gpus - 1.0) / gpus;
        let line = |ring: &of::Ring| LinearCost {
            fixed: (ring.latency_us + ring.hop_us * (gpus - 1.0)) * 1e3,
            per_row: carried * 1e9 / (gpu.nvlink_bytes_per_second * ring.nvlink),
        };
        Self { small: line(&of.small), large: line(&of.large) }
    }

    pub(crate) fn ns(&self, rows: f64) -> f64 {
        self.small.ns(rows).min(self.large.ns(rows))
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Attention {
    overhead: f64,
    context: f64,
    compute_per_pair: f64,
    memory_per_key: f64,
}

impl Attention {
    pub(crate) fn new(of: &of::Coefficients, gpu: &Gpu, heads: f64, width: f64, kv: f64) -> Self {
        let flops_per_ns = gpu.peak_flops * of.attention.compute / 1e9;
        let bytes_per_ns = gpu.memory_bytes_per_second * of.gemm.memory / 1e9;
        Self {
            overhead: of.gemm.overhead_us * 1e3,
            context: of.attention.context,
            compute_per_pair: 4.0 * heads * width / flops_per_ns,
            memory_per_key: kv / bytes_per_ns,
        }
    }

    pub(crate) fn ns(&self, tokens: f64, pairs: f64) -> f64 {
        let compute = (pairs + self.context * tokens) * self.compute_per_pair;
        let memory = pairs / tokens.min(QUERIES_PER_READ) * self.memory_per_key;
        self.overhead + compute.max(memory)
    }
}
