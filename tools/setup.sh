#!/usr/bin/env bash
# Installs what the build and the lab (`base`), the benchmarks (`bench`), the SoftRoCE lab (`verbs`),
# the coordinator's tests (`cluster`), the Python package (`python`), Debian packages (`packages`), the Helm chart
# (`kubernetes`), and the container image (`image`) need from Debian. The SoftRoCE lab's kernel is not installed:
# `laxity-lab` downloads it. Does nothing when all is there; asks nothing; works twice in a row.
set -euo pipefail

declare -A wanted=()
lists=
need() { # need PROGRAM PACKAGE
    command -v "$1" >/dev/null 2>&1 || wanted[$2]=1
}

need cc gcc
need make make
need ip iproute2
need tc iproute2
if [ "${1:-base}" = bench ]; then
    need valgrind valgrind
    need iperf3 iperf3
    need python3 python3
fi
if [ "${1:-base}" = cluster ]; then
    need etcd etcd-server
    # The tests also accept another distribution's browser.
    command -v google-chrome >/dev/null 2>&1 || need chromium chromium
fi
if [ "${1:-base}" = python ]; then
    need python3 python3
    # Debian has these modules in a package of their own.
    python3 -c 'import ensurepip, venv' 2>/dev/null || wanted[python3-venv]=1
fi
if [ "${1:-base}" = packages ]; then
    need dh debhelper
    need rpmbuild rpm
    # The test of the packages needs these.
    need mmdebstrap mmdebstrap
    need systemd-nspawn systemd-container
fi
if [ "${1:-base}" = kubernetes ]; then
    need python3 python3
    python3 -c 'import ensurepip, venv' 2>/dev/null || wanted[python3-venv]=1
    need promtool prometheus
    # For `kubectl kustomize`.
    need kubectl kubernetes-client
fi
if [ "${1:-base}" = image ]; then
    need mmdebstrap mmdebstrap
    need umoci umoci
    need runc runc
fi
if [ "${1:-base}" = verbs ]; then
    need qemu-system-x86_64 qemu-system-x86
    need depmod kmod
    need ibv_devices ibverbs-utils
    need ib_write_bw perftest
    need rping rdmacm-utils
    need ucx_perftest ucx-utils
    need fi_info libfabric-bin
    need tcpdump tcpdump
    need fi_pingpong libfabric-bin
    need valgrind valgrind
    need python3 python3
    need_package() { # need_package PACKAGE: for what has no program of its own
        dpkg-query -W -f '${Status}' "$1" 2>/dev/null | grep -q ' installed$' || wanted[$1]=1
    }
    # Only a static busybox works, because the guest has no libraries before it mounts the host's files.
    for package in busybox-static rdma-core ibverbs-providers libibverbs-dev librdmacm-dev python3-venv; do
        need_package "$package"
    done
    # The kernel's package can be found only with package lists that are not older than the archive's kernel.
    apt-cache show linux-image-amd64 >/dev/null 2>&1 || lists=1
fi
[ -e /usr/include/stdio.h ] || wanted[libc6-dev]=1

if ! command -v cargo >/dev/null 2>&1; then
    echo "setup: cargo is missing; install Rust (the rust-version in Cargo.toml or newer) first" >&2
    exit 1
fi
[ ${#wanted[@]} -eq 0 ] && [ -z "$lists" ] && exit 0

# Two steps, because `${!wanted[*]:-…}` is an indirection, not a list of keys with a default.
packages="${!wanted[*]}"
echo "setup: installing ${packages:-nothing, getting package lists}"
run=()
if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
        run=(sudo -n)
    else
        echo "setup: not root and no password-free sudo; install these yourself: $packages" >&2
        exit 1
    fi
fi
export DEBIAN_FRONTEND=noninteractive
"${run[@]}" apt-get -q update
[ ${#wanted[@]} -eq 0 ] && exit 0
"${run[@]}" apt-get -q install -y --no-install-recommends "${!wanted[@]}"
