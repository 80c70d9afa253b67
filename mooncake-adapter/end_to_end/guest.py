"""Two hosts in the SoftRoCE lab's guest: two RDMA devices of one machine, with a shaped router between their addresses
(docs/lab.md). Mooncake's RDMA transport is scheduled by the preload library there, work request by work request."""

from __future__ import annotations

import os
import pathlib
import sys

from plan import Place

LOOPBACK = "127.0.0.1"


class Guest:
    """The hosts of `laxity lab exec`."""

    transport = "rdma"

    def __init__(self, binaries: pathlib.Path, preload: str) -> None:
        if os.environ.get("LAXITY_LAB") != "1":
            sys.exit("end_to_end: --rdma is for `laxity lab exec --rate-mbit N -- …`")
        self.warnings: list[str] = []
        self._binaries, self._preload = binaries, preload

    def inside(self, host: int) -> list[str]:
        return []

    def place(self, host: int) -> Place:
        # Only the Transfer Engine's handshake uses its address; its data go where the device is.
        data, device = os.environ[f"LAXITY_LAB_ADDR{host}"], self.nic(host)
        return Place(engine=LOOPBACK, data=data, management=LOOPBACK, device=device)

    def nic(self, host: int) -> str:
        return os.environ[f"LAXITY_LAB_DEV{host}"]

    def under_laxity(self, socket: pathlib.Path) -> list[str]:
        """Before a command that is to run under a daemon."""
        run = [str(self._binaries / "laxity"), "run", "--require", "--profile", "mooncake"]
        return [*run, "--library", str(self._binaries / "liblaxity.so"), "--socket", str(socket), "--"]

    def environment(self) -> dict[str, str]:
        preload = {"LD_PRELOAD": self._preload} if self._preload else {}
        return {"MC_GID_INDEX": os.environ["LAXITY_LAB_GID"], **preload}

    def close(self) -> None:
        """The guest ends by itself."""
