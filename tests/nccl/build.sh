#!/usr/bin/env bash
# tests/nccl/build.sh OUTDIR: builds nccl_check, nccl_perf and nccl_rounds (each has --help), which drive a NCCL
# net plugin without NCCL, and libnccl-net-reference_plugin.so, the plugin that they are tried on.
# CC, CFLAGS and LDFLAGS as usual; SANITIZE=address (or thread, undefined) builds with that.
set -euo pipefail

out=${1:?"usage: $0 OUTDIR"}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cc=${CC:-cc}
if ! command -v "$cc" >/dev/null 2>&1; then
    echo "$0: no C compiler ($cc); Debian's package is gcc" >&2
    exit 1
fi
flags=(-std=gnu11 -O2 -g -Wall -Wextra -Werror -pthread)
[ -z "${SANITIZE:-}" ] || flags+=("-fsanitize=$SANITIZE" -fno-omit-frame-pointer)
read -ra more <<<"${CFLAGS:-}"
read -ra link <<<"${LDFLAGS:-}"
mkdir -p "$out"

build() { # build PROGRAM SOURCE...
    local program=$1
    shift
    "$cc" "${flags[@]}" ${more[@]+"${more[@]}"} -o "$out/$program" "${@/#/$here/}" \
        ${link[@]+"${link[@]}"} -ldl
}

build nccl_check check.c frame.c driver.c wire.c case_load.c case_connect.c case_transfer.c \
    case_abort.c case_thread.c case_collective.c case_profiler.c case_rma.c
build nccl_perf perf.c frame.c driver.c wire.c
build nccl_rounds rounds.c frame.c driver.c wire.c
for extra in "" -DEXTRA_SYMBOL; do
    "$cc" -std=c11 -O2 -g -Wall -Wextra -Werror -fvisibility=hidden $extra \
        ${more[@]+"${more[@]}"} -shared -fPIC -pthread \
        -o "$out/libnccl-net-reference_plugin${extra:+-extra}.so" "$here/reference_plugin.c" \
        ${link[@]+"${link[@]}"}
done
