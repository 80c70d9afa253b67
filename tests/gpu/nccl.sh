#!/usr/bin/env bash
# tests/gpu/nccl.sh [--ranks N] [--out FILE]: real NCCL over Laxity's network plugin, on a machine with one GPU.
#
# Ranks share the GPU and pretend to be on different hosts, so that what they send takes the network plugin, over
# loopback. Runs all_reduce, all_gather and all_to_all from PyTorch, checks every result, and writes what was measured, and what each
# send was taken for, to docs/results/nccl-gpu.json (or FILE). The same runs over NCCL's own socket transport are the reference.
#
# Needs nvidia-smi, and python3 with a PyTorch that has NCCL (2.26 or later for the profile). Builds the plugin and the daemon if
# cargo is there; otherwise LAXITY_NCCL_PLUGIN and LAXITYD name them. Exit status 77: this machine can't run it; it says why.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
ranks=2
out="$root/docs/results/nccl-gpu.json"
while [ $# -gt 0 ]; do
    case "$1" in
    --ranks) ranks="$2" && shift 2 ;;
    --out) out="$2" && shift 2 ;;
    -h | --help) sed -n '2,11s/^# \{0,1\}//p' "$0" && exit 0 ;;
    *) echo "$0: unknown argument $1; see --help" >&2 && exit 2 ;;
    esac
done
cannot() {
    echo "gpu: skipped: $1" >&2
    exit 77
}

command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU' ||
    cannot "there is no NVIDIA GPU here (nvidia-smi -L lists none)"
python3 -c 'import torch, torch.distributed as d; assert torch.cuda.is_available() and d.is_nccl_available()' 2>/dev/null ||
    cannot "python3 has no PyTorch with CUDA and NCCL (pip install torch)"

if command -v cargo >/dev/null 2>&1; then
    (cd "$root" && cargo build --release --locked -p laxity-nccl -p laxity-daemon)
    built="${CARGO_TARGET_DIR:-$root/target}/release"
    plugin="${LAXITY_NCCL_PLUGIN:-$built/libnccl_net_laxity.so}"
    daemon="${LAXITYD:-$built/laxityd}"
else
    plugin="${LAXITY_NCCL_PLUGIN:-}" daemon="${LAXITYD:-}"
fi
[ -e "$plugin" ] || cannot "no plugin: build laxity-nccl, or name it in LAXITY_NCCL_PLUGIN"

work="$(mktemp -d)"
daemon_pid=
trap '[ -z "$daemon_pid" ] || kill "$daemon_pid" 2>/dev/null || true; rm -rf "$work"' EXIT
ln -s "$(realpath "$plugin")" "$work/libnccl-net-laxity.so"

if [ -n "${LAXITYD:-}" ] && [ ! -x "$LAXITYD" ]; then
    echo "gpu: LAXITYD names no program: $LAXITYD" >&2
    exit 1
fi
if [ -n "$daemon" ] && [ -x "$daemon" ]; then
    cat >"$work/laxityd.toml" <<END
[[nic]]
name = "lo"
rate = "100Gbit"
END
    "$daemon" --config "$work/laxityd.toml" --socket "$work/laxityd.sock" --control "$work/control.sock" \
        >"$work/laxityd.log" 2>&1 &
    daemon_pid=$!
    for _ in $(seq 100); do
        [ -S "$work/laxityd.sock" ] && break
        kill -0 "$daemon_pid" 2>/dev/null || { cat "$work/laxityd.log" >&2 && exit 1; }
        sleep 0.1
    done
    [ -S "$work/laxityd.sock" ] || { cat "$work/laxityd.log" >&2 && echo "gpu: laxityd has no socket after 10 s" >&2 && exit 1; }
fi

run() { # run NAME VARIABLE=VALUE...: all ranks of one configuration
    local name="$1" pids=() rank
    shift
    echo "gpu: $name, $ranks ranks"
    for rank in $(seq 0 $((ranks - 1))); do
        env "$@" RANK="$rank" WORLD_SIZE="$ranks" INIT="file://$work/$name.init" RESULT="$work/$name.$rank.json" \
            NCCL_HOSTID="laxity$rank" NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MNNVL_ENABLE=0 \
            NCCL_IB_DISABLE=1 NCCL_SOCKET_IFNAME=lo NCCL_DEBUG=INFO NCCL_DEBUG_FILE="$work/$name.%p.log" \
            timeout 300 python3 "$root/tests/gpu/collectives.py" &
        pids+=($!)
    done
    for rank in "${pids[@]}"; do
        wait "$rank" || { tail -n 40 "$work/$name".*.log >&2 && echo "gpu: $name failed" >&2 && exit 1; }
    done
}
laxity=(LD_LIBRARY_PATH="$work${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" NCCL_NET_PLUGIN=laxity NCCL_NET=Laxity LAXITY_NET=tcp)
run socket NCCL_NET=Socket NCCL_NET_PLUGIN=none
run passing "${laxity[@]}" LAXITY_MODE=off LAXITY_REPORT="$work/passing.report"
if [ -n "$daemon_pid" ]; then
    run scheduled "${laxity[@]}" LAXITY_SOCKET="$work/laxityd.sock" LAXITY_REPORT="$work/scheduled.report"
fi
grep -lq 'NET/Laxity: Laxity' "$work"/passing.*.log || {
    echo "gpu: NCCL did not use the plugin" >&2
    exit 1
}
mkdir -p "$(dirname "$out")"
python3 "$root/tests/gpu/collect.py" "$work" "$ranks" >"$out"
echo "gpu: wrote $out"
python3 "$root/tests/gpu/collect.py" --table "$out"
