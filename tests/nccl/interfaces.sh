#!/usr/bin/env bash
# tests/nccl/interfaces.sh NCCL_CHECK PLUGIN: which interfaces a plugin takes for what
# NCCL_SOCKET_IFNAME says (NCCL's rules: prefixes, = for whole names, ^ for all but those; without
# it, docker, loopback and virtual bridges last), tried with some that it makes in a network
# namespace of its own, and messages between two of them. Exit status 75: there can be none.
set -euo pipefail

check=$1 plugin=$2
PATH="$PATH:/usr/sbin:/sbin"
if [ "${NCCL_NAMESPACES:-}" != inside ]; then
    enter=(unshare --net)
    if [ "$(id -u)" -ne 0 ] || ! unshare --net true 2>/dev/null; then
        enter=(unshare --net --user --map-root-user)
    fi
    "${enter[@]}" ip link show lo >/dev/null 2>&1 || {
        echo "$0: no network namespaces, or no ip (Debian: iproute2)" >&2
        exit 75
    }
    NCCL_NAMESPACES=inside exec "${enter[@]}" "$0" "$@"
fi

ip link set lo up
index=10
pair() { # pair NAME ADDRESS NAME ADDRESS: two interfaces that are each other's cable
    ip link add "$1" index "$index" type veth peer name "$3" index "$((index + 1))"
    ip address add "$2" dev "$1"
    ip address add "$4" dev "$3"
    ip link set "$1" up
    ip link set "$3" up
    index=$((index + 2))
}
pair eth0 10.1.0.1/24 eth1 10.1.1.1/24
pair ens5 10.2.0.1/24 docker0 172.17.0.1/16
pair eth10 10.3.0.1/24 virbr0 192.168.122.1/24
ip link add eth7 index 30 type veth peer name down7 index 31 # not running
ip address add 10.4.0.1/24 dev eth7

status=0
try() { # try NCCL_SOCKET_IFNAME EXPECTED [OPTION]...
    local wanted=$1 expected=$2
    shift 2
    if [ "$wanted" = unset ]; then unset NCCL_SOCKET_IFNAME; else export NCCL_SOCKET_IFNAME=$wanted; fi
    echo "NCCL_SOCKET_IFNAME=$wanted"
    NCCL_CHECK_DEVICES=$expected "$check" --plugin "$plugin" --version 12 "$@" || status=1
}
try unset eth0,eth1,ens5,eth10 interfaces
try eth eth0,eth1,eth10 interfaces
try =eth1 eth1 interfaces
try ens5,eth1 eth1,ens5,eth10 interfaces
try =eth1,ens eth1 interfaces
try ^eth,lo ens5,docker0,virbr0 interfaces
try ^=eth0,lo,docker,virbr eth1,ens5,docker0,eth10,virbr0 interfaces
try lo lo interfaces
try docker docker0 interfaces
try eth eth0,eth1,eth10 --device 0 --peer 1 sizes in_order
try eth eth0,eth1,eth10 --device 2 --peer 0 sizes storm
ip address flush dev eth0
ip address add fd00::1/64 dev eth0 nodad
NCCL_SOCKET_FAMILY=AF_INET6 try =eth0 eth0 interfaces sizes storm strangers
exit "$status"
