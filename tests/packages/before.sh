#!/usr/bin/env bash
# Makes packages of an earlier commit, to upgrade from: before.sh COMMIT FOLDER. They get the version 0.0.1. It builds
# with little optimisation, because only their behaviour counts, and keeps what it built in FOLDER.
set -euo pipefail
cd "$(dirname "$0")/../.."
commit="$(git rev-parse --verify "${1:?usage: before.sh COMMIT FOLDER}^{commit}")"
mkdir -p "$2"
to="$(realpath "$2")"
[ "$(cat "$to/commit" 2>/dev/null)" != "$commit" ] || exit 0

rm -rf "$to/source" && mkdir "$to/source"
git archive "$commit" | tar -x -C "$to/source"
cd "$to/source"
export CARGO_TARGET_DIR="$to/build" CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_OPT_LEVEL=1
export CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_DEBUG=false
make lab
export DEB_BUILD_OPTIONS=noautodbgsym SOURCE_DATE_EPOCH
SOURCE_DATE_EPOCH="$(git -C "$OLDPWD" log -1 --format=%ct "$commit")"
TARGET="$to/build" PACKAGE_VERSION=0.0.1 OUT="$to/packages" tools/packages.sh
echo "$commit" >"$to/commit"
