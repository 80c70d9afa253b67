//! Figures that others measured and published, for the operators that no profile here covers.

/// FlashAttention-3 forward on H100, heads of 128, BF16, no mask: (tokens, TFLOP/s). Measured by
/// pytorch/benchmark, pull request 2391 (`triton --op flash_attention --d-head 128`), 16384 tokens
/// in all. The paper has the same kernel reach up to 740 TFLOP/s at heads of 256 (Shah et al.,
/// arXiv:2407.08608).
pub(super) const FLASH_ATTENTION_3_H100: [(f64, f64); 6] = [
    (512.0, 430.32),
    (1024.0, 517.099),
    (2048.0, 565.544),
    (4096.0, 590.233),
    (8192.0, 614.234),
    (16384.0, 620.73),
];

/// Peak that those are to be seen against, TFLOP/s.
pub(super) const H100_TFLOPS: f64 = 989.0;

/// FlashAttention-2 on A100: it reaches 50 to 73 % of the peak (Dao, arXiv:2307.08691, abstract),
/// the most with long sequences. Between short and long the shape is taken from FlashAttention-3.
pub(super) const FLASH_ATTENTION_2_A100: (f64, f64) = (16384.0, 0.73);

/// `chunk_gated_delta_rule` of flash-linear-attention 0.5.1 on H200, one request, heads of 128:
/// (tokens, value heads, ms). Measured by QwenLM/FlashQLA (`benchmark/benchmark_results_H200.txt`,
/// columns `1x…`, models 397B/122B at TP 8, 4, 2 and 1). Fused kernels for Hopper are up to three
/// times as fast; this is the one that runs on both GPUs.
pub(super) const GATED_DELTA_NET_H200: [(f64, f64, f64); 20] = [
    (2048.0, 8.0, 0.081),
    (4096.0, 8.0, 0.132),
    (8192.0, 8.0, 0.234),
    (16384.0, 8.0, 0.455),
    (32768.0, 8.0, 0.902),
    (2048.0, 16.0, 0.098),
    (4096.0, 16.0, 0.166),
    (8192.0, 16.0, 0.316),
    (16384.0, 16.0, 0.614),
    (32768.0, 16.0, 1.241),
    (2048.0, 32.0, 0.131),
    (4096.0, 32.0, 0.244),
    (8192.0, 32.0, 0.466),
    (16384.0, 32.0, 0.914),
    (32768.0, 32.0, 1.885),
    (2048.0, 64.0, 0.220),
    (4096.0, 64.0, 0.417),
    (8192.0, 64.0, 0.814),
    (16384.0, 64.0, 1.598),
    (32768.0, 64.0, 3.331),
];

/// Memory rate of that GPU, bytes per ns.
pub(super) const H200_BYTES_PER_NS: f64 = 4800.0;
