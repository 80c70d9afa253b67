#!/usr/bin/env bash
# What liblaxity.so costs per work request: nanoseconds with a provider that does nothing, plain and with
# the library under a daemon on an idle port, by turns. Usage: run.sh FOLDER (of laxityd and liblaxity.so)
set -euo pipefail
built="$(realpath "${1:?folder of laxityd and liblaxity.so}")"
here="$(cd "$(dirname "$0")" && pwd)"
work="$(mktemp -d)"
trap 'kill "${daemon:-}" 2>/dev/null || true; rm -rf "$work"' EXIT
cd "$work"
cc -O2 -Wall -Wextra -shared -fPIC -o libibverbs.so.1 "$here/null_provider.c" \
    -Wl,-soname,libibverbs.so.1 -Wl,--version-script="$here/null_provider.map"
cc -O2 -Wall -Wextra -o post_cost "$here/post_cost.c" -L. -l:libibverbs.so.1 -Wl,-rpath,"$work"
printf 'socket = "%s/s"\ncontrol = "%s/c"\nmetrics = ""\n' "$work" "$work" >d.toml
"$built/laxityd" --config d.toml >d.log 2>&1 &
daemon=$!
for _ in $(seq 100); do [ -S s ] && break; sleep 0.05; done
[ -S s ] || { cat d.log >&2; echo "laxityd has no socket after 5 s, so nothing can be measured" >&2; exit 1; }
export LAXITY_SOCKET="$work/s" LAXITY_PROFILE=perftest
measure() { # name, arguments
    local plain=() with=() round
    for round in 1 2 3 4 5; do
        plain+=("$(./post_cost "${@:2}")")
        with+=("$(LD_PRELOAD="$built/liblaxity.so" ./post_cost "${@:2}")")
    done
    local p w
    p="$(printf '%s\n' "${plain[@]}" | sort -g | paste -sd' ')"
    w="$(printf '%s\n' "${with[@]}" | sort -g | paste -sd' ')"
    awk -v name="$1" -v p="$p" -v w="$w" 'BEGIN {
        split(p, a, " "); split(w, b, " ")
        printf "%-44s %7.1f %8.1f %8.1f   (%.1f to %.1f)\n", name, a[3], b[3], b[3] - a[3], b[1], b[5] }'
}
printf '%-44s %7s %8s %8s\n' "liblaxity.so, ns per work request" plain with more
measure "8 bytes, posted and polled one by one" 3000000 8 1
measure "4 KiB, posted and polled one by one" 3000000 4096 1
measure "4 KiB, one in 100 signaled" 6000000 4096 100
