#!/usr/bin/env bash
# Puts the release binaries, the preload and client libraries, the unit and the manual where Debian keeps them.
# DESTDIR moves everything below another root, as packagers expect. PREFIX, LIBDIR and UNITDIR replace
# /usr/local, its lib, and /etc/systemd/system. `install.sh install-lab` puts the laboratory's programs there.
# `install.sh remove` takes away what both put there; configuration that was edited stays, and so does the
# daemon's user.
set -euo pipefail
# All users must be able to run and read the files, even if root's umask is 077.
umask 022
cd "$(dirname "$0")/.."

from="${TARGET:-target}/release"
root="${DESTDIR:-}"
prefix="${PREFIX:-/usr/local}"
to="$root$prefix"
lib="${LIBDIR:-$prefix/lib}"
units="$root${UNITDIR:-/etc/systemd/system}"
verb="${1:-install}"

case "$verb" in
install | install-lab)
    put() { install -D -m "$1" "$2" "$3" && echo "  $3"; }
    made() { mkdir -p "${1%/*}" && cat >"$1" && echo "  $1"; } # made FILE: from standard input
    unit() { sed "s:/usr/local/:$prefix/:" "dist/$1" | made "$units/$1" && chmod 644 "$units/$1"; }
    keep() { # an operator's file stays as it is; ours goes beside it if they differ
        if [ ! -e "$3" ] || cmp -s "$2" "$3"; then
            put "$1" "$2" "$3"
        else
            put "$1" "$2" "$3.dist" && echo "    ($3 has been edited, and stays)"
        fi
    }
    ;;
remove)
    if [ -z "$root" ] && command -v systemctl >/dev/null 2>&1; then
        systemctl disable --now laxityd laxity-coordinator 2>/dev/null || true
    fi
    put() { rm -f "$3" && echo "  $3"; }
    made() { cat >/dev/null && rm -f "$1" && echo "  $1"; }
    unit() { rm -f "$units/$1" && echo "  $units/$1"; }
    keep() {
        rm -f "$3.dist"
        if cmp -s "$2" "$3"; then rm -f "$3" && echo "  $3"; fi
    }
    ;;
*)
    echo "usage: install.sh [install|install-lab|remove]" >&2
    exit 2
    ;;
esac

# The C ABI has a number of its own, so that a later release with another ABI can be installed beside this one.
soname=liblaxity_client.so.0
version="$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)"

man="$to/share/man"
complete="$to/share"
# completions PROGRAM COMMAND…: its script for each shell, as the command followed by the shell's name prints it
completions() {
    local program="$1"
    shift
    mkdir -p "$complete/bash-completion/completions" "$complete/zsh/site-functions" \
        "$complete/fish/vendor_completions.d"
    "$@" bash >"$complete/bash-completion/completions/$program"
    "$@" zsh >"$complete/zsh/site-functions/_$program"
    "$@" fish >"$complete/fish/vendor_completions.d/$program.fish"
}

echo "$verb:"
if [ "$verb" != install ]; then
    put 755 "$from/laxity-lab" "$to/bin/laxity-lab"
    put 755 "$from/laxity-engine" "$to/bin/laxity-engine"
fi
if [ "$verb" = install-lab ]; then
    "$from/laxity-lab" man --out "$man/man1"
    completions laxity-lab "$from/laxity-lab" completions
    echo "  manual pages and completions below $to/share"
    echo "next: laxity lab run"
    exit 0
fi
had=""
[ ! -e "$to/sbin/laxityd" ] || had=1
put 755 "$from/laxityd" "$to/sbin/laxityd"
put 755 "$from/laxity-coordinator" "$to/sbin/laxity-coordinator"
put 755 "$from/laxity" "$to/bin/laxity"
put 644 "$from/liblaxity_client.so" "$root$lib/$soname"
put 644 "$from/liblaxity.so" "$root$lib/liblaxity.so"
put 644 "$from/liblaxity_mooncake.so" "$root$lib/liblaxity_mooncake.so"
put 644 "$from/liblaxity_nixl.so" "$root$lib/liblaxity_nixl.so"
put 644 "$from/libnccl_net_laxity.so" "$root$lib/libnccl-net-laxity.so"
put 644 "$from/liblaxity_client.a" "$root$lib/liblaxity_client.a"
put 644 shim/client-c/include/laxity.h "$to/include/laxity.h"
made "$root$lib/pkgconfig/laxity.pc" <<END
prefix=$prefix
libdir=$lib
includedir=\${prefix}/include

Name: laxity
Description: client of laxityd, which schedules LLM inference traffic
Version: $version
Libs: -L\${libdir} -llaxity_client
Libs.private: -lpthread -ldl -lm
Cflags: -I\${includedir}
END
for program in laxityd laxity-coordinator; do unit "$program.service"; done
# Each of the two packages makes the user that its program runs as.
for package in laxity laxity-coordinator; do
    put 644 dist/laxity.sysusers "$root/usr/lib/sysusers.d/$package.conf"
done
put 644 dist/laxity.tmpfiles "$root/usr/lib/tmpfiles.d/laxity.conf"
put 644 dist/laxityd.toml "$to/share/doc/laxity/laxityd.toml"
put 644 dist/laxity-coordinator.toml "$to/share/doc/laxity/laxity-coordinator.toml"
put 644 dist/grafana/laxity.json "$to/share/doc/laxity/grafana-laxity.json"
put 644 dist/prometheus/alerts.yaml "$to/share/doc/laxity/prometheus-alerts.yaml"
# With this configuration the daemon observes until `laxity enforce on`. A host that already had a daemon without a
# configuration gets none, so its daemon continues to enforce.
if [ -z "$had" ] || [ -e "$root/etc/laxity/laxityd.toml" ]; then
    keep 644 dist/packaged/laxityd.toml "$root/etc/laxity/laxityd.toml"
fi
keep 644 dist/packaged/coordinator.toml "$root/etc/laxity/coordinator.toml"
for profile in shim/job/profiles/*.toml; do
    keep 644 "$profile" "$root/etc/laxity/profiles/${profile##*/}"
done

if [ "$verb" = remove ]; then
    rm -f "$root$lib/liblaxity_client.so" "$man"/man1/laxity.1 "$man"/man1/laxity-*.1 \
        "$man/man8/laxityd.8" "$man/man5/laxityd.toml.5" \
        "$man/man8/laxity-coordinator.8" "$man/man5/laxity-coordinator.toml.5"
    for program in laxity laxity-lab laxityd laxity-coordinator; do
        rm -f "$complete/bash-completion/completions/$program" \
            "$complete/zsh/site-functions/_$program" \
            "$complete/fish/vendor_completions.d/$program.fish"
    done
    rmdir "$to/share/doc/laxity" "$root/etc/laxity/profiles" "$root/etc/laxity" 2>/dev/null || true
else
    ln -sf "$soname" "$root$lib/liblaxity_client.so"
    mkdir -p "$man/man5" "$man/man8"
    "$from/laxity" man --out "$man/man1"
    completions laxity "$from/laxity" completions
    for program in laxityd laxity-coordinator; do
        "$from/$program" --manual "$program.8" >"$man/man8/$program.8"
        "$from/$program" --manual "$program.toml.5" >"$man/man5/$program.toml.5"
        completions "$program" "$from/$program" --completions
    done
fi
echo "  manual pages and completions below $to/share"

if [ -z "$root" ]; then
    ldconfig
    if command -v systemctl >/dev/null 2>&1; then
        systemctl daemon-reload 2>/dev/null || true
    fi
    if [ "$verb" = install ]; then
        if command -v systemd-sysusers >/dev/null 2>&1; then
            systemd-sysusers /usr/lib/sysusers.d/laxity.conf
        elif ! id laxity >/dev/null 2>&1; then
            useradd --system --user-group --no-create-home --shell /usr/sbin/nologin laxity
        fi
        echo "next: systemctl enable --now laxityd; then docs/operating.md: who may attach, at which rate"
        echo "on one host of a cluster: systemctl enable --now laxity-coordinator; then docs/coordinator.md"
    fi
fi
