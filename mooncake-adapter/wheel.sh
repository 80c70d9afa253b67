#!/usr/bin/env bash
# Builds the Python package with `laxity` and its libraries inside, into target/wheels. Zig links against glibc 2.28, so
# the wheel is for every distribution since 2018 (manylinux_2_28), whatever this machine has. setup.sh installs Zig.
set -euo pipefail
cd "$(dirname "$0")/.."
target="$(realpath "${CARGO_TARGET_DIR:-target}")"
export PATH="$target/python/bin:$PATH"
triple="$(rustc -vV | sed -n 's/^host: //p')"

cargo zigbuild --release --locked --target "$triple.2.28" -p laxity-cli -p laxity-verbs -p laxity-mooncake -p laxity-nccl
mooncake-adapter/bundle.sh "$target/$triple/release"
for built in mooncake-adapter/python/laxity/bundled/*; do
    needs="$(objdump -T "$built" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -n 1)"
    echo "${built##*/} needs ${needs/_/ }"
    if [ "$(printf '%s\n' 2.28 "${needs#GLIBC_}" | sort -V | tail -n 1)" != 2.28 ]; then
        echo "wheel: that is more than manylinux_2_28 has" >&2
        exit 1
    fi
done
cd mooncake-adapter
maturin build --release --locked --zig --target "$triple" --compatibility manylinux_2_28 --out "$target/wheels"
