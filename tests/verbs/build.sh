#!/usr/bin/env bash
# tests/verbs/build.sh OUTDIR: builds the verbs test programs (verbs_check, dlopen_check,
# orphans, campaign; each has --help). They need two RDMA ports that reach each other.
# CC, CFLAGS and LDFLAGS as usual; SANITIZE=address (or thread, undefined) builds with that.
set -euo pipefail

out=${1:?"usage: $0 OUTDIR"}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cc=${CC:-cc}
if ! command -v "$cc" >/dev/null 2>&1; then
    echo "$0: no C compiler ($cc); Debian's package is gcc" >&2
    exit 1
fi
if ! echo '#include <infiniband/verbs.h>' | "$cc" -E -x c - >/dev/null 2>&1; then
    echo "$0: infiniband/verbs.h is missing; Debian's package is libibverbs-dev" >&2
    exit 1
fi
flags=(-std=gnu11 -O2 -g -Wall -Wextra -Werror -pthread)
[ -z "${SANITIZE:-}" ] || flags+=("-fsanitize=$SANITIZE" -fno-omit-frame-pointer)
read -ra more <<<"${CFLAGS:-}"
read -ra link <<<"${LDFLAGS:-}"
mkdir -p "$out"

build() { # build PROGRAM LIBRARY SOURCE...
    local program=$1 library=$2
    shift 2
    "$cc" "${flags[@]}" ${more[@]+"${more[@]}"} -o "$out/$program" "${@/#/$here/}" \
        ${link[@]+"${link[@]}"} "$library"
}

build verbs_check -libverbs verbs_check.c check_transfer.c check_queue.c check_completion.c \
    check_state.c check_threads.c check_api.c common.c
build dlopen_check -ldl dlopen_check.c
build orphans -libverbs orphans.c common.c
build campaign -libverbs campaign.c common.c
"$cc" "${flags[@]}" ${more[@]+"${more[@]}"} -shared -fPIC -o "$out/patient.so" "$here/patient.c" \
    -Wl,--version-script="$here/patient.map" -Wl,--no-as-needed ${link[@]+"${link[@]}"} -libverbs
