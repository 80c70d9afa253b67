#!/bin/bash
# Builds the fuzz targets and runs each for FUZZ_SECONDS (60); TARGETS names some of them. Ends with an error if one crashes,
# hangs or uses more memory than it may. What it found is in $OUT/artifacts, the corpus in $OUT/corpus.
set -euo pipefail
cd "$(dirname "$0")/../../fuzz"

seconds=${FUZZ_SECONDS:-60}
targets=${TARGETS:-wire registration records handshake control http texts hints}
out=${OUT:-${CARGO_TARGET_DIR:-$PWD/../target}/fuzz}
host=$(rustc -vV | sed -n 's/^host: //p')

# What `cargo fuzz` passes, less the sanitizer, for which a stable compiler has no switch: coverage of edges and comparisons.
flags="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4"
flags+=" -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table"
flags+=" -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing"
# With --target, so that build scripts and macros are built without these flags.
RUSTFLAGS="${RUSTFLAGS:-} $flags" ${CARGO:-cargo} build --release --locked --target "$host" --target-dir "$out/build"
built=$out/build/$host/release

mkdir -p "$out/artifacts"
failed=""
for target in $targets; do
	echo "fuzz $target: ${seconds} s"
	log=$out/$target.log
	mkdir -p "$out/corpus/$target"
	# The corpus is kept between runs; the target adds its seeds as it starts.
	if LAXITY_FUZZ_CORPUS="$out/corpus/$target" "$built/$target" "$out/corpus/$target" -max_total_time="$seconds" -max_len=4096 -timeout=10 -rss_limit_mb=2048 \
		-print_final_stats=1 -artifact_prefix="$out/artifacts/$target-" >"$log" 2>&1; then
		verdict=ok
	else
		verdict=FAILED
		failed+=" $target"
		tail -n 40 "$log"
	fi
	executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -n 1)
	rate=$(sed -n 's/^stat::average_exec_per_sec: *//p' "$log" | tail -n 1)
	memory=$(sed -n 's/^stat::peak_rss_mb: *//p' "$log" | tail -n 1)
	# A target that dies at once has no such line.
	coverage=$({ grep -o 'cov: [0-9]*' "$log" || true; } | tail -n 1 | cut -d ' ' -f 2)
	corpus=$(find "$out/corpus/$target" -type f | wc -l)
	echo "fuzz $target: $verdict, ${executions:-?} executions, ${rate:-?} per s, ${coverage:-?} edges, $corpus inputs, ${memory:-?} MiB at most"
done
if [[ -n $failed ]]; then
	echo "failed:$failed; the inputs are in $out/artifacts, run one with $built/TARGET FILE" >&2
	exit 1
fi
