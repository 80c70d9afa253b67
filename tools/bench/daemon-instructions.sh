#!/usr/bin/env bash
# Counts the daemon's instructions for each record: tools/bench/daemon-instructions.sh [ROW] [FOLDER OF PROGRAMS]
# ROW is a row of laxity-bench (producers-1, permits-closed). The daemon runs under callgrind, so the rates that the
# bench reports are not the daemon's, but the counts are the same on any machine.
set -euo pipefail
row="${1:-producers-1}"
programs="$(realpath "${2:-target/release}")"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

# Not `exec`: the bench kills what it started, and valgrind has to end in order to write its counts.
cat >"$folder/laxityd" <<X
#!/bin/bash
valgrind --tool=callgrind --callgrind-out-file="$folder/counts.%p" "$programs/laxityd" "\$@"
X
chmod +x "$folder/laxityd"
LAXITY_LAXITYD="$folder/laxityd" "$programs/laxity-bench" --quick --only "$row" >/dev/null 2>&1 || true
pkill -TERM -f "callgrind-out-file=$folder" || true
for _ in $(seq 50); do
    pgrep -f "callgrind-out-file=$folder" >/dev/null || break
    sleep 0.1
done

counts="$(find "$folder" -name 'counts.*' -size +0 -printf '%s %p\n' | sort -rn | head -1 | cut -d' ' -f2)"
[ -n "$counts" ] || { echo "valgrind wrote no counts: is it installed (tools/setup.sh bench)?" >&2; exit 1; }
callgrind_annotate --inclusive=yes --tree=calling --threshold=100 "$counts" 2>/dev/null \
    | sed -nE 's/^ *([0-9,]+) .*=> .*Sink>::(submit|on_credit|completed) \(([0-9,]+)x\).*/\2 \1 \3/p' | tr -d , \
    | awk '{ sum[$1] += $2; calls[$1] += $3 }
           END { for (kind in sum) if (calls[kind] > 100) printf "%s: %.0f instructions\n", kind, sum[kind] / calls[kind] }'
