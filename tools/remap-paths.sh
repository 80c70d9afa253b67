#!/bin/sh
# A wrapper of rustc (RUSTC_WRAPPER) that leaves no folder of this machine in what is built. The same in RUSTFLAGS would
# not do: cargo names the folders of generated sources after a hash of these flags.
sources="$(cd "$(dirname "$0")/.." && pwd)"
exec "$@" --remap-path-prefix="$sources=/usr/src/laxity" \
    --remap-path-prefix="${CARGO_HOME:-$HOME/.cargo}=/usr/src/cargo"
