#!/usr/bin/env bash
# Builds laxity-engine for GPUs, as DIR/laxity-engine (DIR is the first argument, or target/cuda), and starts it. On a
# machine without a GPU it must say that there is none.
#
# CUDA_COMPUTE_CAP is the oldest GPU that it is for (80: A100; 90: H100). NVCC_THREADS is how many files are compiled at
# a time; each takes up to 2 GB.
set -euo pipefail
cd "$(dirname "$0")/../.."
target="${CARGO_TARGET_DIR:-target}"
dir="${1:-$target/cuda}"

toolkit="$(tools/engine/setup-cuda.sh "$dir")"
dir="$(cd "$dir" && pwd)"
export CUDA_HOME="$toolkit" NVCC="$toolkit/bin/nvcc" PATH="$toolkit/bin:$PATH"
export CUDA_COMPUTE_CAP="${CUDA_COMPUTE_CAP:-80}" CUDAFORGE_THREADS="${NVCC_THREADS:-2}"
echo "engine-cuda: building laxity-engine for compute capability $CUDA_COMPUTE_CAP (candle's kernels take most of it)"
"${CARGO:-cargo}" rustc --release --locked -p laxity-engine --features cuda --bin laxity-engine -- \
    -C link-arg="-Wl,-rpath,$toolkit/lib"
cp "$target/release/laxity-engine" "$dir/laxity-engine"

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cat >"$work/engine.toml" <<'END'
role = "whole"
listen = "127.0.0.1:0"
device = "cuda"
[model]
name = "tiny"
layers = 1
hidden = 64
heads = 4
ffn = 64
vocab = 260
context = 256
weights = { seed = 1 }
[kv]
blocks = 16
block_tokens = 16
[schedule]
policy = "fcfs"
tokens = 64
END
# The engine is linked with the driver's library, which only a driver brings.
ldconfig -p | grep -q 'libcuda\.so\.1 ' || export LD_LIBRARY_PATH="$toolkit/lib/stubs${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
status=0
timeout 20 "$dir/laxity-engine" --config "$work/engine.toml" >"$work/said" 2>&1 || status=$?
case "$status" in
124) echo "engine-cuda: $dir/laxity-engine serves from a GPU" ;;
1)
    grep -q 'the GPU cannot be used' "$work/said" || { cat "$work/said" >&2 && exit 1; }
    cat "$work/said"
    echo "engine-cuda: $dir/laxity-engine is built and starts; this machine has no GPU that it can use"
    ;;
*) cat "$work/said" >&2 && echo "engine-cuda: $dir/laxity-engine ended with status $status" >&2 && exit 1 ;;
esac
