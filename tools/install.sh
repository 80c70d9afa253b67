#!/usr/bin/env bash
# Puts the release binaries, the preload and client libraries, the unit and the manual where Debian keeps them.
# DESTDIR moves everything below another root, as packagers expect.
set -euo pipefail
cd "$(dirname "$0")/.."

from="${TARGET:-target}/release"
to="${DESTDIR:-}/usr/local"
put() { install -D -m "$1" "$2" "$3" && echo "  $3"; }

keep() { # an operator's file stays as it is; ours goes beside it if they differ
    if [ ! -e "$3" ] || cmp -s "$2" "$3"; then
        put "$1" "$2" "$3"
    else
        put "$1" "$2" "$3.dist" && echo "    ($3 has been edited, and stays)"
    fi
}

echo "installing:"
put 755 "$from/laxityd" "$to/sbin/laxityd"
put 755 "$from/laxity" "$to/bin/laxity"
put 644 "$from/liblaxity_client.so" "$to/lib/liblaxity_client.so"
put 644 "$from/liblaxity.so" "$to/lib/liblaxity.so"
put 644 "$from/liblaxity_client.a" "$to/lib/liblaxity_client.a"
put 644 shim/client/include/laxity.h "$to/include/laxity.h"
put 644 dist/laxityd.service "${DESTDIR:-}/etc/systemd/system/laxityd.service"
put 644 dist/laxityd.toml "$to/share/doc/laxity/laxityd.toml"
for profile in shim/profile/profiles/*.toml; do
    keep 644 "$profile" "${DESTDIR:-}/etc/laxity/profiles/${profile##*/}"
done

"$from/laxity" man --out "$to/share/man/man1"
mkdir -p "$to/share/bash-completion/completions" "$to/share/zsh/site-functions" \
    "$to/share/fish/vendor_completions.d"
"$from/laxity" completions bash >"$to/share/bash-completion/completions/laxity"
"$from/laxity" completions zsh >"$to/share/zsh/site-functions/_laxity"
"$from/laxity" completions fish >"$to/share/fish/vendor_completions.d/laxity.fish"
echo "  manual pages and completions below $to/share"

if [ -z "${DESTDIR:-}" ]; then
    ldconfig
    command -v systemctl >/dev/null 2>&1 && systemctl daemon-reload 2>/dev/null || true
    echo "next: systemctl enable --now laxityd"
fi
