#!/usr/bin/env bash
# Builds the Python package with `laxity` and its libraries inside, into target/wheels. maturin names the oldest C
# library that it works with, by this machine's: manylinux_2_34 on Debian 12. Zig, which links against an older one,
# has no --exclude-libs, and without it the libraries would export what they link.
set -euo pipefail
cd "$(dirname "$0")/.."
target="$(realpath "${CARGO_TARGET_DIR:-target}")"

cargo build --release --locked -p laxity-cli -p laxity-verbs -p laxity-mooncake -p laxity-nccl -p laxity-nixl
mooncake-adapter/bundle.sh "$target/release"
cd mooncake-adapter
"$target/python/bin/maturin" build --release --locked --out "$target/wheels"
