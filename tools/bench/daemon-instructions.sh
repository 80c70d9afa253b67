#!/usr/bin/env bash
# Counts the daemon's instructions for each record: tools/bench/daemon-instructions.sh [ROW] [FOLDER OF PROGRAMS]
# ROW is a row of laxity-bench (producers-1, permits-closed). The daemon runs under callgrind, so the rates that the
# bench reports are not the daemon's, but the counts are the same on any machine.
set -euo pipefail
row="${1:-producers-1}"
programs="$(realpath "${2:-target/release}")"
for tool in valgrind callgrind_annotate; do
    command -v "$tool" >/dev/null || { echo "$tool is missing: run tools/setup.sh bench" >&2; exit 1; }
done
folder="$(mktemp -d)"

# Ends the daemons, in order, so that they write their counts.
end() {
    local pid
    for pid in $(cat "$folder"/pid.* 2>/dev/null); do
        kill -TERM "$pid" 2>/dev/null || continue
        for _ in $(seq 100); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL "$pid" 2>/dev/null || true
    done
}
trap 'end; rm -rf "$folder"' EXIT

# The bench kills what it started, which is not valgrind itself.
cat >"$folder/laxityd" <<X
#!/bin/bash
valgrind --tool=callgrind --callgrind-out-file="$folder/counts.%p" "$programs/laxityd" "\$@" &
echo \$! >"$folder/pid.\$\$"
wait
X
chmod +x "$folder/laxityd"
LAXITY_LAXITYD="$folder/laxityd" "$programs/laxity-bench" --quick --only "$row" >"$folder/log" 2>&1 || true
end

counts="$(find "$folder" -name 'counts.*' -size +0 -printf '%s %p\n' | sort -rn | head -1 | cut -d' ' -f2)"
[ -n "$counts" ] || { tail -5 "$folder/log" >&2; echo "no counts: the bench did not run" >&2; exit 1; }
# The calls of a line are part of the annotated source, which needs --auto.
callgrind_annotate --inclusive=yes --auto=yes --threshold=100 "$counts" 2>/dev/null \
    | sed -nE 's/^ *([0-9,]+) .*=> .*Sink>::(submit|on_credit|completed) \(([0-9,]+)x\).*/\2 \1 \3/p' | tr -d , \
    | awk '{ sum[$1] += $2; calls[$1] += $3 }
           END { for (kind in sum) if (calls[kind] > 100) { printf "%s: %.0f instructions\n", kind, sum[kind] / calls[kind]; some = 1 }
                 if (!some) { print "no calls that take records were found in the counts" >"/dev/stderr"; exit 1 } }'
