#!/usr/bin/env bash
# tests/nccl/namespaces.sh N COMMAND...: runs COMMAND in N network namespaces of its own, hosts 10.77.0.1
# to 10.77.0.N on a bridge, at the same time. In its arguments {rank} and {ranks} are replaced; in its
# environment NCCL_SOCKET_IFNAME is the host's interface. Exit status 0 when all had that; 75 when
# the kernel allows no namespaces. For example
#   tests/nccl/namespaces.sh 4 nccl_check -p PLUGIN -r {rank} -n {ranks} -f "$(mktemp -d)" all_reduce_4
#   tests/nccl/namespaces.sh 2 bash -c 'case {rank} in 0) side=--listen ;; 1) side=--connect ;; esac
#       exec nccl_perf -p PLUGIN "$side" HANDLE'
set -euo pipefail

if [ "${NCCL_NAMESPACES:-}" != inside ]; then
    [ $# -ge 2 ] && [ "$1" -ge 2 ] && [ "$1" -le 8 ] || {
        echo "usage: $0 N COMMAND... (N is 2 to 8)" >&2
        exit 2
    }
    for program in unshare nsenter setpriv ip; do
        command -v "$program" >/dev/null 2>&1 || PATH="$PATH:/usr/sbin:/sbin"
        command -v "$program" >/dev/null 2>&1 || {
            echo "$0: no $program (Debian: util-linux, iproute2)" >&2
            exit 75
        }
    done
    enter=(unshare --net)
    if [ "$(id -u)" -ne 0 ] || ! unshare --net true 2>/dev/null; then
        enter=(unshare --net --user --map-root-user)
    fi
    "${enter[@]}" true 2>/dev/null || {
        echo "$0: the kernel allows this user no network namespaces" >&2
        exit 75
    }
    NCCL_NAMESPACES=inside exec "${enter[@]}" "$0" "$@"
fi

ranks=$1
shift
hosts=()
runs=()
trap 'kill "${runs[@]}" "${hosts[@]}" 2>/dev/null || true' EXIT

ip link add nccl-bridge type bridge
ip link set nccl-bridge up
for ((rank = 0; rank < ranks; rank++)); do
    # A process holds the namespace; it dies with this script.
    setpriv --pdeathsig KILL unshare --net sleep infinity &
    host=$!
    hosts+=("$host")
    until [ "$(readlink "/proc/$host/ns/net")" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
    ip link add "nccl$rank" type veth peer name eth0 netns "$host"
    ip link set "nccl$rank" master nccl-bridge up
    nsenter --net="/proc/$host/ns/net" ip link set lo up
    nsenter --net="/proc/$host/ns/net" ip address add "10.77.0.$((rank + 1))/24" dev eth0
    nsenter --net="/proc/$host/ns/net" ip link set eth0 up
done
for ((rank = 0; rank < ranks; rank++)); do
    words=("${@//\{rank\}/$rank}")
    words=("${words[@]//\{ranks\}/$ranks}")
    NCCL_SOCKET_IFNAME=eth0 setpriv --pdeathsig KILL \
        nsenter --net="/proc/${hosts[rank]}/ns/net" "${words[@]}" &
    runs+=("$!")
done
status=0
for run in "${runs[@]}"; do wait "$run" || status=1; done
exit "$status"
