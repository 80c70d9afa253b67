#!/usr/bin/env bash
# Proves that this build and that of an earlier commit work together: upgrade.sh COMMIT [FAULTS]. It builds COMMIT in
# target/upgrade, and expects this build in target/debug (cargo build --workspace --bins --lib). Three fault campaigns
# check every byte: old libraries with the new daemon, the reverse, and both daemons in turn. A test then upgrades eight
# hosts under load from the old daemon.
set -euo pipefail
cd "$(dirname "$0")/.."
commit="$(git rev-parse --verify "${1:?usage: upgrade.sh COMMIT [FAULTS]}^{commit}")"
faults="${2:-500}"
to="$PWD/target/upgrade"
new="${TARGET:-$PWD/target}/debug"

if [ "$(cat "$to/commit" 2>/dev/null)" != "$commit" ]; then
    rm -rf "$to/source" && mkdir -p "$to/source"
    git archive "$commit" | tar -x -C "$to/source"
    cd "$to/source"
    CARGO_TARGET_DIR="$to/build" cargo build --locked -p laxity-daemon -p laxity-lab -p laxity-client-c
    cd - >/dev/null
    echo "$commit" >"$to/commit"
fi
old="$to/build/debug"

campaign() { # campaign WHAT LAB LAXITYD OPTION…
    echo "== $1"
    # Mooncake takes so much of the machine that other paths would wait for it.
    local paths=()
    if "$2/laxity-lab" lab faults --help | grep -q -- --paths; then paths=(--paths client,c,nccl); fi
    "$2/laxity-lab" lab faults --faults "$faults" --failures "$to/failures" --laxityd "$3/laxityd" "${paths[@]}" "${@:4}"
}
campaign "libraries of ${commit:0:8}, this daemon" "$old" "$new"
campaign "these libraries, the daemon of ${commit:0:8}" "$new" "$old"
campaign "these libraries, both daemons in turn" "$new" "$old" --then "$new/laxityd"
if ! grep -q FileDescriptorStoreMax "$to/source/dist/laxityd.service"; then
    echo "left out: eight hosts; the daemon of ${commit:0:8} does not take sockets over"
    exit 0
fi
echo "== eight hosts upgraded from ${commit:0:8}"
# Clients of a daemon that only releases them go unscheduled until the next one is up.
grep -q HANDOVER "$to/source/proto/shm/src/header.rs" || export LAXITY_OLD_RELEASES=1
LAXITY_OLD_LAXITYD="$old/laxityd" cargo test --locked -p laxity-tests --test laxity -- --nocapture a_rolling_upgrade
