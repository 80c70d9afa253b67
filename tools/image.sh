#!/usr/bin/env bash
# Makes a container image of the Debian packages, without a registry: target/packages/laxity-image.tar, an archive of
# the OCI layout with laxityd, laxity-coordinator, laxity and the libraries. `make packages` comes first.
#
#   skopeo copy oci-archive:target/packages/laxity-image.tar docker://REGISTRY/laxity:VERSION
#   ctr --namespace k8s.io images import target/packages/laxity-image.tar      # on each host, without a registry
#
# SUITE is the release of Debian below (bookworm). OUT replaces target/packages.
set -euo pipefail
umask 022
cd "$(dirname "$0")/.."
out="$(realpath "${OUT:-${TARGET:-target}/packages}")"
for program in mmdebstrap umoci; do
    command -v "$program" >/dev/null || { echo "image: there is no $program (tools/setup.sh image)" >&2; exit 77; }
done
version="$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)"
SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)}"
export SOURCE_DATE_EPOCH
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# No package manager, so nothing is configured: a shell and cp for the init container, and what the programs link.
programs=("$out/laxity_${version}"_*.deb "$out/laxity-coordinator_${version}"_*.deb)
for package in "${programs[@]}"; do
    [ -e "$package" ] || { echo "image: there is no $package; run \`make packages\`" >&2; exit 1; }
done
chmod 755 "$work"
mmdebstrap --quiet --variant=extract --include=base-files,dash,coreutils,libgcc-s1 \
    "${SUITE:-bookworm}" "$work/base.tar" 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
mkdir "$work/root"
tar -C "$work/root" -xf "$work/base.tar"
for package in "${programs[@]}"; do
    dpkg-deb --fsys-tarfile "$package" | tar -C "$work/root" --keep-directory-symlink -x
done
rm -rf "$work"/root/{var/cache,var/lib/apt,var/log,usr/share/{man,locale,zsh,fish,bash-completion}}
mkdir -p "$work"/root/{var/log/containers,run/laxity,run/laxity-control,etc/laxity/config,etc/laxity/tls,host/lib}
printf 'root:x:0:0::/:/bin/sh\nlaxity:x:65532:65532::/:/bin/false\n' >"$work/root/etc/passwd"
printf 'root:x:0:\nlaxity:x:65532:\n' >"$work/root/etc/group"
tar -C "$work/root" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --numeric-owner --owner=0 --group=0 -cf "$work/root.tar" .

date="$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)"
image="$work/layout:$version"
umoci init --layout "$work/layout"
umoci new --image "$image"
umoci raw add-layer --image "$image" --history.created="$date" --history.created_by=tools/image.sh "$work/root.tar"
umoci config --image "$image" --config.cmd=/usr/sbin/laxityd --created="$date" --history.created="$date" \
    --config.label=org.opencontainers.image.title=laxity --config.label="org.opencontainers.image.version=$version"
umoci gc --layout "$work/layout"
tar -C "$work/layout" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --numeric-owner --owner=0 --group=0 \
    -cf "$out/laxity-image.tar" .
ls -sh "$out/laxity-image.tar"
