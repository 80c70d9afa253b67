#!/usr/bin/env bash
# Builds the product again from a clone of the last commit in another folder, and compares it with RELEASE: rebuild.sh
# RELEASE. The same sources have to give the same bytes.
set -euo pipefail
cd "$(dirname "$0")/../.."
release="$(realpath "$1")"
[ -z "$(git status --porcelain --untracked-files=no)" ] \
    || { echo "rebuild: commit your changes first; a clone does not have them" >&2; exit 1; }
again="$(mktemp -d /var/tmp/laxity-rebuild.XXXXXX)"
trap 'rm -rf "$again"' EXIT
git clone --quiet . "$again/clone"
unset CARGO_TARGET_DIR
make --no-print-directory -C "$again/clone" core
count=0
for built in "$release"/{laxityd,laxity,laxity-coordinator,liblaxity*.so,liblaxity*.a,libnccl_net_laxity.so}; do
    [ -f "$built" ] || { echo "rebuild: $built is not there; build it with: make core" >&2; exit 1; }
    cmp "$built" "$again/clone/target/release/${built##*/}"
    count=$((count + 1))
done
echo "rebuild: $count programs and libraries, built again in another folder, have the same bytes"
