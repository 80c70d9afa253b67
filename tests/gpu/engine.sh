#!/usr/bin/env bash
# tests/gpu/engine.sh [--cpu] [--out FOLDER] [--policies NAME,...] [--ranks N] [--config FILE]: the lab with the real engine, on a machine with a GPU.
#
# Builds laxity-engine with CUDA (as `make engine-cuda`) and runs `laxity lab run --engine real` with the model of tests/gpu/engine.toml (or FILE) on the
# GPU, which all processes share; CUDA_VISIBLE_DEVICES says which one. Beside it the ranks of tests/gpu/nccl.sh run their collectives
# on the same GPU, so that computation contends as in a serving node; --ranks 0 leaves them out, and so does a python3 without PyTorch.
# FOLDER (docs/results/engine-gpu) gets report.json, report.html, table.txt, nvidia-smi.txt, nccl.json and nccl.log.
#
# --cpu does all of it without CUDA, with the lab's own small model: to try this script where there is no GPU.
# Exit status 77: this machine can't run it; it says why.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
out="$root/docs/results/engine-gpu"
policies=none,two_class,mfs,laxity
ranks=2
device=cuda
config=
while [ $# -gt 0 ]; do
    case "$1" in
    --cpu) device=cpu && shift ;;
    --out) out="$2" && shift 2 ;;
    --policies) policies="$2" && shift 2 ;;
    --ranks) ranks="$2" && shift 2 ;;
    --config) config="$2" && shift 2 ;;
    -h | --help) sed -n '2,11s/^# \{0,1\}//p' "$0" && exit 0 ;;
    *) echo "$0: unknown argument $1; see --help" >&2 && exit 2 ;;
    esac
done
cannot() {
    echo "gpu: skipped: $1" >&2
    exit 77
}

if [ "$device" = cuda ]; then
    command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU' ||
        cannot "there is no NVIDIA GPU here (nvidia-smi -L lists none); --cpu tries the rest"
fi
built="${CARGO_TARGET_DIR:-$root/target}/release"
built_engine="$built/laxity-engine"
if command -v cargo >/dev/null 2>&1; then
    (cd "$root" && cargo build --release --locked -p laxity-cli -p laxity-lab -p laxity-daemon)
    if [ "$device" = cuda ]; then
        built_engine="${CARGO_TARGET_DIR:-$root/target}/cuda/laxity-engine"
        "$root/tools/engine/build-cuda.sh"
    else
        (cd "$root" && cargo build --release --locked -p laxity-engine)
    fi
fi
laxity="${LAXITY:-$built/laxity}"
daemon="${LAXITY_LAXITYD:-$built/laxityd}"
engine="${LAXITY_ENGINE:-$built_engine}"
for program in "$laxity" "$daemon" "$engine"; do
    [ -x "$program" ] || cannot "$program is not there: build it, or name it in LAXITY, LAXITY_LAXITYD or LAXITY_ENGINE"
done
"$laxity" lab probe || cannot "this machine can't run the lab"

mkdir -p "$out"
rm -f "$out"/report.json "$out"/report.html "$out"/table.txt "$out"/nvidia-smi.txt "$out"/nccl.json "$out"/nccl.log
beside=()
set -m # what runs beside gets process groups of its own, and ends with all that it started
trap 'for pid in "${beside[@]}"; do kill -- "-$pid" 2>/dev/null || true; done' EXIT

if [ "$device" = cuda ]; then
    config="${config:-$root/tests/gpu/engine.toml}"
    nvidia-smi >"$out/nvidia-smi.txt"
    # What the GPU does during the runs, once a second.
    nvidia-smi --query-gpu=timestamp,utilization.gpu,utilization.memory,memory.used,power.draw --format=csv --loop=1 \
        >>"$out/nvidia-smi.txt" &
    beside+=($!)
else
    echo "no GPU: this is a trial with --cpu" >"$out/nvidia-smi.txt"
fi

# Contending collectives, again and again until the lab is done. Its own checks decide whether they are right; they don't decide this script.
nccl() {
    while :; do
        status=0
        "$root/tests/gpu/nccl.sh" --ranks "$ranks" --out "$out/nccl.json" || status=$?
        [ "$status" = 0 ] || { echo "gpu: the collectives beside the engine ended with status $status" && return; }
    done
}
if [ "$ranks" -gt 0 ]; then
    nccl >"$out/nccl.log" 2>&1 &
    beside+=($!)
fi

options=(--engine real)
[ -z "$config" ] || options+=(--config "$config")
status=0
"$laxity" lab run "${options[@]}" --policies "$policies" --laxityd "$daemon" --laxity-engine "$engine" \
    --json "$out/report.json" --html "$out/report.html" >"$out/table.txt" || status=$?
cat "$out/table.txt"
[ "$ranks" = 0 ] || cat "$out/nccl.log"
[ "$status" = 0 ] || { echo "gpu: the lab failed with status $status" >&2 && exit "$status"; }
echo "gpu: wrote $out"
