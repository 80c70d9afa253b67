#!/usr/bin/env bash
# Tries packages on machines that boot in containers: check.sh FOLDER WHAT/SUITE…. FOLDER is target/packages, and the
# programs of the packages are in target/release, or in $TARGET/release. WHAT is deb, rpm or wheel: the script of that
# name runs in the machine. SUITE is a release of Debian, also for RPMs, because no other distribution is needed to see
# what they do. $OLD is a folder of packages to upgrade from. Without it they are the same programs with a lower
# version. The roots are kept in FOLDER/roots. Exits with 77 if this machine can't make or boot a container.
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
mkdir -p "$packages/roots"

old="${OLD:-$work/old}"
case "${OLD:-} $*" in
" "*deb/* | " "*rpm/*)
    DEB_BUILD_OPTIONS=noautodbgsym PACKAGE_VERSION=0.0.1 OUT="$old" "$here/../../tools/packages.sh" >/dev/null
    ;;
esac

# Packages of each root beside those of a machine that boots.
declare -A includes=([deb]='' [rpm]=,rpm [wheel]=,python3-venv)
make_root() { # make_root WHAT SUITE: a kept archive of a root. A mirror may be so old that it has expired.
    local tar="$packages/roots/$1-$2.tar"
    [ ! -e "$tar" ] || return 0
    mmdebstrap --quiet --variant=apt --include="systemd-sysv,dbus,iproute2,passwd${includes[$1]}" \
        --aptopt='Acquire::Check-Valid-Until "false"' "$2" "${tar%.tar}.part.tar" 2>"$work/log" \
        || { cat "$work/log"; lacks "mmdebstrap can't make $2"; }
    mv "${tar%.tar}.part.tar" "$tar"
}
boots() { # boots ROOT: until the machine switches itself off
    SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1 timeout --kill-after=5 300 systemd-nspawn --quiet --register=no --keep-unit \
        --private-network --directory="$1" --boot </dev/null >"$work/console" 2>&1
}
for case in "$@"; do
    what="${case%/*}"
    suite="${case#*/}"
    make_root "$what" "$suite"
    root="$work/root"
    mkdir "$root" && tar -C "$root" -xf "$packages/roots/$what-$suite.tar"
    mkdir -p "$root/packages/new"
    case "$what" in
    wheel) cp "$packages"/laxity_*.deb "$packages/../wheels"/*.whl "$root/packages/new" ;;
    *)
        cp "$packages"/*."$what" "$root/packages/new"
        mkdir "$root/packages/old" && cp "$old"/*."$what" "$root/packages/old"
        ;;
    esac
    cp "$here/operator.sh" "$here/$what.sh" "$root/packages/"
    cat >"$root/etc/systemd/system/check.service" <<END
[Unit]
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/packages/$what.sh
ExecStopPost=systemctl poweroff --no-block
StandardOutput=file:/packages/said
StandardError=file:/packages/said
END
    mkdir -p "$root/etc/systemd/system/multi-user.target.wants"
    ln -s ../check.service "$root/etc/systemd/system/multi-user.target.wants/check.service"
    boots "$root" || true
    [ -e "$root/packages/said" ] || { cat "$work/console"; lacks "systemd does not boot in a container here"; }
    sed "s:^:$case\: :" "$root/packages/said"
    grep -qx "passed" "$root/packages/said"
    rm -rf "$root"
done
