#!/usr/bin/env bash
# Installs what the build, the tests, the lab (`base`) and the benchmarks (`bench`) need from
# Debian. Does nothing when all is there; asks nothing; works twice in a row.
set -euo pipefail

declare -A wanted=()
need() { # need PROGRAM PACKAGE
    command -v "$1" >/dev/null 2>&1 || wanted[$2]=1
}

need cc gcc
need make make
need ip iproute2
need tc iproute2
if [ "${1:-base}" = bench ]; then
    need valgrind valgrind
    compgen -G '/usr/lib/llvm-*/lib/libclang.so*' >/dev/null || wanted[libclang-dev]=1
fi
[ -e /usr/include/stdio.h ] || wanted[libc6-dev]=1

if ! command -v cargo >/dev/null 2>&1; then
    echo "setup: cargo is missing; install Rust (the rust-version in Cargo.toml or newer) first" >&2
    exit 1
fi
[ ${#wanted[@]} -eq 0 ] && exit 0

echo "setup: installing ${!wanted[*]}"
run=()
if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
        run=(sudo -n)
    else
        echo "setup: not root and no password-free sudo; install these yourself: ${!wanted[*]}" >&2
        exit 1
    fi
fi
export DEBIAN_FRONTEND=noninteractive
"${run[@]}" apt-get -q update
"${run[@]}" apt-get -q install -y --no-install-recommends "${!wanted[@]}"
