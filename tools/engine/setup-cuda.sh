#!/usr/bin/env bash
# Puts CUDA's compiler and libraries into DIR (the first argument, or target/cuda) from PyPI's wheels, so that
# `laxity-engine` can be built with --features cuda on a machine without CUDA and without a GPU. Prints the toolkit's
# folder. Asks nothing; does nothing when all is there.
#
# The driver's library comes with a GPU's driver and is in no wheel. DIR/.../lib/stubs has one in its place, made from
# the header: every function answers that there is no device. Programs are linked with it, and start with it only if
# LD_LIBRARY_PATH names its folder.
set -euo pipefail
cd "$(dirname "$0")/../.."

dir="${1:-${CARGO_TARGET_DIR:-target}/cuda}"
# The newest major version that candle's crate for the driver knows is 13.
wheels=(nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96
    nvidia-cuda-cccl==13.0.85 nvidia-cuda-nvrtc==13.0.88 nvidia-cublas==13.0.2.14 nvidia-curand==10.4.0.35)
need_gb=3

mkdir -p "$dir"
dir="$(cd "$dir" && pwd)"
toolkit="$dir/nvidia/cu13"
done_mark="$dir/laxity-$(printf '%s\n' "${wheels[@]}" | cksum | cut -d' ' -f1)"
if [ -e "$done_mark" ]; then
    echo "$toolkit"
    exit 0
fi
free_gb=$(($(df --output=avail -k "$dir" | tail -1) / 1024 / 1024))
echo "setup-cuda: CUDA 13.0 from PyPI goes to $dir: 1.2 GB ($free_gb GB are free), a minute or two" >&2
if [ "$free_gb" -lt "$need_gb" ]; then
    echo "setup-cuda: $need_gb GB are needed; name another folder: tools/engine/setup-cuda.sh DIR" >&2
    exit 1
fi
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
if ! { python3 -m venv "$work/pip" && TMPDIR="$work" "$work/pip/bin/python" -m pip install --quiet --no-cache-dir \
    --disable-pip-version-check --no-deps --target "$work/wheels" "${wheels[@]}"; } >"$work/log" 2>&1; then
    cat "$work/log" >&2
    echo "setup-cuda: pip can't install ${wheels[*]}; is PyPI, or a mirror of it, in reach?" >&2
    exit 1
fi
rm -rf "$dir/nvidia"
mv "$work/wheels/nvidia" "$dir/nvidia"

cd "$toolkit"
for library in cublas cublasLt curand nvrtc cudart; do
    versioned=(lib/lib"$library".so.*)
    ln -sfn "$(basename "${versioned[0]}")" "lib/lib$library.so"
done
ln -sfn lib lib64
mkdir -p lib/stubs
gcc -E -Iinclude include/cuda.h | tr '\n' ' ' | grep -oE 'CUresult +cu[A-Za-z0-9_]+ *\(' |
    sed -E 's/CUresult +//; s/ *\($//' | sort -u |
    awk '{ print "int " $1 "(void) { return 100; /* CUDA_ERROR_NO_DEVICE */ }" }' >"$work/driver.c"
gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -o lib/stubs/libcuda.so "$work/driver.c"
ln -sfn libcuda.so lib/stubs/libcuda.so.1
touch "$done_mark"
echo "$toolkit"
