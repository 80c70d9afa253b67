#!/usr/bin/env bash
# check-glibc.sh VERSION FILE...: prints which version of glibc each program or library needs, and fails if one needs a
# newer one than VERSION. Hosts with an older C library can't load what needs a newer one. Where the linker did not find
# a symbol in any library, because its glibc is as old as VERSION, the symbol has no version.
set -euo pipefail
most="$1"
shift
for built; do
    unknown="$(nm --dynamic --undefined-only "$built" | sed -n 's/^ *U \([^@]*\)$/\1/p' | paste -sd ' ')"
    [ -z "$unknown" ] || { echo "check-glibc: $built needs what no library of glibc $most has: $unknown" >&2; exit 1; }
    needs="$(objdump -T "$built" | { grep -o 'GLIBC_[0-9.]*' || true; } | sort -Vu | tail -n 1)"
    [ -n "$needs" ] || { echo "check-glibc: $built names no version of glibc" >&2; exit 1; }
    echo "$(basename "$built") needs ${needs/_/ }"
    if [ "$(printf '%s\n' "$most" "${needs#GLIBC_}" | sort -V | tail -n 1)" != "$most" ]; then
        echo "check-glibc: $built needs more than glibc $most" >&2
        exit 1
    fi
done
