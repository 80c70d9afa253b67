#!/usr/bin/env bash
# Builds the Python package with `laxity` and its libraries inside, into target/wheels. The wheel works with glibc 2.28
# and newer (manylinux_2_28: RHEL 8, Debian 10, Ubuntu 20.04).
set -euo pipefail
cd "$(dirname "$0")/.."
target="$(realpath "${CARGO_TARGET_DIR:-target}")"
glibc=2.28
triple="$(rustc -vV | sed -n 's/^host: //p')"

mooncake-adapter/old-glibc.sh "$glibc" "$target/glibc-$glibc"
# With a triple, cargo builds apart from what is linked to this machine's own C library.
export "CARGO_TARGET_$(tr 'a-z-' 'A-Z_' <<<"$triple")_LINKER=$target/glibc-$glibc/cc"
cargo build --release --locked --target "$triple" \
    -p laxity-cli -p laxity-verbs -p laxity-mooncake -p laxity-nccl -p laxity-nixl
mooncake-adapter/bundle.sh "$target/$triple/release"
tools/check-glibc.sh "$glibc" mooncake-adapter/python/laxity/bundled/*
cd mooncake-adapter
"$target/python/bin/maturin" build --release --locked --target "$triple" \
    --compatibility "manylinux_${glibc/./_}" --out "$target/wheels"
