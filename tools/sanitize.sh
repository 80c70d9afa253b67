#!/usr/bin/env bash
# tools/sanitize.sh [FOLDER]: runs the C programs of the tests with AddressSanitizer and UndefinedBehaviorSanitizer,
# and the product's libraries in them under valgrind. FOLDER (target/debug) has laxityd and the libraries. Stable
# rustc has no switch for sanitizers, so the libraries have valgrind only. The verbs programs are compiled and not run,
# because they need RDMA devices. CASES and VALGRIND_CASES name cases of tests/nccl/check.c.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
built=$(cd "${1:-$root/target/debug}" && pwd)
work=$(mktemp -d)
daemon=
trap '[ -z "$daemon" ] || kill "$daemon"; rm -rf "$work"' EXIT
cases=${CASES:-symbols properties handle_size registration contexts reload no_daemon mode_off foreign_handles strangers
    sizes in_order thirty_two tested_in_any_order optional_completion grouped flush close_after_done closed_by_sender
    closed_by_receiver all_reduce_2 profiler_v6}
valgrind_cases=${VALGRIND_CASES:-contexts registration in_order grouped}
for program in cc valgrind; do
    command -v "$program" >/dev/null || { echo "$0: $program is missing (apt install gcc valgrind)" >&2; exit 1; }
done
for file in laxityd liblaxity_client.a libnccl_net_laxity.so; do
    [ -e "$built/$file" ] || { echo "$0: $built/$file is missing; make test-build makes it" >&2; exit 1; }
done

# A sanitizer or valgrind that finds something ends a program with this status.
found=99
export ASAN_OPTIONS=exitcode=$found:detect_leaks=1 UBSAN_OPTIONS=halt_on_error=1:exitcode=$found:print_stacktrace=1
export NCCL_SOCKET_IFNAME=lo LAXITY_ATTACH_MS=10000
grind=(valgrind --quiet --error-exitcode=$found --trace-children=no)
memcheck=("${grind[@]}" --leak-check=full --errors-for-leak-kinds=definite --show-leak-kinds=definite)

cat >"$work/laxityd.toml" <<END
socket = "$work/laxityd.sock"
control = "$work/control.sock"
metrics = ""
log = "warn"
[[nic]]
name = "default"
rate = "10Gbit"
END
"$built/laxityd" --config "$work/laxityd.toml" >"$work/laxityd.log" 2>&1 &
daemon=$!
until [ -S "$work/laxityd.sock" ]; do
    kill -0 "$daemon" || { cat "$work/laxityd.log" >&2; exit 1; }
    sleep 0.05
done

step() { # step NAME COMMAND...: with the daemon, and without one
    local name=$1 socket
    shift
    for socket in "$work/laxityd.sock" "$work/none.sock"; do
        LAXITY_SOCKET=$socket "$@" >"$work/out" 2>&1 || { echo "FAILED $name"; cat "$work/out"; exit 1; }
    done
    echo "ok $name"
}

sanitizers=(-fsanitize=address,undefined -fno-omit-frame-pointer -g)
for example in send hints; do
    for kind in sanitized plain; do
        flags=()
        [ "$kind" = plain ] || flags=("${sanitizers[@]}")
        cc -std=c99 -Wall -Wextra -Werror "${flags[@]}" -I "$root/shim/client-c/include" \
            "$root/shim/client-c/examples/$example.c" "$built/liblaxity_client.a" -lpthread -ldl -lm \
            -o "$work/$example-$kind"
    done
    step "$example.c, sanitized" "$work/$example-sanitized"
    step "$example.c, memcheck" "${memcheck[@]}" "$work/$example-plain"
done

SANITIZE=address,undefined "$root/tests/nccl/build.sh" "$work/sanitized"
"$root/tests/nccl/build.sh" "$work/plain"
for case in $cases; do
    step "NCCL $case, sanitized" "$work/sanitized/nccl_check" --plugin "$built/libnccl_net_laxity.so" --version 12 \
        --slow 10 "$case"
done
for case in $valgrind_cases; do
    step "NCCL $case, memcheck" "${memcheck[@]}" "$work/plain/nccl_check" --plugin "$built/libnccl_net_laxity.so" \
        --version 12 --slow 100 "$case"
done
if SANITIZE=address,undefined "$root/tests/verbs/build.sh" "$work/verbs" 2>"$work/out"; then
    echo "ok verbs programs, compiled only"
else
    echo "left out: verbs programs: $(tail -n 1 "$work/out")"
fi
