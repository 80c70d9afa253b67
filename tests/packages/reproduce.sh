#!/usr/bin/env bash
# Makes the packages in FOLDER again and compares: reproduce.sh FOLDER. The same programs have to give the same bytes.
set -euo pipefail
here="$(realpath "$(dirname "$0")")"
packages="$(realpath "$1")"
again="$(mktemp -d)"
trap 'rm -rf "$again"' EXIT
DEB_BUILD_OPTIONS=noautodbgsym OUT="$again" "$here/../../tools/packages.sh" >/dev/null
count=0
for package in "$again"/*.{deb,rpm}; do
    [ -e "$package" ] || continue
    cmp "$package" "$packages/${package##*/}"
    count=$((count + 1))
done
[ "$count" -ge 4 ]
echo "reproduce: $count packages, made again, have the same bytes"
