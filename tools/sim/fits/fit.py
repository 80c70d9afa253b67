#!/usr/bin/env python3
"""Makes the coefficients of the compute-time model, `a100.toml` and `h100.toml` in this folder.

    tools/sim/fits/fit.py PROFILES

PROFILES has operator profiles in Vidur's form (microsoft/vidur, `data/profiling`): csv files
`GPU_MODEL_linear.csv` and `GPU_SYSTEM_all_reduce.csv` with the median of each operator. The forms
of the model are those of `src/compute/operator.rs`. Residuals are logarithms of predicted over
measured time, so that 1 us and 100 ms count alike. An outlier weighs less than its square.

It needs numpy and scipy. What the profiles leave open differs a little by solver: the committed
coefficients of all-reduce differ by 0.5 % from what this writes, and the overhead of `add` on H100
by 5 %. The others are the same to the last digit.
"""

import csv
import pathlib
import sys

import numpy as np
from scipy.optimize import least_squares

# Peak TFLOP/s, memory and NVLink GB/s, as in ../gpus.
GPUS = {"a100": (312.0, 2039.0, 300.0), "h100": (989.0, 3350.0, 450.0)}
BYTES = 2.0
SHARE = (0.01, 1.0)

# FlashAttention-3 forward on H100, heads of 128, BF16, no mask: tokens, TFLOP/s
# (pytorch/benchmark, pull request 2391; 16384 tokens in all).
FLASH_ATTENTION_3 = [(512, 430.32), (1024, 517.099), (2048, 565.544), (4096, 590.233),
                     (8192, 614.234), (16384, 620.73)]
# FlashAttention-2 on A100 reaches 73 % of the peak with long sequences (Dao, arXiv:2307.08691).
FLASH_ATTENTION_2 = (16384, 0.73)
# chunk_gated_delta_rule of flash-linear-attention 0.5.1 on H200, one request, heads of 128, for
# 2048 to 32768 tokens: value heads, ms (QwenLM/FlashQLA, benchmark_results_H200.txt).
DELTA_NET = {8: [0.081, 0.132, 0.234, 0.455, 0.902], 16: [0.098, 0.166, 0.316, 0.614, 1.241],
             32: [0.131, 0.244, 0.466, 0.914, 1.885], 64: [0.220, 0.417, 0.814, 1.598, 3.331]}
H200_BYTES_PER_NS = 4800.0


def fit(predict, measured, parameters):
    """The parameters, each (start, least, most), at which `predict` comes nearest."""
    start, low, high = np.log(np.array([(p[0], p[1], p[2]) for p in parameters])).T
    found = least_squares(lambda logs: np.log(predict(*np.exp(logs)) / measured), start,
                          bounds=(low, high), loss="soft_l1", f_scale=0.1,
                          xtol=1e-12, ftol=1e-12, gtol=1e-12)
    return [float(f"{value:.4e}") for value in np.exp(found.x)]


def read(files):
    """The columns of csv files, one below the other."""
    rows = [row for file in files for row in csv.DictReader(file.open())]
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]
            if all(is_number(row[name]) for row in rows)}


def is_number(text):
    try:
        return float(text) > 0
    except ValueError:
        return False


def gemm(gpu, rows, columns, depth):
    peak, memory, _ = GPUS[gpu]

    def predict(overhead, compute, share, more_rows, more_columns, more_depth):
        flops = 2 * (rows + more_rows) * (columns + more_columns) * (depth + more_depth)
        moved = BYTES * (rows * depth + depth * columns + rows * columns)
        return overhead * 1e3 + np.maximum(flops / (peak * 1e3 * compute),
                                           moved / (memory * share))
    return predict


def stream(gpu, moved):
    return lambda overhead, share: overhead * 1e3 + moved / (GPUS[gpu][1] * share)


def linear(gpu, files):
    data = read(files)
    tokens, tp = data["num_tokens"], data["num_tensor_parallel_workers"]
    hidden, inner = data["n_embd"], data["n_expanded_embd"]
    keys = data["n_kv_head"] * hidden / data["n_head"]
    ns = lambda operator: data[f"{operator}_ms_median"] * 1e6
    products = {"attn_pre_proj": ((hidden + 2 * keys) / tp, hidden),
                "attn_post_proj": (hidden, hidden / tp),
                "mlp_up_proj": (2 * inner / tp, hidden),
                "mlp_down_proj": (hidden, inner / tp)}
    columns, depth = (np.concatenate([shape[i] for shape in products.values()]) for i in (0, 1))
    predict = gemm(gpu, np.tile(tokens, len(products)), columns, depth)
    measured = np.concatenate([ns(operator) for operator in products])
    more = (60.0, 0.1, 1000.0)
    found = fit(predict, measured, [(4.0, 0.1, 50.0), (0.75, *SHARE), (0.8, *SHARE), more, more, more])
    names = ("overhead_us", "compute", "memory", "rows", "columns", "depth")
    tables = {"gemm": dict(zip(names, found))}
    streams = {"embedding": {"emb": 2 * hidden},
               "norm": {"input_layernorm": 2 * hidden, "post_attention_layernorm": 2 * hidden},
               "rope": {"attn_rope": 2 * (hidden + keys) / tp},
               "activation": {"mlp_act": 3 * inner / tp},
               "add": {"add": 3 * hidden}}
    for name, operators in streams.items():
        moved = np.concatenate([values * BYTES * tokens for values in operators.values()])
        measured = np.concatenate([ns(operator) for operator in operators])
        found = fit(stream(gpu, moved), measured, [(2.0, 0.1, 50.0), (0.5, *SHARE)])
        tables[f"stream.{name}"] = dict(zip(("overhead_us", "memory"), found))
    return tables


def all_reduce(gpu, file):
    """Within one server. A hop of the small ring comes out as nothing."""
    data = read([file])
    here = (data["num_workers"] <= data["devices_per_node"]) & (data["num_workers"] > 1)
    gpus, size = data["num_workers"][here], data["size"][here]
    ring = size * 2 * (gpus - 1) / gpus / GPUS[gpu][2]

    def predict(small, small_share, large, hop, large_share):
        return np.minimum(small * 1e3 + ring / small_share,
                          (large + hop * (gpus - 1)) * 1e3 + ring / large_share)
    small, small_share, large, hop, large_share = fit(
        predict, data["all_reduce_ms_median"][here] * 1e6,
        [(30.0, 1.0, 200.0), (0.3, *SHARE), (60.0, 1.0, 500.0), (5.0, 0.1, 100.0), (0.6, *SHARE)])
    return {"all_reduce.small": {"latency_us": small, "hop_us": 0.0, "nvlink": small_share},
            "all_reduce.large": {"latency_us": large, "hop_us": hop, "nvlink": large_share}}


def published(gpu):
    """What no profile covers: attention, and Gated DeltaNet."""
    tokens, tflops = np.array(FLASH_ATTENTION_3, dtype=float).T
    compute, context = fit(lambda compute, context: compute * tokens / (tokens + context),
                           tflops / GPUS["h100"][0], [(0.6, *SHARE), (100.0, 1.0, 5000.0)])
    if gpu == "a100":
        longest, share = FLASH_ATTENTION_2
        compute = float(f"{share * (longest + context) / longest:.4e}")
    heads = np.repeat(np.array(list(DELTA_NET), dtype=float), 5)
    tokens = np.tile(2048.0 * 2.0 ** np.arange(5), len(DELTA_NET))
    ms = np.concatenate(list(DELTA_NET.values()))
    found = fit(lambda overhead, token, moved:
                overhead * 1e3 + tokens * (token + heads * moved / H200_BYTES_PER_NS), ms * 1e6,
                [(20.0, 0.1, 200.0), (20.0, 0.1, 500.0), (6000.0, 10.0, 1e6)])
    return {"attention": {"compute": compute, "context": context},
            "linear_attention": dict(zip(("overhead_us", "token_ns", "bytes_per_head"), found))}


def main():
    profiles, here = pathlib.Path(sys.argv[1]), pathlib.Path(__file__).parent
    # Latencies and shares of NVLink go for a GPU that has no profile of its own.
    reduce = None
    for gpu in GPUS:
        files = sorted(profiles.glob(f"{gpu}_*_linear.csv"))
        for file in profiles.glob(f"{gpu}_*_all_reduce.csv"):
            reduce, reduced = all_reduce(gpu, file), file.name
        tables = linear(gpu, files) | reduce | published(gpu)
        sources = ",\n# ".join([file.name for file in files] + [reduced])
        text = (f"# Coefficients of the compute-time model on {gpu}, made by fit.py in this folder; not to\n"
                f"# be edited. What they mean is said in src/compute/operator.rs. Fitted to {sources}\n"
                "# of microsoft/vidur (MIT); attention and linear attention to published figures.\n")
        for name, values in tables.items():
            text += f"\n[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in values.items())
        (here / f"{gpu}.toml").write_text(text)


main()
