#!/usr/bin/env bash
# Copies what the wheel has beside Python into the package, stripped: bundle.sh FOLDER. FOLDER has the built programs.
set -euo pipefail
from="$(realpath "$1")"
cd "$(dirname "$0")/python/laxity"
mkdir -p bundled
# bundle BUILT [NAME]: other builds may read the folder meanwhile, so each file appears whole.
bundle() {
    strip -o "bundled/.$1.$$" "$from/$1"
    mv "bundled/.$1.$$" "bundled/${2:-$1}"
}
bundle laxity
bundle liblaxity.so
bundle liblaxity_mooncake.so
bundle liblaxity_nixl.so
bundle libnccl_net_laxity.so libnccl-net-laxity.so
