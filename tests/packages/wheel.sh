#!/bin/bash
# What a user of Python does with the wheel, on a machine without a compiler and without a network. The daemon is from
# the Debian package, which is unpacked and not installed, so that nothing but the wheel can have the libraries.
set -eEuo pipefail
cd /packages
. ./operator.sh

if command -v cc || command -v gcc; then false; fi
python3 -m venv clean >install.log 2>&1
clean/bin/pip install --no-index --find-links ./new laxity >>install.log 2>&1
laxity() { clean/bin/python -m laxity "$@"; }
own="$(realpath "$(laxity libraries)")"
case "$own" in /packages/clean/*) ;; *) false ;; esac

laxity run -- true 2>without
grep -q "unscheduled" without
laxity run -- grep -q "$own/liblaxity.so" /proc/self/maps
[ "$(laxity run -- sh -c 'exit 7' 2>/dev/null || echo $?)" = 7 ]
laxity doctor >doctor || true
grep -q "^ok *library.*$own/liblaxity.so" doctor
clean/bin/python -c "import ctypes; ctypes.CDLL('$own/libnccl-net-laxity.so').ncclNetPlugin_v8"
echo "installed: it runs a program under the library of the wheel, with a warning that there is no daemon"

dpkg-deb -x ./new/laxity_*.deb daemon
mkdir -p /run/laxity
daemon/usr/sbin/laxityd --config daemon/etc/laxity/laxityd.toml >laxityd.log 2>&1 &
mode_is observe
laxity doctor >doctor
laxity run --require -- clean/bin/python -m laxity example-job --seconds 2
sees " MiB observed, 0 B bypassed" laxity status
clean/bin/python - <<'PYTHON'
import laxity

ticket = laxity.submit(laxity.Stage.P2D, 1000)
grant = ticket.wait()
ticket.complete(grant.bytes)
stats = laxity.stats()
assert grant.bytes == 1000 and stats["attached"] and stats["observed_bytes"] == 1000, stats
PYTHON
echo "under a daemon: it counts what a job and what Python sends"
echo passed
