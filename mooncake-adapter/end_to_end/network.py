"""Two hosts on one machine: network namespaces, joined by a shaped link for data and an unshaped one for management.

    prefill  eth0 10.77.0.1 ── shaped both ways ── 10.77.0.2 eth0  decode
             mgmt 10.78.0.1 ─────────────────────  10.78.0.2 mgmt

Each end of the data link has the rate of its port and strict priority by DSCP; unmarked traffic comes before what can
wait, as in the lab (docs/lab.md), and for the same reasons queues don't drop and sockets have buffers of 64 KiB. All of it
ends with this process.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import time

from plan import Place

#: Set where the process has a network namespace of its own.
INSIDE = "LAXITY_END_TO_END_INSIDE"
#: Exit status where the kernel or the machine can't do this.
CANNOT = 75

#: DSCPs in strict priority, with unmarked traffic (0) where the lab has it: the daemon's default levels.
CLASSES = (46, 34, 26, 18, 0, 10, 8)
MTU, GSO_BYTES, BURST_BYTES, QUEUE_BYTES = 9000, 16 << 10, 20 << 10, 64 << 20
SOCKET_BYTES = 64 << 10

ADDRESSES = (("10.77.0.1", "10.78.0.1"), ("10.77.0.2", "10.78.0.2"))
DEVICE = "eth0"


def enter() -> None:
    """Goes on in a network namespace of its own, in a user namespace, too, where that is needed."""
    if os.environ.get(INSIDE):
        return
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    for program in ("unshare", "nsenter", "setpriv", "ip", "tc"):
        if shutil.which(program) is None:
            print(f"end_to_end: no {program} (Debian: util-linux, iproute2)", file=sys.stderr)
            sys.exit(CANNOT)
    for how in (["unshare", "--net"], ["unshare", "--net", "--user", "--map-root-user"]):
        if subprocess.run([*how, "true"], stderr=subprocess.DEVNULL, check=False).returncode == 0:
            os.environ[INSIDE] = "1"
            os.execvp(how[0], [*how, sys.executable, *sys.argv])
    print("end_to_end: the kernel allows this user no network namespaces", file=sys.stderr)
    sys.exit(CANNOT)


def _do(*command: str, text: str | None = None) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"end_to_end: {' '.join(command)}: {done.stderr.strip()}\n{text or ''}", file=sys.stderr)
        sys.exit(CANNOT)


def _shaping(rate_mbit: int) -> str:
    rate, bursts = f"{rate_mbit}mbit", f"burst {BURST_BYTES} cburst {BURST_BYTES}"
    unmarked = 0x10 + CLASSES.index(0)
    lines = [
        f"qdisc add dev {DEVICE} root handle 1: htb default {unmarked:x} r2q 1000",
        f"class add dev {DEVICE} parent 1: classid 1:1 htb rate {rate} ceil {rate} {bursts}",
    ]
    for priority, dscp in enumerate(CLASSES):
        minor = f"{0x10 + priority:x}"
        lines += [
            # Assured next to nothing and free to borrow all, HTB's classes are strict priorities.
            f"class add dev {DEVICE} parent 1:1 classid 1:{minor} htb rate 8kbit ceil {rate} "
            f"prio {priority} quantum {GSO_BYTES} {bursts}",
            f"qdisc add dev {DEVICE} parent 1:{minor} handle {minor}: bfifo limit {QUEUE_BYTES}",
        ]
        if dscp:
            lines.append(
                f"filter add dev {DEVICE} parent 1: protocol ip prio 1 u32 match ip dsfield "
                f"{dscp << 2:#04x} 0xfc flowid 1:{minor}"
            )
    lines.append(
        f"filter add dev {DEVICE} parent 1: protocol arp prio 2 u32 match u32 0 0 flowid 1:10"
    )
    return "\n".join(lines) + "\n"


class Network:
    """The two hosts. They end with this process, however it ends."""

    transport = "tcp"

    def __init__(self, rate_mbit: int) -> None:
        self._holders = [
            subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"])
            for _ in ADDRESSES
        ]
        ours = os.readlink("/proc/self/ns/net")
        for holder in self._holders:
            while os.readlink(f"/proc/{holder.pid}/ns/net") == ours:
                time.sleep(0.01)
        one, other = (str(holder.pid) for holder in self._holders)
        for name in (DEVICE, "mgmt"):
            _do("ip", "link", "add", name, "netns", one, "type", "veth", "peer", "name", name, "netns", other)
        self.warnings: list[str] = []
        for host, (data, management) in enumerate(ADDRESSES):
            link = f"link set {DEVICE} mtu {MTU} gso_max_size {GSO_BYTES} up\n"
            _do(
                *self.inside(host), "ip", "-batch", "-",
                text=f"link set lo up\n{link}link set mgmt up\naddr add {data}/24 dev {DEVICE}\n"
                f"addr add {management}/24 dev mgmt\nroute change 10.77.0.0/24 dev {DEVICE} src {data} "
                "initcwnd 32 initrwnd 32\n",
            )
            _do(*self.inside(host), "tc", "-batch", "-", text=_shaping(rate_mbit))
            self._buffers(host)

    def _buffers(self, host: int) -> None:
        sizes = f"4096 {SOCKET_BYTES} {SOCKET_BYTES}"
        script = f"echo {sizes} > /proc/sys/net/ipv4/tcp_wmem && echo {sizes} > /proc/sys/net/ipv4/tcp_rmem"
        done = subprocess.run(
            [*self.inside(host), "sh", "-c", script], stderr=subprocess.DEVNULL, check=False
        )
        if done.returncode:
            self.warnings.append(
                "the kernel refuses smaller socket buffers: not comparable with runs where it does not"
            )

    def inside(self, host: int) -> list[str]:
        """Before a command that is to run on the host."""
        namespace = f"--net=/proc/{self._holders[host].pid}/ns/net"
        return ["setpriv", "--pdeathsig", "KILL", "nsenter", namespace]

    def place(self, host: int) -> Place:
        data, management = ADDRESSES[host]
        return Place(engine=data, data=data, management=management, device="")

    def nic(self, host: int) -> str:
        return DEVICE

    def under_laxity(self, socket: pathlib.Path) -> list[str]:
        """Mooncake's TCP transport asks for permits in Python; nothing is preloaded."""
        return []

    def environment(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()
