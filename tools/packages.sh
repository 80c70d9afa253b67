#!/usr/bin/env bash
# Makes the packages from the programs in target/release: target/packages/*.deb, with debug symbols in packages of their
# own, and *.rpm where rpmbuild is installed. The same programs give the same bytes.
#
# PACKAGE_VERSION replaces the version, to try an upgrade. OUT replaces target/packages, and COMPRESSION xz.
# DEB_BUILD_OPTIONS=noautodbgsym makes no packages of debug symbols.
set -euo pipefail
umask 022
cd "$(dirname "$0")/.."
LAXITY="$PWD"
TARGET="$(realpath "${TARGET:-target}")"
export LAXITY TARGET
release="$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)"
version="${PACKAGE_VERSION:-$release}"
mkdir -p "${OUT:-$TARGET/packages}"
out="$(realpath "${OUT:-$TARGET/packages}")"
# All files in the packages have this time. An archive of the sources has no git history, so it takes the changelog's.
SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)}"
COMPRESSION="${COMPRESSION:-xz}"
export SOURCE_DATE_EPOCH COMPRESSION

# Debian 12 and current enterprise distributions have glibc 2.34 or newer.
tools/check-glibc.sh 2.34 "$TARGET/release/"{laxityd,laxity-coordinator,laxity,laxity-lab,laxity-engine} \
    "$TARGET/release/"lib{laxity,laxity_client,laxity_mooncake,laxity_nixl,nccl_net_laxity}.so \
    || { echo "packages: build on an older distribution, such as Debian 12" >&2; exit 1; }

rm -rf "$out/build" && mkdir "$out/build"
cp -r dist/debian "$out/build/debian"
cat >"$out/build/debian/changelog" <<END
laxity ($version) unstable; urgency=medium

  * CHANGELOG.md has what changed.

 -- Laxity maintainers <laxity@localhost>  $(date -u -R -d "@$SOURCE_DATE_EPOCH")
END
rm -f "$out"/*.{deb,rpm}
(cd "$out/build" && dpkg-buildpackage --build=binary --no-sign --no-check-builddeps >"$out/build.log" 2>&1) \
    || { tail -n 30 "$out/build.log" >&2; exit 1; }
rm -rf "$out/build" "$out"/*.{buildinfo,changes}

if command -v rpmbuild >/dev/null; then
    # RPM sorts a version with a tilde before the one without, as Debian does.
    rpmbuild -bb --quiet --define "_topdir $out/build" --define "_rpmdir $out" --define "release_version $version" \
        --define "_build_name_fmt %%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm" --define "_buildhost laxity" \
        --define "use_source_date_epoch_as_buildtime 1" --define "clamp_mtime_to_source_date_epoch 1" \
        --define "_binary_payload w9.gzdio" dist/laxity.spec >"$out/build.log" 2>&1 \
        || { tail -n 30 "$out/build.log" >&2; exit 1; }
else
    echo "packages: there is no rpmbuild, so no RPMs are made"
fi
rm -rf "$out/build"
ls -sh "$out" | grep -v '\.log$\|roots$\|^total'
