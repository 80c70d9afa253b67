#!/usr/bin/env bash
# Tries Debian packages on machines that boot in containers: check.sh FOLDER SUITE…. FOLDER has the packages, and the
# programs they were made of are in target/release, or in $TARGET/release. Each SUITE is a release of Debian. The roots
# are kept in FOLDER/roots. Exits with 77 if this machine can't make or boot a container.
set -euo pipefail
here="$(realpath "$(dirname "$0")")"
packages="$(realpath "$1")"
shift
lacks() {
    echo "check: $*" >&2
    exit 77
}
for program in mmdebstrap systemd-nspawn; do
    command -v "$program" >/dev/null || lacks "there is no $program (make setup-packages)"
done
[ "$(id -u)" = 0 ] || lacks "systemd-nspawn needs root"

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir -p "$packages/roots" "$work/old"

# An older version to upgrade from, and the same version to compare.
export DEB_BUILD_OPTIONS=noautodbgsym
PACKAGE_VERSION=0.0.1 OUT="$work/old" "$here/../../tools/packages.sh" >/dev/null
OUT="$work/again" "$here/../../tools/packages.sh" >/dev/null
for again in "$work"/again/*.{deb,rpm}; do
    [ -e "$again" ] || continue
    cmp "$again" "$packages/${again##*/}"
done
echo "check: built again, the same bytes"

boots() { # boots ROOT: until the machine switches itself off
    timeout --kill-after=5 120 systemd-nspawn --quiet --register=no --keep-unit --private-network \
        --directory="$1" --boot </dev/null >"$work/console" 2>&1
}
for suite in "$@"; do
    tar="$packages/roots/$suite.tar"
    if [ ! -e "$tar" ]; then
        mmdebstrap --quiet --variant=apt --include=systemd-sysv,dbus,iproute2,passwd "$suite" "${tar%.tar}.part.tar" \
            2>"$work/log" || { cat "$work/log"; lacks "mmdebstrap can't make $suite"; }
        mv "${tar%.tar}.part.tar" "$tar"
    fi
    root="$work/$suite"
    mkdir "$root" && tar -C "$root" -xf "$tar"
    mkdir "$root/packages"
    cp -r "$work/old" "$root/packages/old"
    mkdir "$root/packages/new" && cp "$packages"/*.deb "$root/packages/new"
    cp "$here/inside.sh" "$root/packages/"
    cat >"$root/etc/systemd/system/check.service" <<END
[Unit]
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/packages/inside.sh
ExecStopPost=systemctl poweroff --no-block
StandardOutput=file:/packages/said
StandardError=file:/packages/said
END
    mkdir -p "$root/etc/systemd/system/multi-user.target.wants"
    ln -s ../check.service "$root/etc/systemd/system/multi-user.target.wants/check.service"
    boots "$root" || true
    [ -e "$root/packages/said" ] || { cat "$work/console"; lacks "systemd does not boot in a container here"; }
    sed "s/^/$suite: /" "$root/packages/said"
    grep -qx "passed" "$root/packages/said"
    rm -rf "$root"
done
