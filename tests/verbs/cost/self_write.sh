#!/usr/bin/env bash
# What liblaxity.so adds to a WRITE on a real device, for the SoftRoCE lab:
#   laxity lab exec -- tests/verbs/cost/self_write.sh FOLDER      (of laxityd and liblaxity.so)
# Medians of 5000, by turns plain and with the library: microseconds to the return of the post, and to
# the completion.
set -euo pipefail
built="$(realpath "${1:?folder of laxityd and liblaxity.so}")"
device="${2:-rxe0}"
here="$(cd "$(dirname "$0")" && pwd)"
work="$(mktemp -d)"
trap 'kill "${daemon:-}" 2>/dev/null || true; rm -rf "$work"' EXIT
cd "$work"
cc -O2 -Wall -Wextra -o self_write "$here/self_write.c" "$here/../common.c" -libverbs
printf 'socket = "%s/s"\ncontrol = "%s/c"\nmetrics = ""\n' "$work" "$work" >d.toml
"$built/laxityd" --config d.toml >d.log 2>&1 &
daemon=$!
for _ in $(seq 100); do [ -S s ] && break; sleep 0.05; done
[ -S s ] || { cat d.log >&2; echo "laxityd has no socket after 5 s, so nothing can be measured" >&2; exit 1; }
export LAXITY_SOCKET="$work/s" LAXITY_PROFILE=perftest
printf '%-8s %-8s %s\n' bytes library "post / complete, µs, six runs"
for bytes in 8 4096; do
    plain=() with=()
    for _ in 1 2 3 4 5 6; do
        plain+=("$(./self_write "$device" "$bytes" 5000 | tr ' ' /)")
        with+=("$(LD_PRELOAD="$built/liblaxity.so" ./self_write "$device" "$bytes" 5000 | tr ' ' /)")
    done
    printf '%-8s %-8s %s\n' "$bytes" without "${plain[*]}" "$bytes" with "${with[*]}"
done
